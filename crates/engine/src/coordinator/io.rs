//! What clients ask for: reads, writes, zeros and flushes.
//!
//! A request is cut at region borders, because every region has its own holders. A write is answered
//! when CF holders of its region have it. A flush is answered when every region that was written since
//! the last one is durable at CF of *its* holders. A read waits for writes of the same bytes that are
//! not acknowledged yet: what a client has seen must not vanish with a coordinator.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::{Coordinator, Effect, Parts, Phase};
use crate::proto::{Content, EntryOp, ReadFault, Region, ReplicaId, Request, overlap};

/// Which request of a client.
pub type IoId = u64;

/// What a client wants.
#[derive(Clone, Debug)]
pub enum IoOp {
    /// Bytes.
    Read {
        /// The first byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// Bytes written.
    Write {
        /// The first byte.
        offset: u64,
        /// The bytes.
        data: Bytes,
        /// Whether they must be durable before the answer.
        fua: bool,
    },
    /// Zeros written, and their space given back.
    Zero {
        /// The first byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// Everything durable that has been answered.
    Flush,
}

/// The answer to a client: the bytes that it wanted, if it wanted any.
pub type IoResult = std::result::Result<Parts, IoError>;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// It is not whole blocks, or not inside the volume.
    #[error("the range is not whole blocks inside the volume")]
    OutOfRange,
    /// Too many requests wait. Nothing was done.
    #[error("too many requests wait; try again")]
    Busy,
    /// No replica that holds the bytes can read them.
    #[error("no replica can read these bytes")]
    Medium,
    /// Another coordinator has taken over. Whether a write was done is unknown.
    #[error("another coordinator has taken over")]
    Deposed,
}

/// A request of a client that is not answered.
#[derive(Debug)]
pub(super) struct Io {
    /// Parts that are not done.
    left: usize,
    /// What was read.
    parts: Vec<Option<Content>>,
    /// A flush must follow before the answer.
    fua: bool,
}

/// A part of a request that waits for its turn.
#[derive(Clone, Debug)]
pub(super) enum Task {
    Write {
        io: IoId,
        op: EntryOp,
        range: (u64, u64),
    },
    Read {
        io: IoId,
        part: usize,
        range: (u64, u64),
        /// Replicas whose disk could not read it.
        tried: BTreeSet<ReplicaId>,
    },
    Flush {
        io: IoId,
    },
}

/// A write that has its number and is not acknowledged.
#[derive(Debug)]
pub(super) struct PendingWrite {
    io: IoId,
    region: Region,
    range: (u64, u64),
}

/// A read that was sent.
#[derive(Debug)]
pub(super) struct PendingRead {
    io: IoId,
    part: usize,
    range: (u64, u64),
    tried: BTreeSet<ReplicaId>,
    replica: ReplicaId,
    at: u64,
}

#[derive(Debug)]
pub(super) struct PendingFlush {
    seq: u64,
    io: IoId,
}

impl Coordinator {
    pub(super) fn io(&mut self, id: IoId, op: IoOp, out: &mut Vec<Effect>) {
        let geometry = self.settings.geometry;
        let range = match &op {
            IoOp::Read { offset, length } | IoOp::Zero { offset, length } => {
                Some((*offset, *length))
            }
            IoOp::Write { offset, data, .. } => {
                Some((*offset, u64::try_from(data.len()).unwrap_or(u64::MAX)))
            }
            IoOp::Flush => None,
        };
        let fits = |(offset, length)| geometry.allows(offset, length, self.size);
        let serving = self.phase == Phase::Serving;
        let result = if serving && range.is_some_and(|range| !fits(range)) {
            Err(IoError::OutOfRange)
        } else if !serving || self.waiting.len() >= self.settings.limits.waiting_max {
            Err(IoError::Busy)
        } else {
            Ok(())
        };
        if let Err(error) = result {
            let result = Err(error);
            return out.push(Effect::Reply { id, result });
        }
        let tasks = self.cut(id, op, range);
        let reads = tasks
            .iter()
            .filter(|task| matches!(task, Task::Read { .. }))
            .count();
        let io = Io {
            left: tasks.len(),
            parts: vec![None; reads],
            fua: false,
        };
        self.ios.entry(id).or_insert(io);
        self.waiting.extend(tasks);
    }

