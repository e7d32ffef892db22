//! Requests of clients that have not been answered.
//!
//! A request waits here until the coordinator takes it, and stays until it is answered. If a region has lost its
//! holders and a successor of the coordinator decides again, the request is sent again. A request that waits too long
//! is answered with [`VolumeError::NotReady`].
//!
//! A write that was refused for lack of space rests for a moment and is sent again, if it may wait. A resting write
//! counts in no bound, so requests that need no new space go on.
//!
//! A compare-and-write is a fence from the moment it is taken up: earlier writes of the same bytes finish first, and
//! later ones wait behind it.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::extents::Piece;
use super::{Address, Answer, Compared, VolumeError, WhenFull, count, show};
use crate::coordinator::{IoError, IoId, IoOp, IoResult};
use crate::proto::{Config, Content, ReplicaId, overlap};

/// Requests that the owner holds, whether the coordinator has them or not.
const REQUESTS_MAX: usize = 2048;

/// Requests that the coordinator has, and bytes of these.
const UNDER_WAY_MAX: usize = 1024;
const UNDER_WAY_BYTES_MAX: u64 = 64 << 20;

/// How long a write rests that was refused for want of space.
const REST: Duration = Duration::from_millis(200);

/// How a client gets its answer.
pub(super) struct Reply<T>(oneshot::Sender<Answer<T>>);

impl<T> Reply<T> {
    pub(super) fn pair() -> (Reply<T>, oneshot::Receiver<Answer<T>>) {
        let (to, answer) = oneshot::channel();
        (Reply(to), answer)
    }

    /// Gives the answer. A client that has gone away does not want to know.
    pub(super) fn give(self, answer: Answer<T>) {
        let _ = self.0.send(answer);
    }
}

/// What a handle says to the owner.
pub(super) enum Command {
    Io {
        op: IoOp,
        reply: Reply<Vec<Content>>,
    },
    Compare {
        offset: u64,
        expected: Vec<Bytes>,
        data: Vec<Bytes>,
        fua: bool,
        reply: Reply<Compared>,
    },
    Grow {
        to: u64,
        reply: Reply<u64>,
    },
    Reach {
        addresses: BTreeMap<ReplicaId, Address>,
        reply: Reply<()>,
    },
    Reconfigure {
        /// The view from which it was decided. With a later one it is not begun.
        from: Option<u64>,
        config: Config,
        addresses: BTreeMap<ReplicaId, Address>,
        reply: Reply<()>,
    },
    /// Which files show a range of bytes.
    Pieces {
        range: (u64, u64),
        reply: Reply<Vec<Piece>>,
    },
    Scrub,
    Stop,
}

/// Who waits for the answer of a request.
enum Client {
    Plain(Reply<Vec<Content>>),
    /// A compare-and-write, by its fence.
    Fence(u64),
}

struct Request {
    op: IoOp,
    client: Client,
    since: Instant,
}

/// A compare-and-write.
struct Fence {
    range: (u64, u64),
    expected: Vec<Bytes>,
    /// What is to be written, until the bytes have been compared.
    write: Option<IoOp>,
    reply: Reply<Compared>,
    since: Instant,
    /// Whether a request of its own is waiting or under way.
    begun: bool,
}

/// All requests of clients.
#[derive(Default)]
pub(super) struct Requests {
    waiting: VecDeque<Request>,
    under_way: BTreeMap<IoId, Request>,
    under_way_bytes: u64,
    id_last: IoId,
    fences: BTreeMap<u64, Fence>,
    fence_last: u64,
    when_full: WhenFull,
    /// Writes that wait for space, and when each is asked again: the first one first.
    resting: VecDeque<(Instant, Request)>,
}

fn weight(op: &IoOp) -> u64 {
    match op {
        IoOp::Read { length, .. } => *length,
        IoOp::Write { data, .. } => data.iter().map(|piece| count(piece.len())).sum(),
        IoOp::Zero { .. } | IoOp::Flush => 0,
    }
}

