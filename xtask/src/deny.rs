//! cargo-deny, built once into `target/tools`.
//!
//! It takes longer to build than the project, so `make test` does not use it: `xtask/tests/walls.rs` checks the same
//! rules from the same `deny.toml`. This is the second opinion.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// Where the tool is kept between runs.
const TOOLS: &str = "target/tools";

/// Runs cargo-deny on the workspace.
pub fn run() -> anyhow::Result<()> {
    let program = installed()?;
    let checked = Command::new(program)
        .args(["check", "bans", "licenses", "sources"])
        .status()
        .context("cargo-deny cannot be run")?;
    ensure!(checked.success(), "cargo-deny has found something");
    Ok(())
}

fn installed() -> anyhow::Result<PathBuf> {
    let program = Path::new(TOOLS).join("bin/cargo-deny");
    if !program.exists() {
        println!("building cargo-deny into {TOOLS}; this takes some minutes once");
        let built = Command::new("cargo")
            .args(["install", "--locked", "--root", TOOLS, "cargo-deny"])
            .status()
            .context("cargo cannot be run")?;
        ensure!(built.success(), "cargo-deny cannot be built");
    }
    Ok(program)
}
