//! Writes when pools are full.
//!
//! While enough holders of a region have space, nothing is asked. If a holder reports low space, the coordinator asks
//! it, before a write gets its number, whether it has space for exactly that range ([`Request::Allocate`]). It says
//! yes if its data file already has the range, or if there is a little space left; then the write cannot fail there
//! for lack of space. With CF holders that have space or have said yes, the write gets its number, so overwriting goes
//! on while every pool is full. Otherwise the write is refused before anything of it is done, and nothing else waits
//! behind it.
//!
//! A replica beyond CF gets the write as well. If it finds no space, it reports that its region is stale
//! ([`Answer::Behind`](crate::proto::Answer::Behind)), stays a holder of everything else, and is repaired when there
//! is space.
//!
//! The coordinator remembers a yes for as long as the session lasts and zeros do not give the range back. So it asks
//! once for bytes that are written again and again.

use std::collections::{BTreeMap, BTreeSet};

use super::io::{IoId, IoOp};
use super::{Coordinator, Effect, IoError, Peer};
use crate::proto::{Geometry, Region, ReplicaId, Request, overlap};

/// The number of regions of a replica for which granted space is remembered.
const REGIONS_REMEMBERED_MAX: usize = 16_384;

/// The blocks of a replica that are known to have space: a bit each, region by region.
#[derive(Clone, Debug, Default)]
pub(super) struct Granted {
    regions: BTreeMap<Region, Vec<u64>>,
}

/// The words and bits of the blocks of a range inside one region.
fn bits(geometry: Geometry, (offset, length): (u64, u64)) -> impl Iterator<Item = (usize, u64)> {
    let block = u64::from(geometry.block_bytes);
    let start = offset % u64::from(geometry.region_bytes) / block;
    let end = start + length.div_ceil(block);
    (start..end).map(|block| (usize::try_from(block / 64).unwrap_or(0), 1 << (block % 64)))
}

impl Granted {
    pub(super) const fn new() -> Granted {
        Granted {
            regions: BTreeMap::new(),
        }
    }

    fn contains(&self, geometry: Geometry, range: (u64, u64)) -> bool {
        let words = self.regions.get(&geometry.region_of(range.0));
        words.is_some_and(|words| {
            bits(geometry, range)
                .all(|(word, bit)| words.get(word).is_some_and(|slot| slot & bit != 0))
        })
    }

    fn insert(&mut self, geometry: Geometry, range: (u64, u64)) {
        if self.regions.len() >= REGIONS_REMEMBERED_MAX {
            // Whoever is forgotten is asked again.
            self.regions.pop_first();
        }
        let words = self.regions.entry(geometry.region_of(range.0)).or_default();
        for (word, bit) in bits(geometry, range) {
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            words[word] |= bit;
        }
    }

    fn remove(&mut self, geometry: Geometry, range: (u64, u64)) {
        let Some(words) = self.regions.get_mut(&geometry.region_of(range.0)) else {
            return;
        };
        for (word, bit) in bits(geometry, range) {
            if let Some(slot) = words.get_mut(word) {
                *slot &= !bit;
            }
        }
    }
}

/// A write that waits until it is known whether there is space for it.
#[derive(Debug)]
struct Applicant {
    op: IoOp,
    /// Who has said that there is none, for which part.
    denied: BTreeSet<(ReplicaId, u64)>,
}

/// A question that was not answered.
#[derive(Debug)]
struct Question {
    io: IoId,
    replica: ReplicaId,
    range: (u64, u64),
    /// The range was given back meanwhile, so that a yes says nothing.
    is_void: bool,
}

/// Writes that wait for an answer about space, and what was asked for them.
#[derive(Debug, Default)]
pub(super) struct Space {
    applicants: BTreeMap<IoId, Applicant>,
    questions: BTreeMap<u64, Question>,
}

impl Space {
    /// How many writes wait to be let in.
    pub(super) fn applicants(&self) -> usize {
        self.applicants.len()
    }

    /// The ranges that these write.
    pub(super) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.applicants.values().filter_map(|it| it.op.range())
    }

    pub(super) fn cancel(&mut self, id: IoId) {
        self.applicants.remove(&id);
    }
}

/// What is known of the space for a write.
enum Verdict {
    Fits,
    DoesNotFit,
    Asks(Vec<(ReplicaId, (u64, u64))>),
}

impl Coordinator {
    /// Whether the request must ask for space before it may begin.
    pub(super) fn asks_for_space(&self, op: &IoOp) -> bool {
        matches!(op, IoOp::Write { .. }) && self.peers.values().any(Peer::is_low)
    }

    /// Keeps a write until it is known whether there is space for it.
    pub(super) fn apply_for_space(&mut self, id: IoId, op: IoOp) {
        let denied = BTreeSet::new();
        self.space.applicants.insert(id, Applicant { op, denied });
    }

