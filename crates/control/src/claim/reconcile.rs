//! Carries out plans: looks, plans under the ledger's lock, writes.

use std::sync::Arc;

use kube::Client;
use trellis_api::{Bytes, step};

use super::plan::plan;
use crate::ledger::Open;
use crate::plan::{Note, Plan};
use crate::queue::{Queue, Run};
use crate::record::Recorder;
use crate::view::{View, now};
use crate::volume::rooms::Pools;
use crate::world::World;
use crate::write::{Object, Write, Written, send};

/// Works on the volumes that `queue` names, for ever.
pub async fn run(world: Arc<World>, client: Client, queue: Queue, recorder: Recorder) {
    loop {
        let key = queue.next().await;
        let run = reconcile(&world, &client, &recorder, &key).await;
        queue.finish(&key, run);
    }
}

async fn reconcile(world: &World, client: &Client, recorder: &Recorder, key: &str) -> Run {
    tracing::trace!(volume = key, "planning");
    let view = View::gather(world, key);
    let mut decided = decide(world, &view);
    let notes = std::mem::take(&mut decided.plan.notes);
    for note in notes {
        tell_pods(world, recorder, &note);
        recorder.note(note);
    }
    if let Some(pause) = decided.plan.look_again_after {
        world.plans.push_later(key, pause);
    }
    if decided.plan.writes.is_empty() {
        return Run::Done;
    }
    let written = send(client, &decided.plan.writes).await;
    conclude(world, key, &decided, &written)
}

/// A pod that uses a claim is told what is wrong with it.
fn tell_pods(world: &World, recorder: &Recorder, note: &Note) {
    let about = &note.about;
    if !note.warning || about.object != Object::Claim {
        return;
    }
    for pod in world.pods_using(&about.namespace, &about.name) {
        recorder.note(note.to_pod(&pod));
    }
}

/// What the answers of the store mean for the promises, for the named step and for the next try.
pub(crate) fn conclude(world: &World, key: &str, decided: &Decided, written: &[Written]) -> Run {
    let plan = &decided.plan;
    let mut run = Run::Done;
    let mut all_stored = true;
    for (write, outcome) in plan.writes.iter().zip(written) {
        match outcome {
            Written::Stored => {}
            Written::Outdated => all_stored = false,
            Written::Failed(error) => {
                tracing::warn!(volume = key, ?write, %error, "a write failed and will be tried again");
                all_stored = false;
                run = Run::Failed;
            }
        }
    }
    let woken = settle_promises(&mut world.ledger.open(), decided, written);
    woken.iter().for_each(|key| world.push(key));
    if let Some(reached) = plan.step.filter(|_| all_stored) {
        step::reached(reached);
    }
    run
}

/// A promise that was stored stands until it is seen. One that was not gives way to what was promised before it.
/// Returns who waits for room, if any appeared.
fn settle_promises(ledger: &mut Open<'_>, decided: &Decided, written: &[Written]) -> Vec<String> {
    let plan = &decided.plan;
    let mut woken = Vec::new();
    for (promise, before) in plan.promises.iter().zip(&decided.before) {
        let carries = |write: &Write| match write {
            Write::Create(place, _) if place.object == Object::Volume => true,
            Write::Create(place, _) | Write::Patch(place, _) => {
                place.object == Object::Replica && place.name == promise.replica
            }
            Write::PatchStatus(..) | Write::Delete(_) => false,
        };
        let mut writes = plan.writes.iter().zip(written);
        let carrier = writes.rfind(|(write, _)| carries(write));
        let size = match carrier {
            // The object exists already, and its own event tells what it reserves.
            Some((Write::Create(..), Written::Outdated)) | Some((_, Written::Stored)) => {
                promise.size
            }
            _ => *before,
        };
        woken.extend(ledger.settle(&promise.replica, size));
    }
    woken
}

/// A plan, and what each of its promises took the place of.
pub(crate) struct Decided {
    /// The plan.
    pub plan: Plan,
    /// What was promised before, in the order of the plan's promises.
    pub before: Vec<Bytes>,
}

/// Plans with the ledger locked, so that the same room cannot be promised to another meanwhile.
pub(crate) fn decide(world: &World, view: &View) -> Decided {
    let mut ledger = world.ledger.open();
    let pools = Pools {
        pools: world.pools.all(),
        ledger: &ledger,
    };
    let plan = plan(view, &pools, &now());
    let promises = plan.promises.iter();
    let before = promises
        .map(|each| ledger.promise(&each.replica, &each.pool, each.size))
        .collect();
    if plan.waits_for_room {
        ledger.wait(&view.key);
    }
    Decided { plan, before }
}
