//! The statuses of several copies and of their target.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{
    DATA_FINALIZER, RESTING, ReplicaPhase, ReplicaState, ReplicaStatus, RungStatus, Target,
    TargetStatus,
};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::resizing::Asked;
use super::{lower_conditions, refused, status_write, without_finalizer};
use crate::node::job::{Job, ReplicaJob, ReplicatedJob, TargetJob};
use crate::node::machine::{CopyFound, TargetFound};
use crate::node::work::Outcome;
use crate::plan::Note;
use crate::stored::StoredVolume;
use crate::volume::redundancy;
use crate::write::{Object, Place, Write};

/// The statuses of the copies on this node and of the target, if it runs here.
pub(super) fn writes(
    view: &StoredVolume,
    job: &Job,
    replicated: &ReplicatedJob,
    outcome: &Outcome,
    now: &MicroTime,
) -> Vec<Write> {
    let mut writes = Vec::new();
    let asked = Asked::of(view);
    for copy in &replicated.copies {
        let name = copy.object.name_any();
        let found = outcome.copies.iter().find(|(of, _)| *of == name);
        match found.map(|(_, found)| found) {
            Some(Ok(found)) => writes.extend(copy_write(&asked, job, copy, found, outcome, now)),
            Some(Err(hold)) => writes.extend(refused(&asked, &copy.object, hold, now)),
            None => {}
        }
        if outcome.copies_removed.contains(&name) {
            let place = Place::named(Object::Replica, name);
            writes.push(without_finalizer(
                place,
                copy.object.finalizers(),
                DATA_FINALIZER,
            ));
        }
    }
    for adrift in &replicated.adrift {
        let name = adrift.name_any();
        if outcome.copies_removed.contains(&name) {
            let place = Place::named(Object::Replica, name);
            let finalizers = adrift.finalizers();
            writes.push(without_finalizer(place, finalizers, DATA_FINALIZER));
        }
    }
    if let Some(target) = &replicated.target {
        writes.extend(match &outcome.target {
            Some(Ok(found)) => target_write(&asked, job, target, found, outcome, now),
            Some(Err(hold)) => target_refused(&asked, job, target, outcome.outbid, hold, now),
            None => None,
        });
    }
    let resting = replicated.resting.as_ref().filter(|_| outcome.rests);
    writes.extend(resting.and_then(|target| target_rests(target, now)));
    writes
}

/// What the target said last stays true while it rests: nobody can change the copies without it.
fn target_rests(target: &Target, now: &MicroTime) -> Option<Write> {
    let old = target.status.clone().unwrap_or_default();
    let rests = Says {
        kind: "Available",
        is_true: true,
        reason: RESTING,
        message: "Nobody uses the volume. It is served again as soon as somebody does.",
        began: None,
    };
    let new = TargetStatus {
        observed_generation: target.metadata.generation,
        portal: None,
        conditions: with_condition(&old.conditions, rests, now),
        ..old.clone()
    };
    let place = Place::named(Object::Target, target.name_any());
    status_write(place, &old, &new)
}

/// The conditions with this one renewed.
fn with_condition(old: &[Condition], says: Says<'_>, now: &MicroTime) -> Vec<Condition> {
    let renewed = renew(old, &[says], now);
    let is_other = |each: &&Condition| renewed.iter().all(|new| new.type_ != each.type_);
    let mut conditions: Vec<Condition> = old.iter().filter(is_other).cloned().collect();
    conditions.extend(renewed);
    conditions
}

/// Blocks of copies that did not match their checksums and were not reported yet, for the claim.
pub(super) fn rot_note(view: &StoredVolume, outcome: &Outcome) -> Option<Note> {
    let Some(Ok(found)) = &outcome.target else {
        return None;
    };
    let claim = view.volume.as_ref()?.spec.claim.as_ref()?;
    let status = view
        .target
        .as_ref()
        .and_then(|target| target.status.as_ref());
    let told = status.and_then(|status| status.scrub.as_ref());
    let told = told.map(|told| &told.rotten);
    let rotten = &found.scrub.as_ref()?.rotten;
    let news = rotten.iter().filter_map(|(id, blocks)| {
        let before = told
            .and_then(|told| told.get(id))
            .copied()
            .unwrap_or_default();
        // A target that was restarted counts from zero.
        let more = blocks.checked_sub(before).unwrap_or(*blocks);
        let copy = view
            .replicas
            .iter()
            .find(|each| each.uid().as_deref() == Some(id));
        let pool = copy.map_or(id.as_str(), |copy| &copy.spec.pool);
        (more > 0).then(|| format!("{more} blocks of the copy on pool {pool}"))
    });
    let news: Vec<String> = news.collect();
    (!news.is_empty()).then(|| {
        let message = format!(
            "{} did not match their sums. They are not shown, and are mended from another copy. If it goes on, the \
             disk is bad: trellis volume replace {} POOL.",
            news.join(" and "),
            claim.name
        );
        Note::warning(claim, "BlocksRotten", message)
    })
}

