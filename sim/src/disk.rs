//! A replica's disk. Data and checksums each have a cache of their own that a power loss takes; it does not take
//! metadata.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bytes::Bytes;
use trellis_engine::member::{DiskOp, DiskResult};
use trellis_engine::proto::{Content, Epoch, Geometry, Key, Meta, MetaChange, Promise, Region};
use trellis_engine::sums::{
    Coverage, Doubt, Ended, Slot, Summer, doubtful, may_write, newest_after, settled_by_sync,
    sort_out,
};
use uuid::Uuid;

use crate::rng::Rng;

/// A version of a block that is not durable.
#[derive(Clone, Debug)]
struct Cached {
    number: u64,
    bytes: Vec<u8>,
}

/// A slot that is not durable.
#[derive(Clone, Copy, Debug)]
struct CachedSlot {
    number: u64,
    slot: Slot,
}

/// Of a thousand blocks that a power loss finds in a cache, so many are torn.
const TORN_PER_MILLE: u64 = 60;

/// Of a thousand syncs, so many settle the sums.
const SETTLING_PER_MILLE: u64 = 300;

/// A disk.
#[derive(Clone, Debug)]
pub struct Disk {
    geometry: Geometry,
    /// What survives everything.
    durable: BTreeMap<u64, Vec<u8>>,
    /// Blocks that are not durable, with every version that the disk may have written by itself.
    cache: BTreeMap<u64, Vec<Cached>>,
    number_last: u64,
    slots: BTreeMap<u64, Slot>,
    slot_cache: BTreeMap<u64, Vec<CachedSlot>>,
    /// Up to where bytes and sums are durable together; always durable itself.
    settled: Epoch,
    newest: Epoch,
    /// Blocks whose bits have flipped, and what they were.
    pub flipped: BTreeMap<u64, Vec<u8>>,
    /// Blocks that a power loss has torn, with what they hold now.
    pub torn: Vec<(u64, Vec<u8>)>,
    /// The meta data, always durable.
    pub meta: Meta,
    /// The number of their last change, and what they were before, from time to time.
    sequence: u64,
    backups: Vec<(u64, Meta)>,
    kept: Kept,
    /// The key that survives the process but not the machine.
    pub note: Option<Key>,
    /// Blocks that cannot be read until they are written.
    pub rot: BTreeSet<u64>,
    /// No size above this fits.
    pub space: u64,
    /// Data can be written only to blocks that have their place.
    pub full: bool,
    /// Blocks that have their place: a write of them needs no space.
    places: BTreeSet<u64>,
    /// Syncs are answered and not done.
    pub lies: bool,
    /// Blocks that a lie has cost.
    pub lost_by_lies: BTreeSet<u64>,
    /// Blocks whose sync was a lie.
    owed: BTreeSet<u64>,
    /// How often it has lost what was not durable.
    pub losses: u64,
}

/// What the superblock says of the replica's memory.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    promise: Promise,
    /// The number of the last change of the meta data: durably, and in the cache.
    durable: u64,
    cached: u64,
}

/// What becomes of meta data.
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    /// They are gone.
    Gone,
    /// Somebody has put earlier ones back, or has cut off the changes since then.
    Old,
}

/// So many of a thousand changes of the meta data leave a backup, and so many backups are kept.
const BACKUPS_PER_MILLE: u64 = 100;
const BACKUPS_MAX: usize = 8;

/// An operation that was submitted and not completed.
#[derive(Clone, Debug)]
pub struct Submitted {
    op: DiskOp,
    applied: bool,
    number: u64,
    newest: Epoch,
}

impl Submitted {
    /// Whether it is a sync.
    pub fn is_sync(&self) -> bool {
        matches!(self.op, DiskOp::Sync { .. })
    }
}

impl Disk {
    /// A blank disk of a new replica.
    pub fn new(geometry: Geometry, meta: Meta) -> Disk {
        Disk {
            geometry,
            durable: BTreeMap::new(),
            cache: BTreeMap::new(),
            number_last: 0,
            slots: BTreeMap::new(),
            slot_cache: BTreeMap::new(),
            settled: Epoch::NEVER,
            newest: Epoch::NEVER,
            flipped: BTreeMap::new(),
            torn: Vec::new(),
            meta,
            sequence: 1,
            backups: Vec::new(),
            kept: Kept::default(),
            note: None,
            rot: BTreeSet::new(),
            space: u64::MAX,
            full: false,
            places: BTreeSet::new(),
            lies: false,
            lost_by_lies: BTreeSet::new(),
            owed: BTreeSet::new(),
            losses: 0,
        }
    }

