//! Carries out one node's work: looks, works on a thread that may block, and writes what it found.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::sync::mpsc;
use trellis_api::kinds::{ATTACHMENT_FINALIZER, AttachmentPhase, RungStatus};
use trellis_api::step::{self, Step};
use trellis_api::{Observed, Rung};

use super::chap::Secrets;
use super::finisher::Finisher;
use super::job::{Fate, Job, Node, UseJob, job};
use super::machine::Machine;
use super::report::{early_writes, replica_writes, rot_note, use_writes};
use super::work::{Outcome, work};
use crate::plan::Note;
use crate::queue::{Queue, Run};
use crate::record::Recorder;
use crate::stored::{StoredVolume, now};
use crate::unseen::{self, Unseen};
use crate::world::{TELL_AFTER, World};
use crate::write::{Manager, Object, Place, Write, Written, send_with_versions};

/// How many ladders may wait to be reported early. Each raise reports one.
const EARLY_MAX: usize = 16;

/// How often, and after which pauses, to look for what is on its way.
const LOOKS: usize = 10;
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The agent of one node.
pub struct Agent {
    /// The node.
    pub node: Node,
    /// The caches.
    pub world: Arc<World>,
    /// The store.
    pub client: Client,
    /// The machine.
    pub machine: Machine,
    /// Where events go.
    pub recorder: Recorder,
    /// The last ladder of each volume.
    pub ladders: Ladders,
    /// What was written and is not seen yet.
    pub unseen: Unseen,
    /// What was logged about each copy last.
    pub complaints: Complaints,
    /// What initiators must know.
    pub secrets: Secrets,
    /// Who is told that a claim has its size.
    pub finisher: Arc<dyn Finisher>,
}

/// What was last logged about each copy. Every pass looks at a disk that is gone, and that must not fill the log.
#[derive(Clone, Default)]
pub struct Complaints(Arc<Mutex<HashMap<String, String>>>);

impl Complaints {
    /// Whether this is new to the log.
    fn is_new(&self, replica: &str, message: &str) -> bool {
        let mut complaints = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if complaints.get(replica).is_some_and(|last| last == message) {
            return false;
        }
        complaints.insert(replica.to_owned(), message.to_owned());
        true
    }

    fn forget(&self, replica: &str) {
        let mut complaints = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        complaints.remove(replica);
    }
}

/// The last measured ladders, by volume. They only bridge the time until a report is seen in the cache, so that a look
/// in between does not lose the time of a raise. No decision is based on them.
#[derive(Default)]
pub struct Ladders(Mutex<HashMap<String, Vec<RungStatus>>>);

impl Ladders {
    fn remember(&self, volume: &str, ladder: &[RungStatus]) {
        let mut ladders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ladder.is_empty() {
            ladders.remove(volume);
        } else {
            ladders.insert(volume.to_owned(), ladder.to_vec());
        }
    }

    /// What was reported, with what was measured since.
    fn fill_in(&self, volume: &str, reported: &mut Vec<RungStatus>) {
        let ladders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for known in ladders.get(volume).into_iter().flatten() {
            match reported.iter_mut().find(|each| each.rung == known.rung) {
                Some(each) if each.observed_at < known.observed_at => *each = known.clone(),
                Some(_) => {}
                None => reported.push(known.clone()),
            }
        }
    }
}

/// Works on the volumes that `queue` names, for ever.
pub async fn run(agent: Arc<Agent>, queue: Queue) {
    loop {
        let key = queue.next().await;
        let run = agent.reconcile(&key).await;
        queue.finish(&key, run);
    }
}

impl Agent {
    async fn reconcile(&self, key: &str) -> Run {
        tracing::trace!(volume = key, "pass begins");
        if !self.sees_its_reports(key).await {
            // The API may be away, and the volume needs its node all the same. What this pass takes for reported is
            // compared again by a later one.
            self.world.passes.push_later(key, unseen::LOOK_AFTER);
        }
        let view = self.look(key).await;
        let mut job = job(&view, &self.node, &|name| self.world.pools.get("", name));
        self.ladders.fill_in(key, &mut job.reported);
        if !job.has_work() && !self.machine.copies.has_target(key) {
            return Run::Done;
        }
        if goals_are_on_their_way(&view, &job) {
            return Run::Done;
        }
        if let Some(writes) = missing_finalizers(&job) {
            let stored = self.send(key, &writes).await;
            // The change that outdated the object may not concern this node, and then would not bring the volume here
            // again.
            let all = stored.iter().all(|each| matches!(each, Written::Stored));
            return if all { Run::Done } else { Run::Failed };
        }
        if let Err(error) = self.add_secret(&view, &mut job).await {
            tracing::warn!(volume = key, %error, "the volume's secret cannot be read or made; it is tried again");
            return Run::Failed;
        }
        let (view, job) = (Arc::new(view), Arc::new(job));
        let Some(outcome) = self.work(&view, &job).await else {
            return Run::Failed;
        };
        tracing::trace!(volume = key, goal = %job.goal, "pass done");
        self.ladders.remember(key, &outcome.ladder);
        if outcome.pool_changed {
            for pool in job.pools() {
                self.world.pool_used(pool);
            }
        }
        let run = self.report(key, &view, &job, &outcome).await;
        self.describe(&job, &outcome).await;
        run
    }

