//! `trellis controller`: the volume room alone, against an API elsewhere. Several may run; one of them plans at a time.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use trellis_api::kinds::SYSTEM_NAMESPACE;
use trellis_control::lease::{self, LeaseSettings, VOLUMES_LEASE};
use trellis_control::run::run_volumes;

use crate::cli::{Controller, Global};
use crate::connect::connect;
use crate::csi;
use crate::up::host_name;

/// Runs until it is told to stop.
pub async fn run(global: &Global, verb: &Controller) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be heard")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be heard")?;
    let service = connect(global).await?;
    let settings = LeaseSettings {
        namespace: SYSTEM_NAMESPACE.to_owned(),
        name: VOLUMES_LEASE.to_owned(),
        identity: format!("{}-{}", host_name(), std::process::id()),
        lasts: Duration::from_secs(verb.lease_seconds),
    };
    let resync = Duration::from_secs(verb.resync_seconds);
    let mut tasks = JoinSet::new();
    if let Some(endpoint) = &verb.csi_endpoint {
        csi::start(endpoint, service.client.clone(), true, None, &mut tasks).await?;
    }
    let _ = writeln!(
        std::io::stdout(),
        "trellis waits for its turn to plan the volumes"
    );
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        Some(_) = tasks.join_next() => bail!("the CSI driver has failed; this is a bug, and a restart goes on from where it was"),
        () = run_volumes(service.client.clone(), settings.clone(), verb.waits.waits(), resync) => {}
    }
    csi::forget(verb.csi_endpoint.as_deref(), None);
    lease::release(&service.client, &settings)
        .await
        .context("the lease could not be given up; the next controller waits until it ends")
}
