//! OpenAPI: the schemas of the kinds. kubectl uses them to explain kinds, validate manifests and build patches.
//!
//! Version 3 is one document per group version, behind an index with a hash for each. Version 2 is one document for
//! everything, as JSON and as protobuf: kubectl before 1.27 reads only that. A document is built when a client first
//! asks for it, and kept as bytes, so a machine without kubectl never pays for it.

mod paths;
mod protobuf;
mod schemas;
mod v2;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use serde_json::{Value, json};

use crate::kind::Kind;

const JSON: &str = "application/json";
const V2_PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// The media type and the bytes of the OpenAPI document at a path, or `None` if there is none.
pub fn respond(kinds: &'static [Kind], path: &str, accept: &str) -> Option<(&'static str, Bytes)> {
    let path = path.trim_end_matches('/');
    match path {
        "/openapi/v2" if wants_protobuf(accept) => Some((
            V2_PROTOBUF,
            cached(kinds, V2_PROTOBUF, || protobuf::encode(&v2_document(kinds))),
        )),
        "/openapi/v2" => Some((
            JSON,
            cached(kinds, path, || v2_document(kinds).to_string().into_bytes()),
        )),
        "/openapi/v3" => Some((
            JSON,
            cached(kinds, path, || index(kinds).to_string().into_bytes()),
        )),
        _ => {
            let wanted = path.strip_prefix("/openapi/v3/")?;
            let (group, version) = group_versions(kinds)
                .into_iter()
                .find(|(group, version)| group_version_path(group, version) == wanted)?;
            Some((JSON, v3_bytes(kinds, group, version)))
        }
    }
}

/// client-go has asked for the same encoding under several names (`@v1.0+protobuf`, `.v1.0+protobuf`, ...).
fn wants_protobuf(accept: &str) -> bool {
    let media_type = |range: &str| {
        range
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let first = accept.split(',').map(media_type).find(|media_type| {
        matches!(media_type.as_str(), JSON | "*/*") || media_type.contains("proto-openapi.spec.v2")
    });
    first.is_some_and(|media_type| media_type.ends_with("protobuf"))
}

/// The bytes of a document, built at most once for each table of kinds.
///
/// Only paths of existing documents get here, so the map stays as small as the table.
fn cached(kinds: &'static [Kind], name: &str, build: impl FnOnce() -> Vec<u8>) -> Bytes {
    static DOCUMENTS: Mutex<BTreeMap<(usize, String), Bytes>> = Mutex::new(BTreeMap::new());
    let key = (kinds.as_ptr().addr(), name.to_owned());
    let found = DOCUMENTS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&key)
        .cloned();
    // Built without the lock: the index needs the documents that it points to.
    found.unwrap_or_else(|| {
        let built = Bytes::from(build());
        DOCUMENTS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(key)
            .or_insert(built)
            .clone()
    })
}

fn v3_bytes(kinds: &'static [Kind], group: &str, version: &str) -> Bytes {
    let path = format!("/openapi/v3/{}", group_version_path(group, version));
    cached(kinds, &path, || {
        v3_document(kinds, group, version).to_string().into_bytes()
    })
}

/// Clients keep a document as long as its hash stays the same.
fn index(kinds: &'static [Kind]) -> Value {
    let paths: serde_json::Map<String, Value> = group_versions(kinds)
        .into_iter()
        .map(|(group, version)| {
            let mut hasher = DefaultHasher::new();
            v3_bytes(kinds, group, version).hash(&mut hasher);
            let path = group_version_path(group, version);
            let url = format!("/openapi/v3/{path}?hash={:016X}", hasher.finish());
            (path, json!({"serverRelativeURL": url}))
        })
        .collect();
    json!({"paths": paths})
}

fn v3_document(kinds: &'static [Kind], group: &str, version: &str) -> Value {
    let kinds: Vec<&Kind> = kinds
        .iter()
        .filter(|kind| kind.group == group && kind.version == version)
        .collect();
    json!({
        "openapi": "3.0.0",
        "info": info(),
        "paths": paths::of(&kinds),
        "components": {"schemas": schemas::of(&kinds)},
    })
}

fn v2_document(kinds: &'static [Kind]) -> Value {
    let (mut paths, mut definitions) = (serde_json::Map::new(), serde_json::Map::new());
    for (group, version) in group_versions(kinds) {
        let Value::Object(mut document) = v3_document(kinds, group, version) else {
            continue;
        };
        if let Some(Value::Object(more)) = document.remove("paths") {
            paths.extend(
                more.into_iter()
                    .map(|(path, item)| (path, v2::path_item(item))),
            );
        }
        if let Some(Value::Object(more)) =
            document["components"].get_mut("schemas").map(Value::take)
        {
            definitions.extend(
                more.into_iter()
                    .map(|(name, schema)| (name, v2::schema(schema))),
            );
        }
    }
    json!({"swagger": "2.0", "info": info(), "paths": paths, "definitions": definitions})
}

fn info() -> Value {
    json!({"title": "Trellis", "version": env!("CARGO_PKG_VERSION")})
}

fn group_versions(kinds: &'static [Kind]) -> Vec<(&'static str, &'static str)> {
    let mut found = Vec::new();
    for kind in kinds {
        if !found.contains(&(kind.group, kind.version)) {
            found.push((kind.group, kind.version));
        }
    }
    found
}

fn group_version_path(group: &str, version: &str) -> String {
    if group.is_empty() {
        format!("api/{version}")
    } else {
        format!("apis/{group}/{version}")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