    /// Cuts a request at region borders.
    fn cut(&mut self, io: IoId, op: IoOp, range: Option<(u64, u64)>) -> Vec<Task> {
        let Some((offset, length)) = range else {
            return vec![Task::Flush { io }];
        };
        let region = u64::from(self.settings.geometry.region_bytes);
        let mut tasks = Vec::new();
        let mut at = offset;
        while at < offset + length {
            let stop = (at / region + 1) * region;
            let range = (at, stop.min(offset + length) - at);
            let index = |at: u64| usize::try_from(at - offset).unwrap_or(usize::MAX);
            tasks.push(match &op {
                IoOp::Read { .. } => Task::Read {
                    io,
                    part: tasks.len(),
                    range,
                    tried: BTreeSet::new(),
                },
                IoOp::Write { data, .. } => Task::Write {
                    io,
                    op: EntryOp::Write {
                        offset: at,
                        data: data.slice(index(at)..index(at + range.1)),
                    },
                    range,
                },
                IoOp::Zero { .. } | IoOp::Flush => Task::Write {
                    io,
                    op: EntryOp::Zero {
                        offset: at,
                        length: range.1,
                    },
                    range,
                },
            });
            at += range.1;
        }
        if matches!(op, IoOp::Write { fua: true, .. }) {
            self.ios.insert(
                io,
                Io {
                    left: tasks.len(),
                    parts: Vec::new(),
                    fua: true,
                },
            );
        }
        tasks
    }

    /// Starts what waited and can start now.
    pub(super) fn start_waiting(&mut self, out: &mut Vec<Effect>) {
        if self.phase != Phase::Serving || self.waiting.is_empty() {
            return;
        }
        for _ in 0..self.waiting.len() {
            let Some(task) = self.waiting.pop_front() else {
                break;
            };
            if let Some(task) = self.try_start(task, out) {
                self.waiting.push_back(task);
            }
        }
    }

    /// Starts a task, or gives it back because it must wait.
    fn try_start(&mut self, task: Task, out: &mut Vec<Effect>) -> Option<Task> {
        match task {
            Task::Write { io, op, range } => {
                let region = self.settings.geometry.region_of(range.0);
                if !self.region_available(region) || !self.log_has_room(out) {
                    return Some(Task::Write { io, op, range });
                }
                let seq = self.append(op);
                self.unflushed.insert(region, seq);
                self.writes.insert(seq, PendingWrite { io, region, range });
                None
            }
            Task::Flush { io } => {
                if !self.view.write_quorum(|id| self.is_active(id)) {
                    return Some(Task::Flush { io });
                }
                let seq = self.append(EntryOp::Flush);
                self.flushes.push(PendingFlush { seq, io });
                None
            }
            Task::Read {
                io,
                part,
                range,
                tried,
            } => self.try_read(io, part, range, tried, out),
        }
    }

    fn try_read(
        &mut self,
        io: IoId,
        part: usize,
        range: (u64, u64),
        tried: BTreeSet<ReplicaId>,
        out: &mut Vec<Effect>,
    ) -> Option<Task> {
        let region = self.settings.geometry.region_of(range.0);
        let holders = self.peers.iter().filter(|(_, peer)| peer.holds(region));
        if !tried.is_empty() && holders.clone().all(|(id, _)| tried.contains(id)) {
            self.finish(io, Err(IoError::Medium), out);
            return None;
        }
        let task = Task::Read {
            io,
            part,
            range,
            tried: tried.clone(),
        };
        let unsettled = self
            .writes
            .values()
            .any(|write| overlap(write.range, range));
        if unsettled || !self.region_available(region) {
            return Some(task);
        }
        // A replica to which everything has been sent answers after all of it.
        let best = holders
            .filter(|(id, _)| !tried.contains(id))
            .filter_map(|(id, peer)| Some((id, peer.session.as_ref()?)))
            .filter(|(_, session)| session.cursor == self.seq)
            .min_by_key(|(_, session)| (session.reads, session.sent.len()))
            .map(|(id, _)| *id);
        let Some(replica) = best else {
            return Some(task);
        };
        let tag = self.next_tag();
        self.reads.insert(
            tag,
            PendingRead {
                io,
                part,
                range,
                tried,
                replica,
                at: self.now,
            },
        );
        self.count_read(replica, 1);
        let (offset, length) = range;
        self.send(
            replica,
            Request::Read {
                tag,
                offset,
                length,
            },
            out,
        );
        None
    }

