//! The embedded home plans claims and volumes together, so that what belongs together shares a flush.
//!
//! The rooms stay as they are in a cluster: the claim room turns a claim into the volume that it wants, the volume room
//! decides what becomes of such a volume, and the claim room tells the claim. In a cluster the store lies between them.
//! Here one look passes through all three, as if each had already seen what the one before is about to write:
//!
//! ```text
//!   claim ── wish ──► volume as it will be wanted ── volume::plan ──► goals, copies, status
//!   claim ◄─ report ─ volume as it will stand     ◄───────────────────┘
//! ```

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{Client, ResourceExt};
use serde_json::json;
use trellis_api::kinds::Volume;

use crate::carry::{self, Decided};
use crate::claim::provision::{self, Begin};
use crate::claim::{grow, reclaim};
use crate::plan::{Note, Plan, sooner};
use crate::queue::{Queue, Run};
use crate::record::Recorder;
use crate::stored::{StoredClaim, now};
use crate::volume::history;
use crate::volume::plan::{Planned, first_promises, place_copies, plan as plan_volume};
use crate::volume::surroundings::Surroundings;
use crate::world::World;
use crate::write::{Object, Place, Write};

/// Works on the volumes that `queue` names, for ever.
pub async fn run(world: Arc<World>, client: Client, queue: Queue, recorder: Recorder) {
    loop {
        let key = queue.next().await;
        let run = reconcile(&world, &client, &recorder, &key).await;
        queue.finish(&key, run);
    }
}

async fn reconcile(world: &World, client: &Client, recorder: &Recorder, key: &str) -> Run {
    if !carry::can_plan(world, key) {
        return Run::Done;
    }
    tracing::trace!(volume = key, "planning");
    let look = StoredClaim::gather(world, key);
    let tell = |note: Note| {
        tell_pods(world, recorder, &note);
        recorder.note(note);
    };
    carry::carry_out(world, client, key, decide(world, &look), tell).await
}

/// Plans with the ledger locked.
pub(crate) fn decide(world: &World, look: &StoredClaim) -> Decided {
    carry::decide(world, &look.stored.key, |around| plan(look, around, &now()))
}

/// A pod that uses a claim is told what is wrong with it.
fn tell_pods(world: &World, recorder: &Recorder, note: &Note) {
    let about = &note.about;
    if !note.warning || about.object != Object::Claim {
        return;
    }
    for pod in world.pods_using(&about.namespace, &about.name) {
        recorder.note(note.to_pod(&pod));
    }
}

/// The next writes for the claim and the volume in `look`.
pub fn plan(look: &StoredClaim, around: Surroundings<'_>, now: &MicroTime) -> Plan {
    let stored = &look.stored;
    match (&look.claim, &stored.volume) {
        (Some(claim), volume) if claim.metadata.deletion_timestamp.is_some() => {
            let plan = reclaim::release_claim(look, claim);
            match volume {
                Some(volume) if plan.writes.is_empty() => {
                    joined(plan_volume(stored, volume, around, now).plan, plan)
                }
                _ => plan,
            }
        }
        (Some(claim), None) => match provision::begin(look, claim, now) {
            Begin::Else(plan) => plan,
            Begin::Want(volume) => make(claim, *volume, around, now),
        },
        (Some(claim), Some(volume)) => bound(look, claim, volume, around, now),
        (None, volume) => {
            let plan = reclaim::reclaim(look);
            match volume {
                Some(volume) if plan.writes.is_empty() => {
                    joined(plan_volume(stored, volume, around, now).plan, plan)
                }
                _ => plan,
            }
        }
    }
}

/// Makes the volume that a claim wants, with places for its copies, or tells the claim why there are none.
fn make(
    claim: &PersistentVolumeClaim,
    mut volume: Volume,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> Plan {
    let name = volume.name_any();
    match place_copies(&name, &volume.spec, around.rooms) {
        Ok(places) => {
            let promises = first_promises(&name, &volume.spec, &places);
            volume.spec.placement = places;
            provision::make_volume(claim, &volume, promises)
        }
        Err(hold) => provision::unplaced(claim, &hold, now),
    }
}

/// A claim with its volume.
fn bound(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> Plan {
    let stored = &look.stored;
    let wish = match grow::wish(claim, volume, stored.committed(), now) {
        Ok(wish) => wish.filter(|_| stored.served().is_some()),
        Err(hold) => {
            let of_volume = plan_volume(stored, volume, around, now).plan;
            return joined(of_volume, grow::refuse(claim, volume, &hold, now));
        }
    };
    let Some(wish) = wish else {
        let planned = plan_volume(stored, volume, around, now);
        return told(look, claim, volume, planned, now);
    };
    if let Some(plan) = history::before_change(stored, volume, wish.size, now) {
        return joined(plan, Plan::default());
    }
    let wanted = wish.of(volume);
    let mut planned = plan_volume(stored, &wanted, around, now);
    // The wish outdates the version of the volume that anything else would be written to.
    let of_volume = Place::named(Object::Volume, &stored.key);
    planned
        .plan
        .writes
        .retain(|write| write.place() != &of_volume);
    let granted = planned.status.as_ref().and_then(|status| status.granted);
    let mut plan = told(look, claim, &wanted, planned, now);
    if wish.growth.is_none() || granted >= Some(wish.size) {
        plan.notes.insert(0, wish.note(claim, volume));
    }
    plan.writes.push(wish.write(volume));
    plan
}

/// What the volume needs, with what its claim says then.
fn told(
    look: &StoredClaim,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    planned: Planned,
    now: &MicroTime,
) -> Plan {
    let mut plan = planned.plan;
    let status = planned.status.unwrap_or_default();
    let Some(served) = status.capacity else {
        // Nothing is served yet that could be told of.
        return joined(plan, Plan::default());
    };
    if let Some(binding) = provision::complete(look, claim, volume, served) {
        if !binding.writes.is_empty() {
            // Binding changes the volume, which outdates a report on it. The report follows.
            let is_report = |write: &Write| matches!(write, Write::PatchStatus(of, _) if of.object == Object::Volume);
            plan.writes.retain(|write| !is_report(write));
        }
        return joined(plan, binding);
    }
    plan = joined(plan, grow::report(look, claim, volume, &status, now));
    plan.writes.extend(grow::mount_options(look, volume));
    plan.writes.extend(name_volume(look));
    plan
}

/// Uses that name a bound claim get its volume, as the claim itself did.
fn name_volume(look: &StoredClaim) -> impl Iterator<Item = Write> {
    let waiting = look.waiting.iter();
    let waiting = waiting.filter(|each| each.metadata.deletion_timestamp.is_none());
    waiting.map(|each| {
        let namespace = each.namespace().unwrap_or_default();
        let place = Place::within(Object::Attachment, namespace, each.name_any());
        let body = json!({
            "metadata": { "resourceVersion": each.resource_version() },
            "spec": { "volume": look.stored.key },
        });
        Write::Patch(place, body)
    })
}

/// One plan that does what both rooms want. A step of the claim is the later one.
fn joined(of_volume: Plan, of_claim: Plan) -> Plan {
    Plan {
        from_volumes: of_volume.writes.len(),
        writes: [of_volume.writes, of_claim.writes].concat(),
        promises: [of_volume.promises, of_claim.promises].concat(),
        notes: [of_volume.notes, of_claim.notes].concat(),
        step: of_claim.step.or(of_volume.step),
        waits_for_room: of_volume.waits_for_room || of_claim.waits_for_room,
        look_again_after: sooner(of_volume.look_again_after, of_claim.look_again_after),
    }
}
