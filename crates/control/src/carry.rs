//! Carries out plans: plans under the ledger's lock, writes, and settles the promises by what became of the writes.

use futures::future::join;
use kube::Client;
use trellis_api::{Bytes, step};

use crate::ledger::Open;
use crate::plan::{Note, Plan};
use crate::queue::Run;
use crate::unseen;
use crate::volume::nodes::Nodes;
use crate::volume::rooms::Pools;
use crate::volume::surroundings::Surroundings;
use crate::world::World;
use crate::write::{Manager, Object, Write, Written, send_with_versions};

/// Does what was decided for a volume. `tell` passes notes on.
pub(crate) async fn carry_out(
    world: &World,
    client: &Client,
    key: &str,
    mut decided: Decided,
    tell: impl Fn(Note),
) -> Run {
    std::mem::take(&mut decided.plan.notes)
        .into_iter()
        .for_each(tell);
    if let Some(pause) = decided.plan.look_again_after {
        world.plans.push_later(key, pause);
    }
    let writes = &decided.plan.writes;
    if writes.is_empty() {
        return Run::Done;
    }
    let (of_volumes, of_claims) = writes.split_at(decided.plan.from_volumes.min(writes.len()));
    let (mut answers, rest) = join(
        send_with_versions(client, Manager::Volumes, of_volumes),
        send_with_versions(client, Manager::Claims, of_claims),
    )
    .await;
    answers.extend(rest);
    world.unseen.note(key, writes, &answers);
    let written: Vec<Written> = answers.into_iter().map(|(written, _)| written).collect();
    conclude(world, key, &decided, &written)
}

/// Whether a plan can be made: the caches show what the last one has written. If they do not yet, the volume comes back
/// when they do.
pub(crate) fn can_plan(world: &World, key: &str) -> bool {
    let is_seen = world.unseen.is_seen(world, key);
    if !is_seen {
        world.plans.push_later(key, unseen::LOOK_AFTER);
    }
    is_seen
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
pub(crate) fn decide(
    world: &World,
    key: &str,
    plan: impl FnOnce(Surroundings<'_>) -> Plan,
) -> Decided {
    let nodes = Nodes::of(&world.nodes.all());
    let mut ledger = world.ledger.open();
    let pools = Pools {
        pools: world.pools.all(),
        nodes: &nodes,
        ledger: &ledger,
    };
    let plan = plan(Surroundings {
        rooms: &pools,
        nodes: &nodes,
        waits: world.waits,
    });
    let promises = plan.promises.iter();
    let before = promises
        .map(|each| ledger.promise(&each.replica, &each.pool, each.size))
        .collect();
    if plan.waits_for_room {
        ledger.wait(key);
    }
    Decided { plan, before }
}
