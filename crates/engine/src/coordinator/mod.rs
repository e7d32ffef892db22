//! The coordinator of a volume: it numbers what happens, sends it to the replicas, and decides when a
//! client may be told that it has happened.
//!
//! Sans-IO: [`Coordinator::apply`] takes the time and an event, and leaves effects in a buffer. One
//! owner, no locks, no clock, no sockets; the simulator runs it as it is.
//!
//! ```text
//!               promises and reports of          the decision is durable
//!               RF - CF + 1 replicas             at CF replicas
//!   Gathering ────────────────────▶ Installing ───────────────▶ Serving
//!       │                               │                          │
//!       └───────────────────────────────┴────────── Over ◀─────────┘
//!            a later coordinator has a promise, or a region has no holder left (then a
//!            successor with a higher generation decides again)
//! ```
//!
//! and each replica, as seen from here:
//!
//! ```text
//!   away ──▶ Greeting ──▶ Reporting ──▶ Reported ──▶ Joining ──▶ Active
//!               │ welcome, short absence: what it missed is in the log   ▲
//!               └────────────────────────────────────────────────────────┘
//!   any of them ──▶ away: connection lost, no answer in time, too far behind
//! ```
//!
//! Files: `takeover` (report, decide, join), `stream` (log and windows), `io` (what clients ask for),
//! `repair`, `growth`, `change` (who the replicas are), `status`.

mod change;
mod growth;
mod io;
mod log;
mod peer;
mod region_set;
mod repair;
mod status;
mod stream;
mod takeover;

use std::collections::{BTreeMap, VecDeque};

use uuid::Uuid;

use crate::proto::{
    Answer, Body, Content, Envelope, Epoch, Geometry, Promise, Region, ReplicaId, Request,
    SnapshotRecord, View,
};
pub use growth::GrowthHeld;
pub use io::{IoError, IoId, IoOp, IoResult};
pub use status::{ReplicaState, Status};

use change::Change;
use growth::Growth;
use io::{Io, PendingFlush, PendingRead, PendingWrite, Task};
use log::Log;
use peer::{Peer, Session};
use repair::RepairRead;

/// Which connection. The driver gives every connection of a process another number.
pub type SessionId = u64;

/// Bounds on memory and patience.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Entries that are kept for replicas that are behind or were away for a moment.
    pub log_entries_max: usize,
    /// Bytes of these entries.
    pub log_bytes_max: u64,
    /// Entries that a replica may have unanswered.
    pub window_entries_max: usize,
    /// Bytes that a replica may have unanswered.
    pub window_bytes_max: u64,
    /// Parts of client requests that may wait.
    pub waiting_max: usize,
    /// How long a replica may owe an answer for what the others have answered already.
    pub straggler_ms: u64,
    /// How long a replica may owe any answer.
    pub hang_ms: u64,
    /// How long a takeover waits for replicas beyond a quorum.
    pub gather_ms: u64,
    /// How long replicas have to set space aside, and to raise their size.
    pub growth_ms: u64,
    /// How long until a growth that was held is tried again.
    pub growth_retry_ms: u64,
    /// How often a new epoch begins while there are writes.
    pub roll_ms: u64,
    /// Regions of one replica that are repaired at the same time.
    pub repairs_per_replica_max: usize,
    /// Bytes that are repaired in a second, over all replicas, beside what clients wait for.
    pub repair_bytes_per_second: u64,
    /// How long until a repair that failed is tried again.
    pub repair_retry_ms: u64,
    /// How long a region may be without any holder before somebody decides again.
    pub retake_ms: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            log_entries_max: 4096,
            log_bytes_max: 64 << 20,
            window_entries_max: 256,
            window_bytes_max: 16 << 20,
            waiting_max: 1024,
            straggler_ms: 2_000,
            hang_ms: 5_000,
            gather_ms: 500,
            growth_ms: 2_000,
            growth_retry_ms: 5_000,
            roll_ms: 10_000,
            repairs_per_replica_max: 8,
            repair_bytes_per_second: 200 << 20,
            repair_retry_ms: 1_000,
            retake_ms: 2_000,
        }
    }
}

/// Faults that can be switched on, so that tests show that they would be found.
#[cfg(feature = "flaws")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Acknowledge as soon as one replica has a write.
    pub ack_below_cf: bool,
    /// Raise the volume before the replicas are raised.
    pub raise_early: bool,
}

/// What a coordinator is told when it is made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The volume.
    pub volume: Uuid,
    /// How the volume is cut.
    pub geometry: Geometry,
    /// Who this coordinator is. Its generation is above all earlier ones.
    pub promise: Promise,
    /// Who the replicas are, as far as it is known. The replicas may know better.
    pub view: View,
    /// Bounds.
    pub limits: Limits,
    /// Faults.
    #[cfg(feature = "flaws")]
    pub flaws: Flaws,
}

