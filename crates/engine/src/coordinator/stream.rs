//! The stream of entries: numbered here, sent to every replica in order, answered in order.

use super::peer::{Sent, Stage};
use super::{Coordinator, Effect, Phase};
use crate::proto::{Entry, EntryOp, Key, Region, ReplicaId, Request, STAMPS_AHEAD};

impl Coordinator {
    /// Numbers an entry. It is sent when the windows of the replicas allow it.
    pub(super) fn append(&mut self, op: EntryOp) -> u64 {
        self.seq += 1;
        let region = match &op {
            EntryOp::Write { offset, .. } | EntryOp::Zero { offset, .. } => {
                Some(self.settings.geometry.region_of(*offset))
            }
            _ => None,
        };
        if let EntryOp::Zero { offset, length } = op {
            self.forget_space((offset, length));
        }
        if let Some(region) = region {
            self.stamp(region);
            if !self.epoch_used {
                self.epoch_used = true;
                self.epoch_since = self.now;
            }
        }
        let key = Key {
            epoch: self.epoch,
            seq: self.seq,
        };
        self.log.push(Entry { key, op }, region);
        self.seq
    }

    /// A region is written in this epoch. When writes go from region to region, the next ones are stamped too, as the
    /// replicas do.
    fn stamp(&mut self, region: Region) {
        let (epoch, index) = (self.epoch, region.index());
        let stamped = |index: usize| self.stamps.get(index).is_some_and(|stamp| *stamp >= epoch);
        if stamped(index) {
            return;
        }
        let follows = index.checked_sub(1).is_some_and(stamped);
        let ahead = if follows { STAMPS_AHEAD } else { 0 };
        let count = usize::try_from(ahead).unwrap_or(0) + 1;
        for stamp in self.stamps.iter_mut().skip(index).take(count) {
            *stamp = epoch;
        }
    }

    /// Drops entries that every replica has, present or not: nobody will need them, and memory that is reused soon is
    /// in the processor's cache.
    pub(super) fn prune_log(&mut self) {
        let least = self.peers.values().map(|peer| peer.applied).min();
        while let Some(first) = self.log.first_seq()
            && least.is_some_and(|least| first <= least)
            && !self.writes.contains_key(&first)
        {
            self.log.pop();
        }
    }

    /// Whether the log has room for another entry of a client, after replicas that are too far behind were given up.
    /// Unacknowledged entries are never dropped.
    pub(super) fn log_has_room(&mut self, out: &mut Vec<Effect>) -> bool {
        let limits = self.settings.limits;
        while self
            .log
            .is_over(limits.log_entries_max, limits.log_bytes_max)
        {
            let Some(first) = self.log.first_seq() else {
                break;
            };
            if self.writes.contains_key(&first) {
                return false;
            }
            let behind: Vec<ReplicaId> = self
                .peers
                .iter()
                .filter(|(_, peer)| {
                    peer.session.as_ref().is_some_and(|session| {
                        matches!(session.stage, Stage::Active | Stage::Joining)
                            && session.cursor < first
                    })
                })
                .map(|(id, _)| *id)
                .collect();
            if behind.iter().any(|replica| self.keeps_moving(*replica)) {
                return false;
            }
            for replica in behind {
                self.drop_session(replica, out);
            }
            self.log.pop();
        }
        true
    }

    /// Whether a replica is behind but still answers, so that it will soon catch up.
    fn keeps_moving(&self, replica: ReplicaId) -> bool {
        let session = self.peers.get(&replica).and_then(|it| it.session.as_ref());
        let oldest = session.and_then(|session| session.sent.front());
        oldest.is_some_and(|sent| self.now.saturating_sub(sent.at) < self.settings.limits.lag_ms)
    }

    pub(super) fn pump_all(&mut self, out: &mut Vec<Effect>) {
        if self.phase == Phase::Over {
            return;
        }
        let ids: Vec<ReplicaId> = self.peers.keys().copied().collect();
        for replica in ids {
            self.pump(replica, out);
        }
    }

