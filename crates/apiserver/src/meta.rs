//! Reading and writing `metadata` of an object that is a JSON tree.

use serde_json::{Map, Value};

/// A field of the metadata.
pub(crate) fn get<'a>(object: &'a Value, field: &str) -> Option<&'a Value> {
    object
        .get("metadata")?
        .get(field)
        .filter(|value| !value.is_null())
}

/// A text field of the metadata; empty if it is not there.
pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    get(object, field)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// The metadata, made if there is none.
pub(crate) fn map(object: &mut Value) -> &mut Map<String, Value> {
    child(as_map(object), "metadata")
}

/// Sets a field of the metadata.
pub(crate) fn set(object: &mut Value, field: &str, value: Value) {
    map(object).insert(field.to_owned(), value);
}

/// Takes a field out of the metadata.
pub(crate) fn remove(object: &mut Value, field: &str) -> Option<Value> {
    map(object).remove(field)
}

/// Sets a field to what it is in `from`, or removes it if `from` has none.
pub(crate) fn copy(object: &mut Value, from: &Value, field: &str) {
    match get(from, field) {
        Some(value) => set(object, field, value.clone()),
        None => {
            remove(object, field);
        }
    }
}

/// The finalizers.
pub(crate) fn finalizers(object: &Value) -> Vec<&str> {
    let list = get(object, "finalizers").and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// Sets the finalizers; none at all leaves no field.
pub(crate) fn set_finalizers(object: &mut Value, finalizers: &[String]) {
    if finalizers.is_empty() {
        remove(object, "finalizers");
    } else {
        set(object, "finalizers", Value::from(finalizers.to_vec()));
    }
}

/// The tree as a map, made into one if it is none.
pub(crate) fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("it has just been made an object"),
    }
}

/// A field as a map, made if it is none.
pub(crate) fn child<'a>(
    map: &'a mut Map<String, Value>,
    field: &str,
) -> &'a mut Map<String, Value> {
    as_map(map.entry(field.to_owned()).or_insert(Value::Null))
}

/// The time as Kubernetes writes it: whole seconds, UTC.
pub(crate) fn time(now: jiff::Timestamp) -> String {
    let whole = jiff::Timestamp::from_second(now.as_second()).unwrap_or(now);
    whole.to_string()
}
