//! The coordinator of a volume. It numbers every entry, sends entries to the replicas, and decides when a client gets
//! its answer.
//!
//! Sans-IO: [`Coordinator::apply`] takes the time and an event, and leaves effects in a buffer. It has one owner, no
//! locks, no clock and no sockets; the simulator runs the same code. A driver that has many events calls
//! [`Coordinator::take`] for each of them and [`Coordinator::advance`] once.
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
//! Files: `session` (connections), `takeover` (report, decide, join), `stream` (log and windows), `io` (requests of
//! clients), `reads`, `peek` (reads without asking the replica), `settle` (when requests are answered), `repair`,
//! `scrub`, `growth`, `space` (writes when pools are full), `change` (changing the replicas), `standing` (whose report
//! counts), `clock`, `status`, `limits`.

mod change;
mod clock;
mod growth;
mod io;
mod limits;
mod log;
mod peek;
mod peer;
mod reads;
mod region_set;
mod repair;
mod scrub;
mod session;
mod settle;
mod silence;
mod space;
mod standing;
mod status;
mod stream;
mod takeover;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use uuid::Uuid;

use crate::proto::{Content, Envelope, Epoch, Geometry, Promise, Region, ReplicaId, View};
pub use growth::GrowthHeld;
pub use io::{IoError, IoId, IoOp, IoResult};
pub use limits::Limits;
pub use scrub::{ScrubProgress, ScrubResult, ScrubStatus};
pub use standing::Standing;
pub use status::{NotServed, ReplicaState, ReplicaStatus, Status};

use change::Change;
use growth::Growth;
use io::{Io, Task};
use log::Log;
use peek::PendingPeek;
use peer::Peer;
use reads::PendingRead;
use region_set::RegionSet;
use repair::RepairRead;
use scrub::Scrub;
use settle::{PendingFlush, PendingWrite};
use space::Space;

/// Which connection. The driver gives every connection of a process another number.
pub type SessionId = u64;

/// Faults that can be switched on, so that tests show that they would be found.
#[cfg(feature = "flaws")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Acknowledge as soon as one replica has a write.
    pub ack_below_cf: bool,
    /// Raise the volume before the replicas are raised.
    pub raise_early: bool,
    /// Peek at a replica that has not answered a write of the same bytes.
    pub peek_early: bool,
    /// Believe a replica of another history, or one that has lost its memory.
    pub skip_lineage: bool,
    /// Change the replicas as soon as a quorum of the new ones holds everything, even if that costs a full copy.
    pub change_early: bool,
}

/// Whose reports it takes to decide which bytes count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Takeover {
    /// The reports of so many replicas that no acknowledged write can be missing from all of them.
    #[default]
    Quorum,
    /// The reports of all replicas of the view, which are all that is left. The others are lost for good, and an
    /// operator has accepted that what only they held is lost with them. The view begins a history of its own
    /// ([`View::recovered`]).
    Survivors,
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
    /// Whose reports it takes to decide which bytes count.
    pub takeover: Takeover,
    /// Bounds.
    pub limits: Limits,
    /// Faults.
    #[cfg(feature = "flaws")]
    pub flaws: Flaws,
}

