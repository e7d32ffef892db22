//! When clients are answered.
//!
//! A write is answered when CF holders of its region have it. A flush is answered when every region
//! that was written since the last one is durable at CF of *its* holders.

use super::io::IoId;
use super::region_set::RegionSet;
use super::{Coordinator, Effect, Phase};
use crate::proto::{EntryOp, Region, ReplicaId};

/// A write that has its number and is not acknowledged.
#[derive(Debug)]
pub(super) struct PendingWrite {
    pub(super) io: IoId,
    pub(super) region: Region,
    pub(super) range: (u64, u64),
}

/// A flush that has its number and is not answered.
#[derive(Debug)]
pub(super) struct PendingFlush {
    pub(super) seq: u64,
    io: IoId,
    /// The regions that were written between the flush before and this one. Empty for a flush that shares the number
    /// of the one before.
    regions: Option<RegionSet>,
}

impl PendingFlush {
    pub(super) fn new(seq: u64, io: IoId, regions: RegionSet) -> PendingFlush {
        PendingFlush {
            seq,
            io,
            regions: Some(regions),
        }
    }

    pub(super) fn sharing(seq: u64, io: IoId) -> PendingFlush {
        PendingFlush {
            seq,
            io,
            regions: None,
        }
    }

    pub(super) fn is_own(&self) -> bool {
        self.regions.is_some()
    }
}

impl Coordinator {
    /// Answers what the replicas' answers allow to be answered.
    pub(super) fn settle(&mut self, out: &mut Vec<Effect>) {
        let settled: Vec<u64> = self
            .writes
            .iter()
            .filter(|(seq, write)| self.write_settled(**seq, write.region))
            .map(|(seq, _)| *seq)
            .collect();
        for seq in settled {
            if let Some(write) = self.writes.remove(&seq) {
                self.part_done(write.io, out);
            }
        }
        // In order: what an earlier one covers is not looked at again for a later one.
        while let Some(flush) = self.flushes.front() {
            if !self.flush_settled(flush) {
                break;
            }
            let io = flush.io;
            self.flushes.pop_front();
            self.part_done(io, out);
        }
    }

    pub(super) fn acked_by(&self, id: ReplicaId, seq: u64) -> bool {
        self.peers
            .get(&id)
            .is_some_and(|peer| peer.is_active() && peer.acked() >= seq)
    }

    fn write_settled(&self, seq: u64, region: Region) -> bool {
        let has = |id| self.acked_by(id, seq) && self.holds(id, region);
        if self.acks_below_cf() {
            return self.peers.keys().any(|id| has(*id));
        }
        self.view.write_quorum(has)
    }

    fn flush_settled(&self, flush: &PendingFlush) -> bool {
        let durable = |id: ReplicaId| {
            self.peers
                .get(&id)
                .is_some_and(|peer| peer.is_active() && peer.flushed() >= flush.seq)
        };
        if !self.view.write_quorum(durable) {
            return false;
        }
        let whole = |id| durable(id) && self.peers.get(&id).is_some_and(|peer| peer.is_whole());
        self.view.write_quorum(whole)
            || flush
                .regions
                .iter()
                .flat_map(RegionSet::iter)
                .all(|region| {
                    self.view
                        .write_quorum(|id| durable(id) && self.holds(id, region))
                })
    }

    /// A replica that came back may have answered a flush that nobody heard, or not have seen it.
    pub(super) fn flush_again(&mut self) {
        let waited_for = !self.flushes.is_empty() || self.view.next.is_some();
        if self.phase == Phase::Serving && waited_for {
            self.append(EntryOp::Flush);
        }
    }
}
