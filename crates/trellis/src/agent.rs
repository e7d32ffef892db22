//! The node room on this machine: the same in `trellis up` and in `trellis node run`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kube::Client;
use tokio::task::JoinSet;
use trellis_control::bootstrap::Defaults;
use trellis_control::run::Settings;
use trellis_control::usage;
use trellis_control::world::World;

use crate::cli::AgentArgs;
use crate::kernel;
use crate::machine::ThisMachine;
use crate::serve::Links;

/// Makes this process fit to look after volumes: what it makes is for its user alone, because the store holds secrets
/// and the private mounts show every volume. Returns the data directory, made if it is absent.
pub fn prepare(data: &Path) -> anyhow::Result<PathBuf> {
    rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    allow_many_files();
    keep_descriptors();
    trellis_files::make_directory(data)
        .with_context(|| format!("the data directory {} cannot be made", data.display()))?;
    data.canonicalize()
        .with_context(|| format!("the data directory {} cannot be used", data.display()))
}

/// What this node is, for the objects that it begins with.
pub fn defaults(node: &str, pool: &Path) -> Defaults {
    let system = rustix::system::uname();
    Defaults {
        node: node.to_owned(),
        pool: pool.display().to_string(),
        kernel: system.release().to_string_lossy().into_owned(),
        architecture: system.machine().to_string_lossy().into_owned(),
    }
}

/// What the node room starts with.
pub fn settings(node: &str, agent: &AgentArgs, lost_after: Duration) -> Settings {
    Settings {
        node: node.to_owned(),
        lost_after,
        online_growth: agent.online_growth,
        resync: Duration::from_secs(agent.resync_seconds),
    }
}

/// This machine, with that data directory.
pub fn machine(data: &Path, links: Links, agent: &AgentArgs) -> anyhow::Result<Arc<ThisMachine>> {
    let silence = Duration::from_secs(agent.silent_target_seconds);
    let machine = ThisMachine::new(data, silence, links);
    let machine = machine.with_context(|| format!("{} cannot be used", data.display()))?;
    Ok(Arc::new(machine))
}

/// Brings the machine's own events to the node room, and keeps its figures fresh.
pub fn attend(
    world: &Arc<World>,
    client: Client,
    node: &str,
    machine: &Arc<ThisMachine>,
    tasks: &mut JoinSet<()>,
) -> anyhow::Result<()> {
    kernel::listen(world, machine.mounts().to_owned());
    let woken = world.clone();
    machine
        .listen_to_processes(Box::new(move |volume| woken.passes.push(volume)))
        .context("the processes of volumes cannot be watched")?;
    tasks.spawn(usage::refresh(
        world.clone(),
        client,
        node.to_owned(),
        machine.clone(),
    ));
    Ok(())
}

/// Every volume in use keeps a descriptor or two, and the limit that shells set is meant for programs with few.
fn allow_many_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, most) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}

/// What the shell or the service manager has left open is not for the keeper and what it starts: these outlive the
/// service, and would keep a pipe from ending or a filesystem from being unmounted.
fn keep_descriptors() {
    if let Err(error) = trellis_node::sys::descriptors::keep_from_children() {
        tracing::warn!(%error, "open descriptors may be passed on to the processes of volumes");
    }
}
