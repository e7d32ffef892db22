//! The superblock: one block of 4 KiB that says which bytes a replica holds and how many.
//!
//! This file knows the encoding and nothing about files. Everything that is decoded has passed the checksum and the
//! checks that [`Superblock::encode`] asserts before it writes.

use std::fmt;

use rustix::io::Errno;
use trellis_api::Bytes;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{BLOCK, Identity, validate_size};

/// The length of a superblock in bytes.
pub(super) const LENGTH: usize = 4096;

const MAGIC: [u8; 8] = *b"TRELLISR";
/// The first format. It does not say what the replica's memory must be; everything else is in the same place.
const VERSION_WITHOUT_MEMORY: u32 = 1;
const VERSION: u32 = 2;

/// What a reader must know of to make sense of a replica. A reader that does not know all of it refuses.
const FEATURES_KNOWN: u64 = FEATURE_SUMS;

/// Every write changes a sum as well. A reader that did not would leave sums behind that make good bytes look rotten.
const FEATURE_SUMS: u64 = 1;

/// Counters stay below this, so that adding one cannot overflow. Nobody counts that far; a block
/// that claims to have is nonsense.
const COUNTER_MAX: u64 = 1 << 62;

const _: () = assert!(size_of::<OnDisk>() == LENGTH && BLOCK.get() == 4096);

/// Format version 2, and version 1 with zeros behind the slot. All numbers are little-endian. The checksum is the
/// CRC32C of the whole block with the checksum's own field zero.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OnDisk {
    magic: [u8; 8],
    version: U32,
    checksum: U32,
    volume: [u8; 16],
    replica: [u8; 16],
    generation: U64,
    size_version: U64,
    size: U64,
    data_synced: U64,
    sequence: U64,
    slot: u8,
    padding: [u8; 7],
    features: U64,
    owner: U64,
    meta_sequence: U64,
    reserved: [u8; LENGTH - 120],
}

/// Which of the two superblocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    A,
    B,
}

impl Slot {
    pub(super) const BOTH: [Slot; 2] = [Slot::A, Slot::B];

    pub(super) const fn other(self) -> Slot {
        match self {
            Slot::A => Slot::B,
            Slot::B => Slot::A,
        }
    }

    pub(super) const fn index(self) -> usize {
        match self {
            Slot::A => 0,
            Slot::B => 1,
        }
    }

    pub(super) const fn file_name(self) -> &'static str {
        match self {
            Slot::A => "superblock.a",
            Slot::B => "superblock.b",
        }
    }

    const fn mark(self) -> u8 {
        match self {
            Slot::A => b'A',
            Slot::B => b'B',
        }
    }
}

/// What a superblock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    pub(super) identity: Identity,
    /// The fence: which owner of the volume this replica obeys. Zero until there was one.
    pub(super) generation: u64,
    /// Counts the sizes that this replica has had.
    pub(super) size_version: u64,
    pub(super) size: Bytes,
    /// The length to which this module has synced the data file. The file may well be longer.
    pub(super) data_synced: Bytes,
    /// Counts superblocks. The same number in both slots means the same superblock in both.
    pub(super) sequence: u64,
    /// What the replica's memory must be. Nothing is known of one that an earlier format has left.
    pub(super) memory: Option<Memory>,
    /// Whether the replica keeps sums of its blocks.
    pub(super) has_sums: bool,
}

/// What a replica must be found to remember: meta data that are older, or not there, were lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Which coordinator of the generation it obeys.
    pub(super) owner: u64,
    /// The number of the last change of the meta data, at least.
    pub(super) meta_sequence: u64,
}

impl Superblock {
    /// The superblock of a replica that has just been made, with its data file synced.
    pub(super) fn first(identity: Identity, size: Bytes) -> Superblock {
        Superblock {
            identity,
            generation: 0,
            size_version: 1,
            size,
            data_synced: size,
            sequence: 1,
            memory: Some(Memory::default()),
            has_sums: false,
        }
    }

