//! Reads: from one holder, and from another when the first fails or is late.
//!
//! A read waits for unacknowledged writes of the same bytes: what a client has seen must not vanish with a
//! coordinator. It goes to the holder that has the least to do, after everything sent to it before. If the answer is
//! late, another holder is asked as well, on the same terms, and the first answer counts. So a hanging replica delays
//! a read by that much and no more.

use std::collections::BTreeSet;

use super::io::{IoId, Task};
use super::peer::Session;
use super::{Coordinator, Effect, IoError};
use crate::proto::{Content, ReadFault, ReplicaId, Request, overlap};

/// How many reads may be asked of two replicas at the same time. Where disks are merely slow, asking twice for
/// everything would make them slower.
const HEDGES_MAX: usize = 16;

/// A read that was sent.
#[derive(Debug)]
pub(super) struct PendingRead {
    /// Who waits for it: nobody, if another replica was faster.
    io: Option<IoId>,
    part: usize,
    range: (u64, u64),
    tried: BTreeSet<ReplicaId>,
    replica: ReplicaId,
    at: u64,
    /// The same read at another replica.
    twin: Option<u64>,
}

impl Coordinator {
    pub(super) fn try_read(
        &mut self,
        io: IoId,
        part: usize,
        range: (u64, u64),
        tried: BTreeSet<ReplicaId>,
        peeked: bool,
        out: &mut Vec<Effect>,
    ) -> Option<Task> {
        let region = self.settings.geometry.region_of(range.0);
        if !peeked && self.is_settled(range) && self.try_peek(io, part, range, out) {
            return None;
        }
        let mut holders = self.peers.iter().filter(|(_, peer)| peer.holds(region));
        if !tried.is_empty() && holders.all(|(id, _)| tried.contains(id)) {
            self.finish(io, Err(IoError::Medium), out);
            return None;
        }
        let Some(replica) = self.reader_of(range, &tried) else {
            return Some(Task::Read {
                io,
                part,
                range,
                tried,
                peeked,
            });
        };
        let read = PendingRead {
            io: Some(io),
            part,
            range,
            tried,
            replica,
            at: self.now,
            twin: None,
        };
        self.read_at(read, out);
        None
    }

    /// Whether a range may be read: all writes of it are acknowledged, and enough replicas hold it.
    fn is_settled(&self, range: (u64, u64)) -> bool {
        let region = self.settings.geometry.region_of(range.0);
        let mut writes = self.writes.values();
        !writes.any(|write| overlap(write.range, range)) && self.region_available(region)
    }

    /// The replica that should read a range now, if one may.
    fn reader_of(&self, range: (u64, u64), except: &BTreeSet<ReplicaId>) -> Option<ReplicaId> {
        if !self.is_settled(range) {
            return None;
        }
        let region = self.settings.geometry.region_of(range.0);
        // A replica to which everything has been sent answers after all of it.
        self.peers
            .iter()
            .filter(|(id, peer)| peer.holds(region) && !except.contains(id))
            .filter_map(|(id, peer)| Some((id, peer.session.as_ref()?)))
            .filter(|(_, session)| session.cursor == self.seq)
            .min_by_key(|(_, session)| (self.is_late(session), session.reads, session.sent.len()))
            .map(|(id, _)| *id)
    }

    /// Whether a replica has not answered for so long that others should be asked instead.
    pub(super) fn is_late(&self, session: &Session) -> bool {
        let limit = self.settings.limits.hedge_ms;
        let oldest = session.sent.front();
        session.is_late || oldest.is_some_and(|sent| self.now.saturating_sub(sent.at) > limit)
    }

    fn read_at(&mut self, read: PendingRead, out: &mut Vec<Effect>) -> u64 {
        let tag = self.next_tag();
        let (replica, (offset, length)) = (read.replica, read.range);
        self.reads.insert(tag, read);
        if let Some(session) = self.session_mut(replica) {
            session.reads += 1;
        }
        let request = Request::Read {
            tag,
            offset,
            length,
        };
        self.send(replica, request, out);
        tag
    }

    pub(super) fn session_mut(&mut self, replica: ReplicaId) -> Option<&mut Session> {
        self.peers.get_mut(&replica)?.session.as_mut()
    }

