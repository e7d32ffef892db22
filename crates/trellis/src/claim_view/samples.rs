//! Claims in the states that the verbs have to tell apart, for tests.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use trellis_api::Bytes;
use trellis_api::kinds::{GrowthRecord, Pool, Replica, Volume};
use trellis_control::stored::StoredVolume;
use trellis_control::view::View;

const UID: &str = "5f0c0f3e-0000-4000-8000-000000000001";
const VOLUME: &str = "pvc-5f0c0f3e-0000-4000-8000-000000000001";
const MEASURED_AT: &str = "2026-11-15T12:00:00.000000Z";

/// A minute after everything was measured.
pub fn now() -> Timestamp {
    "2026-11-15T12:01:00Z".parse().expect("a valid time")
}

fn read<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("a valid object")
}

fn gib(size: u64) -> Bytes {
    Bytes::gib(size)
}

fn claim(requested: u64, status: Value) -> Arc<PersistentVolumeClaim> {
    Arc::new(read(json!({
        "metadata": { "name": "data", "namespace": "default", "uid": UID },
        "spec": {
            "storageClassName": "trellis",
            "resources": { "requests": { "storage": gib(requested) } },
        },
        "status": status,
    })))
}

fn rung(name: &str, size: Bytes, full: bool, micros: u64) -> Value {
    json!({
        "rung": name, "size": size, "full": full, "observedAt": MEASURED_AT,
        "raised": { "from": "512Mi", "to": size, "at": MEASURED_AT, "tookMicros": micros },
    })
}

/// A copy on pool `default` that should have `goal` gibibytes and has `size`.
pub fn replica(goal: u64, size: Option<u64>) -> Replica {
    let status = size.map(|size| {
        json!({
            "phase": "Ready", "capacity": gib(size), "path": "/pool/replicas/r/data",
            "rung": rung("replica", gib(size), false, 1_200),
        })
    });
    read(json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Replica",
        "metadata": { "name": format!("{VOLUME}-0") },
        "spec": {
            "volume": VOLUME, "volumeId": UID, "replicaId": UID,
            "pool": "default", "node": "n1", "capacity": gib(goal),
        },
        "status": status,
    }))
}

/// Pool `default` that is ready and can hold `usable`.
pub fn pool(usable: Bytes, overcommit: u32) -> Pool {
    read(json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Pool",
        "metadata": { "name": "default" },
        "spec": { "node": "n1", "path": "/pool", "overcommitPercent": overcommit },
        "status": {
            "capacity": { "total": usable, "free": usable, "allocated": "0", "observedAt": MEASURED_AT },
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Measured", "message": "",
                "lastTransitionTime": "2026-11-15T12:00:00Z",
            }],
        },
    }))
}

fn volume(goal: u64) -> Arc<Volume> {
    Arc::new(read(json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume",
        "metadata": { "name": VOLUME },
        "spec": {
            "capacity": gib(goal), "class": "trellis", "replicas": 1, "filesystem": "xfs",
            "claim": { "namespace": "default", "name": "data", "uid": UID },
        },
    })))
}

/// The volume's name, and nothing else.
fn unknown() -> StoredVolume {
    StoredVolume {
        key: VOLUME.to_owned(),
        ..StoredVolume::default()
    }
}

fn bound(requested: u64, size: u64, goal: u64, status: Value) -> View {
    let target = json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Target",
        "metadata": { "name": VOLUME },
        "spec": { "volume": VOLUME, "node": "n1", "capacity": gib(goal) },
        "status": { "capacity": gib(size), "rung": rung("volume", gib(size), false, 90) },
    });
    View {
        claim: Some(claim(requested, status)),
        stored: StoredVolume {
            volume: Some(volume(requested)),
            target: Some(Arc::new(read(target))),
            replicas: vec![Arc::new(replica(goal, Some(size)))],
            ..unknown()
        },
        ..View::default()
    }
}

/// A claim that asks for `requested` gibibytes and reports `size`, with nothing below it.
pub fn claimed(requested: u64, size: u64) -> View {
    let status = json!({ "phase": "Bound", "capacity": { "storage": gib(size) } });
    View {
        stored: unknown(),
        claim: Some(claim(requested, status)),
        ..View::default()
    }
}

