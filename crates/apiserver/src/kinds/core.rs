//! The plain kinds of the core group.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, Secret};
use serde_json::{Value, json};

use super::{Names, at, built_in, columns, fill, immutable, quantity, text, typed};
use crate::kind::{Change, FieldError, Kind, Naming, Origin};
use crate::meta;

/// The label by which a namespace can be selected by name.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";
/// All values of a ConfigMap or Secret together.
const DATA_BYTES_MAX: usize = 1 << 20;
const KEY: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')";

/// Adds a finalizer to a new object.
pub(super) fn protect(object: &mut Value, finalizer: &str) {
    let mut finalizers: Vec<String> = meta::finalizers(object)
        .into_iter()
        .map(str::to_owned)
        .collect();
    if !finalizers.iter().any(|have| have == finalizer) {
        finalizers.push(finalizer.to_owned());
        meta::set_finalizers(object, &finalizers);
    }
}

pub(super) fn namespace() -> Kind {
    let names = Names {
        plural: "namespaces",
        singular: "namespace",
        short: &["ns"],
    };
    Kind {
        status: true,
        naming: Naming::Label,
        default: |namespace| {
            let name = meta::text(namespace, "name").to_owned();
            if !name.is_empty() {
                let labels = meta::child(meta::map(namespace), "labels");
                labels.insert(NAME_LABEL.to_owned(), json!(name));
            }
            fill(namespace, "spec", "finalizers", json!(["kubernetes"]));
            fill(namespace, "status", "phase", "Active");
        },
        selectable_fields: &["status.phase"],
        keyed_lists: &[("status.conditions", &["type"])],
        ..built_in::<Namespace>(names, columns::NAMESPACE)
    }
}

pub(super) fn node() -> Kind {
    let names = Names {
        plural: "nodes",
        singular: "node",
        short: &["no"],
    };
    Kind {
        status: true,
        normalise: |value| {
            let mut node = typed::<Node>(value)?;
            quantity::canonicalise(&mut node, &["/status/capacity", "/status/allocatable"])?;
            Ok(node)
        },
        selectable_fields: &["spec.unschedulable"],
        keyed_lists: &[
            ("status.conditions", &["type"]),
            ("status.addresses", &["type"]),
        ],
        origin: Origin::BuiltIn {
            generation: false,
            status_at_creation: true,
        },
        ..built_in::<Node>(names, columns::NODE)
    }
}

pub(super) fn config_map() -> Kind {
    let names = Names {
        plural: "configmaps",
        singular: "configmap",
        short: &["cm"],
    };
    Kind {
        namespaced: true,
        validate: check_data,
        ..built_in::<ConfigMap>(names, columns::CONFIGMAP)
    }
}

pub(super) fn secret() -> Kind {
    let names = Names {
        plural: "secrets",
        singular: "secret",
        short: &[],
    };
    Kind {
        namespaced: true,
        default: |secret| {
            fold_string_data(secret);
            let there = meta::as_map(secret).entry("type").or_insert(Value::Null);
            if there.is_null() {
                *there = json!("Opaque");
            }
        },
        validate: |change| {
            let mut errors = check_data(change);
            errors.extend(immutable(change, "/type", "type", "field is immutable"));
            errors
        },
        selectable_fields: &["type"],
        ..built_in::<Secret>(names, columns::SECRET)
    }
}

/// `stringData` is for writing only: it is encoded into `data`.
fn fold_string_data(secret: &mut Value) {
    let Some(Value::Object(plain)) = meta::as_map(secret).remove("stringData") else {
        return;
    };
    let data = meta::child(meta::as_map(secret), "data");
    for (key, value) in plain {
        let bytes = ByteString(value.as_str().unwrap_or_default().as_bytes().to_vec());
        data.insert(key, json!(bytes));
    }
}

fn check_data(change: Change<'_>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut bytes = 0;
    for field in ["data", "binaryData"] {
        let map = at(change.new, &format!("/{field}")).and_then(Value::as_object);
        for (key, value) in map.into_iter().flatten() {
            bytes += value.as_str().map_or(0, str::len);
            let fits =
                |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            if key.is_empty() || key == "." || key == ".." || !key.bytes().all(fits) {
                errors.push(FieldError::invalid(
                    &format!("{field}[{key}]"),
                    &json!(key),
                    KEY,
                ));
            }
        }
    }
    if bytes > DATA_BYTES_MAX {
        errors.push(FieldError::too_long("", DATA_BYTES_MAX));
    }
    if change
        .old
        .is_some_and(|old| at(old, "/immutable") == Some(&json!(true)))
    {
        for field in ["immutable", "data", "binaryData"] {
            let why = "field is immutable when `immutable` is set";
            errors.extend(immutable(change, &format!("/{field}"), field, why));
        }
    }
    errors
}

pub(super) fn event() -> Kind {
    let names = Names {
        plural: "events",
        singular: "event",
        short: &["ev"],
    };
    Kind {
        namespaced: true,
        validate: check_event,
        selectable_fields: &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        atomic_maps: &["involvedObject", "related"],
        ..built_in::<Event>(names, columns::EVENT)
    }
}

/// An event is in the namespace of its object; events about objects without a namespace are in `default`.
fn check_event(change: Change<'_>) -> Vec<FieldError> {
    let own = meta::text(change.new, "namespace");
    let about = text(change.new, "/involvedObject/namespace");
    if about == own || (about.is_empty() && matches!(own, "default" | "kube-system")) {
        return Vec::new();
    }
    vec![FieldError::invalid(
        "involvedObject.namespace",
        &json!(about),
        "does not match event.namespace",
    )]
}
