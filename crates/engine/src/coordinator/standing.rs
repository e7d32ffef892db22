//! Whose report counts when the coordinator decides which bytes count.
//!
//! A replica's report counts if it holds the history of the view. A replica of another history was given up in a
//! recovery, or has missed one. A replica that has lost its memory may hold anything. Both may take part again, but
//! nothing that they hold counts: everything is repaired. Neither is asked what the volume holds, however many of them
//! there are.

use super::peer::{Peer, Report, Stage};
use super::{Coordinator, Takeover};
use crate::proto::{Lineage, ReplicaId, View, Welcome};

/// A report, and whose it is.
pub(super) type ReplicaReport = (ReplicaId, Report);

/// What a replica's report is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It holds the history of the volume, or was just made and holds nothing.
    Counts,
    /// It has lost its memory: nobody knows what it holds.
    Unproven,
    /// It holds a history that was given up, or one that is not known here.
    OtherLineage,
}

impl Coordinator {
    pub(super) fn standing(&self, welcome: &Welcome) -> Standing {
        let theirs = welcome.view.lineage;
        if self.ignores_lineage() {
            Standing::Counts
        } else if theirs == Lineage::Unknown {
            Standing::Unproven
        } else if theirs == self.view.lineage || welcome.view.is_blank() {
            Standing::Counts
        } else {
            Standing::OtherLineage
        }
    }

    /// Whether a report is of the history of the view.
    pub(super) fn counts(&self, report: &Report) -> bool {
        // Replicas have told of a later history than the one that we know, and none of them is here.
        let ours = self.view.lineage;
        let generation = self.settings.promise.generation;
        ours.number() == Some(Lineage::number_of_generation(generation))
            && (report.welcome.view.lineage == ours || self.ignores_lineage())
    }

    /// Whether a report helps to prove that no acknowledged write is missing. The report of a replica of an earlier
    /// history does: it says that the replica never took part in this one. But that matters only for members of the
    /// view, so a replica that knows the view must be present.
    pub(super) fn weighs(&self, report: &Report) -> bool {
        let is_earlier = |theirs: Lineage| {
            theirs.number().is_some() && theirs.number() < self.view.lineage.number()
        };
        let view_is_known = || {
            let mut members = self.view.members().into_iter();
            members.any(|id| self.report_of(id).is_some_and(|report| self.counts(report)))
        };
        let counts = self.counts(report) && (!report.has_forgotten() || self.ignores_lineage());
        counts || is_earlier(report.welcome.view.lineage) && view_is_known()
    }

    /// Whether somebody wants a replica to take part.
    pub(super) fn is_wanted(&self, id: ReplicaId) -> bool {
        let goal = self.change.goal.as_ref();
        self.view.contains(id) || goal.is_some_and(|goal| goal.members.contains(&id))
    }

    /// Replicas that were left outside may be wanted by now. Their sessions end, and they come again.
    pub(super) fn call_outsiders(&mut self, out: &mut Vec<super::Effect>) {
        let is_outside = |peer: &Peer| {
            let session = peer.session.as_ref();
            session.is_some_and(|session| matches!(session.stage, Stage::Outside))
        };
        let outside = self.peers.iter().filter(|(_, peer)| is_outside(peer));
        let wanted: Vec<ReplicaId> = outside
            .map(|(id, _)| *id)
            .filter(|id| self.is_wanted(*id))
            .collect();
        for replica in wanted {
            self.drop_session(replica, out);
        }
    }

    /// Whether enough replicas have reported to decide.
    pub(super) fn may_decide(&self) -> bool {
        match self.takeover {
            Takeover::Quorum => {
                let weighs = |id| self.report_of(id).is_some_and(|report| self.weighs(report));
                self.view.takeover_quorum(weighs)
            }
            Takeover::Survivors => self.view.complete(|id| self.report_of(id).is_some()),
        }
    }

    /// Whether enough replicas take part to serve.
    pub(super) fn may_serve(&self) -> bool {
        match self.takeover {
            Takeover::Quorum => self.view.write_quorum(|id| self.is_active(id)),
            // All of them begin the new history, or a successor could not tell who has.
            Takeover::Survivors => self.view.complete(|id| self.is_active(id)),
        }
    }

    /// Separates the reports whose bytes are considered from the others.
    ///
    /// In a takeover by a quorum, these are the reports that count. In one by survivors, they are the survivors'
    /// reports of the latest history below the one that begins, and those that have already begun it; if none can
    /// prove anything, all survivors' reports. Other replicas are not heard: a new replica holds zeros everywhere,
    /// which must not win over the half-repaired bytes of a survivor.
    pub(super) fn heard(
        &self,
        reports: Vec<ReplicaReport>,
    ) -> (Vec<ReplicaReport>, Vec<ReplicaReport>) {
        let ours = self.view.lineage;
        let lineage_of = |(_, report): &ReplicaReport| report.welcome.view.lineage;
        if self.takeover == Takeover::Quorum {
            let is_heard = |it: &_| lineage_of(it) == ours || self.ignores_lineage();
            return reports.into_iter().partition(is_heard);
        }
        let survives = |(id, _): &ReplicaReport| self.view.contains(*id);
        let survivors = reports.iter().filter(|it| survives(it));
        let histories: Vec<Lineage> = survivors.map(lineage_of).collect();
        let is_proven = |lineage: Lineage| lineage != Lineage::Unknown;
        let any_is_proven = histories.iter().copied().any(is_proven);
        let others = histories.into_iter().filter(|lineage| *lineage != ours);
        let base = others.max_by_key(|lineage| match lineage {
            Lineage::Recovered { number, id } => (Some(*number), *id),
            other => (other.number(), 0),
        });
        reports.into_iter().partition(|it| {
            let theirs = lineage_of(it);
            let is_of_base = Some(theirs) == base && (is_proven(theirs) || !any_is_proven);
            survives(it) && (theirs == ours || is_of_base)
        })
    }

    /// A replica may know a later view than we were told.
    pub(super) fn learn(&mut self, view: &View, out: &mut Vec<super::Effect>) {
        let generation = self.settings.promise.generation;
        let known = view.lineage.number() <= Some(Lineage::number_of_generation(generation));
        if view.lineage != Lineage::Unknown && known && view.replaces(&self.view) {
            // A view that follows the one of a recovery says that the recovery is done.
            self.takeover = Takeover::Quorum;
            self.view = view.clone();
            out.push(super::Effect::ViewChanged {
                view: self.view.clone(),
            });
        }
    }
}
