//! From a larger request to a larger claim.
//!
//! The goals of all layers are raised in one go, since a goal is only a wish: what may rise when is
//! ruled by the ladder, on the node, from what has been observed. What comes back up is measured, and
//! only that is reported.

use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use serde_json::{Map, Value, json};
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{Content, Volume, VolumePhase, VolumeStatus};
use trellis_api::step::Step;
use trellis_api::{Bytes, Hold, HoldReason};

use super::plan::{LargerCopy, Note, Plan, Promise, Rooms, claim_place};
use super::{history, provision, status};
use crate::view::View;
use crate::world::TELL_AFTER;
use crate::write::{Object, Place, Write};

/// The next step of a bound claim towards the size it asks for. `copies_hold` says why the volume does not have as
/// many copies as it should, if so; that keeps no growth.
pub fn advance(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    rooms: &dyn Rooms,
    copies_hold: Option<Hold>,
    now: &MicroTime,
) -> Plan {
    let Some(served) = view.served() else {
        return Plan::default();
    };
    let stored = volume.spec.capacity;
    let wanted = match provision::goal(status::requested(claim).unwrap_or_default()) {
        Ok(wanted) => wanted,
        Err(hold) => {
            return refuse(
                claim,
                volume,
                status::requested(claim).unwrap_or(stored),
                hold,
                now,
            );
        }
    };
    let committed = largest_measured(view).max(served);
    let goal = wanted.max(committed);
    if goal != stored {
        // What the change ends is recorded first, so that the record is never made from an outdated look.
        let growths = history::before_change(view, claim, volume, goal, now);
        if growths != history::records(volume) {
            let change = Map::from_iter([("growths".to_owned(), json!(growths))]);
            return Plan {
                writes: vec![volume_status(volume, change)],
                ..Plan::default()
            };
        }
    }
    if goal > stored {
        return match make_room(view, goal, volume.spec.thick, rooms) {
            Ok(promises) => raise(view, claim, volume, goal, promises, now),
            Err(hold) => refuse(claim, volume, goal, hold, now),
        };
    }
    if goal < stored {
        return lower(view, claim, volume, goal);
    }
    if !goals_agree(view, stored) {
        return agree(view, claim, volume, rooms, now);
    }
    settle(view, claim, volume, served, copies_hold, now)
}

/// Whether every layer has the goal of the volume. One may lack it when only some of the writes of a plan
/// were stored, or when a plan from an outdated look set the layers that do not know it was outdated.
fn goals_agree(view: &View, goal: Bytes) -> bool {
    let mut replicas = view.replicas.iter();
    view.target
        .as_ref()
        .is_none_or(|target| target.spec.capacity == goal)
        && replicas.all(|replica| replica.spec.capacity == goal)
}

/// Gives every layer the goal of the volume again, with the room that it takes.
fn agree(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    rooms: &dyn Rooms,
    now: &MicroTime,
) -> Plan {
    let goal = volume.spec.capacity;
    match make_room(view, goal, volume.spec.thick, rooms) {
        Ok(promises) => Plan {
            writes: set_goals(view, volume, goal, json!(volume.spec.growth)),
            promises,
            ..Plan::default()
        },
        Err(hold) => refuse(claim, volume, goal, hold, now),
    }
}

/// The largest size that any copy already has: it is committed and can only be kept.
fn largest_measured(view: &View) -> Bytes {
    let sizes = view
        .replicas
        .iter()
        .filter_map(|replica| replica.status.as_ref()?.capacity);
    sizes.max().unwrap_or_default()
}

/// Room on the pool of every copy, or none at all.
fn make_room(
    view: &View,
    goal: Bytes,
    thick: bool,
    rooms: &dyn Rooms,
) -> Result<Vec<Promise>, Hold> {
    let mut promises = Vec::new();
    for replica in &view.replicas {
        let (name, pool) = (replica.name_any(), &replica.spec.pool);
        let has = replica.status.as_ref().and_then(|status| status.capacity);
        let has = replica.spec.capacity.max(has.unwrap_or_default());
        // What a copy has already is not asked for again, however full its pool is now.
        if goal > has {
            rooms.room(LargerCopy {
                replica: &name,
                pool,
                from: has,
                to: goal,
                thick,
                planned: &promises,
            })?;
        }
        promises.push(Promise {
            replica: name,
            pool: pool.clone(),
            size: goal,
        });
    }
    Ok(promises)
}