    fn count_read(&mut self, replica: ReplicaId, change: isize) {
        if let Some(session) = self
            .peers
            .get_mut(&replica)
            .and_then(|peer| peer.session.as_mut())
        {
            session.reads = session.reads.saturating_add_signed(change);
        }
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
        let Some(read) = self.reads.remove(&tag) else {
            return;
        };
        self.count_read(replica, -1);
        match result {
            Ok(content) if content.length() == read.range.1 => {
                if let Some(io) = self.ios.get_mut(&read.io) {
                    io.parts[read.part] = Some(content);
                }
                self.part_done(read.io, out);
            }
            _ => {
                let region = self.settings.geometry.region_of(read.range.0);
                let mut tried = read.tried;
                tried.insert(replica);
                self.damaged(replica, region);
                self.waiting.push_back(Task::Read {
                    io: read.io,
                    part: read.part,
                    range: read.range,
                    tried,
                });
            }
        }
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
                self.waiting.push_back(Task::Read {
                    io: read.io,
                    part: read.part,
                    range: read.range,
                    tried: read.tried,
                });
            }
        }
    }

    pub(super) fn owes_reads(&self, replica: ReplicaId, limit_ms: u64) -> bool {
        let late = |at: u64| self.now.saturating_sub(at) > limit_ms;
        self.reads
            .values()
            .any(|read| read.replica == replica && late(read.at))
            || self.owes_repair_reads(replica, limit_ms)
    }

    fn part_done(&mut self, id: IoId, out: &mut Vec<Effect>) {
        let Some(io) = self.ios.get_mut(&id) else {
            return;
        };
        io.left = io.left.saturating_sub(1);
        if io.left > 0 {
            return;
        }
        if io.fua {
            io.fua = false;
            io.left = 1;
            self.waiting.push_back(Task::Flush { io: id });
            return;
        }
        let parts = io.parts.iter_mut().filter_map(Option::take).collect();
        self.finish(id, Ok(parts), out);
    }

    fn finish(&mut self, id: IoId, result: IoResult, out: &mut Vec<Effect>) {
        if self.ios.remove(&id).is_some() {
            out.push(Effect::Reply { id, result });
        }
    }

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
        // Flushes are answered in order: a later one covers an earlier one.
        while let Some(flush) = self.flushes.first() {
            let (seq, io) = (flush.seq, flush.io);
            if !self.flush_settled(seq) {
                break;
            }
            self.flushes.remove(0);
            self.unflushed.retain(|_, last| *last > seq);
            self.part_done(io, out);
        }
        let marked: Vec<_> = std::mem::take(&mut self.marking);
        for (seq, record) in marked {
            let kept = |id| self.acked_by(id, seq);
            if self.view.write_quorum(kept) {
                out.push(Effect::Marked { snapshot: record });
            } else {
                self.marking.push((seq, record));
            }
        }
    }

    fn acked_by(&self, id: ReplicaId, seq: u64) -> bool {
        self.peers
            .get(&id)
            .is_some_and(|peer| peer.is_active() && peer.acked() >= seq)
    }

    fn write_settled(&self, seq: u64, region: Region) -> bool {
        let has = |id| self.holds(id, region) && self.acked_by(id, seq);
        if self.acks_below_cf() {
            return self.peers.keys().any(|id| has(*id));
        }
        self.view.write_quorum(has)
    }

    fn flush_settled(&self, seq: u64) -> bool {
        let durable = |id: ReplicaId| {
            self.peers
                .get(&id)
                .is_some_and(|peer| peer.is_active() && peer.flushed() >= seq)
        };
        let whole = |id| durable(id) && self.peers.get(&id).is_some_and(|peer| peer.is_whole());
        if self.view.write_quorum(whole) {
            return true;
        }
        self.view.write_quorum(durable)
            && self.unflushed.keys().all(|region| {
                self.view
                    .write_quorum(|id| durable(id) && self.holds(id, *region))
            })
    }

    /// A replica that came back may have answered a flush that nobody heard, or not have seen it.
    pub(super) fn flush_again(&mut self) {
        let waited_for = !self.flushes.is_empty() || self.view.next.is_some();
        if self.phase == Phase::Serving && waited_for {
            self.append(EntryOp::Flush);
        }
    }

    /// The regions that clients wait for, and that are not available.
    pub(super) fn wanted(&self) -> BTreeSet<Region> {
        self.waiting
            .iter()
            .filter_map(|task| match task {
                Task::Write { range, .. } | Task::Read { range, .. } => {
                    Some(self.settings.geometry.region_of(range.0))
                }
                Task::Flush { .. } => None,
            })
            .filter(|region| !self.region_available(*region))
            .collect()
    }
}
