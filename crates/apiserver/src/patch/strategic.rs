//! Strategic merge patch: a merge patch that merges keyed lists entry by entry, and has directives.
//!
//! `$patch: delete|replace|merge`, `$retainKeys`, `$setElementOrder/<list>` and `$deleteFromPrimitiveList/<list>`.

use serde_json::{Map, Value};

use crate::kind::Kind;
use crate::managed::walk::{ListType, Shape, join};
use crate::status::Status;

const DIRECTIVE: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const ORDER: &str = "$setElementOrder/";
const DELETE_VALUES: &str = "$deleteFromPrimitiveList/";

pub(super) fn apply(kind: &Kind, object: &mut Value, patch: &Value) -> Result<(), Status> {
    let Value::Object(patch) = patch else {
        return Err(Status::bad_request(
            "error decoding patch: a strategic merge patch is an object",
        ));
    };
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let Value::Object(map) = object else {
        return Ok(());
    };
    merge_map(
        Shape {
            kind,
            owns_maps: false,
        },
        "",
        map,
        patch,
    )
}

fn merge_map(
    shape: Shape<'_>,
    path: &str,
    target: &mut Map<String, Value>,
    patch: &Map<String, Value>,
) -> Result<(), Status> {
    match patch
        .get(DIRECTIVE)
        .map(|value| value.as_str().unwrap_or_default())
    {
        None | Some("merge") => {}
        Some("replace") => {
            *target = plain(patch);
            return Ok(());
        }
        Some("delete") => {
            target.clear();
            return Ok(());
        }
        Some(other) => return Err(unknown_directive(other)),
    }
    if let Some(keep) = patch.get(RETAIN_KEYS) {
        let keep: Vec<&str> = keep
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        target.retain(|field, _| keep.contains(&field.as_str()));
    }
    for (field, value) in patch {
        if let Some(list) = field.strip_prefix(DELETE_VALUES) {
            let gone = value.as_array().map(Vec::as_slice).unwrap_or_default();
            if let Some(Value::Array(values)) = target.get_mut(list) {
                values.retain(|have| !gone.contains(have));
            }
        } else if !field.starts_with('$') {
            merge_field(shape, &join(path, field), target, field, value)?;
        }
    }
    for (field, order) in patch {
        if let (Some(list), Some(order)) = (field.strip_prefix(ORDER), order.as_array())
            && let Some(Value::Array(entries)) = target.get_mut(list)
        {
            let at = join(path, list);
            reorder(shape.list(&at), entries, order);
        }
    }
    Ok(())
}

fn merge_field(
    shape: Shape<'_>,
    path: &str,
    target: &mut Map<String, Value>,
    field: &str,
    patch: &Value,
) -> Result<(), Status> {
    match patch {
        Value::Null => {
            target.remove(field);
        }
        Value::Object(map) => {
            if map
                .get(DIRECTIVE)
                .is_some_and(|directive| directive == "delete")
            {
                target.remove(field);
                return Ok(());
            }
            let inner = target.entry(field.to_owned()).or_insert(Value::Null);
            if !inner.is_object() {
                *inner = Value::Object(Map::new());
            }
            if let Value::Object(inner) = inner {
                merge_map(shape, path, inner, map)?;
            }
        }
        Value::Array(patch) => {
            let list = target.entry(field.to_owned()).or_insert(Value::Null);
            let mut entries = match list.take() {
                Value::Array(entries) => entries,
                _ => Vec::new(),
            };
            merge_list(shape, path, &mut entries, patch)?;
            // Kubernetes omits a list that has lost its last element.
            if entries.is_empty() && !patch.is_empty() {
                target.remove(field);
            } else {
                *list = Value::Array(entries);
            }
        }
        scalar => {
            target.insert(field.to_owned(), scalar.clone());
        }
    }
    Ok(())
}

fn merge_list(
    shape: Shape<'_>,
    path: &str,
    entries: &mut Vec<Value>,
    patch: &[Value],
) -> Result<(), Status> {
    let is_directive =
        |entry: &Value, which: &str| entry.get(DIRECTIVE).is_some_and(|value| value == which);
    let replaces = |entry: &Value| {
        is_directive(entry, "replace") && entry.as_object().is_some_and(|map| map.len() == 1)
    };
    let keys = match shape.list(path) {
        ListType::Keyed(keys) => keys,
        ListType::Set => {
            for value in patch {
                if !entries.contains(value) {
                    entries.push(value.clone());
                }
            }
            return Ok(());
        }
        ListType::Atomic => {
            *entries = patch
                .iter()
                .filter(|entry| !replaces(entry))
                .cloned()
                .collect();
            return Ok(());
        }
    };
    if patch.iter().any(replaces) {
        *entries = patch
            .iter()
            .filter(|entry| !replaces(entry))
            .cloned()
            .collect();
        return Ok(());
    }
    // Strategic merge goes by one key, where server-side apply goes by all of them.
    let key = keys.first().copied().unwrap_or("name");
    for change in patch {
        let Some(wanted) = change.get(key) else {
            return Err(Status::bad_request(format!(
                "error decoding patch: map: {change} does not contain declared merge key: {key}"
            )));
        };
        let found = entries
            .iter()
            .position(|entry| entry.get(key) == Some(wanted));
        if is_directive(change, "delete") {
            entries.retain(|entry| entry.get(key) != Some(wanted));
            continue;
        }
        let Value::Object(change) = change else {
            continue;
        };
        match found.map(|index| &mut entries[index]) {
            Some(Value::Object(entry)) => merge_map(shape, path, entry, change)?,
            _ => {
                let mut entry = Map::new();
                merge_map(shape, path, &mut entry, change)?;
                entries.push(Value::Object(entry));
            }
        }
    }
    Ok(())
}

