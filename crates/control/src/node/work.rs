//! One pass over one volume on this node. It blocks, so it runs on a thread of its own.
//!
//! The order follows the dependencies: uses that end, the replica, uses that begin, then the ladder. A growth that is
//! held never keeps a use from beginning at the old size.

mod replicated;
mod subject;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trellis_api::kinds::{Attachment, Content, EMPTY_CONTENT, RungStatus};
use trellis_api::{Hold, HoldReason, Rung};

use super::climb::climb;
use super::job::{Fate, Job, ReplicaJob, UseJob};
use super::machine::{CopyFound, Machine, ReplicaFound, Stage, StageFound, TargetFound, Use};
use subject::{Single, Subject};

/// What a pass found and did.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The only copy, if it is on this node and is to stay.
    pub replica: Option<Result<ReplicaFound, Hold>>,
    /// The single copy is gone.
    pub removed: bool,
    /// Of several copies, those on this node that are to stay, by the names of their objects.
    pub copies: Vec<(String, Result<CopyFound, Hold>)>,
    /// Of several copies, those on this node that are gone.
    pub copies_removed: Vec<String>,
    /// The target, if it runs on this node.
    pub target: Option<Result<TargetFound, Hold>>,
    /// The term of the target that this one was outbid by, if it was.
    pub outbid: Option<u32>,
    /// The target would run on this node, and rests.
    pub rests: bool,
    /// The volume is served elsewhere, and nothing of it is in use here any more.
    pub taken: bool,
    /// Why there is still something here of a target that is not to run here.
    pub left_behind: Option<Hold>,
    /// What the bytes are, if they were looked at.
    pub content: Option<Content>,
    /// Uses that are over.
    pub ended: Vec<Arc<Attachment>>,
    /// Uses that should be over and are not, and why.
    pub lingering: Vec<(Arc<Attachment>, Hold)>,
    /// Uses that exist or should, and why not.
    pub uses: Vec<(UseJob, Option<Hold>)>,
    /// The volume in use.
    pub stage: Option<StageFound>,
    /// The whole ladder on this node, lowest rung first.
    pub ladder: Vec<RungStatus>,
    /// Space on the pool was taken or freed.
    pub pool_changed: bool,
}

impl Outcome {
    /// Whether any copy was found.
    pub fn is_found(&self) -> bool {
        let several = self.copies.iter().any(|(_, found)| found.is_ok());
        several || matches!(self.replica, Some(Ok(_)))
    }

    /// What holds any part of it, so that it is tried again. A use that the objects alone forbid is not tried again
    /// before they change.
    pub fn held(&self) -> Option<&Hold> {
        let uses = self.uses.iter().filter(|(each, _)| each.hold.is_none());
        let lingering = self.lingering.iter().map(|(_, hold)| hold);
        lingering
            .chain(uses.filter_map(|(_, hold)| hold.as_ref()))
            .chain(self.replica.iter().filter_map(|found| found.as_ref().err()))
            .chain(self.copies.iter().filter_map(|(_, each)| match each {
                Ok(found) => found.link_hold.as_ref(),
                Err(hold) => Some(hold),
            }))
            .chain(self.target.iter().filter_map(|found| match found {
                Ok(found) => found.hold.as_ref(),
                Err(hold) => Some(hold),
            }))
            .chain(&self.left_behind)
            .chain(self.ladder.iter().filter_map(|rung| rung.hold.as_ref()))
            .chain(self.content.iter().filter_map(|each| each.hold.as_ref()))
            .next()
    }
}

/// Does the work of `job`. `early` gets the ladder after every raise.
pub fn work(machine: &Machine, job: &Job, early: &dyn Fn(&[RungStatus])) -> Outcome {
    let mut outcome = Outcome::default();
    if let Some(replicated) = &job.replicated {
        replicated::abandon(machine, job, replicated);
    }
    end_uses(machine, job, &mut outcome);
    if let Some(replicated) = &job.replicated {
        replicated::work(machine, job, replicated, early, &mut outcome);
        return outcome;
    }
    let Some(replica) = &job.replica else {
        outcome.uses = refuse_all(job, &without_replica(job));
        return outcome;
    };
    let found = match replica.fate {
        Fate::Remove | Fate::Forget => return remove(machine, job, replica, outcome),
        Fate::Make => {
            outcome.pool_changed = true;
            machine.copies.make_replica(&replica.place, job.goal)
        }
        Fate::Find | Fate::Leave => machine.copies.find_replica(&replica.place),
    };
    match found {
        Ok(found) => use_and_climb(machine, job, replica, found, early, &mut outcome),
        Err(hold) => {
            outcome.uses = refuse_all(job, &hold);
            outcome.replica = Some(Err(hold));
        }
    }
    outcome
}

