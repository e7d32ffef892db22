//! Taking over: who reports, which bytes count, and on which terms a replica takes part.
//!
//! # Which bytes count
//!
//! Region by region, the bytes of the replica with the largest key for it. A replica's key for a region is the
//! replica's key, or the key in its stale mark. A write is acknowledged when CF replicas hold it, and RF - CF + 1
//! replicas report. So one of these holds the write, and its key is at least as large as that of the write. A larger
//! key of the same epoch holds everything that a smaller one holds, because every replica applies entries in the same
//! order. A key of a later epoch rests on an earlier takeover that followed the same rule.
//!
//! # Whose bytes are the same
//!
//! A replica's region is as good as the chosen one if it *is* the chosen one; if both are exactly at the same key; or
//! if both have the same stamp, and the stamp is older than the epoch at which the replica is. In the last case the
//! replica has seen that epoch to its end, and nobody has written there since. Everything else is marked stale and
//! repaired. If the chosen region's stamp is of its replica's current epoch, the replica may hold only a part of that
//! epoch. Such a region gets the new epoch as its stamp, which exposes an absent replica that has another part.

use super::peer::{Report, Stage};
use super::region_set::RegionSet;
use super::{Coordinator, Effect, Phase, Standing, Takeover};
use crate::proto::{
    Epoch, JoinTerms, Key, Past, REGIONS_PER_PAGE_MAX, Region, RegionState, ReplicaId, Request,
    Welcome,
};

/// A replica's terms, as far as its regions are concerned.
#[derive(Default)]
struct Regions {
    /// Nothing of what it has counts.
    forget: bool,
    stale: Vec<Region>,
    restamp: Vec<Region>,
}

fn key_of(report: &Report, state: RegionState) -> Key {
    state.stale.map_or(report.welcome.key, |stale| stale.key)
}

/// Whether a region that has not been chosen has the bytes of the history in which `stamp` is its
/// stamp.
fn is_same(report: &Report, state: RegionState, stamp: Epoch) -> bool {
    state.stale.is_none() && state.stamp == stamp && state.stamp < report.welcome.key.epoch
}

impl Coordinator {
    pub(super) fn welcomed(&mut self, replica: ReplicaId, welcome: Welcome, out: &mut Vec<Effect>) {
        let generation = self.settings.promise.generation;
        let key = welcome.key;
        if matches!(self.phase, Phase::Gathering { .. }) {
            self.learn(&welcome.view, out);
        }
        let standing = self.standing(&welcome);
        let is_wanted = standing == Standing::Counts || self.is_wanted(replica);
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        let Some(session) = &mut peer.session else {
            return;
        };
        if !matches!(session.stage, Stage::Greeting) || !welcome.view.is_sound() {
            return self.drop_session(replica, out);
        }
        peer.standing = Some(standing);
        if !is_wanted {
            peer.size = welcome.size;
            return session.start(Stage::Outside, self.now);
        }
        let in_log = key.seq == self.seq || self.log.get(key.seq + 1).is_some();
        let large_enough = welcome.size >= self.growth.size_to_join(self.size);
        // With regions under repair, we may not know of one that the replica has finished, or for which it had no
        // space.
        let known = peer.joined && peer.stale.is_empty() && !welcome.has_stale;
        if known && key.epoch.generation() == generation && in_log && large_enough {
            peer.size = welcome.size;
            peer.applied = key.seq;
            session.start(Stage::Active, self.now);
            session.cursor = key.seq;
            session.acked = key.seq;
            self.send(replica, Request::Resume, out);
            self.flush_again();
            return;
        }
        let regions = self.settings.geometry.regions(welcome.size);
        peer.size = welcome.size;
        session.start(Stage::Reporting(Report::new(welcome)), self.now);
        if regions == 0 {
            return self.drop_session(replica, out);
        }
        self.send(replica, Request::Regions { from: Region(0) }, out);
    }

