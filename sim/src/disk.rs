//! A replica's disk: bytes behind a cache that a power loss takes, and meta data that it does not.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bytes::Bytes;
use trellis_engine::member::{DiskOp, DiskResult};
use trellis_engine::proto::{Content, Geometry, Key, Meta};

use crate::rng::Rng;

/// A version of a block that is not durable.
#[derive(Clone, Debug)]
struct Cached {
    number: u64,
    bytes: Vec<u8>,
}

/// A disk.
#[derive(Clone, Debug)]
pub struct Disk {
    geometry: Geometry,
    /// What survives everything.
    durable: BTreeMap<u64, Vec<u8>>,
    /// Blocks that are not durable, with every version that the disk may have written by itself.
    cache: BTreeMap<u64, Vec<Cached>>,
    number_last: u64,
    /// The meta data, always durable.
    pub meta: Meta,
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

/// An operation that was submitted and not completed.
#[derive(Clone, Debug)]
pub struct Submitted {
    op: DiskOp,
    applied: bool,
    number: u64,
}

impl Submitted {
    /// Whether it is a sync.
    pub fn is_sync(&self) -> bool {
        matches!(self.op, DiskOp::Sync)
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
            meta,
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

    /// Takes an operation. Writes reach the cache now or when they complete: a process that dies in
    /// between must be able to cope with either.
    pub fn submit(&mut self, op: DiskOp, rng: &mut Rng) -> Submitted {
        let early = rng.chance(500);
        let mut submitted = Submitted {
            op,
            applied: false,
            number: self.number_last,
        };
        if early && changes(&submitted.op).is_some() && self.fits(&submitted.op) {
            self.write(&submitted.op);
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

    fn write(&mut self, op: &DiskOp) {
        let size = self.block_bytes();
        let Some((offset, length)) = changes(op) else {
            return;
        };
        for block in self.blocks((offset, length)) {
            match op {
                DiskOp::Write { .. } => {
                    self.places.insert(block);
                }
                DiskOp::Clear { .. } if !self.places.contains(&block) => continue,
                DiskOp::Clear { .. } => {}
                DiskOp::Zero { .. } => {
                    self.places.remove(&block);
                }
                // It changes no bytes.
                _ => return,
            }
            let bytes = match op {
                DiskOp::Write { data, .. } => {
                    let from = usize::try_from(block * size - offset).unwrap_or(0);
                    data[from..from + usize::try_from(size).unwrap_or(0)].to_vec()
                }
                _ => vec![0; usize::try_from(size).unwrap_or(0)],
            };
            self.number_last += 1;
            let number = self.number_last;
            self.rot.remove(&block);
            self.cache
                .entry(block)
                .or_default()
                .push(Cached { number, bytes });
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
                            self.write(&submitted.op);
                        }
                        if rng.chance(500) {
                            return DiskResult::NoSpace;
                        }
                        return DiskResult::Failed;
                    }
                    self.write(&submitted.op);
                }
                DiskResult::Done
            }
            DiskOp::Read { offset, length } => self.read(*offset, *length),
            DiskOp::Sync if sync_fails => {
                // The kernel has dropped what it could not write.
                let number = submitted.number;
                self.drop_cache(number, rng);
                DiskResult::Failed
            }
            DiskOp::Sync => {
                self.sync(submitted.number);
                DiskResult::Done
            }
            DiskOp::Persist(change) => {
                if change.size.is_some_and(|(size, _)| size > self.space) {
                    return DiskResult::NoSpace;
                }
                self.meta.update(self.geometry, change);
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
        let bytes: Vec<u8> = blocks.flat_map(|block| self.block(block)).collect();
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
        self.drop_cache(u64::MAX, rng);
        let there = self.durable.iter().filter(|(_, bytes)| !is_zero(bytes));
        self.places = there.map(|(block, _)| *block).collect();
        self.owed.clear();
        self.note = None;
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
                    self.write(&submitted.op);
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