/// What happens to a coordinator.
#[derive(Clone, Debug)]
pub enum Event {
    /// There is a connection to a replica.
    Opened {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
    },
    /// A connection is gone.
    Closed {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
    },
    /// A message arrived.
    Received {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
        /// The message.
        envelope: Envelope,
    },
    /// A client wants something.
    Io {
        /// Comes back with the reply.
        id: IoId,
        /// What it wants.
        op: IoOp,
    },
    /// The volume should have this size. A later wish replaces an earlier one.
    Grow {
        /// The size.
        to: u64,
    },
    /// The present moment should be marked.
    Snapshot {
        /// Under which id.
        id: Uuid,
    },
    /// The replicas should be these. A later wish replaces an earlier one.
    Reconfigure {
        /// The replicas and their consistency factor.
        config: crate::proto::Config,
    },
    /// Time has passed. To be said several times a second.
    Tick,
}

/// What the driver has to do, or may want to know.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send a message.
    Send {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
        /// The message.
        envelope: Envelope,
    },
    /// Close a connection, and open another one after a moment.
    Close {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
    },
    /// Answer a client.
    Reply {
        /// Its request.
        id: IoId,
        /// The answer.
        result: IoResult,
    },
    /// The volume serves I/O from now on, with this size.
    Serving {
        /// The size.
        size: u64,
    },
    /// The volume has another size. Clients should be told.
    Resized {
        /// The size.
        size: u64,
    },
    /// The marker is kept by a quorum.
    Marked {
        /// The snapshot.
        snapshot: SnapshotRecord,
    },
    /// The replicas are others from now on. Connect to those that are new.
    ViewChanged {
        /// The view.
        view: View,
    },
    /// Another coordinator has taken over. This one does nothing more.
    Deposed {
        /// Its promise.
        by: Promise,
    },
    /// A region has no holder among the replicas that are there. A successor with a higher generation
    /// must decide again. This one does nothing more.
    Retake,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Gathering { quorum_since: Option<u64> },
    Installing,
    Serving,
    Over,
}

/// The coordinator of one volume.
pub struct Coordinator {
    settings: Settings,
    phase: Phase,
    now: u64,
    view: View,
    peers: BTreeMap<ReplicaId, Peer>,
    epoch: Epoch,
    epoch_since: u64,
    epoch_used: bool,
    seq: u64,
    log: Log,
    /// The epoch of the last write to every region, in the history that counts.
    stamps: Vec<Epoch>,
    size: u64,
    size_version: u64,
    snapshots: BTreeMap<Uuid, SnapshotRecord>,
    marking: Vec<(u64, SnapshotRecord)>,

    ios: BTreeMap<IoId, Io>,
    waiting: VecDeque<Task>,
    writes: BTreeMap<u64, PendingWrite>,
    reads: BTreeMap<u64, PendingRead>,
    flushes: Vec<PendingFlush>,
    /// Regions with writes that no complete flush covers, and the last of these.
    unflushed: BTreeMap<Region, u64>,
    tag_last: u64,

    repair_reads: BTreeMap<u64, RepairRead>,
    repair_budget: u64,
    budget_at: u64,
    orphaned_since: Option<u64>,

    growth: Growth,
    change: Change,
}

impl Coordinator {
    /// A coordinator that takes over as soon as it has connections.
    pub fn new(settings: Settings) -> Coordinator {
        let peers = settings
            .view
            .members()
            .into_iter()
            .map(|id| (id, Peer::default()))
            .collect();
        Coordinator {
            phase: Phase::Gathering { quorum_since: None },
            now: 0,
            view: settings.view.clone(),
            peers,
            epoch: Epoch::first(settings.promise.generation),
            epoch_since: 0,
            epoch_used: false,
            seq: 0,
            log: Log::default(),
            stamps: Vec::new(),
            size: 0,
            size_version: 0,
            snapshots: BTreeMap::new(),
            marking: Vec::new(),
            ios: BTreeMap::new(),
            waiting: VecDeque::new(),
            writes: BTreeMap::new(),
            reads: BTreeMap::new(),
            flushes: Vec::new(),
            unflushed: BTreeMap::new(),
            tag_last: 0,
            repair_reads: BTreeMap::new(),
            repair_budget: 0,
            budget_at: 0,
            orphaned_since: None,
            growth: Growth::default(),
            change: Change::default(),
            settings,
        }
    }

