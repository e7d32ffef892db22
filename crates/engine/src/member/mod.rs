//! The replica's half of the protocol: what it answers, and what it makes durable before it answers.
//!
//! Sans-IO: [`Member::apply`] takes an event and leaves effects in a buffer. It does not block and has no clock and no
//! randomness, so the simulator runs the same code.
//!
//! ```text
//!            Hello with a later promise                      Join, or Resume
//!   Strange ───────────────────────────▶ Promised ─────────────────────────────▶ Taking part
//!      ▲        promise made durable        │  regions are reported                  │ entries, reads,
//!      └────────────────────────────────────┴────────────────────────────────────────┘ repairs
//!                     session closed, gap in the messages, a write failed
//! ```
//!
//! # Three lanes
//!
//! *The ordered lane* works on one request after the other. *Reads* start in their turn and finish when the disk has
//! them; a write waits for reads of the same bytes, so a read sees exactly the entries before it. *The flush lane*
//! syncs and then makes a key durable, while the ordered lane goes on. Requests that wait for a sync share one.
//!
//! # Many events, one answer
//!
//! [`Member::apply`] is three steps: [`Member::take`] takes an event, [`Member::pump`] starts what can start, and
//! [`Member::speak`] reports how far the entries are. A driver that has many events takes them all first, and lets the
//! member speak once: one note and one answer for all of them.
//!
//! # What is durable when
//!
//! - A promise: before the welcome. From then on an older coordinator is refused. That is the fence.
//! - A region's stamp: before the first write of an epoch to it. So a stamp is never older than the
//!   bytes, whatever a power loss leaves of them.
//! - The durable key: after a sync of all entries up to it, before `Flushed`.
//! - A stale mark: after a sync of the bytes whose key it keeps, before the replica takes part.
//! - The end of a stale mark: after a sync of the repaired bytes.

mod flush;
mod join;
mod lane;
mod read;
mod repair;
mod space;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use uuid::Uuid;

use crate::proto::{
    Answer, Body, Content, Entry, EntryOp, Envelope, Geometry, Key, Meta, MetaChange, Promise,
    Region, RegionState, ReplicaId, Request, Stale, Surveyed,
};
use flush::FlushLane;
use lane::Work;
use repair::Overlay;

/// The most requests that a session may have waiting. A coordinator that sends more is broken.
pub const REQUESTS_MAX: usize = 4096;

/// The most reads that are at the disk at the same time.
pub const READS_MAX: usize = 64;

/// The most regions that are under repair at the same time.
pub const REPAIRS_MAX: usize = 64;

/// Which connection. The driver gives every connection of a process another number.
pub type SessionId = u64;

/// What happens to a replica.
#[derive(Clone, Debug)]
pub enum Event {
    /// A message arrived.
    Received {
        /// On which connection.
        session: SessionId,
        /// The message.
        envelope: Envelope,
    },
    /// A connection is gone.
    Closed {
        /// Which one.
        session: SessionId,
    },
    /// Whether little space is left besides what already waits.
    Space {
        /// Whether it is low.
        is_low: bool,
    },
    /// The disk has done what it was asked, or not.
    Disk {
        /// Which effect.
        token: u64,
        /// How it went.
        result: DiskResult,
    },
}

/// How a disk operation went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskResult {
    /// Done.
    Done,
    /// Done, and these are the bytes.
    Read(Content),
    /// Done, and some of the blocks are not what was written there.
    Rotten {
        /// The bytes.
        content: Content,
        /// Which blocks are not right, counted from the first that was read.
        bad: Vec<u32>,
    },
    /// There is no space. A write may have been done in part, anything else not at all.
    NoSpace,
    /// It failed, and what is on the disk there is unknown.
    Failed,
}

/// What the driver has to do.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send a message.
    Send {
        /// On which connection.
        session: SessionId,
        /// The message.
        envelope: Envelope,
    },
    /// Close a connection.
    Close {
        /// Which one.
        session: SessionId,
    },
    /// Do something with the disk, then send [`Event::Disk`]. Operations on the same bytes, and changes of the meta
    /// data, are done in the order in which they were requested.
    Disk {
        /// Comes back with the event.
        token: u64,
        /// What to do.
        op: DiskOp,
    },
    /// Remember this key, without waiting for it to be durable: it must survive the process, and may be lost with the
    /// machine's memory.
    Note {
        /// How far the bytes are.
        key: Key,
    },
    /// The meta data could not be written. Open the member again from the disk.
    Halt,
}

