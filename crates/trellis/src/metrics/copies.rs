//! The families about replicated volumes: their redundancy, each copy, repairs and scrubs.
//!
//! Each target of this node is asked at every scrape. If one does not answer in time, the series of its copies are left
//! out, and the volume counts as neither available nor redundant. Of a target that rests, or runs on another node, its
//! last report counts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::jiff::Timestamp;
use trellis_api::Bytes;
use trellis_api::kinds::{Replica, ReplicaSeen, ReplicaState, ScrubSeen};
use trellis_control::stored::StoredClaim;

use super::claims::labels_of;
use super::text::{Family, Labels, Value};
use crate::serve::TargetStatus;

/// The labels of a volume, and of one of its copies.
const VOLUME: &[&str] = &["namespace", "persistentvolumeclaim", "volume"];
const COPY: &[&str] = &["namespace", "persistentvolumeclaim", "volume", "pool"];
const COPY_STATE: &[&str] = &[
    "namespace",
    "persistentvolumeclaim",
    "volume",
    "pool",
    "state",
];

/// A replicated volume, and what its target has just said; none if it has not answered in time.
pub struct Served {
    /// The volume.
    pub look: StoredClaim,
    /// Its target.
    pub target: Option<TargetStatus>,
    /// Whether it was asked. Otherwise it is what was reported.
    pub is_asked: bool,
}

/// What the target of a volume has reported last.
pub fn reported(look: &StoredClaim) -> Option<TargetStatus> {
    let status = look.stored.target.as_ref()?.status.clone()?;
    let says = |kind: &str| {
        let found = status.conditions.iter().find(|each| each.type_ == kind);
        found.is_some_and(|condition| condition.status == "True")
    };
    Some(TargetStatus {
        served: status.capacity,
        copies: status.capacity.unwrap_or_default(),
        available: says("Available"),
        redundancy_met: says("RedundancyMet"),
        size_converged: says("SizeConverged"),
        members: status.members.clone().unwrap_or_default(),
        lineage: status.lineage.clone(),
        growth_held: None,
        portal: status.portal.clone(),
        file: true,
        sessions: status.sessions,
        repairs_left: BTreeMap::new(),
        scrub: status.scrub,
        replicas: status.replicas,
    })
}

/// What was repaired, counted from scrape to scrape: each scrape tells what is left.
#[derive(Default)]
pub struct Repaired(Mutex<BTreeMap<String, Progress>>);

#[derive(Clone, Copy, Default)]
struct Progress {
    left: u64,
    done: u64,
}

impl Repaired {
    /// Takes in what is left of each copy, and returns how much of each has been repaired since the service started. A
    /// copy that is not among them stays as it was.
    fn count(&self, left: &BTreeMap<String, Bytes>) -> BTreeMap<String, u64> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (copy, left) in left {
            let progress = known.entry(copy.clone()).or_default();
            progress.done += progress.left.saturating_sub(left.get());
            progress.left = left.get();
        }
        known
            .iter()
            .map(|(copy, each)| (copy.clone(), each.done))
            .collect()
    }

    /// Forgets copies that are gone.
    fn keep(&self, copies: &BTreeSet<String>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|copy, _| copies.contains(copy));
    }
}

/// All families.
pub fn families(volumes: &[Served], repaired: &Repaired) -> Vec<Family> {
    let mut all = Copies::new();
    let of = |each: &Served| {
        each.look
            .stored
            .replicas
            .iter()
            .map(|each| each.identity())
            .collect::<Vec<_>>()
    };
    repaired.keep(&volumes.iter().flat_map(of).collect());
    for volume in volumes {
        let Some(mut labels) = labels_of(&volume.look) else {
            continue;
        };
        labels.push(volume.look.stored.key.clone());
        all.put_volume(&labels, volume);
        if let Some(target) = &volume.target {
            all.put_copies(&labels, volume, target, repaired);
            if let Some(scrub) = &target.scrub {
                all.put_scrub(&labels, scrub);
            }
        }
    }
    all.families()
}

