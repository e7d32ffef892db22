//! A pass over a volume with several copies: the processes of the copies on this node, the target if it runs here, and
//! the uses of the volume.

use std::cell::RefCell;

use kube::ResourceExt;
use trellis_api::kinds::{RungStatus, TargetStatus};
use trellis_api::step::{self, Step};
use trellis_api::{Bytes, Hold, HoldReason};

use super::subject::{Lower, Subject};
use super::{Outcome, dispose, look_inside, provide, refuse_all};
use crate::node::climb::climb;
use crate::node::job::{Fate, Job, ReplicaJob, ReplicatedJob, TargetJob};
use crate::node::machine::{CopyFound, Machine, Stage, TargetFound, TargetPlace};

/// Does what the job says about copies, target and uses.
pub(super) fn work(
    machine: &Machine,
    job: &Job,
    replicated: &ReplicatedJob,
    early: &dyn Fn(&[RungStatus]),
    outcome: &mut Outcome,
) {
    if replicated.copies.iter().any(|copy| copy.fate.is_end()) {
        remove_copies(machine, job, replicated, outcome);
    }
    for copy in &replicated.copies {
        if !copy.fate.is_end() {
            let found = serve_copy(machine, job, copy, outcome);
            outcome.copies.push((copy.object.name_any(), found));
        }
    }
    let Some(target) = &replicated.target else {
        without_target(machine, job, replicated, outcome);
        return let_go(machine, replicated, outcome);
    };
    // The volume may have been served elsewhere since the target here had another term. What is in use here remembers
    // what is not so any more.
    let is_new_here = is_new_here(machine, target);
    let fresh = is_new_here.then(|| never_established(job));
    if machine.copies.has_target(&target.place.volume)
        && is_new_here
        && let Err(hold) = leave(machine, job)
    {
        outcome.uses = refuse_all(job, &hold);
        outcome.target = Some(Err(hold));
        return;
    }
    let job = fresh.as_ref().unwrap_or(job);
    let place = with_addresses(&target.place, replicated, outcome);
    let was_served = |status: &TargetStatus| status.capacity.is_some();
    let is_new = !target.object.status.as_ref().is_some_and(was_served);
    // A volume begins with all of its copies, so that none of them has to be repaired at once.
    let copies = target.first_copies.max(place.members.replicas.len());
    let is_complete =
        place.addresses.len() >= copies && place.members.replicas.len() >= target.first_copies;
    let found = if is_new && !is_complete {
        Err(incomplete(&place, copies))
    } else {
        machine.copies.serve_target(&place)
    };
    match found {
        Ok(found) => {
            let begun = place.recovery.as_ref().map(|recovery| &recovery.lineage);
            if begun.is_some() && found.lineage.as_ref() == begun && !place.is_recovered {
                step::reached(Step::SurvivorsServed);
            }
            use_and_climb(machine, job, replicated, &place, found, early, outcome);
        }
        Err(hold) => {
            outcome.uses = refuse_all(job, &hold);
            outcome.outbid = machine.copies.outbid(&place.volume);
            outcome.target = Some(Err(hold));
        }
    }
    let_go(machine, replicated, outcome);
}

/// Whether the target was not given its present term here before.
fn is_new_here(machine: &Machine, target: &TargetJob) -> bool {
    let place = &target.place;
    machine.copies.given_term(&place.volume) != Some(place.term)
}

/// The same job for a machine on which nothing of the volume is in use, because that has been ended here.
fn never_established(job: &Job) -> Job {
    let mut job = job.clone();
    for each in &mut job.uses {
        each.usage.established = false;
    }
    job
}

/// The target runs elsewhere, or rests: what is left of it here goes.
fn without_target(machine: &Machine, job: &Job, replicated: &ReplicatedJob, outcome: &mut Outcome) {
    if !job.uses.is_empty() {
        outcome.uses = refuse_all(job, &not_here(job, replicated));
    }
    let Some(stage) = &job.staging else {
        return;
    };
    if machine.copies.has_target(&stage.volume)
        && let Err(hold) = leave(machine, job)
    {
        if !job.uses.is_empty() {
            outcome.uses = refuse_all(job, &hold);
        }
        outcome.left_behind = Some(hold);
        return;
    }
    outcome.rests = replicated.resting.is_some();
    outcome.taken = replicated.elsewhere.is_some();
}