/// The bytes that a request changes.
fn changes(op: &IoOp) -> Option<(u64, u64)> {
    match op {
        IoOp::Write { .. } | IoOp::Zero { .. } => op.range(),
        IoOp::Read { .. } | IoOp::Flush => None,
    }
}

impl Requests {
    pub(super) fn new(when_full: WhenFull) -> Requests {
        Requests {
            when_full,
            ..Requests::default()
        }
    }

    /// Whether another request is taken from the clients.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.len() + self.under_way.len() + self.fences.len() + self.resting.len()
            < REQUESTS_MAX
    }

    /// Whether a write waits for space.
    pub(super) fn has_resting(&self) -> bool {
        !self.resting.is_empty()
    }

    /// Lets those go on that have rested enough.
    fn wake(&mut self) {
        let now = Instant::now();
        while let Some((due, _)) = self.resting.front()
            && *due <= now
            && let Some((_, request)) = self.resting.pop_front()
        {
            self.waiting.push_back(request);
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty() && self.fences.is_empty()
    }

    /// Whether several requests wait or are under way.
    pub(super) fn is_concurrent(&self) -> bool {
        self.waiting.len() + self.under_way.len() > 1
    }

    pub(super) fn add(&mut self, op: IoOp, reply: Reply<Vec<Content>>) {
        self.waiting.push_back(Request {
            op,
            client: Client::Plain(reply),
            since: Instant::now(),
        });
    }

    pub(super) fn compare(&mut self, write: IoOp, expected: Vec<Bytes>, reply: Reply<Compared>) {
        let Some(range) = write.range() else { return };
        self.fence_last += 1;
        let fence = Fence {
            range,
            expected,
            write: Some(write),
            reply,
            since: Instant::now(),
            begun: false,
        };
        self.fences.insert(self.fence_last, fence);
    }

    /// The next request that the coordinator should take, if it takes one.
    pub(super) fn next(&mut self, accepts: impl Fn() -> bool) -> Option<(IoId, IoOp)> {
        if !accepts()
            || self.under_way.len() >= UNDER_WAY_MAX
            || self.under_way_bytes >= UNDER_WAY_BYTES_MAX
        {
            return None;
        }
        self.wake();
        self.begin_fences();
        let at = self
            .waiting
            .iter()
            .position(|request| self.is_free(request))?;
        let request = self.waiting.remove(at)?;
        self.id_last += 1;
        self.under_way_bytes += weight(&request.op);
        let op = request.op.clone();
        self.under_way.insert(self.id_last, request);
        Some((self.id_last, op))
    }

    /// Whether no fence is in the way of a request.
    fn is_free(&self, request: &Request) -> bool {
        let of = match request.client {
            Client::Fence(number) => number,
            Client::Plain(_) => u64::MAX,
        };
        self.fences.is_empty()
            || changes(&request.op).is_none_or(|range| {
                let earlier = self.fences.range(..of);
                let mut others = earlier.filter(|(number, _)| **number != of);
                !others.any(|(_, fence)| overlap(fence.range, range))
            })
    }

    /// Begins the comparisons for which all that came before is finished.
    fn begin_fences(&mut self) {
        let ready: Vec<u64> = self
            .fences
            .iter()
            .filter(|(number, fence)| {
                let earlier = self.fences.range(..**number);
                let mut writes = self
                    .under_way
                    .values()
                    .filter_map(|request| changes(&request.op));
                !fence.begun
                    && !writes.any(|range| overlap(range, fence.range))
                    && !earlier
                        .map(|(_, other)| other.range)
                        .any(|range| overlap(range, fence.range))
            })
            .map(|(number, _)| *number)
            .collect();
        for number in ready {
            if let Some(fence) = self.fences.get_mut(&number) {
                fence.begun = true;
                let (offset, length) = fence.range;
                self.waiting.push_back(Request {
                    op: IoOp::Read { offset, length },
                    client: Client::Fence(number),
                    since: fence.since,
                });
            }
        }
    }

    /// The coordinator has answered.
    pub(super) fn answered(&mut self, id: IoId, result: IoResult) {
        let Some(request) = self.under_way.remove(&id) else {
            return;
        };
        self.under_way_bytes -= weight(&request.op);
        if result == Err(IoError::NoSpace) && self.when_full == WhenFull::Wait {
            return self.resting.push_back((Instant::now() + REST, request));
        }
        let result = result.map_err(|error| match error {
            IoError::OutOfRange => VolumeError::OutOfRange,
            IoError::Medium => VolumeError::Medium,
            IoError::NoSpace => VolumeError::NoSpace,
            IoError::Busy => VolumeError::NotReady,
            IoError::Deposed => VolumeError::Deposed,
        });
        self.finish(request, result);
    }

    fn finish(&mut self, request: Request, result: Answer<Vec<Content>>) {
        match request.client {
            Client::Plain(reply) => reply.give(result),
            Client::Fence(number) => self.fence_step(number, request.since, result),
        }
    }

    fn fence_step(&mut self, number: u64, since: Instant, result: Answer<Vec<Content>>) {
        let Some(fence) = self.fences.get_mut(&number) else {
            return;
        };
        let outcome = match (result, fence.write.take()) {
            (Err(error), _) => Err(error),
            (Ok(_), None) => Ok(Compared::Written),
            (Ok(parts), Some(write)) => match first_difference(&fence.expected, parts) {
                Some(at) => Ok(Compared::Differs { at }),
                None => {
                    self.waiting.push_front(Request {
                        op: write,
                        client: Client::Fence(number),
                        since,
                    });
                    return;
                }
            },
        };
        if let Some(fence) = self.fences.remove(&number) {
            fence.reply.give(outcome);
        }
    }

    /// The coordinator is gone and a successor will be asked again, in the same order.
    pub(super) fn ask_again(&mut self) {
        let under_way = std::mem::take(&mut self.under_way);
        self.under_way_bytes = 0;
        for (_, request) in under_way.into_iter().rev() {
            self.waiting.push_front(request);
        }
    }

    /// Gives up what has waited too long. Returns what the coordinator has of that.
    pub(super) fn give_up(&mut self, patience: Duration, error: VolumeError) -> Vec<IoId> {
        let late = |request: &Request| request.since.elapsed() > patience;
        let waiting = std::mem::take(&mut self.waiting);
        let (too_late, waiting): (Vec<_>, VecDeque<_>) = {
            let mut too_late = Vec::new();
            let mut rest = VecDeque::new();
            for request in waiting {
                if late(&request) {
                    too_late.push(request);
                } else {
                    rest.push_back(request);
                }
            }
            (too_late, rest)
        };
        self.waiting = waiting;
        let ids: Vec<IoId> = self
            .under_way
            .iter()
            .filter(|(_, request)| late(request))
            .map(|(id, _)| *id)
            .collect();
        for request in too_late {
            self.finish(request, Err(error));
        }
        for id in &ids {
            if let Some(request) = self.under_way.remove(id) {
                self.under_way_bytes -= weight(&request.op);
                self.finish(request, Err(error));
            }
        }
        let resting = std::mem::take(&mut self.resting);
        let (tired, resting): (VecDeque<_>, VecDeque<_>) =
            resting.into_iter().partition(|(_, request)| late(request));
        self.resting = resting;
        for (_, request) in tired {
            self.finish(request, Err(VolumeError::NoSpaceYet));
        }
        let stuck: Vec<u64> = self
            .fences
            .iter()
            .filter(|(_, fence)| !fence.begun && fence.since.elapsed() > patience)
            .map(|(number, _)| *number)
            .collect();
        for number in stuck {
            if let Some(fence) = self.fences.remove(&number) {
                fence.reply.give(Err(error));
            }
        }
        ids
    }

    /// The volume has ended.
    pub(super) fn end(&mut self, error: VolumeError) {
        for request in self
            .waiting
            .drain(..)
            .chain(std::mem::take(&mut self.under_way).into_values())
            .chain(self.resting.drain(..).map(|(_, request)| request))
        {
            if let Client::Plain(reply) = request.client {
                reply.give(Err(error));
            }
        }
        for fence in std::mem::take(&mut self.fences).into_values() {
            fence.reply.give(Err(error));
        }
    }
}

