//! The ordered lane: one request after the other, each as a few disk operations.

use std::collections::BTreeSet;

use super::flush::Item;
use super::repair::Overlay;
use super::{DiskOp, DiskResult, Effect, Member, Purpose, REPAIRS_MAX, SessionId, Waiting};
use crate::proto::{
    Answer, Content, Entry, EntryOp, Epoch, JoinTerms, Key, MetaChange, REGIONS_PER_PAGE_MAX,
    Region, Request, STAMPS_AHEAD, Stale, overlap,
};

/// How many waiting requests are searched for stamps that can be made durable together.
const STAMPS_AHEAD_MAX: usize = 1024;

/// What the ordered lane does next when the disk has answered.
pub(super) enum Work {
    /// A promise is being made durable.
    Promise(Waiting),
    /// A stamp is being made durable, then the entry is written.
    Stamp { session: SessionId, entry: Entry },
    /// An entry is being written.
    Data {
        session: SessionId,
        key: Key,
        region: Region,
    },
    /// Space for a range is being looked for.
    Allocate { session: SessionId, tag: u64 },
    /// The bytes are being synced before a region that lacks space is marked as stale.
    BehindSync {
        session: SessionId,
        region: Region,
        key: Option<Key>,
    },
    /// A region that lacks space is being marked as stale.
    BehindMark {
        session: SessionId,
        region: Region,
        key: Option<Key>,
    },
    /// Space is being set aside.
    Reserve {
        session: SessionId,
        key: Key,
        size: u64,
    },
    /// A size or a view is being made durable.
    Record { session: SessionId, key: Key },
    /// What is behind the end of the volume is being zeroed before a join.
    JoinZero {
        session: SessionId,
        terms: JoinTerms,
    },
    /// The bytes are being synced before a join.
    JoinSync {
        session: SessionId,
        terms: JoinTerms,
    },
    /// The size is being raised before a join.
    JoinSize {
        session: SessionId,
        terms: JoinTerms,
    },
    /// The join is being made durable.
    JoinRecord { session: SessionId, key: Key },
    /// A region is being marked as mixed.
    RepairMark,
    /// A region's older bytes are being written, from the back of the list.
    RepairWrite {
        session: SessionId,
        region: Region,
        stamp: Epoch,
        writes: Vec<DiskOp>,
    },
    /// Something that no longer counts.
    Dropped,
}

impl Member {
    /// Starts whatever can start.
    pub fn pump(&mut self, out: &mut Vec<Effect>) {
        while !self.halted && self.lane.is_none() {
            if let Some(hello) = self.hello {
                // The welcome says how far the bytes are, so nothing may be under way.
                if !self.flush.is_idle() || !self.reads.is_empty() {
                    break;
                }
                self.hello = None;
                self.start_promise(hello, out);
                continue;
            }
            let Some(bound) = &mut self.bound else { break };
            let session = bound.session;
            let Some(request) = bound.pop() else {
                break;
            };
            if let Some(later) = self.start(session, request, out) {
                if let Some(bound) = &mut self.bound {
                    bound.push_front(later);
                }
                break;
            }
        }
        if !self.halted {
            self.flush_pump(out);
        }
    }

    pub(super) fn begin(&mut self, op: DiskOp, work: Work, out: &mut Vec<Effect>) {
        let token = self.ask_disk(op, out);
        self.lane = Some((token, work));
    }