    /// Works on one event. Effects are added to `out`.
    pub fn apply(&mut self, now_ms: u64, event: Event, out: &mut Vec<Effect>) {
        self.now = self.now.max(now_ms);
        if self.phase == Phase::Over {
            return self.after_the_end(event, out);
        }
        match event {
            Event::Opened { replica, session } => self.opened(replica, session, out),
            Event::Closed { replica, session } => self.closed(replica, session),
            Event::Received {
                replica,
                session,
                envelope,
            } => self.received(replica, session, envelope, out),
            Event::Io { id, op } => self.io(id, op, out),
            Event::Grow { to } => self.grow(to),
            Event::Snapshot { id } => self.mark(id),
            Event::Reconfigure { config } => self.reconfigure(config),
            Event::Tick => self.tick(out),
        }
        self.maintain(out);
    }

    /// Brings everything to where the last event allows it to be.
    fn maintain(&mut self, out: &mut Vec<Effect>) {
        self.gather_step(out);
        if self.phase == Phase::Serving {
            self.settle(out);
            self.growth_step(out);
            self.change_step(out);
            self.repair_schedule(out);
            self.start_waiting(out);
        }
        self.pump_all(out);
    }

    fn after_the_end(&mut self, event: Event, out: &mut Vec<Effect>) {
        match event {
            Event::Opened { replica, session } => out.push(Effect::Close { replica, session }),
            Event::Io { id, .. } => out.push(Effect::Reply {
                id,
                result: Err(IoError::Deposed),
            }),
            _ => {}
        }
    }

    /// Nothing more is done. Who waits is told that the outcome is unknown.
    fn end(&mut self, effect: Effect, out: &mut Vec<Effect>) {
        self.phase = Phase::Over;
        out.push(effect);
        for (replica, peer) in &mut self.peers {
            if let Some(session) = peer.session.take() {
                out.push(Effect::Close {
                    replica: *replica,
                    session: session.id,
                });
            }
        }
        for (id, _) in std::mem::take(&mut self.ios) {
            out.push(Effect::Reply {
                id,
                result: Err(IoError::Deposed),
            });
        }
    }

    fn opened(&mut self, replica: ReplicaId, session: SessionId, out: &mut Vec<Effect>) {
        self.drop_session(replica, out);
        let peer = self.peers.entry(replica).or_default();
        peer.session = Some(Session::new(session, self.now));
        self.send(replica, Request::Hello, out);
    }

    fn closed(&mut self, replica: ReplicaId, session: SessionId) {
        let ours = self
            .peers
            .get(&replica)
            .and_then(|peer| peer.session.as_ref())
            .is_some_and(|ours| ours.id == session);
        if ours {
            self.forget_session(replica);
        }
    }

    /// Closes a replica's session, if it has one.
    fn drop_session(&mut self, replica: ReplicaId, out: &mut Vec<Effect>) {
        let session = self
            .peers
            .get(&replica)
            .and_then(|peer| peer.session.as_ref())
            .map(|session| session.id);
        if let Some(session) = session {
            out.push(Effect::Close { replica, session });
            self.forget_session(replica);
        }
    }

    /// What was asked of a replica that is gone is asked of another one.
    fn forget_session(&mut self, replica: ReplicaId) {
        if let Some(peer) = self.peers.get_mut(&replica) {
            peer.session = None;
            peer.repairs.clear();
        }
        self.reads_from_gone(replica);
        self.repair_reads_from_gone(replica);
    }

    fn send(&mut self, replica: ReplicaId, request: Request, out: &mut Vec<Effect>) {
        let Some(session) = self
            .peers
            .get_mut(&replica)
            .and_then(|peer| peer.session.as_mut())
        else {
            return;
        };
        let index = session.out_index;
        session.out_index += 1;
        let envelope = Envelope {
            volume: self.settings.volume,
            replica,
            promise: self.settings.promise,
            size_version: self.size_version,
            index,
            body: Body::Request(request),
        };
        out.push(Effect::Send {
            replica,
            session: session.id,
            envelope,
        });
    }

    fn received(
        &mut self,
        replica: ReplicaId,
        session: SessionId,
        envelope: Envelope,
        out: &mut Vec<Effect>,
    ) {
        let Some(ours) = self
            .peers
            .get_mut(&replica)
            .and_then(|peer| peer.session.as_mut())
            .filter(|ours| ours.id == session)
        else {
            return;
        };
        let Body::Answer(answer) = envelope.body else {
            return self.drop_session(replica, out);
        };
        if envelope.volume != self.settings.volume || envelope.replica != replica {
            return self.drop_session(replica, out);
        }
        if let Answer::Refused { promise } = answer {
            if promise > self.settings.promise {
                return self.end(Effect::Deposed { by: promise }, out);
            }
            return self.drop_session(replica, out);
        }
        if envelope.promise != self.settings.promise {
            return self.drop_session(replica, out);
        }
        if envelope.index < ours.in_index {
            return;
        }
        if envelope.index > ours.in_index {
            return self.drop_session(replica, out);
        }
        ours.in_index += 1;
        self.answered(replica, answer, out);
    }

