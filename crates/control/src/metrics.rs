//! Counts growths: how long they and their raises took, and how they ended.
//!
//! Everything is taken from the events of the caches, which carry what was stored: nothing is counted that a reader of
//! the objects could not see too. The first look at an object counts nothing, because an earlier process may have
//! counted it. Counters start at zero with each process; Prometheus expects that.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use trellis_api::kinds::{GrowthRecord, GrowthResult, RungStatus, Volume};
use trellis_api::{Bytes, HoldReason, Rung};

use crate::cache::Changed;
use crate::claim::status;

const fn micros<const N: usize>(bounds: [u64; N]) -> [Duration; N] {
    let mut durations = [Duration::ZERO; N];
    let mut index = 0;
    while index < N {
        durations[index] = Duration::from_micros(bounds[index]);
        index += 1;
    }
    durations
}

/// The buckets of one raise: a loop device takes tens of microseconds, a filesystem milliseconds, a disk that
/// is in trouble seconds.
const RAISE_BOUNDS: &[Duration] = &micros([
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 5_000_000, 10_000_000,
]);

/// The buckets of a whole growth: milliseconds when all is well, hours when it waited for room.
const GROWTH_BOUNDS: &[Duration] = &micros([
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
    1_800_000_000,
    3_600_000_000,
]);

/// The result of a growth that is held: it is not over, and may be held several times.
const HELD: &str = "Held";

/// The conditions by which a claim says what holds its growth.
const HOLDING: [&str; 3] = [
    "ControllerResizeError",
    "NodeResizeError",
    "FileSystemResizePending",
];

/// A histogram of times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    bounds: &'static [Duration],
    /// One for each bound, and one for what is longer than all of them.
    buckets: Vec<u64>,
    sum: Duration,
}

impl Histogram {
    /// An empty one with buckets up to each of `bounds`, which rise.
    pub fn new(bounds: &'static [Duration]) -> Self {
        Histogram {
            bounds,
            buckets: vec![0; bounds.len() + 1],
            sum: Duration::ZERO,
        }
    }

    /// Takes in one time.
    pub fn observe(&mut self, took: Duration) {
        let index = self.bounds.partition_point(|bound| *bound < took);
        self.buckets[index] += 1;
        self.sum = self.sum.saturating_add(took);
    }

    /// For each bound, and last for no bound, how many times were not above it.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let bounds = self.bounds.iter().copied().map(Some).chain([None]);
        let counts = self.buckets.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        bounds.zip(counts)
    }

    /// All times together.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// How many times there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// What has been counted since the process began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The time that each raise of a rung took.
    pub raises: BTreeMap<Rung, Histogram>,
    /// The time from request to done of every growth that succeeded.
    pub growths: Histogram,
    /// How many growths had which result, for which reason; the reason is empty if none is known.
    pub results: BTreeMap<(&'static str, &'static str), u64>,
}

impl Default for Counted {
    /// All series exist from the start: a rate would miss the first count of a series that appears with it.
    fn default() -> Self {
        // The rungs that every claim on this node has; another one comes with its first raise.
        let rungs = [Rung::Replica, Rung::Device, Rung::Filesystem];
        let raises = rungs.map(|rung| (rung, Histogram::new(RAISE_BOUNDS)));
        let ended = [
            GrowthResult::Succeeded,
            GrowthResult::Replaced,
            GrowthResult::Cancelled,
        ];
        let ended = ended.into_iter().map(|result| (result_name(result), ""));
        let held = HoldReason::ALL.iter().map(|reason| (HELD, reason.code()));
        Counted {
            raises: raises.into_iter().collect(),
            growths: Histogram::new(GROWTH_BOUNDS),
            results: ended.chain(held).map(|labels| (labels, 0)).collect(),
        }
    }
}

impl Counted {
    fn result(&mut self, result: &'static str, reason: &'static str) {
        *self.results.entry((result, reason)).or_default() += 1;
    }
}

fn result_name(result: GrowthResult) -> &'static str {
    match result {
        GrowthResult::Succeeded => "Succeeded",
        GrowthResult::Replaced => "Replaced",
        GrowthResult::Cancelled => "Cancelled",
    }
}

