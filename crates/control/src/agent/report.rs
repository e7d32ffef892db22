//! What a pass found, as the status of the stored objects. Only changes are written.

mod replicated;
mod resizing;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use serde_json::{Value, json};
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{
    ATTACHMENT_FINALIZER, AttachmentPhase, AttachmentStatus, DATA_FINALIZER, Replica, ReplicaPhase,
    ReplicaStatus, RungStatus, TargetStatus,
};
use trellis_api::{Bytes, Hold, HoldReason, Next, Observed, Rung, next_step};

use self::resizing::Asked;
use super::job::{Job, UseJob};
use super::machine::Stage;
use super::work::Outcome;
use crate::claim::plan::{Note, claim_place};
use crate::claim::{provision, status};
use crate::view::View;
use crate::write::{Object, Place, Write};

/// What to tell a claim about copies that have rotted.
pub fn rot_note(view: &View, outcome: &Outcome) -> Option<Note> {
    replicated::rot_note(view, outcome)
}

/// The replica's and the target's status, as far as the ladder is known.
pub fn replica_writes(view: &View, job: &Job, outcome: &Outcome, now: &MicroTime) -> Vec<Write> {
    if let Some(replicated) = &job.replicated {
        return replicated::writes(view, job, replicated, outcome, now);
    }
    let Some(replica) = &job.replica else {
        return Vec::new();
    };
    let mut writes = Vec::new();
    match &outcome.replica {
        Some(Ok(found)) => {
            let path = found.data.display().to_string();
            writes.extend(measured(
                view,
                &replica.object,
                &outcome.ladder,
                job.goal,
                Some(path),
                outcome,
                now,
            ));
        }
        Some(Err(hold)) => writes.extend(refused(&Asked::of(view), &replica.object, hold, now)),
        None => {}
    }
    if outcome.removed {
        writes.push(without_finalizer(
            Place::named(Object::Replica, replica.object.name_any()),
            replica.object.finalizers(),
            DATA_FINALIZER,
        ));
    }
    writes
}

/// The lower rungs, reported while the upper ones are still being raised.
pub fn early_writes(view: &View, job: &Job, ladder: &[RungStatus], now: &MicroTime) -> Vec<Write> {
    let Some(replica) = &job.replica else {
        return Vec::new();
    };
    measured(
        view,
        &replica.object,
        ladder,
        job.goal,
        None,
        &Outcome::default(),
        now,
    )
}

fn measured(
    view: &View,
    replica: &Replica,
    ladder: &[RungStatus],
    goal: Bytes,
    path: Option<String>,
    outcome: &Outcome,
    now: &MicroTime,
) -> Vec<Write> {
    let rung = |wanted: Rung| ladder.iter().find(|each| each.rung == wanted).cloned();
    let asked = Asked::of(view);
    let old = replica.status.clone().unwrap_or_default();
    let mut writes = Vec::new();
    if let Some(rung) = rung(Rung::Replica) {
        let hold = rung.hold.clone();
        let new = ReplicaStatus {
            phase: ReplicaPhase::Ready,
            capacity: Some(rung.size),
            conditions: lower_conditions(
                &old.conditions,
                None,
                asked.says(rung.size, goal, hold.as_ref()),
                now,
            ),
            rung: Some(rung),
            path: path.or_else(|| old.path.clone()),
            address: None,
            content: if outcome.stage.is_some() {
                None
            } else {
                outcome.content.clone().or_else(|| old.content.clone())
            },
            hold,
        };
        let place = Place::named(Object::Replica, replica.name_any());
        writes.extend(status_write(place, &old, &new));
    }
    if let (Some(rung), Some(target)) = (rung(Rung::Volume), &view.target) {
        let old = target.status.clone().unwrap_or_default();
        let hold = rung.hold.clone();
        let resizing = asked.says(rung.size, goal, hold.as_ref());
        let conditions = renew(&old.conditions, &[resizing], now);
        let new = TargetStatus {
            capacity: Some(rung.size),
            rung: Some(rung),
            conditions,
            ..TargetStatus::default()
        };
        writes.extend(status_write(
            Place::named(Object::Target, target.name_any()),
            &old,
            &new,
        ));
    }
    writes
}

fn refused(asked: &Asked, replica: &Replica, hold: &Hold, now: &MicroTime) -> Option<Write> {
    let old = replica.status.clone().unwrap_or_default();
    let new = ReplicaStatus {
        phase: if old.capacity.is_some() {
            ReplicaPhase::Failed
        } else {
            ReplicaPhase::Pending
        },
        hold: Some(hold.clone()),
        conditions: lower_conditions(
            &old.conditions,
            Some(hold),
            asked.says(
                old.capacity.unwrap_or_default(),
                replica.spec.capacity,
                Some(hold),
            ),
            now,
        ),
        ..old.clone()
    };
    status_write(
        Place::named(Object::Replica, replica.name_any()),
        &old,
        &new,
    )
}

