//! The redb file: opening it without trusting it, and committing batches to it.
//!
//! Happy path: lock, check the file through a view that cannot change it ([`super::overlay`]), open it, load every
//! object. A file that fails on the way is refused and stays as it was.
//!
//! After a failed commit the library refuses every further one, so a failed commit ends with [`StoreFile::reopen`].
//!
//! Two tables: `objects` (`plural.group/namespace/name` to JSON) and `meta` (`format`, `revision`).

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::memory::Id;
use super::overlay::Overlay;
use crate::error::{CommitError, Damage, Error};
use crate::kind::Kind;

const OBJECTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("objects");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const FORMAT_KEY: &str = "format";
const REVISION_KEY: &str = "revision";

/// The newest format of the file that this program writes and reads.
const FORMAT: u64 = 1;
/// Our files start with this. Any other file is left alone.
const MAGIC: &[u8; 9] = b"redb\x1A\x0A\xA9\x0D\x0A";
/// Objects are served from memory; the library's cache only has to hold the pages of one commit.
const CACHE_BYTES: usize = 1 << 20;

/// The file.
#[derive(Debug)]
pub(crate) struct StoreFile {
    path: PathBuf,
    /// Closed only between a failed commit and the next opening that succeeds.
    database: Option<Database>,
}

/// What a file held when it was opened.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Loaded {
    pub(crate) revision: u64,
    pub(crate) objects: Vec<(Id, Vec<u8>)>,
}

impl StoreFile {
    /// Opens the file, or makes an empty one.
    pub(super) fn open(path: &Path, kinds: &'static [Kind]) -> Result<(StoreFile, Loaded), Error> {
        if !path
            .try_exists()
            .map_err(|source| unreachable(path, source))?
        {
            create(path, kinds)?;
        }
        StoreFile::open_existing(path, kinds)
    }

    /// Opens a file that is there.
    pub(crate) fn open_existing(
        path: &Path,
        kinds: &'static [Kind],
    ) -> Result<(StoreFile, Loaded), Error> {
        let (database, loaded) = open_existing(path, kinds)?;
        let file = StoreFile {
            path: path.to_path_buf(),
            database: Some(database),
        };
        Ok((file, loaded))
    }

    /// Closes the file, in whatever state a failed commit left it, and opens it again. A file that has vanished is not
    /// made again: its contents would be missing.
    pub(super) fn reopen(&mut self, kinds: &'static [Kind]) -> Result<Loaded, Error> {
        // The lock goes with the handle and is taken again; what another program writes in between is noticed.
        self.close();
        let (database, loaded) = open_existing(&self.path, kinds)?;
        self.database = Some(database);
        Ok(loaded)
    }

    pub(super) fn close(&mut self) {
        self.database = None;
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a batch durable: all of it, or nothing.
    pub(super) fn commit<'a>(
        &self,
        kinds: &'static [Kind],
        revision: u64,
        changes: impl Iterator<Item = (&'a Id, Option<&'a [u8]>)>,
    ) -> Result<(), CommitError> {
        // The writer settles what a failed commit left before it writes again, so a closed file is our bug.
        let database = self.database.as_ref().expect("an open file is written");
        let transaction = database.begin_write()?;
        {
            let mut objects = transaction.open_table(OBJECTS)?;
            for (id, json) in changes {
                let key = id.to_key(kinds);
                match json {
                    Some(json) => objects.insert(key.as_str(), json)?,
                    None => objects.remove(key.as_str())?,
                };
            }
            transaction
                .open_table(META)?
                .insert(REVISION_KEY, revision)?;
        }
        transaction.commit()?;
        Ok(())
    }
}

/// Locks, inspects, opens and loads a file that is there.
fn open_existing(path: &Path, kinds: &'static [Kind]) -> Result<(Database, Loaded), Error> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|source| unreachable(path, source))?;
    lock(path, &file)?;
    inspect(path, &file, kinds)?;
    let database = builder()
        .create_file(file)
        .map_err(|error| refused(path, error))?;
    let loaded = load(&database, path, kinds)?;
    Ok((database, loaded))
}

/// Takes the lock that keeps a second service away, until the file is closed.
pub(crate) fn lock(path: &Path, file: &File) -> Result<(), Error> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Error::InUse {
            path: path.to_path_buf(),
        }),
        Err(TryLockError::Error(source)) => Err(unreachable(path, source)),
    }
}

/// The revision of a file that this process has locked, as far as it can be read.
pub(crate) fn revision_of(path: &Path, file: &File, kinds: &'static [Kind]) -> Option<u64> {
    let view = Overlay::new(file.try_clone().ok()?).ok()?;
    let looked = catch_unwind(AssertUnwindSafe(|| {
        let database = builder().create_with_backend(view).ok()?;
        load(&database, path, kinds).ok()
    }));
    Some(looked.ok()??.revision)
}

/// Makes a new file next to its place and renames it into place, so that a crash leaves either no file or a whole one.
fn create(path: &Path, kinds: &'static [Kind]) -> Result<(), Error> {
    let empty = Loaded {
        revision: 0,
        objects: Vec::new(),
    };
    let fresh = fresh(path, kinds, &empty)?;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // A link, unlike a rename, does not replace what another process has put there in the meantime.
    let linked = match std::fs::hard_link(&fresh, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    };
    let removed = std::fs::remove_file(&fresh);
    linked
        .and(removed)
        .and_then(|()| File::open(directory)?.sync_all())
        .map_err(|source| unreachable(path, source))
}

