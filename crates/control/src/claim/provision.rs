//! From a claim to a bound claim: the volume, then, when it is served, the persistent volume, then the two ends of the
//! binding.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::{
    ClaimRef, FilesystemKind, PROVISIONER, VOLUME_FINALIZER, Volume, VolumeSpec,
};
use trellis_api::step::Step;
use trellis_api::{Bytes, Hold, HoldReason};

use super::by_hand;
use super::class::Class;
use super::status;
use crate::plan::{Note, Plan, Promise, claim_place};
use crate::stored::StoredClaim;
use crate::world;
use crate::write::{Object, Place, Write};

/// Sizes are whole mebibytes: every filesystem and every sector size divides them.
const UNIT: Bytes = Bytes::MIB;
/// The annotations that a cluster's binder sets.
pub(super) const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
pub(super) const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

/// The size of the volume for a claim that asks for `requested`.
pub fn goal(requested: Bytes) -> Result<Bytes, Hold> {
    let size = requested
        .max(UNIT)
        .checked_next_multiple_of(UNIT)
        .filter(|size| *size <= Bytes::VOLUME_MAX);
    size.ok_or_else(|| {
        let message = format!(
            "{requested} is asked for; the largest volume is {}.",
            Bytes::VOLUME_MAX
        );
        Hold::new(HoldReason::SizeTooLarge, message)
    })
}

/// The size of the volume for a claim, or why it cannot have the one that it asks for.
pub fn goal_of(claim: &PersistentVolumeClaim) -> Result<Bytes, Hold> {
    let text = status::requested_text(claim).unwrap_or_default();
    let Some(requested) = status::requested(claim) else {
        let message = format!("{text:?} is asked for, which is no size.");
        return Err(Hold::new(HoldReason::SizeInvalid, message));
    };
    goal(requested).map_err(|hold| {
        let message = format!(
            "{text} is asked for; the largest volume is {}.",
            Bytes::VOLUME_MAX
        );
        Hold { message, ..hold }
    })
}

/// What is done for a claim without a volume.
pub enum Begin {
    /// A volume like this one is wanted for it. It has no places for its copies yet.
    Want(Box<Volume>),
    /// Something else comes first, or nothing can be done.
    Else(Plan),
}

/// A claim without a volume gets one, if the claim is ours.
pub fn begin(look: &StoredClaim, claim: &PersistentVolumeClaim, now: &MicroTime) -> Begin {
    match wanted(look, claim, now) {
        Ok(volume) => Begin::Want(Box::new(volume)),
        Err(plan) => Begin::Else(plan),
    }
}

/// The volume that a claim wants, or what is to be done instead.
fn wanted(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    now: &MicroTime,
) -> Result<Volume, Plan> {
    let failed = |hold: &Hold| failed(claim, hold, now);
    match by_hand::bind(look, claim) {
        Ok(None) => {}
        Ok(Some(plan)) => return Err(plan),
        Err(hold) => return Err(failed(&hold)),
    }
    if world::volume_name(claim).as_ref() != Some(&look.stored.key) {
        // This is a volume that was made by hand and that the claim no longer has anything to do with.
        return Err(Plan::default());
    }
    let class_name = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    let Some(class) = &look.class else {
        let Some(name) = class_name.filter(|name| !name.is_empty()) else {
            let message =
                "no persistent volumes available for this claim and no storage class is set";
            return Err(failed(&Hold::new(HoldReason::ClassNotSet, message)));
        };
        let message = format!("storageclass.storage.k8s.io {name:?} not found");
        return Err(failed(&Hold::new(HoldReason::ClassNotFound, message)));
    };
    if !Class::is_ours(class) {
        return Err(Plan::default());
    }
    if let Some(hold) = unfilled(claim) {
        return Err(failed(&hold));
    }
    let read = Class::read(class).map_err(|hold| failed(&hold))?;
    if read.waits_for_consumer && !look.wanted {
        let message = "waiting for first consumer to be created before binding".to_owned();
        let hold = Hold::new(HoldReason::WaitingForConsumer, message.clone());
        let note = Note::normal(claim, "WaitForFirstConsumer", message);
        return Err(Plan {
            notes: vec![note],
            ..held(claim, &hold, now)
        });
    }
    let size = goal_of(claim).and_then(|size| {
        let kind = (!is_block(claim)).then_some(read.filesystem);
        require_filesystem_fits(kind, size)?;
        Ok(size)
    });
    let size = size.map_err(|hold| failed(&hold))?;
    Ok(new_volume(look, claim, &read, size))
}

/// There is no place for the copies of the volume that the claim wants.
pub fn unplaced(claim: &PersistentVolumeClaim, hold: &Hold, now: &MicroTime) -> Plan {
    Plan {
        waits_for_room: true,
        ..failed(claim, hold, now)
    }
}