    pub(super) fn reported(
        &mut self,
        replica: ReplicaId,
        from: Region,
        page: Vec<RegionState>,
        out: &mut Vec<Effect>,
    ) {
        let geometry = self.settings.geometry;
        let now = self.now;
        let Some(session) = self
            .peers
            .get_mut(&replica)
            .and_then(|peer| peer.session.as_mut())
        else {
            return;
        };
        let Stage::Reporting(report) = &mut session.stage else {
            return self.drop_session(replica, out);
        };
        let regions = geometry.regions(report.welcome.size);
        if from.index() != report.regions() || page.is_empty() || page.len() > REGIONS_PER_PAGE_MAX
        {
            return self.drop_session(replica, out);
        }
        report.extend(page);
        if report.regions() < regions {
            let next = region_at(report.regions());
            session.since = now;
            return self.send(replica, Request::Regions { from: next }, out);
        }
        if let Stage::Reporting(report) = std::mem::replace(&mut session.stage, Stage::Joining) {
            let survives = self.takeover == Takeover::Survivors && !self.counts(&report);
            if self.phase == Phase::Installing && survives {
                // Its bytes may have been chosen, and it was gone before it began the new history.
                return self.end(Effect::Retake, out);
            }
            if matches!(self.phase, Phase::Installing | Phase::Serving) {
                return self.join_late(replica, &report, out);
            }
            if let Some(session) = self.session_mut(replica) {
                session.start(Stage::Reported(report), now);
            }
        }
    }

    pub(super) fn report_of(&self, id: ReplicaId) -> Option<&Report> {
        match &self.peers.get(&id)?.session.as_ref()?.stage {
            Stage::Reported(report) => Some(report),
            _ => None,
        }
    }

    /// Decides when enough replicas have reported, and serves when enough have joined.
    pub(super) fn gather_step(&mut self, out: &mut Vec<Effect>) {
        if let Phase::Gathering { quorum_since } = self.phase {
            if !self.may_decide() {
                self.phase = Phase::Gathering { quorum_since: None };
                return;
            }
            let since = quorum_since.unwrap_or(self.now);
            self.phase = Phase::Gathering {
                quorum_since: Some(since),
            };
            let waited = self.now.saturating_sub(since) >= self.settings.limits.gather_ms;
            if waited || self.view.complete(|id| self.report_of(id).is_some()) {
                self.decide(out);
            }
        }
        if self.phase == Phase::Installing && self.may_serve() {
            self.phase = Phase::Serving;
            self.takeover = Takeover::Quorum;
            out.push(Effect::Serving { size: self.size });
            self.change_resume();
        }
    }

    fn take_report(&mut self, id: ReplicaId) -> Option<Report> {
        let session = self.peers.get_mut(&id)?.session.as_mut()?;
        match std::mem::replace(&mut session.stage, Stage::Joining) {
            Stage::Reported(report) => Some(report),
            other => {
                session.stage = other;
                None
            }
        }
    }

    fn decide(&mut self, out: &mut Vec<Effect>) {
        let reports: Vec<(ReplicaId, Report)> = self
            .peers
            .keys()
            .copied()
            .collect::<Vec<_>>()
            .into_iter()
            .filter_map(|id| Some((id, self.take_report(id)?)))
            .collect();
        let now = self.now;
        let (reports, others) = self.heard(reports);
        for (_, Report { welcome, .. }) in &reports {
            self.size = self.size.max(welcome.size);
            self.size_version = self.size_version.max(welcome.size_version);
        }
        let mut terms: Vec<Regions> = reports.iter().map(|_| Regions::default()).collect();
        let regions = self.settings.geometry.regions(self.size);
        self.stamps = vec![Epoch::NEVER; regions];
        for index in 0..regions {
            self.stamps[index] = choose(&reports, region_at(index), self.epoch, &mut terms);
        }
        // What a predecessor acknowledged may be in caches only. The first flush answers for it too, so
        // it needs CF holders of every region, each of which synced when it joined or was repaired.
        self.unflushed = RegionSet::default();
        for index in 0..regions {
            if self.stamps[index] != Epoch::NEVER {
                self.unflushed.insert(region_at(index));
            }
        }
        self.phase = Phase::Installing;
        for ((replica, _), terms) in reports.iter().zip(terms) {
            self.join(*replica, terms, out);
        }
        for (replica, report) in &others {
            // A new one is repaired before anybody wants it to count.
            let is_new = self.standing(&report.welcome) == Standing::Counts;
            if is_new || self.is_wanted(*replica) {
                self.join_late(*replica, report, out);
            } else if let Some(session) = self.session_mut(*replica) {
                session.start(Stage::Outside, now);
            }
        }
    }

