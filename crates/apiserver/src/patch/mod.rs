//! The four ways to say what shall change.

mod json;
mod merge;
mod strategic;

use serde_json::Value;

use crate::kind::{Kind, Origin};
use crate::status::Status;

/// A patch as it came, ready to be laid over the object that it finds.
#[derive(Clone, Debug)]
pub(crate) enum Patch {
    /// RFC 6902.
    Json(json_patch::Patch),
    /// RFC 7396.
    Merge(Value),
    /// Kubernetes' own: merges lists by key.
    Strategic(Value),
    /// Server-side apply: the fields that the applier wants.
    Apply {
        /// The configuration.
        configuration: Value,
        /// Whether to take fields from other managers.
        force: bool,
    },
}

impl Patch {
    /// Lays the patch over `object`. Server-side apply is not laid over: it goes by ownership.
    pub(crate) fn apply(&self, kind: &Kind, object: &mut Value) -> Result<(), Status> {
        match self {
            Patch::Json(patch) => json::apply(object, patch),
            Patch::Merge(patch) => {
                merge::apply(object, patch, 0);
                Ok(())
            }
            Patch::Strategic(_) if kind.origin == Origin::Custom => {
                Err(Status::unsupported_media_type(&[
                    "application/json-patch+json",
                    "application/merge-patch+json",
                    "application/apply-patch+yaml",
                ]))
            }
            Patch::Strategic(patch) => strategic::apply(kind, object, patch),
            Patch::Apply { .. } => Err(Status::internal("an applied configuration is not a patch")),
        }
    }
}