/// Stores the volume that a claim wants. It comes first and alone: it owns what comes after it. The promises on the
/// pools stand from here on, under the names that the replicas will have.
pub fn make_volume(claim: &PersistentVolumeClaim, volume: &Volume, promises: Vec<Promise>) -> Plan {
    let name = volume.name_any();
    let pools: Vec<&str> = promises.iter().map(|each| each.pool.as_str()).collect();
    let pools = pools.join(",");
    let message = format!(
        "provisioning {} for claim \"{}/{}\" on pool {pools:?}",
        volume.spec.capacity,
        claim.namespace().unwrap_or_default(),
        claim.name_any()
    );
    Plan {
        writes: vec![Write::Create(
            Place::named(Object::Volume, name),
            json!(volume),
        )],
        promises,
        notes: vec![Note::normal(claim, "Provisioning", message)],
        step: Some(Step::VolumeWritten),
        ..Plan::default()
    }
}

/// A claim that is to be filled from something else is not given an empty volume.
fn unfilled(claim: &PersistentVolumeClaim) -> Option<Hold> {
    let spec = claim.spec.as_ref()?;
    let source = spec
        .data_source
        .as_ref()
        .map(|each| (&each.kind, &each.name));
    let reference = spec
        .data_source_ref
        .as_ref()
        .map(|each| (&each.kind, &each.name));
    let (kind, name) = source.or(reference)?;
    let message = format!("The claim asks to be filled from {kind} {name:?}.");
    Some(Hold::new(HoldReason::DataSourceUnsupported, message))
}

/// A volume that is too small for its filesystem is refused now, not when it is first mounted. A block volume has none.
pub fn require_filesystem_fits(kind: Option<FilesystemKind>, size: Bytes) -> Result<(), Hold> {
    let Some(kind) = kind.filter(|kind| size < kind.size_min()) else {
        return Ok(());
    };
    let message = format!(
        "{size} is asked for, and the smallest {kind} has {}.",
        kind.size_min()
    );
    Err(Hold::new(HoldReason::SizeTooSmall, message))
}

fn is_block(claim: &PersistentVolumeClaim) -> bool {
    let mode = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.volume_mode.as_deref());
    mode == Some("Block")
}

fn access_modes(claim: &PersistentVolumeClaim) -> Vec<String> {
    let modes = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.access_modes.clone());
    modes.unwrap_or_default()
}

/// A volume of a class, of that size. It belongs to nobody yet, and has no places for its copies. One for blocks has no
/// filesystem and no mount options.
pub fn volume_of_class(
    class: &Class,
    size: Bytes,
    is_block: bool,
    access_modes: Vec<String>,
) -> VolumeSpec {
    let mount_options = Some(class.mount_options.clone()).filter(|_| !is_block);
    VolumeSpec {
        capacity: size,
        claim: None,
        volume_id: String::new(),
        released_by: None,
        discard: false,
        provisional: false,
        class: String::new(),
        placement: Vec::new(),
        pools: class.pools.clone(),
        access_modes,
        published_to: None,
        mount_options: mount_options.unwrap_or_default(),
        replicas: class.replicas,
        consistency_factor: class.consistency_factor,
        via: class.via,
        thick: class.thick,
        filesystem: (!is_block).then_some(class.filesystem),
        checksums: class.checksums,
        scrub_interval_seconds: class.scrub_interval_seconds,
        scrub_requested: None,
        online_growth: class.online_growth,
        when_below_quorum: class.when_below_quorum,
        when_full: class.when_full,
        patience_seconds: class.patience_seconds,
        allow_shared_disk: class.allow_shared_disk,
        iscsi: class.iscsi.clone(),
        recovery: None,
        growth: None,
    }
}

fn new_volume(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    class: &Class,
    size: Bytes,
) -> Volume {
    let name = look.class.as_ref().map(|class| class.name_any());
    let spec = VolumeSpec {
        claim: Some(claim_ref(claim)),
        provisional: true,
        class: name.unwrap_or_default(),
        ..volume_of_class(class, size, is_block(claim), access_modes(claim))
    };
    let mut volume = Volume::new(&look.stored.key, spec);
    volume.metadata.finalizers = Some(vec![VOLUME_FINALIZER.to_owned()]);
    volume
}

fn claim_ref(claim: &PersistentVolumeClaim) -> ClaimRef {
    ClaimRef {
        namespace: claim.namespace().unwrap_or_default(),
        name: claim.name_any(),
        uid: claim.uid().unwrap_or_default(),
    }
}

/// What is still missing between a volume that serves so much and a bound claim, in order; none when nothing is.
pub fn complete(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    served: Bytes,
) -> Option<Plan> {
    let key = &look.stored.key;
    let Some(persistent) = &look.persistent_volume else {
        let write = Write::Create(
            Place::named(Object::PersistentVolume, key),
            persistent_volume(look, claim, volume, served),
        );
        let step = Some(Step::PersistentVolumeWritten);
        return Some(Plan {
            writes: vec![write],
            step,
            ..Plan::default()
        });
    };
    if let Some(plan) = adopt(look, claim, volume, persistent) {
        return Some(plan);
    }
    let named = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.volume_name.as_deref());
    if named.is_none_or(str::is_empty) {
        let body = json!({
            "metadata": { "annotations": {
                BIND_COMPLETED: "yes",
                BOUND_BY_CONTROLLER: "yes",
                STORAGE_PROVISIONER: PROVISIONER,
            }},
            "spec": { "volumeName": key },
        });
        let step = Some(Step::ClaimNamesVolume);
        let mut writes = vec![Write::Patch(claim_place(claim), body)];
        if volume.spec.provisional {
            let body = json!({
                "metadata": { "uid": volume.uid() },
                "spec": { "provisional": false },
            });
            writes.push(Write::Patch(Place::named(Object::Volume, key), body));
        }
        return Some(Plan {
            writes,
            step,
            ..Plan::default()
        });
    }
    if volume.spec.volume_id.is_empty() {
        // A volume that was ever bound says who it is; the volume controller writes that first.
        return Some(Plan::default());
    }
    say_bound(look, claim, served)
}