/// Whoever uses here a volume that is or was served elsewhere has lost it: this node was lost for a while, and the volume
/// went to another one. What they wait for will never be answered, or must not be. They get errors, before anything here
/// could wait for the same.
pub(super) fn abandon(machine: &Machine, job: &Job, replicated: &ReplicatedJob) {
    let is_used = !job.uses.is_empty() || !job.endings.is_empty();
    let Some(stage) = job.staging.as_ref().filter(|_| is_used) else {
        return;
    };
    let target = replicated.target.as_ref();
    let was_elsewhere = target.is_some_and(|target| is_new_here(machine, target));
    if replicated.elsewhere.is_none() && !was_elsewhere {
        return;
    }
    if machine.copies.has_target(&stage.volume) {
        tracing::warn!(
            volume = stage.volume,
            node = replicated.elsewhere,
            "the volume was moved to another node while this one was lost; its users here get errors"
        );
        if let Err(hold) = machine.copies.abandon_target(&stage.volume) {
            tracing::warn!(volume = stage.volume, "{}", hold.message);
        }
    }
}

/// Ends what is left of a target here, with what stands on it.
fn leave(machine: &Machine, job: &Job) -> Result<(), Hold> {
    let Some(stage) = &job.staging else {
        return Ok(());
    };
    let stage = Stage {
        backing: machine.copies.target_backing(&stage.volume),
        ..stage.clone()
    };
    for each in &job.uses {
        machine.consumers.unpublish(&stage, &each.usage)?;
    }
    end_target(machine, job)
}

/// Copies that are to go and that no longer count, as the target says: the one here has just said it, and one elsewhere
/// has said it after it knew that they are to go. Any other report may be outdated, and bytes that are gone do not come
/// back.
fn let_go(machine: &Machine, replicated: &ReplicatedJob, outcome: &mut Outcome) {
    let members = match (&outcome.target, &replicated.agreed) {
        (Some(Ok(found)), _) => found.members.replicas.clone(),
        (None, Some(agreed)) => agreed.replicas.clone(),
        _ => return,
    };
    let adrift = replicated.adrift.iter();
    let adrift = adrift.filter(|each| !members.contains(&each.identity()));
    outcome
        .copies_removed
        .extend(adrift.map(|each| each.name_any()));
    let leaves =
        |copy: &&ReplicaJob| copy.fate == Fate::Leave && !members.contains(&copy.place.replica_id);
    for copy in replicated.copies.iter().filter(leaves) {
        let name = copy.object.name_any();
        outcome.copies.retain(|(of, _)| *of != name);
        remove_copy(machine, copy, outcome);
    }
}

fn remove_copy(machine: &Machine, copy: &ReplicaJob, outcome: &mut Outcome) {
    let name = copy.object.name_any();
    let gone = machine
        .copies
        .retire_copy(&copy.place)
        .and_then(|()| dispose(machine, copy));
    match gone {
        Ok(()) => {
            outcome.copies_removed.push(name);
            outcome.pool_changed = true;
        }
        Err(hold) => outcome.copies.push((name, Err(hold))),
    }
}

/// Copies whose volume is gone.
fn remove_copies(machine: &Machine, job: &Job, replicated: &ReplicatedJob, outcome: &mut Outcome) {
    let in_use = !job.uses.is_empty() || !outcome.lingering.is_empty();
    if in_use {
        let message = "The copies of the volume are still in use.".to_owned();
        outcome.uses = refuse_all(job, &Hold::new(HoldReason::InUse, message));
        return;
    }
    if let Err(hold) = end_target(machine, job) {
        for copy in &replicated.copies {
            outcome
                .copies
                .push((copy.object.name_any(), Err(hold.clone())));
        }
        return;
    }
    for copy in &replicated.copies {
        if copy.fate.is_end() {
            remove_copy(machine, copy, outcome);
        }
    }
}

fn end_target(machine: &Machine, job: &Job) -> Result<(), Hold> {
    let Some(stage) = &job.staging else {
        return Ok(());
    };
    let backing = machine.copies.target_backing(&stage.volume);
    machine.consumers.unstage(&Stage {
        backing,
        ..stage.clone()
    })?;
    machine.copies.retire_target(&stage.volume)
}

