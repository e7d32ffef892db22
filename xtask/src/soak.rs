//! Runs the simulator on histories that nobody has seen yet.

use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;

/// How long, and from where.
#[derive(Args)]
pub(crate) struct Soak {
    /// For so many minutes
    #[arg(long)]
    minutes: u64,
    /// The first history; by default one that depends on the time
    #[arg(long)]
    from: Option<u64>,
}

/// Builds the simulator for speed and runs it. Failing histories are printed with their numbers.
pub(crate) fn run(soak: &Soak) -> anyhow::Result<()> {
    let mut command = Command::new(env!("CARGO"));
    command
        .args([
            "run",
            "--release",
            "--quiet",
            "--package",
            "trellis-sim",
            "--",
        ])
        .args(["--minutes", &soak.minutes.to_string()]);
    if let Some(from) = soak.from {
        command.args(["--from", &from.to_string()]);
    }
    let status = command.status().context("could not run the simulator")?;
    if !status.success() {
        bail!("a history broke a rule; its number is above");
    }
    Ok(())
}