/// What a replica wants from its disk.
#[derive(Clone, Debug)]
pub enum DiskOp {
    /// Write bytes.
    Write {
        /// The first byte.
        offset: u64,
        /// The bytes.
        data: Bytes,
    },
    /// Zero a range and give its space back.
    Zero {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Read bytes. A range that takes no space may be answered as zeros.
    Read {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Make durable all that was written before.
    Sync {
        /// The sums of its blocks too.
        sums: bool,
    },
    /// Make a change of the meta data durable. Changes of the size extend the data file first, and
    /// may answer that there is no space.
    Persist(Box<MetaChange>),
    /// Set space aside for that size.
    Reserve {
        /// The size.
        size: u64,
    },
    /// Allocate space for a range, so that a write there needs none. Reads there still return the same.
    Allocate {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Zero a range, without taking space and without giving any back.
    Clear {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
}

/// Faults that can be switched on, so that tests show that they would be found.
#[cfg(feature = "flaws")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Work on what a superseded coordinator still sends.
    pub skip_fence: bool,
}

/// The session that the replica obeys.
struct Bound {
    session: SessionId,
    /// The index of the next message to it.
    out_index: u64,
    /// The index of the next message from it.
    in_index: u64,
    /// Whether a `Join` or `Resume` has been worked on.
    takes_part: bool,
    queue: VecDeque<Request>,
    /// The bytes of writes and repairs in the queue.
    queue_bytes: u64,
    /// The regions of the next `Join`.
    stale: Vec<Region>,
    restamp: Vec<Region>,
}

impl Bound {
    fn push(&mut self, request: Request) {
        self.queue_bytes += weight(&request);
        self.queue.push_back(request);
    }

    fn pop(&mut self) -> Option<Request> {
        let request = self.queue.pop_front()?;
        self.queue_bytes -= weight(&request);
        Some(request)
    }

    /// Gives a request back that must wait.
    fn push_front(&mut self, request: Request) {
        self.queue_bytes += weight(&request);
        self.queue.push_front(request);
    }
}

/// The bytes that a request holds.
fn weight(request: &Request) -> u64 {
    match request {
        Request::Entry(Entry {
            op: EntryOp::Write { data, .. },
            ..
        })
        | Request::RepairData {
            content: Content::Data(data),
            ..
        }
        | Request::RepairPart {
            content: Content::Data(data),
            ..
        } => u64::try_from(data.len()).unwrap_or(u64::MAX),
        _ => 0,
    }
}

/// A read at the disk.
struct ReadAtDisk {
    session: SessionId,
    tag: u64,
    range: (u64, u64),
    purpose: Purpose,
}

/// What a read is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Somebody wants the bytes.
    Bytes,
    /// Somebody wants those of its bytes that are right.
    Salvage,
    /// Somebody wants to know whether they are right.
    Verify,
}

/// A hello that waits until the disk is at rest.
#[derive(Clone, Copy)]
struct Waiting {
    session: SessionId,
    promise: Promise,
}

/// One replica's state machine.
pub struct Member {
    volume: Uuid,
    replica: ReplicaId,
    geometry: Geometry,
    /// What is on the disk, or on its way there.
    meta: Meta,
    /// How far the bytes are, durable or not.
    applied: Key,
    /// Whether the bytes are at exactly that key: no write has failed or been cut by a crash.
    exact: bool,
    halted: bool,
    /// There is little space left.
    is_low: bool,
    /// The last entry that was applied and not answered, and the session that waits for it.
    unsaid: Option<(SessionId, Key)>,
    bound: Option<Bound>,
    hello: Option<Waiting>,
    lane: Option<(u64, Work)>,
    reads: BTreeMap<u64, ReadAtDisk>,
    flush: FlushLane,
    repairs: BTreeMap<Region, Overlay>,
    /// Regions of which not every block is what was written, and which were written last.
    suspects: BTreeSet<Region>,
    /// Regions for which there was no space in this session, until their repair begins.
    behind: BTreeSet<Region>,
    token_last: u64,
    #[cfg(feature = "flaws")]
    flaws: Flaws,
}

impl Member {
    /// A replica as it is found on its disk. `note` is the key of the last [`Effect::Note`], if the
    /// machine has not lost its memory since.
    pub fn open(
        volume: Uuid,
        replica: ReplicaId,
        geometry: Geometry,
        meta: Meta,
        note: Option<Key>,
    ) -> Member {
        // A note says how far the bytes are in the history that the meta data know.
        let note = note.filter(|_| !meta.is_lost());
        let applied = note.map_or(meta.durable, |note| note.max(meta.durable));
        Member {
            volume,
            replica,
            geometry,
            meta,
            applied,
            exact: false,
            halted: false,
            is_low: false,
            unsaid: None,
            bound: None,
            hello: None,
            lane: None,
            reads: BTreeMap::new(),
            flush: FlushLane::default(),
            repairs: BTreeMap::new(),
            suspects: BTreeSet::new(),
            behind: BTreeSet::new(),
            token_last: 0,
            #[cfg(feature = "flaws")]
            flaws: Flaws::default(),
        }
    }

    /// The same replica, which has found wrong blocks in these regions. They are reported as equal to no other, so
    /// that a coordinator prefers another replica's bytes if it can.
    pub fn suspecting(mut self, regions: impl IntoIterator<Item = Region>) -> Member {
        self.suspects.extend(regions);
        self
    }

    /// What a coordinator is told of a region.
    fn reported(&self, region: Region) -> RegionState {
        let state = self.meta.region(region);
        let is_suspect = self.suspects.contains(&region);
        RegionState {
            stale: state.stale.or_else(|| {
                is_suspect.then_some(Stale {
                    key: self.applied,
                    mixed: true,
                })
            }),
            ..state
        }
    }

    /// The same replica with faults.
    #[cfg(feature = "flaws")]
    pub fn with_flaws(mut self, flaws: Flaws) -> Member {
        self.flaws = flaws;
        self
    }

    /// What is on the disk, or on its way there.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// How far the bytes are.
    pub fn applied(&self) -> Key {
        self.applied
    }

    /// Works on one event. Effects are added to `out`.
    pub fn apply(&mut self, event: Event, out: &mut Vec<Effect>) {
        self.take(event, out);
        self.pump(out);
        self.speak(out);
    }

    /// Whether it obeys a session, or will as soon as its promise is durable.
    pub fn obeys(&self, session: SessionId) -> bool {
        let promised = match &self.lane {
            Some((_, Work::Promise(hello))) => hello.session == session,
            _ => false,
        };
        promised
            || self.is_bound(session)
            || self.hello.is_some_and(|hello| hello.session == session)
    }

    /// How many requests of a session wait, and how many bytes these have.
    pub fn backlog(&self, session: SessionId) -> (usize, u64) {
        match &self.bound {
            Some(bound) if bound.session == session => (bound.queue.len(), bound.queue_bytes),
            _ => (0, 0),
        }
    }

    /// Takes one event. [`Member::pump`] and [`Member::speak`] must follow.
    pub fn take(&mut self, event: Event, out: &mut Vec<Effect>) {
        if self.halted {
            return;
        }
        match event {
            Event::Received { session, envelope } => self.received(session, envelope, out),
            Event::Closed { session } => {
                if self.hello.is_some_and(|hello| hello.session == session) {
                    self.hello = None;
                }
                if self.is_bound(session) {
                    self.unbind();
                }
            }
            Event::Space { is_low } => {
                let changed = self.is_low != is_low;
                self.is_low = is_low;
                let session = self.bound.as_ref().map(|bound| bound.session);
                if let Some(session) = session.filter(|_| changed) {
                    self.answer(session, Answer::Space { is_low }, out);
                }
            }
            Event::Disk { token, result } => self.disk(token, result, out),
        }
    }

    /// Reports how far the entries are that were applied since the last report: first in the note for the next process
    /// that opens this replica, then to the coordinator.
    pub fn speak(&mut self, out: &mut Vec<Effect>) {
        if self.halted {
            return;
        }
        if let Some((session, key)) = self.unsaid.take() {
            out.push(Effect::Note { key: self.applied });
            self.answer(session, Answer::Done { seq: key.seq }, out);
        }
    }

    fn is_bound(&self, session: SessionId) -> bool {
        self.bound
            .as_ref()
            .is_some_and(|bound| bound.session == session)
    }

    fn unbind(&mut self) {
        self.bound = None;
        self.repairs.clear();
        self.behind.clear();
    }

    /// Closes the session that the replica obeys. The coordinator will come again.
    fn close(&mut self, out: &mut Vec<Effect>) {
        if let Some(bound) = &self.bound {
            out.push(Effect::Close {
                session: bound.session,
            });
        }
        self.unbind();
    }

    fn received(&mut self, session: SessionId, envelope: Envelope, out: &mut Vec<Effect>) {
        let meant = envelope.volume == self.volume && envelope.replica == self.replica;
        let Body::Request(request) = envelope.body else {
            return self.reject(session, out);
        };
        if !meant {
            return self.reject(session, out);
        }
        if matches!(request, Request::Survey) {
            return self.survey(session, out);
        }
        if matches!(request, Request::Hello) {
            if envelope.index == 0 && !self.is_bound(session) {
                self.hello(session, envelope.promise, out);
            }
            return;
        }
        if self.hello.is_some_and(|hello| hello.session == session) {
            // Nothing may follow a hello before it is answered.
            return self.reject(session, out);
        }
        if !self.is_bound(session) && !self.ignores_fence() {
            return self.refuse(session, out);
        }
        let Some(bound) = &mut self.bound else { return };
        if bound.session != session {
            bound.push(request);
            return;
        }
        if envelope.index < bound.in_index {
            return;
        }
        if envelope.index > bound.in_index || bound.queue.len() >= REQUESTS_MAX {
            return self.close(out);
        }
        bound.in_index += 1;
        if matches!(request, Request::Call) {
            // The disk may take its time; whoever calls wants to know whether anybody is there.
            return self.answer(session, Answer::Heard, out);
        }
        bound.push(request);
    }

    /// Tells any peer what is here. It promises nothing and disturbs nobody.
    fn survey(&mut self, session: SessionId, out: &mut Vec<Effect>) {
        if self.obeys(session) {
            return self.reject(session, out);
        }
        let count = |regions: usize| u64::try_from(regions).unwrap_or(u64::MAX);
        let mixed = self.meta.stale.values().filter(|stale| stale.mixed);
        let surveyed = Surveyed {
            promise: self.meta.promise,
            key: self.applied,
            exact: self.exact,
            size: self.meta.size,
            size_version: self.meta.size_version,
            view: self.meta.view.clone(),
            regions: count(self.meta.stamps.len()),
            stale: count(self.meta.stale.len()),
            mixed: count(mixed.count()),
            written_at: None,
        };
        let envelope = self.envelope(0, Answer::Surveyed(Box::new(surveyed)));
        out.push(Effect::Send { session, envelope });
    }

    fn hello(&mut self, session: SessionId, promise: Promise, out: &mut Vec<Effect>) {
        let latest = self.hello.map_or(self.meta.promise, |hello| {
            hello.promise.max(self.meta.promise)
        });
        let ours = promise == latest;
        let later = promise.generation > latest.generation
            && promise.generation <= crate::proto::Epoch::GENERATION_MAX;
        if !(ours || later) {
            return self.refuse(session, out);
        }
        if let Some(earlier) = self.hello.take()
            && earlier.session != session
        {
            out.push(Effect::Close {
                session: earlier.session,
            });
        }
        // The older coordinator is cut off at once. What it has sent and what was not begun is
        // dropped: nobody has been told that it was done.
        if self.ignores_fence() {
            self.unbind();
        } else {
            self.close(out);
        }
        self.hello = Some(Waiting { session, promise });
    }

    /// Tells a superseded coordinator so, and hangs up.
    fn refuse(&mut self, session: SessionId, out: &mut Vec<Effect>) {
        let promise = self.meta.promise;
        let envelope = self.envelope(0, Answer::Refused { promise });
        out.push(Effect::Send { session, envelope });
        out.push(Effect::Close { session });
    }

    /// Hangs up on who speaks of something else, without a word.
    fn reject(&mut self, session: SessionId, out: &mut Vec<Effect>) {
        out.push(Effect::Close { session });
        if self.hello.is_some_and(|hello| hello.session == session) {
            self.hello = None;
        }
        if self.is_bound(session) {
            self.unbind();
        }
    }

    fn envelope(&self, index: u64, answer: Answer) -> Envelope {
        Envelope {
            volume: self.volume,
            replica: self.replica,
            promise: self.meta.promise,
            size_version: self.meta.size_version,
            index,
            body: Body::Answer(answer),
        }
    }

    /// Sends to the session that the replica obeys, if it still is that one.
    fn answer(&mut self, session: SessionId, answer: Answer, out: &mut Vec<Effect>) {
        let Some(bound) = self.bound.as_mut().filter(|bound| bound.session == session) else {
            return;
        };
        let index = bound.out_index;
        bound.out_index += 1;
        let envelope = self.envelope(index, answer);
        out.push(Effect::Send { session, envelope });
    }

    fn ask_disk(&mut self, op: DiskOp, out: &mut Vec<Effect>) -> u64 {
        self.token_last += 1;
        let token = self.token_last;
        if let DiskOp::Persist(change) = &op {
            self.meta.update(self.geometry, change);
        }
        out.push(Effect::Disk { token, op });
        token
    }

    fn disk(&mut self, token: u64, result: DiskResult, out: &mut Vec<Effect>) {
        if let Some(read) = self.reads.remove(&token) {
            self.read_done(&read, result, out);
        } else if self.flush.token == Some(token) {
            self.flush_step(result, out);
        } else if self.lane.as_ref().is_some_and(|(at, _)| *at == token)
            && let Some((_, work)) = self.lane.take()
        {
            self.lane_step(work, result, out);
        }
    }

    /// The meta data on the disk are not what we think. Only the disk knows now.
    fn halt(&mut self, out: &mut Vec<Effect>) {
        self.close(out);
        self.halted = true;
        out.push(Effect::Halt);
    }

    #[cfg(feature = "flaws")]
    fn ignores_fence(&self) -> bool {
        self.flaws.skip_fence
    }

    #[cfg(not(feature = "flaws"))]
    #[allow(clippy::unused_self)]
    fn ignores_fence(&self) -> bool {
        false
    }
}
