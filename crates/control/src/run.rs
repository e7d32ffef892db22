//! Starts the rooms of one process: all of them in the embedded home, the volume room or the node room alone elsewhere.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::task::JoinSet;

use crate::embedded;
use crate::health;
use crate::lease::{self, LeaseSettings};
use crate::node::machine::Machine;
use crate::node::{self, Agent, Complaints, Finisher, Ladders, Node, Secrets};
use crate::pods;
use crate::record::Recorder;
use crate::unseen::Unseen;
use crate::volume::{self, surroundings::Waits};
use crate::world::{Sees, World};

/// How many volumes are planned at the same time.
const PLANNERS: usize = 4;
/// How many volumes are worked on at the same time on this node.
const WORKERS: usize = 8;

/// What the node room of a process starts with.
pub struct Settings {
    /// The node's name.
    pub node: String,
    /// Whether filesystems may grow on it while they are mounted.
    pub online_growth: bool,
    /// How often everything is looked at again although nothing changed.
    pub resync: Duration,
    /// How long this node may be silent before it counts as lost, if it says that it is there.
    pub lost_after: Duration,
}

/// Starts every room on the caches of `world`, which are still empty. The tasks run until the set is dropped. The call
/// returns when every cache has seen its first listing; nothing is decided before.
pub async fn start(
    client: Client,
    world: Arc<World>,
    settings: Settings,
    machine: Machine,
    finisher: Arc<dyn Finisher>,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let _ = world.home.set(settings.node.clone());
    let recorder = listed(&client, &world, &Sees::Claims, &settings.node, &mut tasks).await;
    for _ in 0..PLANNERS {
        tasks.spawn(embedded::run(
            world.clone(),
            client.clone(),
            world.plans.clone(),
            recorder.clone(),
        ));
    }
    tasks.spawn(health::run(client.clone(), settings.node.clone()));
    tasks.spawn(pods::run(
        world.clone(),
        client.clone(),
        world.pod_queue.clone(),
        recorder.clone(),
    ));
    run_node(
        client, world, settings, machine, finisher, recorder, &mut tasks,
    );
    tasks
}

/// Starts the node room alone, as [`start`] does with all of them.
pub async fn start_node(
    client: Client,
    world: Arc<World>,
    settings: Settings,
    machine: Machine,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let sees = Sees::Node(settings.node.clone());
    let recorder = listed(&client, &world, &sees, &settings.node, &mut tasks).await;
    tasks.spawn(node::run_beat(
        client.clone(),
        settings.node.clone(),
        settings.lost_after,
    ));
    let finisher = Arc::new(node::NoClaims);
    run_node(
        client, world, settings, machine, finisher, recorder, &mut tasks,
    );
    tasks
}

/// Runs the volume room whenever the lease is ours, for ever. Every tenure begins with empty caches, so that reservations
/// are those of the stored objects.
pub async fn run_volumes(client: Client, settings: LeaseSettings, waits: Waits, resync: Duration) {
    loop {
        let held = lease::acquire(&client, &settings).await;
        tracing::info!(lease = settings.name, "this process plans the volumes now");
        let tenure = async {
            let world = Arc::new(World::waiting(waits));
            let mut tasks = JoinSet::new();
            let sees = Sees::Volumes;
            let recorder = listed(&client, &world, &sees, &settings.identity, &mut tasks).await;
            for _ in 0..PLANNERS {
                tasks.spawn(volume::reconcile::run(
                    world.clone(),
                    client.clone(),
                    world.plans.clone(),
                    recorder.clone(),
                ));
            }
            tasks.spawn(world.resync(resync));
            while tasks.join_next().await.is_some() {}
        };
        tokio::select! {
            () = lease::keep(&client, &settings, held) => {}
            () = tenure => tracing::error!("the volume room has ended by itself"),
        }
        tracing::warn!(
            lease = settings.name,
            "this process no longer plans the volumes"
        );
    }
}

/// Begins to watch, and waits for the first listing of every kind.
async fn listed(
    client: &Client,
    world: &Arc<World>,
    sees: &Sees,
    host: &str,
    tasks: &mut JoinSet<()>,
) -> Recorder {
    let (recorder, recording) = Recorder::new(client.clone(), host.to_owned());
    tasks.spawn(recording);
    for mut listed in world.watch(client, sees, tasks) {
        // A watch that ends before its first listing ends with the process.
        let _ = listed.wait_for(|listed| *listed).await;
    }
    recorder
}

fn run_node(
    client: Client,
    world: Arc<World>,
    settings: Settings,
    machine: Machine,
    finisher: Arc<dyn Finisher>,
    recorder: Recorder,
    tasks: &mut JoinSet<()>,
) {
    let agent = Arc::new(Agent {
        node: Node {
            name: settings.node,
            boot_id: machine.consumers.boot_id(),
            online_growth: settings.online_growth,
        },
        world: world.clone(),
        client,
        machine,
        recorder,
        ladders: Ladders::default(),
        unseen: Unseen::default(),
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
}
