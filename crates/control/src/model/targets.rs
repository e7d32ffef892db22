//! Targets of replicated volumes: which copies count, which hold everything, and what is served.
//!
//! A copy that is new or was away is first repaired. It holds everything at the second look of a target that has a
//! quorum. The view moves to the copies that are to count when a quorum of these holds everything. That must never cost
//! a full copy.

use std::path::PathBuf;

use trellis_api::kinds::{CopiesWanted, Members, ReplicaSeen, ReplicaState};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::machine::{Copy, State, missing, refused};
use crate::node::machine::{TargetFound, TargetPlace};
use crate::volume::members::who_counts;

/// A target and what its copies have agreed on.
pub(super) struct Served {
    size: Bytes,
    members: Members,
    /// The copies that hold everything.
    whole: Vec<String>,
    /// The copies that are on their way there.
    repairing: Vec<String>,
    /// Its process runs. The rest is known by the copies.
    runs: bool,
}

impl Served {
    pub(super) fn size(&self) -> Bytes {
        self.size
    }

    pub(super) fn counts(&self, copy: &str) -> bool {
        self.members.replicas.iter().any(|each| each == copy)
    }

    fn is_whole(&self, copy: &str) -> bool {
        self.whole.iter().any(|each| each == copy)
    }

    /// Whether as many of these as are needed can be reached and hold everything.
    fn has_quorum(&self, members: &Members, reachable: &[String]) -> bool {
        let there = |id: &&String| reachable.contains(*id) && self.is_whole(id);
        let count = members.replicas.iter().filter(there).count();
        count >= usize::try_from(members.consistency_factor).unwrap_or(usize::MAX)
    }

    /// How many of these hold everything and can be reached.
    fn full(&self, members: &Members, reachable: &[String]) -> usize {
        let full = |id: &&String| reachable.contains(*id) && self.is_whole(id);
        members.replicas.iter().filter(full).count()
    }

    /// Time passes: copies that can be reached come nearer to holding everything; those that cannot miss something.
    /// Returns the rule that was broken, if one was.
    fn go_on(&mut self, asked: &CopiesWanted, reachable: &[String]) -> Option<String> {
        if !self.has_quorum(&self.members, reachable) {
            return None;
        }
        self.whole.retain(|id| reachable.contains(id));
        self.repairing.retain(|id| reachable.contains(id));
        let repaired = std::mem::take(&mut self.repairing);
        self.whole.extend(repaired);
        let all = self.members.replicas.iter().chain(&asked.staying);
        for id in all {
            let is_new = !self.is_whole(id) && !self.repairing.contains(id);
            if is_new && reachable.contains(id) {
                self.repairing.push(id.clone());
            }
        }
        let wanted = who_counts(asked, &self.members, &|id| self.is_whole(id));
        let is_other = wanted.replicas != self.members.replicas
            || wanted.consistency_factor != self.members.consistency_factor;
        if !is_other || !self.has_quorum(&wanted, reachable) {
            return None;
        }
        let before = self.full(&self.members, reachable);
        let after = self.full(&wanted, reachable);
        let needed = before.min(usize::try_from(asked.count).unwrap_or(usize::MAX));
        self.members = Members {
            version: self.members.version + 1,
            ..wanted
        };
        (after < needed).then(|| format!("{before} full copies became {after} of {}", asked.count))
    }
}

impl State {
    fn copy_of(&mut self, id: &str) -> Option<&mut Copy> {
        self.replicas.values_mut().find(|copy| copy.id == id)
    }

    /// Those whose address is known and whose process can be reached.
    fn reachable(&self, place: &TargetPlace) -> Vec<String> {
        let there = |copy: &&Copy| {
            let has_pool = self.pool_away.as_ref() != Some(&copy.pool);
            copy.is_served && has_pool && place.addresses.contains_key(&copy.id)
        };
        let copies = self.replicas.values().filter(there);
        copies.map(|copy| copy.id.clone()).collect()
    }

    pub(super) fn serve_target(&mut self, place: &TargetPlace) -> TargetFound {
        let reachable = self.reachable(place);
        if !self.targets.contains_key(&place.volume) {
            self.begin_target(place);
        }
        let Some(mut target) = self.targets.remove(&place.volume) else {
            unreachable!("it was just begun");
        };
        target.runs = true;
        let broken = target.go_on(&place.wanted, &reachable);
        self.mistakes.extend(broken);
        for id in target.whole.clone() {
            let size = target.size;
            if let Some(copy) = self.copy_of(&id) {
                copy.size = copy.size.max(size);
            }
        }
        let found = self.found(place, &target, &reachable);
        let shown = self.replicas.entry(place.volume.clone()).or_default();
        shown.size = target.size;
        self.targets.insert(place.volume.clone(), target);
        found
    }

