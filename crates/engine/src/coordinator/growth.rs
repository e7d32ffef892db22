//! Growth: space is set aside, the replicas are raised, then the volume is.
//!
//! ```text
//!            wish > size             CF granted             CF raised
//!   Idle ───────────────▶ Reserving ───────────▶ Raising ───────────▶ Finishing ──▶ Idle
//!     ▲                       │ refused, or not enough in time            │ who has not raised
//!     └──────── held ─────────┘ (I/O goes on at the old size)             │ in time is given up
//! ```
//!
//! Both steps are entries among the writes, so no write to the new range can overtake them. A replica is raised only
//! when CF replicas have set the space aside. After a takeover the largest size of any replica must count; without
//! this rule, a growth that did not fit on CF replicas could keep the volume from being served at all.

use std::collections::BTreeSet;

use super::{Coordinator, Effect, Phase};
use crate::proto::{EntryOp, Epoch, ReplicaId};

/// Why a growth does not go on. It is tried again by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrowthHeld {
    /// Too many pools have no space for it.
    NoSpace,
    /// Too few replicas are there, or answered in time.
    TooFewReplicas,
}

#[derive(Debug, Default)]
enum Step {
    #[default]
    Idle,
    Reserving {
        to: u64,
        deadline: u64,
        granted: BTreeSet<ReplicaId>,
        denied: BTreeSet<ReplicaId>,
    },
    Raising {
        to: u64,
        version: u64,
        seq: u64,
    },
    Finishing {
        seq: u64,
        deadline: u64,
    },
}

#[derive(Debug, Default)]
pub(super) struct Growth {
    pub(super) goal: u64,
    step: Step,
    pub(super) held: Option<GrowthHeld>,
    retry_at: u64,
    /// The last entry that raised replicas, and to which size. One that joined before it may answer
    /// it long after the growth is over.
    raise_last: Option<(u64, u64)>,
}

impl Growth {
    /// The last entry that raised replicas, and the size to which it did.
    pub(super) fn raise(&self) -> Option<(u64, u64)> {
        self.raise_last
    }

    /// The size that a replica must have to take part.
    pub(super) fn size_to_join(&self, size: u64) -> u64 {
        match self.step {
            Step::Raising { to, .. } => to.max(size),
            _ => size,
        }
    }

    pub(super) fn version_to_join(&self, current: u64) -> u64 {
        match self.step {
            Step::Raising { version, .. } => version,
            _ => current,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.step, Step::Idle)
    }
}

impl Coordinator {
    pub(super) fn grow(&mut self, to: u64) {
        let block = u64::from(self.settings.geometry.block_bytes);
        if to.is_multiple_of(block) && to <= crate::replica::SIZE_MAX.get() {
            self.growth.goal = to;
            self.growth.held = None;
            self.growth.retry_at = 0;
        }
    }

    pub(super) fn reserved(&mut self, replica: ReplicaId, size: u64, granted_now: bool) {
        if let Step::Reserving {
            to,
            granted,
            denied,
            ..
        } = &mut self.growth.step
            && *to == size
        {
            if granted_now {
                granted.insert(replica);
            } else {
                denied.insert(replica);
            }
        }
    }

    pub(super) fn growth_step(&mut self, out: &mut Vec<Effect>) {
        if self.phase != Phase::Serving {
            return;
        }
        let limits = self.settings.limits;
        match &self.growth.step {
            Step::Idle => {
                let goal = self.growth.goal;
                if goal <= self.size {
                    self.growth.held = None;
                } else if self.now >= self.growth.retry_at {
                    if !self.view.write_quorum(|id| self.is_active(id)) {
                        return self.hold(GrowthHeld::TooFewReplicas);
                    }
                    self.append(EntryOp::Reserve { size: goal });
                    self.growth.step = Step::Reserving {
                        to: goal,
                        deadline: self.now + limits.growth_ms,
                        granted: BTreeSet::new(),
                        denied: BTreeSet::new(),
                    };
                }
            }
            Step::Reserving {
                to,
                deadline,
                granted,
                denied,
            } => {
                let to = *to;
                if self.view.write_quorum(|id| granted.contains(&id)) {
                    return self.raise(to, out);
                }
                let answered = |id: &ReplicaId| granted.contains(id) || denied.contains(id);
                let all = self
                    .peers
                    .iter()
                    .filter(|(_, peer)| peer.is_active())
                    .all(|(id, _)| answered(id));
                if self.growth.goal != to {
                    self.growth.step = Step::Idle;
                } else if all || self.now >= *deadline {
                    let held = if denied.is_empty() {
                        GrowthHeld::TooFewReplicas
                    } else {
                        GrowthHeld::NoSpace
                    };
                    self.hold(held);
                }
            }
            Step::Raising { to, version, seq } => {
                let (to, version, seq) = (*to, *version, *seq);
                let raised = |id| {
                    self.peers
                        .get(&id)
                        .is_some_and(|peer| peer.is_active() && peer.size >= to)
                };
                if self.view.write_quorum(raised) {
                    self.raised(to, version, out);
                    self.growth.step = Step::Finishing {
                        seq,
                        deadline: self.now + limits.growth_ms,
                    };
                }
            }
            Step::Finishing { seq, deadline } => {
                let behind: Vec<ReplicaId> = self
                    .peers
                    .iter()
                    .filter(|(_, peer)| peer.is_active() && peer.acked() < *seq)
                    .map(|(id, _)| *id)
                    .collect();
                if behind.is_empty() || self.now >= *deadline {
                    self.growth.step = Step::Idle;
                    for replica in behind {
                        self.drop_session(replica, out);
                    }
                }
            }
        }
    }

    fn hold(&mut self, reason: GrowthHeld) {
        self.growth.held = Some(reason);
        self.growth.retry_at = self.now + self.settings.limits.growth_retry_ms;
        self.growth.step = Step::Idle;
    }

    fn raise(&mut self, to: u64, out: &mut Vec<Effect>) {
        let version = self.size_version + 1;
        let seq = self.append(EntryOp::Raise { size: to, version });
        self.growth.raise_last = Some((seq, to));
        self.growth.step = Step::Raising { to, version, seq };
        if self.raises_early() {
            self.raised(to, version, out);
        }
    }

    fn raised(&mut self, to: u64, version: u64, out: &mut Vec<Effect>) {
        if to > self.size {
            self.size = to;
            self.size_version = version;
            let regions = self.settings.geometry.regions(to);
            self.stamps.resize(regions, Epoch::NEVER);
            self.growth.held = None;
            out.push(Effect::Resized { size: to });
        }
    }
}
