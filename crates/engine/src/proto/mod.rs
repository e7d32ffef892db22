//! The types that coordinator and replicas share: epochs, keys, regions, views and messages.
//!
//! There is no behaviour here; `docs/engine.md` explains how these work together.

mod lineage;
mod message;
mod term;
mod view;

use std::collections::BTreeMap;
use std::fmt;

use uuid::Uuid;

pub use lineage::{Lineage, LineageError};
pub use message::{
    Answer, Body, Content, Entry, EntryOp, Envelope, JoinTerms, Past, ReadFault, Request, Surveyed,
    Welcome,
};
pub use term::Term;
pub use view::{Config, REPLICAS_PER_VOLUME_MAX, View};

/// Which copy of a volume.
pub type ReplicaId = Uuid;

/// The most regions that one page of a region report or of a list of regions holds.
pub const REGIONS_PER_PAGE_MAX: usize = 4096;

/// The most blocks that a list of blocks of a region has.
pub const BLOCKS_PER_REGION_MAX: usize = 256;

/// When writes go from one region to the next, this many following regions get their stamp together with the written
/// one: one sync serves all of them. Coordinator and replicas follow the same rule, so their stamps stay the same.
pub const STAMPS_AHEAD: u32 = 15;

/// A part of the volume's history in which one coordinator numbers its entries: the coordinator's generation in the
/// upper bits, a count in the lower ones. Larger is later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// Bits of the count below the generation.
    pub(crate) const COUNT_BITS: u32 = 20;
    /// The largest generation.
    pub const GENERATION_MAX: u64 = (1 << (64 - Epoch::COUNT_BITS)) - 1;
    /// The stamp of a region that has never been written.
    pub const NEVER: Epoch = Epoch(0);
    /// The epoch of a replica that has just been made. It is later than [`Epoch::NEVER`], so that a
    /// region that was never written is known to be the same on a new replica.
    pub const FRESH: Epoch = Epoch(1);

    /// The first epoch of a generation, which is above zero and at most [`Epoch::GENERATION_MAX`].
    pub const fn first(generation: u64) -> Epoch {
        Epoch(generation << Epoch::COUNT_BITS)
    }

    /// The generation that this epoch belongs to.
    pub const fn generation(self) -> u64 {
        self.0 >> Epoch::COUNT_BITS
    }

    /// The number of this epoch in its generation.
    const fn count(self) -> u64 {
        self.0 & ((1 << Epoch::COUNT_BITS) - 1)
    }

    /// The next epoch of the same generation, unless the generation has used up its epochs.
    pub const fn next(self) -> Option<Epoch> {
        let next = Epoch(self.0 + 1);
        if next.generation() == self.generation() {
            Some(next)
        } else {
            None
        }
    }

    /// The plain number, as it is written to disks and wires.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The epoch with that plain number.
    pub const fn from_raw(raw: u64) -> Epoch {
        Epoch(raw)
    }
}

/// How far a copy is: it holds all entries of its epoch up to `seq`, and all of earlier epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The epoch of the last entry.
    pub epoch: Epoch,
    /// The number of the last entry.
    pub seq: u64,
}

impl fmt::Display for Key {
    /// Generation, epoch and entry: larger from left to right is later.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { epoch, seq } = self;
        write!(out, "{}.{}.{seq}", epoch.generation(), epoch.count())
    }
}

impl Key {
    /// The key of bytes of which nothing is known.
    pub const NOTHING: Key = Key {
        epoch: Epoch::NEVER,
        seq: 0,
    };
    /// The key of a replica that has just been made.
    pub const FRESH: Key = Key {
        epoch: Epoch::FRESH,
        seq: 0,
    };
}

/// Which region of the volume, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Region(pub u32);

impl Region {
    /// The region as an index.
    pub fn index(self) -> usize {
        // A region is below 2^30, and the engine runs on 64-bit machines.
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// In which units a volume is cut. It is the same on all replicas and never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The smallest unit of I/O, in bytes.
    pub block_bytes: u32,
    /// The unit of staleness and repair, in bytes: a multiple of the block.
    pub region_bytes: u32,
}

impl Geometry {
    /// What volumes are made with: blocks of 4 KiB and regions of 1 MiB.
    pub const STANDARD: Geometry = Geometry {
        block_bytes: 4096,
        region_bytes: 1 << 20,
    };

    /// How many regions a volume of that size has. The last one may be cut.
    pub fn regions(self, size: u64) -> usize {
        usize::try_from(size.div_ceil(u64::from(self.region_bytes))).unwrap_or(usize::MAX)
    }

    /// The region in which that byte lies.
    pub fn region_of(self, offset: u64) -> Region {
        // Sizes are at most 1 PiB, so that the region of 1 MiB is below 2^30.
        Region(u32::try_from(offset / u64::from(self.region_bytes)).unwrap_or(u32::MAX))
    }

    /// Where a region begins, and how long it is in a volume of that size.
    pub fn extent(self, region: Region, size: u64) -> (u64, u64) {
        let start = u64::from(region.0) * u64::from(self.region_bytes);
        (
            start,
            u64::from(self.region_bytes).min(size.saturating_sub(start)),
        )
    }

