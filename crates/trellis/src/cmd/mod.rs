//! The verbs: one module each.

mod backup;
mod cancel;
mod changes;
mod check;
mod df;
mod doctor;
mod down;
mod explain;
mod grow;
mod history;
mod ladder;
mod measured;
mod mount;
mod node;
mod patch;
pub mod patience;
mod pool;
mod recover;
mod scrub;
mod shortage;
mod survivors;
mod volume;

use clap::CommandFactory;

use crate::cli::{Cli, Global, NodeVerb, PoolVerb, Verb, VolumeVerb};
use crate::{controller, node_run, output};

/// Does what the command line says.
pub async fn run(cli: Cli) -> anyhow::Result<()> {
    let Cli { global, verb } = &cli;
    if global.timeout.is_some() && !patience::has_limit(verb) {
        let refusal = "--timeout has no meaning for this verb, which waits for no service";
        Cli::command()
            .error(clap::error::ErrorKind::ArgumentConflict, refusal)
            .exit();
    }
    patience::bounded(global, verb, act(global, verb)).await
}

async fn act(global: &Global, verb: &Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Up(up) => crate::up::run(global, up).await,
        Verb::Down(verb) => down::run(global, verb).await,
        Verb::Df(verb) => df::run(global, verb).await,
        Verb::Grow(verb) => grow::run(global, verb).await,
        Verb::Ladder(verb) => ladder::run(global, verb).await,
        Verb::Explain(verb) => explain::run(global, verb).await,
        Verb::Cancel(verb) => cancel::run(global, verb).await,
        Verb::History(verb) => history::run(global, verb).await,
        Verb::Mount(verb) => mount::mount(global, verb).await,
        Verb::Umount(verb) => mount::umount(global, verb).await,
        Verb::Pool(PoolVerb::Ls { output }) => pool::list(global, output).await,
        Verb::Pool(PoolVerb::Add {
            name,
            directory,
            overcommit,
        }) => pool::add(global, name, directory, *overcommit).await,
        Verb::Pool(PoolVerb::Grow { name }) => pool::grow(global, name).await,
        Verb::Pool(PoolVerb::Rm { name, drain }) => pool::remove(global, name, *drain).await,
        Verb::Node(NodeVerb::Run(verb)) => node_run::run(global, verb).await,
        Verb::Controller(verb) => controller::run(global, verb).await,
        Verb::Node(NodeVerb::Ls { output }) => node::show(global, output).await,
        Verb::Node(NodeVerb::Add {
            name,
            kubeconfig_out,
            rotate,
        }) => node::add(global, name, kubeconfig_out.as_deref(), *rotate).await,
        Verb::Node(NodeVerb::Rm { name, force }) => node::remove(global, name, *force).await,
        Verb::Volume(VolumeVerb::Show { claim, output }) => {
            volume::show(global, claim, output).await
        }
        Verb::Volume(VolumeVerb::Scale {
            claim,
            replicas,
            consistency,
            allow_shared_disk,
        }) => volume::scale(global, claim, *replicas, *consistency, *allow_shared_disk).await,
        Verb::Volume(VolumeVerb::Recover {
            claim,
            accept_loss,
            consistency,
            output,
        }) => survivors::run(global, claim, accept_loss, *consistency, *output).await,
        Verb::Volume(VolumeVerb::Scrub { claim, wait }) => scrub::scrub(global, claim, *wait).await,
        Verb::Volume(VolumeVerb::Replace { claim, pool }) => {
            volume::replace(global, claim, pool).await
        }
        Verb::Keeper(verb) => crate::serve::run_keeper(verb),
        Verb::Check(verb) => check::run(global, verb).await,
        Verb::Doctor(verb) => doctor::run(global, verb).await,
        Verb::Backup { file } => backup::backup(global, file).await,
        Verb::Restore { file } => backup::restore(global, file),
        Verb::Recover(verb) => recover::run(global, verb).await,
        Verb::ServeReplica(verb) => crate::serve::run_replica(verb).await,
        Verb::ServeTarget(verb) => crate::serve::run_target(verb).await,
        Verb::Manual { directory } => Ok(clap_mangen::generate_to(Cli::command(), directory)?),
        Verb::Completion { shell } => completion(*shell),
    }
}

/// The script is made in memory first, so that a reader that goes away is no failure.
fn completion(shell: clap_complete::Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "trellis", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
