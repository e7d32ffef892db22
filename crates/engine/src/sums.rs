//! Checksums of blocks, by which a replica notices that its bytes have changed.
//!
//! A replica has a [`Slot`] for every block of 4 KiB: the CRC32C of what the block should hold, and of what it held
//! before. Both are *xor*ed with the CRC32C of a block of zeros, so a slot of zeros belongs to a block of zeros: a
//! hole in the data is a hole in the sums.
//!
//! # When a sum is believed
//!
//! A write changes two files, and nothing changes both at once. First the slot gets the new sum and keeps the last
//! one; then the bytes are written. So:
//!
//! - **A process that dies** leaves blocks that match their sum, except those of the one write that it was doing:
//!   these may match the sum before. A block that matches neither was not changed by us: it is rot. So are blocks that
//!   match the sum before and are more than one write. A copy that was zeroed, or that lost its last writes, does not
//!   pass for one whose process was killed.
//! - **A machine that loses its memory** leaves any mixture of bytes and slots that were written since both were
//!   synced. Syncing the sums with every flush would double the cost of a flush. Instead both are synced every few
//!   seconds, and when writes stop. Then an epoch is made durable: the sums are **settled** up to there. A region's
//!   stamp is durable before the first write of an epoch. So a region whose stamp is older than that epoch has not
//!   been written since, and its sums count. In the other regions, a block that matches neither sum has more likely
//!   lost its sum than rotted in those seconds, and taking it for rot could lose a flushed write to an older copy. Its
//!   bytes count, as they would without sums, and get a new sum.
//!
//! Both cases are sorted out when the replica is opened ([`sort_out`]), before anybody reads. A doubtful region that
//! still has rotten blocks is reported to the next coordinator as equal to no other (`Member::suspecting`), so that it
//! prefers another of several copies at the same key. From then on there is no doubt: a block that does not match its
//! sum is rot, is never returned, and is repaired from another copy.
//!
//! # What else is written
//!
//! A repair overwrites a stale region, whose bytes nobody reads until bytes and sums are synced together. A repair of
//! a region that is only damaged writes the same bytes again, except for the rotten ones; whatever a crash leaves of
//! that is right or is found again. A region that becomes stale, or counts again, by the decision of a takeover gets
//! that takeover's epoch as its stamp. It is in doubt after the next power loss.
//!
//! # Sums that are not known
//!
//! A replica that was made without sums, or whose sums were lost, gets a file in which a slot of zeros says nothing
//! ([`Coverage::Partial`]). Writes and repairs fill it.

use crate::proto::{Epoch, Meta, MetaChange, Region};

/// The bytes of a slot on the disk.
pub const SLOT_BYTES: usize = 8;

/// Takes the sums of blocks of one length.
#[derive(Clone, Copy, Debug)]
pub struct Summer {
    block_bytes: usize,
    of_zeros: u32,
}

impl Summer {
    /// For blocks of that length.
    pub fn new(block_bytes: usize) -> Summer {
        Summer {
            block_bytes,
            of_zeros: crc32c::crc32c(&vec![0; block_bytes]),
        }
    }

    /// The sum of one block.
    pub fn sum(&self, block: &[u8]) -> u32 {
        debug_assert_eq!(block.len(), self.block_bytes, "a sum is of a whole block");
        crc32c::crc32c(block) ^ self.of_zeros
    }

    /// The sums of blocks that follow each other.
    pub fn sums<'a>(&'a self, blocks: &'a [u8]) -> impl ExactSizeIterator<Item = u32> + 'a {
        blocks
            .chunks_exact(self.block_bytes)
            .map(|block| self.sum(block))
    }
}

/// What a replica knows of one block. Zeros are a block of zeros that was never anything else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// The sum of what the block should hold.
    pub sum: u32,
    /// The sum of what it held before the last write.
    pub before: u32,
}

/// Whether a slot of zeros says something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// Yes: that the block is zeros.
    Whole,
    /// No: nobody has looked at that block yet.
    Partial,
}

/// What happened to a replica before it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// At most its process died. Bytes and sums are as they were written.
    ProcessDied,
    /// The machine may have lost its memory.
    PowerLost,
}

impl Slot {
    /// The slot of a block that holds this sum and nothing else.
    pub fn of(sum: u32) -> Slot {
        Slot { sum, before: sum }
    }

