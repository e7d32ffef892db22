//! Our iSCSI target compared with others, on the same backing, in one run.
//!
//! On a machine this small, absolute figures vary by a third from run to run, so only figures of the same round are
//! compared. All targets run at the same time (an idle one costs nothing). Every round gives each of them its turn at
//! each piece of work, in another order. The report shows the median of the rounds' ratios with the smallest and the
//! largest.

mod bare;
mod copies;
mod growth;
mod report;
mod server;
mod targets;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;

use report::Report;
use server::{Role, Sample, Server};
pub use targets::Extra;

/// What `bench iscsi` can be told.
#[derive(clap::Args)]
pub struct Options {
    /// How long each target does each piece of work in each round
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// How many rounds
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Where the backing file is; tmpfs and disk, one after the other, if not given
    #[arg(long)]
    directory: Option<PathBuf>,
    /// The size of the backing file
    #[arg(long, default_value_t = 512)]
    size_mib: u64,
    /// Another target, as NAME=COMMAND: the command prints its URL (iscsi://ADDRESS:PORT/NAME/LUN) as its first
    /// line, and serves until its standard input ends. It finds the backing file in $BACKING
    #[arg(long = "target", value_name = "NAME=COMMAND")]
    extra: Vec<Extra>,
}

/// One piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    write: bool,
    random: bool,
    block: u32,
    depth: u32,
}

impl std::fmt::Display for Work {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let order = if self.random { "random" } else { "sequential" };
        let direction = if self.write { "write" } else { "read" };
        let (block, depth) = (self.block >> 10, self.depth);
        write!(out, "{block} KiB {order} {direction}, depth {depth}")
    }
}

const fn work(block: u32, random: bool, depth: u32, write: bool) -> Work {
    Work {
        write,
        random,
        block,
        depth,
    }
}

/// All that is measured.
const WORK: [Work; 8] = [
    work(4 << 10, true, 1, false),
    work(4 << 10, true, 1, true),
    work(4 << 10, true, 32, false),
    work(4 << 10, true, 32, true),
    work(64 << 10, false, 16, false),
    work(64 << 10, false, 16, true),
    work(1 << 20, false, 8, false),
    work(1 << 20, false, 8, true),
];

/// How often a peer may fail before it has no figure.
const ATTEMPTS_MAX: usize = 3;
/// The time that a peer gets to clear up after a failure.
const RECOVERY: Duration = Duration::from_millis(500);

/// From here on others disturb the measurement.
const BUSY_PERCENT_MAX: f64 = 10.0;

/// Runs it.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let programs = build()?;
    let both = || vec![PathBuf::from("/dev/shm"), PathBuf::from("/var/tmp")];
    let directories = options.directory.clone().map_or_else(both, |one| vec![one]);
    tell_busy("before the start")?;
    for directory in &directories {
        side_by_side(&programs, directory, options)?;
    }
    report::print_others();
    for directory in &directories {
        growth::run(&programs, directory, options.size_mib)?;
    }
    tell_busy("after the end")
}

fn side_by_side(programs: &Programs, directory: &Path, options: &Options) -> anyhow::Result<()> {
    let backing_dir = targets::BackingDir::new(directory, options.size_mib)?;
    let servers = targets::start_all(programs, &backing_dir, &options.extra)?;
    let mut report = Report::new(&servers);
    let started = Instant::now();
    for round in 0..options.rounds {
        for work in WORK {
            eprintln!(
                "{}: round {} of {}, {work} ({} s so far)",
                directory.display(),
                round + 1,
                options.rounds,
                started.elapsed().as_secs()
            );
            report.add_bare(
                work,
                bare::a_second(&backing_dir.backing, work, options.seconds / 4.0)?,
            );
            for index in turns(servers.len(), round) {
                report.add(
                    work,
                    index,
                    attempt(programs, &servers[index], work, options.seconds)?,
                );
            }
        }
    }
    report.print(&backing_dir, options);
    Ok(())
}

/// Measures one target. Some of the others lose a connection now and then; they get another chance, and if
/// that does not help they have no figure in this round. Ours gets none.
fn attempt(
    programs: &Programs,
    server: &Server,
    work: Work,
    seconds: f64,
) -> anyhow::Result<Option<Sample>> {
    for _ in 0..ATTEMPTS_MAX {
        match server.measure(programs, work, seconds) {
            Ok(sample) => return Ok(Some(sample)),
            Err(error) if server.role == Role::Peer => {
                eprintln!("{}, {work}: {error}", server.name);
                std::thread::sleep(RECOVERY);
            }
            Err(error) => return Err(error).with_context(|| format!("{}, {work}", server.name)),
        }
    }
    Ok(None)
}

/// Who comes when: forwards in one round, backwards in the next, and each time somebody else first.
fn turns(count: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count)
        .map(|turn| (turn + round / 2) % count.max(1))
        .collect();
    if !round.is_multiple_of(2) {
        order.reverse();
    }
    order
}

/// The programs that serve and load.
pub struct Programs {
    serve: PathBuf,
    load: PathBuf,
    trellis: PathBuf,
}

/// Built now, so that it is the code that is looked at.
fn build() -> anyhow::Result<Programs> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for what in [["trellis-iscsi", "--examples"], ["trellis", "--bins"]] {
        let status = Command::new("cargo")
            .args(["build", "--quiet", "--release", "--package"])
            .args(what)
            .current_dir(&root)
            .status()
            .context("cargo cannot be run")?;
        anyhow::ensure!(status.success(), "{} cannot be built", what[0]);
    }
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let release = target
        .join("release")
        .canonicalize()
        .context("the programs were built elsewhere")?;
    Ok(Programs {
        serve: release.join("examples/iscsi-serve"),
        load: release.join("examples/iscsi-load"),
        trellis: release.join("trellis"),
    })
}

/// Says whether the figures can be believed.
fn tell_busy(when: &str) -> anyhow::Result<()> {
    let busy = busy_percent(Duration::from_secs(2))?;
    println!("the machine was {busy:.0} % busy {when}");
    if busy > BUSY_PERCENT_MAX {
        println!("it was not quiet: only processor times and the ratios of these say something");
    }
    Ok(())
}

/// How much of the machine somebody uses.
fn busy_percent(time: Duration) -> anyhow::Result<f64> {
    let before = cpu_ticks()?;
    std::thread::sleep(time);
    let after = cpu_ticks()?;
    let (idle, all) = (after.0 - before.0, after.1 - before.1);
    Ok(100.0 * (1.0 - idle / all.max(1.0)))
}

/// The time that all processors were idle, and all of it.
fn cpu_ticks() -> anyhow::Result<(f64, f64)> {
    let text = std::fs::read_to_string("/proc/stat").context("/proc/stat cannot be read")?;
    let line = text.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = line
        .split_whitespace()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    let idle = ticks.iter().skip(3).take(2).sum();
    Ok((idle, ticks.iter().take(8).sum()))
}
