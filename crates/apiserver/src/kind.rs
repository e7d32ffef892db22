//! What the server knows of a kind: one row of a table.
//!
//! Every verb is generic over [`Kind`]. A new kind is a new row (in `kinds/`), never a new verb.

use std::fmt;

use serde_json::Value;

use crate::store::memory::Id;
use crate::store::{Shared, Txn};
use crate::users::User;

/// One kind that the server stores: its names, its scope, and the functions that only it needs.
pub struct Kind {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// API version, without the group.
    pub version: &'static str,
    /// The kind as it stands in manifests.
    pub kind: &'static str,
    /// The plural as it stands in paths.
    pub plural: &'static str,
    /// The singular that kubectl accepts.
    pub singular: &'static str,
    /// Short names that kubectl accepts.
    pub short_names: &'static [&'static str],
    /// Categories such as `all` or `trellis`.
    pub categories: &'static [&'static str],
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// Whether there is a `/status` subresource (then writes to the main resource leave status alone).
    pub status: bool,
    /// Whether there is an `/approval` subresource.
    pub approval: bool,
    /// What a write through one part leaves as it was, beyond spec and status.
    pub keep: fn(Part, &Value, &mut Value),
    /// Writes into a new object who made it.
    pub sign: fn(&mut Value, &User),
    /// Decodes into the typed Kubernetes object and back: wrong types are refused, unknown fields are dropped.
    pub normalise: fn(Value) -> Result<Value, serde_json::Error>,
    /// The JSON schema of the type, for OpenAPI.
    pub schema: fn(&mut schemars::SchemaGenerator) -> schemars::Schema,
    /// Fills in the defaults that a cluster fills in.
    pub default: fn(&mut Value),
    /// What is wrong with a new object, or with a change of an old one.
    pub validate: fn(Change<'_>) -> Vec<FieldError>,
    /// Fields, besides `metadata.name` and `metadata.namespace`, by which a list may be selected.
    pub selectable_fields: &'static [&'static str],
    /// Columns of the printed table.
    pub columns: &'static [Column],
    /// Lists inside objects that merge by key: (path with dots, keys of an entry).
    pub keyed_lists: &'static [(&'static str, &'static [&'static str])],
    /// Maps inside objects that have one owner as a whole (path with dots).
    pub atomic_maps: &'static [&'static str],
    /// Changes that a cluster's admission plugins make to a new object.
    pub admit: fn(&mut Value, &Peers<'_>),
    /// What admission refuses with 403, although the object is valid.
    pub forbid: fn(Change<'_>) -> Option<String>,
    /// Whether the kind is one of a cluster's own, or one that a CustomResourceDefinition declares there.
    pub origin: Origin,
    /// How the names of its objects are written.
    pub naming: Naming,
    /// Fills in the answer of a review: it is answered at once, and nothing is stored.
    pub answer: Option<fn(&mut Value, &Asker<'_>)>,
}

/// The part of an object that a request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All but what the other parts have.
    Main,
    /// `/status`
    Status,
    /// `/approval`
    Approval,
}

impl Part {
    /// Its name at the end of a path, and in `managedFields`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Part::Main => "",
            Part::Status => "status",
            Part::Approval => "approval",
        }
    }
}

/// Where a kind comes from; Kubernetes treats the two differently in small ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Compiled into kube-apiserver, which does not count generations of most of them.
    BuiltIn {
        /// Whether `metadata.generation` is kept.
        generation: bool,
        /// Whether a status may be given at creation.
        status_at_creation: bool,
    },
    /// Declared by a CustomResourceDefinition: counts generations, has no strategic merge patch, needs a
    /// resourceVersion in a PUT, and takes no metadata through the status subresource.
    Custom,
}

/// Which names an object may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// RFC 1123 subdomain.
    Subdomain,
    /// RFC 1123 label.
    Label,
}

impl Kind {
    /// `group/version`, or the version alone in the core group.
    pub fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Whether `metadata.generation` is kept.
    pub(crate) fn counts_generations(&self) -> bool {
        matches!(
            self.origin,
            Origin::Custom
                | Origin::BuiltIn {
                    generation: true,
                    ..
                }
        )
    }

