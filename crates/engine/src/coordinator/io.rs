//! The requests of clients: reads, writes, zeros and flushes.
//!
//! A request is cut at region borders, because every region has its own holders, and a long write is cut into shorter
//! ones. Each part waits until it can start: a write for CF holders of its region and room in the log, a read
//! (`reads`) for a holder that has been sent everything, a flush for CF replicas. `settle` decides when they are
//! answered.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::settle::{PendingFlush, PendingWrite};
use super::{Coordinator, Effect, Parts, Phase};
use crate::proto::{Content, EntryOp, Region, ReplicaId};

/// How many numbered flushes may be unanswered. Flushes that come meanwhile wait, and share the next number.
const FLUSHES_MAX: usize = 2;

/// The most bytes of one entry. A longer write becomes several entries, so a replica writes the first bytes to its
/// file while they are in the processor's cache and the rest is in flight.
const ENTRY_BYTES_MAX: u64 = 256 << 10;

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
        /// The bytes, in pieces of whole blocks that follow each other.
        data: Vec<Bytes>,
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

impl IoOp {
    /// The bytes that it touches, if it is not a flush.
    pub fn range(&self) -> Option<(u64, u64)> {
        match self {
            IoOp::Read { offset, length } | IoOp::Zero { offset, length } => {
                Some((*offset, *length))
            }
            IoOp::Write { offset, data, .. } => Some((*offset, data.iter().map(length_of).sum())),
            IoOp::Flush => None,
        }
    }
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
    /// Too many pools are full. Nothing was done.
    #[error("the pools of too many replicas are full")]
    NoSpace,
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
    pub(super) parts: Vec<Option<Content>>,
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
        /// It was looked for without asking anybody.
        peeked: bool,
    },
    Flush {
        io: IoId,
    },
}

fn length_of(data: &Bytes) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

impl Coordinator {
    /// Whether a request would be taken now, rather than be told to come again.
    pub fn accepts(&self) -> bool {
        let waiting = self.waiting.len() + self.space.applicants();
        self.phase == Phase::Serving && waiting < self.settings.limits.waiting_max
    }

    pub(super) fn io(&mut self, id: IoId, op: IoOp, out: &mut Vec<Effect>) {
        let refused = if self.phase == Phase::Serving && !self.fits(&op) {
            Some(IoError::OutOfRange)
        } else if !self.accepts() {
            Some(IoError::Busy)
        } else {
            None
        };
        if let Some(error) = refused {
            let result = Err(error);
            return out.push(Effect::Reply { id, result });
        }
        if self.asks_for_space(&op) {
            return self.apply_for_space(id, op);
        }
        self.begin_io(id, op);
    }

    /// Lets a request wait for its turn, in parts.
    pub(super) fn begin_io(&mut self, id: IoId, op: IoOp) {
        let fua = matches!(op, IoOp::Write { fua: true, .. });
        let tasks = self.cut(id, op);
        let reads = tasks
            .iter()
            .filter(|task| matches!(task, Task::Read { .. }))
            .count();
        let io = Io {
            left: tasks.len(),
            parts: vec![None; reads],
            fua,
        };
        self.ios.insert(id, io);
        self.waiting.extend(tasks);
    }

    fn fits(&self, op: &IoOp) -> bool {
        let geometry = self.settings.geometry;
        let block = u64::from(geometry.block_bytes);
        let whole = match op {
            IoOp::Write { data, .. } => data
                .iter()
                .all(|piece| !piece.is_empty() && length_of(piece).is_multiple_of(block)),
            _ => true,
        };
        whole
            && op
                .range()
                .is_none_or(|(offset, length)| geometry.allows(offset, length, self.size))
    }

