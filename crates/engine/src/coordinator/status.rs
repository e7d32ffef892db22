//! The status of a volume: three words with three meanings.

use std::collections::{BTreeMap, BTreeSet};

use super::peer::{Peer, Stage};
use super::{Coordinator, GrowthHeld, Phase, ScrubStatus, Standing, Takeover};
use crate::proto::{ReplicaId, View};

/// How long a replica that had no space is reported as full. It comes back and tries again within a few seconds.
const FULL_MS: u64 = 5_000;

/// How a volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// I/O is served: CF replicas are there and take part, and every region has a holder among them.
    pub available: bool,
    /// Every replica is there and holds everything.
    pub redundancy_met: bool,
    /// Every replica is there and has the volume's size, and no growth is wanted.
    pub size_converged: bool,
    /// The size that is served.
    pub size: u64,
    /// The size that is wanted, if that is more.
    pub growing_to: Option<u64>,
    /// Why a growth does not go on.
    pub growth_held: Option<GrowthHeld>,
    /// Who the replicas are.
    pub view: View,
    /// Removed replicas, until a quorum knows of the removal: a successor may still need them.
    pub leaving: BTreeSet<ReplicaId>,
    /// How each of them is, and of those that are on their way to be one.
    pub replicas: BTreeMap<ReplicaId, ReplicaStatus>,
    /// The generation of this coordinator.
    pub generation: u64,
    /// What was found of blocks that are not what was written.
    pub scrub: ScrubStatus,
    /// Why nothing has been served yet.
    pub not_served: Option<NotServed>,
}

/// Why a volume is not served yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotServed {
    /// Too few of the replicas that have reported can say what the volume holds. [`ReplicaStatus::standing`] says who
    /// is present and cannot.
    TooFewReports {
        /// How many have.
        counted: usize,
        /// How many it takes.
        needed: usize,
    },
    /// Enough have reported, and are told on which terms they take part.
    Installing,
}

/// How a replica is, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Its state.
    pub state: ReplicaState,
    /// Its size, as far as it is known; zero if it has not been there yet.
    pub size: u64,
    /// Entries that it has not applied.
    pub behind_entries: u64,
    /// Bytes of these, as far as they are remembered.
    pub behind_bytes: u64,
    /// Its pool had no space for what it was to write, a moment ago.
    pub full: bool,
    /// What its word was worth when it last arrived, if it has.
    pub standing: Option<Standing>,
    /// When something was last heard of it, in the coordinator's milliseconds, if it is away or silent.
    pub heard_ms: Option<u64>,
}

/// How a replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaState {
    /// There is no connection to it.
    Away,
    /// It owes an answer and says nothing.
    Silent,
    /// It is being greeted, or told on which terms it takes part.
    Arriving,
    /// It takes part, and some of its regions wait for repair.
    Repairing {
        /// Regions that are left.
        left: usize,
        /// Regions that there were.
        of: usize,
    },
    /// It takes part and holds everything.
    InSync,
}

impl Coordinator {
    /// How the volume is.
    pub fn status(&self) -> Status {
        let members = self.view.members();
        let peers = || members.iter().map(|id| self.peers.get(id));
        let serving = self.phase == Phase::Serving;
        Status {
            available: serving
                && self.view.write_quorum(|id| self.is_active(id))
                && !self.has_orphans(),
            redundancy_met: serving && peers().all(|peer| peer.is_some_and(Peer::is_whole)),
            size_converged: serving
                && self.growth.is_idle()
                && self.growth.goal <= self.size
                && peers().all(|peer| {
                    peer.is_some_and(|peer| peer.is_active() && peer.size >= self.size)
                }),
            size: self.size,
            growing_to: Some(self.growth.goal).filter(|goal| *goal > self.size),
            generation: self.settings.promise.generation,
            growth_held: self.growth.held,
            scrub: self.scrub_status(),
            not_served: self.not_served(),
            view: self.view.clone(),
            leaving: self.leaving(),
            replicas: self
                .peers
                .iter()
                .map(|(id, peer)| (*id, self.replica_status(peer)))
                .collect(),
        }
    }

    fn not_served(&self) -> Option<NotServed> {
        match self.phase {
            Phase::Gathering { .. } => {
                let config = &self.view.current;
                let all = self.takeover == Takeover::Survivors;
                let weighs = |id: &ReplicaId| {
                    self.report_of(*id)
                        .is_some_and(|report| all || self.weighs(report))
                };
                let rest = if all { 0 } else { config.consistency - 1 };
                Some(NotServed::TooFewReports {
                    counted: config.members.iter().filter(|id| weighs(id)).count(),
                    needed: config.members.len() - rest,
                })
            }
            Phase::Installing => Some(NotServed::Installing),
            Phase::Serving | Phase::Over => None,
        }
    }

    fn replica_status(&self, peer: &Peer) -> ReplicaStatus {
        let state = state(peer);
        let is_heard = !matches!(state, ReplicaState::Away | ReplicaState::Silent);
        ReplicaStatus {
            state,
            heard_ms: peer.heard_at.filter(|_| !is_heard),
            size: peer.size,
            behind_entries: self.seq.saturating_sub(peer.applied),
            behind_bytes: self.log.bytes_after(peer.applied),
            full: self.is_full(peer),
            standing: peer.standing,
        }
    }

    fn is_full(&self, peer: &Peer) -> bool {
        let since = |at: u64| self.now.saturating_sub(at);
        peer.is_low() || peer.full_at.is_some_and(|at| since(at) < FULL_MS)
    }

    /// Whether it is for want of space that CF replicas are not there.
    pub fn lacks_space(&self) -> bool {
        let serves = |peer: &Peer| peer.is_active() && !self.is_full(peer);
        let could = |peer: &Peer| peer.is_active() || self.is_full(peer);
        let of =
            |id: ReplicaId, test: &dyn Fn(&Peer) -> bool| self.peers.get(&id).is_some_and(test);
        self.phase == Phase::Serving
            && !self.view.write_quorum(|id| of(id, &serves))
            && self.view.write_quorum(|id| of(id, &could))
    }

    /// Why a growth does not go on.
    pub fn growth_held(&self) -> Option<GrowthHeld> {
        self.growth.held
    }

    /// Whether nothing more will be done.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Whether I/O is accepted.
    pub fn is_serving(&self) -> bool {
        self.phase == Phase::Serving
    }
}

fn state(peer: &Peer) -> ReplicaState {
    match &peer.session {
        _ if peer.is_silent => ReplicaState::Silent,
        None => ReplicaState::Away,
        Some(session) if !matches!(session.stage, Stage::Active) => ReplicaState::Arriving,
        Some(_) if peer.is_whole() => ReplicaState::InSync,
        Some(_) => ReplicaState::Repairing {
            left: peer.stale.len() + peer.damaged.len(),
            of: peer.stale_at_join.max(peer.stale.len()) + peer.damaged.len(),
        },
    }
}
