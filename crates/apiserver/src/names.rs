//! Which names, labels and annotations Kubernetes accepts, and how it words its refusals.

use serde_json::Value;

use crate::kind::{FieldError, Kind, Naming};
use crate::meta;

const SUBDOMAIN_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;
/// All annotations of an object together.
const ANNOTATIONS_BYTES_MAX: usize = 256 << 10;

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const NAME_PART: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const QUALIFIED: &str = "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')";

/// What is wrong with the metadata of an object.
pub(crate) fn check_metadata(kind: &Kind, object: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let name = meta::text(object, "name");
    if name.is_empty() {
        errors.push(FieldError::required(
            "metadata.name",
            "name or generateName is required",
        ));
    } else {
        let problems = match kind.naming {
            Naming::Subdomain => subdomain(name),
            Naming::Label => label(name),
        };
        errors.extend(
            problems
                .iter()
                .map(|why| FieldError::invalid("metadata.name", &Value::from(name), why)),
        );
    }
    for (key, value) in entries(object, "labels") {
        for why in qualified_name(key) {
            errors.push(FieldError::invalid(
                "metadata.labels",
                &Value::from(key),
                &why,
            ));
        }
        for why in label_value(value) {
            errors.push(FieldError::invalid(
                "metadata.labels",
                &Value::from(value),
                &why,
            ));
        }
    }
    let mut annotation_bytes = 0;
    for (key, value) in entries(object, "annotations") {
        // An annotation's key may have capital letters in its prefix.
        for why in qualified_name(&key.to_lowercase()) {
            errors.push(FieldError::invalid(
                "metadata.annotations",
                &Value::from(key),
                &why,
            ));
        }
        annotation_bytes += key.len() + value.len();
    }
    if annotation_bytes > ANNOTATIONS_BYTES_MAX {
        errors.push(FieldError::too_long(
            "metadata.annotations",
            ANNOTATIONS_BYTES_MAX,
        ));
    }
    for finalizer in meta::finalizers(object) {
        for why in qualified_name(finalizer) {
            errors.push(FieldError::invalid(
                "metadata.finalizers",
                &Value::from(finalizer),
                &why,
            ));
        }
    }
    errors.extend(check_owners(object));
    errors
}

fn check_owners(object: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let owners = meta::get(object, "ownerReferences").and_then(Value::as_array);
    for (index, owner) in owners.into_iter().flatten().enumerate() {
        for (field, why) in [
            ("apiVersion", "version must not be empty"),
            ("kind", "must not be empty"),
            ("name", "must not be empty"),
            ("uid", "must not be empty"),
        ] {
            if owner
                .get(field)
                .and_then(Value::as_str)
                .is_none_or(str::is_empty)
            {
                let path = format!("metadata.ownerReferences[{index}].{field}");
                errors.push(FieldError::invalid(&path, &Value::from(""), why));
            }
        }
    }
    errors
}

fn entries<'a>(object: &'a Value, field: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let map = meta::get(object, field).and_then(Value::as_object);
    map.into_iter()
        .flatten()
        .map(|(key, value)| (key.as_str(), value.as_str().unwrap_or_default()))
}

/// What is wrong with an RFC 1123 subdomain.
pub(crate) fn subdomain(text: &str) -> Vec<String> {
    let mut problems = too_long(text, SUBDOMAIN_BYTES_MAX);
    if !text.split('.').all(is_dns_label) {
        problems.push(SUBDOMAIN.to_owned());
    }
    problems
}

/// What is wrong with an RFC 1123 label.
pub(crate) fn label(text: &str) -> Vec<String> {
    let mut problems = too_long(text, LABEL_BYTES_MAX);
    if !is_dns_label(text) {
        problems.push(LABEL.to_owned());
    }
    problems
}

/// What is wrong with the value of a label.
pub(crate) fn label_value(text: &str) -> Vec<String> {
    let mut problems = too_long(text, LABEL_BYTES_MAX);
    if !text.is_empty() && !is_name_part(text) {
        problems.push(LABEL_VALUE.to_owned());
    }
    problems
}

/// What is wrong with `prefix/name` or `name`.
pub(crate) fn qualified_name(text: &str) -> Vec<String> {
    let (prefix, name) = match text.split_once('/') {
        None => (None, text),
        Some((_, rest)) if rest.contains('/') => return vec![QUALIFIED.to_owned()],
        Some((prefix, name)) => (Some(prefix), name),
    };
    let mut problems = Vec::new();
    match prefix {
        Some("") => problems.push("prefix part must be non-empty".to_owned()),
        Some(prefix) => problems.extend(
            subdomain(prefix)
                .into_iter()
                .map(|why| format!("prefix part {why}")),
        ),
        None => {}
    }
    if name.is_empty() {
        problems.push("name part must be non-empty".to_owned());
    } else {
        problems.extend(
            too_long(name, LABEL_BYTES_MAX)
                .into_iter()
                .map(|why| format!("name part {why}")),
        );
    }
    if !is_name_part(name) {
        problems.push(NAME_PART.to_owned());
    }
    problems
}

fn too_long(text: &str, bytes_max: usize) -> Vec<String> {
    if text.len() > bytes_max {
        vec![format!("must be no more than {bytes_max} bytes")]
    } else {
        Vec::new()
    }
}

fn is_dns_label(text: &str) -> bool {
    let edge = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    framed(text, edge, |byte| edge(byte) || byte == b'-')
}

fn is_name_part(text: &str) -> bool {
    let edge = |byte: u8| byte.is_ascii_alphanumeric();
    framed(text, edge, |byte| {
        edge(byte) || matches!(byte, b'-' | b'_' | b'.')
    })
}

fn framed(text: &str, edge: impl Fn(u8) -> bool, inner: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(first), Some(last)) if edge(*first) && edge(*last))
        && bytes.iter().all(|byte| inner(*byte))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_rfc_1123() {
        // Fails if a name that Kubernetes accepts is refused, or the other way round.
        for good in ["a", "a-b", "1.2", "a.b-c.d"] {
            assert!(subdomain(good).is_empty(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a..b", "a_b", &"a".repeat(254)] {
            assert!(!subdomain(bad).is_empty(), "{bad}");
        }
        assert!(!label("a.b").is_empty());
        assert!(qualified_name("example.com/My_Name.x").is_empty());
        for bad in ["", "/a", "a/", "a/b/c", "Ex.com/a", "a b"] {
            assert!(!qualified_name(bad).is_empty(), "{bad}");
        }
        assert!(label_value("").is_empty());
        assert!(!label_value("a b").is_empty());
    }
}