fn persistent_volume(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    served: Bytes,
) -> serde_json::Value {
    let spec = claim.spec.clone().unwrap_or_default();
    let class = look.class.as_deref().map(Class::read).and_then(Result::ok);
    let options = Some(&volume.spec.mount_options).filter(|options| !options.is_empty());
    let policy = class.map_or_else(|| "Delete".to_owned(), |class| class.reclaim_policy);
    let mut persistent = json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": look.stored.key,
            "annotations": { PROVISIONED_BY: PROVISIONER },
            "finalizers": ["kubernetes.io/pv-protection"],
        },
        "spec": {
            "capacity": { "storage": served },
            "accessModes": spec.access_modes,
            "volumeMode": spec.volume_mode,
            "persistentVolumeReclaimPolicy": policy,
            "storageClassName": volume.spec.class,
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": claim.namespace(),
                "name": claim.name_any(),
                "uid": claim.uid(),
                "resourceVersion": claim.resource_version(),
            },
            "csi": {
                "driver": PROVISIONER,
                "volumeHandle": look.stored.key,
                "fsType": volume.spec.filesystem.map(|kind| kind.name()),
            },
        },
    });
    if let Some(options) = options {
        persistent["spec"]["mountOptions"] = json!(options);
    }
    persistent
}

/// A retained volume that a new claim names, and that its old claim has released.
fn adopt(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    persistent: &k8s_openapi::api::core::v1::PersistentVolume,
) -> Option<Plan> {
    let reference = persistent
        .spec
        .as_ref()
        .and_then(|spec| spec.claim_ref.as_ref());
    let ours = claim_ref(claim);
    let owned = reference.is_some_and(|each| each.uid.as_deref() == Some(&ours.uid));
    if owned && volume.is_of(&ours) {
        return None;
    }
    let free = reference.is_none_or(|each| {
        each.uid.is_none()
            && each.name.as_deref() == Some(&ours.name)
            && each.namespace.as_deref() == Some(&ours.namespace)
    });
    if !free && !owned {
        return Some(Plan::default());
    }
    let reference = json!({ "spec": { "claimRef": {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "namespace": ours.namespace, "name": ours.name, "uid": ours.uid,
    }}});
    let writes = vec![
        Write::Patch(
            Place::named(Object::PersistentVolume, &look.stored.key),
            reference,
        ),
        Write::Patch(
            Place::named(Object::Volume, &look.stored.key),
            json!({ "spec": { "claim": ours } }),
        ),
    ];
    Some(Plan {
        writes,
        ..Plan::default()
    })
}

fn say_bound(look: &StoredClaim, claim: &PersistentVolumeClaim, served: Bytes) -> Option<Plan> {
    let phase = |phase: Option<&str>| phase == Some("Bound");
    let claim_bound = phase(
        claim
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref()),
    );
    let persistent = look.persistent_volume.as_ref()?;
    let volume_bound = phase(
        persistent
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref()),
    );
    let mut writes = Vec::new();
    if !volume_bound {
        let place = Place::named(Object::PersistentVolume, &look.stored.key);
        writes.push(Write::PatchStatus(
            place,
            json!({ "status": { "phase": "Bound" } }),
        ));
    }
    let mut notes = Vec::new();
    if !claim_bound {
        writes.push(Write::PatchStatus(
            claim_place(claim),
            status::bound(claim, served),
        ));
        let message = format!("Successfully provisioned volume {}", look.stored.key);
        notes.push(Note::normal(claim, "ProvisioningSucceeded", message));
    }
    (!writes.is_empty()).then(|| Plan {
        writes,
        notes,
        step: Some(Step::ClaimBound),
        ..Plan::default()
    })
}

/// The claim stays pending, and says why.
fn failed(claim: &PersistentVolumeClaim, hold: &Hold, now: &MicroTime) -> Plan {
    let note = Note::held(claim, "ProvisioningFailed", hold);
    Plan {
        notes: vec![note],
        ..held(claim, hold, now)
    }
}

fn held(claim: &PersistentVolumeClaim, hold: &Hold, now: &MicroTime) -> Plan {
    let body = status::held(claim, hold, now);
    let changed = status::changes(claim, &body);
    let write = Write::PatchStatus(claim_place(claim), status::pinned(claim, body));
    Plan {
        writes: changed.then_some(write).into_iter().collect(),
        ..Plan::default()
    }
}