    fn begin_target(&mut self, place: &TargetPlace) {
        let members = place.members.clone();
        let is_known = |id: &String| place.addresses.contains_key(id);
        if !members.replicas.iter().all(is_known) {
            let mistake = format!("{} began without all of its copies", place.volume);
            self.mistakes.push(mistake);
        }
        let sizes = members.replicas.iter().map(|id| self.size_of(id));
        let target = Served {
            size: sizes.min().unwrap_or_default(),
            whole: members.replicas.clone(),
            members,
            repairing: Vec::new(),
            runs: true,
        };
        self.targets.insert(place.volume.clone(), target);
    }

    fn size_of(&self, id: &str) -> Bytes {
        let copy = self.replicas.values().find(|copy| copy.id == id);
        copy.map(|copy| copy.size).unwrap_or_default()
    }

    fn found(&self, place: &TargetPlace, target: &Served, reachable: &[String]) -> TargetFound {
        let members = &target.members;
        let available = target.has_quorum(members, reachable);
        let mut sizes: Vec<Bytes> = members.replicas.iter().map(|id| self.size_of(id)).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let quorum = usize::try_from(members.consistency_factor).unwrap_or(usize::MAX);
        let copies = sizes.get(quorum.saturating_sub(1)).copied();
        let seen = |id: &String| ReplicaSeen {
            id: id.clone(),
            state: if !reachable.contains(id) {
                ReplicaState::Away
            } else if target.is_whole(id) {
                ReplicaState::InSync
            } else {
                ReplicaState::Repairing
            },
            heard_at: None,
            size: Some(self.size_of(id)),
            behind: Bytes::ZERO,
            repair_left: Bytes::ZERO,
            repair_total: Bytes::ZERO,
            full: false,
            link_hold: None,
        };
        let hold = || {
            let message = "Too few copies can be reached.".to_owned();
            Hold::new(HoldReason::TooFewReplicas, message)
        };
        TargetFound {
            copies: copies.unwrap_or_default(),
            served: target.size,
            backing: PathBuf::from(&place.volume),
            iqn: None,
            portal: None,
            sessions: 0,
            lineage: None,
            replicas: members.replicas.iter().map(seen).collect(),
            available,
            redundancy_met: target.full(members, reachable)
                >= usize::try_from(place.wanted.count).unwrap_or(usize::MAX),
            size_converged: sizes.iter().all(|size| *size == target.size),
            hold: (!available).then(hold),
            scrub: None,
            members: members.clone(),
        }
    }

    pub(super) fn raise_target(&mut self, place: &TargetPlace, to: Bytes) -> Result<(), Hold> {
        refused(self, Rung::Replica)?;
        let reachable = self.reachable(place);
        let Some(target) = self.targets.get_mut(&place.volume) else {
            return Err(missing(&place.volume));
        };
        if !target.has_quorum(&target.members, &reachable) {
            let message = "Too few copies can be raised.".to_owned();
            return Err(Hold::new(HoldReason::TooFewReplicas, message));
        }
        let was = target.size;
        target.size = was.max(to);
        let (size, whole) = (target.size, target.whole.clone());
        for id in whole.iter().filter(|id| reachable.contains(id)) {
            if let Some(copy) = self.copy_of(id) {
                copy.size = copy.size.max(size);
            }
        }
        if to < was {
            let mistake = format!("{} was to be lowered from {was} to {to}", place.volume);
            self.mistakes.push(mistake);
        }
        Ok(())
    }

    pub(super) fn has_target(&self, volume: &str) -> bool {
        self.targets.get(volume).is_some_and(|target| target.runs)
    }

    pub(super) fn retire_target(&mut self, volume: &str) {
        if let Some(target) = self.targets.get_mut(volume) {
            target.runs = false;
        }
        let shown = self.replicas.remove(volume);
        if shown.is_some_and(|shown| shown.device.is_some()) {
            let mistake = format!("the target of {volume} was ended while it was in use");
            self.mistakes.push(mistake);
        }
    }
}
