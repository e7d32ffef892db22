//! From a larger request to a larger claim.
//!
//! The goals of all layers are raised at once, because a goal is only a wish. The ladder on the node decides, from what
//! it has observed, which layer may rise when. Only measured sizes are reported back.

use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use serde_json::{Map, Value, json};
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{Content, Volume, VolumePhase, VolumeStatus};
use trellis_api::step::Step;
use trellis_api::{Bytes, Hold, HoldReason};

use super::{history, provision, status};
use crate::plan::{Note, Plan, Promise, claim_place};
use crate::view::View;
use crate::volume::redundancy;
use crate::volume::rooms::{LargerCopy, Rooms};
use crate::world::TELL_AFTER;
use crate::write::{Object, Place, Write};

/// The next step of a bound claim towards the size it asks for. `copies_hold` says why the volume does not have as many
/// copies as it should, if so; that does not stop a growth.
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
    let wanted = match provision::goal_of(claim) {
        Ok(wanted) => wanted,
        Err(hold) => {
            let asked = status::requested(claim).unwrap_or(stored);
            return refuse(claim, volume, asked, hold, now);
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
        // What a copy already has is not asked for again, however full its pool is now.
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

/// The request was lowered before it was committed: the rest of the growth is cancelled.
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

/// Sets the goal of every layer. The volume is written only if it is still the version that was looked at: it carries
/// the time of the request, which a second look at an outdated volume must not move.
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

/// The size cannot be granted now. Nothing below the claim changes, and I/O goes on.
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
    // Another size is another growth, whatever becomes of it.
    let is_told = status::allocated(claim) == Some(goal);
    let since = status::refused_since(claim).filter(|_| is_told);
    let began = since.map_or_else(|| now.clone(), |since| MicroTime(since.0));
    let conditions = conditions(volume, false, Some(&hold), Some(&began), now);
    let known = volume.status.clone().unwrap_or_default();
    if known.hold.as_ref() != Some(&hold) || known.conditions != conditions {
        let mut change = Map::new();
        change.insert("hold".to_owned(), json!(hold));
        change.insert("conditions".to_owned(), json!(conditions));
        writes.push(volume_status(volume, change));
    }
    let note = Note::held(claim, "VolumeResizeFailed", &hold);
    let waits_for_room = !provision::is_about_size(hold.reason);
    Plan {
        writes,
        notes: vec![note],
        waits_for_room,
        ..Plan::default()
    }
}

/// The goals are set: reports what has been measured, and finishes what no node will finish.
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
    plan.writes.extend(take_mount_options(view, volume));
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
        let hold = in_use_hold(view);
        if let Some(hold) = hold.as_ref().filter(|_| served < goal && !in_use) {
            held_below(claim, goal, hold, now, &mut plan);
        }
        hold
    };
    let hold = hold.or(copies_hold);
    let reached = status::reported(claim).is_some_and(|size| size >= goal) && served >= goal;
    let began = volume.spec.growth.as_ref().map(|growth| growth.at.clone());
    let measured = VolumeStatus {
        phase: if reached {
            VolumePhase::Ready
        } else {
            VolumePhase::Resizing
        },
        capacity: Some(served),
        formatted: view.is_formatted(),
        conditions: conditions(volume, reached, hold.as_ref(), began.as_ref(), now),
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

/// Makes the volume say the mount options of its persistent volume, which somebody may have changed.
fn take_mount_options(view: &View, volume: &Volume) -> Option<Write> {
    let persistent = view.persistent_volume.as_ref()?.spec.as_ref()?;
    let options = persistent.mount_options.clone().unwrap_or_default();
    let is_new = volume.spec.filesystem.is_some() && options != volume.spec.mount_options;
    let place = Place::named(Object::Volume, &view.key);
    let body = json!({ "spec": { "mountOptions": options } });
    is_new.then_some(Write::Patch(place, body))
}

/// How long to wait before reporting that a growth is under way. Most growths are over by then, and the write that is
/// saved would have delayed them.
fn put_off(volume: &Volume, measured: &VolumeStatus, now: &MicroTime) -> Option<Duration> {
    let under_way = measured.phase == VolumePhase::Resizing && measured.hold.is_none();
    let growth = volume.spec.growth.as_ref().filter(|_| under_way)?;
    let since = now.0.duration_since(growth.at.0);
    let since = Duration::try_from(since).ok()?;
    TELL_AFTER.checked_sub(since).filter(|rest| !rest.is_zero())
}

/// Ends a growth that no node will end. Either a request that could not be met was lowered again to what there is, or a
/// report about an idle volume came after the node had finished its growth. The claim is at rest, and the node, which
/// finishes growths in use, has nothing to finish.
fn call_off(view: &View, claim: &PersistentVolumeClaim, goal: Bytes, plan: &mut Plan) {
    let refused = status::progress(claim) == Some("ControllerResizeInfeasible");
    let is_reported = status::reported(claim).is_some_and(|size| size >= goal);
    let outdated = is_reported && status::progress(claim) == Some("NodeResizePending");
    let rungs = view
        .attachments
        .iter()
        .filter_map(|each| each.status.as_ref())
        .flat_map(|each| &each.rungs);
    let reached = rungs.into_iter().all(|rung| rung.size >= goal || rung.full);
    if (refused || outdated) && reached {
        let body = status::pinned(claim, status::finished(claim, goal));
        plan.writes
            .push(Write::PatchStatus(claim_place(claim), body));
    }
}

/// Nobody uses the volume: the claim is finished here, unless its filesystem has to grow first and could not do so
/// while idle.
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
                format!("Resize volume succeeded: {served}") + &copies_behind(view, served),
            ),
        };
        plan.notes.push(Note::normal(claim, reason, message));
    } else {
        plan.step = None;
    }
    hold
}

