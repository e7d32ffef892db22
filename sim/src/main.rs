//! `sim --seed N` replays one history; `sim --minutes M` runs fresh ones; `sim --from A --count N` a range.

use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use trellis_sim::{Options, Stats, run};

#[derive(Parser)]
#[command(about = "Runs the replicated engine through crashes, partitions and bad disks")]
struct Arguments {
    /// Replay this history.
    #[arg(long, conflicts_with_all = ["minutes", "count"])]
    seed: Option<u64>,
    /// Run fresh histories for so many minutes.
    #[arg(long)]
    minutes: Option<u64>,
    /// Run so many histories, from the first seed on.
    #[arg(long)]
    count: Option<u64>,
    /// The first seed. By default 0, and for `--minutes` one that depends on the time.
    #[arg(long)]
    from: Option<u64>,
    /// Print what happens.
    #[arg(long)]
    trace: bool,
}

#[derive(Default)]
struct Total {
    histories: u64,
    failures: Vec<u64>,
    stats: Stats,
}

impl Total {
    fn run(&mut self, seed: u64, trace: bool) {
        let options = Options {
            trace,
            ..Options::default()
        };
        let (stats, result) = run(seed, options);
        self.histories += 1;
        let sum = &mut self.stats;
        sum.events += stats.events;
        sum.virtual_ms += stats.virtual_ms;
        sum.answered += stats.answered;
        sum.compared += stats.compared;
        sum.takeovers += stats.takeovers;
        sum.growths += stats.growths;
        sum.repairs += stats.repairs;
        sum.peeks += stats.peeks;
        sum.power_losses += stats.power_losses;
        sum.view_changes += stats.view_changes;
        sum.recoveries += stats.recoveries;
        sum.memories_lost += stats.memories_lost;
        sum.flips += stats.flips;
        sum.torn += stats.torn;
        if let Err(found) = result {
            println!("seed {seed} FAILED {found}");
            println!("  replay: cargo run -p trellis-sim -- --seed {seed} --trace");
            self.failures.push(seed);
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut total = Total::default();
    match (arguments.seed, arguments.minutes) {
        (Some(seed), _) => total.run(seed, arguments.trace),
        (None, Some(minutes)) => {
            let end = Instant::now() + Duration::from_secs(minutes * 60);
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let fresh = now.map_or(0, |since| since.as_secs()) << 20;
            let mut seed = arguments.from.unwrap_or(fresh);
            while Instant::now() < end {
                total.run(seed, arguments.trace);
                seed += 1;
            }
        }
        (None, None) => {
            let from = arguments.from.unwrap_or(0);
            for seed in from..from + arguments.count.unwrap_or(100) {
                total.run(seed, arguments.trace);
            }
        }
    }
    println!(
        "{} histories, {} failures: {:?}",
        total.histories,
        total.failures.len(),
        total.stats
    );
    if total.failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
