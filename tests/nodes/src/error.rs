//! Why there are no nodes, or not as they should be.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be used.
    #[error("could not {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("could not run {program}; `scripts/setup` installs it")]
    NoProgram {
        /// Which.
        program: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A program failed.
    #[error("`{command}` failed with {status}: {said}")]
    Failed {
        /// The program with its arguments.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// What it said about it.
        said: String,
    },
    /// A device was made, but it is not where it should be.
    #[error("the device {name} has no numbers")]
    NoDevice {
        /// Its name.
        name: String,
    },
    /// A port of the bridge does not come up.
    #[error("the bridge's port {device} does not forward")]
    NotForwarding {
        /// The port.
        device: String,
    },
    /// Something did not come about in time.
    #[error("gave up waiting: {what}")]
    Never {
        /// What, and how things stand.
        what: String,
    },
    /// No node has that name.
    #[error("there is no node {name}")]
    NoNode {
        /// The name.
        name: String,
    },
    /// Processes of a node could not be stopped or killed.
    #[error("processes {pids:?} of node {node} are still {state}")]
    Stubborn {
        /// The node.
        node: String,
        /// The processes.
        pids: Vec<i32>,
        /// What they should not be.
        state: &'static str,
    },
    /// Something could not be removed.
    #[error("{what} could not be removed")]
    Left {
        /// What is still there.
        what: String,
    },
    /// The service did not come up.
    #[error("the service on {node} did not come up: {said}")]
    NotUp {
        /// The node.
        node: String,
        /// What it said.
        said: String,
    },
    /// Cargo built no `trellis`.
    #[error("cargo built no program named trellis")]
    NotBuilt,
}

/// Adds what was tried to a system's answer.
pub(crate) trait Context<T> {
    /// The error with its context.
    fn context(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Io {
            action,
            path: path.to_owned(),
            source,
        })
    }
}