/// The counters, fed by the events of the caches.
#[derive(Debug, Default)]
pub struct Growths(Mutex<Counted>);

impl Growths {
    /// All counters as they are now.
    pub fn counted(&self) -> Counted {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the raises that `new` reports and `known` does not.
    pub fn note_rungs<'a>(
        &self,
        known: &[&RungStatus],
        new: impl IntoIterator<Item = &'a RungStatus>,
    ) {
        for status in new {
            let Some(raised) = &status.raised else {
                continue;
            };
            let is_known = known
                .iter()
                .any(|each| each.rung == status.rung && each.raised.as_ref() == Some(raised));
            if !is_known {
                let mut counted = self.lock();
                let times = counted.raises.entry(status.rung);
                let times = times.or_insert_with(|| Histogram::new(RAISE_BOUNDS));
                times.observe(Duration::from_micros(raised.took_micros));
            }
        }
    }

    /// Counts the growths of a volume that have ended.
    pub fn note_volume(&self, change: &Changed<Volume>) {
        let (Some(old), Some(new)) = (&change.old, &change.new) else {
            return;
        };
        let (old, new) = (records(old), records(new));
        for record in new.iter().filter(|record| !old.contains(record)) {
            let mut counted = self.lock();
            counted.result(result_name(record.result), "");
            if record.result == GrowthResult::Succeeded {
                let took = record.finished_at.0.duration_since(record.requested_at.0);
                // A clock that was set back in between makes it negative.
                counted
                    .growths
                    .observe(Duration::try_from(took).unwrap_or_default());
            }
        }
    }

    /// Counts a growth that is held now and was not before, or was held for another reason, or was another growth.
    pub fn note_claim(&self, change: &Changed<PersistentVolumeClaim>) {
        let (Some(old), Some(new)) = (&change.old, &change.new) else {
            return;
        };
        if let Some((reason, size)) = held(new)
            && held(old) != Some((reason, size))
        {
            self.lock().result(HELD, reason.code());
        }
    }
}

fn records(volume: &Volume) -> &[GrowthRecord] {
    let status = volume.status.as_ref();
    status.map_or(&[], |status| status.growths.as_slice())
}

