//! Repair: region by region, several replicas at once, while I/O goes on.
//!
//! ```text
//!   stale ──RepairBegin──▶ begun ──read at a holder──▶ RepairData ──▶ RepairDone: the replica holds it
//!                            │ from here on the replica gets the region's entries too, and keeps
//!                            │ the blocks that they write when the older bytes arrive
//! ```
//!
//! The holder is read after everything has been sent to it, so its answer has every entry that the repaired replica
//! has skipped. A region that clients wait for goes first; the others share a budget of bytes a second. Every finished
//! region is durable, so nothing is repaired twice.

use std::collections::{BTreeMap, BTreeSet};

use super::peer::Region0;
use super::{Coordinator, Effect};
use crate::proto::{Content, ReadFault, Region, ReplicaId, Request};

/// Reads for repairs that two replicas may be asked for at the same time.
const HEDGES_MAX: usize = 4;

/// How many stale regions are searched at a time for one that can be repaired.
const LOOK_MAX: usize = 64;

/// A region of a replica that is being repaired.
#[derive(Clone, Debug)]
pub(super) struct Repair {
    /// Replicas that could not read it.
    tried: BTreeSet<ReplicaId>,
    /// Whether the bytes are on their way: to us or to the replica.
    moving: bool,
    /// What was got of it, if a holder could give only a part.
    part: Option<Part>,
}

/// A region of which some blocks are missing.
#[derive(Clone, Debug)]
struct Part {
    bytes: Vec<u8>,
    missing: BTreeSet<u32>,
}

impl Part {
    /// Takes over what another holder has of the missing blocks.
    fn fill(&mut self, content: &Content, bad: &[u32], block_bytes: usize) {
        let fills: Vec<u32> = self.missing.iter().copied().collect();
        for block in fills.into_iter().filter(|block| !bad.contains(block)) {
            let at = usize::try_from(block).unwrap_or(usize::MAX);
            let range =
                at.saturating_mul(block_bytes)..at.saturating_add(1).saturating_mul(block_bytes);
            let Some(into) = self.bytes.get_mut(range.clone()) else {
                continue;
            };
            match content {
                Content::Zeros(_) => into.fill(0),
                Content::Data(data) => match data.get(range) {
                    Some(from) => into.copy_from_slice(from),
                    None => continue,
                },
            }
            self.missing.remove(&block);
        }
    }
}

/// A read for a repair.
#[derive(Debug)]
pub(super) struct RepairRead {
    source: ReplicaId,
    target: ReplicaId,
    region: Region,
    at: u64,
    /// Nobody waits for it any more: another replica was faster.
    is_idle: bool,
    /// The same read at another replica.
    twin: Option<u64>,
}

impl Coordinator {
    /// A replica's disk could not read a region that it holds.
    pub(super) fn damaged(&mut self, replica: ReplicaId, region: Region) {
        let others = self
            .peers
            .iter()
            .any(|(id, peer)| *id != replica && peer.holds(region));
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        if others {
            peer.flawed.remove(&region);
            peer.damaged.insert(region);
        } else {
            // The last holder stays one: the rest of the region may well be readable.
            peer.flawed.insert(region);
        }
    }