    /// Waits a moment until what this node has said of the volume is seen; whether it is.
    async fn sees_its_reports(&self, key: &str) -> bool {
        for _ in 0..LOOKS {
            if self.unseen.is_seen(&self.world, key) {
                return true;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.unseen.is_seen(&self.world, key)
    }

    /// Looks at the volume. The goals of target and copies are stored together but seen one after the other; a pass in
    /// between would find nothing to do and only delay the one that matters. So it waits a moment for the rest of them.
    async fn look(&self, key: &str) -> StoredVolume {
        for _ in 0..LOOKS {
            let view = StoredVolume::gather(&self.world, key);
            if !view.is_replicated() || goals_agree(&view) {
                return view;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        StoredVolume::gather(&self.world, key)
    }

    /// Adds what initiators must know to a target that runs here.
    async fn add_secret(&self, view: &StoredVolume, job: &mut Job) -> Result<(), kube::Error> {
        let target = job
            .replicated
            .as_mut()
            .and_then(|several| several.target.as_mut());
        if let (Some(target), Some(volume)) = (target, &view.volume) {
            let earlier = || self.machine.copies.earlier_secret(&view.key);
            target.place.secret = Some(
                self.secrets
                    .of(&self.client, &self.node.name, volume, earlier)
                    .await?,
            );
        }
        Ok(())
    }

    /// Makes the copies on this node say about themselves what is stored about them now. Nobody waits for it.
    async fn describe(&self, job: &Arc<Job>, outcome: &Outcome) {
        if !outcome.is_found() {
            return;
        }
        let (machine, job) = (self.machine.clone(), job.clone());
        let complaints = self.complaints.clone();
        let describe = move || {
            for copy in job.copies().filter(|copy| !copy.fate.is_end()) {
                let replica = &copy.place.name;
                match machine.copies.describe_replica(&copy.place) {
                    Ok(()) => complaints.forget(replica),
                    Err(hold) if complaints.is_new(replica, &hold.message) => {
                        tracing::warn!(replica, "a copy cannot describe itself: {}", hold.message);
                    }
                    Err(_) => {}
                }
            }
        };
        // A panic is logged where it happens, and the next pass tries again.
        let _ = tokio::task::spawn_blocking(describe).await;
    }

    /// Runs the blocking pass. If it takes long, the lower rungs are stored while the upper ones are still being
    /// raised.
    async fn work(&self, view: &Arc<StoredVolume>, job: &Arc<Job>) -> Option<Outcome> {
        let (sender, mut ladders) = mpsc::channel::<Vec<RungStatus>>(EARLY_MAX);
        let machine = self.machine.clone();
        let blocking_job = job.clone();
        let pass = tokio::task::spawn_blocking(move || {
            let early = |ladder: &[RungStatus]| {
                // An early report is a courtesy; what does not fit is reported at the end anyway.
                let _ = sender.try_send(ladder.to_vec());
            };
            work(&machine, &blocking_job, &early)
        });
        let patience = tokio::time::sleep(TELL_AFTER);
        tokio::pin!(patience);
        let (mut newest, mut told) = (None, false);
        loop {
            tokio::select! {
                ladder = ladders.recv() => match ladder {
                    Some(ladder) => newest = served_at_goal(job, ladder).or(newest),
                    None => break,
                },
                () = &mut patience, if !told && newest.is_some() => {
                    told = true;
                    let writes = early_writes(view, job, newest.as_deref().unwrap_or_default(), &now());
                    self.send(&view.key, &writes).await;
                }
            }
        }
        match pass.await {
            Ok(outcome) => Some(outcome),
            Err(error) => {
                tracing::error!(%error, "a pass over a volume ended in a panic");
                None
            }
        }
    }

    async fn report(&self, key: &str, view: &StoredVolume, job: &Job, outcome: &Outcome) -> Run {
        let now = now();
        let replica = replica_writes(view, job, outcome, &now);
        let uses = use_writes(view, job, outcome, &self.node.boot_id, &now);
        let claim = self.finisher.finish(view, job, outcome, &now);
        let step = match (&claim, uses.is_empty(), replica.is_empty()) {
            (Some(_), _, _) if reached(job, outcome) => Some(Step::ClaimFinished),
            (_, false, _) if outcome.stage.is_some() => Some(Step::AttachmentReported),
            (_, _, false) => Some(Step::ReplicaReported),
            _ => None,
        };
        // What a user waits for goes first; the lower rungs have mostly been reported already.
        let (finish, note) = claim.unzip();
        let mut writes: Vec<Write> = finish.into_iter().collect();
        writes.extend(uses);
        writes.extend(replica);
        let run = self.write(key, writes, step).await;
        for note in note.into_iter().chain(rot_note(view, outcome)) {
            self.tell(note);
        }
        // A hold that time alone may lift (a busy path, a missing program) is tried again with pauses.
        match outcome.held() {
            Some(hold) => Run::Held(hold.reason),
            None => run,
        }
    }

    /// Tells the claim, and every pod that uses it.
    fn tell(&self, note: Note) {
        let about = &note.about;
        for pod in self.world.pods_using(&about.namespace, &about.name) {
            self.recorder.note(note.to_pod(&pod));
        }
        self.recorder.note(note);
    }

    /// Sends what this node has to say of a volume, and remembers it until it is seen.
    async fn send(&self, key: &str, writes: &[Write]) -> Vec<Written> {
        let answers = send_with_versions(&self.client, Manager::Node, writes).await;
        self.unseen.note(key, writes, &answers);
        answers.into_iter().map(|(written, _)| written).collect()
    }

    async fn write(&self, key: &str, writes: Vec<Write>, step: Option<Step>) -> Run {
        if writes.is_empty() {
            return Run::Done;
        }
        let written = self.send(key, &writes).await;
        tracing::trace!(volume = key, writes = writes.len(), "reported");
        let mut run = Run::Done;
        for outcome in &written {
            if let Written::Failed(error) = outcome {
                tracing::warn!(volume = key, %error, "a status could not be stored and will be again");
                run = Run::Failed;
            }
        }
        if let Some(step) = step.filter(|_| run == Run::Done) {
            step::reached(step);
        }
        run
    }
}

/// The ladder, if the volume is at its goal while something above it is not yet known to be.
fn served_at_goal(job: &Job, ladder: Vec<RungStatus>) -> Option<Vec<RungStatus>> {
    let served = ladder.iter().find(|each| each.rung == Rung::Volume)?;
    (served.size >= job.goal && ladder.len() > 2).then_some(ladder)
}

fn reached(job: &Job, outcome: &Outcome) -> bool {
    let observed: Vec<Observed> = outcome.ladder.iter().map(Observed::from).collect();
    trellis_api::next_step(&observed, job.goal) == trellis_api::Next::Reached
}

/// Whether target and copies have the same goal.
fn goals_agree(view: &StoredVolume) -> bool {
    let mut copies = view.replicas.iter();
    let target = view.target.as_ref();
    target.is_none_or(|target| copies.all(|copy| copy.spec.capacity == target.spec.capacity))
}

/// Whether only one of the goals of target and replica is here, while everything else is at rest. They are stored
/// together but seen one after the other; the event of the second brings the volume here again, and a pass
/// in between would find nothing to do, or say half of what the next one says.
fn goals_are_on_their_way(view: &StoredVolume, job: &Job) -> bool {
    let Some(replica) = &job.replica else {
        return false;
    };
    let Some(target) = &view.target else {
        return replica.fate == Fate::Make && view.volume.is_some();
    };
    let attached = |each: &UseJob| {
        let status = each.object.status.as_ref();
        status.is_some_and(|status| {
            status.phase == AttachmentPhase::Attached && status.hold.is_none()
        })
    };
    target.spec.capacity != replica.object.spec.capacity
        && replica.fate == Fate::Find
        && job.endings.is_empty()
        && job.uses.iter().all(attached)
}

/// A use must not begin before its object is sure to stay until the use has ended.
pub(crate) fn missing_finalizers(job: &Job) -> Option<Vec<Write>> {
    let writes: Vec<Write> = job
        .uses
        .iter()
        .filter(|each| {
            !each
                .object
                .finalizers()
                .iter()
                .any(|name| name == ATTACHMENT_FINALIZER)
        })
        .map(|each| {
            let mut finalizers = each.object.finalizers().to_vec();
            finalizers.push(ATTACHMENT_FINALIZER.to_owned());
            let namespace = each.object.namespace().unwrap_or_default();
            let place = Place::within(Object::Attachment, namespace, each.object.name_any());
            let body = json!({ "metadata": {
                "finalizers": finalizers,
                "resourceVersion": each.object.metadata.resource_version,
            }});
            Write::Patch(place, body)
        })
        .collect();
    (!writes.is_empty()).then_some(writes)
}