    fn answered(&mut self, replica: ReplicaId, answer: Answer, out: &mut Vec<Effect>) {
        match answer {
            Answer::Welcome(welcome) => self.welcomed(replica, welcome, out),
            Answer::Refused { .. } => {}
            Answer::Regions { from, states } => self.reported(replica, from, states, out),
            Answer::Joined => self.joined(replica),
            Answer::JoinNoSpace => self.drop_session(replica, out),
            Answer::Done { seq } => self.done(replica, seq),
            Answer::Flushed { seq } => self.flushed(replica, seq),
            Answer::Reserved { size, granted } => self.reserved(replica, size, granted),
            Answer::Read { tag, result } => self.read_answered(replica, tag, result, out),
            Answer::RepairDone { region } => self.repaired(replica, region),
        }
    }

    fn tick(&mut self, out: &mut Vec<Effect>) {
        self.patience(out);
        if self.phase != Phase::Serving {
            return;
        }
        if self.epoch_used
            && self.now.saturating_sub(self.epoch_since) >= self.settings.limits.roll_ms
            && let Some(next) = self.epoch.next()
        {
            self.epoch = next;
            self.epoch_since = self.now;
            self.epoch_used = false;
        }
        self.repair_refill();
        self.forgive_damage(out);
        self.look_for_orphans(out);
    }

    /// A region whose holders are all away can be served by nobody. If enough replicas are there, a
    /// new decision finds the best of what they have.
    fn look_for_orphans(&mut self, out: &mut Vec<Effect>) {
        let quorum = self.view.takeover_quorum(|id| self.is_active(id))
            && self.view.write_quorum(|id| self.is_active(id));
        if !(quorum && self.has_orphans()) {
            self.orphaned_since = None;
            return;
        }
        let since = *self.orphaned_since.get_or_insert(self.now);
        if self.now.saturating_sub(since) >= self.settings.limits.retake_ms {
            self.end(Effect::Retake, out);
        }
    }

    fn has_orphans(&self) -> bool {
        let mut active = self.peers.values().filter(|peer| peer.is_active());
        let Some(first) = active.next() else {
            return false;
        };
        first
            .stale
            .iter()
            .any(|region| active.clone().all(|peer| peer.stale.contains(region)))
    }

    fn mark(&mut self, id: Uuid) {
        if self.phase != Phase::Serving
            || self.snapshots.contains_key(&id)
            || self.snapshots.len() >= crate::proto::SNAPSHOTS_MAX
        {
            return;
        }
        let record = SnapshotRecord {
            id,
            size: self.size,
            at: crate::proto::Key {
                epoch: self.epoch,
                seq: self.seq + 1,
            },
        };
        self.snapshots.insert(id, record);
        let seq = self.append(crate::proto::EntryOp::Snapshot(record));
        self.marking.push((seq, record));
    }

    fn is_active(&self, id: ReplicaId) -> bool {
        self.peers.get(&id).is_some_and(Peer::is_active)
    }

    /// Whether a replica is there and a region of it counts.
    fn holds(&self, id: ReplicaId, region: Region) -> bool {
        self.peers.get(&id).is_some_and(|peer| peer.holds(region))
    }

    /// Whether I/O on a region may go on: CF replicas that are there hold it.
    fn region_available(&self, region: Region) -> bool {
        self.view.write_quorum(|id| self.holds(id, region))
    }

    fn next_tag(&mut self) -> u64 {
        self.tag_last += 1;
        self.tag_last
    }

    #[cfg(feature = "flaws")]
    fn acks_below_cf(&self) -> bool {
        self.settings.flaws.ack_below_cf
    }

    #[cfg(not(feature = "flaws"))]
    #[allow(clippy::unused_self)]
    fn acks_below_cf(&self) -> bool {
        false
    }

    #[cfg(feature = "flaws")]
    fn raises_early(&self) -> bool {
        self.settings.flaws.raise_early
    }

    #[cfg(not(feature = "flaws"))]
    #[allow(clippy::unused_self)]
    fn raises_early(&self) -> bool {
        false
    }
}

/// The bytes of a read, part by part.
pub type Parts = Vec<Content>;