    fn block_bytes(&self) -> u64 {
        u64::from(self.geometry.block_bytes)
    }

    /// What a reader sees in a block.
    pub fn block(&self, block: u64) -> Vec<u8> {
        self.cache
            .get(&block)
            .and_then(|versions| versions.last())
            .map(|cached| cached.bytes.clone())
            .or_else(|| self.durable.get(&block).cloned())
            .unwrap_or_else(|| vec![0; usize::try_from(self.block_bytes()).unwrap_or(0)])
    }

    /// What a block should hold, also if its bits have flipped: nobody is shown those.
    pub fn meant(&self, block: u64) -> Vec<u8> {
        let right = self.flipped.get(&block).cloned();
        right.unwrap_or_else(|| self.block(block))
    }

    /// Takes an operation. Writes reach the cache now or when they complete: a process that dies in
    /// between must be able to cope with either.
    pub fn submit(&mut self, op: DiskOp, rng: &mut Rng) -> Submitted {
        let early = rng.chance(500);
        let mut submitted = Submitted {
            op,
            applied: false,
            number: self.number_last,
            newest: self.newest,
        };
        if let DiskOp::Persist(change) = &submitted.op {
            self.newest = newest_after(self.newest, change);
        }
        if early && changes(&submitted.op).is_some() && self.fits(&submitted.op) {
            self.write(&submitted.op, false);
            submitted.applied = true;
        }
        submitted
    }

    fn blocks(&self, (offset, length): (u64, u64)) -> Range<u64> {
        let size = self.block_bytes();
        offset / size..(offset + length) / size
    }

    /// Whether an operation finds its space.
    fn fits(&self, op: &DiskOp) -> bool {
        match op {
            DiskOp::Write { .. } | DiskOp::Allocate { .. } if self.full => changes(op)
                .is_none_or(|range| self.blocks(range).all(|it| self.places.contains(&it))),
            _ => true,
        }
    }

    fn write(&mut self, op: &DiskOp, sums_only: bool) {
        let size = self.block_bytes();
        let Some((offset, length)) = changes(op) else {
            return;
        };
        let bytes_of = |block: u64| match op {
            DiskOp::Write { data, .. } => {
                let from = usize::try_from(block * size - offset).unwrap_or(0);
                data[from..from + usize::try_from(size).unwrap_or(0)].to_vec()
            }
            _ => vec![0; usize::try_from(size).unwrap_or(0)],
        };
        // What is only allocated changes no bytes, and what is only cleared none where there is a hole.
        let blocks = self.blocks((offset, length)).filter(|block| match op {
            DiskOp::Allocate { .. } => false,
            DiskOp::Clear { .. } => self.places.contains(block),
            _ => true,
        });
        let blocks: Vec<u64> = blocks.collect();
        // First the sums, then the bytes.
        if !may_write(self.settled, self.newest) {
            self.settled = self.newest;
        }
        for block in blocks.iter().copied() {
            let sum = self.summer().sum(&bytes_of(block));
            self.put_slot(block, self.slot(block).overwritten(sum));
        }
        if sums_only {
            return;
        }
        for block in blocks {
            let bytes = bytes_of(block);
            match op {
                DiskOp::Write { .. } => drop(self.places.insert(block)),
                DiskOp::Zero { .. } => drop(self.places.remove(&block)),
                _ => {}
            }
            self.number_last += 1;
            let number = self.number_last;
            self.rot.remove(&block);
            if let Some(right) = self.flipped.remove(&block) {
                // What a power loss would bring back is not what this write is about.
                self.durable.insert(block, right);
            }
            self.cache
                .entry(block)
                .or_default()
                .push(Cached { number, bytes });
        }
    }

    fn summer(&self) -> Summer {
        Summer::new(usize::try_from(self.block_bytes()).unwrap_or(0))
    }

    fn slot(&self, block: u64) -> Slot {
        let cached = self.slot_cache.get(&block).and_then(|them| them.last());
        let durable = || self.slots.get(&block).copied().unwrap_or_default();
        cached.map_or_else(durable, |cached| cached.slot)
    }

    fn put_slot(&mut self, block: u64, slot: Slot) {
        self.number_last += 1;
        let number = self.number_last;
        let versions = self.slot_cache.entry(block).or_default();
        versions.push(CachedSlot { number, slot });
    }

