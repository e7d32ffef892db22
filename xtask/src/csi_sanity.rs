//! csi-sanity, the conformance tests of the Container Storage Interface, against a real service.
//!
//! It is a Go program, built from `tests/csi/go` into `target/csi`. The first build takes a minute or more and needs Go's
//! module proxy, so `make test` does not run it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use clap::Args;

/// The module that pins the program.
const MODULE: &str = "tests/csi/go";
/// The program.
const PACKAGE: &str = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity";
/// Where it is built.
const PROGRAM: &str = "target/csi/csi-sanity";
/// The test that runs it.
const TEST: &str = "csi::sanity::csi_sanity_finds_nothing_and_nothing_is_left";

/// How often.
#[derive(Args)]
pub(crate) struct CsiSanity {
    /// So many times in a row, against one service, for each filesystem and for devices
    #[arg(long, default_value_t = 10)]
    runs: u32,
}

/// Builds it, and runs it. Needs root.
pub(crate) fn run(how: &CsiSanity) -> anyhow::Result<()> {
    let root = std::env::current_dir().context("there is no working directory")?;
    let program = root.join(PROGRAM);
    build(&program)?;
    let status = Command::new(env!("CARGO"))
        .args(["test", "--package", "trellis", "--test", "e2e", "--"])
        .args(["--ignored", "--exact", "--nocapture", TEST])
        .env("TRELLIS_CSI_SANITY", &program)
        .env("TRELLIS_CSI_SANITY_RUNS", how.runs.to_string())
        .status()
        .context("cargo cannot be run")?;
    ensure!(status.success(), "csi-sanity has found something");
    Ok(())
}

fn build(program: &Path) -> anyhow::Result<()> {
    let built = Command::new("go")
        .args(["build", "-trimpath", "-o"])
        .arg(program)
        .arg(PACKAGE)
        .current_dir(MODULE)
        .env("GOFLAGS", "-mod=mod")
        .env("CGO_ENABLED", "0")
        .status()
        .context("go cannot be run; csi-sanity is a Go program")?;
    ensure!(built.success(), "csi-sanity cannot be built");
    Ok(())
}