    /// Whether a range is whole blocks inside a volume of that size.
    pub fn allows(self, offset: u64, length: u64, size: u64) -> bool {
        let block = u64::from(self.block_bytes);
        length > 0
            && offset.is_multiple_of(block)
            && length.is_multiple_of(block)
            && offset.checked_add(length).is_some_and(|end| end <= size)
    }

    /// Whether a range is whole blocks inside one region of a volume of that size.
    pub fn allows_in_region(self, offset: u64, length: u64, size: u64) -> bool {
        self.allows(offset, length, size)
            && self.region_of(offset) == self.region_of(offset + length - 1)
    }
}

/// Whether two ranges of bytes have a byte in common.
pub fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// Why a region of a replica must not be read: it was away, or may differ, since `key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// How far the region's bytes are at least.
    pub key: Key,
    /// Whether a repair has begun to overwrite it. Each of its blocks is then as of `key` or later, and the region is
    /// equal to no other.
    pub mixed: bool,
}

/// What a replica knows of one of its regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionState {
    /// The epoch of the last write to it. Durable before that epoch's first write.
    pub stamp: Epoch,
    /// Set while the region waits for repair.
    pub stale: Option<Stale>,
}

/// Who may write to a replica: the coordinator of the highest generation that it promised to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Promise {
    /// The generation.
    pub generation: u64,
    /// Which coordinator of that generation: tells apart two that chose the same number.
    pub owner: u64,
}

/// What a replica keeps on its disk next to the bytes of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The fence.
    pub promise: Promise,
    /// How far the bytes on the disk are at least, whatever a power loss takes.
    pub durable: Key,
    /// The size, in bytes.
    pub size: u64,
    /// How often the size was raised.
    pub size_version: u64,
    /// Who the replicas of the volume are.
    pub view: View,
    /// The stamp of every region.
    pub stamps: Vec<Epoch>,
    /// The regions that wait for repair.
    pub stale: BTreeMap<Region, Stale>,
}

impl Meta {
    /// What a replica knows when it has just been made.
    pub fn fresh(geometry: Geometry, size: u64, view: View) -> Meta {
        Meta {
            promise: Promise::default(),
            durable: Key::FRESH,
            size,
            size_version: 1,
            view,
            stamps: vec![Epoch::NEVER; geometry.regions(size)],
            stale: BTreeMap::new(),
        }
    }

    /// What a replica knows that has lost its memory: nothing that it holds counts.
    pub fn lost(geometry: Geometry, size: u64, replica: ReplicaId) -> Meta {
        let nothing = Stale {
            key: Key::NOTHING,
            mixed: true,
        };
        let view = View {
            lineage: Lineage::Unknown,
            ..View::blank(replica)
        };
        let regions = (0..).map(Region).take(geometry.regions(size));
        Meta {
            durable: Key::NOTHING,
            stale: regions.map(|region| (region, nothing)).collect(),
            ..Meta::fresh(geometry, size, view)
        }
    }

    /// Whether the replica has lost its memory, and nobody has told it since what counts.
    pub fn is_lost(&self) -> bool {
        self.view.lineage == Lineage::Unknown
    }

    /// Applies a change, as the disk does when it makes it durable.
    pub fn update(&mut self, geometry: Geometry, change: &MetaChange) {
        if change.forget {
            self.stale.clear();
            self.stamps.fill(Epoch::NEVER);
        }
        if let Some(promise) = change.promise {
            self.promise = promise;
        }
        if let Some((size, version)) = change.size {
            self.size = self.size.max(size);
            self.size_version = self.size_version.max(version);
            let regions = geometry.regions(self.size);
            if self.stamps.len() < regions {
                self.stamps.resize(regions, Epoch::NEVER);
            }
        }
        if let Some(view) = &change.view {
            self.view = view.clone();
        }
        for (region, stale) in &change.stale {
            match stale {
                Some(stale) => self.stale.insert(*region, *stale),
                None => self.stale.remove(region),
            };
        }
        for (region, stamp) in &change.stamps {
            if let Some(slot) = self.stamps.get_mut(region.index()) {
                *slot = *stamp;
            }
        }
        if let Some(durable) = change.durable {
            self.durable = durable;
        }
    }

    /// What is known of one region.
    pub fn region(&self, region: Region) -> RegionState {
        RegionState {
            stamp: self
                .stamps
                .get(region.index())
                .copied()
                .unwrap_or(Epoch::NEVER),
            stale: self.stale.get(&region).copied(),
        }
    }
}

/// A change of [`Meta`]. A disk makes it durable as one: after a crash all of it is there or nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetaChange {
    /// Stamps and stale regions of before are forgotten first.
    pub forget: bool,
    /// A new promise.
    pub promise: Option<Promise>,
    /// A new durable key.
    pub durable: Option<Key>,
    /// A larger size and its version.
    pub size: Option<(u64, u64)>,
    /// A newer view.
    pub view: Option<View>,
    /// New stamps.
    pub stamps: Vec<(Region, Epoch)>,
    /// Regions that become stale, or cease to be.
    pub stale: Vec<(Region, Option<Stale>)>,
}
