//! Objects as earlier releases stored them, brought into the present form at the first write of a run.
//!
//! | earlier | now |
//! |---|---|
//! | Volume: annotations `trellis.dev/pool` and `trellis.dev/node` | `spec.placement` |
//! | Volume: `spec.replicated`, and `spec.via` that could be absent | `spec.via`, absent only for a single copy in place |
//! | Volume: access modes, mount options and pools read from claim, PersistentVolume and class | fields of its spec |
//! | Attachment: `spec.path` and `spec.readOnly` | `spec.consumer.mount` or `spec.consumer.device` |

use serde_json::{Value, json};

use super::{at, text};
use crate::store::Txn;
use crate::store::memory::Id;

const POOLS: &str = "trellis.dev/pool";
const NODES: &str = "trellis.dev/node";

/// Converts whatever is still stored in an earlier form.
pub(crate) fn convert(txn: &mut Txn<'_>) {
    for (plural, converted) in [
        ("volumes", volume as fn(&Txn<'_>, &Value) -> Option<Value>),
        ("attachments", attachment),
    ] {
        let Some(kind) = txn.kind_index(plural) else {
            continue;
        };
        for (id, stored) in txn.list(kind, None) {
            if let Some(object) = converted(txn, &stored.value()) {
                txn.put(&id, object);
            }
        }
    }
}

fn found(txn: &Txn<'_>, plural: &str, namespace: &str, name: &str) -> Value {
    let kind = txn.kind_index(plural).filter(|_| !name.is_empty());
    let stored = kind.and_then(|kind| txn.get(&Id::new(kind, namespace, name)));
    stored.map(|stored| stored.value()).unwrap_or_default()
}

fn volume(txn: &Txn<'_>, object: &Value) -> Option<Value> {
    let annotation = |name: &str| {
        let found = at(object, "/metadata/annotations").and_then(|all| all.get(name));
        found.and_then(Value::as_str).map(str::to_owned)
    };
    let is_earlier = at(object, "/spec/replicated").is_some() || annotation(POOLS).is_some();
    if !is_earlier {
        return None;
    }
    let mut volume = object.clone();
    let (pools, nodes) = (annotation(POOLS), annotation(NODES));
    let places: Vec<Value> = match (&pools, &nodes) {
        (Some(pools), Some(nodes)) => {
            let each = pools.split(',').zip(nodes.split(','));
            each.map(|(pool, node)| json!({ "pool": pool, "node": node }))
                .collect()
        }
        _ => Vec::new(),
    };
    let namespace = text(object, "/spec/claim/namespace");
    let claim = found(
        txn,
        "persistentvolumeclaims",
        namespace,
        text(object, "/spec/claim/name"),
    );
    let persistent = found(txn, "persistentvolumes", "", text(object, "/metadata/name"));
    let class = found(txn, "storageclasses", "", text(object, "/spec/class"));
    let allowed = text(&class, "/parameters/pools").split(',').map(str::trim);
    let allowed: Vec<&str> = allowed.filter(|pool| !pool.is_empty()).collect();
    let is_replicated = at(object, "/spec/replicated") == Some(&Value::Bool(true));
    let via = at(object, "/spec/via").cloned();
    let spec = volume.get_mut("spec")?.as_object_mut()?;
    spec.remove("replicated");
    spec.insert("placement".to_owned(), Value::from(places));
    spec.insert("pools".to_owned(), json!(allowed));
    for (field, from) in [
        ("accessModes", at(&claim, "/spec/accessModes")),
        ("mountOptions", at(&persistent, "/spec/mountOptions")),
    ] {
        if let Some(value) = from {
            spec.insert(field.to_owned(), value.clone());
        }
    }
    match (is_replicated, via) {
        (true, None) => drop(spec.insert("via".to_owned(), json!("fuse"))),
        (false, Some(_)) => drop(spec.remove("via")),
        _ => {}
    }
    if let Some(annotations) = volume
        .pointer_mut("/metadata/annotations")
        .and_then(Value::as_object_mut)
    {
        annotations.remove(POOLS);
        annotations.remove(NODES);
    }
    Some(volume)
}

fn attachment(txn: &Txn<'_>, object: &Value) -> Option<Value> {
    let path = at(object, "/spec/path")?.clone();
    let read_only = at(object, "/spec/readOnly").cloned();
    let namespace = text(object, "/metadata/namespace");
    let claim = text(object, "/spec/claimName");
    let claim = found(txn, "persistentvolumeclaims", namespace, claim);
    let consumer = match text(&claim, "/spec/volumeMode") {
        "Block" => "device",
        _ => "mount",
    };
    let mut attachment = object.clone();
    let spec = attachment.get_mut("spec")?.as_object_mut()?;
    spec.remove("path");
    spec.remove("readOnly");
    let read_only = read_only.unwrap_or(Value::Bool(false));
    let at_path = json!({ "path": path, "readOnly": read_only });
    spec.insert("consumer".to_owned(), json!({ consumer: at_path }));
    Some(attachment)
}
