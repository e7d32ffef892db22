//! Chores of the workspace: benchmarks, soaks, cargo-deny, and the tests' guest by hand.

mod bench;
mod csi_sanity;
mod deaths;
mod deny;
mod guest;
mod nodes;
mod power;
mod soak;

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
    /// Build csi-sanity, a Go program, and run it against the CSI driver
    CsiSanity(csi_sanity::CsiSanity),
    /// Check licences, sources and walls with cargo-deny itself, which is built on the first run
    Deny,
    /// A shell in the guest that the tests use, or scenarios in it
    Guest(guest::Guest),
    /// Kill all processes of a data directory at once, about fifty times, in the middle of growths
    Deaths,
    /// Three nodes on this machine, in network namespaces, with the service on the first
    #[command(subcommand)]
    Nodes(nodes::Nodes),
    /// Cut the power of a whole data directory, again and again
    Power(power::Power),
    /// Run the simulator of the replicated engine on fresh histories
    Soak(soak::Soak),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().chore {
        Chore::Bench(bench) => bench::run(bench),
        Chore::CsiSanity(sanity) => csi_sanity::run(&sanity),
        Chore::Deaths => deaths::run(),
        Chore::Deny => deny::run(),
        Chore::Guest(guest) => guest::run(guest),
        Chore::Nodes(nodes) => nodes::run(&nodes),
        Chore::Power(power) => power::run(&power),
        Chore::Soak(soak) => soak::run(&soak),
    }
}
