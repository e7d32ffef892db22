//! Whether the log of an idle xfs was closed by a clean unmount.
//!
//! The superblock of xfs does not say so; the log does. It is a ring of 512-byte blocks. The first bytes of each block
//! hold the number of the round in which it was written, so the newest block is found by bisection. A clean unmount
//! ends the log with a record of one operation that says so. The driver looks for the same record when it mounts, and
//! replays the log if it is not there.
//!
//! A log that cannot be read is answered as not clean. If that is wrong, it costs a mount; the opposite mistake would
//! grow a torn filesystem.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{read, xfs};
use crate::error::{Context, Result};

const BLOCK: u64 = 512;
/// The first bytes of a record's header.
const HEADER_MAGIC: u32 = 0xfeed_babe;
/// A record has at most 256 KiB of data and eight blocks of header: its header is not further back.
const RECORD_BLOCKS_MAX: u64 = 520;
/// One block of header describes so many bytes of a record.
const HEADER_COVERS: u32 = 32 << 10;
const VERSION_2: u32 = 2;
const OPERATION_UNMOUNT: u8 = 0x20;

/// Whether the log of the xfs on that idle device ends with a clean unmount.
pub(crate) fn is_clean(device: &File, path: &Path) -> Result<bool> {
    let mut superblock = [0; xfs::SUPERBLOCK_BYTES];
    device
        .read_exact_at(&mut superblock, xfs::SUPERBLOCK_OFFSET)
        .context("read the superblock of", path)?;
    let Some((start, blocks)) = place(&superblock) else {
        return Ok(false);
    };
    let log = Log {
        blocks,
        read: |block: u64| {
            let mut bytes = [0; 512];
            device.read_exact_at(&mut bytes, start + block * BLOCK)?;
            Ok(bytes)
        },
    };
    log.ends_with_unmount().context("read the log of", path)
}

/// Where the log is, in bytes, and how many blocks of 512 bytes it has; `None` for a log on another device.
fn place(superblock: &[u8]) -> Option<(u64, u64)> {
    let block = u64::from(read::be32(superblock, 4)?);
    let start = read::be64(superblock, 48).filter(|start| *start != 0)?;
    let group_blocks = u64::from(read::be32(superblock, 84)?);
    let blocks = u64::from(read::be32(superblock, 96)?);
    // A block's number has its group's number above so many bits.
    let shift = u32::from(*superblock.get(124)?);
    let group = start.checked_shr(shift)?;
    let in_group = start.checked_sub(group.checked_shl(shift)?)?;
    let offset = group
        .checked_mul(group_blocks)?
        .checked_add(in_group)?
        .checked_mul(block)?;
    let blocks = blocks.checked_mul(block)? / BLOCK;
    (blocks > 1).then_some((offset, blocks))
}

struct Log<R> {
    blocks: u64,
    read: R,
}

impl<R: Fn(u64) -> io::Result<[u8; 512]>> Log<R> {
    fn ends_with_unmount(&self) -> io::Result<bool> {
        let Some(head) = self.head()? else {
            return Ok(false);
        };
        for back in 1..=RECORD_BLOCKS_MAX.min(self.blocks) {
            let at = (head + self.blocks - back) % self.blocks;
            let header = (self.read)(at)?;
            if read::be32(&header, 0) == Some(HEADER_MAGIC) {
                return self.is_unmount(&header, at, back);
            }
        }
        Ok(false)
    }

    /// Whether the record at `at`, `back` blocks before the head, is the one of an unmount and ends there.
    fn is_unmount(&self, header: &[u8; 512], at: u64, back: u64) -> io::Result<bool> {
        let number = |offset| read::be32(header, offset).unwrap_or_default();
        let (version, length, operations, size) = (number(8), number(12), number(40), number(320));
        let headers = match version & VERSION_2 != 0 && size > HEADER_COVERS {
            true => u64::from(size.div_ceil(HEADER_COVERS)),
            false => 1,
        };
        if operations != 1 || headers + u64::from(length).div_ceil(BLOCK) != back {
            return Ok(false);
        }
        let data = (self.read)((at + headers) % self.blocks)?;
        Ok(data[9] & OPERATION_UNMOUNT != 0)
    }

    /// The block that would be written next, found by where the round changes.
    fn head(&self) -> io::Result<Option<u64>> {
        let (first, last) = (self.round(0)?, self.round(self.blocks - 1)?);
        if first == last {
            // A whole round; or nothing was ever written.
            return Ok((first != 0).then_some(0));
        }
        if last != 0 && first != last.wrapping_add(1) {
            return Ok(None);
        }
        // `low` is of the first block's round, `high` is not.
        let (mut low, mut high) = (0, self.blocks - 1);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match self.round(middle)? {
                round if round == first => low = middle,
                round if round == last => high = middle,
                _ => return Ok(None),
            }
        }
        Ok(Some(high))
    }

    fn round(&self, block: u64) -> io::Result<u32> {
        let bytes = (self.read)(block)?;
        let number = |offset| read::be32(&bytes, offset).unwrap_or_default();
        // A header has its magic there, and the round behind it.
        Ok(match number(0) {
            HEADER_MAGIC => number(4),
            round => round,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A log of `rounds[i]` in block `i`, with an unmount record of two blocks that ends at `end`.
    fn clean(rounds: &[u32], end: usize, flags: u8) -> bool {
        let mut blocks: Vec<[u8; 512]> = rounds
            .iter()
            .map(|round| {
                let mut block = [0; 512];
                block[..4].copy_from_slice(&round.to_be_bytes());
                block
            })
            .collect();
        let count = blocks.len();
        let (header, data) = ((end + count - 2) % count, (end + count - 1) % count);
        let round = rounds[header].to_be_bytes();
        blocks[header][..4].copy_from_slice(&HEADER_MAGIC.to_be_bytes());
        blocks[header][4..8].copy_from_slice(&round);
        blocks[header][15] = 200;
        blocks[header][43] = 1;
        blocks[data][9] = flags;
        let log = Log {
            blocks: u64::try_from(count).unwrap(),
            read: |block: u64| Ok(blocks[usize::try_from(block).unwrap()]),
        };
        log.ends_with_unmount().unwrap()
    }

    #[test]
    fn the_unmount_record_counts_only_at_the_head() {
        // Fails if the head is missed by a block, if the ring does not wrap, or if an old record counts.
        let unmount = OPERATION_UNMOUNT;
        assert!(clean(&[7, 7, 7, 6, 6, 6, 6], 3, unmount));
        assert!(!clean(&[7, 7, 7, 6, 6, 6, 6], 3, 0));
        assert!(!clean(&[7, 7, 7, 7, 6, 6, 6], 3, unmount));
        assert!(clean(&[7, 7, 7, 7, 7], 0, unmount));
        assert!(clean(&[1, 1, 0, 0, 0, 0], 2, unmount));
        assert!(!clean(&[0, 0, 0, 0], 2, unmount));
        assert!(!clean(&[9, 9, 9, 6, 6, 6, 6], 3, unmount));
    }
}
