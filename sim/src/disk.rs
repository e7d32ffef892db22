//! A replica's disk: bytes behind a cache that a power loss takes, and meta data that it does not.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use trellis_engine::member::{DiskOp, DiskResult};
use trellis_engine::proto::{Content, Geometry, Key, Meta, MetaChange, Promise};
use uuid::Uuid;

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
    /// Data cannot be written.
    pub full: bool,
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
            sequence: 1,
            backups: Vec::new(),
            kept: Kept::default(),
            note: None,
            rot: BTreeSet::new(),
            space: u64::MAX,
            full: false,
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
        if early && matches!(submitted.op, DiskOp::Write { .. } | DiskOp::Zero { .. }) && !self.full
        {
            self.write(&submitted.op);
            submitted.applied = true;
        }
        submitted
    }

    fn write(&mut self, op: &DiskOp) {
        let size = self.block_bytes();
        let (offset, length) = match op {
            DiskOp::Write { offset, data } => (*offset, u64::try_from(data.len()).unwrap_or(0)),
            DiskOp::Zero { offset, length } => (*offset, *length),
            _ => return,
        };
        for block in offset / size..(offset + length) / size {
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
            DiskOp::Write { .. } | DiskOp::Zero { .. } => {
                if !submitted.applied {
                    if self.full {
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
        if bytes.iter().all(|byte| *byte == 0) {
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
            }
        }
    }

    /// The machine loses its memory. Operations under way have happened or not.
    pub fn power_loss(&mut self, under_way: Vec<Submitted>, rng: &mut Rng) {
        self.process_death(under_way, rng);
        self.drop_cache(u64::MAX, rng);
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

    /// Whether it has lost its memory and was not repaired since.
    pub fn has_forgotten(&self) -> bool {
        let mut stale = self.meta.stale.values();
        self.meta.is_lost() || stale.any(|stale| stale.key == Key::NOTHING)
    }

    /// What a process finds when it starts: the same rules as `replica::meta` has.
    pub fn open(&mut self, replica: Uuid) {
        let floor = self.kept.cached;
        if self.sequence < floor {
            let size = self.meta.size;
            self.meta = Meta::lost(self.geometry, size, replica);
            self.sequence = floor + 1;
        }
        self.meta.promise = self.meta.promise.max(self.kept.promise);
        self.kept.promise = self.meta.promise;
        self.kept.cached = self.sequence;
        self.kept.durable = self.sequence;
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
                DiskOp::Write { .. } | DiskOp::Zero { .. }
                    if happens && !submitted.applied && !self.full =>
                {
                    self.write(&submitted.op);
                }
                _ => {}
            }
        }
    }
}
