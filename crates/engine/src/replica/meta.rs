//! What a replica of a replicated volume keeps beside its bytes: promise, keys, stamps, stale regions,
//! view and markers (`proto::Meta`).
//!
//! ```text
//! NAME/meta.a, NAME/meta.b   everything, as of a sequence number
//! NAME/meta.log              the changes since, each with the next number; then zeros or old changes
//!
//!   block  = magic u32 │ length u32 │ sequence u64 │ CRC32C u32 of all else │ body
//!   meta.a = one block, meta.log = blocks one after the other
//! ```
//!
//! **A change is one write and one sync.** A region's first write in an epoch waits for one, so it must
//! be short: a change has tens of bytes where everything may have megabytes. The log has its full length
//! from the start and is written over again and again, so that such a sync has only the change to
//! write, and nothing of the filesystem's own.
//!
//! **What counts** is the whole one of `meta.a` and `meta.b` with the larger number, and then the changes
//! of the log whose numbers follow it without a gap, up to the first block that is not whole. A power loss
//! during an append can only cut or garble the last block, which nobody has been told of. So a change is
//! there as a whole or not at all.
//!
//! **When the log is full**, everything is written to both files, one after the other, each with a sync;
//! then the log begins anew. A crash in between leaves at least one of them whole, and a log that goes on
//! from the older of the two. What is left in the log does no harm: old blocks have numbers that are
//! already in the files, and are passed over; and if a new block overwrites the first of them, the remains
//! behind it do not have the number that follows. Flaws in one of the two files cost nothing at any time.
//!
//! The size is the superblock's business: a larger one is committed there first, and whoever opens takes
//! the larger of the two.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use trellis_api::Bytes;

use super::dir::{Dir, facts, sync_data};
use super::{Provisioning, Replica};
use crate::proto::{Geometry, Meta, MetaChange, View};
use crate::wire::stored;
use crate::{Error, Result};

const FILES: [&str; 2] = ["meta.a", "meta.b"];
const LOG: &str = "meta.log";
const MAGIC: [u8; 4] = *b"TRLM";
const HEAD: usize = 20;

/// The length of the log. What does not fit goes into the two files.
const LOG_BYTES: u64 = 1 << 20;

/// The two files grow in steps of this, ahead of what they hold: a pool may be full when a size is
/// raised, and then there must be room for the new regions.
const FILE_STEP: usize = 64 << 10;

/// The meta data of one replica, open for changes.
#[derive(Debug)]
pub struct MetaStore {
    replica: Replica,
    geometry: Geometry,
    provisioning: Provisioning,
    files: [File; 2],
    log: File,
    paths: [PathBuf; 3],
    log_length: u64,
    sequence: u64,
    meta: Meta,
}

fn block(sequence: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(body);
    let checksum = crc32c::crc32c(&bytes);
    bytes[16..HEAD].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The block at the start of these bytes, if it is whole: its number, its body, and what follows it.
fn first_block(bytes: &[u8]) -> Option<(u64, &[u8], &[u8])> {
    let head = bytes.first_chunk::<HEAD>()?;
    let number = |range: std::ops::Range<usize>| {
        let mut wide = [0; 8];
        wide[..range.len()].copy_from_slice(&head[range]);
        u64::from_le_bytes(wide)
    };
    let length = usize::try_from(number(4..8)).ok()?;
    let (body, rest) = bytes[HEAD..].split_at_checked(length)?;
    let mut unsealed = *head;
    unsealed[16..].fill(0);
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&unsealed), body);
    let whole = head[..4] == MAGIC && u64::from(checksum) == number(16..20);
    whole.then(|| (number(8..16), body, rest))
}

fn snapshot(bytes: &[u8]) -> Option<(u64, Meta)> {
    let (sequence, body, _) = first_block(bytes)?;
    Some((sequence, stored::meta(body)?))
}

/// Applies what follows in the log. Returns the last number, and how long the log is that counts.
fn replay(geometry: Geometry, meta: &mut Meta, mut sequence: u64, log: &[u8]) -> (u64, u64) {
    let mut rest = log;
    let mut used = 0;
    while let Some((number, body, after)) = first_block(rest) {
        if number > sequence {
            let Some(change) = stored::change(body).filter(|_| number == sequence + 1) else {
                break;
            };
            meta.update(geometry, &change);
            sequence = number;
        }
        rest = after;
        used = log.len() - rest.len();
    }
    (sequence, u64::try_from(used).unwrap_or(u64::MAX))
}

/// Who the replicas of the volume are, as far as the replica in that directory knows. Nothing if it never served, or
/// cannot say. Changes nothing.
pub(super) fn known_view(dir: &Dir) -> Result<Option<View>> {
    let read = |name: &str| -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let Some(mut file) = dir.file_read_only(name)? else {
            return Ok(bytes);
        };
        file.read_to_end(&mut bytes).map_err(|source| Error::Io {
            doing: "read",
            path: dir.join(name),
            source,
        })?;
        Ok(bytes)
    };
    let [a, b] = FILES;
    let found = [snapshot(&read(a)?), snapshot(&read(b)?)];
    let newest = found
        .into_iter()
        .flatten()
        .max_by_key(|(number, _)| *number);
    let Some((mut sequence, meta)) = newest else {
        return Ok(None);
    };
    let (mut view, log) = (meta.view, read(LOG)?);
    let mut rest = log.as_slice();
    while let Some((number, body, after)) = first_block(rest) {
        if number > sequence {
            let Some(change) = stored::change(body).filter(|_| number == sequence + 1) else {
                break;
            };
            view = change.view.unwrap_or(view);
            sequence = number;
        }
        rest = after;
    }
    Ok(Some(view))
}