    /// A region has another holder. Replicas that were its only holder and have wrong blocks are repaired from it,
    /// unless it cannot give these blocks either.
    fn mend_flawed(&mut self, region: Region) {
        if self.hopeless.contains(&region) {
            return;
        }
        let flawed = self.peers.iter();
        let flawed = flawed.filter(|(_, peer)| peer.is_active() && peer.flawed.contains(&region));
        for replica in flawed.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.damaged(replica, region);
        }
    }

    /// A damaged region without any holder is better than nothing: it counts again. Reading a bad block of it is an
    /// error.
    pub(super) fn forgive_damage(&mut self, out: &mut Vec<Effect>) {
        let regions: BTreeSet<Region> = self
            .peers
            .values()
            .filter(|peer| peer.is_active())
            .flat_map(|peer| peer.damaged.iter().copied())
            .collect();
        for region in regions {
            if self.peers.values().any(|peer| peer.holds(region)) {
                continue;
            }
            let mut begun = Vec::new();
            for (id, peer) in &mut self.peers {
                if peer.damaged.remove(&region)
                    && !peer.stale.contains(region)
                    && peer.repairs.remove(&region).is_some()
                {
                    begun.push(*id);
                }
            }
            for replica in begun {
                self.send(replica, Request::RepairDrop { region }, out);
            }
        }
    }

    pub(super) fn repair_refill(&mut self) {
        let limits = self.settings.limits;
        let elapsed = self.now.saturating_sub(self.budget_at).min(1_000);
        self.budget_at = self.now;
        self.scrub_refill(elapsed);
        let refill = limits.repair_bytes_per_second.saturating_mul(elapsed) / 1_000;
        self.repair_budget = (self.repair_budget + refill).min(limits.repair_bytes_per_second);
    }

    pub(super) fn repair_schedule(&mut self, out: &mut Vec<Effect>) {
        let targets: Vec<ReplicaId> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.is_active() && !peer.is_whole())
            .map(|(id, _)| *id)
            .collect();
        if targets.is_empty() {
            return;
        }
        let wanted = self.wanted();
        for target in targets {
            self.repair_target(target, &wanted, out);
        }
    }

    fn repair_target(
        &mut self,
        target: ReplicaId,
        wanted: &BTreeSet<Region>,
        out: &mut Vec<Effect>,
    ) {
        self.repair_reads_start(target, out);
        let region_bytes = u64::from(self.settings.geometry.region_bytes);
        for _ in 0..self.settings.limits.repairs_per_replica_max {
            let Some(peer) = self.peers.get(&target) else {
                return;
            };
            if peer.repairs.len() >= self.settings.limits.repairs_per_replica_max {
                return;
            }
            let needs = |region: &Region| {
                (peer.stale.contains(*region) || peer.damaged.contains(region))
                    && !peer.repairs.contains_key(region)
                    && peer.unreadable.get(region).is_none_or(|at| *at <= self.now)
                    && self.source_of(target, *region, &BTreeSet::new()).is_some()
            };
            let urgent = wanted.iter().copied().find(needs);
            if urgent.is_none()
                && (self.now < peer.repair_retry_at || self.repair_budget < region_bytes)
            {
                return;
            }
            let from = peer.repair_cursor.0;
            let next = urgent
                .or_else(|| peer.stale.from(from).take(LOOK_MAX).find(needs))
                .or_else(|| peer.stale.iter().take(LOOK_MAX).find(needs))
                .or_else(|| peer.damaged.iter().copied().find(needs));
            if urgent.is_none() && next.is_some() {
                self.repair_budget -= region_bytes;
            }
            let Some(region) = next else {
                if let Some(peer) = self.peers.get_mut(&target) {
                    let last = peer.stale.from(peer.repair_cursor.0).take(LOOK_MAX).last();
                    peer.repair_cursor = Region0(last.unwrap_or(Region(0)));
                }
                return;
            };
            self.repair_begin(target, region, out);
        }
    }

    fn repair_begin(&mut self, target: ReplicaId, region: Region, out: &mut Vec<Effect>) {
        // What was read for an earlier repair is older than what was written since.
        for read in self.repair_reads.values_mut() {
            if (read.target, read.region) == (target, region) {
                (read.is_idle, read.twin) = (true, None);
            }
        }
        let Some(peer) = self.peers.get_mut(&target) else {
            return;
        };
        peer.repair_cursor = Region0(region);
        peer.repairs.insert(
            region,
            Repair {
                tried: BTreeSet::new(),
                moving: false,
                part: None,
            },
        );
        self.send(target, Request::RepairBegin { region }, out);
        self.repair_reads_start(target, out);
    }

    /// A replica that holds the region and has been sent everything.
    fn source_of(
        &self,
        target: ReplicaId,
        region: Region,
        tried: &BTreeSet<ReplicaId>,
    ) -> Option<ReplicaId> {
        self.peers
            .iter()
            .filter(|(id, peer)| **id != target && !tried.contains(id) && peer.holds(region))
            .filter_map(|(id, peer)| Some((id, peer.session.as_ref()?)))
            .filter(|(_, session)| session.cursor == self.seq)
            .min_by_key(|(_, session)| (self.is_late(session), session.reads))
            .map(|(id, _)| *id)
    }

    /// Asks for the bytes of regions whose repair has begun and that have a ready holder.
    fn repair_reads_start(&mut self, target: ReplicaId, out: &mut Vec<Effect>) {
        let Some(peer) = self.peers.get(&target) else {
            return;
        };
        let idle: Vec<(Region, Option<ReplicaId>)> = peer
            .repairs
            .iter()
            .filter(|(_, repair)| !repair.moving)
            .map(|(region, repair)| (*region, self.source_of(target, *region, &repair.tried)))
            .collect();
        for (region, source) in idle {
            let Some(source) = source else { continue };
            self.repair_read(source, target, region, None, out);
            if let Some(repair) = self
                .peers
                .get_mut(&target)
                .and_then(|peer| peer.repairs.get_mut(&region))
            {
                repair.moving = true;
            }
        }
    }

    fn repair_read(
        &mut self,
        source: ReplicaId,
        target: ReplicaId,
        region: Region,
        twin: Option<u64>,
        out: &mut Vec<Effect>,
    ) -> u64 {
        let tag = self.next_tag();
        let read = RepairRead {
            source,
            target,
            region,
            at: self.now,
            is_idle: false,
            twin,
        };
        self.repair_reads.insert(tag, read);
        let (offset, length) = self.settings.geometry.extent(region, self.size);
        let verifies = self.session_mut(source).is_some_and(|it| it.verifies);
        let request = if verifies {
            Request::Salvage {
                tag,
                offset,
                length,
            }
        } else {
            Request::Read {
                tag,
                offset,
                length,
            }
        };
        self.send(source, request, out);
        tag
    }

    /// A holder has given what it can of a region. Blocks that do not match their sums are never passed on.
    pub(super) fn salvaged(
        &mut self,
        replica: ReplicaId,
        tag: u64,
        content: Content,
        bad: &[u32],
        out: &mut Vec<Effect>,
    ) {
        let Some(read) = self
            .repair_reads
            .get(&tag)
            .filter(|it| it.source == replica)
        else {
            return;
        };
        let (target, region, is_idle) = (read.target, read.region, read.is_idle);
        if !bad.is_empty() && !is_idle {
            self.rot_was_read(replica, bad.len());
        }
        let block_bytes = usize::try_from(self.settings.geometry.block_bytes).unwrap_or(1);
        let repair = self
            .peers
            .get_mut(&target)
            .and_then(|it| it.repairs.get_mut(&region));
        let Some(repair) = repair.filter(|_| !is_idle) else {
            return self.repair_read_answered(replica, tag, Ok(content), out);
        };
        if let Some(part) = &mut repair.part {
            part.fill(&content, bad, block_bytes);
        } else if !bad.is_empty() {
            let bytes = match &content {
                Content::Data(data) => data.to_vec(),
                Content::Zeros(length) => vec![0; usize::try_from(*length).unwrap_or(0)],
            };
            let missing = bad.iter().copied().collect();
            repair.part = Some(Part { bytes, missing });
        }
        let result = match &repair.part {
            None => Ok(content),
            Some(part) if part.missing.is_empty() => Ok(Content::Data(part.bytes.clone().into())),
            Some(_) => Err(ReadFault::Medium),
        };
        if !bad.is_empty() {
            self.damaged(replica, region);
        }
        self.repair_read_answered(replica, tag, result, out);
    }

    /// Sends what there is of a region that nobody can give as a whole, if that is better than what the replica has.
    /// The replica keeps its own blocks where others are missing.
    fn repair_with_part(
        &mut self,
        target: ReplicaId,
        region: Region,
        out: &mut Vec<Effect>,
    ) -> bool {
        let stamp = self.stamps.get(region.index()).copied();
        let Some(peer) = self.peers.get_mut(&target) else {
            return false;
        };
        let verifies = peer.session.as_ref().is_some_and(|it| it.verifies);
        if !verifies || peer.stale.contains(region) {
            return false;
        }
        let Some(repair) = peer.repairs.get_mut(&region) else {
            return false;
        };
        let (Some(part), Some(stamp)) = (repair.part.take(), stamp) else {
            return false;
        };
        repair.moving = true;
        self.hopeless.insert(region);
        let request = Request::RepairPart {
            region,
            stamp,
            content: Content::Data(part.bytes.into()),
            except: part.missing.into_iter().collect(),
        };
        self.send(target, request, out);
        true
    }

    /// Asks another holder for what is late.
    pub(super) fn hedge_repairs(&mut self, out: &mut Vec<Effect>) {
        let limit = self.settings.limits.hedge_ms;
        let hedged = |read: &&RepairRead| !read.is_idle && read.twin.is_some();
        let hedged = self.repair_reads.values().filter(hedged).count() / 2;
        let late: Vec<u64> = self
            .repair_reads
            .iter()
            .filter(|(_, read)| !read.is_idle && read.twin.is_none())
            .filter(|(_, read)| self.now.saturating_sub(read.at) >= limit)
            .map(|(tag, _)| *tag)
            .take(HEDGES_MAX.saturating_sub(hedged))
            .collect();
        for tag in late {
            let Some(read) = self.repair_reads.get(&tag) else {
                continue;
            };
            let (slow, target, region) = (read.source, read.target, read.region);
            let repair = self
                .peers
                .get(&target)
                .and_then(|peer| peer.repairs.get(&region));
            let Some(repair) = repair else { continue };
            let mut except = repair.tried.clone();
            except.insert(slow);
            let Some(source) = self.source_of(target, region, &except) else {
                continue;
            };
            let twin = self.repair_read(source, target, region, Some(tag), out);
            if let Some(read) = self.repair_reads.get_mut(&tag) {
                read.twin = Some(twin);
            }
            if let Some(session) = self.session_mut(slow) {
                session.is_late = true;
            }
        }
    }

    pub(super) fn repair_read_answered(
        &mut self,
        replica: ReplicaId,
        tag: u64,
        result: Result<Content, ReadFault>,
        out: &mut Vec<Effect>,
    ) {
        if self
            .repair_reads
            .get(&tag)
            .is_none_or(|read| read.source != replica)
        {
            return;
        }
        let Some(read) = self.repair_reads.remove(&tag) else {
            return;
        };
        if let Some(session) = self.session_mut(replica) {
            session.is_late = false;
        }
        if read.is_idle {
            return;
        }
        let stamp = self.stamps.get(read.region.index()).copied();
        let begun = self
            .peers
            .get(&read.target)
            .is_some_and(|peer| peer.repairs.contains_key(&read.region));
        if !begun {
            return;
        }
        match (result, stamp) {
            (Ok(content), Some(stamp)) => {
                if let Some(twin) = read.twin.and_then(|twin| self.repair_reads.get_mut(&twin)) {
                    (twin.is_idle, twin.twin) = (true, None);
                }
                let region = read.region;
                let data = Request::RepairData {
                    region,
                    stamp,
                    content,
                };
                self.send(read.target, data, out);
            }
            _ => self.repair_source_failed(replica, &read, out),
        }
    }

    fn repair_source_failed(
        &mut self,
        source: ReplicaId,
        read: &RepairRead,
        out: &mut Vec<Effect>,
    ) {
        self.damaged(source, read.region);
        let mut tried = BTreeSet::new();
        if let Some(repair) = self
            .peers
            .get_mut(&read.target)
            .and_then(|peer| peer.repairs.get_mut(&read.region))
        {
            repair.tried.insert(source);
            repair.moving = false;
            tried = repair.tried.clone();
        }
        if self.leave_to_twin(read) {
            return;
        }
        let others = self
            .peers
            .iter()
            .any(|(id, peer)| *id != read.target && !tried.contains(id) && peer.holds(read.region));
        if !others && self.repair_with_part(read.target, read.region, out) {
            return;
        }
        if !others {
            // Nobody can read it now. A region that was only damaged goes back to being held.
            let retry_at = self.now + self.settings.limits.repair_retry_ms;
            if let Some(peer) = self.peers.get_mut(&read.target) {
                peer.repairs.remove(&read.region);
                peer.damaged.remove(&read.region);
                peer.repair_retry_at = retry_at;
                // Also if clients wait for it: a disk does not get better by being asked without a pause.
                peer.unreadable.retain(|_, at| *at > self.now);
                peer.unreadable.insert(read.region, retry_at);
            }
            let region = read.region;
            self.send(read.target, Request::RepairDrop { region }, out);
        }
    }

    /// Whether another replica was asked for the same bytes, so that nothing is lost yet.
    fn leave_to_twin(&mut self, read: &RepairRead) -> bool {
        let Some(twin) = read.twin.and_then(|twin| self.repair_reads.get_mut(&twin)) else {
            return false;
        };
        twin.twin = None;
        if let Some(repair) = self
            .peers
            .get_mut(&read.target)
            .and_then(|peer| peer.repairs.get_mut(&read.region))
        {
            repair.moving = true;
        }
        true
    }

    /// Reads for repairs that a lost replica owes, or that were for it.
    pub(super) fn repair_reads_from_gone(&mut self, replica: ReplicaId) {
        let (gone, rest): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.repair_reads)
            .into_iter()
            .partition(|(_, read)| read.source == replica || read.target == replica);
        self.repair_reads = rest;
        for read in gone.into_values() {
            if read.is_idle || read.target == replica || self.leave_to_twin(&read) {
                continue;
            }
            if let Some(repair) = self
                .peers
                .get_mut(&read.target)
                .and_then(|peer| peer.repairs.get_mut(&read.region))
            {
                repair.moving = false;
            }
        }
    }

    pub(super) fn owes_repair_reads(&self, replica: ReplicaId, limit_ms: u64) -> bool {
        self.repair_reads
            .values()
            .any(|read| read.source == replica && self.now.saturating_sub(read.at) > limit_ms)
    }

    pub(super) fn repaired(&mut self, replica: ReplicaId, region: Region) {
        if let Some(peer) = self.peers.get_mut(&replica)
            && peer.repairs.remove(&region).is_some()
        {
            peer.stale.remove(region);
            peer.damaged.remove(&region);
            peer.flawed.remove(&region);
            self.mend_flawed(region);
        }
    }
}