    /// Lets the writes in that have space, and refuses those that cannot have it.
    pub(super) fn space_step(&mut self, out: &mut Vec<Effect>) {
        let ids: Vec<IoId> = self.space.applicants.keys().copied().collect();
        for id in ids {
            let Some(applicant) = self.space.applicants.get(&id) else {
                continue;
            };
            match self.verdict(id, applicant) {
                Verdict::Fits => {
                    if let Some(applicant) = self.space.applicants.remove(&id) {
                        self.begin_io(id, applicant.op);
                    }
                }
                Verdict::DoesNotFit => {
                    self.space.applicants.remove(&id);
                    let result = Err(IoError::NoSpace);
                    out.push(Effect::Reply { id, result });
                }
                Verdict::Asks(asks) => {
                    for (replica, range) in asks {
                        self.ask_for_space(id, replica, range, out);
                    }
                }
            }
        }
    }

    fn verdict(&self, id: IoId, applicant: &Applicant) -> Verdict {
        let geometry = self.settings.geometry;
        let (offset, length) = applicant.op.range().unwrap_or_default();
        let mut asks = Vec::new();
        let mut waits = false;
        for range in self.pieces(offset, length, u64::MAX) {
            let region = geometry.region_of(range.0);
            let has_space = |replica: ReplicaId| {
                self.peers.get(&replica).is_some_and(|peer| {
                    peer.holds(region)
                        && (!peer.is_low() || peer.granted().contains(geometry, range))
                })
            };
            if self.view.write_quorum(has_space) {
                continue;
            }
            waits = true;
            if !self.region_available(region) {
                // It waits for copies first, as any request.
                continue;
            }
            let could = |replica: ReplicaId| {
                let denied = applicant.denied.contains(&(replica, range.0));
                has_space(replica) || (self.holds(replica, region) && !denied)
            };
            if !self.view.write_quorum(could) {
                return Verdict::DoesNotFit;
            }
            let lacks = |replica: &ReplicaId| could(*replica) && !has_space(*replica);
            asks.extend(
                self.peers
                    .keys()
                    .filter(|it| lacks(it))
                    .map(|it| (*it, range)),
            );
        }
        let is_asked = |(replica, range): &(ReplicaId, (u64, u64))| {
            let mut questions = self.space.questions.values();
            questions.any(|it| it.io == id && it.replica == *replica && it.range == *range)
        };
        asks.retain(|ask| !is_asked(ask) && self.has_been_sent_all(ask.0));
        if waits {
            Verdict::Asks(asks)
        } else {
            Verdict::Fits
        }
    }

    /// Whether a question asked now is answered after everything that was numbered: zeros in flight would give back
    /// what was granted.
    fn has_been_sent_all(&self, replica: ReplicaId) -> bool {
        let session = self.peers.get(&replica).and_then(|it| it.session.as_ref());
        session.is_some_and(|session| session.cursor == self.seq)
    }

    fn ask_for_space(
        &mut self,
        io: IoId,
        replica: ReplicaId,
        range: (u64, u64),
        out: &mut Vec<Effect>,
    ) {
        let tag = self.next_tag();
        let question = Question {
            io,
            replica,
            range,
            is_void: false,
        };
        self.space.questions.insert(tag, question);
        let (offset, length) = range;
        let request = Request::Allocate {
            tag,
            offset,
            length,
        };
        self.send(replica, request, out);
    }

    pub(super) fn allocated(&mut self, replica: ReplicaId, tag: u64, granted: bool) {
        let geometry = self.settings.geometry;
        let Some(question) = self.space.questions.remove(&tag) else {
            return;
        };
        if question.replica != replica || question.is_void {
            return;
        }
        if granted {
            if let Some(session) = self.session_mut(replica) {
                session.granted.insert(geometry, question.range);
            }
        } else if let Some(applicant) = self.space.applicants.get_mut(&question.io) {
            applicant.denied.insert((replica, question.range.0));
        }
    }

    /// A replica had no space for a region: it is stale there, and its repair waits for space.
    pub(super) fn behind(&mut self, replica: ReplicaId, region: Region) {
        let (now, retry_ms) = (self.now, self.settings.limits.repair_retry_ms);
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        peer.full_at = Some(now);
        peer.repairs.remove(&region);
        peer.damaged.remove(&region);
        peer.stale.insert(region);
        peer.stale_at_join = peer.stale_at_join.max(peer.stale.len());
        peer.unreadable.retain(|_, at| *at > now);
        peer.unreadable.insert(region, now + retry_ms);
    }

    /// Zeros give the space of a range back, so earlier grants for it no longer hold.
    pub(super) fn forget_space(&mut self, range: (u64, u64)) {
        let geometry = self.settings.geometry;
        for session in self.peers.values_mut().filter_map(|it| it.session.as_mut()) {
            session.granted.remove(geometry, range);
        }
        for question in self.space.questions.values_mut() {
            question.is_void |= overlap(question.range, range);
        }
    }

    /// What a lost replica was asked is not answered any more.
    pub(super) fn questions_to_gone(&mut self, replica: ReplicaId) {
        self.space.questions.retain(|_, it| it.replica != replica);
    }
}