/// What holds a claim's growth, and to which size.
fn held(claim: &PersistentVolumeClaim) -> Option<(HoldReason, Option<Bytes>)> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    let holding = conditions
        .iter()
        .find(|each| each.status == "True" && HOLDING.contains(&each.type_.as_str()))?;
    let code = holding.reason.as_deref()?;
    let reason = HoldReason::ALL.iter().find(|each| each.code() == code)?;
    Some((*reason, status::allocated(claim)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn changed<K: serde::de::DeserializeOwned>(old: Value, new: Value) -> Changed<K> {
        let read = |value: Value| {
            (!value.is_null()).then(|| Arc::new(serde_json::from_value(value).expect("an object")))
        };
        Changed {
            old: read(old),
            new: read(new),
        }
    }

    fn rung(took_micros: u64) -> RungStatus {
        let status = json!({
            "rung": "filesystem", "size": "2Gi", "observedAt": "2026-01-01T00:00:00.000000Z",
            "raised": {
                "from": "1Gi", "to": "2Gi", "at": "2026-01-01T00:00:00.000000Z", "tookMicros": took_micros,
            },
        });
        serde_json::from_value(status).expect("a rung")
    }

    // Fails if a time on the bound is counted above it, or the last bucket does not hold all of them.
    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        const BOUNDS: &[Duration] = &micros([10, 20]);
        let mut times = Histogram::new(BOUNDS);
        for took in [10, 11, 20, 21] {
            times.observe(Duration::from_micros(took));
        }
        let counts: Vec<u64> = times.cumulative().map(|(_, count)| count).collect();
        assert_eq!(counts, [1, 3, 4]);
        assert_eq!((times.count(), times.sum()), (4, Duration::from_micros(62)));
    }

    // Fails if a raise is counted at every look, or by every use of the volume that tells of it.
    #[test]
    fn a_raise_is_counted_once() {
        let growths = Growths::default();
        let (first, second) = (rung(300), rung(400));
        growths.note_rungs(&[], [&first]);
        growths.note_rungs(&[&first], [&first]);
        growths.note_rungs(&[&first], [&second]);
        let counted = growths.counted();
        assert_eq!(counted.raises[&Rung::Filesystem].count(), 2);
        assert_eq!(
            counted.raises[&Rung::Filesystem].sum(),
            Duration::from_micros(700)
        );
        assert_eq!(counted.raises[&Rung::Device].count(), 0);
    }

    fn volume(growths: Value) -> Value {
        json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
            "spec": {
                "capacity": "2Gi", "class": "s", "replicas": 1,
                "claim": { "namespace": "d", "name": "c", "uid": "u" },
            },
            "status": { "growths": growths },
        })
    }

    fn record(second: u64, result: &str) -> Value {
        json!({
            "by": "someone", "from": "1Gi", "to": "2Gi", "result": result,
            "requestedAt": format!("2026-01-01T00:00:{second:02}.000000Z"),
            "finishedAt": format!("2026-01-01T00:00:{second:02}.020000Z"),
        })
    }

    // Fails if an ended growth is not counted, counted again when the record is seen again, or counted when
    // the process only begins to look.
    #[test]
    fn a_growth_is_counted_when_its_record_appears() {
        let growths = Growths::default();
        let one = volume(json!([record(1, "Succeeded")]));
        let two = volume(json!([record(1, "Succeeded"), record(2, "Cancelled")]));
        growths.note_volume(&changed(Value::Null, one.clone()));
        assert_eq!(growths.counted(), Counted::default());
        growths.note_volume(&changed(volume(json!([])), one.clone()));
        growths.note_volume(&changed(one.clone(), one.clone()));
        growths.note_volume(&changed(one, two));
        let counted = growths.counted();
        assert_eq!(counted.results[&("Succeeded", "")], 1);
        assert_eq!(counted.results[&("Cancelled", "")], 1);
        assert_eq!(counted.growths.count(), 1);
        assert_eq!(counted.growths.sum(), Duration::from_millis(20));
    }

    // Fails if a clock that was set back makes the process panic or the sum shrink.
    #[test]
    fn a_clock_that_went_back_counts_as_no_time() {
        let growths = Growths::default();
        let mut back = record(1, "Succeeded");
        back["finishedAt"] = json!("2025-01-01T00:00:00.000000Z");
        growths.note_volume(&changed(volume(json!([])), volume(json!([back]))));
        let counted = growths.counted().growths;
        assert_eq!((counted.count(), counted.sum()), (1, Duration::ZERO));
    }

    fn claim(allocated: &str, reason: Option<&str>) -> Value {
        let conditions: Vec<Value> = reason
            .iter()
            .map(|reason| {
                json!({ "type": "ControllerResizeError", "status": "True", "reason": reason })
            })
            .collect();
        json!({
            "metadata": { "name": "c" },
            "status": { "allocatedResources": { "storage": allocated }, "conditions": conditions },
        })
    }

    // Fails if a hold is counted at every look, or a second growth that is held for the same reason is not.
    #[test]
    fn a_growth_is_counted_as_held_once_for_each_reason_and_size() {
        let growths = Growths::default();
        let free = claim("2Gi", None);
        let held = claim("2Gi", Some("NoSpaceInPool"));
        let larger = claim("3Gi", Some("NoSpaceInPool"));
        let other = claim("3Gi", Some("PoolNotReady"));
        growths.note_claim(&changed(Value::Null, held.clone()));
        growths.note_claim(&changed(free, held.clone()));
        growths.note_claim(&changed(held.clone(), held.clone()));
        growths.note_claim(&changed(held, larger.clone()));
        growths.note_claim(&changed(larger, other));
        let results = growths.counted().results;
        assert_eq!(results[&("Held", "NoSpaceInPool")], 2);
        assert_eq!(results[&("Held", "PoolNotReady")], 1);
    }
}