/// Raises the goals of every layer at once. A growth that was still under way is replaced.
fn raise(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    goal: Bytes,
    promises: Vec<Promise>,
    now: &MicroTime,
) -> Plan {
    let from = status::reported(claim).unwrap_or_default();
    let growth = json!({ "by": history::requester(claim), "at": now, "from": from });
    let mut writes = set_goals(view, volume, goal, growth);
    let body = status::pinned(claim, status::growing(claim, goal, now));
    writes.push(Write::PatchStatus(claim_place(claim), body));
    let message = format!("growing volume {} from {from} to {goal}", view.key);
    let note = Note::normal(claim, "Resizing", message);
    Plan {
        writes,
        promises,
        notes: vec![note],
        step: Some(Step::GoalsRaised),
        ..Plan::default()
    }
}

/// The request was lowered before it was committed: the rest of the growth is called off.
fn lower(view: &View, claim: &PersistentVolumeClaim, volume: &Volume, goal: Bytes) -> Plan {
    let writes = set_goals(view, volume, goal, Value::Null);
    let promises = view.replicas.iter().map(|replica| Promise {
        replica: replica.name_any(),
        pool: replica.spec.pool.clone(),
        size: goal,
    });
    let message = format!(
        "the growth of volume {} to {} was called off",
        view.key, volume.spec.capacity
    );
    let note = Note::normal(claim, "VolumeResizeCancelled", message);
    Plan {
        writes,
        promises: promises.collect(),
        notes: vec![note],
        ..Plan::default()
    }
}

/// Sets the goal of every layer. The volume's counts only for the volume that was looked at: it carries the
/// time of the request, which a second look at an outdated volume must not move.
fn set_goals(view: &View, volume: &Volume, goal: Bytes, growth: Value) -> Vec<Write> {
    let body = || json!({ "spec": { "capacity": goal } });
    let mut writes = vec![
        Write::Patch(
            Place::named(Object::Volume, &view.key),
            json!({
                "metadata": { "resourceVersion": volume.resource_version() },
                "spec": { "capacity": goal, "growth": growth },
            }),
        ),
        Write::Patch(Place::named(Object::Target, &view.key), body()),
    ];
    let replicas = view.replicas.iter();
    writes.extend(
        replicas.map(|each| Write::Patch(Place::named(Object::Replica, each.name_any()), body())),
    );
    writes
}

/// The size cannot be given now. Nothing below the claim changes, and I/O goes on.
fn refuse(
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    goal: Bytes,
    hold: Hold,
    now: &MicroTime,
) -> Plan {
    let mut writes = Vec::new();
    let body = status::infeasible(claim, goal, &hold, now);
    if status::changes(claim, &body) {
        writes.push(Write::PatchStatus(
            claim_place(claim),
            status::pinned(claim, body),
        ));
    }
    let known = volume
        .status
        .as_ref()
        .and_then(|status| status.hold.as_ref());
    if known != Some(&hold) {
        let mut change = Map::new();
        change.insert("hold".to_owned(), json!(hold));
        writes.push(volume_status(volume, change));
    }
    let note = Note::held(claim, "VolumeResizeFailed", &hold);
    let waits_for_room = hold.reason != HoldReason::SizeTooLarge;
    Plan {
        writes,
        notes: vec![note],
        waits_for_room,
        ..Plan::default()
    }
}

