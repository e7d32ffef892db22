//! Why the keeper cannot do its work.

use std::io;
use std::path::PathBuf;

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
    /// The kernel does not let the keeper wait.
    #[error("nothing can be waited for")]
    Wait(#[source] io::Error),
}