impl MetaStore {
    /// Opens the meta data of a replica. One that has none gets those of a new replica in that view.
    pub fn open(replica: &Replica, geometry: Geometry, view: View) -> Result<MetaStore> {
        let dir = &replica.shared.dir;
        let fresh = Meta::fresh(geometry, replica.size().get(), view);
        let any = FILES
            .iter()
            .map(|name| dir.file_read_only(name))
            .collect::<Result<Vec<_>>>()?;
        let is_new = any.iter().all(Option::is_none) && dir.file_read_only(LOG)?.is_none();
        let [a, b] = FILES;
        let files = [open_or_make(dir, a)?, open_or_make(dir, b)?];
        let mut store = MetaStore {
            replica: replica.clone(),
            geometry,
            provisioning: Provisioning::Thin,
            files,
            log: open_or_make(dir, LOG)?,
            paths: [dir.join(a), dir.join(b), dir.join(LOG)],
            log_length: 0,
            sequence: 1,
            meta: fresh,
        };
        if !is_new {
            store.recover()?;
        }
        store.fill_log()?;
        let size = replica.size().get();
        if store.meta.size < size {
            let version = store.meta.size_version;
            let larger = MetaChange {
                size: Some((size, version)),
                ..MetaChange::default()
            };
            store.meta.update(geometry, &larger);
        }
        store.rewrite()?;
        dir.sync()?;
        Ok(store)
    }

    /// The same store, which raises the size of its replica in that way.
    #[must_use]
    pub fn provisioned(mut self, provisioning: Provisioning) -> MetaStore {
        self.provisioning = provisioning;
        self
    }

    fn recover(&mut self) -> Result<()> {
        // What a dead process wrote may be in memory only. Nothing of that may be believed.
        for (file, path) in self.files.iter().chain([&self.log]).zip(&self.paths) {
            sync_data(file, path)?;
        }
        let found: Vec<Option<(u64, Meta)>> = (0..2)
            .map(|slot| Ok(snapshot(&self.read(slot)?)))
            .collect::<Result<_>>()?;
        let newest = found
            .into_iter()
            .flatten()
            .max_by_key(|(number, _)| *number);
        let Some((sequence, meta)) = newest else {
            let [path_a, path_b, _] = self.paths.clone();
            return Err(Error::MetaBad { path_a, path_b });
        };
        self.meta = meta;
        let log = self.read(2)?;
        (self.sequence, self.log_length) = replay(self.geometry, &mut self.meta, sequence, &log);
        Ok(())
    }

    fn file(&self, index: usize) -> &File {
        self.files.get(index).unwrap_or(&self.log)
    }

    fn fail(&self, doing: &'static str, index: usize) -> impl FnOnce(io::Error) -> Error {
        let path = self.paths[index].clone();
        move |source| Error::Io {
            doing,
            path,
            source,
        }
    }

    fn read(&self, index: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut file = self.file(index);
        io::Seek::rewind(&mut file).map_err(self.fail("read", index))?;
        file.read_to_end(&mut bytes)
            .map_err(self.fail("read", index))?;
        Ok(bytes)
    }

    fn write(&self, index: usize, bytes: &[u8], at: u64) -> Result<()> {
        self.file(index)
            .write_all_at(bytes, at)
            .map_err(self.fail("write", index))?;
        sync_data(self.file(index), &self.paths[index])
    }

    /// Gives the log its full length, of blocks that the filesystem has written already.
    fn fill_log(&self) -> Result<()> {
        let path = &self.paths[2];
        let length = facts(&self.log, path)?.length.get();
        let missing = usize::try_from(LOG_BYTES.saturating_sub(length)).unwrap_or(0);
        if missing > 0 {
            self.write(2, &vec![0; missing], length)?;
        }
        Ok(())
    }

    /// Writes everything into both files. The log begins anew.
    fn rewrite(&mut self) -> Result<()> {
        let mut bytes = block(self.sequence, &stored::put_meta(&self.meta));
        for slot in 0..2 {
            let length = facts(self.file(slot), &self.paths[slot])?.length.get();
            if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > length {
                bytes.resize(bytes.len().next_multiple_of(FILE_STEP), 0);
            }
            self.write(slot, &bytes, 0)?;
        }
        self.log_length = 0;
        Ok(())
    }

    /// What is on the disk.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Makes a change durable. After an error nobody knows whether it is: open the store again.
    pub fn persist(&mut self, change: &MetaChange) -> Result<()> {
        if let Some((size, _)) = change.size
            && size > self.replica.size().get()
        {
            self.replica.grow(Bytes::new(size), self.provisioning)?;
        }
        let bytes = block(self.sequence + 1, &stored::put_change(change));
        let end = self.log_length + u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let fits = end <= LOG_BYTES;
        if fits {
            self.write(2, &bytes, self.log_length)?;
            self.log_length = end;
        }
        self.sequence += 1;
        self.meta.update(self.geometry, change);
        if fits { Ok(()) } else { self.rewrite() }
    }
}

fn open_or_make(dir: &Dir, name: &str) -> Result<File> {
    match dir.file(name)? {
        Some(file) => Ok(file),
        None => dir.make_file(name),
    }
}
