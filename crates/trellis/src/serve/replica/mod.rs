//! The process of one copy.

pub(super) mod links;

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use trellis_engine::drive::{Address, ReplicaServer, ReplicaSettings};
use trellis_engine::replica::{Identity, Provisioning};
use trellis_keeper::paths::RunDir;
use trellis_keeper::process::Life;
use uuid::Uuid;

use self::links::Links;

/// `trellis serve-replica`
#[derive(Args, Debug)]
pub struct ServeReplica {
    /// The copy's directory, POOL/replicas/NAME
    #[arg(long)]
    directory: PathBuf,
    /// The identity of its pool
    #[arg(long)]
    pool: Option<Uuid>,
    /// The identity of its volume
    #[arg(long)]
    volume: Uuid,
    /// Its own identity
    #[arg(long)]
    replica: Uuid,
    /// Whether every byte is allocated
    #[arg(long)]
    thick: bool,
    /// Do not make sums of the blocks, if it has none yet
    #[arg(long)]
    without_checksums: bool,
    /// Where to listen
    #[arg(long)]
    listen: Address,
    /// The file to lock
    #[arg(long)]
    lock: PathBuf,
}

/// Serves a copy until it is told to stop.
pub async fn run(verb: &ServeReplica) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be heard")?;
    let Some(_life) = Life::begin(&verb.lock)? else {
        bail!("the copy is served already");
    };
    crate::crash::arm_copy(&verb.directory);
    let settings = ReplicaSettings {
        path: verb.directory.clone(),
        pool: verb.pool,
        identity: Identity {
            volume: verb.volume,
            replica: verb.replica,
        },
        provisioning: if verb.thick {
            Provisioning::Thick
        } else {
            Provisioning::Thin
        },
        checksums: !verb.without_checksums,
    };
    let listen = verb.listen.clone();
    let mut server = tokio::task::spawn_blocking(move || ReplicaServer::start(settings, &listen))
        .await
        .context("the copy could not be opened")??;
    let run = verb.lock.parent().zip(verb.lock.file_stem());
    let (run, name) = run.context("the lock is in no run directory")?;
    let paths = RunDir::at(run.to_owned()).process(&name.to_string_lossy());
    Links::start(server.links().clone(), paths).context("the agent cannot be listened to")?;
    tokio::select! {
        _ = terminate.recv() => {
            tokio::task::spawn_blocking(move || server.stop()).await?;
            Ok(())
        }
        error = server.ended() => match error {
            Some(error) => Err(error).context("the copy cannot be served any more"),
            None => Ok(()),
        }
    }
}

/// An error with what is behind it, in one sentence.
fn whole(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", whole(source)),
        None => error.to_string(),
    }
}
