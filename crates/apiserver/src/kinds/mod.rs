//! The kinds that the server stores: one row each.

pub(crate) mod columns;
pub(crate) mod earlier;

mod certificate;
mod claim;
mod core;
mod pod;
mod quantity;
mod review;
mod storage;
mod trellis;
mod volume;

use std::sync::LazyLock;

use k8s_openapi::Resource;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::kind::{Change, Column, FieldError, Kind, Naming, Origin};

/// All kinds. An object's kind is known by its index here, so the order is fixed for a run, not for the file.
pub(crate) fn all() -> &'static [Kind] {
    static KINDS: LazyLock<Vec<Kind>> = LazyLock::new(|| {
        vec![
            core::namespace(),
            core::node(),
            claim::row(),
            volume::row(),
            pod::row(),
            core::config_map(),
            core::secret(),
            core::event(),
            storage::storage_class(),
            storage::lease(),
            certificate::signing_request(),
            review::identity(),
            review::access(),
            review::rules(),
            trellis::pool(),
            trellis::volume(),
            trellis::target(),
            trellis::replica(),
            trellis::attachment(),
        ]
    });
    &KINDS
}

/// The names of a kind.
struct Names {
    plural: &'static str,
    singular: &'static str,
    short: &'static [&'static str],
}

/// A row of one of Kubernetes' own kinds, with nothing special about it.
fn built_in<T>(names: Names, columns: &'static [Column]) -> Kind
where
    T: Resource + Serialize + DeserializeOwned + JsonSchema,
{
    let Names {
        plural,
        singular,
        short,
    } = names;
    Kind {
        group: T::GROUP,
        version: T::VERSION,
        kind: T::KIND,
        plural,
        singular,
        short_names: short,
        categories: &[],
        namespaced: false,
        status: false,
        approval: false,
        keep: |_, _, _| {},
        sign: |_, _| {},
        normalise: typed::<T>,
        schema: T::json_schema,
        default: |_| {},
        validate: |_| Vec::new(),
        selectable_fields: &[],
        columns,
        keyed_lists: &[],
        atomic_maps: &[],
        admit: |_, _| {},
        forbid: |_| None,
        origin: Origin::BuiltIn {
            generation: false,
            status_at_creation: false,
        },
        naming: Naming::Subdomain,
        answer: None,
    }
}

/// Decodes into the typed object and back.
fn typed<T: Serialize + DeserializeOwned>(value: Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(serde_json::from_value::<T>(value)?)
}

/// A field somewhere below an object; `null` counts as absent.
fn at<'a>(object: &'a Value, pointer: &str) -> Option<&'a Value> {
    object.pointer(pointer).filter(|value| !value.is_null())
}

/// A text somewhere below an object; empty if it is not there.
fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    at(object, pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// A list of texts somewhere below an object.
fn texts<'a>(object: &'a Value, pointer: &str) -> Vec<&'a str> {
    let list = at(object, pointer).and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// Sets a field of a map of the object, if it is not set.
fn fill(object: &mut Value, map: &str, field: &str, value: impl Into<Value>) {
    let map = crate::meta::child(crate::meta::as_map(object), map);
    let there = map.entry(field.to_owned()).or_insert(Value::Null);
    if there.is_null() {
        *there = value.into();
    }
}

const ACCESS_MODES: [&str; 4] = [
    "ReadOnlyMany",
    "ReadWriteMany",
    "ReadWriteOnce",
    "ReadWriteOncePod",
];
const VOLUME_MODES: [&str; 2] = ["Block", "Filesystem"];

/// What is wrong with access modes, once there are some.
fn check_access_modes(object: &Value) -> Vec<FieldError> {
    let modes = texts(object, "/spec/accessModes");
    let unsupported = modes.iter().filter(|mode| !ACCESS_MODES.contains(mode));
    let mut errors: Vec<FieldError> = unsupported
        .map(|mode| FieldError::unsupported("spec.accessModes", &Value::from(*mode), &ACCESS_MODES))
        .collect();
    if modes.len() > 1 && modes.contains(&"ReadWriteOncePod") {
        let why = "may not use ReadWriteOncePod with other access modes";
        errors.push(FieldError::forbidden("spec.accessModes", why));
    }
    errors
}

fn check_volume_mode(object: &Value) -> Option<FieldError> {
    let mode = text(object, "/spec/volumeMode");
    (!mode.is_empty() && !VOLUME_MODES.contains(&mode))
        .then(|| FieldError::unsupported("spec.volumeMode", &Value::from(mode), &VOLUME_MODES))
}

/// Refuses a change of a field.
fn immutable(change: Change<'_>, pointer: &str, field: &str, why: &str) -> Option<FieldError> {
    let old = change.old?;
    (at(old, pointer) != at(change.new, pointer)).then(|| FieldError::forbidden(field, why))
}
