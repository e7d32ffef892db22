//! qcow2 images: what their header says, and their bytes.
//!
//! An image comes from a stranger. QEMU believes its header: a backing file or a data file named there is opened, whatever
//! it is. So the header is read here first, and an image that refers to anything outside itself is refused, as is one whose
//! tables do not lie within it.
//!
//! **Why the clusters are read here too**, and not by `qemu-img convert`. The copy onto a persistent root must be
//! able to stop, report and start again at any byte, and must write to a descriptor that the caller holds, at an offset; a
//! program that is handed paths can do neither. Reading takes two tables and two kinds of compression. It is done in safe
//! Rust with bounded memory, whereas parsers of image formats in C have a history. The tests compare every kind of
//! cluster with what `qemu-img` makes of the same image.
//!
//! Invariant: whatever the bytes are, there is an answer or an error. At most [`MEMORY_BYTES_MAX`] are held.

mod reader;

#[cfg(test)]
mod tests;

use std::io;

use trellis_api::Bytes;

use crate::medium::BytesAt;

pub use reader::{Qcow2Image, Run};

/// What a file of this kind begins with.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";

const HEADER_V2_BYTES: u64 = 72;
const HEADER_V3_BYTES: u64 = 104;
/// What is read of a header. Extensions lie within the first cluster, whose size the header says.
const HEADER_BYTES_MAX: usize = 112;
/// A header is longer than this only by mistake or malice.
const HEADER_LENGTH_MAX: u64 = 4096;

const CLUSTER_BITS_MIN: u32 = 9;
const CLUSTER_BITS_MAX: u32 = 21;
/// With subclusters a cluster has 32 of at least a sector each.
const CLUSTER_BITS_MIN_EXTENDED: u32 = 14;

/// QEMU's own limit for the first table.
const L1_BYTES_MAX: u64 = 32 << 20;
const L1_ENTRY_BYTES: u64 = 8;

/// The most that reading an image holds in memory: a table, a cluster, what a cluster is unpacked from, and the window of
/// the decompressor.
pub const MEMORY_BYTES_MAX: u64 = 4 * (1 << CLUSTER_BITS_MAX) + reader::ZSTD_WINDOW_BYTES_MAX;

const EXTENSIONS_MAX: usize = 64;

/// Features that a reader must know.
mod incompatible {
    /// Reference counts may be wrong. A reader does not use them.
    pub const DIRTY: u64 = 1 << 0;
    pub const CORRUPT: u64 = 1 << 1;
    pub const DATA_FILE: u64 = 1 << 2;
    pub const COMPRESSION: u64 = 1 << 3;
    pub const SUBCLUSTERS: u64 = 1 << 4;
    pub const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | SUBCLUSTERS;
}

/// Header extensions.
mod extension {
    pub const END: u32 = 0;
    pub const DATA_FILE_NAME: u32 = 0x4441_5441;
    pub const ENCRYPTION: u32 = 0x0537_be77;
}

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Deflate, without a header.
    Deflate,
    /// Zstandard.
    Zstd,
}

/// What the header of an image says, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qcow2Header {
    /// 2 or 3.
    pub version: u32,
    /// The size of the disk that the image holds.
    pub virtual_size: Bytes,
    /// The size of a cluster, as a power of two.
    pub cluster_bits: u32,
    /// How its compressed clusters are compressed.
    pub compression: Compression,
    /// Whether clusters have parts of their own.
    pub subclusters: bool,
    /// Where the first table is.
    l1_offset: u64,
}

