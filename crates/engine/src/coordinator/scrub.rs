//! Scrubbing: every copy reads everything that it holds, compares it with its sums, and reports what it has found.
//! Digests compare the copies with each other, so no bytes travel.
//!
//! ```text
//!   region by region: Verify to every holder, all after the same entries
//!     ├─ blocks do not match their sums ──▶ the region is damaged there, and is mended from another holder
//!     ├─ digests differ, sums match     ──▶ the few are mended from the many; without a majority it is told
//!     └─ all the same                   ──▶ the next region
//!   at the end: the regions in which something was found, once more. What is still wrong cannot be mended.
//! ```
//!
//! A scrub has a budget of bytes a second, and less while clients have requests. If a region is stale in one replica,
//! the others are compared: the repair will bring bytes whose sums have just been checked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Coordinator, Effect, Phase};
use crate::proto::{Region, ReplicaId, Request};

/// While clients ask for something, so little of the budget is used.
const BUSY_SHARE: u64 = 4;

/// How often what was found is looked at again before it is given up.
const LOOKS_MAX: u32 = 3;

/// What scrubs have found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubStatus {
    /// The scrub that runs.
    pub running: Option<ScrubProgress>,
    /// The last one that has ended, since this coordinator began.
    pub last: Option<ScrubResult>,
    /// Blocks that did not match their sums, found by scrubs and by reads, since this coordinator began.
    pub rotten_blocks: BTreeMap<ReplicaId, u64>,
}

/// How far a scrub is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubProgress {
    /// Bytes of the volume that were looked at.
    pub done: u64,
    /// Bytes of the volume.
    pub of: u64,
    /// Blocks that did not match so far.
    pub found: u64,
}

/// What a scrub has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubResult {
    /// Counts the scrubs of this coordinator.
    pub number: u64,
    /// Bytes of the volume that were looked at, in all copies that were there.
    pub bytes: u64,
    /// Blocks that did not match their sums.
    pub found: u64,
    /// How many of these were mended.
    pub mended: u64,
    /// Regions in which copies differed although all sums matched.
    pub differed: u64,
    /// Regions that could not be compared: no copy was there that could.
    pub skipped: u64,
}

/// A scrub that runs.
#[derive(Debug, Default)]
pub(super) struct Scrub {
    run: Option<Run>,
    last: Option<ScrubResult>,
    rotten: BTreeMap<ReplicaId, u64>,
    count: u64,
    budget: u64,
}

#[derive(Debug)]
struct Run {
    /// The next region of the first pass.
    next: u32,
    /// Regions in which something was found, to be checked again, and how often they were.
    again: VecDeque<(Region, u32)>,
    look: Option<Look>,
    /// What the last look at a region found.
    left: BTreeMap<Region, u64>,
    result: ScrubResult,
}

/// A region that is being compared.
#[derive(Debug)]
struct Look {
    region: Region,
    times: u32,
    /// When they were asked.
    at: u64,
    asked: BTreeMap<u64, ReplicaId>,
    digests: BTreeMap<ReplicaId, u32>,
    bad: u64,
}

impl Coordinator {
    /// Begins a scrub, unless one runs.
    pub(super) fn scrub(&mut self) {
        if self.scrub.run.is_none() && self.phase == Phase::Serving {
            self.scrub.count += 1;
            self.hopeless.clear();
            self.scrub.run = Some(Run {
                next: 0,
                again: VecDeque::new(),
                look: None,
                left: BTreeMap::new(),
                result: ScrubResult {
                    number: self.scrub.count,
                    ..ScrubResult::default()
                },
            });
        }
    }

    pub(super) fn scrub_status(&self) -> ScrubStatus {
        let region = u64::from(self.settings.geometry.region_bytes);
        let running = self.scrub.run.as_ref().map(|run| ScrubProgress {
            done: (u64::from(run.next) * region).min(self.size),
            of: self.size,
            found: run.result.found,
        });
        ScrubStatus {
            running,
            last: self.scrub.last,
            rotten_blocks: self.scrub.rotten.clone(),
        }
    }

    pub(super) fn scrub_refill(&mut self, elapsed_ms: u64) {
        let all = self.settings.limits.scrub_bytes_per_second;
        let share = if self.ios.is_empty() { 1 } else { BUSY_SHARE };
        let refill = all.saturating_mul(elapsed_ms) / 1_000 / share;
        let region = u64::from(self.settings.geometry.region_bytes);
        self.scrub.budget = (self.scrub.budget + refill).min((all / 4).max(region));
    }

    /// Goes on with the scrub, if one runs and may.
    pub(super) fn scrub_step(&mut self, out: &mut Vec<Effect>) {
        let region_bytes = u64::from(self.settings.geometry.region_bytes);
        loop {
            let Some(run) = &self.scrub.run else { return };
            if run.look.is_some() {
                return;
            }
            let regions = self.settings.geometry.regions(self.size);
            let first_pass = Region(run.next).index() < regions;
            let next = if first_pass {
                Some((Region(run.next), 0))
            } else {
                run.again.front().copied()
            };
            let Some((region, times)) = next else {
                return self.scrub_finish();
            };
            // What was found is mended first.
            let damaged = |peer: &super::Peer| peer.is_active() && peer.damaged.contains(&region);
            let is_damaged = self.peers.values().any(damaged);
            if self.scrub.budget < region_bytes || !first_pass && is_damaged {
                return;
            }
            if !self.scrub_ready(region) {
                // Everything is sent in a moment.
                return;
            }
            self.scrub.budget -= region_bytes;
            if let Some(run) = &mut self.scrub.run {
                if first_pass {
                    run.next += 1;
                } else {
                    run.again.pop_front();
                }
            }
            self.scrub_look(region, times, out);
        }
    }

