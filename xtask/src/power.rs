//! Cuts the power of a whole data directory, again and again.

use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;

/// How often.
#[derive(Args)]
pub(crate) struct Power {
    /// So many cuts
    #[arg(long, default_value_t = 100)]
    cuts: u64,
}

/// Runs the power-loss test of the service with more cuts than `make test` has time for. Needs root.
pub(crate) fn run(power: &Power) -> anyhow::Result<()> {
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["test", "--package", "trellis", "--test", "e2e", "--"])
        .args(["power_loss", "--nocapture"])
        .env("TRELLIS_POWER_CUTS", power.cuts.to_string());
    let status = command.status().context("could not run the test")?;
    if !status.success() {
        bail!(
            "a volume that was bound does not work after a power loss, or has lost what was synced"
        );
    }
    Ok(())
}