    /// Opens the disk, as a replica's process does. Says which regions that were written last have rotted.
    pub fn open(&mut self, replica: Uuid) -> Vec<Region> {
        self.remember(replica);
        let ended = if self.note.is_some() {
            Ended::ProcessDied
        } else {
            Ended::PowerLost
        };
        if ended == Ended::PowerLost {
            self.undo_hidden_flips();
        }
        let sorted = sort_out(&self.meta, self.settled, ended, |region| {
            self.doubts(region)
        });
        for (block, slot) in sorted.slots {
            self.put_slot(block, slot);
        }
        let durable = self.meta.durable;
        let applied = self.note.map_or(durable, |note| note.max(durable));
        self.newest = applied.epoch;
        sorted.rotten
    }

    /// What a process finds when it starts: the same rules as `replica::meta` has.
    fn remember(&mut self, replica: Uuid) {
        if self.is_about_to_forget() {
            let size = self.meta.size;
            self.meta = Meta::lost(self.geometry, size, replica);
            self.sequence = self.kept.cached + 1;
        }
        self.meta.promise = self.meta.promise.max(self.kept.promise);
        self.kept.promise = self.meta.promise;
        self.kept.cached = self.sequence;
        self.kept.durable = self.sequence;
    }

    /// Of a region in doubt the bytes count as they are: rot there cannot be told from a sum that was lost. If the
    /// memory is lost as well, all regions are in doubt.
    fn undo_hidden_flips(&mut self) {
        let doubtful: BTreeSet<Region> = doubtful(&self.meta, self.settled).collect();
        let region_of = |block: u64| self.geometry.region_of(block * self.block_bytes());
        let hidden = self.flipped.keys().copied();
        let hidden = hidden.filter(|block| doubtful.contains(&region_of(*block)));
        for block in hidden.collect::<Vec<_>>() {
            if let Some(right) = self.flipped.remove(&block) {
                self.durable.insert(block, right);
            }
        }
    }

    /// The blocks of a region that do not match their sums.
    fn doubts(&self, region: Region) -> Vec<Doubt> {
        let size = self.block_bytes();
        let (start, length) = self.geometry.extent(region, self.meta.size);
        let blocks = start / size..(start + length) / size;
        let doubts = blocks.map(|block| Doubt {
            block,
            slot: self.slot(block),
            sum: self.summer().sum(&self.block(block)),
        });
        let is_wrong = |doubt: &Doubt| !doubt.slot.admits(doubt.sum, Coverage::Whole);
        doubts.filter(is_wrong).collect()
    }

    /// Flips bits of a block whose sum counts, whatever happens next.
    pub fn flip(&mut self, block: u64, rng: &mut Rng) -> bool {
        let region = self.geometry.region_of(block * self.block_bytes());
        let is_settled = self.meta.region(region).stamp < self.settled;
        let Some(bytes) = self.durable.get_mut(&block) else {
            return false;
        };
        // A hole has no bits.
        let is_hole = !self.places.contains(&block);
        let is_busy = self.cache.contains_key(&block) || self.flipped.contains_key(&block);
        if !is_settled || is_hole || is_busy {
            return false;
        }
        self.flipped.insert(block, bytes.clone());
        let at = rng.index(bytes.len());
        bytes[at] ^= 1 << rng.below(8);
        true
    }

    /// Bits are as they were, and every block has its sum.
    pub fn heal(&mut self) {
        self.rot.clear();
        for (block, right) in std::mem::take(&mut self.flipped) {
            self.durable.insert(block, right);
        }
        for region in (0..).map(Region).take(self.meta.stamps.len()) {
            for doubt in self.doubts(region) {
                self.put_slot(doubt.block, Slot::of(doubt.sum));
            }
        }
    }

