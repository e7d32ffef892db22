//! The copies of a volume on this node: where each is, what happens to it, and what the target of several copies is
//! told.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use trellis_api::about::About;
use trellis_api::kinds::{Members, Pool, Replica, Target, Volume};

use super::{Fate, Node, ReplicaJob, ReplicatedJob, TargetJob};
use crate::disks;
use crate::node::machine::{ReplicaPlace, ScrubWish, TargetPlace};
use crate::stored::StoredVolume;
use crate::volume::copies::{staying, to_begin_with};
use crate::volume::parts::{reservations, was_served};
use crate::volume::recovery::is_recovered;
use crate::volume::serving::scrubbed_since;

/// Copies that are being deleted and whose pools are no longer known.
pub(super) fn adrift(
    view: &StoredVolume,
    node: &Node,
    pool_of: &dyn Fn(&str) -> Option<Arc<Pool>>,
) -> Vec<Arc<Replica>> {
    let is_adrift = |each: &&Arc<Replica>| {
        each.spec.node == node.name
            && each.metadata.deletion_timestamp.is_some()
            && pool_of(&each.spec.pool).is_none()
    };
    view.replicas.iter().filter(is_adrift).cloned().collect()
}

/// The work for a volume of several copies.
pub(super) fn replicated_job(
    view: &StoredVolume,
    node: &Node,
    copies: Vec<ReplicaJob>,
    adrift: Vec<Arc<Replica>>,
    pool_of: &dyn Fn(&str) -> Option<Arc<Pool>>,
) -> ReplicatedJob {
    let of_volume = view.target.as_ref().zip(view.volume.as_ref());
    let here = of_volume.filter(|(target, _)| target.spec.node == node.name);
    let target = here.filter(|(target, _)| !target.spec.rests);
    let resting = here.filter(|(target, _)| target.spec.rests);
    let elsewhere = of_volume.filter(|(target, _)| target.spec.node != node.name);
    let addresses = view.replicas.iter().filter_map(|each| {
        let status = each.status.as_ref()?;
        // On this node by its socket, and from elsewhere by its link.
        let address = if each.spec.node == node.name {
            &status.address
        } else {
            &status.link
        };
        Some((each.identity(), address.clone()?))
    });
    let unlinked = view.replicas.iter().filter(|each| {
        let status = each.status.as_ref();
        let is_served =
            status.is_some_and(|status| status.address.is_some() && status.link.is_none());
        each.spec.node != node.name && is_served
    });
    let unlinked: BTreeSet<String> = unlinked.map(|each| each.spec.node.clone()).collect();
    ReplicatedJob {
        target: target.map(|(target, volume)| TargetJob {
            object: target.clone(),
            place: TargetPlace {
                volume: view.key.clone(),
                volume_id: volume.identity(),
                members: to_begin_with(view, &target.spec.copies),
                wanted: target.spec.copies.clone(),
                is_recovered: is_recovered(view, volume),
                recovery: volume.spec.recovery.clone(),
                fails_after: volume.spec.fails_after(),
                asks_every: volume
                    .spec
                    .patience_seconds
                    .map(u64::from)
                    .map(Duration::from_secs),
                when_full: volume.spec.when_full,
                addresses: addresses.collect(),
                unlinked: unlinked.into_iter().collect(),
                scrub: scrub_wish(target, volume),
                term: target.spec.term,
                iscsi: volume.spec.iscsi.clone(),
                secret: None,
            },
            first_copies: reservations(volume).len(),
            shared_disks: if volume.spec.allow_shared_disk {
                Vec::new()
            } else {
                disks::shared_by(staying(view), pool_of)
            },
        }),
        resting: resting.map(|(target, _)| target.clone()),
        elsewhere: elsewhere.map(|(target, _)| target.spec.node.clone()),
        agreed: elsewhere.or(resting).and_then(|(target, _)| agreed(target)),
        copies,
        adrift,
    }
}

/// Which copies count, if the target has said so after it was told which ones are to stay: from then on it lets no other
/// copy count.
fn agreed(target: &Target) -> Option<Members> {
    let status = target.status.as_ref()?;
    let is_of_now = status.observed_generation == target.metadata.generation;
    status.members.clone().filter(|_| is_of_now)
}