    /// Starts a request, or gives it back because it must wait.
    fn start(
        &mut self,
        session: SessionId,
        request: Request,
        out: &mut Vec<Effect>,
    ) -> Option<Request> {
        let takes_part = self.bound.as_ref().is_some_and(|bound| bound.takes_part);
        match request {
            Request::Hello | Request::Survey => {}
            Request::Regions { from } => self.report(session, from, out),
            Request::Stale { regions } if !takes_part => {
                if let Some(bound) = &mut self.bound {
                    bound.stale.extend(regions);
                }
            }
            Request::Restamp { regions } if !takes_part => {
                if let Some(bound) = &mut self.bound {
                    bound.restamp.extend(regions);
                }
            }
            Request::Join(terms) if !takes_part => {
                if !self.flush.is_idle() || !self.reads.is_empty() {
                    return Some(Request::Join(terms));
                }
                if terms.key.epoch.generation() != self.meta.promise.generation
                    || terms.key < self.meta.durable
                    || !terms.view.is_sound()
                {
                    self.close(out);
                    return None;
                }
                self.start_join(session, terms, out);
            }
            Request::Resume if !takes_part => {
                if let Some(bound) = &mut self.bound {
                    bound.takes_part = true;
                }
            }
            Request::Entry(entry) if takes_part => return self.start_entry(session, entry, out),
            Request::Read {
                tag,
                offset,
                length,
            } if takes_part => {
                return self.start_read(session, tag, (offset, length), Purpose::Bytes, out);
            }
            Request::Salvage {
                tag,
                offset,
                length,
            } if takes_part => {
                return self.start_read(session, tag, (offset, length), Purpose::Salvage, out);
            }
            Request::Verify {
                tag,
                offset,
                length,
            } if takes_part => {
                return self.start_read(session, tag, (offset, length), Purpose::Verify, out);
            }
            Request::Allocate {
                tag,
                offset,
                length,
            } if takes_part => self.start_allocate(session, tag, (offset, length), out),
            Request::RepairBegin { region } if takes_part => self.repair_begin(region, out),
            Request::RepairData {
                region,
                stamp,
                content,
            } if takes_part => return self.repair_data(session, region, stamp, content, out),
            Request::RepairPart {
                region,
                stamp,
                content,
                except,
            } if takes_part => {
                // A stale region has nothing of its own that could be kept.
                if self.meta.region(region).stale.is_some() {
                    self.close(out);
                    return None;
                }
                let block = u64::from(self.geometry.block_bytes);
                let (start, _) = self.geometry.extent(region, self.meta.size);
                for index in except {
                    self.overlay(region, start + u64::from(index) * block, block);
                }
                return self.repair_data(session, region, stamp, content, out);
            }
            Request::RepairDrop { region } if takes_part => {
                self.repairs.remove(&region);
            }
            // Out of turn: the coordinator is broken, or speaks to somebody else.
            _ => self.close(out),
        }
        None
    }

    fn report(&mut self, session: SessionId, from: Region, out: &mut Vec<Effect>) {
        let count = self.meta.stamps.len().saturating_sub(from.index());
        let states = (from.0..)
            .take(count.min(REGIONS_PER_PAGE_MAX))
            .map(|region| self.reported(Region(region)))
            .collect();
        self.answer(session, Answer::Regions { from, states }, out);
    }

    fn start_entry(
        &mut self,
        session: SessionId,
        entry: Entry,
        out: &mut Vec<Effect>,
    ) -> Option<Request> {
        let key = entry.key;
        if key.epoch.generation() != self.meta.promise.generation && !self.ignores_fence() {
            self.close(out);
            return None;
        }
        let record = |change: MetaChange| {
            (
                DiskOp::Persist(Box::new(change)),
                Work::Record { session, key },
            )
        };
        let (op, work) = match entry.op {
            EntryOp::Skip { region } if self.meta.region(region).stale.is_some() => {
                self.advance(session, key);
                return None;
            }
            EntryOp::Flush => {
                self.advance(session, key);
                self.flush_later(Item::Key { session, key });
                return None;
            }
            EntryOp::Write { .. } | EntryOp::Zero { .. } => {
                return self.start_write(session, entry, out);
            }
            EntryOp::Reserve { size } => (
                DiskOp::Reserve { size },
                Work::Reserve { session, key, size },
            ),
            EntryOp::Raise { size, version } => record(MetaChange {
                size: Some((size, version)),
                ..MetaChange::default()
            }),
            EntryOp::View(view) if view.is_sound() => record(MetaChange {
                view: Some(view),
                ..MetaChange::default()
            }),
            // A region that counts must not miss an entry.
            EntryOp::Skip { .. } | EntryOp::View(_) => {
                self.close(out);
                return None;
            }
        };
        self.begin(op, work, out);
        None
    }

