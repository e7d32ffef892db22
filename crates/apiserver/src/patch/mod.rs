//! The four patch formats.

mod json;
mod merge;
mod strategic;

use serde_json::{Map, Value};

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
    /// Whether the patch may change or read a field of the metadata; false only if it certainly does not.
    pub(crate) fn touches(&self, field: &str) -> bool {
        match self {
            Patch::Json(_) | Patch::Apply { .. } => true,
            Patch::Merge(patch) | Patch::Strategic(patch) => {
                let Value::Object(patch) = patch else {
                    return true;
                };
                let directed =
                    |map: &Map<String, Value>| map.keys().any(|key| key.starts_with('$'));
                match patch.get("metadata") {
                    None => directed(patch),
                    Some(Value::Object(metadata)) => {
                        metadata.contains_key(field) || directed(metadata) || directed(patch)
                    }
                    Some(_) => true,
                }
            }
        }
    }

    /// Applies the patch to `object`. Server-side apply is not applied here: it goes by ownership.
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    // Fails if a patch that names the field, replaces what holds it, or gives directions is taken for harmless.
    #[test]
    fn a_patch_touches_what_it_names_replaces_or_directs() {
        let touches = |patch: Value| Patch::Strategic(patch).touches("managedFields");
        assert!(touches(json!({ "metadata": { "managedFields": [] } })));
        assert!(touches(json!({ "metadata": null })));
        assert!(touches(json!({ "metadata": { "$patch": "replace" } })));
        assert!(touches(json!({ "$patch": "delete" })));
        assert!(touches(json!(null)));
        assert!(!touches(
            json!({ "metadata": { "labels": {} }, "spec": {} })
        ));
        assert!(!touches(json!({ "spec": { "$patch": "replace" } })));
        let empty = json_patch::Patch(Vec::new());
        assert!(Patch::Json(empty).touches("managedFields"));
    }
}