/// When the copies are to be compared, and what is known of the last time: the target may have run on another node
/// then.
fn scrub_wish(target: &Target, volume: &Volume) -> ScrubWish {
    let last = target.status.as_ref();
    let last = last.and_then(|status| status.scrub.clone());
    let finished = last.as_ref().and_then(|last| last.finished.as_deref());
    ScrubWish {
        requested: volume.spec.scrub_requested.clone(),
        interval_seconds: volume.spec.scrub_interval_seconds,
        since: Some(scrubbed_since(volume, finished).to_string()),
        last,
    }
}

/// The work for one copy; none if its pool is not known.
pub(super) fn replica_job(
    view: &StoredVolume,
    object: &Arc<Replica>,
    pool_of: &dyn Fn(&str) -> Option<Arc<Pool>>,
) -> Option<ReplicaJob> {
    let pool = pool_of(&object.spec.pool)?;
    let place = ReplicaPlace {
        pool: PathBuf::from(&pool.spec.path),
        pool_id: pool.status.as_ref().and_then(|status| status.id.clone()),
        name: object.name_any(),
        volume: view.key.clone(),
        volume_id: object.spec.volume_id.clone(),
        replica_id: object.identity(),
        thick: object.spec.thick,
        about: about(view, object),
        served: view.is_replicated(),
        checksums: view
            .volume
            .as_ref()
            .is_none_or(|volume| volume.spec.checksums),
        target_node: view.target.as_ref().map(|target| target.spec.node.clone()),
    };
    let measured = was_measured(view, object);
    // A replica goes with its volume. The volume goes only when its claim was deleted, and says so in `discard`. If
    // somebody deletes a replica by hand while its volume stays, it is marked and kept; one of several leaves once it
    // no longer counts. If the volume is merely unknown, the replica loses its object but not its bytes. Until a volume
    // is known to have been served, it has a claim on the places of its first copies, and they stay.
    let is_deleted = object.metadata.deletion_timestamp.is_some();
    let can_leave = view.is_replicated() && view.volume.as_deref().is_some_and(was_served);
    let fate = match (&view.volume, measured) {
        (None, _) if is_deleted && object.spec.discard => Fate::Remove,
        (None, _) if is_deleted => Fate::Forget,
        (Some(_), _) if is_deleted && can_leave => Fate::Leave,
        (_, true) => Fate::Find,
        (_, false) => Fate::Make,
    };
    Some(ReplicaJob {
        object: object.clone(),
        place,
        fate,
    })
}

/// Whether the copy ever existed. Its status says so. If the status is lost, its identity does: it is recorded only
/// after the copy was measured.
fn was_measured(view: &StoredVolume, object: &Replica) -> bool {
    let status = object.status.as_ref();
    let is_named = if object.is_of_several() {
        !object.spec.replica_id.is_empty()
    } else {
        let volume = view.volume.as_ref();
        volume.is_some_and(|volume| !volume.spec.volume_id.is_empty())
    };
    is_named || status.is_some_and(|status| status.capacity.is_some())
}

/// What a copy should say about itself, so that its pool can be read without the store.
fn about(view: &StoredVolume, replica: &Replica) -> Option<About> {
    let volume = view.volume.as_ref()?;
    let spec = &volume.spec;
    let claim = spec.claim.as_ref();
    Some(About {
        volume: view.key.clone(),
        volume_id: volume.identity(),
        replica_id: replica.identity(),
        namespace: claim
            .map(|claim| claim.namespace.clone())
            .unwrap_or_default(),
        claim: claim.map(|claim| claim.name.clone()).unwrap_or_default(),
        access_modes: spec.access_modes.clone(),
        pools: spec.pools.clone(),
        class: spec.class.clone(),
        size: replica.spec.capacity,
        filesystem: spec.filesystem.map(|kind| kind.name().to_owned()),
        formatted: view.is_formatted(),
        replicated: spec.is_behind_target(),
        replicas: spec.replicas,
        consistency_factor: spec.consistency_factor,
        via: spec.via.map(|via| via.name().to_owned()),
        thick: spec.thick,
        online_growth: spec.online_growth,
        allow_shared_disk: spec.allow_shared_disk,
        when_below_quorum: Some(spec.when_below_quorum.name().to_owned()),
        when_full: Some(spec.when_full.name().to_owned()),
        patience_seconds: spec.patience_seconds,
        checksums: Some(spec.checksums),
        scrub_interval_seconds: Some(spec.scrub_interval_seconds),
        iscsi: spec.iscsi.clone(),
        mount_options: spec.mount_options.clone(),
    })
}