/// The goals are set: reports what has been measured, and finishes what nobody on a node will.
fn settle(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    served: Bytes,
    copies_hold: Option<Hold>,
    now: &MicroTime,
) -> Plan {
    let mut plan = Plan {
        waits_for_room: copies_hold.is_some(),
        ..Plan::default()
    };
    let goal = volume.spec.capacity;
    let persistent = view.persistent_volume.as_ref();
    let persistent_size = persistent.and_then(|each| {
        each.spec
            .as_ref()?
            .capacity
            .as_ref()?
            .get("storage")?
            .0
            .parse::<Bytes>()
            .ok()
    });
    if persistent_size.is_some_and(|size| size < served) {
        let body = json!({ "spec": { "capacity": { "storage": served } } });
        plan.writes.push(Write::Patch(
            Place::named(Object::PersistentVolume, &view.key),
            body,
        ));
    }
    let in_use = view.attachments.iter().any(|each| {
        each.status
            .as_ref()
            .is_some_and(|status| !status.rungs.is_empty())
    });
    if in_use {
        call_off(view, claim, goal, &mut plan);
    }
    let hold = if served >= goal && !in_use {
        idle(view, claim, served, now, &mut plan)
    } else {
        in_use_hold(view)
    };
    let hold = hold.or(copies_hold);
    let reached = status::reported(claim).is_some_and(|size| size >= goal) && served >= goal;
    let measured = VolumeStatus {
        phase: if reached {
            VolumePhase::Ready
        } else {
            VolumePhase::Resizing
        },
        capacity: Some(served),
        formatted: view.is_formatted(),
        conditions: conditions(volume, reached, hold.as_ref(), now),
        hold,
        growths: history::succeeded(view, claim, volume, now),
        recoveries: volume
            .status
            .as_ref()
            .map(|status| status.recoveries.clone())
            .unwrap_or_default(),
    };
    match put_off(volume, &measured, now) {
        Some(pause) => plan.look_again_after = Some(pause),
        None => report(volume, measured, &mut plan),
    }
    plan
}

/// How long to wait before it is told that a growth is under way: most are over before, and then what the
/// disk is spared is what the growth itself waits for.
fn put_off(volume: &Volume, measured: &VolumeStatus, now: &MicroTime) -> Option<Duration> {
    let under_way = measured.phase == VolumePhase::Resizing && measured.hold.is_none();
    let growth = volume.spec.growth.as_ref().filter(|_| under_way)?;
    let since = now.0.duration_since(growth.at.0);
    let since = Duration::try_from(since).ok()?;
    TELL_AFTER.checked_sub(since).filter(|rest| !rest.is_zero())
}

/// A request that could not be met was lowered again to what there is: the claim is at rest, and the node,
/// which finishes growths in use, has nothing to finish.
fn call_off(view: &View, claim: &PersistentVolumeClaim, goal: Bytes, plan: &mut Plan) {
    let refused = status::progress(claim) == Some("ControllerResizeInfeasible");
    let rungs = view
        .attachments
        .iter()
        .filter_map(|each| each.status.as_ref())
        .flat_map(|each| &each.rungs);
    let reached = rungs.into_iter().all(|rung| rung.size >= goal || rung.full);
    if refused && reached {
        let body = status::pinned(claim, status::finished(claim, goal));
        plan.writes
            .push(Write::PatchStatus(claim_place(claim), body));
    }
}

/// Nobody uses the volume: the claim is finished here, unless its filesystem has to grow first and could not
/// where it lies.
fn idle(
    view: &View,
    claim: &PersistentVolumeClaim,
    served: Bytes,
    now: &MicroTime,
    plan: &mut Plan,
) -> Option<Hold> {
    if !content_is_known(view, served) {
        // The node is about to look; a size is not reported before.
        return None;
    }
    if let Some(hold) = view.foreign_content() {
        return foreign(claim, served, hold, now, plan);
    }
    let behind = view.contents().into_iter().find_map(|content| {
        let content = content?;
        let size = content.size?;
        let expected = view.volume.as_ref()?.spec.filesystem.is_some();
        (expected && !content.full && size < served).then(|| {
            let message = format!(
                "The volume has {served}; its {} has {size} and grows when it is mounted.",
                content.kind
            );
            let not_yet = || Hold::new(HoldReason::NotMounted, message);
            content.hold.clone().unwrap_or_else(not_yet)
        })
    });
    let (body, hold) = match behind {
        Some(hold) => (
            status::filesystem_pending(claim, served, &hold, now),
            Some(hold),
        ),
        None if status::reported(claim).is_some_and(|size| size >= served)
            && status::progress(claim).is_none() =>
        {
            return None;
        }
        None => {
            plan.step = Some(Step::ClaimFinished);
            (status::finished(claim, served), None)
        }
    };
    if status::changes(claim, &body) {
        plan.writes.push(Write::PatchStatus(
            claim_place(claim),
            status::pinned(claim, body),
        ));
        let (reason, message) = match &hold {
            Some(hold) => ("FileSystemResizeRequired", hold.message.clone()),
            None => (
                "VolumeResizeSuccessful",
                format!("Resize volume succeeded: {served}"),
            ),
        };
        plan.notes.push(Note::normal(claim, reason, message));
    } else {
        plan.step = None;
    }
    hold
}

