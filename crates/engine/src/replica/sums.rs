//! The file with the checksums of a replica's blocks. [`crate::sums`] argues what they mean.
//!
//! ```text
//! NAME/sums   0     header, 512 bytes      2048  header, the other one
//!             4096  a slot of 8 bytes for every block of 4 KiB; holes are slots of zeros
//!
//!   header = magic "TRLS" │ CRC32C u32 of what follows │ sequence u64 │ settled epoch u64 │ coverage u8
//! ```
//!
//! The slots of a region are 2 KiB that never cross a page, so a killed process has stored all slots of a write or
//! none. A new header overwrites the older of the two and is synced; the one with the larger sequence counts. If
//! neither is whole, the sums say nothing and start again.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::{Errno, ReadWriteFlags};

use super::Replica;
use super::dir::sync_data;
use crate::proto::Epoch;
use crate::sums::{Coverage, SLOT_BYTES, Slot, settled_by_sync};
use crate::{Error, Result};

/// The name of the file, beside `data`.
pub(crate) const SUMS: &str = "sums";

const MAGIC: [u8; 4] = *b"TRLS";
const HEADER_BYTES: usize = 33;
const HEADERS: [u64; 2] = [0, 2048];

/// Where the slots begin.
const SLOTS_AT: u64 = 4096;

/// The most slots that are read or written at once: those of a region.
pub(crate) const SLOTS_MAX: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    sequence: u64,
    settled: Epoch,
    coverage: Coverage,
}

impl Header {
    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.settled.get().to_le_bytes());
        bytes[24] = match self.coverage {
            Coverage::Whole => 0,
            Coverage::Partial => 1,
        };
        let checksum = crc32c::crc32c(&bytes[8..]);
        bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let number = |from: usize| {
            let mut wide = [0; 8];
            wide.copy_from_slice(&bytes[from..from + 8]);
            u64::from_le_bytes(wide)
        };
        let header = Header {
            sequence: number(8),
            settled: Epoch::from_raw(number(16)),
            coverage: match bytes[24] {
                0 => Coverage::Whole,
                1 => Coverage::Partial,
                _ => return None,
            },
        };
        (header.encode() == *bytes).then_some(header)
    }
}

/// The sums of one replica.
#[derive(Debug)]
pub(crate) struct SumFile {
    file: File,
    path: PathBuf,
    header: Mutex<Header>,
    /// Counts the writes to the data file.
    writes: AtomicU64,
    /// The newest stamp may count as settled, so that a write has to take that back first.
    is_at_rest: AtomicBool,
    is_partial: AtomicBool,
}

impl SumFile {
    /// Opens the sums of a replica, if it has some.
    pub(crate) fn open(replica: &Replica) -> Result<Option<SumFile>> {
        let dir = &replica.shared.dir;
        let Some(file) = dir.file(SUMS)? else {
            return Ok(None);
        };
        let path = dir.join(SUMS);
        let Some(header) = newest_header(&file) else {
            tracing::warn!(
                "{} has no whole header; the sums of this copy begin anew",
                path.display()
            );
            return Ok(None);
        };
        Ok(Some(SumFile::new(file, path, header)))
    }

    /// Makes the sums of a replica anew. `coverage` says whether all of its blocks are zeros.
    pub(crate) fn make(replica: &Replica, coverage: Coverage) -> Result<SumFile> {
        replica.promise_sums()?;
        let dir = &replica.shared.dir;
        dir.remove_file(SUMS)?;
        let file = dir.make_file(SUMS)?;
        let header = Header {
            sequence: 1,
            settled: Epoch::NEVER,
            coverage,
        };
        let sums = SumFile::new(file, dir.join(SUMS), header);
        sums.put_header(header)?;
        dir.sync()?;
        Ok(sums)
    }