/// Durably makes a file with these contents next to its future place, and returns its path.
pub(crate) fn fresh(
    path: &Path,
    kinds: &'static [Kind],
    content: &Loaded,
) -> Result<PathBuf, Error> {
    let fresh = beside(path, "new");
    let made = (|| -> Result<(), CommitError> {
        let database = builder().create(&fresh).map_err(redb::Error::from)?;
        let transaction = database.begin_write()?;
        {
            let mut objects = transaction.open_table(OBJECTS)?;
            for (id, json) in &content.objects {
                objects.insert(id.to_key(kinds).as_str(), json.as_slice())?;
            }
            let mut meta = transaction.open_table(META)?;
            meta.insert(FORMAT_KEY, FORMAT)?;
            meta.insert(REVISION_KEY, content.revision)?;
        }
        transaction.commit()?;
        Ok(())
    })();
    if let Err(error) = made {
        // What was begun is of no use to anyone.
        let _ = std::fs::remove_file(&fresh);
        return Err(unreachable(path, io::Error::other(error)));
    }
    Ok(fresh)
}

/// An unused name next to a file.
pub(crate) fn beside(path: &Path, word: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{word}-{}", uuid::Uuid::new_v4()));
    PathBuf::from(name)
}

/// Decides whether the file is a whole store, without changing it.
fn inspect(path: &Path, file: &File, kinds: &'static [Kind]) -> Result<(), Error> {
    let mut magic = [0; MAGIC.len()];
    let length = file
        .metadata()
        .map_err(|source| unreachable(path, source))?
        .len();
    if length == 0 {
        return Err(damaged(path, Damage::Truncated));
    }
    match file.read_exact_at(&mut magic, 0) {
        Ok(()) if magic == *MAGIC => {}
        Ok(()) => {
            return Err(Error::Foreign {
                path: path.to_path_buf(),
            });
        }
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(Error::Foreign {
                path: path.to_path_buf(),
            });
        }
        Err(source) => return Err(unreachable(path, source)),
    }
    let view = file
        .try_clone()
        .and_then(Overlay::new)
        .map_err(|source| unreachable(path, source))?;
    // The library asserts what it believes of its own pages; on a damaged file an assertion may not hold.
    let looked = catch_unwind(AssertUnwindSafe(|| -> Result<(), Error> {
        let mut database = builder()
            .create_with_backend(view)
            .map_err(|error| refused(path, error))?;
        if !database
            .check_integrity()
            .map_err(|error| refused(path, error))?
        {
            return Err(damaged(path, Damage::Checksum));
        }
        load(&database, path, kinds).map(|_| ())
    }));
    looked.unwrap_or_else(|_| Err(damaged(path, Damage::Structure)))
}

fn load(database: &Database, path: &Path, kinds: &'static [Kind]) -> Result<Loaded, Error> {
    let transaction = database
        .begin_read()
        .map_err(|error| wrong(path, error.into()))?;
    let meta = transaction
        .open_table(META)
        .map_err(|error| missing(path, error))?;
    let number = |key| -> Result<Option<u64>, Error> {
        let found = meta.get(key).map_err(|error| wrong(path, error.into()))?;
        Ok(found.map(|guard| guard.value()))
    };
    let entry = |key: &str| {
        damaged(
            path,
            Damage::Entry {
                key: key.to_owned(),
            },
        )
    };
    let found = number(FORMAT_KEY)?.ok_or_else(|| entry(FORMAT_KEY))?;
    if found > FORMAT {
        return Err(Error::Newer {
            path: path.to_path_buf(),
            found,
            known: FORMAT,
        });
    }
    let revision = number(REVISION_KEY)?.ok_or_else(|| entry(REVISION_KEY))?;
    let table = transaction
        .open_table(OBJECTS)
        .map_err(|error| missing(path, error))?;
    let mut objects = Vec::new();
    for row in table.iter().map_err(|error| wrong(path, error.into()))? {
        let (key, value) = row.map_err(|error| wrong(path, error.into()))?;
        let id = Id::from_key(kinds, key.value()).ok_or_else(|| entry(key.value()))?;
        objects.push((id, value.value().to_vec()));
    }
    Ok(Loaded { revision, objects })
}

fn builder() -> redb::Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn unreachable(path: &Path, source: io::Error) -> Error {
    Error::Unreachable {
        path: path.to_path_buf(),
        source,
    }
}

fn damaged(path: &Path, damage: Damage) -> Error {
    Error::Damaged {
        path: path.to_path_buf(),
        damage,
    }
}

fn refused(path: &Path, error: redb::DatabaseError) -> Error {
    match error {
        redb::DatabaseError::DatabaseAlreadyOpen => Error::InUse {
            path: path.to_path_buf(),
        },
        other => wrong(path, other.into()),
    }
}

/// A database that lacks our tables was made by someone else.
fn missing(path: &Path, error: redb::TableError) -> Error {
    match error {
        redb::TableError::TableDoesNotExist(_)
        | redb::TableError::TableTypeMismatch { .. }
        | redb::TableError::TableIsMultimap(_)
        | redb::TableError::TableIsNotMultimap(_) => Error::Foreign {
            path: path.to_path_buf(),
        },
        other => wrong(path, other.into()),
    }
}

fn wrong(path: &Path, error: redb::Error) -> Error {
    match error {
        redb::Error::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            damaged(path, Damage::Truncated)
        }
        redb::Error::Io(source) if source.kind() != io::ErrorKind::InvalidData => {
            unreachable(path, source)
        }
        other => damaged(path, Damage::Refused(other)),
    }
}
