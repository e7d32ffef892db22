//! What a replica of a replicated volume keeps next to its bytes: promise, keys, stamps, stale regions and view
//! (`proto::Meta`).
//!
//! ```text
//! NAME/meta.a, NAME/meta.b   everything, as of a sequence number
//! NAME/meta.log              the changes since, each with the next number; then zeros or old changes
//!
//!   block  = magic u32 │ length u32 │ sequence u64 │ CRC32C u32 of all else │ body
//!   meta.a = one block, meta.log = blocks one after the other
//! ```
//!
//! **A change is one write and one sync.** A region's first write in an epoch waits for a change, so a change must be
//! short: tens of bytes, where the whole may have megabytes. The log has its full length from the start and is
//! overwritten in place, so that such a sync writes only the change and no meta data of the filesystem.
//!
//! **What counts** is the intact one of `meta.a` and `meta.b` with the larger number, followed by the changes of the
//! log whose numbers follow it without a gap, up to the first block that is not intact. A power loss during an append
//! can only cut or garble the last block, which nobody has been told of. So a change is there as a whole or not at
//! all.
//!
//! **When the log is full**, everything is written to both files, one after the other, each with a sync; then the log
//! begins again. A crash in between leaves at least one of them intact, and a log that continues from the older of the
//! two. Leftovers in the log do no harm. Old blocks have numbers that are already in the files, and are skipped. If a
//! new block overwrites the first of them, the remains behind it do not have the next number. Damage to one of the two
//! files costs nothing at any time.
//!
//! **What must be there** is recorded in the superblock, with the identity: the last promise, which is committed there
//! before it is written here, and the number of the last change. The number is written with every change, without a
//! sync, after the change is durable. So it is never ahead of what a power loss leaves, and it is exact after a
//! process dies. Meta data that are missing, cut or older than that were lost, through a disk or a restored file. A
//! replica without its memory may hold anything. It starts with *all* of its regions stale, in no history
//! ([`Lineage::Unknown`]), and has no vote until it is repaired from the others. Only a replica that never made a
//! promise is made again as if it were new.
//!
//! The files are made under another name, synced and renamed, so a file with the right name is whole.
//!
//! The size belongs to the superblock: a larger size is committed there first, and opening takes the larger of the
//! two.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use trellis_api::Bytes;
use trellis_api::step::{self, Step};

use super::dir::{Dir, facts, sync_data};
use super::{Identity, Provisioning, Replica};
use crate::proto::{Geometry, Lineage, Meta, MetaChange, View};
use crate::wire::stored;
use crate::{Error, Result};

const FILES: [&str; 2] = ["meta.a", "meta.b"];
const LOG: &str = "meta.log";
const PATHS: [&str; 3] = [FILES[0], FILES[1], LOG];
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
    let view = look(dir, Geometry::STANDARD)?.map(|meta| meta.view);
    // One that never took part knows only itself, and one that has lost its memory nobody.
    Ok(view.filter(|view| !view.is_blank() && view.lineage != Lineage::Unknown))
}

/// What is on the disk, as far as it can be read, without changing anything. None if there are no such files.
pub(super) fn look(dir: &Dir, geometry: Geometry) -> Result<Option<Meta>> {
    let read = |name: &str| {
        let mut bytes = Vec::new();
        if let Some(mut file) = dir.file_read_only(name)? {
            file.read_to_end(&mut bytes).map_err(|source| Error::Io {
                doing: "read",
                path: dir.join(name),
                source,
            })?;
        }
        Ok::<_, Error>(bytes)
    };
    let [a, b] = FILES;
    let found = [snapshot(&read(a)?), snapshot(&read(b)?)];
    let newest = found.into_iter().flatten();
    let Some((sequence, mut meta)) = newest.max_by_key(|(number, _)| *number) else {
        return Ok(None);
    };
    replay(geometry, &mut meta, sequence, &read(LOG)?);
    Ok(Some(meta))
}

/// What was found of the meta data.
struct Recovered {
    sequence: u64,
    meta: Meta,
    log_length: u64,
}

