//! Chores of the workspace that are not tests: benchmarks.

mod bench;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the workspace")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Measure, beside the bare operation in the same run, and print ratios
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().chore {
        Chore::Bench(bench) => bench::run(bench),
    }
}