    fn new(file: File, path: PathBuf, header: Header) -> SumFile {
        SumFile {
            file,
            path,
            header: Mutex::new(header),
            writes: AtomicU64::new(0),
            is_at_rest: AtomicBool::new(true),
            is_partial: AtomicBool::new(header.coverage == Coverage::Partial),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn coverage(&self) -> Coverage {
        if self.is_partial.load(Ordering::Relaxed) {
            Coverage::Partial
        } else {
            Coverage::Whole
        }
    }

    /// Up to which epoch bytes and sums are durable together.
    pub(crate) fn settled(&self) -> Epoch {
        self.header().settled
    }

    fn header(&self) -> std::sync::MutexGuard<'_, Header> {
        // A header changes at once, after it was written.
        self.header.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_header(&self, header: Header) -> Result<()> {
        let at = HEADERS[usize::from(header.sequence % 2 == 1)];
        self.file
            .write_all_at(&header.encode(), at)
            .map_err(|source| Error::Io {
                doing: "write",
                path: self.path.clone(),
                source,
            })?;
        sync_data(&self.file, &self.path)
    }

    /// Reads the slots from this block on.
    pub(crate) fn load(&self, first: u64, slots: &mut [Slot]) -> io::Result<()> {
        load(&self.file, first, slots, ReadWriteFlags::empty()).map_err(io::Error::from)
    }

    /// Writes slots from this block on.
    pub(crate) fn store(&self, first: u64, slots: &[Slot]) -> io::Result<()> {
        let mut bytes = [0; SLOTS_MAX * SLOT_BYTES];
        for (done, part) in slots.chunks(SLOTS_MAX).enumerate() {
            for (into, slot) in bytes.chunks_exact_mut(SLOT_BYTES).zip(part) {
                into.copy_from_slice(&slot.to_bytes());
            }
            let from = first + u64::try_from(done * SLOTS_MAX).unwrap_or(0);
            self.file
                .write_all_at(&bytes[..part.len() * SLOT_BYTES], place_of(from))?;
        }
        Ok(())
    }

    /// The file, and where in it the slots of these blocks are: the offset and the length.
    pub(crate) fn place_of_slots(&self, first: u64, count: usize) -> (&File, u64, u64) {
        let bytes = u64::try_from(count * SLOT_BYTES).unwrap_or(u64::MAX);
        (&self.file, place_of(first), bytes)
    }

    /// Makes the slots durable.
    pub(crate) fn sync(&self) -> Result<()> {
        sync_data(&self.file, &self.path)
    }

    /// Says that the data file is about to be written to by an entry of `newest` or a later epoch. It must be
    /// said before the write.
    pub(crate) fn written(&self, newest: Epoch) -> Result<()> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        if self.is_at_rest.load(Ordering::SeqCst) {
            self.unsettle(newest)?;
        }
        Ok(())
    }

    fn unsettle(&self, newest: Epoch) -> Result<()> {
        let mut header = self.header();
        if !crate::sums::may_write(header.settled, newest) {
            let next = Header {
                sequence: header.sequence + 1,
                settled: newest,
                ..*header
            };
            self.put_header(next)?;
            *header = next;
        }
        self.is_at_rest.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// How many writes there were, for [`SumFile::settle`].
    pub(crate) fn writes(&self) -> u64 {
        self.writes.load(Ordering::SeqCst)
    }

    /// Syncs the sums, and calls them settled. The caller has synced the data file since it asked for `writes`
    /// and `newest`.
    pub(crate) fn settle(&self, newest: Epoch, writes: u64) -> Result<()> {
        self.sync()?;
        let mut header = self.header();
        // Whoever writes from now on sees this and waits, or has been counted.
        self.is_at_rest.store(true, Ordering::SeqCst);
        let written_since = self.writes() != writes;
        if written_since {
            self.is_at_rest.store(false, Ordering::SeqCst);
        }
        let next = Header {
            sequence: header.sequence + 1,
            settled: settled_by_sync(newest, written_since),
            ..*header
        };
        if next.settled > header.settled {
            self.put_header(next)?;
            *header = next;
        }
        Ok(())
    }
}

/// The sums of a replica on this machine, to look at.
pub(crate) struct NearSums {
    file: File,
    coverage: Coverage,
    settled: Epoch,
}

impl NearSums {
    /// Opens the sums beside a data file, if there are some.
    pub(crate) fn beside(data: &Path) -> Option<NearSums> {
        let file = File::open(data.with_file_name(SUMS)).ok()?;
        let header = newest_header(&file)?;
        Some(NearSums {
            file,
            coverage: header.coverage,
            settled: header.settled,
        })
    }

    /// Up to which epoch bytes and sums were durable together when they were opened.
    pub(crate) fn settled(&self) -> Epoch {
        self.settled
    }

    pub(crate) fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// Reads slots if that needs no waiting for a disk, or is allowed to wait.
    pub(crate) fn load(&self, first: u64, slots: &mut [Slot], waits: bool) -> Option<()> {
        let flags = if waits {
            ReadWriteFlags::empty()
        } else {
            ReadWriteFlags::NOWAIT
        };
        load(&self.file, first, slots, flags).ok()
    }
}

fn place_of(block: u64) -> u64 {
    SLOTS_AT + block * (SLOT_BYTES as u64)
}

fn newest_header(file: &File) -> Option<Header> {
    let read = |at: &u64| {
        let mut bytes = [0; HEADER_BYTES];
        file.read_exact_at(&mut bytes, *at).ok()?;
        Header::decode(&bytes)
    };
    let found = HEADERS.iter().filter_map(read);
    found.max_by_key(|header| header.sequence)
}

/// What is behind the end of the file is slots of zeros.
fn load(
    file: &File,
    first: u64,
    slots: &mut [Slot],
    flags: ReadWriteFlags,
) -> std::result::Result<(), Errno> {
    let mut bytes = [0; SLOTS_MAX * SLOT_BYTES];
    for (done, part) in slots.chunks_mut(SLOTS_MAX).enumerate() {
        let from = first + u64::try_from(done * SLOTS_MAX).unwrap_or(0);
        let wanted = &mut bytes[..part.len() * SLOT_BYTES];
        let mut have = 0;
        while have < wanted.len() {
            let at = place_of(from) + u64::try_from(have).unwrap_or(0);
            let mut into = [IoSliceMut::new(&mut wanted[have..])];
            match rustix::io::preadv2(file, &mut into, at, flags) {
                Ok(0) => {
                    wanted[have..].fill(0);
                    break;
                }
                Ok(read) => have += read,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        for (slot, bytes) in part.iter_mut().zip(wanted.chunks_exact(SLOT_BYTES)) {
            let mut whole = [0; SLOT_BYTES];
            whole.copy_from_slice(bytes);
            *slot = Slot::from_bytes(whole);
        }
    }
    Ok(())
}
