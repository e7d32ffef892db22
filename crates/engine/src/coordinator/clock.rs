//! What happens because time has passed.

use super::{Coordinator, Effect, Phase};

impl Coordinator {
    pub(super) fn tick(&mut self, out: &mut Vec<Effect>) {
        self.patience(out);
        self.hedge_reads(out);
        self.hedge_repairs(out);
        self.call_outsiders(out);
        self.mind_silence(out);
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

    /// Nobody can serve a region whose holders are all away. If enough replicas are present, a new decision finds the
    /// best of what they have.
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

    /// Whether a region has no holder among the replicas that are there: none that is there has what was written last.
    pub(super) fn has_orphans(&self) -> bool {
        let mut active = self.peers.values().filter(|peer| peer.is_active());
        let Some(first) = active.next() else {
            return false;
        };
        first
            .stale
            .iter()
            .any(|region| active.clone().all(|peer| peer.stale.contains(region)))
    }
}