struct Copies {
    up: Family,
    available: Family,
    redundant: Family,
    counts: Family,
    states: Family,
    behind: Family,
    left: Family,
    repaired: Family,
    full: Family,
    rotten: Family,
    scrubbed: Family,
    running: Family,
    found: Family,
}

fn whole(value: bool) -> Value {
    Value::Whole(u64::from(value))
}

impl Copies {
    fn new() -> Copies {
        Copies {
            up: Family::gauge(
                "trellis_target_up",
                "1 if the process that serves the volume on this node has answered for this answer, else 0; absent if none runs here.",
                VOLUME,
            ),
            available: Family::gauge(
                "trellis_volume_available",
                "1 if as many copies answer as must have a write, so that I/O is served, else 0.",
                VOLUME,
            ),
            redundant: Family::gauge(
                "trellis_volume_redundancy_met",
                "1 if as many copies as are asked for hold everything, else 0.",
                VOLUME,
            ),
            counts: Family::gauge(
                "trellis_volume_copies",
                "Copies: wanted, needed for a write, and in sync.",
                &["namespace", "persistentvolumeclaim", "volume", "which"],
            ),
            states: Family::gauge(
                "trellis_copy_state",
                "1 for the state of each copy; Missing if its target does not know it.",
                COPY_STATE,
            ),
            behind: Family::gauge(
                "trellis_copy_behind_bytes",
                "Bytes that were written and that the copy has not taken yet, roughly.",
                COPY,
            ),
            left: Family::gauge(
                "trellis_copy_repair_left_bytes",
                "Bytes of the copy that are still to be repaired.",
                COPY,
            ),
            repaired: Family::counter(
                "trellis_copy_repaired_bytes_total",
                "Bytes of the copy that were repaired, counted from scrape to scrape.",
                COPY,
            ),
            full: Family::gauge(
                "trellis_copy_full",
                "1 if the pool of the copy has no space for what was not written before, else 0.",
                COPY,
            ),
            rotten: Family::gauge(
                "trellis_copy_rotten_blocks",
                "Blocks of the copy that did not match their sums, since its target began.",
                COPY,
            ),
            scrubbed: Family::gauge(
                "trellis_scrub_finished_timestamp_seconds",
                "When the last comparison of all copies with their sums ended.",
                VOLUME,
            ),
            running: Family::gauge(
                "trellis_scrub_running_ratio",
                "How much of the volume the comparison that runs has looked at; absent if none runs.",
                VOLUME,
            ),
            found: Family::gauge(
                "trellis_scrub_result",
                "What the last comparison has found: blocks that did not match and that were mended, regions in which copies differed and that could not be compared.",
                &["namespace", "persistentvolumeclaim", "volume", "what"],
            ),
        }
    }

    fn put_volume(&mut self, labels: &Labels, volume: &Served) {
        let target = volume.target.as_ref();
        if volume.is_asked {
            self.up.put(labels.clone(), whole(target.is_some()));
        }
        let available = target.is_some_and(|target| target.available);
        self.available.put(labels.clone(), whole(available));
        let redundant = target.is_some_and(|target| target.redundancy_met);
        self.redundant.put(labels.clone(), whole(redundant));
        let in_sync = target.map(|target| {
            let is_in_sync = |each: &&ReplicaSeen| each.state == ReplicaState::InSync;
            target.replicas.iter().filter(is_in_sync).count()
        });
        let spec = volume
            .look
            .stored
            .volume
            .as_ref()
            .map(|volume| &volume.spec);
        let mut put = |which: &str, count: Option<u64>| {
            if let Some(count) = count {
                let labels = labels.iter().cloned().chain([which.to_owned()]);
                self.counts.put(labels.collect(), Value::Whole(count));
            }
        };
        put("wanted", spec.map(|spec| u64::from(spec.replicas)));
        put(
            "needed",
            spec.map(|spec| u64::from(spec.consistency_factor)),
        );
        put(
            "in sync",
            in_sync.and_then(|count| u64::try_from(count).ok()),
        );
    }