fn copy_write(
    asked: &Asked,
    job: &Job,
    copy: &ReplicaJob,
    found: &CopyFound,
    outcome: &Outcome,
    now: &MicroTime,
) -> Option<Write> {
    let old = copy.object.status.clone().unwrap_or_default();
    let before = old.rung.as_ref().filter(|rung| rung.size == found.size);
    // A copy that is at the size of the volume's copies was raised with them.
    let of_all = outcome
        .ladder
        .iter()
        .find(|rung| rung.rung == Rung::Replica);
    let raised = of_all
        .filter(|rung| rung.size == found.size)
        .and_then(|rung| rung.raised.clone());
    let kept = keeps_small(copy, outcome);
    let resizing = asked.says(found.size, job.goal, kept.as_ref());
    let new = ReplicaStatus {
        phase: ReplicaPhase::Ready,
        capacity: Some(found.size),
        rung: Some(RungStatus {
            rung: Rung::Replica,
            size: found.size,
            observed_at: before.map_or_else(|| now.clone(), |rung| rung.observed_at.clone()),
            full: false,
            raised,
            hold: None,
            note: None,
        }),
        path: Some(found.data.display().to_string()),
        address: Some(found.address.clone()),
        link: found.link.clone(),
        link_hold: found.link_hold.clone(),
        content: None,
        hold: None,
        conditions: lower_conditions(&old.conditions, None, resizing, now),
    };
    let place = Place::named(Object::Replica, copy.object.name_any());
    status_write(place, &old, &new)
}

/// What keeps a copy from the size that it should have: what keeps all of them, or that it does not answer.
fn keeps_small(copy: &ReplicaJob, outcome: &Outcome) -> Option<Hold> {
    let found = match &outcome.target {
        Some(Ok(found)) => found,
        Some(Err(hold)) => return Some(hold.clone()),
        None => return None,
    };
    let rung = outcome
        .ladder
        .iter()
        .find(|rung| rung.rung == Rung::Replica);
    let of_all = found.hold.clone().or_else(|| rung?.hold.clone());
    let unheard = || {
        let mut seen = found.replicas.iter();
        let seen = seen.find(|each| each.id == copy.place.replica_id)?;
        let word = match seen.state {
            ReplicaState::Away => "away",
            ReplicaState::Silent => "silent",
            ReplicaState::Arriving | ReplicaState::Repairing | ReplicaState::InSync => return None,
        };
        let since = seen.heard_at.as_ref().map_or_else(String::new, |at| {
            format!(" since {}", at.0.strftime("%Y-%m-%d %H:%M:%SZ"))
        });
        let message = format!("The copy is {word}{since}; it is raised when it is back.");
        Some(Hold::new(HoldReason::ReplicaUnavailable, message))
    };
    of_all.or_else(unheard)
}

/// Which copies have not reached the size that the volume has, in a sentence that follows another one; nothing if all
/// have.
pub(super) fn behind(view: &StoredVolume, outcome: &Outcome, size: Bytes) -> String {
    match &outcome.target {
        Some(Ok(found)) => redundancy::behind_sentence(view, &found.replicas, size),
        _ => String::new(),
    }
}