    /// The superblock that follows this one when the replica is raised to `size`.
    pub(super) fn raised(&self, size: Bytes, data_synced: Bytes) -> Superblock {
        assert!(size > self.size, "a superblock was about to shrink");
        Superblock {
            size_version: self.size_version + 1,
            size,
            data_synced: data_synced.max(self.data_synced),
            sequence: self.sequence + 1,
            ..*self
        }
    }

    /// The superblock that follows this one when nothing but these fields changes.
    pub(super) fn followed(&self, change: impl FnOnce(&mut Superblock)) -> Superblock {
        let mut next = *self;
        change(&mut next);
        next.sequence = self.sequence + 1;
        next
    }

    /// Whether a coordinator was promised something: then there is a memory to lose. Nothing is known of a replica
    /// that an earlier format has left.
    pub(super) fn has_served(&self) -> Option<bool> {
        self.memory.map(|_| self.generation > 0)
    }

    pub(super) fn encode(&self, slot: Slot) -> [u8; LENGTH] {
        assert!(
            self.nonsense().is_none(),
            "a superblock was about to be written that cannot be read"
        );
        let memory = self.memory.unwrap_or_default();
        let mut block = OnDisk {
            magic: MAGIC,
            version: U32::new(match self.memory {
                Some(_) => VERSION,
                None => VERSION_WITHOUT_MEMORY,
            }),
            checksum: U32::ZERO,
            volume: self.identity.volume.into_bytes(),
            replica: self.identity.replica.into_bytes(),
            generation: U64::new(self.generation),
            size_version: U64::new(self.size_version),
            size: U64::new(self.size.get()),
            data_synced: U64::new(self.data_synced.get()),
            sequence: U64::new(self.sequence),
            slot: slot.mark(),
            padding: [0; 7],
            features: U64::new(if self.has_sums { FEATURE_SUMS } else { 0 }),
            owner: U64::new(memory.owner),
            meta_sequence: U64::new(memory.meta_sequence),
            reserved: FromZeros::new_zeroed(),
        };
        block.checksum = U32::new(crc32c::crc32c(block.as_bytes()));
        zerocopy::transmute!(block)
    }

    pub(super) fn decode(bytes: [u8; LENGTH], slot: Slot) -> Result<Superblock, Fault> {
        let mut block: OnDisk = zerocopy::transmute!(bytes);
        if block.magic != MAGIC {
            return Err(Fault::Magic);
        }
        let stored = block.checksum.get();
        block.checksum = U32::ZERO;
        let computed = crc32c::crc32c(block.as_bytes());
        if stored != computed {
            return Err(Fault::Checksum { stored, computed });
        }
        // Only now, so that a flipped bit in the version is a flipped bit and not a later Trellis.
        let version = block.version.get();
        if !(VERSION_WITHOUT_MEMORY..=VERSION).contains(&version) {
            return Err(Fault::Version { version });
        }
        let unknown = block.features.get() & !FEATURES_KNOWN;
        if unknown != 0 {
            return Err(Fault::Features { unknown });
        }
        if block.slot != slot.mark() {
            return Err(Fault::OtherSlot);
        }
        let superblock = Superblock {
            identity: Identity {
                volume: Uuid::from_bytes(block.volume),
                replica: Uuid::from_bytes(block.replica),
            },
            generation: block.generation.get(),
            size_version: block.size_version.get(),
            size: Bytes::new(block.size.get()),
            data_synced: Bytes::new(block.data_synced.get()),
            sequence: block.sequence.get(),
            memory: (version != VERSION_WITHOUT_MEMORY).then(|| Memory {
                owner: block.owner.get(),
                meta_sequence: block.meta_sequence.get(),
            }),
            has_sums: block.features.get() & FEATURE_SUMS != 0,
        };
        let memory_used =
            block.owner.get() != 0 || block.meta_sequence.get() != 0 || block.features.get() != 0;
        let reserved_used = block
            .reserved
            .iter()
            .chain(&block.padding)
            .any(|byte| *byte != 0)
            || superblock.memory.is_none() && memory_used;
        match superblock.nonsense() {
            Some(field) => Err(Fault::Nonsense { field }),
            None if reserved_used => Err(Fault::Nonsense { field: "reserved" }),
            None => Ok(superblock),
        }
    }

