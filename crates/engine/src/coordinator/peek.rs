//! Reads from a replica on the same machine without asking it: its data file shows what it has applied.
//!
//! The file shows exactly what the replica would answer if the replica holds the region and has answered every entry
//! that writes these bytes. Then nothing that the replica may be applying at this moment touches them, and a read
//! waits for unacknowledged writes anyway. A replica under repair does not hold the region, so nobody sees a
//! half-repaired one.
//!
//! Bytes that cannot be read at once (they are not in memory, or the disk fails) are requested from the replica.

use std::collections::BTreeSet;

use super::io::{IoId, Task};
use super::{Coordinator, Effect, SessionId};
use crate::proto::{Content, Region, ReplicaId, overlap};

/// A peek that was not answered.
#[derive(Debug)]
pub(super) struct PendingPeek {
    io: IoId,
    part: usize,
    range: (u64, u64),
}

impl Coordinator {
    pub(super) fn near(&mut self, replica: ReplicaId, session: SessionId) {
        let peer = self.peers.get_mut(&replica);
        if let Some(ours) = peer.and_then(|peer| peer.session.as_mut())
            && ours.id == session
        {
            ours.is_near = true;
        }
    }

    /// Peeks at a part of a request, if a nearby replica has everything that counts.
    pub(super) fn try_peek(
        &mut self,
        io: IoId,
        part: usize,
        range: (u64, u64),
        out: &mut Vec<Effect>,
    ) -> bool {
        let Some((replica, session)) = self.near_reader_of(range) else {
            return false;
        };
        let tag = self.next_tag();
        self.peeks.insert(tag, PendingPeek { io, part, range });
        let (offset, length) = range;
        out.push(Effect::Peek {
            replica,
            session,
            tag,
            offset,
            length,
        });
        true
    }

    /// Always reads a region from the same replica, as long as the replicas are the same: otherwise the machine would
    /// keep several copies of it in memory.
    fn near_reader_of(&self, range: (u64, u64)) -> Option<(ReplicaId, SessionId)> {
        let region = self.settings.geometry.region_of(range.0);
        let ready = |(id, peer): (&ReplicaId, &super::Peer)| {
            let session = peer.session.as_ref()?;
            let owes = session.sent.iter().any(|sent| overlap(sent.range, range));
            let ready = session.is_near
                && peer.holds(region)
                && (session.cursor == self.seq && !owes || self.peeks_early());
            ready.then_some((*id, session.id))
        };
        let count = self.peers.iter().filter_map(ready).count();
        let turn = region.index().checked_rem(count)?;
        self.peers.iter().filter_map(ready).nth(turn)
    }

    /// A replica whose data file shows everything acknowledged of these bytes, however many regions they span.
    pub(crate) fn shows(&self, range: (u64, u64)) -> Option<(ReplicaId, SessionId)> {
        let (offset, length) = range;
        let region_of = |byte| self.settings.geometry.region_of(byte).0;
        let (first, last) = (region_of(offset), region_of(offset + length.max(1) - 1));
        let regions = || (first..=last).map(Region);
        self.peers.iter().find_map(|(id, peer)| {
            let session = peer.session.as_ref()?;
            let owes = || session.sent.iter().any(|sent| overlap(sent.range, range));
            let holds = || peer.is_whole() || regions().all(|region| peer.holds(region));
            let shows = session.is_near && session.cursor == self.seq && !owes() && holds();
            shows.then_some((*id, session.id))
        })
    }

    pub(super) fn peeked(&mut self, tag: u64, content: Option<Content>, out: &mut Vec<Effect>) {
        let Some(PendingPeek { io, part, range }) = self.peeks.remove(&tag) else {
            return;
        };
        match content {
            Some(content) if content.length() == range.1 => self.part_read(io, part, content, out),
            _ => self.waiting.push_back(Task::Read {
                io,
                part,
                range,
                tried: BTreeSet::new(),
                peeked: true,
            }),
        }
    }
}
