//! Which growths a volume has had: who asked, how long it took, and how it ended.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde_json::{Map, json};
use trellis_api::Bytes;
use trellis_api::kinds::{GROWTH_RECORDS_MAX, GrowthRecord, GrowthResult, RungTime, Volume};

use super::{redundancy, status};
use crate::plan::Plan;
use crate::stored::StoredVolume;

/// The records of a volume, with the growth that has just been finished if there is one.
pub fn succeeded(stored: &StoredVolume, volume: &Volume, now: &MicroTime) -> Vec<GrowthRecord> {
    let records = records(volume);
    let Some(growth) = &volume.spec.growth else {
        return records;
    };
    let known = records
        .iter()
        .any(|record| record.requested_at == growth.at);
    if known || !is_over(stored, volume) {
        return records;
    }
    let record = GrowthRecord {
        by: growth.by.clone(),
        requested_at: growth.at.clone(),
        finished_at: finished_at(stored, &growth.at, now),
        from: growth.from,
        to: volume.spec.capacity,
        result: GrowthResult::Succeeded,
        rungs: rung_times(stored, &growth.at),
        behind: copies_behind(stored, volume),
    };
    appended(records, record)
}

/// Whether the volume has the size that is wanted, at every use. One of several copies that is behind does not stop a
/// growth.
fn is_over(stored: &StoredVolume, volume: &Volume) -> bool {
    let usable = stored.usable();
    usable.is_some_and(|usable| usable >= volume.spec.capacity)
}

/// The pools of copies that have not reached the size.
fn copies_behind(stored: &StoredVolume, volume: &Volume) -> Vec<String> {
    let target = stored.target.as_ref();
    let status = target.and_then(|target| target.status.as_ref());
    let seen = status.map_or(&[][..], |status| &status.replicas);
    redundancy::behind(stored, seen, volume.spec.capacity)
}

/// What is to be recorded before another size is wanted: the growth that this ends, or that was over and not recorded
/// yet. None if it stands in the records. It is written first, so that it is never made from an outdated look.
pub fn before_change(
    stored: &StoredVolume,
    volume: &Volume,
    wanted: Bytes,
    now: &MicroTime,
) -> Option<Plan> {
    let growths = ended_by(stored, volume, wanted, now);
    (growths != records(volume)).then(|| Plan {
        writes: vec![status::write(
            volume,
            Map::from_iter([("growths".to_owned(), json!(growths))]),
        )],
        ..Plan::default()
    })
}

fn ended_by(
    stored: &StoredVolume,
    volume: &Volume,
    wanted: Bytes,
    now: &MicroTime,
) -> Vec<GrowthRecord> {
    let records = succeeded(stored, volume, now);
    let Some(growth) = &volume.spec.growth else {
        return records;
    };
    let known = records
        .iter()
        .any(|record| record.requested_at == growth.at);
    if known {
        return records;
    }
    let record = GrowthRecord {
        by: growth.by.clone(),
        requested_at: growth.at.clone(),
        finished_at: now.clone(),
        from: growth.from,
        to: volume.spec.capacity,
        result: if wanted > volume.spec.capacity {
            GrowthResult::Replaced
        } else {
            GrowthResult::Cancelled
        },
        rungs: Vec::new(),
        behind: Vec::new(),
    };
    appended(records, record)
}

/// The records of a volume.
fn records(volume: &Volume) -> Vec<GrowthRecord> {
    volume
        .status
        .as_ref()
        .map(|status| status.growths.clone())
        .unwrap_or_default()
}

fn appended(mut records: Vec<GrowthRecord>, record: GrowthRecord) -> Vec<GrowthRecord> {
    records.push(record);
    let surplus = records.len().saturating_sub(GROWTH_RECORDS_MAX);
    records.drain(..surplus);
    records
}

/// The time of each rung that was raised for this growth; the slowest where there are several.
fn rung_times(stored: &StoredVolume, since: &MicroTime) -> Vec<RungTime> {
    let mut times: Vec<RungTime> = Vec::new();
    for status in stored.rungs() {
        let Some(raised) = status.raised.as_ref().filter(|raised| raised.at >= *since) else {
            continue;
        };
        match times.iter_mut().find(|time| time.rung == status.rung) {
            Some(time) => time.micros = time.micros.max(raised.took_micros),
            None => times.push(RungTime {
                rung: status.rung,
                micros: raised.took_micros,
            }),
        }
    }
    times.sort_by_key(|time| time.rung);
    times
}