    /// The field that cannot be as it is, if there is one. Asked before a write and after a read.
    fn nonsense(&self) -> Option<&'static str> {
        if validate_size(self.size).is_err() {
            Some("size")
        } else if self.data_synced > self.size {
            Some("data_synced")
        } else if self.generation >= COUNTER_MAX {
            Some("generation")
        } else if !(1..COUNTER_MAX).contains(&self.size_version) {
            Some("size_version")
        } else if !(1..COUNTER_MAX).contains(&self.sequence) {
            Some("sequence")
        } else if self
            .memory
            .is_some_and(|it| it.meta_sequence >= COUNTER_MAX)
        {
            Some("meta_sequence")
        } else {
            None
        }
    }
}

/// What is wrong with a superblock. Reads on after the name of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There is no such file.
    Absent,
    /// The disk does not give it back.
    Unreadable {
        /// What the disk says.
        errno: Errno,
    },
    /// The file is not one block long.
    Length {
        /// How long it is.
        length: Bytes,
    },
    /// It does not begin like a superblock.
    Magic,
    /// Its checksum is wrong.
    Checksum {
        /// The checksum that it carries.
        stored: u32,
        /// The checksum that its bytes have.
        computed: u32,
    },
    /// It is whole, and in a format that this Trellis does not know.
    Version {
        /// The format version.
        version: u32,
    },
    /// It is whole, and says that a reader must know of something that this Trellis does not know.
    Features {
        /// The unknown ones, as bits.
        unknown: u64,
    },
    /// It is whole, and is the other file's superblock.
    OtherSlot,
    /// It is whole, and says something that cannot be.
    Nonsense {
        /// The field that says it.
        field: &'static str,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Absent => write!(out, "is missing"),
            Fault::Unreadable { errno } => write!(out, "cannot be read ({errno})"),
            Fault::Length { length } => write!(out, "has a length of {length} instead of {BLOCK}"),
            Fault::Magic => write!(out, "does not begin like a superblock"),
            Fault::Checksum { stored, computed } => {
                write!(
                    out,
                    "has the checksum {stored:08x} where its bytes have {computed:08x}"
                )
            }
            Fault::Version { version } => write!(out, "has the unknown format version {version}"),
            Fault::Features { unknown } => {
                write!(out, "needs features that are unknown here ({unknown:#x})")
            }
            Fault::OtherSlot => write!(out, "is a copy of the other superblock file"),
            Fault::Nonsense { field } => {
                write!(out, "has an impossible value in its field {field}")
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sample() -> Superblock {
        let identity = Identity {
            volume: Uuid::from_u128(1),
            replica: Uuid::from_u128(2),
        };
        let memory = Memory {
            owner: 5,
            meta_sequence: 6,
        };
        Superblock {
            memory: Some(memory),
            has_sums: true,
            ..Superblock::first(identity, Bytes::MIB).raised(Bytes::GIB, Bytes::ZERO)
        }
    }

    fn crc_of(mut bytes: [u8; LENGTH]) -> u32 {
        bytes[12..16].fill(0);
        crc32c::crc32c(&bytes)
    }

    /// Changes fields of an encoded superblock and gives it a right checksum again.
    fn forge(change: impl FnOnce(&mut OnDisk)) -> [u8; LENGTH] {
        let mut block: OnDisk = zerocopy::transmute!(sample().encode(Slot::A));
        change(&mut block);
        block.checksum = U32::ZERO;
        block.checksum = U32::new(crc32c::crc32c(block.as_bytes()));
        zerocopy::transmute!(block)
    }

    #[test]
    fn the_format_stays_where_it_is() {
        // Fails if a field moves, which would make every existing replica unreadable.
        let bytes = sample().encode(Slot::B);
        assert_eq!(&bytes[..8], b"TRELLISR");
        assert_eq!(bytes[8..12], 2u32.to_le_bytes());
        assert_eq!(bytes[16..32], 1u128.to_be_bytes());
        assert_eq!(bytes[32..48], 2u128.to_be_bytes());
        assert_eq!(bytes[48..56], 0u64.to_le_bytes());
        assert_eq!(bytes[56..64], 2u64.to_le_bytes());
        assert_eq!(bytes[64..72], (1u64 << 30).to_le_bytes());
        assert_eq!(bytes[72..80], (1u64 << 20).to_le_bytes());
        assert_eq!(bytes[80..88], 2u64.to_le_bytes());
        assert_eq!(bytes[88], b'B');
        assert_eq!(bytes[96..104], 1u64.to_le_bytes());
        assert_eq!(bytes[104..112], 5u64.to_le_bytes());
        assert_eq!(bytes[112..120], 6u64.to_le_bytes());
        assert_eq!(bytes[12..16], crc_of(bytes).to_le_bytes());
        // As the first format had it, to the last bit.
        let first = Superblock {
            memory: None,
            has_sums: false,
            ..sample()
        };
        let bytes = first.encode(Slot::B);
        assert_eq!(bytes[8..12], 1u32.to_le_bytes());
        assert_eq!(bytes[12..16], 0x7560_ee04u32.to_le_bytes());
        assert_eq!(Superblock::decode(bytes, Slot::B), Ok(first));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        // Fails if a bit of the block is outside both the magic and the checksum.
        let good = sample().encode(Slot::A);
        for bit in 0..LENGTH * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let fault = Superblock::decode(bad, Slot::A).unwrap_err();
            assert!(
                matches!(fault, Fault::Magic | Fault::Checksum { .. }),
                "bit {bit}: {fault}"
            );
        }
        assert_eq!(Superblock::decode(good, Slot::A), Ok(sample()));
    }

    #[test]
    fn a_whole_block_that_says_the_impossible_is_a_fault_and_not_a_panic() {
        // Fails if a decoded value could overflow, shrink below its own floor, or be misaligned.
        let nonsense = |bytes| {
            matches!(
                Superblock::decode(bytes, Slot::A),
                Err(Fault::Nonsense { .. })
            )
        };
        assert!(nonsense(forge(|block| block.size = U64::new(4097))));
        assert!(nonsense(forge(|block| block.size = U64::ZERO)));
        assert!(nonsense(forge(
            |block| block.size = U64::new(u64::MAX - 4095)
        )));
        assert!(nonsense(forge(
            |block| block.data_synced = U64::new((1 << 30) + 4096)
        )));
        assert!(nonsense(forge(|block| block.sequence = U64::new(u64::MAX))));
        assert!(nonsense(forge(|block| block.sequence = U64::ZERO)));
        assert!(nonsense(forge(
            |block| block.size_version = U64::new(u64::MAX)
        )));
        assert!(nonsense(forge(
            |block| block.generation = U64::new(u64::MAX)
        )));
        assert!(nonsense(forge(|block| block.reserved[7] = 1)));
    }

    #[test]
    fn a_block_in_the_wrong_file_or_of_a_later_format_is_told_apart() {
        // Fails if a superblock that was copied over its twin, or a later format, passes as ours.
        assert_eq!(
            Superblock::decode(sample().encode(Slot::B), Slot::A),
            Err(Fault::OtherSlot)
        );
        let needs = forge(|block| block.features = U64::new(1 << 40));
        assert_eq!(
            Superblock::decode(needs, Slot::A),
            Err(Fault::Features { unknown: 1 << 40 })
        );
        let later = forge(|block| block.version = U32::new(3));
        assert_eq!(
            Superblock::decode(later, Slot::A),
            Err(Fault::Version { version: 3 })
        );
        assert_eq!(Superblock::decode([0; LENGTH], Slot::A), Err(Fault::Magic));
    }
}
