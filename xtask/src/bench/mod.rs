//! Benchmarks. Each runs the real binary in a directory of its own and leaves nothing behind.

mod claims;
mod grow;
mod rung;
mod service;
mod statistics;

use std::path::PathBuf;

use anyhow::Context;
use clap::Subcommand;

/// What to measure.
#[derive(Subcommand)]
pub enum Bench {
    /// From a patch of the claim to the mounted filesystem measured larger and the claim's status updated; and
    /// of every filesystem the rung alone, beside the bare ioctl and the filesystem's own program
    Grow {
        /// How many growths
        #[arg(long, default_value_t = 200)]
        growths: usize,
        /// Where to run; tmpfs and disk, one after the other, if not given
        #[arg(long)]
        directory: Option<PathBuf>,
        /// The filesystem
        #[arg(long, default_value = "xfs")]
        filesystem: String,
    },
    /// Many claims: created, bound, all grown at once; memory, and CPU when idle
    Claims {
        /// How many claims
        #[arg(long, default_value_t = 1000)]
        claims: usize,
        /// Where to run
        #[arg(long, default_value = "/var/tmp")]
        directory: PathBuf,
        /// How long to look at the idle service, in seconds
        #[arg(long, default_value_t = 20)]
        idle_seconds: u64,
    },
}

/// Builds the binary and runs one benchmark.
pub fn run(bench: Bench) -> anyhow::Result<()> {
    let binary = build()?;
    let runtime = tokio::runtime::Runtime::new().context("no asynchronous runtime")?;
    match bench {
        Bench::Grow {
            growths,
            directory,
            filesystem,
        } => {
            let both = || vec![PathBuf::from("/dev/shm"), PathBuf::from("/var/tmp")];
            for directory in directory.map_or_else(both, |one| vec![one]) {
                runtime.block_on(grow::run(&binary, &directory, &filesystem, growths))?;
                rung::run(&directory, growths)?;
            }
            Ok(())
        }
        Bench::Claims {
            claims,
            directory,
            idle_seconds,
        } => runtime.block_on(claims::run(&binary, &directory, claims, idle_seconds)),
    }
}

/// The release binary, built now so that it is the code that is looked at.
fn build() -> anyhow::Result<PathBuf> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let status = std::process::Command::new("cargo")
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "trellis",
            "--package",
            "xtask",
        ])
        .current_dir(&root)
        .status()
        .context("cargo cannot be run")?;
    anyhow::ensure!(status.success(), "the binary cannot be built");
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    target
        .join("release/trellis")
        .canonicalize()
        .context("the binary was built elsewhere")
}
