//! Claims in the states that a view has to tell apart, for the tests of whoever builds or shows one.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use trellis_api::Bytes;
use trellis_api::kinds::{Attachment, GrowthRecord, Pool, Replica, Via, Volume};

use crate::stored::{StoredClaim, StoredVolume};

const UID: &str = "5f0c0f3e-0000-4000-8000-000000000001";
const VOLUME: &str = "pvc-5f0c0f3e-0000-4000-8000-000000000001";
const MEASURED_AT: &str = "2026-11-15T12:00:00.000000Z";

/// A claim in a state that has a name. Each asks for two gibibytes, unless it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// It is mounted on one node and has its size.
    OneUse,
    /// It is mounted on one node and has one gibibyte.
    Growing,
    /// It is mounted on two nodes. On the second one its filesystem cannot grow.
    TwoUsesOneHeld,
    /// It is mounted twice on one node.
    TwoUsesOfOneNode,
    /// A use waits until the node of another one is done.
    OneUseWaits,
    /// Nobody uses it, and its filesystem has its size.
    Unused,
    /// Nobody uses it, and its filesystem has one gibibyte.
    UnusedBehind,
    /// It is mounted on one node, and its copy and target are on another.
    TrunkElsewhere,
    /// It has three copies, of which one is silent.
    OneCopySilent,
    /// It asks for a hundred gibibytes, for which there is no room.
    Refused,
    /// Its class does not exist.
    Pending,
    /// Another provisioner serves it.
    OtherProvisioner,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 12] = [
        Scenario::OneUse,
        Scenario::Growing,
        Scenario::TwoUsesOneHeld,
        Scenario::TwoUsesOfOneNode,
        Scenario::OneUseWaits,
        Scenario::Unused,
        Scenario::UnusedBehind,
        Scenario::TrunkElsewhere,
        Scenario::OneCopySilent,
        Scenario::Refused,
        Scenario::Pending,
        Scenario::OtherProvisioner,
    ];

    /// What is stored of the claim.
    pub fn stored(self) -> StoredClaim {
        match self {
            Scenario::OneUse => mounted(2, 2),
            Scenario::Growing => mounted(1, 2),
            Scenario::TwoUsesOneHeld => {
                let mut held = used("n2", 1, 2, "/mnt/other");
                held["status"]["rungs"][1]["full"] = json!(false);
                held["status"]["rungs"][1]["hold"] = json!({
                    "reason": "ReadOnly", "message": "It is mounted read-only at /mnt/other of node n2.",
                });
                with_uses(at(2, 1, 2), [used("n1", 2, 2, "/mnt/data"), held])
            }
            Scenario::TwoUsesOfOneNode => {
                let uses = ["/mnt/data", "/mnt/again"];
                with_uses(at(2, 2, 2), uses.map(|path| used("n1", 2, 2, path)))
            }
            Scenario::OneUseWaits => {
                let mut waits = used("n2", 2, 2, "/mnt/data");
                waits["status"] = json!({
                    "phase": "Pending",
                    "hold": { "reason": "UsedElsewhere", "message": "It is in use on node n1." },
                });
                with_uses(at(2, 2, 2), [used("n1", 2, 2, "/mnt/data"), waits])
            }
            Scenario::Unused => with_content(at(2, 2, 2), gib(2), true),
            Scenario::UnusedBehind => idle(),
            Scenario::TrunkElsewhere => {
                let mut look = with_uses(at(2, 2, 2), [used("n1", 2, 2, "/mnt/data")]);
                behind_target(&mut look, 1, 1);
                for replica in &mut look.stored.replicas {
                    let spec = &mut Arc::make_mut(replica).spec;
                    (spec.node, spec.replica_id) = ("n2".to_owned(), "id".to_owned());
                }
                if let Some(target) = &mut look.stored.target {
                    Arc::make_mut(target).spec.node = "n2".to_owned();
                }
                look
            }
            Scenario::OneCopySilent => one_copy_silent(),
            Scenario::Refused => refused(),
            Scenario::Pending => pending(),
            Scenario::OtherProvisioner => other_provisioner(),
        }
    }
}

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
            "capacity": gib(goal), "class": "trellis", "replicas": 1, "filesystem": "xfs", "volumeId": UID,
            "placement": [{ "pool": "default", "node": "n1" }],
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

fn bound(requested: u64, size: u64, goal: u64, status: Value) -> StoredClaim {
    let target = json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Target",
        "metadata": { "name": VOLUME },
        "spec": { "volume": VOLUME, "node": "n1", "capacity": gib(goal) },
        "status": { "capacity": gib(size), "rung": rung("volume", gib(size), false, 90) },
    });
    let persistent_volume = json!({
        "metadata": { "name": VOLUME },
        "spec": {
            "capacity": { "storage": gib(size) },
            "claimRef": { "namespace": "default", "name": "data", "uid": UID },
        },
        "status": { "phase": "Bound" },
    });
    let mut volume = volume(requested);
    let served = json!({ "granted": gib(goal), "capacity": gib(size) });
    Arc::make_mut(&mut volume).status = Some(read(served));
    let mut claim = claim(requested, status);
    let spec = Arc::make_mut(&mut claim).spec.get_or_insert_default();
    spec.volume_name = Some(VOLUME.to_owned());
    StoredClaim {
        claim: Some(claim),
        persistent_volume: Some(Arc::new(read(persistent_volume))),
        stored: StoredVolume {
            volume: Some(volume),
            target: Some(Arc::new(read(target))),
            replicas: vec![Arc::new(replica(goal, Some(size)))],
            ..unknown()
        },
        ..StoredClaim::default()
    }
}