/// Why an image is not used.
#[derive(Debug, thiserror::Error)]
pub enum Qcow2Error {
    /// It cannot be read.
    #[error("the image cannot be read")]
    Read(#[source] io::Error),
    /// It is something else.
    #[error("the image is not qcow2")]
    NotQcow2,
    /// A version that nobody knows.
    #[error("the image is qcow2 of version {version}; 2 and 3 are known")]
    Version {
        /// Which.
        version: u32,
    },
    /// It builds on another file.
    #[error(
        "the image needs a backing file, which would be read from this machine; make a whole one with `qemu-img convert`"
    )]
    BackingFile,
    /// Its data is in another file.
    #[error(
        "the image keeps its data in another file, which would be read from this machine; make a whole one with `qemu-img convert`"
    )]
    DataFile,
    /// It is encrypted.
    #[error("the image is encrypted; decrypt it with `qemu-img convert`")]
    Encrypted,
    /// It says itself that it is damaged.
    #[error("the image is marked as corrupt; `qemu-img check -r all` may repair it")]
    Corrupt,
    /// It has features that nobody knows.
    #[error("the image needs features that are not known here (bits {bits:#x})")]
    UnknownFeatures {
        /// The bits that are not known.
        bits: u64,
    },
    /// A compression that nobody knows.
    #[error("the image is compressed in a way that is not known here ({kind})")]
    UnknownCompression {
        /// Its number.
        kind: u8,
    },
    /// The disk in it has no bytes, or more than a volume can have.
    #[error("the image holds a disk of {bytes} bytes; a disk has between 1 and {} bytes", Bytes::VOLUME_MAX.get())]
    Size {
        /// What it says.
        bytes: u64,
    },
    /// A part of it is where none can be.
    #[error("the image is damaged: its {part} cannot be as the header says")]
    Lies {
        /// Which part.
        part: &'static str,
    },
    /// A place in the disk has no readable bytes.
    #[error("the image is damaged: the bytes at {offset} of its disk cannot be found ({what})")]
    Damaged {
        /// Where in the disk.
        offset: u64,
        /// What is wrong there.
        what: &'static str,
    },
    /// Somebody asked for bytes past the end.
    #[error("there is nothing at {offset} in a disk of {size}")]
    PastTheEnd {
        /// Where.
        offset: u64,
        /// The size of the disk.
        size: Bytes,
    },
}

impl Qcow2Header {
    /// Reads and checks the header of an image.
    pub fn read(image: &dyn BytesAt) -> Result<Qcow2Header, Qcow2Error> {
        let length = image.size().map_err(Qcow2Error::Read)?;
        let mut bytes = [0; HEADER_BYTES_MAX];
        let found = image.read(&mut bytes, 0).map_err(Qcow2Error::Read)?;
        if bytes[..4] != MAGIC {
            return Err(Qcow2Error::NotQcow2);
        }
        let found = u64::try_from(found).unwrap_or_default();
        let fields = Fields(&bytes);
        let header = match fields.u32(4) {
            2 if found >= HEADER_V2_BYTES => fields.version_2()?,
            3 if found >= HEADER_V3_BYTES => fields.version_3()?,
            2 | 3 => return Err(Qcow2Error::Lies { part: "header" }),
            version => return Err(Qcow2Error::Version { version }),
        };
        fields.check_tables(&header, length)?;
        check_extensions(image, &header, fields.header_length())?;
        Ok(header)
    }

    /// The size of a cluster.
    pub const fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    const fn l2_entry_bytes(&self) -> u64 {
        if self.subclusters { 16 } else { 8 }
    }

    /// How many clusters a second table names.
    const fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / self.l2_entry_bytes()
    }

    /// How much of the disk a second table covers.
    const fn l2_covers(&self) -> u64 {
        self.l2_entries() * self.cluster_bytes()
    }
}

/// The fields of a header by their offsets. All numbers are big-endian.
struct Fields<'a>(&'a [u8; HEADER_BYTES_MAX]);