fn without_replica(job: &Job) -> Hold {
    let volume = job
        .staging
        .as_ref()
        .map(|stage| stage.volume.as_str())
        .unwrap_or("of the claim");
    let message = format!("No copy of volume {volume} is on this node.");
    Hold::new(HoldReason::ReplicaUnavailable, message)
}

/// Where the bytes are, according to earlier reports: enough to find mounts and devices again.
fn known_stage(machine: &Machine, job: &Job) -> Option<Stage> {
    if job.replicated.is_some() {
        let stage = job.staging.clone()?;
        return Some(Stage {
            backing: machine.copies.target_backing(&stage.volume),
            ..stage
        });
    }
    let status = job.replica.as_ref()?.object.status.as_ref()?;
    let backing = PathBuf::from(status.path.as_ref()?);
    Some(Stage {
        backing,
        ..job.staging.clone()?
    })
}

fn end_uses(machine: &Machine, job: &Job, outcome: &mut Outcome) {
    let Some(stage) = known_stage(machine, job) else {
        for ending in &job.endings {
            let attached = ending
                .object
                .status
                .as_ref()
                .and_then(|status| status.volume.as_deref());
            match attached {
                // Nothing was ever brought into use.
                None => outcome.ended.push(ending.object.clone()),
                Some(volume) => {
                    let message = format!(
                        "Volume {volume} is in use here, but its copy or its pool is not known any more, so its \
                         device and mounts cannot be told."
                    );
                    let hold = Hold::new(HoldReason::PoolNotFound, message);
                    outcome.lingering.push((ending.object.clone(), hold));
                }
            }
        }
        return;
    };
    for ending in &job.endings {
        match machine.consumers.unpublish(&stage, &ending.usage) {
            Ok(()) => outcome.ended.push(ending.object.clone()),
            Err(hold) => outcome.lingering.push((ending.object.clone(), hold)),
        }
    }
    let last = job.uses.is_empty() && outcome.lingering.is_empty() && !outcome.ended.is_empty();
    if last && let Err(hold) = machine.consumers.unstage(&stage) {
        let ended = std::mem::take(&mut outcome.ended);
        outcome
            .lingering
            .extend(ended.into_iter().map(|object| (object, hold.clone())));
    }
}

/// A replica goes only when nothing uses it. Its bytes go only if it is certain that they may.
fn remove(machine: &Machine, job: &Job, replica: &ReplicaJob, mut outcome: Outcome) -> Outcome {
    if !job.uses.is_empty() || !outcome.lingering.is_empty() {
        let message = format!("Replica {} is still in use.", replica.place.name);
        outcome.uses = refuse_all(job, &Hold::new(HoldReason::InUse, message));
        return outcome;
    }
    match known_stage(machine, job).map_or(Ok(()), |stage| machine.consumers.unstage(&stage)) {
        Ok(()) => match dispose(machine, replica) {
            Ok(()) => {
                outcome.removed = true;
                outcome.pool_changed = true;
            }
            Err(hold) => outcome.replica = Some(Err(hold)),
        },
        Err(hold) => outcome.replica = Some(Err(hold)),
    }
    outcome
}

/// Removes the bytes of a copy, or leaves them where they are and only drops the object.
fn dispose(machine: &Machine, replica: &ReplicaJob) -> Result<(), Hold> {
    if replica.fate != Fate::Forget {
        return machine.copies.remove_replica(&replica.place);
    }
    tracing::warn!(
        replica = replica.place.name,
        "a copy whose volume is not known is kept on its pool, and its object goes"
    );
    Ok(())
}

fn refuse_all(job: &Job, hold: &Hold) -> Vec<(UseJob, Option<Hold>)> {
    job.uses
        .iter()
        .map(|each| {
            (
                each.clone(),
                each.hold.clone().or_else(|| Some(hold.clone())),
            )
        })
        .collect()
}

