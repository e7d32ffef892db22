//! One pass over one volume on this node. It blocks, so it runs on a thread of its own.
//!
//! The order is that of dependence: uses that end, the replica, uses that begin, then the ladder. A
//! growth that is held never keeps a use from beginning at the old size.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

use trellis_api::kinds::{Attachment, Content, RungStatus};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::climb::{Climbable, Measured, climb};
use super::job::{Fate, Job, ReplicaJob, UseJob};
use super::machine::{Machine, ReplicaFound, ReplicaPlace, Stage, StageFound, Use};

/// What a pass found and did.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The replica, if there is one on this node and it shall stay.
    pub replica: Option<Result<ReplicaFound, Hold>>,
    /// The replica is gone.
    pub removed: bool,
    /// What the bytes are, when it was looked at.
    pub content: Option<Content>,
    /// Uses that are over.
    pub ended: Vec<Arc<Attachment>>,
    /// Uses that should be over and are not, and why.
    pub lingering: Vec<(Arc<Attachment>, Hold)>,
    /// Uses that are or should be, and why not.
    pub uses: Vec<(UseJob, Option<Hold>)>,
    /// The volume in use.
    pub stage: Option<StageFound>,
    /// The whole ladder on this node, lowest rung first.
    pub ladder: Vec<RungStatus>,
    /// Space of the pool was taken or given back.
    pub pool_changed: bool,
}

impl Outcome {
    /// What keeps anything of it, so that it shall be tried again. A use that the objects alone forbid is not
    /// tried again before they change.
    pub fn held(&self) -> Option<&Hold> {
        let uses = self.uses.iter().filter(|(each, _)| each.hold.is_none());
        let lingering = self.lingering.iter().map(|(_, hold)| hold);
        lingering
            .chain(uses.filter_map(|(_, hold)| hold.as_ref()))
            .chain(self.replica.iter().filter_map(|found| found.as_ref().err()))
            .chain(self.ladder.iter().filter_map(|rung| rung.hold.as_ref()))
            .chain(self.content.iter().filter_map(|each| each.hold.as_ref()))
            .next()
    }
}