impl Fields<'_> {
    fn u32(&self, at: usize) -> u32 {
        let bytes = self.0[at..at + 4].try_into();
        bytes.map_or(0, u32::from_be_bytes)
    }

    fn u64(&self, at: usize) -> u64 {
        let bytes = self.0[at..at + 8].try_into();
        bytes.map_or(0, u64::from_be_bytes)
    }

    fn header_length(&self) -> u64 {
        if self.u32(4) == 2 {
            HEADER_V2_BYTES
        } else {
            u64::from(self.u32(100))
        }
    }

    fn version_2(&self) -> Result<Qcow2Header, Qcow2Error> {
        if self.u64(8) != 0 || self.u32(16) != 0 {
            return Err(Qcow2Error::BackingFile);
        }
        if self.u32(32) != 0 {
            return Err(Qcow2Error::Encrypted);
        }
        let size = self.u64(24);
        let virtual_size = Some(Bytes::new(size))
            .filter(|size| (Bytes::new(1)..=Bytes::VOLUME_MAX).contains(size))
            .ok_or(Qcow2Error::Size { bytes: size })?;
        let cluster_bits = self.u32(20);
        if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits) {
            let part = "cluster size";
            return Err(Qcow2Error::Lies { part });
        }
        Ok(Qcow2Header {
            version: self.u32(4),
            virtual_size,
            cluster_bits,
            compression: Compression::Deflate,
            subclusters: false,
            l1_offset: self.u64(40),
        })
    }

    fn version_3(&self) -> Result<Qcow2Header, Qcow2Error> {
        // What the features say about other files counts before anything else.
        let features = self.u64(72);
        if features & incompatible::DATA_FILE != 0 {
            return Err(Qcow2Error::DataFile);
        }
        let mut header = self.version_2()?;
        if features & incompatible::CORRUPT != 0 {
            return Err(Qcow2Error::Corrupt);
        }
        if features & !incompatible::KNOWN != 0 {
            let bits = features & !incompatible::KNOWN;
            return Err(Qcow2Error::UnknownFeatures { bits });
        }
        let length = self.header_length();
        if !(HEADER_V3_BYTES..=HEADER_LENGTH_MAX).contains(&length)
            || length > header.cluster_bytes()
        {
            let part = "header length";
            return Err(Qcow2Error::Lies { part });
        }
        let named = features & incompatible::COMPRESSION != 0;
        let kind = if length > HEADER_V3_BYTES {
            self.0[104]
        } else {
            0
        };
        header.compression = match (kind, named) {
            (0, _) => Compression::Deflate,
            (1, true) => Compression::Zstd,
            (kind, _) => return Err(Qcow2Error::UnknownCompression { kind }),
        };
        header.subclusters = features & incompatible::SUBCLUSTERS != 0;
        if header.subclusters && header.cluster_bits < CLUSTER_BITS_MIN_EXTENDED {
            let part = "cluster size";
            return Err(Qcow2Error::Lies { part });
        }
        Ok(header)
    }

    /// The tables that a reader or QEMU follows lie within the file, on whole clusters, and are large enough.
    fn check_tables(&self, header: &Qcow2Header, length: u64) -> Result<(), Qcow2Error> {
        let is_within = |offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes);
            let aligned = offset.is_multiple_of(header.cluster_bytes()) && offset != 0;
            aligned && end.is_some_and(|end| end <= length)
        };
        let l1_bytes = u64::from(self.u32(36)) * L1_ENTRY_BYTES;
        let needed = header.virtual_size.get().div_ceil(header.l2_covers()) * L1_ENTRY_BYTES;
        if l1_bytes > L1_BYTES_MAX || l1_bytes < needed || !is_within(header.l1_offset, l1_bytes) {
            let part = "first table";
            return Err(Qcow2Error::Lies { part });
        }
        // The table of reference counts is not read here. QEMU reads it.
        let counts = u64::from(self.u32(56)) * header.cluster_bytes();
        if counts == 0 || !is_within(self.u64(48), counts) {
            let part = "table of reference counts";
            return Err(Qcow2Error::Lies { part });
        }
        Ok(())
    }
}

/// Extensions may name a data file or describe encryption as well.
fn check_extensions(
    image: &dyn BytesAt,
    header: &Qcow2Header,
    from: u64,
) -> Result<(), Qcow2Error> {
    let part = "header extensions";
    let mut at = from;
    for _ in 0..EXTENSIONS_MAX {
        let mut head = [0; 8];
        if at + 8 > header.cluster_bytes() {
            return Ok(());
        }
        // A version 2 image may be shorter than its first cluster says; nothing is nothing.
        let found = image.read(&mut head, at).map_err(Qcow2Error::Read)?;
        let number = |at: usize| head[at..at + 4].try_into().map_or(0, u32::from_be_bytes);
        let (kind, length) = (number(0), u64::from(number(4)));
        if found < head.len() || kind == extension::END {
            return Ok(());
        }
        match kind {
            extension::DATA_FILE_NAME => return Err(Qcow2Error::DataFile),
            extension::ENCRYPTION => return Err(Qcow2Error::Encrypted),
            _ => {}
        }
        at = (at + 8)
            .checked_add(length.next_multiple_of(8))
            .filter(|end| *end <= header.cluster_bytes())
            .ok_or(Qcow2Error::Lies { part })?;
    }
    Err(Qcow2Error::Lies { part })
}
