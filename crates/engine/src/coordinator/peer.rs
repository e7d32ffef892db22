//! What the coordinator knows of one replica.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::region_set::RegionSet;
use super::repair::Repair;
use super::space::Granted;
use super::{SessionId, Standing};
use crate::proto::{Epoch, Key, Region, RegionState, Stale, Welcome};

/// What a replica has told of itself.
#[derive(Clone, Debug)]
pub(super) struct Report {
    pub(super) welcome: Welcome,
    stamps: Vec<Epoch>,
    /// Few replicas have many of these, so a report takes little more than its stamps.
    stale: BTreeMap<Region, Stale>,
}

impl Report {
    pub(super) fn new(welcome: Welcome) -> Report {
        Report {
            welcome,
            stamps: Vec::new(),
            stale: BTreeMap::new(),
        }
    }

    /// Whether it has lost its memory and has not been repaired since. It may have acknowledged writes that it no
    /// longer knows of, so its report proves nothing about them.
    pub(super) fn has_forgotten(&self) -> bool {
        self.stale.values().any(|stale| stale.key == Key::NOTHING)
    }

    /// How many regions have been told of.
    pub(super) fn regions(&self) -> usize {
        self.stamps.len()
    }

    /// Adds the next page.
    pub(super) fn extend(&mut self, page: Vec<RegionState>) {
        for state in page {
            let region = Region(u32::try_from(self.stamps.len()).unwrap_or(u32::MAX));
            self.stamps.push(state.stamp);
            if let Some(stale) = state.stale {
                self.stale.insert(region, stale);
            }
        }
    }

    /// What is known of a region. A region beyond the replica's size was never written there.
    pub(super) fn state(&self, region: Region) -> RegionState {
        RegionState {
            stamp: self
                .stamps
                .get(region.index())
                .copied()
                .unwrap_or(Epoch::NEVER),
            stale: self.stale.get(&region).copied(),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// It was greeted.
    Greeting,
    /// It sends what it knows of its regions.
    Reporting(Report),
    /// It has told everything.
    Reported(Report),
    /// It holds another history, and nobody wants it to take part: it keeps what it has.
    Outside,
    /// It was told on which terms it takes part.
    Joining,
    /// It takes part.
    Active,
}

/// An entry that was sent and not answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) seq: u64,
    pub(super) bytes: u64,
    pub(super) at: u64,
    /// The bytes of the volume that it changes; none if it changes none.
    pub(super) range: (u64, u64),
}

/// A connection to a replica.
#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) id: SessionId,
    pub(super) out_index: u64,
    pub(super) in_index: u64,
    pub(super) stage: Stage,
    /// When the stage began, or was last seen to move.
    pub(super) since: u64,
    /// The last entry that was sent.
    pub(super) cursor: u64,
    /// The last entry that it has applied.
    pub(super) acked: u64,
    /// The last entry that it has made durable.
    pub(super) flushed: u64,
    /// The flushes that it owes, and since when.
    pub(super) flushing: VecDeque<(u64, u64)>,
    pub(super) sent: VecDeque<Sent>,
    pub(super) sent_bytes: u64,
    pub(super) reads: usize,
    /// What it has applied can be read without asking it.
    pub(super) is_near: bool,
    /// It compares blocks with their sums on demand.
    pub(super) verifies: bool,
    /// It answers calls.
    pub(super) takes_calls: bool,
    /// When it was called, if it has not answered since.
    pub(super) called_at: Option<u64>,
    /// When it last said something on this connection, or the connection began.
    pub(super) heard_at: u64,
    /// Its pool has little space left.
    pub(super) is_low: bool,
    /// Blocks for which it has space all the same.
    pub(super) granted: Granted,
    /// It owes a read for so long that another replica was asked.
    pub(super) is_late: bool,
    /// The size that its join asks for.
    pub(super) join_size: u64,
}

impl Session {
    pub(super) fn new(id: SessionId, now: u64) -> Session {
        Session {
            id,
            out_index: 0,
            in_index: 0,
            stage: Stage::Greeting,
            since: now,
            cursor: 0,
            acked: 0,
            flushed: 0,
            flushing: VecDeque::new(),
            sent: VecDeque::new(),
            sent_bytes: 0,
            reads: 0,
            is_near: false,
            verifies: false,
            takes_calls: false,
            called_at: None,
            heard_at: now,
            is_low: false,
            granted: Granted::default(),
            is_late: false,
            join_size: 0,
        }
    }

    pub(super) fn start(&mut self, stage: Stage, now: u64) {
        self.stage = stage;
        self.since = now;
    }
}

/// A replica.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    pub(super) session: Option<Session>,
    /// What its word was worth when it last arrived.
    pub(super) standing: Option<Standing>,
    /// Whether it has taken part under this coordinator, so that `stale` is known.
    pub(super) joined: bool,
    /// Regions that it marked as stale itself.
    pub(super) stale: RegionSet,
    /// How many there were when it joined: the whole of its repair.
    pub(super) stale_at_join: usize,
    /// Regions that its disk could not read. It holds them as far as it knows.
    pub(super) damaged: BTreeSet<Region>,
    /// Regions with blocks that are not right, of which it is the only holder.
    pub(super) flawed: BTreeSet<Region>,
    pub(super) repairs: BTreeMap<Region, Repair>,
    /// Where the search for the next region to repair goes on.
    pub(super) repair_cursor: Region0,
    pub(super) repair_retry_at: u64,
    /// Regions whose repair found no readable source, or no space, and when each may be tried again.
    pub(super) unreadable: BTreeMap<Region, u64>,
    pub(super) size: u64,
    /// When it last had no space for something.
    pub(super) full_at: Option<u64>,
    /// The last entry that it is known to have applied, whether it is present or not.
    pub(super) applied: u64,
    /// When something was last heard of it, if ever.
    pub(super) heard_at: Option<u64>,
    /// It owes an answer and has said nothing for a while. Stays until something is heard of it, or it is gone.
    pub(super) is_silent: bool,
}

/// A region that is the first one by default.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region0(pub(super) Region);

impl Default for Region0 {
    fn default() -> Region0 {
        Region0(Region(0))
    }
}

impl Peer {
    pub(super) fn is_active(&self) -> bool {
        self.session
            .as_ref()
            .is_some_and(|session| matches!(session.stage, Stage::Active))
    }

    pub(super) fn holds(&self, region: Region) -> bool {
        self.is_active() && !self.stale.contains(region) && !self.damaged.contains(&region)
    }

    /// Whether it is there, answers, and every region of it counts.
    pub(super) fn is_whole(&self) -> bool {
        self.is_active() && !self.is_silent && self.stale.is_empty() && self.damaged.is_empty()
    }

    /// Whether its pool has little space left, as far as it has told.
    pub(super) fn is_low(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_low)
    }

    /// The blocks for which it has space in spite of that, as far as it was asked.
    pub(super) fn granted(&self) -> &Granted {
        static NONE: Granted = Granted::new();
        self.session
            .as_ref()
            .map_or(&NONE, |session| &session.granted)
    }

    pub(super) fn acked(&self) -> u64 {
        self.session.as_ref().map_or(0, |session| session.acked)
    }

    pub(super) fn flushed(&self) -> u64 {
        self.session.as_ref().map_or(0, |session| session.flushed)
    }
}
