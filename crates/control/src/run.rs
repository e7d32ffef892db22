//! Starts the controllers and the agent of one process.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::task::JoinSet;

use crate::claim;
use crate::node::machine::Machine;
use crate::node::{self, Agent, Complaints, Finisher, Ladders, Node, Secrets};
use crate::pods;
use crate::record::Recorder;
use crate::world::World;

/// How many volumes are planned at the same time.
const PLANNERS: usize = 4;
/// How many volumes are worked on at the same time on this node.
const WORKERS: usize = 8;

/// What one process starts with.
pub struct Settings {
    /// The node's name.
    pub node: String,
    /// Whether filesystems may grow on it while they are mounted.
    pub online_growth: bool,
    /// How often everything is looked at again although nothing changed.
    pub resync: Duration,
}

/// Starts everything on the caches of `world`, which are still empty. The tasks run until the set is dropped. The call
/// returns when every cache has seen its first listing; nothing is decided before.
pub async fn start(
    client: Client,
    world: Arc<World>,
    settings: Settings,
    machine: Machine,
    finisher: Arc<dyn Finisher>,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let node = Node {
        name: settings.node,
        boot_id: machine.consumers.boot_id(),
        online_growth: settings.online_growth,
    };
    let (recorder, recording) = Recorder::new(client.clone(), node.name.clone());
    tasks.spawn(recording);
    for mut listed in world.watch(&client, &mut tasks) {
        // A watch that ends before its first listing ends with the process.
        let _ = listed.wait_for(|listed| *listed).await;
    }
    for _ in 0..PLANNERS {
        tasks.spawn(claim::run(
            world.clone(),
            client.clone(),
            world.plans.clone(),
            recorder.clone(),
        ));
    }
    tasks.spawn(pods::run(
        world.clone(),
        client.clone(),
        world.pod_queue.clone(),
        recorder.clone(),
    ));
    let agent = Arc::new(Agent {
        node,
        world: world.clone(),
        client,
        machine,
        recorder,
        ladders: Ladders::default(),
        complaints: Complaints::default(),
        secrets: Secrets::default(),
        finisher,
    });
    for _ in 0..WORKERS {
        tasks.spawn(node::run(agent.clone(), world.passes.clone()));
    }
    tasks.spawn(node::run_returns(agent.clone()));
    tasks.spawn(node::run_pools(agent, world.pool_queue.clone()));
    tasks.spawn(world.resync(settings.resync));
    tasks
}