    fn start_write(
        &mut self,
        session: SessionId,
        entry: Entry,
        out: &mut Vec<Effect>,
    ) -> Option<Request> {
        let range = match &entry.op {
            EntryOp::Write { offset, data } => {
                (*offset, u64::try_from(data.len()).unwrap_or(u64::MAX))
            }
            EntryOp::Zero { offset, length } => (*offset, *length),
            _ => return None,
        };
        if !self
            .geometry
            .allows_in_region(range.0, range.1, self.meta.size)
        {
            self.close(out);
            return None;
        }
        // A read that came before must not see what comes after it.
        if self.reads.values().any(|read| overlap(read.range, range)) {
            return Some(Request::Entry(entry));
        }
        let region = self.geometry.region_of(range.0);
        let state = self.meta.region(region);
        if self.is_behind(region) {
            self.advance(session, entry.key);
            return None;
        }
        if state.stale.is_some()
            && !self.repairs.contains_key(&region)
            && !self.flush.finishes(region)
        {
            self.close(out);
            return None;
        }
        self.overlay(region, range.0, range.1);
        if state.stamp < entry.key.epoch {
            let change = MetaChange {
                stamps: self.stamps_ahead(region, entry.key.epoch),
                ..MetaChange::default()
            };
            let work = Work::Stamp { session, entry };
            self.begin(DiskOp::Persist(Box::new(change)), work, out);
        } else {
            self.write_entry(session, entry, out);
        }
        None
    }

    /// The stamps that this write and the writes behind it need: one sync serves all of them. If a stamped write never
    /// comes, the stamp costs an unneeded repair and nothing else.
    fn stamps_ahead(&self, region: Region, epoch: Epoch) -> Vec<(Region, Epoch)> {
        let mut regions = BTreeSet::new();
        self.stamp(region, epoch, &mut regions);
        let waiting = self.bound.iter().flat_map(|bound| &bound.queue);
        for request in waiting.take(STAMPS_AHEAD_MAX) {
            let Request::Entry(entry) = request else {
                continue;
            };
            if entry.key.epoch != epoch {
                break;
            }
            let (offset, length) = match &entry.op {
                EntryOp::Write { offset, data } => {
                    (*offset, u64::try_from(data.len()).unwrap_or(u64::MAX))
                }
                EntryOp::Zero { offset, length } => (*offset, *length),
                _ => continue,
            };
            if !self
                .geometry
                .allows_in_region(offset, length, self.meta.size)
            {
                break;
            }
            let region = self.geometry.region_of(offset);
            if self.meta.region(region).stale.is_none() {
                self.stamp(region, epoch, &mut regions);
            }
        }
        regions.into_iter().map(|region| (region, epoch)).collect()
    }

    /// Adds a region to those that get a stamp, and the next ones when writes go from region to region.
    fn stamp(&self, region: Region, epoch: Epoch, regions: &mut BTreeSet<Region>) {
        let stamped = |region: Region, regions: &BTreeSet<Region>| {
            regions.contains(&region) || self.meta.region(region).stamp >= epoch
        };
        if stamped(region, regions) {
            return;
        }
        let before = region.0.checked_sub(1).map(Region);
        let follows = before.is_some_and(|before| stamped(before, regions));
        regions.insert(region);
        if follows {
            let ahead = (region.0 + 1..).map(Region);
            let ahead = ahead.take(usize::try_from(STAMPS_AHEAD).unwrap_or(0));
            let exists = |next: &Region| next.index() < self.meta.stamps.len();
            let counts = |next: &Region| self.meta.region(*next).stale.is_none();
            regions.extend(ahead.filter(exists).filter(counts));
        }
    }

    fn write_entry(&mut self, session: SessionId, entry: Entry, out: &mut Vec<Effect>) {
        let key = entry.key;
        let op = match entry.op {
            EntryOp::Write { offset, data } => DiskOp::Write { offset, data },
            EntryOp::Zero { offset, length } => DiskOp::Zero { offset, length },
            _ => return,
        };
        let region = match op {
            DiskOp::Write { offset, .. } | DiskOp::Zero { offset, .. } => {
                self.geometry.region_of(offset)
            }
            _ => return,
        };
        let work = Work::Data {
            session,
            key,
            region,
        };
        self.begin(op, work, out);
    }

    fn repair_begin(&mut self, region: Region, out: &mut Vec<Effect>) {
        if self.repairs.len() >= REPAIRS_MAX || region.index() >= self.meta.stamps.len() {
            return self.close(out);
        }
        self.repairs.insert(region, Overlay::default());
        self.behind.remove(&region);
        if let Some(stale) = self.meta.region(region).stale
            && !stale.mixed
        {
            let mixed = Stale {
                mixed: true,
                ..stale
            };
            let change = MetaChange {
                stale: vec![(region, Some(mixed))],
                ..MetaChange::default()
            };
            self.begin(DiskOp::Persist(Box::new(change)), Work::RepairMark, out);
        }
    }

