//! JSON merge patch (RFC 7396).

use serde_json::{Map, Value};

/// Nesting beyond which a patch replaces; the body parser stops at the same depth.
const DEPTH_MAX: usize = 128;

pub(super) fn apply(target: &mut Value, patch: &Value, depth: usize) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else {
        return;
    };
    for (field, value) in patch {
        if value.is_null() {
            target.remove(field);
        } else if depth < DEPTH_MAX {
            apply(
                target.entry(field.clone()).or_insert(Value::Null),
                value,
                depth + 1,
            );
        } else {
            target.insert(field.clone(), value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::json::tests::tree;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_merge_patch_does_what_the_rfc_says(target in tree(), patch in tree()) {
            // Fails if a merge gives another result than an independent implementation of the RFC.
            let mut expected = target.clone();
            json_patch::merge(&mut expected, &patch);
            let mut merged = target;
            apply(&mut merged, &patch, 0);
            prop_assert_eq!(merged, expected);
        }
    }
}