/// Mounted, with `size` gibibytes on every rung, and asking for `requested`.
pub fn mounted(size: u64, requested: u64) -> View {
    let mut status = json!({ "phase": "Bound", "capacity": { "storage": gib(size) } });
    if requested > size {
        status["allocatedResources"] = json!({ "storage": gib(requested) });
        status["allocatedResourceStatuses"] = json!({ "storage": "ControllerResizeInProgress" });
    }
    // A filesystem leaves the last blocks of its device unused.
    let filesystem = gib(size).saturating_sub(Bytes::MIB);
    let attachment = json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
        "metadata": { "name": "data-1", "namespace": "default" },
        "spec": { "claimName": "data", "node": "n1", "consumer": { "mount": { "path": "/mnt/data" } } },
        "status": {
            "phase": "Attached", "volume": VOLUME, "via": "local", "device": "/dev/loop7",
            "filesystem": "xfs", "capacity": filesystem,
            "rungs": [
                rung("device", gib(size), false, 450),
                rung("filesystem", filesystem, true, 8_300),
            ],
            "usage": {
                "used": "256Mi", "available": "768Mi", "inodesUsed": 3, "inodesFree": 100,
                "observedAt": MEASURED_AT,
            },
        },
    });
    let mut view = bound(requested, size, requested, status);
    view.stored.attachments = vec![Arc::new(read(attachment))];
    view
}

/// Has one gibibyte and asks for a hundred, for which there is no room.
pub fn refused() -> View {
    let status = json!({
        "phase": "Bound",
        "capacity": { "storage": "1Gi" },
        "allocatedResources": { "storage": "100Gi" },
        "allocatedResourceStatuses": { "storage": "ControllerResizeInfeasible" },
        "conditions": [
            { "type": "Resizing", "status": "True" },
            {
                "type": "ControllerResizeError", "status": "True", "reason": "NoSpaceInPool",
                "message": "Pool \"default\" can promise 10Gi at 100% of what it can hold; 0 is promised to others, and 100Gi is asked for.",
            },
        ],
    });
    bound(100, 1, 1, status)
}

/// Not mounted; the volume has grown from one gibibyte to two and its filesystem has not.
pub fn idle() -> View {
    let status = json!({
        "phase": "Bound",
        "capacity": { "storage": "1Gi" },
        "allocatedResources": { "storage": "2Gi" },
        "allocatedResourceStatuses": { "storage": "NodeResizePending" },
        "conditions": [{
            "type": "FileSystemResizePending", "status": "True", "reason": "NotMounted",
            "message": "The volume has 2Gi; its xfs has 1Gi and grows when it is mounted.",
        }],
    });
    let mut view = bound(2, 2, 2, status);
    for replica in &mut view.stored.replicas {
        if let Some(status) = &mut Arc::make_mut(replica).status {
            status.content = Some(read(json!({ "kind": "xfs", "size": "1Gi", "full": false })));
        }
    }
    view
}

/// Not provisioned, since its class does not exist.
pub fn pending() -> View {
    let status = json!({
        "phase": "Pending",
        "conditions": [{
            "type": "Held", "status": "True", "reason": "ClassNotFound",
            "message": "storageclass.storage.k8s.io \"trellis\" not found",
        }],
    });
    View {
        stored: unknown(),
        claim: Some(claim(1, status)),
        ..View::default()
    }
}

/// One growth of every result.
pub fn growths() -> Vec<GrowthRecord> {
    let record = |by: &str, to: &str, result: &str, rungs: Value| {
        json!({
            "by": by, "requestedAt": MEASURED_AT, "finishedAt": "2026-11-15T12:00:00.012300Z",
            "from": "1Gi", "to": to, "result": result, "rungs": rungs,
        })
    };
    let rungs = json!([
        { "rung": "replica", "micros": 1_200 },
        { "rung": "volume", "micros": 90 },
        { "rung": "filesystem", "micros": 8_300 },
    ]);
    read(json!([
        record("trellis-cli:ada", "2Gi", "Succeeded", rungs),
        record("kubectl-patch", "3Gi", "Replaced", json!([])),
        record("trellis-cli:root", "100Gi", "Cancelled", json!([])),
    ]))
}