    pub(super) fn read_answered(
        &mut self,
        replica: ReplicaId,
        tag: u64,
        result: Result<Content, ReadFault>,
        out: &mut Vec<Effect>,
    ) {
        if self.repair_reads.contains_key(&tag) {
            return self.repair_read_answered(replica, tag, result, out);
        }
        if self
            .reads
            .get(&tag)
            .is_none_or(|read| read.replica != replica)
        {
            return;
        }
        let Some(read) = self.reads.remove(&tag) else {
            return;
        };
        if let Some(session) = self.session_mut(replica) {
            session.reads = session.reads.saturating_sub(1);
            session.is_late = false;
        }
        match result {
            Ok(content) if content.length() == read.range.1 => {
                let Some(io) = read.io else { return };
                if let Some(twin) = read.twin.and_then(|twin| self.reads.get_mut(&twin)) {
                    (twin.io, twin.twin) = (None, None);
                }
                self.part_read(io, read.part, content, out);
            }
            _ => {
                self.damaged(replica, self.settings.geometry.region_of(read.range.0));
                self.read_elsewhere(read, Some(replica));
            }
        }
    }

    /// A part of a request has its bytes.
    pub(super) fn part_read(
        &mut self,
        io: IoId,
        part: usize,
        content: Content,
        out: &mut Vec<Effect>,
    ) {
        if let Some(slot) = self
            .ios
            .get_mut(&io)
            .and_then(|waiting| waiting.parts.get_mut(part))
        {
            *slot = Some(content);
        }
        self.part_done(io, out);
    }

    /// Leaves an unanswered read to its twin, or asks another replica.
    fn read_elsewhere(&mut self, mut read: PendingRead, failed: Option<ReplicaId>) {
        let Some(io) = read.io else { return };
        if let Some(twin) = read.twin.and_then(|twin| self.reads.get_mut(&twin)) {
            twin.twin = None;
            twin.tried.extend(failed);
            return;
        }
        read.tried.extend(failed);
        self.waiting.push_back(Task::Read {
            io,
            part: read.part,
            range: read.range,
            tried: read.tried,
            peeked: true,
        });
    }

    /// Reads that a lost replica owes are asked of another one.
    pub(super) fn reads_from_gone(&mut self, replica: ReplicaId) {
        let gone: Vec<u64> = self
            .reads
            .iter()
            .filter(|(_, read)| read.replica == replica)
            .map(|(tag, _)| *tag)
            .collect();
        for tag in gone {
            if let Some(read) = self.reads.remove(&tag) {
                self.read_elsewhere(read, None);
            }
        }
    }

    /// Asks another holder for what is late.
    pub(super) fn hedge_reads(&mut self, out: &mut Vec<Effect>) {
        let limit = self.settings.limits.hedge_ms;
        let waits = |read: &&PendingRead| read.io.is_some() && read.twin.is_some();
        let hedged = self.reads.values().filter(waits).count() / 2;
        let late: Vec<u64> = self
            .reads
            .iter()
            .filter(|(_, read)| read.io.is_some() && read.twin.is_none())
            .filter(|(_, read)| self.now.saturating_sub(read.at) >= limit)
            .take(HEDGES_MAX.saturating_sub(hedged))
            .map(|(tag, _)| *tag)
            .collect();
        for tag in late {
            let Some(read) = self.reads.get(&tag) else {
                continue;
            };
            let (slow, range) = (read.replica, read.range);
            let mut except = read.tried.clone();
            except.insert(slow);
            let Some(replica) = self.reader_of(range, &except) else {
                continue;
            };
            let twin = PendingRead {
                io: read.io,
                part: read.part,
                range,
                tried: read.tried.clone(),
                replica,
                at: self.now,
                twin: Some(tag),
            };
            let twin = self.read_at(twin, out);
            if let Some(read) = self.reads.get_mut(&tag) {
                read.twin = Some(twin);
            }
            if let Some(session) = self.session_mut(slow) {
                session.is_late = true;
            }
        }
    }

    pub(super) fn owes_reads(&self, replica: ReplicaId, limit_ms: u64) -> bool {
        let late = |at: u64| self.now.saturating_sub(at) > limit_ms;
        self.reads
            .values()
            .any(|read| read.replica == replica && late(read.at))
            || self.owes_repair_reads(replica, limit_ms)
            || self.owes_scrub(replica, limit_ms)
    }
}
