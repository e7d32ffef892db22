//! The flush lane: syncs, and the answers that wait for them.

use super::{DiskOp, DiskResult, Effect, Member, SessionId};
use crate::proto::{Answer, Epoch, Key, MetaChange, Region};

/// What waits for a sync.
#[derive(Clone, Copy, Debug)]
pub(super) enum Item {
    /// Everything up to this key.
    Key { session: SessionId, key: Key },
    /// A region that was repaired.
    Region {
        session: SessionId,
        region: Region,
        stamp: Epoch,
    },
}

#[derive(Default)]
pub(super) struct FlushLane {
    /// What the next sync will cover.
    waiting: Vec<Item>,
    /// What the present sync covers.
    running: Vec<Item>,
    /// The disk operation that is under way.
    pub(super) token: Option<u64>,
    /// Whether the sync is done and the meta data are being written.
    persisting: bool,
}

impl FlushLane {
    pub(super) fn is_idle(&self) -> bool {
        self.token.is_none() && self.waiting.is_empty()
    }

    /// Whether the bytes of a repaired region wait for their sync.
    pub(super) fn finishes(&self, at: Region) -> bool {
        self.waiting
            .iter()
            .chain(&self.running)
            .any(|item| matches!(item, Item::Region { region, .. } if *region == at))
    }
}

impl Member {
    pub(super) fn flush_later(&mut self, item: Item) {
        self.flush.waiting.push(item);
    }

    /// Starts a sync if something waits for one. Everything that waits has been written: the ordered
    /// lane puts it here after its disk operation.
    pub(super) fn flush_pump(&mut self, out: &mut Vec<Effect>) {
        if self.flush.token.is_none() && !self.flush.waiting.is_empty() {
            self.flush.running = std::mem::take(&mut self.flush.waiting);
            self.flush.persisting = false;
            // A repaired region counts from then on, perhaps with an old stamp: its sums must be right.
            let is_region = |item: &Item| matches!(item, Item::Region { .. });
            let sums = self.flush.running.iter().any(is_region);
            self.flush.token = Some(self.ask_disk(DiskOp::Sync { sums }, out));
        }
    }

    pub(super) fn flush_step(&mut self, result: DiskResult, out: &mut Vec<Effect>) {
        self.flush.token = None;
        if result != DiskResult::Done {
            if self.flush.persisting {
                return self.halt(out);
            }
            return self.sync_failed(out);
        }
        let running = std::mem::take(&mut self.flush.running);
        if self.flush.persisting {
            for item in running {
                match item {
                    Item::Key { session, key } => {
                        self.answer(session, Answer::Flushed { seq: key.seq }, out);
                    }
                    Item::Region {
                        session, region, ..
                    } => {
                        self.suspects.remove(&region);
                        self.answer(session, Answer::RepairDone { region }, out);
                    }
                }
            }
            return;
        }
        let mut change = MetaChange::default();
        for item in &running {
            match *item {
                // A join may have moved the replica on to another key while the sync ran.
                Item::Key { key, .. } if key > self.meta.durable => {
                    change.durable = change.durable.max(Some(key));
                }
                Item::Key { .. } => {}
                Item::Region { region, stamp, .. } => {
                    change.stale.push((region, None));
                    // Entries of this coordinator may have written there since. An earlier stamp may be
                    // of a history that does not count, whose bytes are gone now: whoever still has them
                    // must not look the same.
                    let own = self.meta.region(region).stamp;
                    let counts = own.generation() == self.meta.promise.generation;
                    let newest = if counts { stamp.max(own) } else { stamp };
                    change.stamps.push((region, newest));
                }
            }
        }
        self.flush.running = running;
        self.flush.persisting = true;
        self.flush.token = Some(self.ask_disk(DiskOp::Persist(Box::new(change)), out));
    }

    /// After a failed sync nobody knows what of the cache is on the disk. Only what was durable before counts.
    pub(super) fn sync_failed(&mut self, out: &mut Vec<Effect>) {
        self.flush.running.clear();
        self.flush.waiting.clear();
        if let Some((_, work)) = &mut self.lane {
            *work = super::lane::Work::Dropped;
        }
        self.applied = self.meta.durable;
        self.exact = false;
        self.unsaid = None;
        out.push(Effect::Note { key: self.applied });
        self.close(out);
    }
}
