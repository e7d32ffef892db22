//! What is on a device, from its bytes alone.
//!
//! The answer guards mkfs, so it errs on one side only: a device is [`Content::Empty`] if nothing
//! known is at any known place *and* its first and last MiB are zero. Everything that is neither
//! empty nor a filesystem that grows is [`Content::Foreign`] and is left alone.
//!
//! Reading is bounded: two windows of a MiB and a few small places between them. Any bytes get an answer; none panics.

mod signatures;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use trellis_api::Bytes;
use uuid::Uuid;

use crate::error::{Context, Result};
use crate::filesystem::{FilesystemKind, Geometry, State};
use crate::sys::block;

/// How much of the beginning and of the end is read.
const WINDOW: u64 = 1 << 20;
/// Places between the windows where copies of superblocks are kept, and how much is read there:
/// btrfs's first mirror, ext's first backup with 4 KiB and with 1 KiB blocks, and the later places of
/// the second LUKS2 header.
const MIDDLE: [u64; 5] = [64 << 20, 128 << 20, 8193 << 10, 2 << 20, 4 << 20];
const MIDDLE_BYTES: u64 = 4096;

/// What is on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: no known signature, and zeros at both ends.
    Empty,
    /// A filesystem that Trellis can grow.
    Filesystem {
        /// Which.
        kind: FilesystemKind,
        /// Its size by its superblock.
        size: Bytes,
        /// Its identity.
        uuid: Uuid,
        /// How it was left.
        state: State,
        /// Its shape.
        geometry: Geometry,
    },
    /// Something else, never to be overwritten.
    Foreign {
        /// What, for a person.
        what: Foreign,
    },
}

/// Something that is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// A signature was recognised; the text names it with its article.
    Known(&'static str),
    /// The remains of a filesystem, or of one that was not finished.
    Torn(&'static str),
    /// Bytes that mean nothing to us, the first of them at this offset.
    Unrecognised {
        /// Where.
        offset: u64,
    },
}

impl fmt::Display for Foreign {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Foreign::Known(what) | Foreign::Torn(what) => out.write_str(what),
            Foreign::Unrecognised { offset } => write!(out, "unrecognised data at offset {offset}"),
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Content::Empty => out.write_str("nothing"),
            Content::Filesystem {
                kind, size, uuid, ..
            } => {
                write!(out, "the {kind} filesystem {uuid} of {size}")
            }
            Content::Foreign { what } => write!(out, "{what}"),
        }
    }
}

/// Looks at the device or file at `path`.
pub fn probe(path: &Path) -> Result<Content> {
    let file = block::open(path).context("open", path)?;
    probe_open(&file, path)
}

/// Looks at an open device or file; `path` is its name for errors.
pub fn probe_open(file: &File, path: &Path) -> Result<Content> {
    let size = match block::size(file) {
        Ok(size) => size.get(),
        // Not a block device: a plain file has its length.
        Err(_) => file.metadata().context("look at", path)?.len(),
    };
    let windows = Windows::read(size, |buffer, offset| file.read_exact_at(buffer, offset))
        .context("read", path)?;
    Ok(signatures::classify(&windows))
}

/// Looks at bytes in memory, as if they were a whole device.
pub fn probe_bytes(bytes: &[u8]) -> Content {
    let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let copied = Windows::read(size, |buffer, offset| {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let end = start.saturating_add(buffer.len());
        let part = bytes.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(part);
        Ok(())
    });
    match copied {
        Ok(windows) => signatures::classify(&windows),
        // The windows lie within the size by construction.
        Err(_) => Content::Foreign {
            what: Foreign::Unrecognised { offset: 0 },
        },
    }
}

/// The parts of a device that were read.
struct Windows {
    size: u64,
    parts: Vec<(u64, Vec<u8>)>,
}

impl Windows {
    fn read(size: u64, mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>) -> io::Result<Self> {
        let mut parts = Vec::new();
        let head = (0, size.min(WINDOW));
        let tail = (size.saturating_sub(WINDOW), size.min(WINDOW));
        let middle = MIDDLE
            .into_iter()
            .filter(|offset| {
                offset
                    .checked_add(MIDDLE_BYTES)
                    .is_some_and(|end| end <= size)
            })
            .map(|offset| (offset, MIDDLE_BYTES));
        for (offset, length) in [head, tail].into_iter().chain(middle) {
            let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
            read(&mut bytes, offset)?;
            parts.push((offset, bytes));
        }
        Ok(Windows { size, parts })
    }

    /// `length` bytes at `offset`, if they were read.
    fn get(&self, offset: u64, length: usize) -> Option<&[u8]> {
        self.parts.iter().find_map(|(start, bytes)| {
            let from = usize::try_from(offset.checked_sub(*start)?).ok()?;
            bytes.get(from..from.checked_add(length)?)
        })
    }

    /// Whether exactly these bytes are at `offset`.
    fn has(&self, offset: u64, magic: &[u8]) -> bool {
        self.get(offset, magic.len()) == Some(magic)
    }

    /// Where the first byte is that is not zero.
    fn first_data(&self) -> Option<u64> {
        let in_part = |(start, bytes): &(u64, Vec<u8>)| {
            let index = bytes.iter().position(|byte| *byte != 0)?;
            Some(start + u64::try_from(index).ok()?)
        };
        // The head and the tail only: bytes in the middle count by their signatures.
        self.parts.iter().take(2).filter_map(in_part).min()
    }
}

#[cfg(test)]
mod tests;
