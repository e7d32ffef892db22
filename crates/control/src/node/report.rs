//! What a pass found, as the status of the stored objects. Only changes are written.

mod replicated;
mod resizing;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use serde_json::{Value, json};
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{
    ATTACHMENT_FINALIZER, AttachmentPhase, AttachmentStatus, DATA_FINALIZER, Replica, ReplicaPhase,
    ReplicaStatus, RungStatus, TargetStatus,
};
use trellis_api::{Bytes, Hold, Rung};

use self::resizing::Asked;
use super::job::{Job, UseJob};
use super::machine::Stage;
use super::work::Outcome;
use crate::plan::Note;
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// What to tell a claim about copies that have rotted.
pub fn rot_note(view: &StoredVolume, outcome: &Outcome) -> Option<Note> {
    replicated::rot_note(view, outcome)
}

/// Which copies have not reached a size, in a sentence that follows another one; nothing if all have.
pub fn copies_behind(view: &StoredVolume, outcome: &Outcome, size: Bytes) -> String {
    replicated::behind(view, outcome, size)
}

/// The replica's and the target's status, as far as the ladder is known.
pub fn replica_writes(
    view: &StoredVolume,
    job: &Job,
    outcome: &Outcome,
    now: &MicroTime,
) -> Vec<Write> {
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
pub fn early_writes(
    view: &StoredVolume,
    job: &Job,
    ladder: &[RungStatus],
    now: &MicroTime,
) -> Vec<Write> {
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
    view: &StoredVolume,
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
            link: None,
            link_hold: None,
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
            observed_generation: target.metadata.generation,
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
    view: &StoredVolume,
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
    view: &StoredVolume,
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
    if let Some(hold) = hold.filter(|_| old.phase == AttachmentPhase::Attached && !outcome.taken) {
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