/// The bytes are not those of the filesystem that the claim shall have: a growth of it is not done, whatever size the
/// device below has.
fn foreign(
    claim: &PersistentVolumeClaim,
    served: Bytes,
    hold: Hold,
    now: &MicroTime,
    plan: &mut Plan,
) -> Option<Hold> {
    let is_growing = status::reported(claim).is_none_or(|size| size < served)
        || status::progress(claim).is_some();
    let body = status::node_held(claim, served, &hold, now);
    if is_growing && status::changes(claim, &body) {
        let body = status::pinned(claim, body);
        plan.writes
            .push(Write::PatchStatus(claim_place(claim), body));
    }
    let reason = if is_growing {
        "FileSystemResizeFailed"
    } else {
        "VolumeContentForeign"
    };
    plan.notes.push(Note::held(claim, reason, &hold));
    Some(hold)
}

/// Whether it is known what the bytes of an idle volume are, at the size that it has now.
fn content_is_known(view: &View, served: Bytes) -> bool {
    let expected = view
        .volume
        .as_ref()
        .is_some_and(|volume| volume.spec.filesystem.is_some());
    let known = |content: Option<&Content>| content.is_some_and(|content| content.of == served);
    !expected || view.contents().into_iter().all(known)
}

/// What keeps the rungs on the nodes, lowest first.
fn in_use_hold(view: &View) -> Option<Hold> {
    let of_target = || view.target.as_ref()?.status.as_ref()?.hold.clone();
    let of_replica = || {
        let mut replicas = view.replicas.iter();
        replicas.find_map(|replica| replica.status.as_ref()?.hold.clone())
    };
    // One of several copies that cannot rise keeps nothing, as long as the target can.
    let below = if view.is_replicated() {
        of_target()
    } else {
        of_replica()
    };
    below.or_else(|| {
        view.attachments.iter().find_map(|each| {
            let status = each.status.as_ref()?;
            let of_rung = || status.rungs.iter().find_map(|rung| rung.hold.clone());
            status.hold.clone().or_else(of_rung)
        })
    })
}

fn conditions(
    volume: &Volume,
    reached: bool,
    hold: Option<&Hold>,
    now: &MicroTime,
) -> Vec<Condition> {
    let old = volume
        .status
        .as_ref()
        .map(|status| status.conditions.as_slice())
        .unwrap_or_default();
    let (reason, message) = match hold {
        Some(hold) => (hold.reason.code(), hold.message.as_str()),
        None if reached => ("Reached", ""),
        None => ("Growing", ""),
    };
    let says = [
        Says {
            kind: "Ready",
            is_true: true,
            reason: "Served",
            message: "",
        },
        Says {
            kind: "Resizing",
            is_true: !reached,
            reason,
            message,
        },
    ];
    renew(old, &says, now)
}

/// Writes the volume's status if anything in it is new.
fn report(volume: &Volume, measured: VolumeStatus, plan: &mut Plan) {
    let old = volume.status.clone().unwrap_or_default();
    if old == measured {
        return;
    }
    let mut change = Map::new();
    change.insert("phase".to_owned(), json!(measured.phase));
    change.insert("capacity".to_owned(), json!(measured.capacity));
    if measured.formatted {
        change.insert("formatted".to_owned(), json!(true));
    }
    change.insert("hold".to_owned(), json!(measured.hold));
    change.insert("conditions".to_owned(), json!(measured.conditions));
    if old.growths != measured.growths {
        change.insert("growths".to_owned(), json!(measured.growths));
    }
    plan.writes.push(volume_status(volume, change));
}

/// A change of the volume's status, for the volume that was looked at and no later one.
fn volume_status(volume: &Volume, change: Map<String, Value>) -> Write {
    let body = json!({
        "metadata": { "resourceVersion": volume.resource_version() },
        "status": change,
    });
    Write::PatchStatus(Place::named(Object::Volume, volume.name_any()), body)
}