/// Puts the entries that the order names into that order; the others keep their places after them.
fn reorder(list: ListType, entries: &mut [Value], order: &[Value]) {
    let rank = |entry: &Value| {
        let named = |wanted: &Value| match list {
            ListType::Keyed([key, ..]) => {
                let wanted = wanted.get(*key);
                wanted.is_some() && entry.get(*key) == wanted
            }
            _ => entry == wanted,
        };
        order.iter().position(named).unwrap_or(order.len())
    };
    entries.sort_by_key(rank);
}

/// The fields of a patch that are not directives.
fn plain(patch: &Map<String, Value>) -> Map<String, Value> {
    patch
        .iter()
        .filter(|(field, _)| !field.starts_with('$'))
        .map(|(field, value)| (field.clone(), value.clone()))
        .collect()
}

fn unknown_directive(directive: &str) -> Status {
    Status::bad_request(format!(
        "error decoding patch: Unknown patch type found: {directive}"
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::json::tests::tree;
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn pods() -> &'static Kind {
        crate::kinds::all()
            .iter()
            .find(|kind| kind.plural == "pods")
            .unwrap()
    }

    fn patched(mut object: Value, patch: Value) -> Value {
        apply(pods(), &mut object, &patch).unwrap();
        object
    }

    #[test]
    fn keyed_lists_merge_by_key_and_other_lists_are_replaced() {
        // Fails if a patch of one container drops the others, or if arguments are merged.
        let object = json!({ "spec": { "containers": [
            { "name": "a", "image": "1", "args": ["x"] }, { "name": "b", "image": "2" },
        ] } });
        let patch = json!({ "spec": { "containers": [{ "name": "a", "image": "3", "args": ["y", "z"] }] } });
        assert_eq!(
            patched(object, patch),
            json!({ "spec": { "containers": [
                { "name": "a", "image": "3", "args": ["y", "z"] }, { "name": "b", "image": "2" },
            ] } })
        );
    }

    #[test]
    fn directives_do_what_they_say() {
        // Fails if one of the directives is taken for a field, or does nothing.
        let object = json!({
            "metadata": { "finalizers": ["a/a", "b/b"], "labels": { "x": "1", "y": "2" } },
            "spec": { "containers": [{ "name": "a" }, { "name": "b" }, { "name": "c" }], "volumes": [{ "name": "v", "emptyDir": {} }] },
        });
        let result = patched(
            object.clone(),
            json!({
                "metadata": { "$deleteFromPrimitiveList/finalizers": ["a/a"], "labels": { "$patch": "replace", "z": "3" } },
                "spec": {
                    "$setElementOrder/containers": [{ "name": "c" }, { "name": "a" }],
                    "containers": [{ "name": "b", "$patch": "delete" }],
                    "volumes": [{ "name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": { "path": "/" } }],
                },
            }),
        );
        assert_eq!(
            result,
            json!({
                "metadata": { "finalizers": ["b/b"], "labels": { "z": "3" } },
                "spec": { "containers": [{ "name": "c" }, { "name": "a" }], "volumes": [{ "name": "v", "hostPath": { "path": "/" } }] },
            })
        );
        let result = patched(
            object,
            json!({ "metadata": { "labels": { "$patch": "delete" } },
            "spec": { "containers": [{ "$patch": "replace" }, { "name": "z" }] } }),
        );
        assert_eq!(result["spec"]["containers"], json!([{ "name": "z" }]));
        assert_eq!(result["metadata"].get("labels"), None);
    }

    proptest! {
        #[test]
        fn no_patch_makes_the_server_panic(object in tree(), patch in tree()) {
            // Fails if a patch of an unexpected shape can bring the server down.
            let mut object = json!({ "spec": { "containers": object } });
            let _ = apply(pods(), &mut object, &json!({ "spec": { "containers": patch } }));
        }
    }
}