    /// Whether a status may be given at creation.
    pub(crate) fn keeps_status_at_creation(&self) -> bool {
        !self.status
            || matches!(
                self.origin,
                Origin::BuiltIn {
                    status_at_creation: true,
                    ..
                }
            )
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.api_version(), self.kind)
    }
}

/// Who asks for a review, and what is stored.
pub struct Asker<'a> {
    pub(crate) user: &'a User,
    pub(crate) shared: &'a Shared,
}

impl Asker<'_> {
    /// One object: (group, plural, namespace or empty, name).
    pub fn get(&self, group: &str, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let is_it = |kind: &Kind| kind.group == group && kind.plural == plural;
        let kind = self.shared.kinds.iter().position(is_it)?;
        let state = self.shared.read();
        state
            .get(&Id::new(kind, namespace, name))
            .map(|stored| stored.value())
    }
}

/// The other stored objects, for admission.
pub struct Peers<'a> {
    pub(crate) txn: &'a Txn<'a>,
}

impl Peers<'_> {
    /// One object: (plural, namespace or empty, name).
    pub fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let kind = self.txn.kind_index(plural)?;
        self.txn
            .get(&Id::new(kind, namespace, name))
            .map(|stored| stored.value())
    }

    /// All objects of a cluster-scoped kind.
    pub fn list(&self, plural: &str) -> Vec<Value> {
        let Some(kind) = self.txn.kind_index(plural) else {
            return Vec::new();
        };
        self.txn
            .list(kind, None)
            .into_iter()
            .map(|(_, stored)| stored.value())
            .collect()
    }
}

/// A write that is about to happen.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The object as it is stored, if it is.
    pub old: Option<&'a Value>,
    /// The object as it would be stored.
    pub new: &'a Value,
    /// Through which part the write came.
    pub part: Part,
    /// Reads another stored object: (plural, namespace or empty, name).
    pub lookup: &'a dyn Fn(&str, &str, &str) -> Option<Value>,
}

/// One thing that is wrong with one field, in Kubernetes' words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Machine-readable reason: `FieldValueRequired`, `FieldValueInvalid`, `FieldValueForbidden`, ...
    pub reason: &'static str,
    /// Path of the field.
    pub field: String,
    /// The sentence, as kube-apiserver words it.
    pub message: String,
}

impl FieldError {
    /// The field is missing.
    pub fn required(field: &str, why: &str) -> FieldError {
        let message = if why.is_empty() {
            "Required value".to_owned()
        } else {
            format!("Required value: {why}")
        };
        FieldError {
            reason: "FieldValueRequired",
            field: field.to_owned(),
            message,
        }
    }

    /// The field has a value that is not allowed.
    pub fn invalid(field: &str, value: &Value, why: &str) -> FieldError {
        let message = format!("Invalid value: {value}: {why}");
        FieldError {
            reason: "FieldValueInvalid",
            field: field.to_owned(),
            message,
        }
    }

    /// The field may not be set, or may not change.
    pub fn forbidden(field: &str, why: &str) -> FieldError {
        FieldError {
            reason: "FieldValueForbidden",
            field: field.to_owned(),
            message: format!("Forbidden: {why}"),
        }
    }

    /// The field has a value that is not one of a few.
    pub fn unsupported(field: &str, value: &Value, supported: &[&str]) -> FieldError {
        let list: Vec<String> = supported
            .iter()
            .map(|one| Value::from(*one).to_string())
            .collect();
        let message = format!(
            "Unsupported value: {value}: supported values: {}",
            list.join(", ")
        );
        FieldError {
            reason: "FieldValueNotSupported",
            field: field.to_owned(),
            message,
        }
    }

    /// The field is longer than it may be.
    pub fn too_long(field: &str, bytes_max: usize) -> FieldError {
        let message = format!("Too long: may not be more than {bytes_max} bytes");
        FieldError {
            reason: "FieldValueTooLong",
            field: field.to_owned(),
            message,
        }
    }
}

/// One column of the printed table.
pub struct Column {
    /// Heading.
    pub name: &'static str,
    /// OpenAPI type: `string`, `integer`, `date`.
    pub r#type: &'static str,
    /// 0 is always shown, 1 only with `-o wide`.
    pub priority: u8,
    /// One line about the column.
    pub description: &'static str,
    /// The cell of one object, at the time at which the table is printed (for ages).
    pub cell: fn(&Value, jiff::Timestamp) -> Value,
}