    /// Whether all holders of a region have been sent everything, so that they answer after the same entries.
    fn scrub_ready(&self, region: Region) -> bool {
        let mut holders = self.peers.values().filter(|peer| peer.holds(region));
        holders.all(|peer| {
            let session = peer.session.as_ref();
            session.is_none_or(|session| session.cursor == self.seq)
        })
    }

    fn scrub_look(&mut self, region: Region, times: u32, out: &mut Vec<Effect>) {
        let verifies = |peer: &super::Peer| {
            let session = peer.session.as_ref();
            peer.holds(region) && session.is_some_and(|session| session.verifies)
        };
        let holders = self.peers.iter().filter(|(_, peer)| verifies(peer));
        let holders: Vec<ReplicaId> = holders.map(|(id, _)| *id).collect();
        let (offset, length) = self.settings.geometry.extent(region, self.size);
        let mut asked = BTreeMap::new();
        for replica in &holders {
            let tag = self.next_tag();
            asked.insert(tag, *replica);
            let request = Request::Verify {
                tag,
                offset,
                length,
            };
            self.send(*replica, request, out);
        }
        let Some(run) = &mut self.scrub.run else {
            return;
        };
        if holders.is_empty() {
            run.result.skipped += u64::from(times == 0);
            return;
        }
        if times == 0 {
            run.result.bytes += length;
        }
        run.look = Some(Look {
            region,
            times,
            at: self.now,
            asked,
            digests: BTreeMap::new(),
            bad: 0,
        });
    }

    pub(super) fn verified(&mut self, replica: ReplicaId, tag: u64, digest: u32, bad: &[u32]) {
        let Some(look) = self.scrub.run.as_mut().and_then(|run| run.look.as_mut()) else {
            return;
        };
        if look.asked.remove(&tag) != Some(replica) {
            return;
        }
        let region = look.region;
        let count = u64::try_from(bad.len()).unwrap_or(u64::MAX);
        look.bad += count;
        let is_first = look.times == 0;
        if bad.is_empty() {
            look.digests.insert(replica, digest);
        } else {
            if is_first {
                *self.scrub.rotten.entry(replica).or_default() += count;
            }
            self.damaged(replica, region);
        }
        self.scrub_looked();
    }

    /// Whether a replica was asked so long ago that it must be taken to hang.
    pub(super) fn owes_scrub(&self, replica: ReplicaId, limit_ms: u64) -> bool {
        let look = self.scrub.run.as_ref().and_then(|run| run.look.as_ref());
        look.is_some_and(|look| {
            let is_late = self.now.saturating_sub(look.at) > limit_ms;
            is_late && look.asked.values().any(|of| *of == replica)
        })
    }

    /// A replica that is gone answers nothing more.
    pub(super) fn scrub_without(&mut self, replica: ReplicaId) {
        if let Some(look) = self.scrub.run.as_mut().and_then(|run| run.look.as_mut()) {
            look.asked.retain(|_, of| *of != replica);
            self.scrub_looked();
        }
    }

    /// Compares what all copies have answered, once they have.
    fn scrub_looked(&mut self) {
        let Some(run) = &mut self.scrub.run else {
            return;
        };
        let Some(look) = run.look.take_if(|look| look.asked.is_empty()) else {
            return;
        };
        let region = look.region;
        let odd = odd_ones(&look.digests);
        let differs = look.digests.values().collect::<BTreeSet<_>>().len() > 1;
        if look.times == 0 {
            run.result.found += look.bad;
            run.result.differed += u64::from(differs);
        }
        if look.bad == 0 && !differs {
            run.left.remove(&region);
        } else {
            run.left.insert(region, look.bad);
            if look.times < LOOKS_MAX {
                run.again.push_back((region, look.times + 1));
            }
        }
        if differs {
            tracing::warn!(
                volume = %self.settings.volume,
                region = region.0,
                "copies differ although their sums match; {} of {} are mended from the others",
                odd.len(),
                look.digests.len()
            );
        }
        for replica in odd {
            self.damaged(replica, region);
        }
    }

    fn scrub_finish(&mut self) {
        if let Some(run) = self.scrub.run.take() {
            let left: u64 = run.left.values().sum();
            self.scrub.last = Some(ScrubResult {
                mended: run.result.found.saturating_sub(left),
                ..run.result
            });
        }
    }

    /// A read has found blocks that do not match.
    pub(super) fn rot_was_read(&mut self, replica: ReplicaId, blocks: usize) {
        let blocks = u64::try_from(blocks).unwrap_or(u64::MAX);
        *self.scrub.rotten.entry(replica).or_default() += blocks;
    }
}

/// The copies that are not like most of them; none if there is no majority.
fn odd_ones(digests: &BTreeMap<ReplicaId, u32>) -> Vec<ReplicaId> {
    let count = |digest: u32| digests.values().filter(|it| **it == digest).count();
    let most = digests
        .values()
        .copied()
        .max_by_key(|digest| count(*digest));
    let Some(most) = most.filter(|most| count(*most) * 2 > digests.len()) else {
        return Vec::new();
    };
    let odd = digests.iter().filter(|(_, digest)| **digest != most);
    odd.map(|(replica, _)| *replica).collect()
}