    /// Completes an operation.
    pub fn complete(
        &mut self,
        submitted: Submitted,
        rng: &mut Rng,
        sync_fails: bool,
    ) -> DiskResult {
        match &submitted.op {
            DiskOp::Write { .. } | DiskOp::Zero { .. } | DiskOp::Clear { .. } => {
                if !submitted.applied {
                    if !self.fits(&submitted.op) {
                        // A part of it may have been written.
                        if rng.chance(500) {
                            self.write(&submitted.op, false);
                        }
                        if rng.chance(500) {
                            return DiskResult::NoSpace;
                        }
                        return DiskResult::Failed;
                    }
                    self.write(&submitted.op, false);
                }
                DiskResult::Done
            }
            DiskOp::Read { offset, length } => self.read(*offset, *length),
            DiskOp::Sync { .. } if sync_fails => {
                // The kernel has dropped what it could not write.
                let number = submitted.number;
                self.drop_cache(number, rng);
                DiskResult::Failed
            }
            DiskOp::Sync { sums } => {
                self.sync(submitted.number);
                let settles = rng.chance(SETTLING_PER_MILLE);
                if (*sums || settles) && !self.lies {
                    self.sync_slots(submitted.number);
                }
                if settles && !self.lies {
                    let written_since = self.number_last != submitted.number;
                    let settled = settled_by_sync(submitted.newest, written_since);
                    self.settled = self.settled.max(settled);
                }
                DiskResult::Done
            }
            DiskOp::Persist(change) => {
                if change.size.is_some_and(|(size, _)| size > self.space) {
                    return DiskResult::NoSpace;
                }
                if rng.chance(BACKUPS_PER_MILLE) && self.backups.len() < BACKUPS_MAX {
                    self.backups.push((self.sequence, self.meta.clone()));
                }
                if let Some(promise) = change.promise {
                    self.kept.promise = promise;
                    self.kept.durable = self.sequence;
                }
                self.meta.update(self.geometry, change);
                self.sequence += 1;
                self.kept.cached = self.sequence;
                DiskResult::Done
            }
            DiskOp::Allocate { offset, length } => {
                if !self.fits(&submitted.op) {
                    return DiskResult::NoSpace;
                }
                self.places.extend(self.blocks((*offset, *length)));
                DiskResult::Done
            }
            DiskOp::Reserve { size } if *size > self.space => DiskResult::NoSpace,
            DiskOp::Reserve { .. } => DiskResult::Done,
        }
    }

    /// What a reader sees.
    pub fn read(&self, offset: u64, length: u64) -> DiskResult {
        let size = self.block_bytes();
        let blocks = offset / size..(offset + length) / size;
        if blocks.clone().any(|block| self.rot.contains(&block)) {
            return DiskResult::Failed;
        }
        let is_bad = |block: &u64| {
            let sum = self.summer().sum(&self.block(*block));
            !self.slot(*block).admits(sum, Coverage::Whole)
        };
        let first = blocks.start;
        let bad = blocks.clone().filter(is_bad);
        let bad: Vec<u32> = bad
            .map(|block| u32::try_from(block - first).unwrap_or(0))
            .collect();
        let bytes: Vec<u8> = blocks.flat_map(|block| self.block(block)).collect();
        if !bad.is_empty() {
            let content = Content::Data(Bytes::from(bytes));
            return DiskResult::Rotten { content, bad };
        }
        if is_zero(&bytes) {
            return DiskResult::Read(Content::Zeros(length));
        }
        DiskResult::Read(Content::Data(Bytes::from(bytes)))
    }

    fn sync(&mut self, number: u64) {
        if self.lies {
            self.owed.extend(self.cache.keys());
            return;
        }
        self.cache.retain(|block, versions| {
            let covered = versions.iter().rposition(|cached| cached.number <= number);
            if let Some(index) = covered {
                self.durable.insert(*block, versions[index].bytes.clone());
                versions.drain(..=index);
            }
            !versions.is_empty()
        });
    }

    fn sync_slots(&mut self, number: u64) {
        self.slot_cache.retain(|block, versions| {
            let covered = versions.iter().rposition(|cached| cached.number <= number);
            if let Some(index) = covered {
                self.slots.insert(*block, versions[index].slot);
                versions.drain(..=index);
            }
            !versions.is_empty()
        });
    }

    /// The cached sums are gone: of every slot there is what was durable, or any later version.
    fn drop_slots(&mut self, rng: &mut Rng) {
        for (block, versions) in std::mem::take(&mut self.slot_cache) {
            let pick = rng.index(versions.len() + 1);
            if let Some(cached) = pick.checked_sub(1).and_then(|index| versions.get(index)) {
                self.slots.insert(block, cached.slot);
            }
        }
    }

    /// The cache is gone. Of every block there is what was durable, or any later version.
    fn drop_cache(&mut self, number: u64, rng: &mut Rng) {
        self.losses += 1;
        let cache = std::mem::take(&mut self.cache);
        for (block, mut versions) in cache {
            let at = versions.partition_point(|cached| cached.number <= number);
            let later = versions.split_off(at);
            let pick = rng.index(versions.len() + 1);
            let kept_last = pick == versions.len();
            if let Some(cached) = pick.checked_sub(1).and_then(|index| versions.get(index)) {
                self.durable.insert(block, cached.bytes.clone());
            }
            if self.owed.contains(&block) && !kept_last {
                self.lost_by_lies.insert(block);
            }
            if !later.is_empty() {
                self.cache.insert(block, later);
            } else if self.durable.get(&block).is_some_and(|it| !is_zero(it)) {
                // What gave its place back is there again.
                self.places.insert(block);
            }
        }
    }

