//! Carries plans out: looks, plans under the ledger's lock, writes.

use std::sync::Arc;

use kube::Client;
use trellis_api::step;

use super::plan::{Plan, plan};
use super::rooms::Pools;
use crate::queue::{Queue, Run};
use crate::record::Recorder;
use crate::view::{View, now};
use crate::world::World;
use crate::write::{Written, send};

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
    let plan = decide(world, &view);
    plan.notes.into_iter().for_each(|note| recorder.note(note));
    if plan.writes.is_empty() {
        return Run::Done;
    }
    let written = send(client, &plan.writes).await;
    let mut run = Run::Done;
    let mut all_stored = true;
    for (write, outcome) in plan.writes.iter().zip(&written) {
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
    if run == Run::Failed {
        let mut ledger = world.ledger.open();
        plan.promises
            .iter()
            .for_each(|promise| ledger.withdraw(&promise.replica));
    }
    if let Some(reached) = plan.step.filter(|_| all_stored) {
        step::reached(reached);
    }
    run
}

/// Plans with the ledger locked, so that what is promised cannot be promised to another meanwhile.
fn decide(world: &World, view: &View) -> Plan {
    let mut ledger = world.ledger.open();
    let pools = Pools {
        pools: world.pools.all(),
        ledger: &ledger,
    };
    let decided = plan(view, &pools, &now());
    for promise in &decided.promises {
        ledger.promise(&promise.replica, &promise.pool, promise.size);
    }
    if decided.waits_for_room {
        ledger.wait(&view.key);
    }
    decided
}
