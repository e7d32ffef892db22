//! Columns of our own kinds: the requested size, the measured size, and what keeps the two apart.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::read::{condition, or, text};
use super::{AGE, NAME, NONE, UNKNOWN, column, str_of};
use crate::kind::Column;

const REQUESTED: Column = column("Requested", 0, "Size that is asked for.", |o, _| {
    text(o, "/spec/capacity")
});
const CAPACITY: Column = column("Capacity", 0, "Size that was measured.", |o, _| {
    text(o, "/status/capacity")
});
const PHASE: Column = column("Phase", 0, "State in one word.", |o, _| {
    text(o, "/status/phase")
});
const REASON: Column = column("Reason", 1, "What keeps it, by its code.", |o, _| {
    text(o, "/status/hold/reason")
});
const NODE: Column = column("Node", 0, "Node it is on.", |o, _| text(o, "/spec/node"));
const OF_VOLUME: Column = column("Volume", 0, "Volume it belongs to.", |o, _| {
    text(o, "/spec/volume")
});

pub(crate) static POOL: &[Column] = &[
    NAME,
    NODE,
    column("Capacity", 0, "Size of the filesystem below.", |o, _| {
        text(o, "/status/capacity/total")
    }),
    column("Allocated", 0, "What replicas take of it.", |o, _| {
        text(o, "/status/capacity/allocated")
    }),
    column("Free", 0, "What is free on it.", |o, _| {
        text(o, "/status/capacity/free")
    }),
    column("Ready", 0, "Whether its node can use it.", |o, _| {
        json!(condition(o, "Ready").unwrap_or("Unknown"))
    }),
    AGE,
    column("Path", 1, "Directory on its node.", |o, _| {
        text(o, "/spec/path")
    }),
];

pub(crate) static VOLUME: &[Column] = &[
    NAME,
    column("Claim", 0, "Claim that the volume was made for.", claim),
    REQUESTED,
    CAPACITY,
    PHASE,
    AGE,
    column("Class", 1, "StorageClass of the claim.", |o, _| {
        text(o, "/spec/class")
    }),
    column("Replicas", 1, "Number of copies.", |o, _| {
        text(o, "/spec/replicas")
    }),
    column(
        "Filesystem",
        1,
        "Filesystem on it; none for a block volume.",
        |o, _| or(o, "/spec/filesystem", NONE),
    ),
    REASON,
];

pub(crate) static TARGET: &[Column] = &[NAME, OF_VOLUME, NODE, REQUESTED, CAPACITY, AGE];

pub(crate) static REPLICA: &[Column] = &[
    NAME,
    OF_VOLUME,
    column("Pool", 0, "Pool it lives on.", |o, _| text(o, "/spec/pool")),
    REQUESTED,
    CAPACITY,
    PHASE,
    AGE,
    column("Node", 1, "Node of its pool.", |o, _| text(o, "/spec/node")),
    column("Path", 1, "File that holds the bytes.", |o, _| {
        text(o, "/status/path")
    }),
    REASON,
];

pub(crate) static ATTACHMENT: &[Column] = &[
    NAME,
    column("Claim", 0, "Claim that is attached.", |o, _| {
        text(o, "/spec/claimName")
    }),
    NODE,
    column("Path", 0, "Where it appears.", path),
    column("Size", 0, "Size that its consumer can rely on.", |o, _| {
        text(o, "/status/capacity")
    }),
    column("State", 0, "State in one word.", |o, _| {
        or(o, "/status/phase", UNKNOWN)
    }),
    AGE,
    column("Device", 1, "Block device on the node.", |o, _| {
        or(o, "/status/device", NONE)
    }),
    column("Via", 1, "Way that the bytes take.", |o, _| {
        or(o, "/status/via", NONE)
    }),
    REASON,
];

fn path(attachment: &Value, _now: Timestamp) -> Value {
    let consumers = attachment
        .pointer("/spec/consumer")
        .and_then(Value::as_object);
    let mut consumers = consumers.into_iter().flat_map(|each| each.values());
    let path = consumers.find_map(|each| each.get("path"));
    path.cloned().unwrap_or_else(|| json!(""))
}

fn claim(volume: &Value, _now: Timestamp) -> Value {
    if volume.pointer("/spec/claim").is_none() {
        return json!(NONE);
    }
    json!(format!(
        "{}/{}",
        str_of(volume, "/spec/claim/namespace"),
        str_of(volume, "/spec/claim/name")
    ))
}
