//! Why the store could not be opened or written.

use std::io;
use std::path::PathBuf;

/// What can go wrong with the file under the API.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process, or this one, has the file open.
    #[error(
        "{} is in use by another Trellis; stop the other one, or give this one its own data directory",
        path.display()
    )]
    InUse {
        /// The store's file.
        path: PathBuf,
    },
    /// The file cannot be opened, read or created.
    #[error("{} cannot be opened; check that it is a file which this user may read and write", path.display())]
    Unreachable {
        /// The store's file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is something else than a store.
    #[error(
        "{} is not a Trellis store and has been left as it is; move it away, or name another file",
        path.display()
    )]
    Foreign {
        /// The file that was named.
        path: PathBuf,
    },
    /// The file was a store, but parts of it are wrong or missing.
    #[error(
        "{} is damaged ({damage}) and has been left as it is; restore it from a backup, or move it away to start empty",
        path.display()
    )]
    Damaged {
        /// The store's file.
        path: PathBuf,
        /// What was found.
        damage: Damage,
    },
    /// The file was written by a newer program.
    #[error(
        "{} has format {found}, and this program knows formats up to {known}; run the newer Trellis that wrote it",
        path.display()
    )]
    Newer {
        /// The store's file.
        path: PathBuf,
        /// The format of the file.
        found: u64,
        /// The newest format that this program reads.
        known: u64,
    },
    /// The file that is to be restored is no backup.
    #[error("{} is not a backup that this program can read; make one with `trellis backup`", path.display())]
    NotABackup {
        /// The file that was named.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// The file can be read, but the first write of the run failed.
    #[error("{} cannot be written; check the space and the permissions of its directory", path.display())]
    Unwritable {
        /// The store's file.
        path: PathBuf,
        /// What the write was answered.
        source: io::Error,
    },
    /// The thread that writes could not be started.
    #[error("the thread that writes the store could not be started")]
    NoThread {
        /// What the system said.
        source: io::Error,
    },
}

/// What is wrong with a damaged file.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// The file is shorter than its own header says.
    #[error("it is cut short")]
    Truncated,
    /// A page does not have the checksum that its parent holds.
    #[error("a checksum is wrong")]
    Checksum,
    /// The database library refuses the file.
    #[error("{0}")]
    Refused(redb::Error),
    /// The database library stumbled over the file's structure.
    #[error("its structure makes no sense")]
    Structure,
    /// An entry does not hold what its key says.
    #[error("the entry {key} is unreadable")]
    Entry {
        /// The entry's key.
        key: String,
    },
}

/// Why a batch of writes did not become durable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommitError {
    /// The database library could not write.
    #[error(transparent)]
    Database(#[from] redb::Error),
    /// After an earlier failure, the file could not be opened again.
    #[error("it could not be opened again after a failed write ({})", reason(.0))]
    Closed(#[source] Error),
    /// Since an earlier failure, the file holds what this program has not written.
    #[error("another program has written to it in the meantime; restart Trellis to read it anew")]
    Overtaken,
}

impl CommitError {
    /// Whether more space would have helped.
    pub(crate) fn is_full(&self) -> bool {
        let source = match self {
            CommitError::Database(redb::Error::Io(source))
            | CommitError::Closed(Error::Unreachable { source, .. }) => source,
            _ => return false,
        };
        matches!(
            source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    }
}

/// What the system said, where it said something.
fn reason(error: &Error) -> String {
    match error {
        Error::Unreachable { source, .. } => source.to_string(),
        other => other.to_string(),
    }
}

macro_rules! from_redb {
    ($($source:ty),*) => {$(
        impl From<$source> for CommitError {
            fn from(source: $source) -> Self {
                CommitError::Database(source.into())
            }
        }
    )*};
}

from_redb!(
    redb::TransactionError,
    redb::TableError,
    redb::StorageError,
    redb::CommitError
);