    fn put_copies(
        &mut self,
        labels: &Labels,
        volume: &Served,
        target: &TargetStatus,
        repaired: &Repaired,
    ) {
        let done = repaired.count(&target.repairs_left);
        for replica in &volume.look.stored.replicas {
            let and = |more: &[&str]| {
                let more = more.iter().map(|each| (*each).to_owned());
                labels.iter().cloned().chain(more).collect::<Labels>()
            };
            let (id, pool) = (replica.identity(), replica.spec.pool.as_str());
            let seen = target.replicas.iter().find(|each| each.id == id);
            let state = state_of(replica, seen);
            self.states.put(and(&[pool, state]), Value::Whole(1));
            let Some(seen) = seen else { continue };
            let left = target
                .repairs_left
                .get(&id)
                .copied()
                .unwrap_or(seen.repair_left);
            self.behind
                .put(and(&[pool]), Value::Whole(seen.behind.get()));
            self.left.put(and(&[pool]), Value::Whole(left.get()));
            let done = done.get(&id).copied().unwrap_or_default();
            self.repaired.put(and(&[pool]), Value::Whole(done));
            self.full.put(and(&[pool]), whole(seen.full));
            let rotten = target
                .scrub
                .as_ref()
                .and_then(|scrub| scrub.rotten.get(&id));
            let rotten = rotten.copied().unwrap_or_default();
            self.rotten.put(and(&[pool]), Value::Whole(rotten));
        }
    }

    fn put_scrub(&mut self, labels: &Labels, scrub: &ScrubSeen) {
        if let Some(percent) = scrub.running_percent {
            let ratio = f64::from(percent) / 100.0;
            self.running.put(labels.clone(), Value::Real(ratio));
        }
        let finished = scrub.finished.as_deref();
        let Some(at) = finished.and_then(|at| at.parse::<Timestamp>().ok()) else {
            return;
        };
        let seconds = u64::try_from(at.as_second()).unwrap_or_default();
        self.scrubbed.put(labels.clone(), Value::Whole(seconds));
        for (what, count) in [
            ("found", scrub.found),
            ("mended", scrub.mended),
            ("differed", scrub.differed),
            ("skipped", scrub.skipped),
        ] {
            let labels = labels.iter().cloned().chain([what.to_owned()]);
            self.found.put(labels.collect(), Value::Whole(count));
        }
    }

    fn families(self) -> Vec<Family> {
        vec![
            self.up,
            self.available,
            self.redundant,
            self.counts,
            self.states,
            self.behind,
            self.left,
            self.repaired,
            self.full,
            self.rotten,
            self.scrubbed,
            self.running,
            self.found,
        ]
    }
}

/// The state of a copy, in a word.
fn state_of(replica: &Replica, seen: Option<&ReplicaSeen>) -> &'static str {
    match seen {
        _ if replica.metadata.deletion_timestamp.is_some() => "Leaving",
        Some(seen) => seen.state.name(),
        None => "Missing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a repair is counted twice, or one that begins is counted as progress.
    #[test]
    fn what_was_repaired_is_counted_once() {
        let repaired = Repaired::default();
        let count =
            |left: u64| repaired.count(&BTreeMap::from([("a".to_owned(), Bytes::new(left))]))["a"];
        assert_eq!(count(0), 0);
        assert_eq!(count(100), 0);
        assert_eq!(count(60), 40);
        assert_eq!(count(60), 40);
        assert_eq!(count(0), 100);
        assert_eq!(count(50), 100, "another repair begins");
        repaired.keep(&BTreeSet::new());
        assert_eq!(count(10), 0, "a copy that was gone begins anew");
    }
}
