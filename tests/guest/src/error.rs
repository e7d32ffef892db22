//! Why there is no guest, or no answer from it.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

/// The result of everything on the host's side.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong outside of the scenarios.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A part of the guest is not there, or a file of ours could not be used.
    #[error(transparent)]
    Part(#[from] trellis_guest_parts::Error),
    /// A program could not be started.
    #[error("could not run {program}; `scripts/setup` installs it")]
    NoProgram {
        /// Which.
        program: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// Cargo built no such program.
    #[error("cargo built no program named {name}")]
    NotBuilt {
        /// The name.
        name: String,
    },
    /// No scenario has that name.
    #[error("there is no scenario {name}; there are: {}", .known.join(", "))]
    NoScenario {
        /// The name.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// A thread of ours that drove a guest has panicked.
    #[error("a thread that drove a guest has panicked")]
    WorkerPanicked,
    /// QEMU ended before the guest said anything.
    #[error("the guest did not come up: QEMU ended with {status}\n{console}")]
    Stillborn {
        /// How QEMU ended.
        status: ExitStatus,
        /// The last lines of its console and of QEMU.
        console: String,
    },
    /// The guest did not come up in time.
    #[error("the guest did not come up in {limit:?}\n{console}")]
    Silent {
        /// The time that it had.
        limit: Duration,
        /// The last lines of its console.
        console: String,
    },
}