/// When the last rung was raised for this growth, or now if none was: whoever raised it may have died before reporting
/// it.
fn finished_at(stored: &StoredVolume, since: &MicroTime, now: &MicroTime) -> MicroTime {
    let raised = stored
        .rungs()
        .filter_map(|status| Some(status.raised.as_ref()?.at.clone()))
        .filter(|at| at >= since);
    raised.max().unwrap_or_else(|| now.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;
    use std::sync::Arc;
    use trellis_api::Rung;

    fn at(second: i64) -> MicroTime {
        MicroTime(Timestamp::from_second(second).expect("a valid time"))
    }

    /// A volume of which someone wanted two gibibytes at second 10.
    fn growing(records: Vec<GrowthRecord>) -> Volume {
        let volume = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
            "spec": {
                "capacity": "2Gi", "class": "s", "replicas": 1,
                "claim": { "namespace": "d", "name": "c", "uid": "u" },
                "growth": { "by": "someone", "at": at(10), "from": "1Gi" },
            },
            "status": { "growths": records },
        });
        serde_json::from_value(volume).expect("a volume")
    }

    /// A volume that serves two gibibytes, in use with a filesystem of this size.
    fn view(filesystem: &str) -> StoredVolume {
        let rung = |rung: Rung, size: &str, second, micros: u64| {
            json!({
                "rung": rung, "size": size, "observedAt": at(second),
                "raised": { "from": "1Gi", "to": size, "at": at(second), "tookMicros": micros },
            })
        };
        let attachment = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
            "metadata": { "name": "a", "namespace": "d" },
            "spec": { "claimName": "c", "node": "n", "consumer": { "mount": { "path": "/mnt" } } },
            "status": { "rungs": [
                rung(Rung::Device, "2Gi", 11, 3),
                rung(Rung::Filesystem, filesystem, 12, 4),
            ]},
        });
        let attachment = serde_json::from_value(attachment).expect("an attachment");
        let target = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Target", "metadata": { "name": "v" },
            "spec": { "volume": "v", "node": "n", "capacity": "2Gi" }, "status": { "capacity": "2Gi" },
        });
        let replica = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Replica", "metadata": { "name": "v-0" },
            "spec": {
                "volume": "v", "volumeId": "i", "replicaId": "i", "pool": "p", "node": "n",
                "capacity": "2Gi",
            },
            "status": { "capacity": "2Gi" },
        });
        StoredVolume {
            target: Some(Arc::new(serde_json::from_value(target).expect("a target"))),
            replicas: vec![Arc::new(
                serde_json::from_value(replica).expect("a replica"),
            )],
            attachments: vec![Arc::new(attachment)],
            ..StoredVolume::default()
        }
    }

    // Fails if a growth that is over is not recorded, or recorded at every look.
    #[test]
    fn a_growth_succeeds_once() {
        let view = view("2Gi");
        let records = succeeded(&view, &growing(Vec::new()), &at(20));
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!(record.result, GrowthResult::Succeeded);
        assert_eq!(
            (record.by.as_str(), record.from, record.to),
            ("someone", Bytes::gib(1), Bytes::gib(2))
        );
        assert_eq!(
            (&record.requested_at, &record.finished_at),
            (&at(10), &at(12))
        );
        let micros: Vec<u64> = record.rungs.iter().map(|each| each.micros).collect();
        assert_eq!(micros, [3, 4]);
        let again = succeeded(&view, &growing(records.clone()), &at(30));
        assert_eq!(again, records);
    }

    // Fails if a growth whose raises were never told is said to have been over before it was asked for.
    #[test]
    fn a_growth_is_not_over_before_it_was_asked_for() {
        let mut volume = growing(Vec::new());
        if let Some(growth) = &mut volume.spec.growth {
            growth.at = at(15);
        }
        let records = succeeded(&view("2Gi"), &volume, &at(20));
        assert_eq!(records[0].finished_at, at(20));
        assert_eq!(records[0].rungs, []);
    }

    // Fails if success is recorded before all rungs are where they should be.
    #[test]
    fn a_growth_has_not_succeeded_before_every_rung_is_there() {
        let volume = growing(Vec::new());
        assert_eq!(succeeded(&view("1Gi"), &volume, &at(20)), []);
        let mut unserved = view("2Gi");
        unserved.target = None;
        assert_eq!(succeeded(&unserved, &volume, &at(20)), []);
        let mut behind = view("2Gi");
        for replica in &mut behind.replicas {
            let status = Arc::make_mut(replica).status.as_mut().expect("a status");
            status.capacity = Some(Bytes::gib(1));
        }
        assert_eq!(succeeded(&behind, &volume, &at(20)), []);
    }

    // Fails if a growth that a new request ends gets the wrong word, none, or two.
    #[test]
    fn a_growth_under_way_is_replaced_by_more_and_cancelled_by_less() {
        for (wanted, result) in [
            (Bytes::gib(3), GrowthResult::Replaced),
            (Bytes::gib(1), GrowthResult::Cancelled),
        ] {
            let view = view("1Gi");
            let records = ended_by(&view, &growing(Vec::new()), wanted, &at(20));
            assert_eq!(records.len(), 1);
            assert_eq!(records[0].result, result);
            assert_eq!(records[0].to, Bytes::gib(2));
            assert!(before_change(&view, &growing(Vec::new()), wanted, &at(20)).is_some());
            let told = before_change(&view, &growing(records), wanted, &at(30));
            assert_eq!(told, None);
        }
    }

    // Fails if a growth that was finished just before the next request is forgotten, counts as replaced, or is told
    // twice.
    #[test]
    fn a_finished_growth_is_recorded_before_the_next_one() {
        let (view, wanted) = (view("2Gi"), Bytes::gib(3));
        let records = ended_by(&view, &growing(Vec::new()), wanted, &at(20));
        assert_eq!(records, succeeded(&view, &growing(Vec::new()), &at(20)));
        assert_eq!(records[0].result, GrowthResult::Succeeded);
        let again = ended_by(&view, &growing(records.clone()), wanted, &at(30));
        assert_eq!(again, records);
    }

    // Fails if the history grows without end, or loses the newest instead of the oldest.
    #[test]
    fn the_oldest_records_give_way() {
        let record = |second| GrowthRecord {
            by: String::new(),
            requested_at: at(second),
            finished_at: at(second),
            from: Bytes::ZERO,
            to: Bytes::ZERO,
            result: GrowthResult::Succeeded,
            rungs: Vec::new(),
            behind: Vec::new(),
        };
        let full: Vec<GrowthRecord> = (0..).map(record).take(GROWTH_RECORDS_MAX).collect();
        let records = appended(full, record(100));
        assert_eq!(records.len(), GROWTH_RECORDS_MAX);
        assert_eq!(records[0].requested_at, at(1));
        assert_eq!(
            records.last().map(|each| &each.requested_at),
            Some(&at(100))
        );
    }
}