fn use_and_climb(
    machine: &Machine,
    job: &Job,
    replica: &ReplicaJob,
    found: ReplicaFound,
    early: &dyn Fn(&[RungStatus]),
    outcome: &mut Outcome,
) {
    let stage = job.staging.clone().map(|stage| Stage {
        backing: found.data.clone(),
        ..stage
    });
    let provided = stage
        .as_ref()
        .and_then(|stage| provide(machine, job, stage, outcome));
    let single = Single {
        machine,
        place: &replica.place,
        found: RefCell::new(found),
    };
    let subject = Subject {
        machine,
        lower: &single,
        stage: stage.as_ref().filter(|_| provided.is_some()),
        provided: RefCell::new(provided),
        early,
    };
    tracing::trace!(replica = replica.place.name, goal = %job.goal, "climbing");
    match climb(&subject, job.goal, &job.reported) {
        Ok(ladder) => outcome.ladder = ladder,
        Err(hold) => {
            outcome.replica = Some(Err(hold));
            return;
        }
    }
    outcome.stage = subject.provided.into_inner();
    let found = single.found.into_inner();
    let status = replica.object.status.as_ref();
    let known = status.and_then(|status| status.content.clone());
    look_inside(machine, job, &found.data, known, outcome);
    outcome.replica = Some(Ok(found));
}

/// Looks at the bytes of a volume that is not in use, and grows the filesystem in them.
fn look_inside(
    machine: &Machine,
    job: &Job,
    data: &Path,
    known: Option<Content>,
    outcome: &mut Outcome,
) {
    if outcome.stage.is_some() {
        return;
    }
    let content = idle_content(machine, job, data, known, outcome);
    let is_idle = job.uses.is_empty() && outcome.lingering.is_empty();
    outcome.content = match content {
        Some(content) if is_idle => Some(grow_idle(machine, job, data, content)),
        content => content,
    };
}

/// Brings the volume into use for the uses that nothing forbids. None if there are no such uses, or if it cannot be
/// done.
fn provide(
    machine: &Machine,
    job: &Job,
    stage: &Stage,
    outcome: &mut Outcome,
) -> Option<StageFound> {
    let allowed: Vec<Use> = job
        .uses
        .iter()
        .filter(|each| each.hold.is_none())
        .map(|each| each.usage.clone())
        .collect();
    if allowed.is_empty() {
        outcome.uses = job
            .uses
            .iter()
            .map(|each| (each.clone(), each.hold.clone()))
            .collect();
        return None;
    }
    match machine.consumers.provide(stage, &allowed) {
        Ok(provided) => {
            let mut refused = provided.refused.into_iter();
            let mut hold = |each: &UseJob| match &each.hold {
                Some(hold) => Some(hold.clone()),
                None => refused.next().flatten(),
            };
            outcome.uses = job
                .uses
                .iter()
                .map(|each| (each.clone(), hold(each)))
                .collect();
            Some(provided.found)
        }
        Err(hold) => {
            outcome.uses = refuse_all(job, &hold);
            None
        }
    }
}

/// Looks at the bytes of an idle volume, unless nothing can have changed since the last look.
fn idle_content(
    machine: &Machine,
    job: &Job,
    data: &Path,
    known: Option<Content>,
    outcome: &Outcome,
) -> Option<Content> {
    let wanted = job.staging.as_ref()?.filesystem?;
    let served = outcome.ladder.iter().find(|rung| rung.rung == Rung::Volume);
    let size = served?.size;
    // The owner of foreign data may have removed it, so it is looked at every time.
    let fits = |content: &Content| content.kind == wanted.name() || content.kind == EMPTY_CONTENT;
    let settled = |content: &Content| content.of == size && content.full && fits(content);
    let same = known.as_ref().is_some_and(settled) && outcome.ended.is_empty();
    if same {
        known
    } else {
        machine.consumers.content(data, size)
    }
}

/// Grows a filesystem that nobody uses. Returns what it is then, or what it is and why it did not grow.
fn grow_idle(machine: &Machine, job: &Job, data: &Path, content: Content) -> Content {
    let wanted = job.staging.as_ref().and_then(|stage| stage.filesystem);
    let Some(kind) = wanted.filter(|kind| content.kind == kind.name() && !content.full) else {
        return content;
    };
    match machine.consumers.grow_idle(data, kind) {
        Ok(()) => machine
            .consumers
            .content(data, content.of)
            .unwrap_or(content),
        Err(hold) => Content {
            hold: Some(hold),
            ..content
        },
    }
}