    /// The slot while that sum is being written over this one.
    #[must_use]
    pub fn overwritten(self, sum: u32) -> Slot {
        Slot {
            sum,
            before: self.sum,
        }
    }

    /// Whether a block with that sum is as it should be, as far as that is known.
    pub fn admits(self, sum: u32, coverage: Coverage) -> bool {
        self.sum == sum || self.is_unknown(coverage)
    }

    /// Whether it says nothing about its block.
    pub fn is_unknown(self, coverage: Coverage) -> bool {
        coverage == Coverage::Partial && self == Slot::default()
    }

    /// The slot as bytes.
    pub fn to_bytes(self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[..4].copy_from_slice(&self.sum.to_le_bytes());
        bytes[4..].copy_from_slice(&self.before.to_le_bytes());
        bytes
    }

    /// The slot of those bytes.
    pub fn from_bytes(bytes: [u8; SLOT_BYTES]) -> Slot {
        let [a, b, c, d, e, f, g, h] = bytes;
        Slot {
            sum: u32::from_le_bytes([a, b, c, d]),
            before: u32::from_le_bytes([e, f, g, h]),
        }
    }
}

/// The most blocks of one write: an entry is at most 256 KiB long.
const WRITE_BLOCKS_MAX: u64 = 64;

/// A block of a region in doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// Which block of the replica.
    pub block: u64,
    /// What is known of it.
    pub slot: Slot,
    /// The sum of what it holds.
    pub sum: u32,
}

/// What was found when a replica was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SortedOut {
    /// The slots that blocks get.
    pub slots: Vec<(u64, Slot)>,
    /// The regions in doubt in which blocks do not match all the same.
    pub rotten: Vec<Region>,
}

/// Sorts out the blocks of a replica that is opened, so that from then on whatever does not match is rot.
/// `look` shows the blocks of a region that do not match their slots.
pub fn sort_out(
    meta: &Meta,
    settled: Epoch,
    ended: Ended,
    mut look: impl FnMut(Region) -> Vec<Doubt>,
) -> SortedOut {
    let mut sorted = SortedOut::default();
    let mut torn: Vec<(Region, Doubt)> = Vec::new();
    for region in doubtful(meta, settled) {
        let is_stale = meta.stale.contains_key(&region);
        let mut is_rotten = false;
        for doubt in look(region) {
            let is_before = doubt.slot.before == doubt.sum;
            if ended == Ended::PowerLost || is_before && is_stale {
                sorted.slots.push((doubt.block, Slot::of(doubt.sum)));
            } else if is_before {
                torn.push((region, doubt));
            } else {
                is_rotten = true;
            }
        }
        if is_rotten && !is_stale {
            sorted.rotten.push(region);
        }
    }
    let ends = torn.first().zip(torn.last());
    let is_one_write = ends.is_some_and(|(first, last)| {
        first.0 == last.0 && last.1.block - first.1.block < WRITE_BLOCKS_MAX
    });
    for (region, doubt) in torn {
        if is_one_write {
            sorted.slots.push((doubt.block, Slot::of(doubt.sum)));
        } else if !sorted.rotten.contains(&region) {
            sorted.rotten.push(region);
        }
    }
    sorted
}

/// The regions whose sums were perhaps not durable together with their bytes, if the sums are settled up to
/// that epoch.
pub fn doubtful(meta: &Meta, settled: Epoch) -> impl Iterator<Item = Region> + '_ {
    let regions = (0..).map(Region).zip(&meta.stamps);
    regions
        .filter(move |(region, stamp)| {
            let is_newer = **stamp >= settled && **stamp > Epoch::NEVER;
            is_newer || meta.stale.contains_key(region)
        })
        .map(|(region, _)| region)
}

/// No entry that is still to be applied has an epoch before this one: entries are applied in order, and this is
/// what a change of the meta data says of them. The stamps of repaired regions say nothing: they may be of
/// entries that are still to come.
pub fn newest_after(newest: Epoch, change: &MetaChange) -> Epoch {
    let is_repaired = |region: Region| change.stale.iter().any(|(of, _)| *of == region);
    let stamps = change.stamps.iter().filter(|(of, _)| !is_repaired(*of));
    let stamps = stamps.map(|(_, stamp)| *stamp);
    let durable = change.durable.map(|key| key.epoch);
    stamps.chain(durable).fold(newest, Epoch::max)
}

