//! The statuses of several copies and of their target.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{DATA_FINALIZER, ReplicaPhase, ReplicaStatus, RungStatus, TargetStatus};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::{lower_conditions, refused, status_write, without_finalizer};
use crate::agent::job::{Job, ReplicaJob, ReplicatedJob, TargetJob};
use crate::agent::machine::{CopyFound, TargetFound};
use crate::agent::work::Outcome;
use crate::claim::plan::{Note, claim_place};
use crate::view::View;
use crate::write::{Object, Place, Write};

/// The statuses of the copies on this node and of the target, if it runs here.
pub(super) fn writes(
    job: &Job,
    replicated: &ReplicatedJob,
    outcome: &Outcome,
    now: &MicroTime,
) -> Vec<Write> {
    let mut writes = Vec::new();
    for copy in &replicated.copies {
        let name = copy.object.name_any();
        let found = outcome.copies.iter().find(|(of, _)| *of == name);
        match found.map(|(_, found)| found) {
            Some(Ok(found)) => writes.extend(copy_write(job, copy, found, &outcome.ladder, now)),
            Some(Err(hold)) => writes.extend(refused(&copy.object, hold, now)),
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
            Some(Ok(found)) => target_write(job, target, found, outcome, now),
            Some(Err(hold)) => target_refused(target, hold, now),
            None => None,
        });
    }
    writes
}

/// Blocks of copies that did not match their sums and were not told of yet, for the claim.
pub(super) fn rot_note(view: &View, outcome: &Outcome) -> Option<Note> {
    let Some(Ok(found)) = &outcome.target else {
        return None;
    };
    let claim = view.claim.as_ref()?;
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
        // A target that was started anew counts from zero.
        let more = blocks.checked_sub(before).unwrap_or(*blocks);
        let copy = view
            .replicas
            .iter()
            .find(|each| each.uid().as_deref() == Some(id));
        let pool = copy.map_or(id.as_str(), |copy| &copy.spec.pool);
        (more > 0).then(|| format!("{more} blocks of the copy on pool {pool}"))
    });
    let news: Vec<String> = news.collect();
    (!news.is_empty()).then(|| Note {
        about: claim_place(claim),
        uid: claim.uid(),
        warning: true,
        reason: "BlocksRotten",
        message: format!(
            "{} did not match their sums. They are not shown, and are mended from another copy. If it goes on, the \
             disk is bad: trellis volume replace {} POOL.",
            news.join(" and "),
            claim.name_any()
        ),
    })
}

fn copy_write(
    job: &Job,
    copy: &ReplicaJob,
    found: &CopyFound,
    ladder: &[RungStatus],
    now: &MicroTime,
) -> Option<Write> {
    let old = copy.object.status.clone().unwrap_or_default();
    let before = old.rung.as_ref().filter(|rung| rung.size == found.size);
    // A copy that is at the size of the volume's copies was raised with them.
    let of_all = ladder.iter().find(|rung| rung.rung == Rung::Replica);
    let raised = of_all
        .filter(|rung| rung.size == found.size)
        .and_then(|rung| rung.raised.clone());
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
        content: None,
        hold: None,
        conditions: lower_conditions(&old.conditions, true, found.size, job.goal, None, now),
    };
    let place = Place::named(Object::Replica, copy.object.name_any());
    status_write(place, &old, &new)
}

fn target_write(
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
        capacity: Some(volume.size),
        conditions: conditions(
            &old.conditions,
            found,
            &target.shared_disks,
            (volume.size, job.goal),
            hold.as_ref(),
            now,
        ),
        rung: Some(volume.clone()),
        iqn: found.iqn.clone(),
        portal: found.portal.clone(),
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

/// The target cannot be asked: what was last measured stays, with the reason.
fn target_refused(target: &TargetJob, hold: &Hold, now: &MicroTime) -> Option<Write> {
    let old = target.object.status.clone().unwrap_or_default();
    let says = [Says {
        kind: "Available",
        is_true: false,
        reason: hold.reason.code(),
        message: &hold.message,
    }];
    let mut conditions = old.conditions.clone();
    conditions.retain(|each| each.type_ != "Available");
    let renewed = renew(&old.conditions, &says, now);
    conditions.extend(renewed.into_iter().filter(|each| each.type_ == "Available"));
    let new = TargetStatus {
        hold: Some(hold.clone()),
        conditions,
        ..old.clone()
    };
    let place = Place::named(Object::Target, target.object.name_any());
    status_write(place, &old, &new)
}

fn conditions(
    old: &[Condition],
    found: &TargetFound,
    shared_disks: &[Vec<String>],
    (size, goal): (Bytes, Bytes),
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
        },
        Says {
            kind: "RedundancyMet",
            is_true: redundancy.is_ok(),
            reason: match &redundancy {
                Ok(()) => "AllInSync",
                Err((reason, _)) => reason,
            },
            message: redundancy.as_ref().err().map_or("", |(_, why)| why),
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
        },
        Says {
            kind: "Resizing",
            is_true: size < goal,
            reason: match hold {
                Some(hold) => hold.reason.code(),
                None if size < goal => "Growing",
                None => "Reached",
            },
            message: hold.map_or("", |hold| hold.message.as_str()),
        },
    ];
    renew(old, &says, now)
}

/// Whether there are as many copies as are asked for, or why there are not, with a word for it. Copies on one
/// filesystem are lost together, and count as one.
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