    fn repair_data(
        &mut self,
        session: SessionId,
        region: Region,
        stamp: Epoch,
        content: Content,
        out: &mut Vec<Effect>,
    ) -> Option<Request> {
        let range = self.geometry.extent(region, self.meta.size);
        if self.reads.values().any(|read| overlap(read.range, range)) {
            return Some(Request::RepairData {
                region,
                stamp,
                content,
            });
        }
        let Some(overlay) = self.repairs.remove(&region) else {
            // One that had no space for an entry is not repaired any more.
            if !self.is_behind(region) {
                self.close(out);
            }
            return None;
        };
        let writes = self.repair_writes(region, &overlay, &content);
        self.repair_step(session, region, stamp, writes, out);
        None
    }

    fn repair_step(
        &mut self,
        session: SessionId,
        region: Region,
        stamp: Epoch,
        mut writes: Vec<DiskOp>,
        out: &mut Vec<Effect>,
    ) {
        match writes.pop() {
            Some(op) => {
                let work = Work::RepairWrite {
                    session,
                    region,
                    stamp,
                    writes,
                };
                self.begin(op, work, out);
            }
            None => {
                self.flush_later(Item::Region {
                    session,
                    region,
                    stamp,
                });
            }
        }
    }

    /// The bytes up to `key` are written.
    pub(super) fn advance(&mut self, session: SessionId, key: Key) {
        self.applied = key;
        self.unsaid = Some((session, key));
    }

    pub(super) fn lane_step(&mut self, work: Work, result: DiskResult, out: &mut Vec<Effect>) {
        let done = result == DiskResult::Done;
        match work {
            Work::Promise(hello) if done => self.welcome(hello, out),
            Work::Stamp { session, entry } if done => self.write_entry(session, entry, out),
            Work::Dropped => {}
            Work::Data { session, key, .. } if done => self.advance(session, key),
            Work::Data {
                session,
                key,
                region,
            } if result == DiskResult::NoSpace => {
                self.fall_behind(session, region, Some(key), out);
            }
            Work::RepairWrite {
                session, region, ..
            } if result == DiskResult::NoSpace => self.fall_behind(session, region, None, out),
            Work::BehindSync {
                session,
                region,
                key,
            } if done => self.mark_behind(session, region, key, out),
            Work::BehindSync { .. } => self.sync_failed(out),
            Work::BehindMark {
                session,
                region,
                key,
            } if done => self.fallen_behind(session, region, key, out),
            Work::Allocate { session, tag } => {
                let granted = done;
                self.answer(session, Answer::Allocated { tag, granted }, out);
            }
            // The bytes there are unknown; the stamp says so to whoever asks. Come again.
            Work::Data { session, .. }
            | Work::RepairWrite { session, .. }
            | Work::JoinZero { session, .. }
                if !done =>
            {
                self.exact = false;
                if result == DiskResult::NoSpace {
                    self.answer(session, Answer::Full, out);
                }
                self.close(out);
            }
            Work::RepairWrite {
                session,
                region,
                stamp,
                writes,
            } => self.repair_step(session, region, stamp, writes, out),
            Work::Reserve { session, key, size } => {
                let granted = done;
                self.answer(session, Answer::Reserved { size, granted }, out);
                self.advance(session, key);
            }
            Work::Record { session, key } if done => self.advance(session, key),
            // A size that does not fit: whoever wants it must make it part of a join.
            Work::Record { .. } if result == DiskResult::NoSpace => self.halt(out),
            Work::JoinZero { session, terms } => {
                let op = DiskOp::Sync { sums: false };
                self.begin(op, Work::JoinSync { session, terms }, out);
            }
            Work::JoinSync { session, terms } if done => self.join_size(session, terms, out),
            Work::JoinSync { .. } => self.sync_failed(out),
            Work::JoinSize { session, terms } if done => self.join_record(session, terms, out),
            Work::JoinSize { session, .. } if result == DiskResult::NoSpace => {
                self.answer(session, Answer::JoinNoSpace, out);
                self.halt(out);
            }
            Work::JoinRecord { session, key } if done => {
                self.applied = key;
                self.exact = true;
                out.push(Effect::Note { key });
                if let Some(bound) = &mut self.bound {
                    bound.takes_part = true;
                }
                self.answer(session, Answer::Joined, out);
            }
            Work::RepairMark if done => {}
            _ => self.halt(out),
        }
    }
}
