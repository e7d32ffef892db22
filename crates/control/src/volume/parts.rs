//! The parts of a volume: its target and its first copies, made once, and the identities that they keep.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use serde_json::json;
use trellis_api::kinds::{
    CopiesWanted, DATA_FINALIZER, Placement, Replica, ReplicaSpec, Target, TargetSpec,
    VOLUME_LABEL, Volume,
};
use trellis_api::step::Step;
use trellis_api::{Hold, HoldReason};

use super::copies::{tell_target, wanted};
use crate::plan::Plan;
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// What a volume reserves from the moment it is stored: the names that its first replicas have or will have,
/// and the pools that were chosen for them.
pub fn reservations(volume: &Volume) -> Vec<(String, String)> {
    let places = volume.spec.placement.iter().zip(0..);
    places
        .map(|(place, index)| (replica_name(&volume.name_any(), index), place.pool.clone()))
        .collect()
}

/// The name of a copy.
pub fn replica_name(volume: &str, index: u32) -> String {
    format!("{volume}-{index}")
}

/// Whether a volume is known to have been served. Until then it has a claim on the places of its first copies.
pub fn was_served(volume: &Volume) -> bool {
    let status = volume.status.as_ref();
    status.is_some_and(|status| status.capacity.is_some())
}

/// The target and the first copies of a volume, as far as they are missing; none if nothing is.
pub fn make_parts(view: &StoredVolume, volume: &Volume) -> Option<Plan> {
    let owner = volume.controller_owner_ref(&())?;
    let places = &volume.spec.placement;
    let mut writes = Vec::new();
    if view.target.is_none() {
        let spec = TargetSpec {
            volume: view.key.clone(),
            node: places.first()?.node.clone(),
            term: 0,
            rests: false,
            capacity: volume.spec.capacity,
            copies: first_copies(view, volume),
        };
        let mut target = Target::new(&view.key, spec);
        target.metadata.owner_references = Some(vec![owner.clone()]);
        target
            .labels_mut()
            .insert(VOLUME_LABEL.to_owned(), view.key.clone());
        writes.push(Write::Create(
            Place::named(Object::Target, &view.key),
            json!(target),
        ));
    }
    if was_served(volume) || !volume.spec.volume_id.is_empty() {
        // A volume that was once served or bound had its copies, and they have names of their own. Another, empty one in
        // their place would be a loss that looks like a volume.
        if view.replicas.is_empty() {
            return Some(lost(view, volume));
        }
    } else {
        for (place, index) in places.iter().zip(0..) {
            let name = replica_name(&view.key, index);
            if view.replicas.iter().all(|each| each.name_any() != name) {
                writes.push(make_replica(view, volume, &owner, name, place));
            }
        }
    }
    if writes.is_empty() {
        return tell_target(view, volume);
    }
    let step = Some(Step::VolumeObjectsWritten);
    Some(Plan {
        writes,
        step,
        ..Plan::default()
    })
}

/// What a new target is told of its copies. The identity of a single one is the volume's. Several have none before they
/// are stored; the target is told when they are.
fn first_copies(view: &StoredVolume, volume: &Volume) -> CopiesWanted {
    let mut copies = wanted(view, volume);
    if !volume.spec.is_behind_target() {
        copies.staying = vec![volume.identity()];
    }
    copies
}

/// A new copy of the volume.
pub fn make_replica(
    view: &StoredVolume,
    volume: &Volume,
    owner: &OwnerReference,
    name: String,
    place: &Placement,
) -> Write {
    let identity = volume.identity();
    let spec = ReplicaSpec {
        volume: view.key.clone(),
        volume_id: identity.clone(),
        replica_id: if volume.spec.is_behind_target() {
            String::new()
        } else {
            identity
        },
        pool: place.pool.clone(),
        node: place.node.clone(),
        capacity: volume.spec.capacity,
        thick: volume.spec.thick,
        discard: false,
    };
    let mut replica = Replica::new(&name, spec);
    replica.metadata.owner_references = Some(vec![owner.clone()]);
    replica.metadata.finalizers = Some(vec![DATA_FINALIZER.to_owned()]);
    replica
        .labels_mut()
        .insert(VOLUME_LABEL.to_owned(), view.key.clone());
    Write::Create(Place::named(Object::Replica, name), json!(replica))
}

/// The copy of a volume that was in service is no longer stored.
fn lost(view: &StoredVolume, volume: &Volume) -> Plan {
    let message = format!(
        "Every replica of volume {} is gone from the store.",
        view.key
    );
    let hold = Hold::new(HoldReason::ReplicaDamaged, message);
    if volume
        .status
        .as_ref()
        .and_then(|status| status.hold.as_ref())
        == Some(&hold)
    {
        return Plan::default();
    }
    let place = Place::named(Object::Volume, &view.key);
    let write = Write::PatchStatus(place, json!({ "status": { "hold": hold } }));
    Plan {
        writes: vec![write],
        ..Plan::default()
    }
}

/// Records the identities of volume and copies that are still the uids of their objects. Objects that are made again,
/// from a backup or from the copies, have other uids, and must find the same bytes.
pub fn name_identities(view: &StoredVolume) -> Vec<Write> {
    let mut writes = Vec::new();
    if let Some(volume) = view
        .volume
        .as_ref()
        .filter(|each| each.spec.volume_id.is_empty())
    {
        let body = json!({
            "metadata": { "uid": volume.uid() },
            "spec": { "volumeId": volume.identity() },
        });
        writes.push(Write::Patch(Place::named(Object::Volume, &view.key), body));
    }
    let unnamed = view
        .replicas
        .iter()
        .filter(|each| each.spec.replica_id.is_empty() && is_measured(each));
    writes.extend(unnamed.map(|replica| {
        let body = json!({
            "metadata": { "uid": replica.uid() },
            "spec": { "replicaId": replica.identity() },
        });
        Write::Patch(Place::named(Object::Replica, replica.name_any()), body)
    }));
    writes
}

fn is_measured(replica: &Replica) -> bool {
    let status = replica.status.as_ref();
    status.is_some_and(|status| status.capacity.is_some())
}