    /// The machine loses its memory. Operations under way have happened or not.
    pub fn power_loss(&mut self, under_way: Vec<Submitted>, rng: &mut Rng) {
        self.process_death(under_way, rng);
        let torn = self.tear(rng);
        self.drop_cache(u64::MAX, rng);
        self.drop_slots(rng);
        for (block, bytes) in torn {
            self.durable.insert(block, bytes.clone());
            self.torn.push((block, bytes));
        }
        let there = self.durable.iter().filter(|(_, bytes)| !is_zero(bytes));
        self.places = there.map(|(block, _)| *block).collect();
        self.owed.clear();
        self.note = None;
        let unsynced = self.kept.cached.saturating_sub(self.kept.durable);
        self.kept.cached = self.kept.durable + rng.below(unsynced + 1);
    }

    /// The meta data are lost while the process is not there. Says whether they are.
    pub fn damage(&mut self, damage: Damage, rng: &mut Rng) -> bool {
        // What was put back and is as new as the superblock says cannot be told from what was there.
        let floor = self.kept.cached;
        self.backups.retain(|(sequence, _)| *sequence < floor);
        match damage {
            Damage::Gone => self.sequence = 0,
            Damage::Old if self.backups.is_empty() => return false,
            Damage::Old => {
                let index = rng.index(self.backups.len());
                // The size is the superblock's.
                let size = Some((self.meta.size, self.meta.size_version));
                (self.sequence, self.meta) = self.backups.swap_remove(index);
                let change = MetaChange {
                    size,
                    ..MetaChange::default()
                };
                self.meta.update(self.geometry, &change);
            }
        }
        true
    }

    /// Whether it will find that its memory is lost when it starts.
    pub fn is_about_to_forget(&self) -> bool {
        self.sequence < self.kept.cached
    }

    /// Whether it has lost its memory and was not repaired since.
    pub fn has_forgotten(&self) -> bool {
        let mut stale = self.meta.stale.values();
        self.meta.is_lost() || stale.any(|stale| stale.key == Key::NOTHING)
    }

    /// Blocks that were being written, and hold a part of what they held and a part of what they were to hold.
    fn tear(&self, rng: &mut Rng) -> Vec<(u64, Vec<u8>)> {
        let mut torn = Vec::new();
        for (block, versions) in &self.cache {
            let is_promised = self.owed.contains(block) || self.lost_by_lies.contains(block);
            if is_promised || !rng.chance(TORN_PER_MILLE) {
                continue;
            }
            let blank = || vec![0; usize::try_from(self.block_bytes()).unwrap_or(0)];
            let mut bytes = self.durable.get(block).cloned().unwrap_or_else(blank);
            let new = &versions[rng.index(versions.len())].bytes;
            // Where both are the same, nothing can be torn.
            if bytes != *new {
                let half = bytes.len() / 2;
                bytes[half..].copy_from_slice(&new[half..]);
                torn.push((*block, bytes));
            }
        }
        torn
    }

    /// The process dies. Operations under way have happened or not.
    pub fn process_death(&mut self, under_way: Vec<Submitted>, rng: &mut Rng) {
        for submitted in under_way {
            let happens = rng.chance(500);
            match &submitted.op {
                DiskOp::Persist(_) if happens => {
                    self.complete(submitted, rng, false);
                }
                // A size may not be raised without the earlier changes; they are done in order.
                DiskOp::Persist(_) => break,
                op if changes(op).is_some() && happens && !submitted.applied && self.fits(op) => {
                    let sums_only = rng.chance(300);
                    self.write(&submitted.op, sums_only);
                }
                _ => {}
            }
        }
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// The bytes that an operation changes, or wants space for.
fn changes(op: &DiskOp) -> Option<(u64, u64)> {
    match op {
        DiskOp::Write { offset, data } => Some((*offset, u64::try_from(data.len()).unwrap_or(0))),
        DiskOp::Zero { offset, length }
        | DiskOp::Clear { offset, length }
        | DiskOp::Allocate { offset, length } => Some((*offset, *length)),
        _ => None,
    }
}
