//! Why the keeper cannot do its work.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why the keeper does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another one has the lock.
    #[error("a keeper runs for {} already", directory.display())]
    AlreadyRuns {
        /// The directory of the keeper.
        directory: PathBuf,
    },
    /// A file or socket cannot be used.
    #[error("{} cannot be used", path.display())]
    Path {
        /// Its path.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// What the program before this one has handed over was written by a newer one.
    #[error(
        "the state of a keeper has version {found}, and this program reads versions up to {known}"
    )]
    Newer {
        /// Its version.
        found: u32,
        /// The newest that is known here.
        known: u32,
    },
    /// What was handed over is not what a keeper writes.
    #[error("the state of a keeper cannot be read")]
    Unreadable(#[source] serde_json::Error),
    /// What was handed over cannot be used.
    #[error("what a keeper has handed over cannot be used")]
    TakeOver(#[source] io::Error),
    /// A wish for a replacement that comes without a program.
    #[error("a replacement comes with one open file, the program")]
    NoProgram,
    /// The program of the last wish is still being tried.
    #[error("another program is being tried")]
    Busy,
    /// A program cannot be started or executed.
    #[error("{} cannot be executed", program.display())]
    NotExecuted {
        /// Where it was found.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A program has not said that it can take over.
    #[error("{} cannot take over ({how}): {said}", program.display())]
    Unfit {
        /// Where it was found.
        program: PathBuf,
        /// How it ended.
        how: String,
        /// What it said instead.
        said: String,
    },
    /// A program has said nothing in time.
    #[error("{} did not say within {} s whether it can take over", program.display(), limit.as_secs())]
    Late {
        /// Where it was found.
        program: PathBuf,
        /// How long it had.
        limit: Duration,
    },
    /// The kernel does not let the keeper wait.
    #[error("nothing can be waited for")]
    Wait(#[source] io::Error),
}
