//! JSON patch (RFC 6902), with bounds on what a small patch can make of an object.

use json_patch::{PatchErrorKind, PatchOperation};
use serde_json::Value;

use crate::status::Status;

/// Operations in one patch; as in Kubernetes.
const OPERATIONS_MAX: usize = 10_000;
/// The bytes that all `copy` operations of one patch may add together; copies of copies would double without end.
const COPIED_BYTES_MAX: usize = 3 << 20;

pub(super) fn apply(object: &mut Value, patch: &json_patch::Patch) -> Result<(), Status> {
    if patch.0.len() > OPERATIONS_MAX {
        return Err(Status::bad_request(format!(
            "The allowed maximum operations in a JSON patch is {OPERATIONS_MAX}, got {}",
            patch.0.len()
        )));
    }
    let mut copied_bytes = 0;
    for operation in &patch.0 {
        if let PatchOperation::Copy(copy) = operation {
            let source = object.pointer(copy.from.as_str());
            copied_bytes += source.map_or(0, |value| value.to_string().len());
            if copied_bytes > COPIED_BYTES_MAX {
                return Err(Status::too_large(COPIED_BYTES_MAX));
            }
        }
        json_patch::patch(object, std::slice::from_ref(operation)).map_err(
            |error| match error.kind {
                // Kubernetes does not say more than this either.
                PatchErrorKind::TestFailed
                | PatchErrorKind::InvalidFromPointer
                | PatchErrorKind::InvalidPointer
                | PatchErrorKind::CannotMoveInsideItself => Status::unprocessable(
                    "the server rejected our request due to an error in our request".to_owned(),
                ),
                _ => Status::bad_request(error.to_string()),
            },
        )?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    pub(in crate::patch) fn tree() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            "[a-c]{0,2}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 3, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::Array),
                proptest::collection::btree_map("[a-c]", inner, 0..3)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    fn operations() -> impl Strategy<Value = Vec<Value>> {
        let path = || "(/([a-c]|[0-2]|-)){0,3}";
        let operation =
            (0..6usize, path(), path(), tree()).prop_map(|(which, path, from, value)| {
                let name = ["add", "remove", "replace", "move", "copy", "test"][which];
                json!({ "op": name, "path": path, "from": from, "value": value })
            });
        proptest::collection::vec(operation, 0..4)
    }

    /// An independent reading of RFC 6902: take the document apart along the path and put it together again.
    fn model(document: &Value, operation: &Value) -> Option<Value> {
        let path = steps(operation["path"].as_str()?);
        let from = steps(operation["from"].as_str()?);
        let value = &operation["value"];
        match operation["op"].as_str()? {
            "add" => add(document, &path, value),
            "remove" => remove(document, &path),
            "replace" => {
                find(document, &path)?;
                if path.is_empty() {
                    Some(value.clone())
                } else {
                    add(&remove(document, &path)?, &path, value)
                }
            }
            "move" => {
                let moved = find(document, &from)?;
                if path.len() > from.len() && path.starts_with(&from) {
                    return None;
                }
                if path == from {
                    Some(document.clone())
                } else {
                    add(&remove(document, &from)?, &path, &moved)
                }
            }
            "copy" => add(document, &path, &find(document, &from)?),
            "test" => (find(document, &path)? == *value).then(|| document.clone()),
            _ => None,
        }
    }

    fn steps(path: &str) -> Vec<String> {
        path.split('/').skip(1).map(str::to_owned).collect()
    }

    fn find(document: &Value, path: &[String]) -> Option<Value> {
        match path {
            [] => Some(document.clone()),
            [first, rest @ ..] => match document {
                Value::Object(map) => find(map.get(first)?, rest),
                Value::Array(list) => find(list.get(first.parse::<usize>().ok()?)?, rest),
                _ => None,
            },
        }
    }

    fn add(document: &Value, path: &[String], value: &Value) -> Option<Value> {
        let mut result = document.clone();
        match (path, &mut result) {
            ([], _) => return Some(value.clone()),
            ([last], Value::Object(map)) => {
                map.insert(last.clone(), value.clone());
            }
            ([last], Value::Array(list)) => {
                let index = if last == "-" {
                    list.len()
                } else {
                    last.parse().ok()?
                };
                if index > list.len() {
                    return None;
                }
                list.insert(index, value.clone());
            }
            ([first, rest @ ..], Value::Object(map)) => {
                let child = map.get_mut(first)?;
                *child = add(child, rest, value)?;
            }
            ([first, rest @ ..], Value::Array(list)) => {
                let child = list.get_mut(first.parse::<usize>().ok()?)?;
                *child = add(child, rest, value)?;
            }
            _ => return None,
        }
        Some(result)
    }

    fn remove(document: &Value, path: &[String]) -> Option<Value> {
        let mut result = document.clone();
        match (path, &mut result) {
            ([last], Value::Object(map)) => {
                map.remove(last)?;
            }
            ([last], Value::Array(list)) => {
                let index: usize = last.parse().ok()?;
                if index >= list.len() {
                    return None;
                }
                list.remove(index);
            }
            ([first, rest @ ..], Value::Object(map)) => {
                let child = map.get_mut(first)?;
                *child = remove(child, rest)?;
            }
            ([first, rest @ ..], Value::Array(list)) => {
                let child = list.get_mut(first.parse::<usize>().ok()?)?;
                *child = remove(child, rest)?;
            }
            _ => return None,
        }
        Some(result)
    }

    proptest! {
        #[test]
        fn a_patch_does_what_the_rfc_says(document in tree(), operations in operations()) {
            // Fails if a patch panics, or gives another result than an independent reading of the RFC.
            let removes_root = |operation: &Value| {
                let whole = |field: &str| operation[field] == "";
                (operation["op"] == "remove" && whole("path")) || (operation["op"] == "move" && whole("from"))
            };
            prop_assume!(!operations.iter().any(removes_root));
            let expected = operations
                .iter()
                .try_fold(document.clone(), |document, operation| model(&document, operation));
            let patch: json_patch::Patch = serde_json::from_value(Value::Array(operations)).unwrap();
            let mut patched = document;
            let result = apply(&mut patched, &patch);
            prop_assert_eq!(result.is_ok().then_some(patched), expected);
        }
    }

    #[test]
    fn copies_of_copies_are_bounded() {
        // Fails if a short patch can fill the memory.
        let operations: Vec<Value> = (0..60)
            .map(|index| json!({ "op": "copy", "from": "", "path": format!("/{index}") }))
            .collect();
        let patch: json_patch::Patch = serde_json::from_value(Value::Array(operations)).unwrap();
        assert_eq!(
            apply(&mut json!({ "a": "b" }), &patch)
                .unwrap_err()
                .code
                .as_u16(),
            413
        );
    }
}
