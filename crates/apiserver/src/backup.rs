//! A copy of the whole store in one readable file, and a store made from such a file.
//!
//! The file is one JSON document: a format, the revision that it shows, and every object under its key. It is taken
//! from what readers see, which is always one durable state. Anyone who can read it can read the secrets in it.
//!
//! A restored store continues after the newest revision that any client may have seen, so no watch mistakes an old
//! object for a new one.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Error;
use crate::kinds;
use crate::store::file::{Loaded, StoreFile, beside, fresh, lock, revision_of};
use crate::store::memory::{Id, Stored};

/// The newest format that this program writes and reads.
const FORMAT: u64 = 1;
/// How a file says what it is.
const KIND: &str = "TrellisBackup";
/// How far the revision of a restored store leaps ahead if nobody can say which revisions were seen since the backup.
const LEAP: u64 = 1 << 32;

/// Everything that a store holds.
#[derive(Debug, Serialize, Deserialize)]
pub struct Backup {
    kind: String,
    format: u64,
    /// The revision that it shows.
    pub revision: u64,
    /// The objects, by their keys in the store.
    pub objects: BTreeMap<String, Value>,
}

/// What a restore has done.
#[derive(Debug)]
pub struct Restored {
    /// How many objects the store has now.
    pub objects: usize,
    /// Where the store is that was there before, if there was one.
    pub aside: Option<PathBuf>,
}

impl Backup {
    pub(crate) fn of(revision: u64, objects: BTreeMap<String, Value>) -> Backup {
        Backup {
            kind: KIND.to_owned(),
            format: FORMAT,
            revision,
            objects,
        }
    }

    /// Reads a store that no service has open.
    pub fn of_file(path: &Path) -> Result<Backup, Error> {
        let kinds = kinds::all();
        let (_open, loaded) = StoreFile::open_existing(path, kinds)?;
        let mut objects = BTreeMap::new();
        for (id, json) in loaded.objects {
            let key = id.to_key(kinds);
            let value = serde_json::from_slice(&json).map_err(|_| Error::Damaged {
                path: path.to_owned(),
                damage: crate::Damage::Entry { key: key.clone() },
            })?;
            objects.insert(key, value);
        }
        Ok(Backup::of(loaded.revision, objects))
    }

    /// Reads a backup from its text; `path` is named if it is none.
    pub fn read(text: &[u8], path: &Path) -> Result<Backup, Error> {
        let backup: Backup = serde_json::from_slice(text).map_err(|source| Error::NotABackup {
            path: path.to_owned(),
            source: source.into(),
        })?;
        if backup.kind != KIND || backup.format > FORMAT {
            let why = format!("it is {:?} of format {}", backup.kind, backup.format);
            return Err(Error::NotABackup {
                path: path.to_owned(),
                source: io::Error::other(why),
            });
        }
        Ok(backup)
    }

    /// The text of the file.
    pub fn text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// Restores the backup into the store at `path`. The old store is kept next to it. A store that a service has open
    /// is [`Error::InUse`] and stays.
    pub fn restore(&self, path: &Path) -> Result<Restored, Error> {
        let kinds = kinds::all();
        let unreachable = |source| Error::Unreachable {
            path: path.to_owned(),
            source,
        };
        let exists = path.try_exists().map_err(unreachable)?;
        // Held until the new file has the name, so that no service begins in between.
        let held = match exists {
            true => Some(hold(path)?),
            false => None,
        };
        let loaded = Loaded {
            revision: self.next_revision(path, held.as_ref()),
            objects: self.entries(path)?,
        };
        let new = fresh(path, kinds, &loaded)?;
        let aside = exists.then(|| beside(path, "before-restore"));
        let replaced = match &aside {
            Some(aside) => std::fs::hard_link(path, aside),
            None => Ok(()),
        };
        replaced
            .and_then(|()| std::fs::rename(&new, path))
            .and_then(|()| {
                let directory = path.parent().filter(|each| !each.as_os_str().is_empty());
                std::fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
            })
            .map_err(unreachable)?;
        drop(held);
        Ok(Restored {
            objects: loaded.objects.len(),
            aside,
        })
    }

    fn entries(&self, path: &Path) -> Result<Vec<(Id, Vec<u8>)>, Error> {
        let kinds = kinds::all();
        let entry = |(key, value): (&String, &Value)| {
            let json = value.to_string().into_bytes();
            let is_object = Stored::from_json(json.clone().into()).is_some();
            let id = Id::from_key(kinds, key).filter(|_| is_object);
            id.map(|id| (id, json)).ok_or_else(|| Error::NotABackup {
                path: path.to_owned(),
                source: io::Error::other(format!("the entry {key} is no object")),
            })
        };
        self.objects.iter().map(entry).collect()
    }

    /// The revision that the restored store begins with.
    fn next_revision(&self, path: &Path, old: Option<&std::fs::File>) -> u64 {
        match old.and_then(|old| revision_of(path, old, kinds::all())) {
            Some(seen) => seen.max(self.revision).saturating_add(1),
            None => self.revision.saturating_add(LEAP),
        }
    }
}

/// Takes the lock that a service would have.
fn hold(path: &Path) -> Result<std::fs::File, Error> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    let file = file.map_err(|source| Error::Unreachable {
        path: path.to_owned(),
        source,
    })?;
    lock(path, &file)?;
    Ok(file)
}