fn serve_copy(
    machine: &Machine,
    job: &Job,
    copy: &ReplicaJob,
    outcome: &mut Outcome,
) -> Result<CopyFound, Hold> {
    if copy.fate == Fate::Make {
        outcome.pool_changed = true;
        machine.copies.make_replica(&copy.place, job.goal)?;
    }
    machine.copies.serve_copy(&copy.place)
}

/// The target, with the addresses that were just found instead of the reported ones.
fn with_addresses(
    place: &TargetPlace,
    replicated: &ReplicatedJob,
    outcome: &Outcome,
) -> TargetPlace {
    let mut place = place.clone();
    for (name, found) in &outcome.copies {
        let copy = replicated
            .copies
            .iter()
            .find(|copy| copy.object.name_any() == *name);
        if let (Some(copy), Ok(found)) = (copy, found) {
            let id = copy.place.replica_id.clone();
            place.addresses.insert(id, found.address.clone());
        }
    }
    place
}

fn incomplete(place: &TargetPlace, copies: usize) -> Hold {
    if !place.unlinked.is_empty() {
        let message = format!(
            "Copies of volume {} are on nodes that have no address for links: {}.",
            place.volume,
            place.unlinked.join(", ")
        );
        return Hold::new(HoldReason::LinkMissing, message);
    }
    let message = format!(
        "{} of {copies} copies of volume {} can be reached.",
        place.addresses.len(),
        place.volume
    );
    Hold::new(HoldReason::ReplicaUnavailable, message)
}

fn not_here(job: &Job, replicated: &ReplicatedJob) -> Hold {
    let volume = job.staging.as_ref().map(|stage| stage.volume.as_str());
    let volume = volume.unwrap_or("of the claim");
    match &replicated.elsewhere {
        Some(node) => {
            let message = format!("Volume {volume} is served on node {node}.");
            Hold::new(HoldReason::UsedElsewhere, message)
        }
        None => {
            let message = format!("The target of volume {volume} does not run yet.");
            Hold::new(HoldReason::TargetDown, message)
        }
    }
}

fn use_and_climb(
    machine: &Machine,
    job: &Job,
    replicated: &ReplicatedJob,
    place: &TargetPlace,
    found: TargetFound,
    early: &dyn Fn(&[RungStatus]),
    outcome: &mut Outcome,
) {
    let backing = found.backing.clone();
    let stage = job.staging.clone().map(|stage| Stage {
        backing: backing.clone(),
        ..stage
    });
    // A read that cannot be served now would block this thread until it can.
    let can_be_used = found.available;
    let provided = match &stage {
        Some(stage) if can_be_used => provide(machine, job, stage, outcome),
        _ => {
            outcome.uses = refuse_all(job, &unavailable(place, &found));
            None
        }
    };
    let several = Several {
        machine,
        place,
        found: RefCell::new(found),
    };
    let subject = Subject {
        machine,
        lower: &several,
        stage: stage.as_ref().filter(|_| provided.is_some()),
        provided: RefCell::new(provided),
        early,
    };
    match climb(&subject, job.goal, &job.reported) {
        Ok(ladder) => outcome.ladder = ladder,
        Err(hold) => {
            outcome.target = Some(Err(hold));
            return;
        }
    }
    outcome.stage = subject.provided.into_inner();
    let found = several.found.into_inner();
    if can_be_used {
        let target = replicated.target.as_ref();
        let known = target.and_then(|target| target.object.status.as_ref()?.content.clone());
        look_inside(machine, job, &backing, known, outcome);
    }
    outcome.target = Some(Ok(found));
}

fn unavailable(place: &TargetPlace, found: &TargetFound) -> Hold {
    found.hold.clone().unwrap_or_else(|| {
        let message = format!("Volume {} cannot serve yet.", place.volume);
        Hold::new(HoldReason::TooFewReplicas, message)
    })
}

/// Several copies behind a target.
struct Several<'a> {
    machine: &'a Machine,
    place: &'a TargetPlace,
    found: RefCell<TargetFound>,
}

impl Lower for Several<'_> {
    fn sizes(&self) -> (Bytes, Bytes) {
        let found = self.found.borrow();
        (found.copies, found.served)
    }

    fn measure_again(&self) -> Result<(), Hold> {
        self.found
            .replace(self.machine.copies.serve_target(self.place)?);
        Ok(())
    }

    fn raise(&self, to: Bytes) -> Result<(), Hold> {
        self.machine.copies.raise_target(self.place, to)
    }
}