    /// Sends what the replica's window allows.
    fn pump(&mut self, replica: ReplicaId, out: &mut Vec<Effect>) {
        let limits = self.settings.limits;
        loop {
            let Some(peer) = self.peers.get_mut(&replica) else {
                return;
            };
            let Some(session) = &mut peer.session else {
                return;
            };
            if !matches!(session.stage, Stage::Active | Stage::Joining)
                || session.cursor >= self.seq
                || session.sent.len() >= limits.window_entries_max
                || session.sent_bytes >= limits.window_bytes_max
            {
                return;
            }
            let Some(logged) = self.log.get(session.cursor + 1) else {
                // What it needs next is gone. It has to come again and be repaired.
                return self.drop_session(replica, out);
            };
            let mut entry = logged.entry.clone();
            let mut bytes = logged.bytes;
            if let Some(region) = logged.region
                && peer.stale.contains(region)
                && !peer.repairs.contains_key(&region)
            {
                entry.op = EntryOp::Skip { region };
                bytes = 0;
            }
            session.cursor += 1;
            session.sent.push_back(Sent {
                seq: session.cursor,
                bytes,
                at: self.now,
                range: changed(&entry.op),
            });
            session.sent_bytes += bytes;
            if matches!(entry.op, EntryOp::Flush) {
                session.flushing.push_back((session.cursor, self.now));
            }
            self.send(replica, Request::Entry(entry), out);
        }
    }

    /// A replica has applied all entries up to this one.
    pub(super) fn done(&mut self, replica: ReplicaId, seq: u64) {
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        let Some(session) = &mut peer.session else {
            return;
        };
        if seq > session.cursor {
            return;
        }
        session.acked = session.acked.max(seq);
        peer.applied = session.acked;
        while let Some(sent) = session.sent.front().filter(|sent| sent.seq <= seq) {
            session.sent_bytes -= sent.bytes;
            session.sent.pop_front();
        }
        if let Some((raise, to)) = self.growth.raise()
            && raise <= seq
        {
            peer.size = peer.size.max(to);
        }
    }

    /// A replica has made all entries up to this one durable.
    pub(super) fn flushed(&mut self, replica: ReplicaId, seq: u64) {
        if let Some(session) = self
            .peers
            .get_mut(&replica)
            .and_then(|peer| peer.session.as_mut())
            && seq <= session.cursor
        {
            session.flushed = session.flushed.max(seq);
            while session
                .flushing
                .front()
                .is_some_and(|(owed, _)| *owed <= seq)
            {
                session.flushing.pop_front();
            }
        }
    }

    /// Gives up on replicas that owe answers for too long.
    pub(super) fn patience(&mut self, out: &mut Vec<Effect>) {
        let limits = self.settings.limits;
        let late = |at: u64, limit: u64| self.now.saturating_sub(at) > limit;
        let mut given_up = Vec::new();
        for (replica, peer) in &self.peers {
            let Some(session) = &peer.session else {
                continue;
            };
            let hangs = match session.stage {
                Stage::Greeting | Stage::Reporting(_) | Stage::Joining => {
                    late(session.since, limits.hang_ms)
                }
                _ if session.called_at.is_some_and(|at| late(at, limits.hang_ms)) => true,
                Stage::Reported(_) | Stage::Outside => false,
                Stage::Active => {
                    let oldest = session.sent.front();
                    let straggles = oldest.is_some_and(|sent| {
                        late(sent.at, limits.straggler_ms) && !self.writes.contains_key(&sent.seq)
                    });
                    straggles
                        || oldest.is_some_and(|sent| late(sent.at, limits.hang_ms))
                        || session
                            .flushing
                            .front()
                            .is_some_and(|(_, at)| late(*at, limits.hang_ms))
                        || self.owes_reads(*replica, limits.hang_ms)
                }
            };
            if hangs {
                given_up.push(*replica);
            }
        }
        for replica in given_up {
            self.drop_session(replica, out);
        }
    }
}

/// The bytes of the volume that an entry changes.
fn changed(op: &EntryOp) -> (u64, u64) {
    match op {
        EntryOp::Write { offset, data } => (*offset, u64::try_from(data.len()).unwrap_or(u64::MAX)),
        EntryOp::Zero { offset, length } => (*offset, *length),
        _ => (0, 0),
    }
}