/// Where the bytes that were read differ from those that were expected.
fn first_difference(expected: &[Bytes], parts: Vec<Content>) -> Option<u64> {
    let mut pieces = Vec::new();
    for part in parts {
        show(part, &mut pieces);
    }
    let mut found = pieces.iter().flat_map(|piece| piece.iter());
    let wanted = expected.iter().flat_map(|piece| piece.iter());
    let at = wanted.map(Some).position(|byte| found.next() != byte)?;
    Some(count(at))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn write(offset: u64, length: usize) -> IoOp {
        IoOp::Write {
            offset,
            data: vec![Bytes::from(vec![1; length])],
            fua: false,
        }
    }

    fn parts(bytes: &'static [u8]) -> IoResult {
        Ok(vec![Content::Data(Bytes::from_static(bytes))])
    }

    #[test]
    fn a_comparison_waits_for_writes_before_it_and_holds_those_after_it() {
        // Fails if a write of the same bytes can come between the comparison and its write.
        let mut requests = Requests::default();
        let next = |requests: &mut Requests| requests.next(|| true);
        let (reply, _first) = Reply::pair();
        requests.add(write(0, 8), reply);
        let (first, _) = next(&mut requests).unwrap();
        let (reply, mut outcome) = Reply::pair();
        requests.compare(write(4, 4), vec![Bytes::from_static(&[0; 4])], reply);
        let (reply, _behind) = Reply::pair();
        requests.add(write(0, 8), reply);
        let (reply, _elsewhere) = Reply::pair();
        requests.add(write(64, 8), reply);
        // Only the write of other bytes may go on.
        let (elsewhere, op) = next(&mut requests).unwrap();
        assert_eq!(op.range(), Some((64, 8)));
        assert!(next(&mut requests).is_none());
        requests.answered(first, Ok(Vec::new()));
        let (read, op) = next(&mut requests).unwrap();
        assert!(matches!(
            op,
            IoOp::Read {
                offset: 4,
                length: 4
            }
        ));
        assert!(next(&mut requests).is_none());
        requests.answered(read, parts(&[0; 4]));
        let (second, op) = next(&mut requests).unwrap();
        assert_eq!(op.range(), Some((4, 4)));
        assert!(next(&mut requests).is_none());
        requests.answered(second, Ok(Vec::new()));
        assert_eq!(outcome.try_recv().unwrap(), Ok(Compared::Written));
        let (behind, op) = next(&mut requests).unwrap();
        assert_eq!(op.range(), Some((0, 8)));
        requests.answered(behind, Ok(Vec::new()));
        requests.answered(elsewhere, Ok(Vec::new()));
        assert!(requests.is_idle());
    }

    #[test]
    fn a_comparison_that_differs_writes_nothing_and_says_where() {
        // Fails if the write follows although the bytes are others.
        let mut requests = Requests::default();
        let (reply, mut outcome) = Reply::pair();
        requests.compare(write(0, 4), vec![Bytes::from_static(&[1, 2, 3, 4])], reply);
        let (read, _) = requests.next(|| true).unwrap();
        requests.answered(read, parts(&[1, 2, 9, 4]));
        assert_eq!(outcome.try_recv().unwrap(), Ok(Compared::Differs { at: 2 }));
        assert!(requests.is_idle());
    }

    #[test]
    fn what_a_lost_coordinator_had_is_asked_again_in_its_order() {
        // Fails if a request is lost, or a later one overtakes it, when a successor is asked.
        let mut requests = Requests::default();
        let mut replies = Vec::new();
        for at in [0, 8, 16, 24] {
            let (reply, answer) = Reply::pair();
            requests.add(write(at, 8), reply);
            replies.push(answer);
        }
        for _ in 0..3 {
            requests.next(|| true).unwrap();
        }
        requests.ask_again();
        for at in [0, 8, 16, 24] {
            let (id, op) = requests.next(|| true).unwrap();
            assert_eq!(op.range(), Some((at, 8)));
            requests.answered(id, Ok(Vec::new()));
        }
        for mut reply in replies {
            assert!(reply.try_recv().unwrap().is_ok());
        }
    }
}
