//! The ordered lane: one request after the other, each as a few steps of the disk.

use std::collections::BTreeSet;

use super::flush::Item;
use super::repair::Overlay;
use super::{
    DiskOp, DiskResult, Effect, Member, Purpose, READS_MAX, REPAIRS_MAX, ReadAtDisk, SessionId,
    Waiting,
};
use crate::proto::{
    Answer, Content, Entry, EntryOp, Epoch, Forget, JoinTerms, Key, MetaChange,
    REGIONS_PER_PAGE_MAX, ReadFault, Region, Request, SNAPSHOTS_MAX, STAMPS_AHEAD, Stale, Welcome,
    overlap,
};

/// How many waiting requests are looked at for stamps that can be made durable together.
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
    /// A size, a marker or a view is being made durable.
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

    fn start_promise(&mut self, hello: Waiting, out: &mut Vec<Effect>) {
        let change = MetaChange {
            promise: Some(hello.promise),
            ..MetaChange::default()
        };
        self.begin(DiskOp::Persist(Box::new(change)), Work::Promise(hello), out);
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
                    || terms.snapshots.len() > SNAPSHOTS_MAX
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

    fn start_join(&mut self, session: SessionId, terms: JoinTerms, out: &mut Vec<Effect>) {
        // A replica never shrinks. Where it is larger than the volume that it joins, its bytes are of a
        // history that does not count; the volume may grow to there, and must find zeros.
        let behind = self.meta.size.saturating_sub(terms.size);
        if terms.forget != Forget::Nothing && behind > 0 {
            let zero = DiskOp::Zero {
                offset: terms.size,
                length: behind,
            };
            return self.begin(zero, Work::JoinZero { session, terms }, out);
        }
        let op = DiskOp::Sync { sums: false };
        self.begin(op, Work::JoinSync { session, terms }, out);
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
            EntryOp::Snapshot(snapshot) => record(MetaChange {
                snapshots: vec![snapshot],
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

    /// The stamps that this write needs, and those that the writes behind it will need: one sync does
    /// for all of them. A stamp that comes before its write, or whose write never comes, costs no more
    /// than a repair that was not needed.
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

    /// Adds a region to those that get a stamp, and the next ones where writes go from region to region.
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

    fn start_read(
        &mut self,
        session: SessionId,
        tag: u64,
        range: (u64, u64),
        purpose: Purpose,
        out: &mut Vec<Effect>,
    ) -> Option<Request> {
        let (offset, length) = range;
        if self.reads.len() >= READS_MAX {
            return Some(match purpose {
                Purpose::Bytes => Request::Read {
                    tag,
                    offset,
                    length,
                },
                Purpose::Salvage => Request::Salvage {
                    tag,
                    offset,
                    length,
                },
                Purpose::Verify => Request::Verify {
                    tag,
                    offset,
                    length,
                },
            });
        }
        if !self
            .geometry
            .allows_in_region(offset, length, self.meta.size)
        {
            self.close(out);
            return None;
        }
        let region = self.geometry.region_of(offset);
        if self.meta.region(region).stale.is_some() {
            let result = Err(ReadFault::Stale);
            self.answer(session, Answer::Read { tag, result }, out);
            return None;
        }
        let token = self.ask_disk(DiskOp::Read { offset, length }, out);
        let read = ReadAtDisk {
            session,
            tag,
            range,
            purpose,
        };
        self.reads.insert(token, read);
        None
    }

    pub(super) fn read_done(
        &mut self,
        read: &ReadAtDisk,
        result: DiskResult,
        out: &mut Vec<Effect>,
    ) {
        let tag = read.tag;
        let fits = |content: &Content| content.length() == read.range.1;
        let (content, bad) = match result {
            DiskResult::Read(content) if fits(&content) => (Some(content), Vec::new()),
            DiskResult::Rotten { content, bad } if fits(&content) => (Some(content), bad),
            _ => (None, Vec::new()),
        };
        let answer = match (read.purpose, content) {
            (Purpose::Salvage, Some(content)) => Answer::Salvaged { tag, content, bad },
            (Purpose::Verify, Some(content)) => {
                let digest = digest(&content);
                Answer::Verified { tag, digest, bad }
            }
            // A disk that fails is no better than one whose bytes are all wrong.
            (Purpose::Verify, None) => {
                let blocks = read.range.1 / u64::from(self.geometry.block_bytes);
                let bad = (0..u32::try_from(blocks).unwrap_or(0)).collect();
                Answer::Verified {
                    tag,
                    digest: 0,
                    bad,
                }
            }
            (Purpose::Bytes, Some(content)) if bad.is_empty() => Answer::Read {
                tag,
                result: Ok(content),
            },
            // What is not right is never shown, nor what else was read with it.
            _ => Answer::Read {
                tag,
                result: Err(ReadFault::Medium),
            },
        };
        self.answer(read.session, answer, out);
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

    fn welcome(&mut self, hello: Waiting, out: &mut Vec<Effect>) {
        // What the welcome says must outlive this process.
        self.speak(out);
        if self.hello.is_some() {
            // A later coordinator came while the promise was written.
            return;
        }
        self.bound = Some(super::Bound {
            session: hello.session,
            out_index: 0,
            in_index: 1,
            takes_part: false,
            queue: std::collections::VecDeque::new(),
            queue_bytes: 0,
            stale: Vec::new(),
            restamp: Vec::new(),
        });
        let welcome = Welcome {
            key: self.applied,
            exact: self.exact,
            size: self.meta.size,
            size_version: self.meta.size_version,
            view: self.meta.view.clone(),
            snapshots: self.meta.snapshots.values().copied().collect(),
            has_stale: !self.meta.stale.is_empty(),
        };
        self.answer(hello.session, Answer::Welcome(welcome), out);
        if self.is_low {
            let is_low = true;
            self.answer(hello.session, Answer::Space { is_low }, out);
        }
    }

    fn join_size(&mut self, session: SessionId, terms: JoinTerms, out: &mut Vec<Effect>) {
        if terms.size <= self.meta.size {
            return self.join_record(session, terms, out);
        }
        let change = MetaChange {
            size: Some((terms.size, terms.size_version)),
            ..MetaChange::default()
        };
        let work = Work::JoinSize { session, terms };
        self.begin(DiskOp::Persist(Box::new(change)), work, out);
    }

    fn join_record(&mut self, session: SessionId, terms: JoinTerms, out: &mut Vec<Effect>) {
        let Some(bound) = self.bound.as_mut().filter(|bound| bound.session == session) else {
            return;
        };
        let mut change = MetaChange {
            forget: terms.forget != Forget::Nothing,
            durable: Some(terms.key),
            view: Some(terms.view),
            snapshots: terms.snapshots,
            ..MetaChange::default()
        };
        for region in std::mem::take(&mut bound.restamp) {
            change.stale.push((region, None));
            change.stamps.push((region, terms.key.epoch));
        }
        // In a history that begins, it has not answered for anything yet, whatever it once forgot.
        let is_beginning = !self.meta.is_lost()
            && change
                .view
                .as_ref()
                .is_some_and(|view| view.lineage != self.meta.view.lineage);
        for region in std::mem::take(&mut bound.stale) {
            // Who has lost its memory may have answered for what it forgot, and stays without a word there until it is
            // repaired. Who comes from another history never took part in this one, like a new replica.
            let nothing = Stale {
                key: if self.meta.is_lost() && terms.forget != Forget::EverythingBefore {
                    Key::NOTHING
                } else {
                    Key::FRESH
                },
                mixed: true,
            };
            let as_far_as_we_are = Stale {
                key: self.applied,
                mixed: false,
            };
            // A region that was stale already is as far as it was then, not as far as we are now. A key of
            // another history says nothing in this one.
            let stale = match self.meta.region(region).stale {
                _ if terms.forget != Forget::Nothing => nothing,
                Some(stale) if is_beginning => Stale {
                    key: stale.key.max(Key::FRESH),
                    ..stale
                },
                Some(stale) => stale,
                None => as_far_as_we_are,
            };
            change.stale.push((region, Some(stale)));
        }
        let work = Work::JoinRecord {
            session,
            key: terms.key,
        };
        self.begin(DiskOp::Persist(Box::new(change)), work, out);
    }
}

/// The same bytes have the same digest.
fn digest(content: &Content) -> u32 {
    match content {
        Content::Data(data) => crc32c::crc32c(data),
        Content::Zeros(_) => 0,
    }
}
