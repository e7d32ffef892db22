//! From a larger request to a larger claim: what a claim wants of its volume, and what it says of itself once the volume
//! has come that far.
//!
//! The claim reads how far its volume is in the volume's status (`granted`, `capacity`, `usable`, `hold`), as a CSI
//! controller does in a cluster. Only measured sizes are reported.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use serde_json::{Value, json};
use trellis_api::kinds::{COPIES_HELD, GrowthRequest, POOL_FULL, Volume, VolumeStatus};
use trellis_api::step::Step;
use trellis_api::{Bytes, Hold, HoldReason};

use super::{provision, requester, status};
use crate::plan::{Note, Plan, claim_place};
use crate::stored::StoredClaim;
use crate::write::{Object, Place, Write};

/// Another size that a claim wants of its volume.
#[derive(Debug, PartialEq)]
pub struct Wish {
    /// The size.
    pub size: Bytes,
    /// Who asks; none if the claim only gives up a growth.
    pub growth: Option<GrowthRequest>,
}

impl Wish {
    /// The volume that is wanted instead of this one.
    pub fn of(&self, volume: &Volume) -> Volume {
        let mut volume = volume.clone();
        volume.spec.capacity = self.size;
        volume.spec.growth = self.growth.clone();
        volume
    }

    /// Stores the wish. The volume is written only if it is still the version that was looked at: it carries the time of
    /// the request, which a second look at an outdated volume must not move.
    pub fn write(&self, volume: &Volume) -> Write {
        let body = json!({
            "metadata": { "resourceVersion": volume.resource_version() },
            "spec": { "capacity": self.size, "growth": self.growth },
        });
        Write::Patch(Place::named(Object::Volume, volume.name_any()), body)
    }

    /// What the claim's owner is told of it.
    pub fn note(&self, claim: &PersistentVolumeClaim, volume: &Volume) -> Note {
        let name = volume.name_any();
        match &self.growth {
            Some(growth) => {
                let message = format!(
                    "growing volume {name} from {} to {}",
                    growth.from, self.size
                );
                Note::normal(claim, "Resizing", message)
            }
            None => {
                let was = volume.spec.capacity;
                let message = format!("the growth of volume {name} to {was} was called off");
                Note::normal(claim, "VolumeResizeCancelled", message)
            }
        }
    }
}

/// What the claim wants of its volume, if that is not what the volume wants already. What is `committed` can only be
/// kept. A hold says why the claim cannot have what it asks for, whatever the volume does.
pub fn wish(
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    committed: Bytes,
    now: &MicroTime,
) -> Result<Option<Wish>, Hold> {
    let size = provision::goal_of(claim)?.max(committed);
    if size == volume.spec.capacity {
        return Ok(None);
    }
    let from = status::reported(claim).unwrap_or_default();
    let growth = (size > from).then(|| GrowthRequest {
        by: requester::requester(claim),
        at: now.clone(),
        from,
    });
    Ok(Some(Wish { size, growth }))
}

/// The request cannot be granted, by nobody: it is no size, or too large.
pub fn refuse(
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    hold: &Hold,
    now: &MicroTime,
) -> Plan {
    let asked = status::requested(claim).unwrap_or(volume.spec.capacity);
    infeasible(claim, asked, hold, now)
}

fn infeasible(claim: &PersistentVolumeClaim, size: Bytes, hold: &Hold, now: &MicroTime) -> Plan {
    let body = status::infeasible(claim, size, hold, now);
    Plan {
        writes: changed(claim, body).into_iter().collect(),
        notes: vec![Note::held(claim, "VolumeResizeFailed", hold)],
        ..Plan::default()
    }
}

/// A change of the claim's status, if it is one.
fn changed(claim: &PersistentVolumeClaim, body: Value) -> Option<Write> {
    let is_new = status::changes(claim, &body);
    is_new.then(|| Write::PatchStatus(claim_place(claim), status::pinned(claim, body)))
}

/// What the claim and its persistent volume say once their volume stands like this. `volume` wants what the claim
/// wants.
pub fn report(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    told: &VolumeStatus,
    now: &MicroTime,
) -> Plan {
    let mut plan = of_size(look, claim, volume, told, now);
    if let Some(served) = told.capacity {
        plan.writes.extend(persistent_size(look, served));
    }
    tell_of_copies(claim, told, &mut plan, now);
    plan
}

fn persistent_size(look: &StoredClaim, served: Bytes) -> Option<Write> {
    let persistent = look.persistent_volume.as_ref()?;
    let capacity = persistent.spec.as_ref()?.capacity.as_ref()?;
    let size = capacity.get("storage")?.0.parse::<Bytes>().ok()?;
    let body = json!({ "spec": { "capacity": { "storage": served } } });
    let place = Place::named(Object::PersistentVolume, persistent.name_any());
    (size < served).then_some(Write::Patch(place, body))
}

/// What the claim says about its size.
fn of_size(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    told: &VolumeStatus,
    now: &MicroTime,
) -> Plan {
    let goal = volume.spec.capacity;
    let hold = told.hold.as_ref();
    if let Some(hold) = hold.filter(|_| told.granted < Some(goal)) {
        return infeasible(claim, goal, hold, now);
    }
    if told.usable >= Some(goal) {
        return finish(look, claim, told, goal);
    }
    let is_new = status::allocated(claim) != Some(goal)
        || status::progress(claim) == Some("ControllerResizeInfeasible");
    if is_new && status::reported(claim).is_some_and(|size| size < goal) {
        return Plan {
            writes: changed(claim, status::growing(claim, goal, now))
                .into_iter()
                .collect(),
            ..Plan::default()
        };
    }
    match hold {
        // Somebody else reports on a growth in use: the node that measures it.
        Some(hold) if !is_left_to_node(look) => held(claim, told, goal, hold, now),
        _ => Plan::default(),
    }
}

