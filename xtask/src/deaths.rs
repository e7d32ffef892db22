//! Kills all processes of a data directory at once, about fifty times, at every step of a growth under load.

use std::process::Command;

use anyhow::Context;

/// The test that does it. It is one of the binary's own, so that nothing has to be built twice.
const TEST: &str = "replicated::together::everything_dies_together_fifty_times";

/// Runs it, and shows each death.
pub fn run() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["test", "--package", "trellis", "--test", "e2e", "--"])
        .args(["--ignored", "--exact", "--nocapture", TEST])
        .status()
        .context("cargo cannot be run")?;
    anyhow::ensure!(status.success(), "not everything went on");
    Ok(())
}
