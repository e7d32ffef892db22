//! The bytes of the disk that an image holds, in runs.

use std::io::Read;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
use ruzstd::decoding::StreamingDecoder;
use trellis_api::Bytes;

use super::{Compression, L1_ENTRY_BYTES, Qcow2Error, Qcow2Header};
use crate::medium::BytesAt;

/// The largest window that a compressed cluster may ask for. No compressor uses more than a cluster here; this is what
/// every decoder is advised to offer.
pub(super) const ZSTD_WINDOW_BYTES_MAX: u64 = 8 << 20;

const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ALL_ZEROS: u64 = 1;
const SECTOR: u64 = 512;
const SUBCLUSTERS: u64 = 32;

/// A part of the disk.
#[derive(Debug, PartialEq, Eq)]
pub enum Run<'a> {
    /// These bytes.
    Data(&'a [u8]),
    /// So many zeros.
    Zeros(u64),
}

/// An image that is being read.
pub struct Qcow2Image<'a> {
    file: &'a dyn BytesAt,
    header: Qcow2Header,
    file_bytes: u64,
    /// The second table that was used last, and its index.
    table: Option<(u64, Vec<u8>)>,
    cluster: Vec<u8>,
    packed: Vec<u8>,
}

/// What a second table says about a cluster.
enum Entry {
    Zeros,
    /// Where its bytes are, and which of its parts are there.
    Stored {
        at: u64,
        present: u32,
    },
    Compressed {
        at: u64,
        bytes: u64,
    },
}

impl<'a> Qcow2Image<'a> {
    /// Opens an image, if its header is as it should be.
    pub fn open(file: &'a dyn BytesAt) -> Result<Self, Qcow2Error> {
        let header = Qcow2Header::read(file)?;
        let file_bytes = file.size().map_err(Qcow2Error::Read)?;
        Ok(Qcow2Image {
            file,
            header,
            file_bytes,
            table: None,
            cluster: Vec::new(),
            packed: Vec::new(),
        })
    }

    /// The size of the disk.
    pub const fn virtual_size(&self) -> Bytes {
        self.header.virtual_size
    }