    fn join_late(&mut self, replica: ReplicaId, report: &Report, out: &mut Vec<Effect>) {
        let mut terms = Regions {
            forget: self.standing(&report.welcome) != Standing::Counts,
            ..Regions::default()
        };
        for (index, stamp) in self.stamps.iter().enumerate() {
            let region = region_at(index);
            if terms.forget || !is_same(report, report.state(region), *stamp) {
                terms.stale.push(region);
            }
        }
        self.join(replica, terms, out);
    }

    fn join(&mut self, replica: ReplicaId, regions: Regions, out: &mut Vec<Effect>) {
        let key = Key {
            epoch: self.epoch,
            seq: self.seq,
        };
        let size = self.growth.size_to_join(self.size);
        let size_version = self.growth.version_to_join(self.size_version);
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        let Some(session) = &mut peer.session else {
            return;
        };
        session.start(Stage::Joining, self.now);
        session.cursor = key.seq;
        session.acked = key.seq;
        session.join_size = size;
        peer.joined = false;
        peer.stale = RegionSet::default();
        for region in &regions.stale {
            peer.stale.insert(*region);
        }
        peer.stale_at_join = peer.stale.len();
        for page in regions.stale.chunks(REGIONS_PER_PAGE_MAX) {
            let regions = page.to_vec();
            self.send(replica, Request::Stale { regions }, out);
        }
        for page in regions.restamp.chunks(REGIONS_PER_PAGE_MAX) {
            let regions = page.to_vec();
            self.send(replica, Request::Restamp { regions }, out);
        }
        let terms = JoinTerms {
            past: match (regions.forget, self.takeover) {
                (false, _) => Past::Counts,
                (true, Takeover::Quorum) => Past::Void,
                (true, Takeover::Survivors) => Past::VoidBeforeBeginning,
            },
            key,
            size,
            size_version,
            view: self.view.clone(),
        };
        self.send(replica, Request::Join(terms), out);
    }

    pub(super) fn joined(&mut self, replica: ReplicaId) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        let Some(session) = &mut peer.session else {
            return;
        };
        if !matches!(session.stage, Stage::Joining) {
            return;
        }
        peer.joined = true;
        peer.applied = session.acked;
        peer.size = peer.size.max(session.join_size);
        // The replica synced before it joined.
        session.flushed = session.acked;
        session.start(Stage::Active, now);
        self.flush_again();
    }
}

fn region_at(index: usize) -> Region {
    Region(u32::try_from(index).unwrap_or(u32::MAX))
}

/// Chooses whose bytes count for one region, tells every replica, and returns the region's stamp.
fn choose(
    reports: &[(ReplicaId, Report)],
    region: Region,
    epoch: Epoch,
    terms: &mut [Regions],
) -> Epoch {
    let rank = |report: &Report| {
        let state = report.state(region);
        (
            key_of(report, state),
            state.stale.is_none(),
            report.welcome.exact,
        )
    };
    let Some((chosen_id, chosen)) = reports.iter().max_by_key(|(_, report)| rank(report)) else {
        return Epoch::NEVER;
    };
    let state = chosen.state(region);
    let key = key_of(chosen, state);
    let restamp = state.stale.is_some() || state.stamp >= key.epoch;
    let stamp = if restamp { epoch } else { state.stamp };
    for ((id, report), terms) in reports.iter().zip(terms) {
        let theirs = report.state(region);
        let at_same_key = report.welcome.exact
            && chosen.welcome.exact
            && report.welcome.key == chosen.welcome.key
            && theirs.stale.is_none()
            && state.stale.is_none();
        if id == chosen_id || at_same_key {
            if restamp {
                terms.restamp.push(region);
            }
        } else if !is_same(report, theirs, stamp) {
            terms.stale.push(region);
        }
    }
    stamp
}