/// `Ready` and `Resizing` of a copy.
fn lower_conditions(
    old: &[Condition],
    not_ready: Option<&Hold>,
    resizing: Says<'_>,
    now: &MicroTime,
) -> Vec<Condition> {
    let ready = Says {
        kind: "Ready",
        is_true: not_ready.is_none(),
        reason: not_ready.map_or("Measured", |hold| hold.reason.code()),
        message: not_ready.map_or("", |hold| hold.message.as_str()),
        began: None,
    };
    renew(old, &[ready, resizing], now)
}

/// The status of every use, and the finalizers of those that are over.
pub fn use_writes(
    view: &View,
    job: &Job,
    outcome: &Outcome,
    boot_id: &str,
    now: &MicroTime,
) -> Vec<Write> {
    let mut writes: Vec<Write> = Vec::new();
    for object in &outcome.ended {
        let place = Place::within(
            Object::Attachment,
            object.namespace().unwrap_or_default(),
            object.name_any(),
        );
        writes.push(without_finalizer(
            place,
            object.finalizers(),
            ATTACHMENT_FINALIZER,
        ));
    }
    for (object, hold) in &outcome.lingering {
        let old = object.status.clone().unwrap_or_default();
        let new = AttachmentStatus {
            phase: AttachmentPhase::Detaching,
            hold: Some(hold.clone()),
            ..old.clone()
        };
        let place = Place::within(
            Object::Attachment,
            object.namespace().unwrap_or_default(),
            object.name_any(),
        );
        writes.extend(status_write(place, &old, &new));
    }
    for (each, hold) in &outcome.uses {
        writes.extend(use_write(
            view,
            job,
            outcome,
            each,
            hold.as_ref(),
            boot_id,
            now,
        ));
    }
    writes
}

/// How the volume was brought into use, for an existing use.
fn stage_of(job: &Job, attached: bool) -> Option<&Stage> {
    job.staging.as_ref().filter(|_| attached)
}

fn use_write(
    view: &View,
    job: &Job,
    outcome: &Outcome,
    each: &UseJob,
    hold: Option<&Hold>,
    boot_id: &str,
    now: &MicroTime,
) -> Option<Write> {
    let old = each.object.status.clone().unwrap_or_default();
    let attached = hold.is_none() && outcome.stage.is_some();
    let rungs: Vec<RungStatus> = if attached {
        outcome
            .ladder
            .iter()
            .filter(|rung| rung.rung > Rung::Volume)
            .cloned()
            .collect()
    } else {
        Vec::new()
    };
    if let Some(hold) = hold.filter(|_| old.phase == AttachmentPhase::Attached) {
        return lost(each, &old, hold, now);
    }
    let reason = hold.map_or("Attached", |hold| hold.reason.code());
    let message = hold.map_or("", |hold| hold.message.as_str());
    let says = [Says {
        kind: "Attached",
        is_true: attached,
        reason,
        message,
        began: None,
    }];
    let new = AttachmentStatus {
        phase: if attached {
            AttachmentPhase::Attached
        } else {
            AttachmentPhase::Pending
        },
        volume: if attached {
            Some(view.key.clone())
        } else {
            old.volume.clone()
        },
        via: stage_of(job, attached).map(|stage| stage.via),
        device: outcome
            .stage
            .as_ref()
            .filter(|_| attached)
            .map(|stage| stage.device.clone()),
        filesystem: stage_of(job, attached).and_then(|stage| stage.filesystem),
        boot_id: attached.then(|| boot_id.to_owned()),
        capacity: rungs.iter().map(|rung| rung.size).min(),
        rungs,
        usage: outcome
            .stage
            .as_ref()
            .filter(|_| attached)
            .and_then(|stage| stage.usage.clone()),
        hold: hold.cloned(),
        conditions: renew(&old.conditions, &says, now),
    };
    let place = Place::within(
        Object::Attachment,
        each.object.namespace().unwrap_or_default(),
        each.object.name_any(),
    );
    // How full a volume is changes all the time. It is reported along with something else, never alone.
    let mut quiet = new.clone();
    quiet.usage = old.usage.clone();
    if quiet == old {
        return None;
    }
    status_write(place, &old, &new)
}

/// A use that existed and cannot be looked at now. The last measurement stays, with the reason. A passing error must
/// not make a live mount look as if it had never existed.
fn lost(each: &UseJob, old: &AttachmentStatus, hold: &Hold, now: &MicroTime) -> Option<Write> {
    let says = [Says {
        kind: "Attached",
        is_true: false,
        reason: hold.reason.code(),
        message: &hold.message,
        began: None,
    }];
    let new = AttachmentStatus {
        hold: Some(hold.clone()),
        conditions: renew(&old.conditions, &says, now),
        ..old.clone()
    };
    let namespace = each.object.namespace().unwrap_or_default();
    let place = Place::within(Object::Attachment, namespace, each.object.name_any());
    status_write(place, old, &new)
}

