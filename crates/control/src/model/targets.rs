//! Targets of volumes of several copies: which copies count, which hold everything, and who may write.
//!
//! A write is a number. A target sends it to every copy that follows it and holds everything before; it is acknowledged
//! when as many copies that count have it as must. A copy follows the target of the latest generation that has greeted
//! it. A generation is a term and, within the term, the number of the process. A target that begins needs reports of so
//! many copies that one of them must have the last write; it goes on from the latest. A copy that is new or was away is
//! repaired: it holds everything at the second tick of a target whose copies are a quorum. The view moves to the copies
//! that are to count when a quorum of these holds everything. That must never cost a full copy.

use std::path::PathBuf;

use trellis_api::kinds::{CopiesWanted, Members, ReplicaSeen, ReplicaState};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::fabric::{Flaw, State};
use super::law::Law;
use super::machine::{missing, refused};
use crate::node::machine::{TargetFound, TargetPlace};
use crate::volume::members::who_counts;

/// One process of one term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Generation {
    term: u32,
    process: u64,
}

/// What the copies of a volume have agreed on.
pub(super) struct Agreed {
    size: Bytes,
    members: Members,
    filesystem: Option<Bytes>,
    /// The last write that was acknowledged.
    acknowledged: u64,
    /// The latest term that a target had when it acknowledged one.
    term: u32,
    /// How often the volume was brought into use, on whichever machine.
    begun: u64,
}

impl Agreed {
    pub(super) fn size(&self) -> Bytes {
        self.size
    }

    pub(super) fn filesystem(&self) -> Option<Bytes> {
        self.filesystem
    }

    pub(super) fn counts(&self, copy: &str) -> bool {
        self.members.replicas.iter().any(|each| each == copy)
    }

    fn quorum(&self) -> usize {
        count(self.members.consistency_factor)
    }

    /// So many copies that any quorum has one of them.
    fn reports(&self) -> usize {
        (self.members.replicas.len() + 1).saturating_sub(self.quorum())
    }
}

