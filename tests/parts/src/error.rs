//! Why a part of a guest is not there.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory of ours could not be used.
    #[error("could not {action} {path}", path = .path.display())]
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
        program: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} failed with {status}: {said}")]
    Failed {
        /// Which.
        program: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it said about it.
        said: String,
    },
    /// The package that names the newest kernel names none.
    #[error(
        "apt knows no kernel that {package} depends on; is its list of packages there (`apt-get update`)?"
    )]
    NoKernel {
        /// The package.
        package: &'static str,
    },
    /// The unpacked kernel package lacks something.
    #[error("{path} has no {what}", path = .path.display())]
    Incomplete {
        /// Where it was looked for.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
}

/// Adds what was tried to a system's answer.
pub trait Context<T> {
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