    /// Cuts a request into parts.
    fn cut(&mut self, io: IoId, op: IoOp) -> Vec<Task> {
        match op {
            IoOp::Read { offset, length } => self
                .pieces(offset, length, u64::MAX)
                .enumerate()
                .map(|(part, range)| Task::Read {
                    io,
                    part,
                    range,
                    tried: BTreeSet::new(),
                    peeked: false,
                })
                .collect(),
            IoOp::Zero { offset, length } => self
                .pieces(offset, length, u64::MAX)
                .map(|range| {
                    let (offset, length) = range;
                    let op = EntryOp::Zero { offset, length };
                    Task::Write { io, op, range }
                })
                .collect(),
            IoOp::Write {
                mut offset, data, ..
            } => {
                let mut tasks = Vec::with_capacity(data.len());
                for mut piece in data {
                    for range in self.pieces(offset, length_of(&piece), ENTRY_BYTES_MAX) {
                        let length = usize::try_from(range.1).unwrap_or(usize::MAX);
                        let data = piece.split_to(length.min(piece.len()));
                        let op = EntryOp::Write {
                            offset: range.0,
                            data,
                        };
                        tasks.push(Task::Write { io, op, range });
                        offset += range.1;
                    }
                }
                tasks
            }
            IoOp::Flush => vec![Task::Flush { io }],
        }
    }

    /// Splits a range into ranges inside one region each, of at most `max` bytes.
    pub(super) fn pieces(
        &self,
        offset: u64,
        length: u64,
        max: u64,
    ) -> impl Iterator<Item = (u64, u64)> + use<> {
        let region = u64::from(self.settings.geometry.region_bytes);
        let end = offset + length;
        let mut at = offset;
        std::iter::from_fn(move || {
            let stop = ((at / region + 1) * region).min(end);
            let stop = stop.min(at.saturating_add(max));
            let range = (at, stop.saturating_sub(at));
            at = stop;
            (range.1 > 0).then_some(range)
        })
    }

    pub(super) fn cancel(&mut self, id: IoId) {
        self.ios.remove(&id);
        self.space.cancel(id);
        self.waiting.retain(|task| match task {
            Task::Write { io, .. } | Task::Read { io, .. } | Task::Flush { io } => *io != id,
        });
    }

    /// Starts what waited and can start now.
    pub(super) fn start_waiting(&mut self, out: &mut Vec<Effect>) {
        if self.phase != Phase::Serving {
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
                self.unflushed.insert(region);
                self.writes.insert(seq, PendingWrite { io, region, range });
                None
            }
            Task::Flush { io } => self.try_flush(io),
            Task::Read {
                io,
                part,
                range,
                tried,
                peeked,
            } => self.try_read(io, part, range, tried, peeked, out),
        }
    }

    fn try_flush(&mut self, io: IoId) -> Option<Task> {
        if !self.view.write_quorum(|id| self.is_active(id)) {
            return Some(Task::Flush { io });
        }
        let last = self.flushes.back().map(|flush| flush.seq);
        // Nothing was numbered since the last one, so that it covers everything for this one too.
        if let Some(seq) = last.filter(|seq| *seq == self.seq) {
            self.flushes.push_back(PendingFlush::sharing(seq, io));
            return None;
        }
        let own = self.flushes.iter().filter(|flush| flush.is_own()).count();
        if own >= FLUSHES_MAX {
            return Some(Task::Flush { io });
        }
        let seq = self.append(EntryOp::Flush);
        let regions = std::mem::take(&mut self.unflushed);
        self.flushes.push_back(PendingFlush::new(seq, io, regions));
        None
    }

    /// A part of a request is done. The last part answers the request, unless a flush must follow.
    pub(super) fn part_done(&mut self, id: IoId, out: &mut Vec<Effect>) {
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

    pub(super) fn finish(&mut self, id: IoId, result: IoResult, out: &mut Vec<Effect>) {
        if self.ios.remove(&id).is_some() {
            out.push(Effect::Reply { id, result });
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
            .chain(self.space.ranges().flat_map(|(offset, length)| {
                self.pieces(offset, length, u64::MAX)
                    .map(|(at, _)| self.settings.geometry.region_of(at))
            }))
            .filter(|region| !self.region_available(*region))
            .collect()
    }
}