/// Up to which epoch sums may be called settled once bytes and sums have been synced.
///
/// `newest` is the least epoch that a write can have after the sync has begun. If there was no such write, the
/// regions of that epoch are settled too.
pub fn settled_by_sync(newest: Epoch, written_since: bool) -> Epoch {
    if written_since {
        newest
    } else {
        Epoch::from_raw(newest.get().saturating_add(1))
    }
}

/// Whether a write may go ahead: the region that it changes must not count as settled. The stamp of that
/// region is `newest` or later.
pub fn may_write(settled: Epoch, newest: Epoch) -> bool {
    settled <= newest
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::proto::{Config, Geometry, View};

    #[test]
    fn a_block_of_zeros_has_a_slot_of_zeros() {
        // Fails if a hole in the data needed bytes in the sums.
        let summer = Summer::new(4096);
        assert_eq!(Slot::of(summer.sum(&[0; 4096])), Slot::default());
        let mut block = [0; 4096];
        for bit in [0, 1, 4095 * 8 + 7] {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(summer.sum(&block), 0);
            block[bit / 8] = 0;
        }
        let slot = Slot { sum: 7, before: 9 };
        assert_eq!(Slot::from_bytes(slot.to_bytes()), slot);
    }

    fn replica(stamps: &[u64]) -> Meta {
        let geometry = Geometry {
            block_bytes: 16,
            region_bytes: 64,
        };
        let view = View::first(Config::majority([Uuid::nil()].into()));
        let mut meta = Meta::fresh(
            geometry,
            64 * u64::try_from(stamps.len()).unwrap_or(0),
            view,
        );
        meta.stamps = stamps.iter().map(|stamp| Epoch::from_raw(*stamp)).collect();
        meta
    }

    /// What becomes of these blocks (of regions with four blocks each) that hold these sums, in a replica that
    /// expects 7 and had 9 before.
    fn sorted(meta: &Meta, ended: Ended, found: &[(u64, u32)]) -> Vec<u64> {
        let slot = Slot { sum: 7, before: 9 };
        let look = |region: Region| {
            let here = found
                .iter()
                .filter(|(block, _)| block / 4 == u64::from(region.0));
            here.map(|(block, sum)| Doubt {
                block: *block,
                slot,
                sum: *sum,
            })
            .collect()
        };
        let sorted = sort_out(meta, Epoch::from_raw(5), ended, look);
        sorted.slots.into_iter().map(|(block, _)| block).collect()
    }

    #[test]
    fn of_blocks_in_doubt_a_dead_process_excuses_one_write_and_a_power_loss_all() {
        // Fails if rot is believed after the death of a process, or if a flushed write is taken for rot after
        // a power loss.
        use Ended::{PowerLost, ProcessDied};
        let meta = replica(&[4, 5, 6]);
        let none: [u64; 0] = [];
        assert_eq!(sorted(&meta, ProcessDied, &[(4, 9), (5, 9)]), [4, 5]);
        assert_eq!(sorted(&meta, ProcessDied, &[(4, 8), (5, 9)]), [5]);
        assert_eq!(
            sorted(&meta, ProcessDied, &[(4, 9), (8, 9)]),
            none,
            "two regions"
        );
        assert_eq!(
            sorted(&meta, ProcessDied, &[(0, 9)]),
            none,
            "a settled region"
        );
        assert_eq!(sorted(&meta, PowerLost, &[(0, 8), (4, 8), (8, 9)]), [4, 8]);
    }

    #[test]
    fn stamps_of_repaired_regions_say_nothing_of_the_entries_to_come() {
        // Fails if sums are called settled that a later entry of an earlier epoch still changes.
        let epoch = Epoch::from_raw;
        let change = MetaChange {
            stamps: vec![(Region(1), epoch(9)), (Region(2), epoch(6))],
            stale: vec![(Region(1), None)],
            ..MetaChange::default()
        };
        assert_eq!(newest_after(epoch(5), &change), epoch(6));
        assert_eq!(settled_by_sync(epoch(6), true), epoch(6));
        assert_eq!(settled_by_sync(epoch(6), false), epoch(7));
        assert!(!may_write(epoch(7), epoch(6)));
    }
}