/// Which copies have not grown with the volume.
fn copies_behind(view: &View, served: Bytes) -> String {
    let target = view.target.as_ref();
    let status = target.and_then(|target| target.status.as_ref());
    let seen = status.map_or(&[][..], |status| &status.replicas);
    redundancy::behind_sentence(view, seen, served)
}

/// The bytes are not the filesystem that the claim should have: its growth is not done, whatever size the device below
/// has.
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

/// The layers below an idle claim cannot rise. No node reports that, because none uses the volume.
fn held_below(
    claim: &PersistentVolumeClaim,
    goal: Bytes,
    hold: &Hold,
    now: &MicroTime,
    plan: &mut Plan,
) {
    let body = status::node_held(claim, goal, hold, now);
    if status::changes(claim, &body) {
        let body = status::pinned(claim, body);
        plan.writes
            .push(Write::PatchStatus(claim_place(claim), body));
        plan.notes
            .push(Note::held(claim, "VolumeResizeFailed", hold));
    }
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

/// What holds the rungs on the nodes, lowest first.
fn in_use_hold(view: &View) -> Option<Hold> {
    let of_target = || view.target.as_ref()?.status.as_ref()?.hold.clone();
    let of_replica = || {
        let mut replicas = view.replicas.iter();
        replicas.find_map(|replica| replica.status.as_ref()?.hold.clone())
    };
    // One of several copies that cannot rise holds nothing up, as long as the target can.
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

/// `Ready` and `Resizing`, of a growth that began at `began`.
fn conditions(
    volume: &Volume,
    reached: bool,
    hold: Option<&Hold>,
    began: Option<&MicroTime>,
    now: &MicroTime,
) -> Vec<Condition> {
    let old = volume
        .status
        .as_ref()
        .map(|status| status.conditions.as_slice())
        .unwrap_or_default();
    let (reason, message) = match hold.filter(|_| !reached) {
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
            began: None,
        },
        Says {
            kind: "Resizing",
            is_true: !reached,
            reason,
            message,
            began,
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    // Fails if words about an idle volume that came after its growth was finished in use stay until the next resync.
    #[test]
    fn what_was_said_of_an_idle_volume_goes_when_its_growth_is_finished_in_use() {
        let claim = |reported: &str| -> PersistentVolumeClaim {
            let claim = json!({
                "metadata": { "name": "c", "namespace": "d", "resourceVersion": "7" },
                "spec": { "resources": { "requests": { "storage": "2Gi" } } },
                "status": {
                    "phase": "Bound", "capacity": { "storage": reported },
                    "allocatedResources": { "storage": "2Gi" },
                    "allocatedResourceStatuses": { "storage": "NodeResizePending" },
                    "conditions": [{
                        "type": "FileSystemResizePending", "status": "True", "reason": "FilesystemUnclean",
                    }],
                },
            });
            serde_json::from_value(claim).expect("a claim")
        };
        let view = |filesystem: &str| {
            let attachment = json!({
                "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
                "metadata": { "name": "a", "namespace": "d" },
                "spec": { "claimName": "c", "node": "n", "consumer": { "mount": { "path": "/mnt" } } },
                "status": { "rungs": [
                    { "rung": "filesystem", "size": filesystem, "observedAt": "2026-11-15T12:00:00.000000Z" },
                ]},
            });
            View {
                attachments: vec![Arc::new(
                    serde_json::from_value(attachment).expect("an attachment"),
                )],
                ..View::default()
            }
        };
        let writes = |reported: &str, filesystem: &str| {
            let mut plan = Plan::default();
            call_off(
                &view(filesystem),
                &claim(reported),
                Bytes::gib(2),
                &mut plan,
            );
            plan.writes
        };
        let finished = writes("2Gi", "2Gi");
        assert_eq!(finished.len(), 1);
        let Write::PatchStatus(_, body) = &finished[0] else {
            panic!("{finished:?}");
        };
        assert!(body["status"]["conditions"].is_null(), "{body}");
        assert!(body["status"]["allocatedResourceStatuses"].is_null());
        // A reader keeps the filesystem small, and a growth that is not reported is the node's to finish.
        assert_eq!(writes("1Gi", "1Gi"), []);
        assert_eq!(writes("1Gi", "2Gi"), []);
    }
}
