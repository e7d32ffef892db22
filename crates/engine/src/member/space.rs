//! What a replica does when its pool has no space left.
//!
//! A write to blocks that the data file already has needs no space, and goes on. A write that finds no space costs its
//! region and nothing else: the region durably becomes stale at the key that it had, and the replica goes on with the
//! entries that follow. The region is repaired when there is space again. So one write that does not fit does not
//! invalidate everything else that the replica holds.
//!
//! ```text
//!   no space for an entry ──▶ sync ──▶ stale mark durable ──▶ Behind, and the entry counts as passed over
//!                             (a region that is stale already needs neither)
//! ```
//!
//! The sync comes first because the mark keeps a key: after a power loss the region must still hold everything up to
//! that key. The region is marked as mixed, because a part of the write may have been done.

use super::lane::Work;
use super::{DiskOp, Effect, Member, SessionId};
use crate::proto::{Answer, Key, MetaChange, Region, Stale};

impl Member {
    /// Asks the disk for space behind a range, in the order of the entries.
    pub(super) fn start_allocate(
        &mut self,
        session: SessionId,
        tag: u64,
        (offset, length): (u64, u64),
        out: &mut Vec<Effect>,
    ) {
        if !self
            .geometry
            .allows_in_region(offset, length, self.meta.size)
        {
            return self.close(out);
        }
        if self.is_behind(self.geometry.region_of(offset)) {
            let granted = false;
            return self.answer(session, Answer::Allocated { tag, granted }, out);
        }
        let op = DiskOp::Allocate { offset, length };
        self.begin(op, Work::Allocate { session, tag }, out);
    }

    /// Whether entries of a region are skipped here, although the coordinator may not know it yet.
    pub(super) fn is_behind(&self, region: Region) -> bool {
        self.behind.contains(&region)
    }

    /// There was no space for an entry in a region, or for its repair if there is no key.
    pub(super) fn fall_behind(
        &mut self,
        session: SessionId,
        region: Region,
        key: Option<Key>,
        out: &mut Vec<Effect>,
    ) {
        self.repairs.remove(&region);
        if self.flush.finishes(region) {
            // A repair of it is about to be made durable. Come again.
            self.exact = false;
            self.answer(session, Answer::Full, out);
            return self.close(out);
        }
        if self.meta.region(region).stale.is_some() {
            return self.fallen_behind(session, region, key, out);
        }
        let work = Work::BehindSync {
            session,
            region,
            key,
        };
        self.begin(DiskOp::Sync { sums: false }, work, out);
    }

    /// The region's bytes are durable; now the mark that keeps its key is made durable.
    pub(super) fn mark_behind(
        &mut self,
        session: SessionId,
        region: Region,
        key: Option<Key>,
        out: &mut Vec<Effect>,
    ) {
        let stale = Stale {
            key: self.applied,
            mixed: true,
        };
        let change = MetaChange {
            stale: vec![(region, Some(stale))],
            ..MetaChange::default()
        };
        let work = Work::BehindMark {
            session,
            region,
            key,
        };
        self.begin(DiskOp::Persist(Box::new(change)), work, out);
    }

    /// The region is durably stale. The coordinator is told before it hears how far the entries are.
    pub(super) fn fallen_behind(
        &mut self,
        session: SessionId,
        region: Region,
        key: Option<Key>,
        out: &mut Vec<Effect>,
    ) {
        if self.is_bound(session) {
            self.behind.insert(region);
            self.answer(session, Answer::Behind { region }, out);
        }
        if let Some(key) = key {
            self.advance(session, key);
        }
    }
}