fn count(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The process of a target, and what is left of it.
#[derive(Default)]
pub(super) struct TargetProcess {
    place: Option<TargetPlace>,
    /// None until it has greeted a copy.
    generation: Option<Generation>,
    /// The last write that it knows. None before enough copies have told.
    last: Option<u64>,
    /// The copies that are on their way to holding everything.
    repairing: Vec<String>,
    /// The later term that it was refused for.
    outbid: Option<u32>,
    is_ended: bool,
    looks: u64,
}

impl TargetProcess {
    /// It starts again, and knows nothing.
    fn begin_again(&mut self) {
        self.generation = None;
        self.last = None;
        self.repairing.clear();
    }

    fn term(&self) -> u32 {
        self.place.as_ref().map_or(0, |place| place.term)
    }

    fn runs(&self) -> bool {
        !self.is_ended && self.outbid.is_none()
    }
}

impl State {
    /// Time passes for one target.
    pub(super) fn advance(&mut self, at: usize, volume: &str) {
        let Some(mut process) = self.hosts[at].targets.remove(volume) else {
            return;
        };
        let does_run = process.runs() && self.runs(at);
        let place = process.place.clone().filter(|_| does_run);
        if let Some((place, mut agreed)) =
            place.and_then(|it| Some((it, self.volumes.remove(volume)?)))
        {
            self.go_on(at, &place, &mut process, &mut agreed);
            self.volumes.insert(volume.to_owned(), agreed);
        }
        self.hosts[at].targets.insert(volume.to_owned(), process);
    }

    fn go_on(
        &mut self,
        at: usize,
        place: &TargetPlace,
        process: &mut TargetProcess,
        agreed: &mut Agreed,
    ) {
        let reachable = self.reachable(at, place);
        if !self.greet(place, process, &reachable) || !self.decide(process, agreed, &reachable) {
            return;
        }
        self.repair(place, process, agreed, &reachable);
        if self.write(process, agreed, &reachable) {
            self.check_use(at, place, agreed);
            self.change_members(place, process, agreed, &reachable);
        }
    }

    /// Whether the copies that are reached follow this target now.
    fn greet(
        &mut self,
        place: &TargetPlace,
        process: &mut TargetProcess,
        reachable: &[String],
    ) -> bool {
        let promises = reachable.iter().filter_map(|id| self.look_at(id));
        let Some(newest) = promises.map(|copy| copy.promised).max() else {
            return false;
        };
        let flaw = self.flaw;
        let is_late = newest.term > place.term && flaw != Some(Flaw::NoTerm);
        let own = match process.generation {
            Some(own) if own >= newest || flaw == Some(Flaw::NoFence) => own,
            Some(_) => {
                process.begin_again();
                process.outbid = is_late.then_some(newest.term);
                return false;
            }
            None if is_late => {
                process.outbid = Some(newest.term);
                return false;
            }
            None => Generation {
                term: newest.term.max(place.term),
                process: if newest.term >= place.term {
                    newest.process + 1
                } else {
                    1
                },
            },
        };
        process.generation = Some(own);
        for id in reachable {
            if let Some(copy) = self.copy_of(id) {
                copy.promised = copy.promised.max(own);
            }
        }
        true
    }

    /// Of these copies, those that count and follow the target.
    fn followers(&self, process: &TargetProcess, members: &Members, among: &[String]) -> usize {
        let follows = |id: &&String| among.contains(*id) && self.follows(process, id);
        members.replicas.iter().filter(follows).count()
    }

    fn follows(&self, process: &TargetProcess, id: &str) -> bool {
        let is_own = |promised| Some(promised) == process.generation;
        let copy = self.look_at(id);
        copy.is_some_and(|copy| is_own(copy.promised) || self.flaw == Some(Flaw::NoFence))
    }

    /// Whether the target knows what was written before it.
    fn decide(
        &mut self,
        process: &mut TargetProcess,
        agreed: &mut Agreed,
        reachable: &[String],
    ) -> bool {
        if process.last.is_some() {
            return true;
        }
        let needed = match self.flaw {
            Some(Flaw::TrustsOne) => 1,
            _ => agreed.reports(),
        };
        if self.followers(process, &agreed.members, reachable) < needed {
            return false;
        }
        let members = agreed.members.replicas.iter();
        let reports = members.filter(|id| reachable.contains(*id));
        let reports = reports.filter_map(|id| self.look_at(id));
        let reports: Vec<(u64, Bytes)> = reports.map(|copy| (copy.has, copy.size)).collect();
        let last = reports.iter().map(|(has, _)| *has).max().unwrap_or(0);
        let sizes = reports.iter().map(|(_, size)| *size);
        let size = match self.flaw {
            Some(Flaw::TakesSmallest) => sizes.min(),
            _ => sizes.max(),
        };
        let size = size.unwrap_or_default();
        let (before, was) = (agreed.acknowledged, agreed.size);
        if last < before {
            let what = format!("{before} was acknowledged, and the last that is known is {last}");
            self.breach(Law::AcknowledgedStays, what);
        }
        if size < was {
            let what = format!("a target that took over serves {size}, and {was} was served");
            self.breach(Law::NothingShrinks, what);
        }
        agreed.size = was.max(size);
        process.last = Some(last);
        true
    }

    fn holds_everything(&self, process: &TargetProcess, id: &str, reachable: &[String]) -> bool {
        let is_whole = |has: u64| process.last.is_some_and(|last| has >= last);
        let copy = self.look_at(id);
        reachable.iter().any(|each| each == id)
            && self.follows(process, id)
            && copy.is_some_and(|copy| is_whole(copy.has))
    }

    /// How many of these hold everything and can be reached.
    fn full(&self, process: &TargetProcess, members: &Members, reachable: &[String]) -> usize {
        let full = |id: &&String| self.holds_everything(process, id, reachable);
        members.replicas.iter().filter(full).count()
    }

    /// Copies that can be reached come nearer to holding everything.
    fn repair(
        &mut self,
        place: &TargetPlace,
        process: &mut TargetProcess,
        agreed: &Agreed,
        reachable: &[String],
    ) {
        let is_whole = |id: &String| self.holds_everything(process, id, reachable);
        let has_source = reachable.iter().any(is_whole);
        if !has_source || self.followers(process, &agreed.members, reachable) < agreed.quorum() {
            return;
        }
        let last = process.last.unwrap_or_default();
        for id in std::mem::take(&mut process.repairing) {
            if let Some(copy) = self.copy_of(&id).filter(|_| reachable.contains(&id)) {
                copy.has = copy.has.max(last);
                copy.size = copy.size.max(agreed.size);
            }
        }
        let mut all: Vec<String> = agreed.members.replicas.clone();
        all.extend(place.wanted.staying.clone());
        all.retain(|id| reachable.contains(id) && !self.holds_everything(process, id, reachable));
        all.sort_unstable();
        all.dedup();
        process.repairing = all;
    }

    /// Users write. Copies that cannot be reached miss it.
    fn write(
        &mut self,
        process: &mut TargetProcess,
        agreed: &mut Agreed,
        reachable: &[String],
    ) -> bool {
        if self.full(process, &agreed.members, reachable) < agreed.quorum() {
            return false;
        }
        let next = process.last.unwrap_or_default() + 1;
        let whole = reachable
            .iter()
            .filter(|id| self.holds_everything(process, id, reachable));
        for id in whole.cloned().collect::<Vec<_>>() {
            if let Some(copy) = self.copy_of(&id) {
                copy.has = next;
                copy.size = copy.size.max(agreed.size);
            }
        }
        process.last = Some(next);
        agreed.acknowledged = agreed.acknowledged.max(next);
        let (term, latest) = (process.term(), agreed.term);
        agreed.term = latest.max(term);
        if term < latest {
            let what = format!("a target of term {term} acknowledged after one of term {latest}");
            self.breach(Law::TermsRise, what);
        }
        true
    }

    /// Whoever has used the volume before somebody else did remembers what is not so any more.
    fn check_use(&mut self, at: usize, place: &TargetPlace, agreed: &Agreed) {
        let staged = self.hosts[at].stages.get(&place.volume);
        if staged.is_some_and(|staged| staged.number < agreed.begun) {
            let what = format!("{} is used on node {at} by an earlier user", place.volume);
            self.breach(Law::UsesEnd, what);
        }
    }

    fn change_members(
        &mut self,
        place: &TargetPlace,
        process: &TargetProcess,
        agreed: &mut Agreed,
        reachable: &[String],
    ) {
        let asked = &place.wanted;
        let is_whole = |id: &str| self.holds_everything(process, id, reachable);
        let now = &agreed.members;
        let wanted = match self.flaw {
            Some(Flaw::LetsGoEarly) => staying_only(asked, now),
            _ => who_counts(asked, now, &is_whole),
        };
        let is_other =
            wanted.replicas != now.replicas || wanted.consistency_factor != now.consistency_factor;
        let full = self.full(process, &wanted, reachable);
        if !is_other || full < count(wanted.consistency_factor) {
            return;
        }
        let before = self.full(process, now, reachable);
        agreed.members = Members {
            version: now.version + 1,
            ..wanted
        };
        if full < before.min(count(asked.count)) {
            let what = format!("{before} full copies became {full} of {}", asked.count);
            self.breach(Law::CopiesStay, what);
        }
    }

    /// Whether a write would be acknowledged now.
    pub(super) fn can_acknowledge(&self, at: usize, process: &TargetProcess) -> bool {
        let Some(place) = process.place.as_ref().filter(|_| process.runs()) else {
            return false;
        };
        let agreed = self.volumes.get(&place.volume);
        let reachable = self.reachable(at, place);
        self.runs(at)
            && agreed.is_some_and(|agreed| {
                self.full(process, &agreed.members, &reachable) >= agreed.quorum()
            })
    }

    /// Whether the target of a volume on this machine serves it.
    pub(super) fn serves(&self, at: usize, volume: &str) -> bool {
        let process = self.hosts[at].targets.get(volume);
        process.is_some_and(|process| self.can_acknowledge(at, process))
    }
}

fn staying_only(asked: &CopiesWanted, now: &Members) -> Members {
    let mut members = now.clone();
    members.replicas.retain(|id| asked.staying.contains(id));
    members.consistency_factor = 1;
    members
}

/// What the machine of a target does with it.
impl State {
    pub(super) fn serve_target(
        &mut self,
        at: usize,
        place: &TargetPlace,
    ) -> Result<TargetFound, Hold> {
        let volume = &place.volume;
        if !self.volumes.contains_key(volume) {
            self.begin_volume(place);
        }
        let process = self.hosts[at].targets.entry(volume.clone()).or_default();
        process.place = Some(place.clone());
        process.looks += 1;
        if std::mem::take(&mut process.is_ended) {
            process.begin_again();
        }
        if process.outbid.is_some_and(|term| place.term > term) {
            process.outbid = None;
        }
        self.advance(at, volume);
        let process = &self.hosts[at].targets[volume];
        if let Some(term) = process.outbid {
            let message = format!("Copies of {volume} have followed a target of term {term}.");
            return Err(Hold::new(HoldReason::TargetOutbid, message));
        }
        let Some(agreed) = self.volumes.get(volume) else {
            return Err(missing(volume));
        };
        Ok(self.found(at, place, process, agreed))
    }

    fn begin_volume(&mut self, place: &TargetPlace) {
        let members = place.members.clone();
        let is_known = |id: &String| place.addresses.contains_key(id);
        if !members.replicas.iter().all(is_known) {
            let what = format!("{} began without all of its copies", place.volume);
            self.breach(Law::CopiesStay, what);
        }
        let sizes = members.replicas.iter().map(|id| self.size_of(id));
        let agreed = Agreed {
            size: sizes.min().unwrap_or_default(),
            members,
            filesystem: None,
            acknowledged: 0,
            term: 0,
            begun: 0,
        };
        self.volumes.insert(place.volume.clone(), agreed);
    }

    fn size_of(&self, id: &str) -> Bytes {
        self.look_at(id).map(|copy| copy.size).unwrap_or_default()
    }

    fn found(
        &self,
        at: usize,
        place: &TargetPlace,
        process: &TargetProcess,
        agreed: &Agreed,
    ) -> TargetFound {
        let members = &agreed.members;
        let reachable = self.reachable(at, place);
        let available = self.can_acknowledge(at, process);
        let mut sizes: Vec<Bytes> = members.replicas.iter().map(|id| self.size_of(id)).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let copies = sizes.get(agreed.quorum().saturating_sub(1)).copied();
        let seen = |id: &String| ReplicaSeen {
            id: id.clone(),
            state: if !reachable.contains(id) {
                ReplicaState::Away
            } else if self.holds_everything(process, id, &reachable) {
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
        let wavers = self.flaw == Some(Flaw::Wavers);
        TargetFound {
            copies: copies.unwrap_or_default(),
            served: agreed.size,
            backing: PathBuf::from(&place.volume),
            iqn: wavers.then(|| process.looks.to_string()),
            portal: None,
            sessions: 0,
            lineage: None,
            replicas: members.replicas.iter().map(seen).collect(),
            available,
            redundancy_met: self.full(process, members, &reachable) >= count(place.wanted.count),
            size_converged: sizes.iter().all(|size| *size == agreed.size),
            hold: (!available).then(hold),
            scrub: None,
            members: members.clone(),
        }
    }

    pub(super) fn raise_target(
        &mut self,
        at: usize,
        place: &TargetPlace,
        to: Bytes,
    ) -> Result<(), Hold> {
        refused(self, Rung::Replica)?;
        if !self.serves(at, &place.volume) {
            let message = "Too few copies can be raised.".to_owned();
            return Err(Hold::new(HoldReason::TooFewReplicas, message));
        }
        let Some(agreed) = self.volumes.get_mut(&place.volume) else {
            return Err(missing(&place.volume));
        };
        let was = agreed.size;
        agreed.size = was.max(to);
        if to < was {
            let what = format!("{} was to be lowered from {was} to {to}", place.volume);
            self.breach(Law::NothingShrinks, what);
        }
        // The copies that hold everything are raised with the next write.
        self.advance(at, &place.volume);
        Ok(())
    }

    pub(super) fn set_filesystem(&mut self, volume: &str, size: Bytes) {
        if let Some(agreed) = self.volumes.get_mut(volume) {
            agreed.filesystem = Some(size);
        }
    }

    /// The volume is brought into use; returns for the how manieth time.
    pub(super) fn begin_use(&mut self, volume: &str) -> u64 {
        let agreed = self.volumes.get_mut(volume);
        agreed.map_or(0, |agreed| {
            agreed.begun += 1;
            agreed.begun
        })
    }

    /// The term that a target was given last.
    pub(super) fn given_term(&self, at: usize, volume: &str) -> Option<u32> {
        let process = self.hosts[at].targets.get(volume);
        process.map(TargetProcess::term)
    }

    /// The term that a target was refused for.
    pub(super) fn outbid(&self, at: usize, volume: &str) -> Option<u32> {
        self.hosts[at].targets.get(volume)?.outbid
    }

    pub(super) fn abandon_target(&mut self, at: usize, volume: &str) {
        if let Some(process) = self.hosts[at].targets.get_mut(volume) {
            process.is_ended = true;
        }
        if self.hosts.len() == 1 {
            let what = format!("{volume} was taken from its users, and there is one node");
            self.breach(Law::UsersKeepTheirs, what);
        }
    }

    pub(super) fn retire_target(&mut self, at: usize, volume: &str) {
        self.hosts[at].targets.remove(volume);
        if self.hosts[at].stages.remove(volume).is_some() {
            let what = format!("the target of {volume} was ended while it was in use");
            self.breach(Law::UsersKeepTheirs, what);
        }
    }
}
