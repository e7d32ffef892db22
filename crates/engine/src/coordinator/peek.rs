//! Reads of a replica on the same machine, without asking it: its data file shows what it has applied.
//!
//! The file shows no more and no less than the replica would answer, if the replica holds the region and has
//! answered every entry that writes these bytes: nothing that it was sent and may be applying at this moment
//! touches them, and a read waits for writes that are not acknowledged anyway. A replica under repair does not
//! hold the region, so that nobody sees a half of one.
//!
//! What cannot be read at once (it is not in memory, or the disk fails) is asked of the replica.

use std::collections::BTreeSet;

use super::io::{IoId, Task};
use super::{Coordinator, Effect, SessionId};
use crate::proto::{Content, ReplicaId, overlap};

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

    /// Peeks at a part of a request, if a replica is near that has all that counts.
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

    /// A region is always read from the same replica, as long as the replicas are the same: the machine would
    /// otherwise keep several copies of it in its memory.
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
