//! Objects in Kubernetes' protobuf, as far as kubectl sends them.
//!
//! From 1.32 on, `kubectl create namespace`, `configmap`, `secret`, `kubectl auth can-i` and `kubectl certificate` send
//! protobuf and do not fall back to JSON. So these kinds can be read as protobuf. Every other kind is refused, and so is a field that is
//! not in the tables below: nothing is dropped silently.

use k8s_openapi::ByteString;
use serde_json::{Map, Value, json};

/// What stands before every object.
const MAGIC: &[u8] = b"k8s\0";
/// How deep the messages of the tables are nested.
const DEPTH_MAX: usize = 4;

/// One field of a message: its number, its name in JSON, and what it holds.
type Field = (u64, &'static str, Holds);

/// What a field holds.
#[derive(Clone, Copy)]
enum Holds {
    Text,
    Bytes,
    Number,
    Flag,
    /// A message that may be empty and says nothing else that a client decides.
    Ignored,
    Message(&'static [Field]),
    Messages(&'static [Field]),
    Texts,
    MapOfText,
    MapOfBytes,
}

const METADATA: &[Field] = &[
    (1, "name", Holds::Text),
    (2, "generateName", Holds::Text),
    (3, "namespace", Holds::Text),
    (4, "selfLink", Holds::Text),
    (5, "uid", Holds::Text),
    (6, "resourceVersion", Holds::Text),
    (7, "generation", Holds::Ignored),
    (8, "creationTimestamp", Holds::Ignored),
    (11, "labels", Holds::MapOfText),
    (12, "annotations", Holds::MapOfText),
    (14, "finalizers", Holds::Texts),
    // The server keeps them.
    (17, "managedFields", Holds::Ignored),
];

const NAMESPACE: &[Field] = &[
    (1, "metadata", Holds::Message(METADATA)),
    (
        2,
        "spec",
        Holds::Message(&[(1, "finalizers", Holds::Texts)]),
    ),
    (3, "status", Holds::Message(&[(1, "phase", Holds::Text)])),
];

const CONFIG_MAP: &[Field] = &[
    (1, "metadata", Holds::Message(METADATA)),
    (2, "data", Holds::MapOfText),
    (3, "binaryData", Holds::MapOfBytes),
    (4, "immutable", Holds::Flag),
];

const SECRET: &[Field] = &[
    (1, "metadata", Holds::Message(METADATA)),
    (2, "data", Holds::MapOfBytes),
    (3, "type", Holds::Text),
    (4, "stringData", Holds::MapOfText),
    (5, "immutable", Holds::Flag),
];

const SIGNING_REQUEST: &[Field] = &[
    (1, "metadata", Holds::Message(METADATA)),
    (
        2,
        "spec",
        Holds::Message(&[
            (1, "request", Holds::Bytes),
            (2, "username", Holds::Text),
            (3, "uid", Holds::Text),
            (4, "groups", Holds::Texts),
            (5, "usages", Holds::Texts),
            (7, "signerName", Holds::Text),
            (8, "expirationSeconds", Holds::Number),
        ]),
    ),
    (
        3,
        "status",
        Holds::Message(&[
            (
                1,
                "conditions",
                Holds::Messages(&[
                    (1, "type", Holds::Text),
                    (2, "reason", Holds::Text),
                    (3, "message", Holds::Text),
                    // The server has a clock of its own.
                    (4, "lastUpdateTime", Holds::Ignored),
                    (5, "lastTransitionTime", Holds::Ignored),
                    (6, "status", Holds::Text),
                ]),
            ),
            (2, "certificate", Holds::Bytes),
        ]),
    ),
];

const ACCESS_REVIEW: &[Field] = &[
    (1, "metadata", Holds::Message(METADATA)),
    (
        2,
        "spec",
        Holds::Message(&[
            (
                1,
                "resourceAttributes",
                Holds::Message(&[
                    (1, "namespace", Holds::Text),
                    (2, "verb", Holds::Text),
                    (3, "group", Holds::Text),
                    (4, "version", Holds::Text),
                    (5, "resource", Holds::Text),
                    (6, "subresource", Holds::Text),
                    (7, "name", Holds::Text),
                ]),
            ),
            (
                2,
                "nonResourceAttributes",
                Holds::Message(&[(1, "path", Holds::Text), (2, "verb", Holds::Text)]),
            ),
        ]),
    ),
    (3, "status", Holds::Ignored),
];

const IDENTITY_REVIEW: &[Field] = &[
    (1, "metadata", Holds::Message(METADATA)),
    (2, "status", Holds::Ignored),
];

const RULES_REVIEW: &[Field] = &[
    (1, "metadata", Holds::Message(METADATA)),
    (2, "spec", Holds::Message(&[(1, "namespace", Holds::Text)])),
    (3, "status", Holds::Ignored),
];

/// The object in JSON, or `None` where it is broken or of a kind that is not read.
pub(crate) fn decode(body: &[u8]) -> Option<Value> {
    const TYPE: &[Field] = &[(1, "apiVersion", Holds::Text), (2, "kind", Holds::Text)];
    let envelope = body.strip_prefix(MAGIC)?;
    let (mut r#type, mut raw) = (Value::Null, &[][..]);
    for (number, wire) in Fields(envelope).collect::<Option<Vec<_>>>()? {
        match (number, wire) {
            (1, Wire::Bytes(bytes)) => r#type = message(TYPE, bytes, 1)?,
            (2, Wire::Bytes(bytes)) => raw = bytes,
            // Content encoding and type are empty for what is not wrapped twice.
            (3 | 4, Wire::Bytes([])) => {}
            _ => return None,
        }
    }
    let fields = match (r#type["apiVersion"].as_str()?, r#type["kind"].as_str()?) {
        ("v1", "Namespace") => NAMESPACE,
        ("v1", "ConfigMap") => CONFIG_MAP,
        ("v1", "Secret") => SECRET,
        ("certificates.k8s.io/v1", "CertificateSigningRequest") => SIGNING_REQUEST,
        ("authentication.k8s.io/v1", "SelfSubjectReview") => IDENTITY_REVIEW,
        ("authorization.k8s.io/v1", "SelfSubjectAccessReview") => ACCESS_REVIEW,
        ("authorization.k8s.io/v1", "SelfSubjectRulesReview") => RULES_REVIEW,
        _ => return None,
    };
    let mut object = message(fields, raw, DEPTH_MAX)?;
    object["apiVersion"] = r#type["apiVersion"].take();
    object["kind"] = r#type["kind"].take();
    Some(object)
}

fn message(fields: &'static [Field], bytes: &[u8], depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    let mut object = Map::new();
    for field in Fields(bytes) {
        let (number, wire) = field?;
        let (_, name, holds) = fields.iter().find(|(known, ..)| *known == number)?;
        let name = (*name).to_owned();
        match (holds, wire) {
            (Holds::Ignored, _) => {}
            (Holds::Flag, Wire::Number(flag)) => _ = object.insert(name, json!(flag != 0)),
            // Go writes empty strings, and JSON leaves them out.
            (Holds::Text, Wire::Bytes([])) => {}
            (Holds::Text, Wire::Bytes(bytes)) => _ = object.insert(name, text(bytes)?),
            (Holds::Number, Wire::Number(number)) => _ = object.insert(name, json!(number)),
            (Holds::Bytes, Wire::Bytes(bytes)) => {
                object.insert(name, json!(ByteString(bytes.to_vec())));
            }
            (Holds::Messages(fields), Wire::Bytes(bytes)) => {
                let message = message(fields, bytes, depth)?;
                let list = object.entry(name).or_insert_with(|| json!([]));
                list.as_array_mut()?.push(message);
            }
            (Holds::Message(fields), Wire::Bytes(bytes)) => {
                object.insert(name, message(fields, bytes, depth)?);
            }
            (Holds::Texts, Wire::Bytes(bytes)) => {
                object
                    .entry(name)
                    .or_insert_with(|| json!([]))
                    .as_array_mut()?
                    .push(text(bytes)?);
            }
            (Holds::MapOfText | Holds::MapOfBytes, Wire::Bytes(bytes)) => {
                let (key, value) = entry(bytes)?;
                let value = match holds {
                    Holds::MapOfText => text(value)?,
                    _ => json!(ByteString(value.to_vec())),
                };
                let map = object
                    .entry(name)
                    .or_insert_with(|| json!({}))
                    .as_object_mut()?;
                map.insert(key, value);
            }
            _ => return None,
        }
    }
    Some(Value::Object(object))
}

/// One entry of a map: a key (1) and a value (2), each of which may be left out when it is empty.
fn entry(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (mut key, mut value) = (&[][..], &[][..]);
    for field in Fields(bytes) {
        match field? {
            (1, Wire::Bytes(bytes)) => key = bytes,
            (2, Wire::Bytes(bytes)) => value = bytes,
            _ => return None,
        }
    }
    Some((String::from_utf8(key.to_vec()).ok()?, value))
}

fn text(bytes: &[u8]) -> Option<Value> {
    std::str::from_utf8(bytes).ok().map(Value::from)
}

/// What stands on the wire for one field.
enum Wire<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message; an item is `None`, and the last one, where the message is broken.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let (first, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn field(&mut self) -> Option<(u64, Wire<'a>)> {
        let tag = self.varint()?;
        let wire = match tag & 7 {
            0 => Wire::Number(self.varint()?),
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                let (bytes, rest) = self.0.split_at_checked(length)?;
                self.0 = rest;
                Wire::Bytes(bytes)
            }
            _ => return None,
        };
        Some((tag >> 3, wire))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Wire<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `kubectl create secret generic s --from-literal=k=v`, as it is on the wire.
    const A_SECRET: &[u8] =
        b"k8s\x00\x0a\x0c\x0a\x02v1\x12\x06Secret\x12\x1b\x0a\x09\x0a\x01s\x12\x00\x1a\x00B\x00\x12\x06\x0a\x01k\x12\x01v\x1a\x06Opaque\x1a\x00\x22\x00";

    #[test]
    fn what_kubectl_sends_is_read() {
        // Fails when a field number is wrong, or when data is not base64 in JSON.
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "type": "Opaque", "data": {"k": "dg=="},
        });
        assert_eq!(decode(A_SECRET), Some(secret));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_fall(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0..A_SECRET.len()) {
            // Fails by a panic, when a length or a number from a client is believed.
            let _ = decode(&[MAGIC, &bytes].concat());
            let _ = decode(&[&A_SECRET[..cut], &bytes].concat());
        }
    }
}
