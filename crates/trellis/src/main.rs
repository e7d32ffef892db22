//! Volumes that grow while they are in use: one binary.

mod agent;
mod cli;
mod cmd;
mod connect;
mod controller;
mod crash;
mod credentials;
mod csi;
mod exit;
mod incarnation;
mod kernel;
mod load;
mod machine;
mod metrics;
mod node_run;
mod output;
mod serve;
mod up;
mod words;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use tokio::runtime::Builder;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::cli::{Cli, NodeVerb, Verb};
use crate::exit::Ended;

fn main() -> ExitCode {
    let cli = Cli::parse();
    logs(&cli);
    crash::arm();
    // The keeper must be small: it starts no runtime and no threads.
    if let Verb::Keeper(verb) = &cli.verb {
        return ended(serve::run_keeper(verb));
    }
    let runtime = match runtime_for(&cli.verb).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::say(&format!(
                "trellis: the asynchronous runtime cannot be started: {error}"
            ));
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(cmd::run(cli));
    // A blocking call into the kernel must not keep a process that is otherwise done.
    runtime.shutdown_background();
    ended(result)
}

fn ended(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::say(&format!("trellis: {error:#}"));
            error
                .downcast_ref::<Ended>()
                .map_or(ExitCode::FAILURE, |ended| ExitCode::from(ended.code()))
        }
    }
}

/// The processes of one volume hand every request from one task to the next. On one thread that takes nanoseconds;
/// between two threads, one has to wake the other each time.
fn runtime_for(verb: &Verb) -> Builder {
    let mut builder = Builder::new_multi_thread();
    let of_one_volume = matches!(verb, Verb::ServeReplica(_) | Verb::ServeTarget(_));
    if of_one_volume && std::env::var_os("TOKIO_WORKER_THREADS").is_none() {
        builder.worker_threads(1);
    }
    builder
}

/// Quiet unless asked: a service logs warnings, a verb prints nothing but its answer.
fn logs(cli: &Cli) {
    let level = match (cli.global.verbose, &cli.verb) {
        (
            0,
            Verb::Up(_)
            | Verb::Controller(_)
            | Verb::Node(NodeVerb::Run(_))
            | Verb::Keeper(_)
            | Verb::ServeReplica(_)
            | Verb::ServeTarget(_),
        ) => "warn",
        (0, _) => "off",
        (1, _) => "info,trellis=debug",
        (_, _) => "debug",
    };
    let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| level.to_owned());
    let logs = tracing_subscriber::fmt()
        .with_writer(|| LogWriter)
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false);
    // The keeper must be small, and the filter's patterns are not. It knows levels alone.
    if let Verb::Keeper(_) = &cli.verb {
        let level = filter.parse().unwrap_or(LevelFilter::WARN);
        return logs.with_max_level(level).init();
    }
    logs.with_env_filter(EnvFilter::new(filter)).init();
}

/// Standard error, where output that cannot be written is dropped: a full disk below a log must not end a service.
struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = std::io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