/// Whether the volume is used on the node of the home alone. That node reports how it grows, with what it has just
/// measured; no other node writes a claim.
fn is_left_to_node(look: &StoredClaim) -> bool {
    let nodes = look.stored.branches().map(|(each, _)| &each.spec.node);
    let mut nodes = nodes.peekable();
    nodes.peek().is_some() && nodes.all(|node| Some(node) == look.home.as_ref())
}

/// Every use has the size: the claim has it.
fn finish(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    told: &VolumeStatus,
    goal: Bytes,
) -> Plan {
    let is_reported = status::reported(claim).is_some_and(|size| size >= goal);
    let progress = status::progress(claim);
    // A request that could not be met was lowered again to what there is, or a report about an idle volume came after
    // the node had finished its growth. The node has nothing to finish then.
    let is_outdated = progress == Some("ControllerResizeInfeasible")
        || (is_reported && progress == Some("NodeResizePending"));
    if is_reported && progress.is_none() || is_left_to_node(look) && !is_outdated {
        return Plan::default();
    }
    let size = told.usable.unwrap_or(goal);
    let Some(write) = changed(claim, status::finished(size)) else {
        return Plan::default();
    };
    let last = told.growths.last();
    let behind = last.map(|growth| growth.behind_sentence());
    let message = format!("Resize volume succeeded: {size}") + &behind.unwrap_or_default();
    let note = Note::normal(claim, "VolumeResizeSuccessful", message);
    Plan {
        writes: vec![write],
        notes: vec![note].into_iter().filter(|_| !is_outdated).collect(),
        step: Some(Step::ClaimFinished),
        ..Plan::default()
    }
}

/// Something holds a growth that no node reports on.
fn held(
    claim: &PersistentVolumeClaim,
    told: &VolumeStatus,
    goal: Bytes,
    hold: &Hold,
    now: &MicroTime,
) -> Plan {
    let is_growing =
        status::reported(claim).is_none_or(|size| size < goal) || status::progress(claim).is_some();
    let is_foreign = matches!(
        hold.reason,
        HoldReason::ForeignData | HoldReason::FilesystemMismatch
    );
    // The volume has its size, and only its filesystem waits.
    let waits = told.capacity >= Some(goal) && !is_foreign;
    let (body, note) = if waits {
        let note = Note::normal(claim, "FileSystemResizeRequired", hold.message.clone());
        (status::filesystem_pending(claim, goal, hold, now), note)
    } else if is_foreign {
        let reason = if is_growing {
            "FileSystemResizeFailed"
        } else {
            "VolumeContentForeign"
        };
        (
            status::node_held(claim, goal, hold, now),
            Note::held(claim, reason, hold),
        )
    } else {
        (
            status::node_held(claim, goal, hold, now),
            Note::held(claim, "VolumeResizeFailed", hold),
        )
    };
    let write = changed(claim, body).filter(|_| is_growing);
    // Foreign data is told of at every look, growing or not; the recorder counts.
    let is_told = write.is_some() || is_foreign;
    Plan {
        writes: write.into_iter().collect(),
        notes: vec![note].into_iter().filter(|_| is_told).collect(),
        ..Plan::default()
    }
}

/// Makes the claim say what holds its copies, and whose pools are full. Other writes to the claim come first: they
/// outdate what was seen.
fn tell_of_copies(
    claim: &PersistentVolumeClaim,
    told: &VolumeStatus,
    plan: &mut Plan,
    now: &MicroTime,
) {
    let place = claim_place(claim);
    let is_of_claim = |write: &Write| matches!(write, Write::PatchStatus(of, _) if *of == place);
    if plan.writes.iter().any(is_of_claim) {
        return;
    }
    let of_volume = |kind: &str| told.conditions.iter().find(|each| each.type_ == kind);
    let said = [
        (status::COPIES, of_volume(COPIES_HELD).and_then(as_hold)),
        (status::POOL_FULL, of_volume(POOL_FULL).and_then(as_hold)),
    ];
    let said = said.each_ref().map(|(kind, hold)| (*kind, hold.as_ref()));
    if let Some(body) = status::of_copies(claim, &said, now) {
        plan.writes
            .push(Write::PatchStatus(place, status::pinned(claim, body)));
        let new = said
            .into_iter()
            .filter_map(|(kind, hold)| Some((kind, hold?)))
            .filter(|(kind, hold)| !status::says(claim, kind, hold));
        plan.notes
            .extend(new.map(|(kind, hold)| Note::held(claim, kind, hold)));
    }
}

/// What a condition of the volume says, as a hold.
fn as_hold(condition: &Condition) -> Option<Hold> {
    let reason = HoldReason::of_code(&condition.reason)?;
    Some(Hold::new(reason, condition.message.clone()))
}

/// Makes the volume say the mount options of its persistent volume, which somebody may have changed.
pub fn mount_options(look: &StoredClaim, volume: &Volume) -> Option<Write> {
    let persistent = look.persistent_volume.as_ref()?.spec.as_ref()?;
    let options = persistent.mount_options.clone().unwrap_or_default();
    let is_new = volume.spec.filesystem.is_some() && options != volume.spec.mount_options;
    let place = Place::named(Object::Volume, volume.name_any());
    let body = json!({ "spec": { "mountOptions": options } });
    is_new.then_some(Write::Patch(place, body))
}