/// Does what `job` says. `early` is told of the ladder after every raise.
pub fn work(machine: &dyn Machine, job: &Job, early: &dyn Fn(&[RungStatus])) -> Outcome {
    let mut outcome = Outcome::default();
    end_uses(machine, job, &mut outcome);
    let Some(replica) = &job.replica else {
        outcome.uses = refuse_all(job, &without_replica(job));
        return outcome;
    };
    let found = match replica.fate {
        Fate::Remove => return remove(machine, job, replica, outcome),
        Fate::Make => {
            outcome.pool_changed = true;
            machine.make_replica(&replica.place, job.goal)
        }
        Fate::Find => machine.find_replica(&replica.place),
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

/// Where the bytes are, as far as it was reported earlier: enough to find mounts and devices again.
fn known_stage(job: &Job) -> Option<Stage> {
    let status = job.replica.as_ref()?.object.status.as_ref()?;
    let backing = PathBuf::from(status.path.as_ref()?);
    Some(Stage {
        backing,
        ..job.staging.clone()?
    })
}

fn end_uses(machine: &dyn Machine, job: &Job, outcome: &mut Outcome) {
    let Some(stage) = known_stage(job) else {
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
        match machine.unpublish(&stage, &ending.usage) {
            Ok(()) => outcome.ended.push(ending.object.clone()),
            Err(hold) => outcome.lingering.push((ending.object.clone(), hold)),
        }
    }
    let last = job.uses.is_empty() && outcome.lingering.is_empty() && !outcome.ended.is_empty();
    if last && let Err(hold) = machine.unstage(&stage) {
        let ended = std::mem::take(&mut outcome.ended);
        outcome
            .lingering
            .extend(ended.into_iter().map(|object| (object, hold.clone())));
    }
}

/// A replica goes only when nothing uses it.
fn remove(machine: &dyn Machine, job: &Job, replica: &ReplicaJob, mut outcome: Outcome) -> Outcome {
    if !job.uses.is_empty() || !outcome.lingering.is_empty() {
        let message = format!("Replica {} is still in use.", replica.place.name);
        outcome.uses = refuse_all(job, &Hold::new(HoldReason::InUse, message));
        return outcome;
    }
    match known_stage(job).map_or(Ok(()), |stage| machine.unstage(&stage)) {
        Ok(()) => match machine.remove_replica(&replica.place) {
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
    machine: &dyn Machine,
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
    let subject = Subject {
        machine,
        place: &replica.place,
        replica: RefCell::new(found),
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
    let found = subject.replica.into_inner();
    outcome.stage = subject.provided.into_inner();
    if outcome.stage.is_none() {
        let content = idle_content(machine, job, replica, &found, outcome);
        let is_idle = job.uses.is_empty() && outcome.lingering.is_empty();
        outcome.content = match content {
            Some(content) if is_idle => Some(grow_idle(machine, job, &found, content)),
            content => content,
        };
    }
    outcome.replica = Some(Ok(found));
}

/// Brings the volume into use for the uses that nothing forbids; none if there are none, or it cannot be.
fn provide(
    machine: &dyn Machine,
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
    match machine.provide(stage, &allowed) {
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

/// Looks at the bytes of an idle volume, unless nothing can have changed since it was last done.
fn idle_content(
    machine: &dyn Machine,
    job: &Job,
    replica: &ReplicaJob,
    found: &ReplicaFound,
    outcome: &Outcome,
) -> Option<Content> {
    job.staging.as_ref()?.filesystem?;
    let status = replica.object.status.as_ref();
    let known = status.and_then(|status| status.content.clone());
    let size = outcome.ladder.first().map_or(found.size, |rung| rung.size);
    let settled = |content: &Content| content.of == size && content.full;
    let same = known.as_ref().is_some_and(settled) && outcome.ended.is_empty();
    if same {
        known
    } else {
        machine.content(&found.data, size)
    }
}

/// Grows a filesystem that nobody uses, and answers what it is then, or what it is and why it did not grow.
fn grow_idle(machine: &dyn Machine, job: &Job, found: &ReplicaFound, content: Content) -> Content {
    let wanted = job.staging.as_ref().and_then(|stage| stage.filesystem);
    let Some(kind) = wanted.filter(|kind| content.kind == kind.name() && !content.full) else {
        return content;
    };
    match machine.grow_idle(&found.data, kind) {
        Ok(()) => machine.content(&found.data, content.of).unwrap_or(content),
        Err(hold) => Content {
            hold: Some(hold),
            ..content
        },
    }
}

/// The ladder of one volume on this node, with what was last measured of it.
struct Subject<'a> {
    machine: &'a dyn Machine,
    place: &'a ReplicaPlace,
    replica: RefCell<ReplicaFound>,
    stage: Option<&'a Stage>,
    provided: RefCell<Option<StageFound>>,
    early: &'a dyn Fn(&[RungStatus]),
}

impl Subject<'_> {
    fn lower(&self) -> Vec<Measured> {
        let found = self.replica.borrow();
        vec![
            Measured {
                rung: Rung::Replica,
                size: found.size,
                full: false,
                note: None,
            },
            Measured {
                rung: Rung::Volume,
                size: found.served,
                full: false,
                note: None,
            },
        ]
    }

    fn upper(&self) -> Vec<Measured> {
        let found = self.provided.borrow();
        let rungs = found.iter().flat_map(|found| &found.rungs);
        rungs
            .map(|each| Measured {
                rung: each.rung,
                size: each.size,
                full: each.full,
                note: each.note.clone(),
            })
            .collect()
    }
}

impl Climbable for Subject<'_> {
    fn measure(&self) -> Result<Vec<Measured>, Hold> {
        // Both were measured a moment ago, in this pass.
        Ok(self.lower().into_iter().chain(self.upper()).collect())
    }

    fn measure_again(&self, raised: Rung) -> Result<Vec<Measured>, Hold> {
        match self.stage {
            Some(stage) if raised > Rung::Volume => {
                self.provided.replace(Some(self.machine.find_stage(stage)?));
                Ok(self.upper())
            }
            _ => {
                self.replica.replace(self.machine.find_replica(self.place)?);
                Ok(self.lower())
            }
        }
    }

    fn raise(&self, rung: Rung, to: Bytes) -> Result<(), Hold> {
        match (rung, self.stage) {
            (Rung::Replica | Rung::Volume, _) => self.machine.raise_replica(self.place, to),
            (Rung::Filesystem, Some(stage)) if stage.read_only => {
                let message = format!("Every use of volume {} is read-only.", stage.volume);
                Err(Hold::new(HoldReason::ReadOnly, message))
            }
            (Rung::Filesystem, Some(stage)) if !stage.online_growth => {
                let message = format!(
                    "Volume {} is mounted, and its filesystem may not grow while it is.",
                    stage.volume
                );
                Err(Hold::new(HoldReason::OnlineGrowthOff, message))
            }
            (rung, Some(stage)) => self.machine.raise_stage(stage, rung, to),
            (_, None) => Ok(()),
        }
    }

    fn climbed(&self, ladder: &[RungStatus]) {
        (self.early)(ladder);
    }
}