fn target_write(
    asked: &Asked,
    job: &Job,
    target: &TargetJob,
    found: &TargetFound,
    outcome: &Outcome,
    now: &MicroTime,
) -> Option<Write> {
    let old = target.object.status.clone().unwrap_or_default();
    let rung = |wanted: Rung| outcome.ladder.iter().find(|each| each.rung == wanted);
    let volume = rung(Rung::Volume)?;
    let of_ladder = || {
        let copies = rung(Rung::Replica)?.hold.clone();
        copies.or_else(|| volume.hold.clone())
    };
    let hold = found.hold.clone().or_else(of_ladder);
    let new = TargetStatus {
        observed_generation: target.object.metadata.generation,
        outbid: None,
        capacity: Some(volume.size),
        conditions: conditions(
            &old.conditions,
            found,
            &target.shared_disks,
            asked.says(volume.size, job.goal, hold.as_ref()),
            hold.as_ref(),
            now,
        ),
        rung: Some(volume.clone()),
        iqn: found.iqn.clone(),
        portal: found.portal.clone(),
        sessions: found.sessions,
        members: Some(found.members.clone()),
        lineage: found.lineage.clone().or_else(|| old.lineage.clone()),
        replicas: found.replicas.clone(),
        content: if outcome.stage.is_some() {
            None
        } else {
            outcome.content.clone().or_else(|| old.content.clone())
        },
        scrub: found.scrub.clone().or_else(|| old.scrub.clone()),
        hold,
    };
    let place = Place::named(Object::Target, target.object.name_any());
    status_write(place, &old, &new)
}

/// The target cannot be asked: the last measurement stays, with the reason.
fn target_refused(
    asked: &Asked,
    job: &Job,
    target: &TargetJob,
    outbid: Option<u32>,
    hold: &Hold,
    now: &MicroTime,
) -> Option<Write> {
    let old = target.object.status.clone().unwrap_or_default();
    let available = Says {
        kind: "Available",
        is_true: false,
        reason: hold.reason.code(),
        message: &hold.message,
        began: None,
    };
    let size = old.capacity.unwrap_or_default();
    let resizing = asked.says(size, job.goal, Some(hold));
    let renewed = renew(&old.conditions, &[available, resizing], now);
    let is_other = |each: &Condition| renewed.iter().all(|new| new.type_ != each.type_);
    let mut conditions = old.conditions.clone();
    conditions.retain(is_other);
    conditions.extend(renewed);
    let new = TargetStatus {
        outbid,
        hold: Some(hold.clone()),
        conditions,
        ..old.clone()
    };
    let place = Place::named(Object::Target, target.object.name_any());
    let write = status_write(place, &old, &new)?;
    // A target that was moved meanwhile was rightly outbid, and its successor must not get another term for that.
    let Write::PatchStatus(place, mut body) = write else {
        return None;
    };
    body["metadata"] = json!({ "resourceVersion": target.object.metadata.resource_version });
    Some(Write::PatchStatus(place, body))
}

fn conditions(
    old: &[Condition],
    found: &TargetFound,
    shared_disks: &[Vec<String>],
    resizing: Says<'_>,
    hold: Option<&Hold>,
    now: &MicroTime,
) -> Vec<Condition> {
    let redundancy = redundancy(found, shared_disks);
    let waits = hold.filter(|hold| hold.reason == HoldReason::TooFewReplicas);
    let said = |message: &'static str, is_true: bool| if is_true { "" } else { message };
    let says = [
        Says {
            kind: "Available",
            is_true: found.available,
            reason: if found.available {
                "Served"
            } else {
                "TooFewReplicas"
            },
            message: waits.map_or("", |hold| hold.message.as_str()),
            began: None,
        },
        Says {
            kind: "RedundancyMet",
            is_true: redundancy.is_ok(),
            reason: match &redundancy {
                Ok(()) => "AllInSync",
                Err((reason, _)) => reason,
            },
            message: redundancy.as_ref().err().map_or("", |(_, why)| why),
            began: None,
        },
        Says {
            kind: "SizeConverged",
            is_true: found.size_converged,
            reason: if found.size_converged {
                "AllRaised"
            } else {
                "CopiesBehind"
            },
            message: said(
                "A copy has not reached the volume's size.",
                found.size_converged,
            ),
            began: None,
        },
        resizing,
    ];
    renew(old, &says, now)
}

/// Whether there are as many copies as are asked for, or why not, with a word for it. Copies on one filesystem are lost
/// together, and count as one.
fn redundancy(
    found: &TargetFound,
    shared_disks: &[Vec<String>],
) -> Result<(), (&'static str, String)> {
    if !found.redundancy_met {
        return Err((
            "CopiesMissing",
            "A copy is away or being repaired.".to_owned(),
        ));
    }
    let Some(pools) = shared_disks.first() else {
        return Ok(());
    };
    let message = format!(
        "The copies on pools {} are on one filesystem and count as one.",
        pools.join(", ")
    );
    Err((HoldReason::DiskShared.code(), message))
}
