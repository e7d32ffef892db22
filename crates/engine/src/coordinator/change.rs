//! Changing who the replicas are, one view after the other.
//!
//! ```text
//!   {old} ──▶ {old and new} ──▶ {new}
//! ```
//!
//! The first step waits until CF of the new replicas hold everything; from then on every quorum is a quorum of both.
//! The second waits until the joint view, and everything acknowledged before it, is durable at quorums of both. So a
//! successor that knows either view finds a replica that knows what it needs to know.
//!
//! A change also waits until it costs no full copy: as many of the new replicas hold everything as of the old ones, or
//! all that are wanted do. A quorum alone could let a full replica go in exchange for an empty one.
//!
//! A removed replica is needed until a quorum of the new ones knows that it was removed: a successor that finds the
//! joint view would look for it.

use std::collections::BTreeSet;

use super::peer::Peer;
use super::{Coordinator, Effect};
use crate::proto::{Config, EntryOp, ReplicaId, View};

#[derive(Debug, Default)]
pub(super) struct Change {
    pub(super) goal: Option<Config>,
    /// The flush after the entry with both configurations.
    flush: Option<u64>,
    /// The entry with the new configuration alone, as long as no quorum has it, and the replicas that it leaves out.
    leaving: Option<(u64, BTreeSet<ReplicaId>)>,
}

impl Coordinator {
    /// The replicas that were let go of and that a successor may still need.
    pub(super) fn leaving(&self) -> BTreeSet<ReplicaId> {
        let leaving = self.change.leaving.as_ref();
        leaving
            .map(|(_, leaving)| leaving.clone())
            .unwrap_or_default()
    }

    /// Whether the replicas of `goal` would be as many full copies as there are now, or as many as are wanted.
    fn keeps_full_copies(&self, goal: &Config) -> bool {
        let full = |config: &Config| {
            let members = config.members.iter();
            members.filter(|id| self.is_whole(**id)).count()
        };
        full(goal) >= full(&self.view.current).min(goal.members.len())
    }

    pub(super) fn reconfigure(&mut self, config: Config) {
        if config.is_sound() {
            self.change.goal = Some(config);
        }
    }

    /// A predecessor may have left a change half done.
    pub(super) fn change_resume(&mut self) {
        if self.view.next.is_some() {
            self.announce();
        }
    }

    fn announce(&mut self) {
        self.append(EntryOp::View(self.view.clone()));
        self.change.flush = Some(self.append(EntryOp::Flush));
    }

    fn is_whole(&self, id: ReplicaId) -> bool {
        self.peers.get(&id).is_some_and(|peer| peer.is_whole())
    }

    pub(super) fn change_step(&mut self, out: &mut Vec<Effect>) {
        if let Some((seq, _)) = &self.change.leaving
            && self.view.write_quorum(|id| self.acked_by(id, *seq))
        {
            self.change.leaving = None;
        }
        match (&self.view.next, &self.change.goal, self.change.flush) {
            (None, Some(goal), _) if *goal == self.view.current => self.change.goal = None,
            (None, Some(goal), _) => {
                let joint = View {
                    lineage: self.view.lineage,
                    version: self.view.version + 1,
                    current: self.view.current.clone(),
                    next: Some(goal.clone()),
                };
                // Also the size that is served is at a quorum of both.
                let ready = |id| {
                    let large = |peer: &Peer| peer.size >= self.size;
                    self.is_whole(id) && self.peers.get(&id).is_some_and(large)
                };
                let keeps = self.changes_early() || self.keeps_full_copies(goal);
                if keeps && joint.write_quorum(ready) {
                    self.view = joint;
                    self.announce();
                    self.changed(out);
                }
            }
            (Some(next), _, Some(flush)) => {
                let durable = |id| {
                    self.is_whole(id)
                        && self
                            .peers
                            .get(&id)
                            .is_some_and(|peer| peer.flushed() >= flush)
                };
                if self.view.write_quorum(durable) {
                    let before = &self.view.current.members;
                    let leaving = before.difference(&next.members).copied().collect();
                    self.view = View {
                        lineage: self.view.lineage,
                        version: self.view.version + 1,
                        current: next.clone(),
                        next: None,
                    };
                    self.change.flush = None;
                    let seq = self.append(EntryOp::View(self.view.clone()));
                    self.change.leaving = Some((seq, leaving));
                    self.changed(out);
                }
            }
            _ => {}
        }
    }

    fn changed(&self, out: &mut Vec<Effect>) {
        out.push(Effect::ViewChanged {
            view: self.view.clone(),
        });
    }
}