/// A claim that asks for `requested` gibibytes and reports `size`, with nothing below it.
pub fn claimed(requested: u64, size: u64) -> StoredClaim {
    let status = json!({ "phase": "Bound", "capacity": { "storage": gib(size) } });
    StoredClaim {
        stored: unknown(),
        claim: Some(claim(requested, status)),
        ..StoredClaim::default()
    }
}

/// Mounted, with `size` gibibytes on every rung, and asking for `requested`.
pub fn mounted(size: u64, requested: u64) -> StoredClaim {
    with_uses(
        at(size, size, requested),
        [used("n1", size, size, "/mnt/data")],
    )
}

/// Bound, with `size` gibibytes on the trunk, reporting `reported`, and asking for `requested`.
fn at(size: u64, reported: u64, requested: u64) -> StoredClaim {
    let mut status = json!({ "phase": "Bound", "capacity": { "storage": gib(reported) } });
    if requested > reported {
        status["allocatedResources"] = json!({ "storage": gib(requested) });
        status["allocatedResourceStatuses"] = json!({ "storage": "ControllerResizeInProgress" });
    }
    bound(requested, size, requested, status)
}

/// A mount on a node, with that many gibibytes below its filesystem and in it.
fn used(node: &str, filesystem: u64, device: u64, path: &str) -> Value {
    // A filesystem leaves the last blocks of its device unused.
    let inside = gib(filesystem).saturating_sub(Bytes::MIB);
    json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
        "metadata": { "name": format!("{node}{}", path.replace('/', "-")), "namespace": "default" },
        "spec": { "claimName": "data", "node": node, "consumer": { "mount": { "path": path } } },
        "status": {
            "phase": "Attached", "volume": VOLUME, "via": "local", "device": "/dev/loop7",
            "filesystem": "xfs", "capacity": inside,
            "rungs": [
                rung("device", gib(device), false, 450),
                rung("filesystem", inside, true, 8_300),
            ],
            "usage": {
                "used": "256Mi", "available": "768Mi", "inodesUsed": 3, "inodesFree": 100,
                "observedAt": MEASURED_AT,
            },
        },
    })
}

fn with_uses<const N: usize>(look: StoredClaim, uses: [Value; N]) -> StoredClaim {
    let attachments = uses.map(|each| Arc::new(read::<Attachment>(each)));
    let mut look = look;
    look.stored.attachments = attachments.into_iter().collect();
    look
}

/// The filesystem that was found on the copies of an idle volume of two gibibytes.
fn with_content(look: StoredClaim, size: Bytes, full: bool) -> StoredClaim {
    let mut look = look;
    for replica in &mut look.stored.replicas {
        if let Some(status) = &mut Arc::make_mut(replica).status {
            let content = json!({ "kind": "xfs", "size": size, "full": full, "of": "2Gi" });
            status.content = Some(read(content));
        }
    }
    look
}

/// The volume has so many copies behind a target, of which so many must have a write.
fn behind_target(look: &mut StoredClaim, copies: u32, factor: u32) {
    if let Some(volume) = &mut look.stored.volume {
        let spec = &mut Arc::make_mut(volume).spec;
        (spec.replicas, spec.consistency_factor, spec.via) = (copies, factor, Some(Via::Fuse));
    }
}

/// Three copies on pools `a`, `b` and `c`; the second one has said nothing for a minute and a half.
fn one_copy_silent() -> StoredClaim {
    let mut look = with_uses(at(2, 2, 2), [used("n1", 2, 2, "/mnt/data")]);
    let copies = ["a", "b", "c"].map(|pool| {
        let mut copy = replica(2, Some(2));
        copy.metadata.name = Some(format!("{VOLUME}-{pool}"));
        copy.metadata.labels = None;
        copy.spec.replica_id = format!("id-{pool}");
        copy.spec.pool = pool.to_owned();
        copy.spec.node = format!("n{pool}");
        Arc::new(copy)
    });
    let seen = |id: &str, state: &str| json!({ "id": id, "state": state, "size": "2Gi" });
    let mut silent = seen("id-b", "Silent");
    silent["heardAt"] = json!("2026-11-15T11:59:30.000000Z");
    behind_target(&mut look, 3, 2);
    if let Some(target) = &mut look.stored.target {
        let status = &mut Arc::make_mut(target).status;
        let mut value = json!(status);
        value["replicas"] = json!([seen("id-a", "InSync"), silent, seen("id-c", "InSync")]);
        value["members"] =
            json!({ "version": 1, "replicas": ["id-a", "id-b", "id-c"], "consistencyFactor": 2 });
        *status = Some(read(value));
    }
    look.stored.replicas = copies.into_iter().collect();
    look
}

/// Its class names another provisioner.
fn other_provisioner() -> StoredClaim {
    let class = json!({ "metadata": { "name": "trellis" }, "provisioner": "other.example.com" });
    StoredClaim {
        class: Some(Arc::new(read(class))),
        ..claimed(2, 2)
    }
}

/// Has one gibibyte and asks for a hundred, for which there is no room.
pub fn refused() -> StoredClaim {
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
pub fn idle() -> StoredClaim {
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
    with_content(bound(2, 2, 2, status), gib(1), false)
}

/// Not provisioned, since its class does not exist.
pub fn pending() -> StoredClaim {
    let status = json!({
        "phase": "Pending",
        "conditions": [{
            "type": "Held", "status": "True", "reason": "ClassNotFound",
            "message": "storageclass.storage.k8s.io \"trellis\" not found",
        }],
    });
    StoredClaim {
        stored: unknown(),
        claim: Some(claim(1, status)),
        ..StoredClaim::default()
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