/// The claim's status when all its rungs on this node are as they should be, or one is held. As with the kubelet, the
/// node that sees the consumer's size reports it.
pub fn claim_write(
    view: &View,
    job: &Job,
    outcome: &Outcome,
    now: &MicroTime,
) -> Option<(Write, Note)> {
    let claim = view.claim.as_ref()?;
    if outcome.stage.is_none() {
        return lost_claim(view, job, outcome, now);
    }
    let wanted = provision::goal(status::requested(claim)?).ok()?;
    let bound = claim.status.as_ref()?.phase.as_deref() == Some("Bound");
    if wanted > job.goal || !bound {
        return None;
    }
    let observed: Vec<Observed> = outcome.ladder.iter().map(Observed::from).collect();
    let (body, note) = match next_step(&observed, job.goal) {
        Next::Reached => {
            let device = outcome
                .ladder
                .iter()
                .find(|each| each.rung == Rung::Device)?
                .size;
            let message = format!("MountVolume.NodeExpandVolume succeeded: {device}");
            let message = message + &replicated::behind(view, outcome, job.goal);
            (
                status::finished(claim, device),
                Note::normal(claim, "FileSystemResizeSuccessful", message),
            )
        }
        Next::Held { rung, .. } => {
            let hold = outcome
                .ladder
                .iter()
                .find(|each| each.rung == rung)?
                .hold
                .clone()?;
            // A growth that waits for somebody to mount or unmount is pending; it is not an error of the node.
            let waits = matches!(
                hold.reason,
                HoldReason::ReadOnly | HoldReason::OnlineGrowthOff
            );
            if waits {
                let message = format!("{} {}", hold.message, hold.reason.action());
                let note = Note::normal(claim, "FileSystemResizeRequired", message);
                (
                    status::filesystem_pending(claim, job.goal, &hold, now),
                    note,
                )
            } else {
                let note = Note::held(claim, "FileSystemResizeFailed", &hold);
                (status::node_held(claim, job.goal, &hold, now), note)
            }
        }
        Next::Raise { .. } => return None,
    };
    let grown = status::reported(claim) != Some(job.goal) || status::progress(claim).is_some();
    let held = matches!(next_step(&observed, job.goal), Next::Held { .. });
    if (!grown && !held) || !status::changes(claim, &body) {
        return None;
    }
    Some((for_this_claim(claim, body), note))
}

/// A use that was there is gone or broken, and a growth waits for it.
fn lost_claim(view: &View, job: &Job, outcome: &Outcome, now: &MicroTime) -> Option<(Write, Note)> {
    let claim = view.claim.as_ref()?;
    let lost = |(each, hold): &(UseJob, Option<Hold>)| {
        let hold = hold.as_ref().filter(|_| each.hold.is_none());
        hold.filter(|_| each.usage.established).cloned()
    };
    let hold = outcome.uses.iter().find_map(lost)?;
    if provision::goal(status::requested(claim)?).ok()? > job.goal {
        // The planner reports on the present request.
        return None;
    }
    let body = status::node_held(claim, job.goal, &hold, now);
    let waits = status::reported(claim).is_some_and(|size| size < job.goal);
    if !waits || !status::changes(claim, &body) {
        return None;
    }
    let note = Note::held(claim, "FileSystemResizeFailed", &hold);
    Some((for_this_claim(claim, body), note))
}

/// A change of the claim's status that is not bound to a version, because the planner reports on the claim too and
/// neither waits for the other. It is meant for this claim, and not for a later one of the same name.
fn for_this_claim(claim: &PersistentVolumeClaim, mut body: Value) -> Write {
    body["metadata"] = json!({ "uid": claim.uid() });
    Write::PatchStatus(claim_place(claim), body)
}

fn without_finalizer(place: Place, finalizers: &[String], done: &str) -> Write {
    let kept: Vec<&String> = finalizers.iter().filter(|each| *each != done).collect();
    Write::Patch(place, json!({ "metadata": { "finalizers": kept } }))
}

/// A status patch that turns `old` into `new`. Fields that are gone are set to null, because a merge keeps fields that
/// it does not mention. It is not bound to the version that was looked at: only this node writes these statuses, and
/// what it has just measured is newer than whatever is stored.
fn status_write<S: serde::Serialize + PartialEq>(place: Place, old: &S, new: &S) -> Option<Write> {
    if old == new {
        return None;
    }
    let (old, mut body) = (json!(old), json!(new));
    if let (Value::Object(old), Value::Object(fields)) = (old, &mut body) {
        for field in old.keys() {
            fields.entry(field.clone()).or_insert(Value::Null);
        }
    }
    Some(Write::PatchStatus(place, json!({ "status": body })))
}