    /// What the disk holds from `offset` on, as far as one answer goes: the rest of a cluster, or all zeros of a table.
    pub fn run_at(&mut self, offset: u64) -> Result<Run<'_>, Qcow2Error> {
        let size = self.header.virtual_size;
        let left = size.get().checked_sub(offset).filter(|left| *left > 0);
        let left = left.ok_or(Qcow2Error::PastTheEnd { offset, size })?;
        let within = offset % self.header.cluster_bytes();
        if !self.load_table(offset)? {
            let covers = self.header.l2_covers();
            return Ok(Run::Zeros((covers - offset % covers).min(left)));
        }
        let whole = self.header.cluster_bytes();
        let rest = (whole - within).min(left);
        match self.entry(offset)? {
            Entry::Zeros => return Ok(Run::Zeros(rest)),
            Entry::Stored { at, present } => self.read_stored(offset, at, present)?,
            Entry::Compressed { at, bytes } => self.read_compressed(offset, at, bytes)?,
        }
        let start = usize::try_from(within).unwrap_or(usize::MAX);
        let length = usize::try_from(rest).unwrap_or(usize::MAX);
        let run = self.cluster.get(start..start.saturating_add(length));
        run.map(Run::Data).ok_or(damaged(offset, "a short cluster"))
    }

    /// Loads the second table for a place in the disk. Answers whether there is one.
    fn load_table(&mut self, offset: u64) -> Result<bool, Qcow2Error> {
        let index = offset / self.header.l2_covers();
        if self
            .table
            .as_ref()
            .is_some_and(|(loaded, _)| *loaded == index)
        {
            return Ok(true);
        }
        let mut entry = [0; 8];
        // The header was checked: the first table lies within the file and covers the disk.
        let at = self.header.l1_offset + index * L1_ENTRY_BYTES;
        self.read_whole(&mut entry, at)?;
        let at = u64::from_be_bytes(entry) & OFFSET_BITS;
        if at == 0 {
            return Ok(false);
        }
        let bytes = self.header.cluster_bytes();
        let end = at.checked_add(bytes);
        if !at.is_multiple_of(bytes) || end.is_none_or(|end| end > self.file_bytes) {
            return Err(damaged(offset, "a table outside the file"));
        }
        let (_, mut table) = self.table.take().unwrap_or_default();
        table.resize(usize::try_from(bytes).unwrap_or_default(), 0);
        self.read_whole(&mut table, at)?;
        self.table = Some((index, table));
        Ok(true)
    }

    fn entry(&self, offset: u64) -> Result<Entry, Qcow2Error> {
        let index = (offset / self.header.cluster_bytes()) % self.header.l2_entries();
        let start = usize::try_from(index * self.header.l2_entry_bytes()).unwrap_or(usize::MAX);
        let number = |at: usize| -> Option<u64> {
            let (_, table) = self.table.as_ref()?;
            let bytes = table.get(at..at.checked_add(8)?)?;
            bytes.try_into().ok().map(u64::from_be_bytes)
        };
        let outside = || damaged(offset, "an entry outside its table");
        let word = number(start).ok_or_else(outside)?;
        let parts = if self.header.subclusters {
            Some(number(start + 8).ok_or_else(outside)?)
        } else {
            None
        };
        if word & COMPRESSED != 0 {
            return match parts {
                Some(parts) if parts != 0 => {
                    Err(damaged(offset, "a compressed cluster with parts"))
                }
                _ => Ok(self.compressed(word)),
            };
        }
        let at = word & OFFSET_BITS;
        let present = match parts {
            Some(parts) => {
                present_parts(parts).ok_or(damaged(offset, "parts that contradict themselves"))?
            }
            None if word & ALL_ZEROS != 0 && self.header.version >= 3 => 0,
            None if at == 0 => 0,
            None => u32::MAX,
        };
        match (at, present) {
            (_, 0) => Ok(Entry::Zeros),
            (0, _) => Err(damaged(offset, "a cluster without a place")),
            (at, present) => Ok(Entry::Stored { at, present }),
        }
    }

    /// The place of a compressed cluster takes the lower bits, and its sectors beyond the first the bits above.
    fn compressed(&self, word: u64) -> Entry {
        let place_bits = 62 - (self.header.cluster_bits - 8);
        let at = word & ((1 << place_bits) - 1);
        let more = (word & (COMPRESSED - 1)) >> place_bits;
        let bytes = (more + 1) * SECTOR - at % SECTOR;
        Entry::Compressed { at, bytes }
    }

    fn read_stored(&mut self, offset: u64, at: u64, present: u32) -> Result<(), Qcow2Error> {
        if !at.is_multiple_of(self.header.cluster_bytes()) || at >= self.file_bytes {
            return Err(damaged(offset, "a cluster outside the file"));
        }
        let whole = usize::try_from(self.header.cluster_bytes()).unwrap_or_default();
        let mut cluster = std::mem::take(&mut self.cluster);
        cluster.resize(whole, 0);
        let found = self.file.read(&mut cluster, at).map_err(Qcow2Error::Read)?;
        // The last cluster of a file may end early; what is missing reads as zeros.
        cluster[found..].fill(0);
        let part = whole / usize::try_from(SUBCLUSTERS).unwrap_or(1);
        for (index, bytes) in cluster.chunks_mut(part.max(1)).enumerate().take(32) {
            if present >> index & 1 == 0 {
                bytes.fill(0);
            }
        }
        self.cluster = cluster;
        Ok(())
    }

    fn read_compressed(&mut self, offset: u64, at: u64, bytes: u64) -> Result<(), Qcow2Error> {
        let bad = || damaged(offset, "a compressed cluster that cannot be unpacked");
        // Twice a cluster is more than any compressor makes of one.
        if at >= self.file_bytes || bytes > 2 * self.header.cluster_bytes() {
            return Err(damaged(offset, "a compressed cluster outside the file"));
        }
        let length = usize::try_from(bytes).map_err(|_| bad())?;
        self.packed.resize(length, 0);
        let mut packed = std::mem::take(&mut self.packed);
        let found = self.file.read(&mut packed, at).map_err(Qcow2Error::Read)?;
        let whole = usize::try_from(self.header.cluster_bytes()).map_err(|_| bad())?;
        self.cluster.clear();
        self.cluster.resize(whole, 0);
        let unpacked = match self.header.compression {
            Compression::Deflate => unpack_deflate(&packed[..found], &mut self.cluster),
            Compression::Zstd => unpack_zstd(&packed[..found], &mut self.cluster),
        };
        self.packed = packed;
        unpacked.ok_or_else(bad)
    }

    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        let table = self.table.as_ref().map_or(0, |(_, table)| table.capacity());
        table + self.cluster.capacity() + self.packed.capacity()
    }

    fn read_whole(&self, buffer: &mut [u8], at: u64) -> Result<(), Qcow2Error> {
        self.file.read_whole(buffer, at).map_err(Qcow2Error::Read)
    }
}

/// Which of a cluster's 32 parts have bytes. The lower half of the word says so, the upper half which are zeros.
fn present_parts(word: u64) -> Option<u32> {
    let present = u32::try_from(word & u64::from(u32::MAX)).ok()?;
    let zeros = u32::try_from(word >> 32).ok()?;
    (present & zeros == 0).then_some(present)
}

/// Fills `cluster` exactly, or fails.
fn unpack_deflate(packed: &[u8], cluster: &mut [u8]) -> Option<()> {
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let mut state = Box::new(DecompressorOxide::new());
    let (status, _, written) = decompress(&mut state, packed, cluster, 0, flags);
    let ended = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    (ended && written == cluster.len()).then_some(())
}

/// Fills `cluster` exactly, or fails.
fn unpack_zstd(packed: &[u8], cluster: &mut [u8]) -> Option<()> {
    let decoder = StreamingDecoder::new_with_max_window_size(packed, ZSTD_WINDOW_BYTES_MAX);
    decoder.ok()?.read_exact(cluster).ok()
}

const fn damaged(offset: u64, what: &'static str) -> Qcow2Error {
    Qcow2Error::Damaged { offset, what }
}