impl MetaStore {
    /// Opens the meta data of a replica. One that never served gets those of a new replica in that view; one that has
    /// lost its memory those of a replica that can prove nothing.
    pub fn open(replica: &Replica, geometry: Geometry, view: View) -> Result<MetaStore> {
        let dir = &replica.shared.dir;
        let size = replica.size().get();
        let kept = replica.kept();
        let found = find(dir, geometry)?;
        let number = found.as_ref().map_or(0, |found| found.sequence);
        let is_new = found.is_none()
            && match kept.has_served {
                Some(has_served) => !has_served,
                // An earlier format does not say. Whoever was never written to has nothing to forget.
                None => !replica.has_data()?,
            };
        let sound = found.filter(|_| !kept.is_cut && number >= kept.meta_sequence);
        let (sequence, mut meta, log_length, is_whole) = match sound {
            Some(found) => (found.sequence, found.meta, found.log_length, true),
            None if is_new => (1, Meta::fresh(geometry, size, view), 0, false),
            None => {
                tracing::warn!(
                    replica = replica.name(),
                    found = number,
                    expected = kept.meta_sequence,
                    "the copy has lost its memory; everything in it has to be repaired from others"
                );
                let sequence = number.max(kept.meta_sequence) + 1;
                let lost = Meta::lost(geometry, size, replica.identity().replica);
                (sequence, lost, 0, false)
            }
        };
        meta.promise = meta.promise.max(kept.promise);
        let files = if is_whole {
            open_all(dir, &meta, sequence)?
        } else {
            make_all(dir, &meta, sequence)?
        };
        let [a, b, log] = files;
        let mut store = MetaStore {
            replica: replica.clone(),
            geometry,
            provisioning: Provisioning::Thin,
            files: [a, b],
            log,
            paths: PATHS.map(|name| dir.join(name)),
            log_length,
            sequence,
            meta,
        };
        store.fill_log()?;
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
        step::reached(Step::CopyMemoryMade);
        replica.mend_cut()?;
        replica.keep(store.meta.promise, store.sequence)?;
        Ok(store)
    }

    /// The same store, which raises the size of its replica in that way.
    #[must_use]
    pub fn provisioned(mut self, provisioning: Provisioning) -> MetaStore {
        self.provisioning = provisioning;
        self
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
        if let Some(promise) = change.promise {
            self.replica.keep(promise, self.sequence)?;
            step::reached(Step::CopyPromiseKept);
        }
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
        if !fits {
            self.rewrite()?;
        }
        self.replica.keep_sequence(self.sequence);
        Ok(())
    }
}

/// The meta data that count, if any are whole.
fn find(dir: &Dir, geometry: Geometry) -> Result<Option<Recovered>> {
    let mut bytes = Vec::with_capacity(PATHS.len());
    for name in PATHS {
        bytes.push(match dir.file(name)? {
            Some(file) => {
                // What a dead process wrote may be in memory only. Nothing of that may be believed.
                sync_data(&file, &dir.join(name))?;
                read_all(&file, dir, name)?
            }
            None => Vec::new(),
        });
    }
    let [a, b, log] = &bytes[..] else {
        return Ok(None);
    };
    let newest = [snapshot(a), snapshot(b)].into_iter().flatten();
    let newest = newest.max_by_key(|(number, _)| *number);
    Ok(newest.map(|(sequence, mut meta)| {
        let (sequence, log_length) = replay(geometry, &mut meta, sequence, log);
        Recovered {
            sequence,
            meta,
            log_length,
        }
    }))
}

fn read_all(mut file: &File, dir: &Dir, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|source| Error::Io {
        doing: "read",
        path: dir.join(name),
        source,
    })?;
    Ok(bytes)
}

/// Opens the three files; one that is missing is made from what is known.
fn open_all(dir: &Dir, meta: &Meta, sequence: u64) -> Result<[File; 3]> {
    let [a, b] = FILES;
    let open = |name: &str, bytes: &dyn Fn() -> Vec<u8>| match dir.file(name)? {
        Some(file) => Ok(file),
        None => dir.replace_file(name, &bytes()),
    };
    let whole = || padded(meta, sequence);
    Ok([open(a, &whole)?, open(b, &whole)?, open(LOG, &Vec::new)?])
}

/// Makes the three files, in the place of whatever was there.
fn make_all(dir: &Dir, meta: &Meta, sequence: u64) -> Result<[File; 3]> {
    let [a, b] = FILES;
    let bytes = padded(meta, sequence);
    let files = [
        dir.replace_file(a, &bytes)?,
        dir.replace_file(b, &bytes)?,
        dir.replace_file(LOG, &vec![0; usize::try_from(LOG_BYTES).unwrap_or(0)])?,
    ];
    dir.sync()?;
    Ok(files)
}

/// Makes the meta data of a replica that is being made. The caller syncs the directory.
pub(super) fn make(dir: &Dir, identity: Identity, size: Bytes) -> Result<()> {
    let view = View::blank(identity.replica);
    let meta = Meta::fresh(Geometry::STANDARD, size.get(), view);
    make_all(dir, &meta, 1).map(drop)
}

fn padded(meta: &Meta, sequence: u64) -> Vec<u8> {
    let mut bytes = block(sequence, &stored::put_meta(meta));
    bytes.resize(bytes.len().next_multiple_of(FILE_STEP), 0);
    bytes
}