/// What happens to a coordinator.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all of them are messages")]
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
    /// What a replica has applied can be read without asking it, as long as this connection lasts.
    Near {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
    },
    /// A replica compares blocks with their sums on demand, as long as this connection lasts.
    Verifies {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
    },
    /// A replica answers calls, as long as this connection lasts.
    TakesCalls {
        /// The replica.
        replica: ReplicaId,
        /// The connection.
        session: SessionId,
    },
    /// Nobody is where the replica should be.
    Unreachable {
        /// The replica.
        replica: ReplicaId,
    },
    /// All copies should be compared with their sums, and with each other.
    Scrub,
    /// What a peek has found.
    Peeked {
        /// The tag of the peek.
        tag: u64,
        /// The bytes, or nothing if they could not be read at once.
        content: Option<Content>,
    },
    /// A client wants something.
    Io {
        /// Comes back with the reply.
        id: IoId,
        /// What it wants.
        op: IoOp,
    },
    /// A client has stopped waiting. Parts of its request that have not begun are not done.
    Cancel {
        /// Its request.
        id: IoId,
    },
    /// The volume should have this size. A later wish replaces an earlier one.
    Grow {
        /// The size.
        to: u64,
    },
    /// The replicas should be these. A later wish replaces an earlier one.
    Reconfigure {
        /// The replicas and their consistency factor.
        config: crate::proto::Config,
    },
    /// A replica no longer belongs to the volume, and there will be no connection to it.
    Forget {
        /// The replica.
        replica: ReplicaId,
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
    /// Read bytes from a nearby replica at once, before any effect that follows; then send [`Event::Peeked`].
    Peek {
        /// The replica.
        replica: ReplicaId,
        /// The connection. If it is not there any more, there is nothing to be read.
        session: SessionId,
        /// Comes back with the event.
        tag: u64,
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
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
    /// A region has no holder among the present replicas. A successor with a higher generation must decide again. This
    /// coordinator does nothing more.
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
    takeover: Takeover,
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

    ios: BTreeMap<IoId, Io>,
    waiting: VecDeque<Task>,
    space: Space,
    writes: BTreeMap<u64, PendingWrite>,
    reads: BTreeMap<u64, PendingRead>,
    peeks: BTreeMap<u64, PendingPeek>,
    flushes: VecDeque<PendingFlush>,
    /// Regions that were written since the last flush was numbered.
    unflushed: RegionSet,
    tag_last: u64,

    repair_reads: BTreeMap<u64, RepairRead>,
    /// Regions with blocks that no copy can give.
    hopeless: BTreeSet<Region>,
    scrub: Scrub,
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
            takeover: settings.takeover,
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
            ios: BTreeMap::new(),
            waiting: VecDeque::new(),
            space: Space::default(),
            writes: BTreeMap::new(),
            reads: BTreeMap::new(),
            peeks: BTreeMap::new(),
            flushes: VecDeque::new(),
            unflushed: RegionSet::default(),
            tag_last: 0,
            repair_reads: BTreeMap::new(),
            hopeless: BTreeSet::new(),
            scrub: Scrub::default(),
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
        self.take(now_ms, event, out);
        self.advance(out);
    }

    /// Takes one event. [`Coordinator::advance`] must follow, after this one or after several.
    pub fn take(&mut self, now_ms: u64, event: Event, out: &mut Vec<Effect>) {
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
            Event::Near { replica, session } => self.near(replica, session),
            Event::Verifies { replica, session } => {
                let ours = self.session_mut(replica);
                if let Some(ours) = ours.filter(|ours| ours.id == session) {
                    ours.verifies = true;
                }
            }
            Event::TakesCalls { replica, session } => self.takes_calls(replica, session),
            Event::Unreachable { replica } => self.unreachable(replica),
            Event::Scrub => self.scrub(),
            Event::Peeked { tag, content } => self.peeked(tag, content, out),
            Event::Io { id, op } => self.io(id, op, out),
            Event::Cancel { id } => self.cancel(id),
            Event::Grow { to } => self.grow(to),
            Event::Reconfigure { config } => self.reconfigure(config),
            Event::Forget { replica } => self.forget(replica, out),
            Event::Tick => self.tick(out),
        }
    }

    /// Brings everything to where the events allow it to be.
    pub fn advance(&mut self, out: &mut Vec<Effect>) {
        self.gather_step(out);
        if self.phase == Phase::Serving {
            self.settle(out);
            self.prune_log();
            self.growth_step(out);
            self.change_step(out);
            self.repair_schedule(out);
            self.space_step(out);
            self.start_waiting(out);
        }
        self.pump_all(out);
        if self.phase == Phase::Serving {
            self.scrub_step(out);
        }
        if !self.waiting.is_empty() || self.space.applicants() > 0 {
            // A read, or a question, waits until everything before it has been sent, which it has been now.
            if self.phase == Phase::Serving {
                self.space_step(out);
            }
            self.start_waiting(out);
            self.pump_all(out);
        }
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
    fn peeks_early(&self) -> bool {
        self.settings.flaws.peek_early
    }

    #[cfg(not(feature = "flaws"))]
    #[allow(clippy::unused_self)]
    fn peeks_early(&self) -> bool {
        false
    }

    #[cfg(feature = "flaws")]
    fn ignores_lineage(&self) -> bool {
        self.settings.flaws.skip_lineage
    }

    #[cfg(not(feature = "flaws"))]
    #[allow(clippy::unused_self)]
    fn ignores_lineage(&self) -> bool {
        false
    }

    #[cfg(feature = "flaws")]
    fn changes_early(&self) -> bool {
        self.settings.flaws.change_early
    }

    #[cfg(not(feature = "flaws"))]
    #[allow(clippy::unused_self)]
    fn changes_early(&self) -> bool {
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
