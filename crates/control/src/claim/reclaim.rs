//! The way out: a claim that is deleted, and what becomes of its volume.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::PROVISIONER;
use trellis_api::{Hold, HoldReason};

use super::plan::{Note, Plan, claim_place};
use crate::view::View;
use crate::write::{Object, Place, Write};

const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";
const VOLUME_PROTECTION: &str = "kubernetes.io/pv-protection";

/// A claim that is being deleted goes as soon as nothing uses it.
pub fn release_claim(view: &View, claim: &PersistentVolumeClaim) -> Plan {
    if !claim
        .finalizers()
        .iter()
        .any(|each| each == CLAIM_PROTECTION)
    {
        return Plan::default();
    }
    if let Some(user) = view.attachments.first() {
        let message = format!(
            "still in use by attachment {:?} at {}",
            user.name_any(),
            user.spec.path
        );
        let hold = Hold::new(HoldReason::InUse, message);
        let note = Note {
            warning: false,
            ..Note::held(claim, "ClaimInUse", &hold)
        };
        return Plan {
            notes: vec![note],
            ..Plan::default()
        };
    }
    let kept: Vec<&String> = claim
        .finalizers()
        .iter()
        .filter(|each| *each != CLAIM_PROTECTION)
        .collect();
    let body = json!({ "metadata": {
        "finalizers": kept,
        "resourceVersion": claim.metadata.resource_version,
    }});
    Plan {
        writes: vec![Write::Patch(claim_place(claim), body)],
        ..Plan::default()
    }
}

/// There is no claim any more: deletes or keeps what it had.
pub fn reclaim(view: &View) -> Plan {
    let Some(persistent) = &view.persistent_volume else {
        return orphan(view);
    };
    let spec = persistent.spec.as_ref();
    let ours = spec
        .and_then(|spec| spec.csi.as_ref())
        .is_some_and(|csi| csi.driver == PROVISIONER);
    if !ours {
        return Plan::default();
    }
    let deleting = persistent.metadata.deletion_timestamp.is_some();
    let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    let claimed = spec.is_some_and(|spec| spec.claim_ref.is_some());
    if policy != Some("Delete") {
        return if deleting {
            unprotect(view)
        } else {
            keep(view, claimed)
        };
    }
    // A volume without a claim that has never been bound to one is somebody's preparation.
    if !claimed && !deleting {
        return keep(view, claimed);
    }
    let place = Place::named(Object::PersistentVolume, &view.key);
    if view.volume.is_some() {
        return Plan {
            writes: vec![Write::Delete(Place::named(Object::Volume, &view.key))],
            ..Plan::default()
        };
    }
    if !view.replicas.is_empty() {
        return Plan::default();
    }
    if !deleting {
        return Plan {
            writes: vec![Write::Delete(place)],
            ..Plan::default()
        };
    }
    unprotect(view)
}

/// A volume whose claim vanished before the two were bound.
fn orphan(view: &View) -> Plan {
    let Some(volume) = &view.volume else {
        return Plan::default();
    };
    // A kept volume whose persistent volume was removed by hand stays: that is what Retain means.
    let was_bound = volume
        .status
        .as_ref()
        .is_some_and(|status| status.capacity.is_some());
    let deleting = volume.metadata.deletion_timestamp.is_some();
    if was_bound || deleting {
        return Plan::default();
    }
    Plan {
        writes: vec![Write::Delete(Place::named(Object::Volume, &view.key))],
        ..Plan::default()
    }
}

fn keep(view: &View, claimed: bool) -> Plan {
    let phase = if claimed { "Released" } else { "Available" };
    let now = view
        .persistent_volume
        .as_ref()
        .and_then(|each| each.status.as_ref()?.phase.clone());
    if now.as_deref() == Some(phase) {
        return Plan::default();
    }
    let place = Place::named(Object::PersistentVolume, &view.key);
    let write = Write::PatchStatus(place, json!({ "status": { "phase": phase } }));
    Plan {
        writes: vec![write],
        ..Plan::default()
    }
}

fn unprotect(view: &View) -> Plan {
    let Some(persistent) = &view.persistent_volume else {
        return Plan::default();
    };
    if !persistent
        .finalizers()
        .iter()
        .any(|each| each == VOLUME_PROTECTION)
    {
        return Plan::default();
    }
    let kept: Vec<&String> = persistent
        .finalizers()
        .iter()
        .filter(|each| *each != VOLUME_PROTECTION)
        .collect();
    let body = json!({ "metadata": {
        "finalizers": kept,
        "resourceVersion": persistent.metadata.resource_version,
    }});
    let place = Place::named(Object::PersistentVolume, &view.key);
    Plan {
        writes: vec![Write::Patch(place, body)],
        ..Plan::default()
    }
}
