//! Benchmarks. Each runs the real binary in a directory of its own and leaves nothing behind.

mod claims;
mod copies;
mod grow;
mod iscsi;
mod replicated;
mod service;
mod statistics;
mod tmpfs;
mod volumes;

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
        /// How many copies; one and three, one after the other, if not given
        #[arg(long)]
        copies: Option<usize>,
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
    /// Many mounted volumes on one node: what is looked at when one of them grows, and CPU when idle
    Volumes {
        /// How many volumes
        #[arg(long, default_value_t = 500)]
        volumes: usize,
        /// Where to run
        #[arg(long, default_value = "/var/tmp")]
        directory: PathBuf,
        /// How long to look at the idle service, in seconds
        #[arg(long, default_value_t = 30)]
        idle_seconds: u64,
    },
    /// Three copies beside one: how fast, how much memory at 1 TiB, and a growth under load
    Copies {
        /// Where to run, with room for 1 % of six copies of 1 TiB; a tmpfs for it alone if not given
        #[arg(long)]
        directory: Option<PathBuf>,
        /// How long each kind of load runs in each round
        #[arg(long, default_value_t = 3)]
        seconds: u64,
    },
    /// The iSCSI target beside tgt and istgt on the same backing, and a growth under load; `scripts/setup bench`
    /// installs the others
    Iscsi(iscsi::Options),
}

/// Runs one benchmark, with what it needs built now.
pub fn run(bench: Bench) -> anyhow::Result<()> {
    let runtime = || tokio::runtime::Runtime::new().context("no asynchronous runtime");
    match bench {
        Bench::Grow {
            growths,
            directory,
            filesystem,
            copies,
        } => {
            let (binary, runtime) = (build()?, runtime()?);
            let both = || vec![PathBuf::from("/dev/shm"), PathBuf::from("/var/tmp")];
            for directory in directory.map_or_else(both, |one| vec![one]) {
                for copies in copies.map_or_else(|| vec![1, 3], |one| vec![one]) {
                    let what = grow::Growing {
                        below: &directory,
                        kind: &filesystem,
                        copies,
                    };
                    runtime.block_on(grow::run(&binary, &what, growths))?;
                }
            }
            rungs(&binary)
        }
        Bench::Claims {
            claims,
            directory,
            idle_seconds,
        } => runtime()?.block_on(claims::run(&build()?, &directory, claims, idle_seconds)),
        Bench::Copies { directory, seconds } => {
            let memory;
            let below = match &directory {
                Some(given) => given,
                None => {
                    memory = tmpfs::Tmpfs::mount()?;
                    memory.path()
                }
            };
            copies::run(&build()?, below, seconds)
        }
        Bench::Volumes {
            volumes,
            directory,
            idle_seconds,
        } => runtime()?.block_on(volumes::run(&build()?, &directory, volumes, idle_seconds)),
        Bench::Iscsi(options) => iscsi::run(&options),
    }
}

/// The filesystem rung alone, beside the bare ioctl and the filesystem's own program, of those kinds that this
/// kernel grows without more than mounting. `cargo xtask guest run rung` shows the others.
fn rungs(binary: &std::path::Path) -> anyhow::Result<()> {
    for below in ["/dev/shm", "/var/tmp"] {
        println!("device larger -> filesystem grown, below {below}");
        let status = std::process::Command::new(binary.with_file_name("guest-scenario"))
            .args(["rung", "xfs", "btrfs"])
            .env("TMPDIR", below)
            .status()
            .context("the measurement of the rung cannot be run")?;
        anyhow::ensure!(status.success(), "the rung could not be measured");
    }
    Ok(())
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
            "--package",
            "trellis-guest-tests",
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
