//! The id of a pool tells it apart from an empty directory at the same path.
//!
//! A disk that is not mounted leaves its mount point behind, and that looks like a pool that was never used. A caller
//! that remembers the id does not mistake one for the other.

use std::fs::File;
use std::io::{Read, Write};

use uuid::Uuid;

use super::dir::{Dir, sync_data};
use crate::{Error, Result};

const POOL_ID: &str = "pool-id";
/// The id while it is being written.
const POOL_ID_MAKING: &str = "pool-id.making";
/// More than an id in any of its spellings takes.
const POOL_ID_BYTES_MAX: u64 = 64;

/// The id of the pool in that directory, if it has one. Changes nothing.
pub(super) fn read(root: &Dir) -> Result<Option<Uuid>> {
    let Some(file) = root.file_read_only(POOL_ID)? else {
        return Ok(None);
    };
    let path = root.join(POOL_ID);
    let mut bytes = Vec::new();
    file.take(POOL_ID_BYTES_MAX)
        .read_to_end(&mut bytes)
        .map_err(|source| Error::Io {
            doing: "read",
            path: path.clone(),
            source,
        })?;
    match Uuid::try_parse_ascii(bytes.trim_ascii()) {
        Ok(id) => Ok(Some(id)),
        Err(_) => Err(Error::PoolIdBad { path }),
    }
}

/// The id of the pool in that directory, which gets one if it has none. The caller has the pool's
/// lock, and syncs the directory.
pub(super) fn read_or_make(root: &Dir) -> Result<Uuid> {
    if let Some(id) = read(root)? {
        return Ok(id);
    }
    let id = Uuid::new_v4();
    // Under another name until it is whole, so that a crash leaves an id or none.
    root.remove_file(POOL_ID_MAKING)?;
    let file = root.make_file(POOL_ID_MAKING)?;
    if let Err(error) = write(root, file, id) {
        // On a full disk even this little matters. If it stays, the next opening removes it.
        let _ = root.remove_file(POOL_ID_MAKING);
        return Err(error);
    }
    root.rename(POOL_ID_MAKING, POOL_ID)?;
    tracing::info!(pool = %root.path().display(), %id, "gave the pool an id");
    Ok(id)
}

fn write(root: &Dir, mut file: File, id: Uuid) -> Result<()> {
    let path = root.join(POOL_ID_MAKING);
    writeln!(file, "{id}").map_err(|source| Error::Io {
        doing: "write",
        path: path.clone(),
        source,
    })?;
    sync_data(&file, &path)
}
