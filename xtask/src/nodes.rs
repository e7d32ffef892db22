//! The nodes of the tests by hand: three of them, with the service on the first.

use std::os::unix::process::CommandExt;

use anyhow::{Context, bail};
use clap::Subcommand;
use trellis_nodes_tests::cluster::Cluster;
use trellis_nodes_tests::machine::Machine;
use trellis_nodes_tests::network::Network;

/// How the developer's nodes are told from those of tests.
const NAME: &str = "dev";
const NODES: [&str; 3] = ["a", "b", "c"];

#[derive(Subcommand)]
pub enum Nodes {
    /// Make the nodes, start `trellis up` on a, and `trellis node run` on b and c
    Up,
    /// Kill everything that runs on the nodes, and remove them
    Down,
    /// A shell on a node, with the node's kubeconfig
    Shell {
        /// Which node
        #[arg(default_value = "a")]
        node: String,
    },
}

pub fn run(nodes: &Nodes) -> anyhow::Result<()> {
    match nodes {
        Nodes::Up => up(),
        Nodes::Down => found()?.remove().context("the nodes are not removed"),
        Nodes::Shell { node } => shell(node),
    }
}

fn found() -> anyhow::Result<Network> {
    Network::find(NAME)?.context("there are no nodes; make some with `cargo xtask nodes up`")
}

fn up() -> anyhow::Result<()> {
    if Network::find(NAME)?.is_some() {
        bail!("the nodes are there already; `cargo xtask nodes down` removes them");
    }
    let cluster = Cluster::on(Network::named(NAME, &NODES)?, &[])?;
    cluster.leave();
    println!(
        "nodes {} are up, each with a pool, and the service is on {}; `cargo xtask nodes shell NODE` for a shell with \
         kubectl and trellis; the class `three` has a copy on each",
        NODES.join(", "),
        NODES[0]
    );
    Ok(())
}

/// The kubeconfig of a node: the administrator's where the service runs.
fn shell(node: &str) -> anyhow::Result<()> {
    let network = found()?;
    let machine: &Machine = network.machine(node)?;
    let configs = [
        machine.data().join("kubeconfig"),
        machine.directory().join("kubeconfig"),
    ];
    let config = configs.into_iter().find(|path| path.exists());
    let config = config.with_context(|| format!("node {node} has no kubeconfig"))?;
    let shell = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
    let program = trellis_nodes_tests::program::trellis()?;
    let directory = program.parent().context("trellis is in no directory")?;
    let path = std::env::var("PATH").unwrap_or_default();
    println!(
        "node {node} at {}, data in {}",
        machine.address(),
        machine.directory().display()
    );
    let failed = machine
        .command(shell)
        .env("KUBECONFIG", config)
        .env("TRELLIS_DATA", machine.data())
        .env("PATH", format!("{}:{path}", directory.display()))
        .env("PS1", format!("{node}# "))
        .exec();
    bail!("no shell can be started: {failed}");
}
