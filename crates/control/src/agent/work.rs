//! One pass over one volume on this node. It blocks, so it runs on a thread of its own.
//!
//! The order is that of dependence: uses that end, the replica, uses that begin, then the ladder. A
//! growth that is held never keeps a use from beginning at the old size.

use std::path::PathBuf;
use std::sync::Arc;

use trellis_api::kinds::{Attachment, Content, RungStatus};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::climb::{Climbable, Measured, climb};
use super::job::{Fate, Job, ReplicaJob, UseJob};
use super::machine::{Machine, ReplicaFound, ReplicaPlace, Stage, StageFound};

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
        // Nothing was ever brought into use.
        outcome
            .ended
            .extend(job.endings.iter().map(|ending| ending.object.clone()));
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
    let stage = stage.filter(|_| job.uses.iter().any(|each| each.hold.is_none()));
    let staged = stage.as_ref().map(|stage| machine.stage(stage));
    match (&stage, &staged) {
        (Some(stage), Some(Ok(_))) => outcome.uses = publish_all(machine, job, stage),
        (_, Some(Err(hold))) => outcome.uses = refuse_all(job, hold),
        _ => {
            outcome.uses = job
                .uses
                .iter()
                .map(|each| (each.clone(), each.hold.clone()))
                .collect()
        }
    }
    let in_use = stage.filter(|_| matches!(staged, Some(Ok(_))));
    let subject = Subject {
        machine,
        place: &replica.place,
        stage: in_use.as_ref(),
        early,
    };
    match climb(&subject, job.goal, &job.reported) {
        Ok(ladder) => outcome.ladder = ladder,
        Err(hold) => {
            outcome.replica = Some(Err(hold));
            return;
        }
    }
    outcome.replica = Some(machine.find_replica(&replica.place));
    match &in_use {
        Some(stage) => outcome.stage = machine.find_stage(stage).ok(),
        None => outcome.content = idle_content(machine, job, replica, &found, outcome),
    }
}

fn publish_all(machine: &dyn Machine, job: &Job, stage: &Stage) -> Vec<(UseJob, Option<Hold>)> {
    let publish = |each: &UseJob| {
        let hold = each
            .hold
            .clone()
            .or_else(|| machine.publish(stage, &each.usage).err());
        (each.clone(), hold)
    };
    job.uses.iter().map(publish).collect()
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
    let same = status.and_then(|status| status.capacity) == Some(size) && outcome.ended.is_empty();
    if same && known.is_some() {
        known
    } else {
        machine.content(&found.data, size)
    }
}

/// The ladder of one volume on this node.
struct Subject<'a> {
    machine: &'a dyn Machine,
    place: &'a ReplicaPlace,
    stage: Option<&'a Stage>,
    early: &'a dyn Fn(&[RungStatus]),
}

impl Climbable for Subject<'_> {
    fn measure(&self) -> Result<Vec<Measured>, Hold> {
        let found = self.machine.find_replica(self.place)?;
        let mut rungs = vec![
            Measured {
                rung: Rung::Replica,
                size: found.size,
                full: false,
            },
            Measured {
                rung: Rung::Volume,
                size: found.served,
                full: false,
            },
        ];
        if let Some(stage) = self.stage {
            let upper = self.machine.find_stage(stage)?.rungs;
            rungs.extend(upper.iter().map(|each| Measured {
                rung: each.rung,
                size: each.size,
                full: each.full,
            }));
        }
        Ok(rungs)
    }

    fn raise(&self, rung: Rung, to: Bytes) -> Result<(), Hold> {
        match (rung, self.stage) {
            (Rung::Replica | Rung::Volume, _) => self.machine.raise_replica(self.place, to),
            (Rung::Filesystem, Some(stage)) if stage.read_only => {
                let message = format!("Every use of volume {} is read-only.", stage.volume);
                Err(Hold::new(HoldReason::ReadOnly, message))
            }
            (rung, Some(stage)) => self.machine.raise_stage(stage, rung, to),
            (_, None) => Ok(()),
        }
    }

    fn climbed(&self, ladder: &[RungStatus]) {
        (self.early)(ladder);
    }
}
