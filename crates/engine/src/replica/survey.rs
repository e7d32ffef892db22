//! Which copies are on a pool, according to the copies themselves: for a person who has lost everything but the pool.
//!
//! ```text
//! POOL/replicas/NAME/about.json    names, class and the like, for people and for a new store
//! ```
//!
//! The caller decides what the file says; this module keeps it whole. A survey takes no lock and changes nothing, so
//! it can look at a pool in use.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use trellis_api::Bytes;
use uuid::Uuid;

use super::dir::{Dir, facts, sync_data};
use super::meta::known_view;
use super::name::Entry;
use super::pair::committed;
use super::pool::REPLICAS;
use super::store::DATA;
use super::{Identity, id};
use crate::proto::View;
use crate::{Error, Result};

const ABOUT: &str = "about.json";
/// The file while it is being written.
const ABOUT_MAKING: &str = "about.json.making";
/// More than such a file ever has.
const ABOUT_BYTES_MAX: u64 = 64 << 10;

/// One copy as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surveyed {
    /// Its name on the pool.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
    /// Whose bytes it holds.
    pub identity: Identity,
    /// Its size.
    pub size: Bytes,
    /// The fence: the newest owner of the volume that it has obeyed.
    pub generation: u64,
    /// Counts its superblocks: of two directories with one identity, the newer has more.
    pub sequence: u64,
    /// Of one of several copies that has served: who the copies are, as it knows.
    pub view: Option<View>,
    /// What stands in its file, if there is one.
    pub about: Option<Vec<u8>>,
}

/// What is on a pool.
#[derive(Debug, Default)]
pub struct Survey {
    /// The pool's identity, if it has one.
    pub pool: Option<Uuid>,
    /// The copies that can prove whose they are and whose data is whole, by name.
    pub copies: Vec<Surveyed>,
    /// Those that cannot, and why.
    pub unusable: Vec<(String, Error)>,
}

/// Looks at every copy in the pool's directory and changes nothing.
pub fn survey(dir: &Path) -> Result<Survey> {
    let root = Dir::open(dir)?.ok_or_else(|| Error::PoolNotDirectory {
        path: dir.to_owned(),
    })?;
    let mut survey = Survey {
        pool: id::read(&root)?,
        ..Survey::default()
    };
    let Some(replicas) = root.dir(REPLICAS)? else {
        return Ok(survey);
    };
    for entry in replicas.entries()? {
        let Entry::Published(name) = Entry::of(&entry) else {
            continue;
        };
        match look(&replicas, name) {
            Ok(found) => survey.copies.extend(found),
            Err(error) => survey.unusable.push((name.to_owned(), error)),
        }
    }
    Ok(survey)
}

/// One copy; none if it was removed meanwhile.
pub(super) fn look(replicas: &Dir, name: &str) -> Result<Option<Surveyed>> {
    let Some(dir) = replicas.dir(name)? else {
        return Ok(None);
    };
    let superblock = committed(&dir, name)?;
    let path = dir.join(DATA);
    let data = dir
        .file_read_only(DATA)?
        .ok_or_else(|| Error::DataAbsent { path: path.clone() })?;
    let length = facts(&data, &path)?.length;
    if length < superblock.data_synced {
        return Err(Error::DataCut {
            path,
            length,
            expected: superblock.data_synced,
        });
    }
    Ok(Some(Surveyed {
        name: name.to_owned(),
        path: dir.path().to_owned(),
        identity: superblock.identity,
        size: superblock.size,
        generation: superblock.generation,
        sequence: superblock.sequence,
        view: known_view(&dir)?,
        about: read_about(&dir)?,
    }))
}

/// What stands in the file of the copy in that directory.
pub(super) fn read_about(dir: &Dir) -> Result<Option<Vec<u8>>> {
    let Some(file) = dir.file_read_only(ABOUT)? else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    file.take(ABOUT_BYTES_MAX)
        .read_to_end(&mut bytes)
        .map_err(|source| Error::Io {
            doing: "read",
            path: dir.join(ABOUT),
            source,
        })?;
    Ok(Some(bytes))
}

/// Writes the file of a copy that is being built. The caller syncs the directory before it publishes it.
pub(super) fn write_first_about(dir: &Dir, about: &[u8]) -> Result<()> {
    let mut file = dir.make_file(ABOUT)?;
    fill(&mut file, &dir.join(ABOUT), about)
}

/// Puts other content in the place of the file's, whole and durable. The caller knows that the copy is the right one.
pub(super) fn write_about(dir: &Dir, about: &[u8]) -> Result<()> {
    dir.remove_file(ABOUT_MAKING)?;
    let mut file = dir.make_file(ABOUT_MAKING)?;
    if let Err(error) = fill(&mut file, &dir.join(ABOUT_MAKING), about) {
        // On a full disk even this little matters. If it stays, the next write removes it.
        let _ = dir.remove_file(ABOUT_MAKING);
        return Err(error);
    }
    dir.rename(ABOUT_MAKING, ABOUT)?;
    dir.sync()
}

fn fill(file: &mut File, path: &Path, about: &[u8]) -> Result<()> {
    file.write_all(about).map_err(|source| Error::Io {
        doing: "write",
        path: path.to_owned(),
        source,
    })?;
    sync_data(file, path)
}
