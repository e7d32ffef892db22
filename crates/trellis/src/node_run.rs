//! `trellis node run`: the node room alone, against an API elsewhere. The volumes of this machine are looked after here,
//! and planned there.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use rustix::fs::{FlockOperation, flock};
use tokio::signal::unix::{SignalKind, signal};
use trellis_api::NodeName;
use trellis_control::bootstrap::{Defaults, join};
use trellis_control::node::machine::Machine;
use trellis_control::run;
use trellis_control::world::World;

use crate::agent;
use crate::cli::{Global, NodeRun};
use crate::credentials;
use crate::csi::{self, OwnNode};
use crate::serve::Links;

/// What the name of a node's user begins with.
const USER_PREFIX: &str = "system:node:";

/// Runs until it is told to stop. Mounts stay when it stops, and are adopted when it starts again.
pub async fn run(global: &Global, verb: &NodeRun) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be heard")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be heard")?;
    let data = agent::prepare(&global.data)?;
    let _alone = lock(&data)?;
    let client = connect(&verb.join).await?;
    let node = name(&client, verb.node.as_deref(), &data).await?;
    let own: NodeName = node
        .parse()
        .with_context(|| format!("this node cannot be called {node:?}"))?;
    join(&client, &defaults(&data, &node)?)
        .await
        .context("this node cannot join: its first objects cannot be stored")?;
    let links = Links::new(&data, &node, verb.link_address);
    let machine = agent::machine(&data, links, &verb.agent)?;
    let world = Arc::new(World::new());
    let mut tasks = run::start_node(
        client.clone(),
        world.clone(),
        agent::settings(&node, &verb.agent, verb.lost_after),
        Machine::of(machine.clone()),
    )
    .await;
    tasks.spawn(credentials::keep_certificate(
        client.clone(),
        own,
        data.clone(),
    ));
    tasks.spawn(credentials::follow_nodes(client.clone(), machine.clone()));
    if let Some(endpoint) = &verb.csi_endpoint {
        let own = OwnNode {
            name: node.clone(),
            machine: machine.clone(),
            kubelet: verb.kubelet.clone(),
        };
        csi::start(endpoint, client.clone(), false, Some(own), &mut tasks).await?;
    }
    agent::attend(&world, client, &node, &machine, &mut tasks)?;
    // Whoever started the service may not read this; that is no reason not to run.
    let _ = writeln!(std::io::stdout(), "trellis looks after node {node}");
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        // None of them ends by itself: if one does, that is a bug of ours.
        _ = tasks.join_next() => bail!("the agent has failed; this is a bug, and a restart goes on from where it was"),
    }
    csi::forget(verb.csi_endpoint.as_deref(), Some(&verb.kubelet));
    Ok(())
}

/// One process looks after a data directory.
fn lock(data: &Path) -> anyhow::Result<File> {
    let path = data.join("node.lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("{} cannot be opened", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        bail!("another service uses {}", data.display());
    }
    Ok(file)
}

async fn connect(path: &Path) -> anyhow::Result<Client> {
    let file = Kubeconfig::read_from(path)
        .with_context(|| format!("{} cannot be read", path.display()))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("{} is not a valid kubeconfig", path.display()))?;
    Client::try_from(config).context("no connection can be made from the kubeconfig")
}

/// This node's name: the one that its token is for, or the given one. It never changes: pools, copies and attachments
/// carry it.
async fn name(client: &Client, told: Option<&str>, data: &Path) -> anyhow::Result<String> {
    let reviews = Api::<SelfSubjectReview>::all(client.clone());
    let review = reviews
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await
        .context("the API does not say who this node is to it")?;
    let user = review.status.and_then(|status| status.user_info);
    let user = user.and_then(|user| user.username).unwrap_or_default();
    let of_token = user.strip_prefix(USER_PREFIX);
    let name = match (of_token, told) {
        (Some(of_token), Some(told)) if of_token != told => bail!(
            "the kubeconfig is that of node {of_token:?}, and --node says {told:?}; make another one with `trellis \
             node add {told}`"
        ),
        (Some(of_token), _) => of_token.to_owned(),
        (None, Some(told)) => told.to_owned(),
        (None, None) => bail!(
            "the kubeconfig is that of {user:?}, which is no node; make one with `trellis node add`, or say with --node \
             which node this is"
        ),
    };
    let memory = data.join("node");
    let last = trellis_files::read_whole(&memory, |_| true)
        .with_context(|| format!("{} cannot be read", memory.display()))?;
    if let Some(last) = last.filter(|last| *last != name) {
        bail!(
            "{} is the data directory of node {last:?}, and the kubeconfig is that of {name:?}",
            data.display()
        );
    }
    trellis_files::ensure(&memory, name.as_bytes())
        .with_context(|| format!("{} cannot be written", memory.display()))?;
    Ok(name)
}

fn defaults(data: &Path, node: &str) -> anyhow::Result<Defaults> {
    let pool = data.join("pools/default");
    trellis_files::make_directory(&pool)
        .with_context(|| format!("{} cannot be made", pool.display()))?;
    Ok(agent::defaults(node, &pool))
}
