//! Who asked for which growth, how long it took, and how it ended.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, MicroTime};
use trellis_api::kinds::{
    GROWTH_RECORDS_MAX, GrowthRecord, GrowthResult, RungStatus, RungTime, Volume,
};
use trellis_api::{Bytes, Rung};

use super::status;
use crate::view::View;
use crate::volume::redundancy;

/// Whether an entry of a claim's managed fields owns the size that the claim asks for.
pub fn asks_for_size(entry: &ManagedFieldsEntry) -> bool {
    let fields = entry.fields_v1.as_ref().map(|fields| &fields.0);
    fields
        .is_some_and(|fields| !fields["f:spec"]["f:resources"]["f:requests"]["f:storage"].is_null())
}

/// Who last changed the size that a claim asks for, by the name that its client gave.
pub fn requester(claim: &PersistentVolumeClaim) -> String {
    let entries = claim.metadata.managed_fields.iter().flatten();
    let latest = entries
        .filter(|entry| asks_for_size(entry))
        .max_by_key(|entry| entry.time.clone());
    latest
        .and_then(|entry| entry.manager.clone())
        .unwrap_or_else(|| "unknown".to_owned())
}

/// The records of a volume, with the growth that has just been finished if there is one.
pub fn succeeded(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    now: &MicroTime,
) -> Vec<GrowthRecord> {
    let records = with_called_off(records(volume), claim, volume.spec.capacity, now);
    let Some(growth) = &volume.spec.growth else {
        return records;
    };
    let reached = status::reported(claim).is_some_and(|size| size >= volume.spec.capacity)
        && status::progress(claim).is_none();
    let known = records
        .iter()
        .any(|record| record.requested_at == growth.at);
    // The claim may be seen before the rungs that it was finished from; their times belong in the record. One of
    // several copies that is behind does not stop a growth.
    let counts = |rung: &&RungStatus| rung.rung != Rung::Replica || !view.is_replicated();
    let mut counted = view.rungs().filter(counts);
    let behind = counted.any(|rung| rung.size < volume.spec.capacity && !rung.full);
    if !reached || known || behind {
        return records;
    }
    let record = GrowthRecord {
        by: growth.by.clone(),
        requested_at: growth.at.clone(),
        finished_at: finished_at(view, &growth.at, now),
        from: growth.from,
        to: volume.spec.capacity,
        result: GrowthResult::Succeeded,
        rungs: rung_times(view, &growth.at),
        behind: copies_behind(view, volume),
    };
    appended(records, record)
}

/// The pools of copies that have not reached the size.
fn copies_behind(view: &View, volume: &Volume) -> Vec<String> {
    let target = view.target.as_ref();
    let status = target.and_then(|target| target.status.as_ref());
    let seen = status.map_or(&[][..], |status| &status.replicas);
    redundancy::behind(view, seen, volume.spec.capacity)
}

/// A growth that never had room and whose request was lowered again also leaves a record, once.
fn with_called_off(
    records: Vec<GrowthRecord>,
    claim: &PersistentVolumeClaim,
    goal: Bytes,
    now: &MicroTime,
) -> Vec<GrowthRecord> {
    let refused = status::progress(claim) == Some("ControllerResizeInfeasible");
    let wanted = status::allocated(claim).filter(|size| refused && *size > goal);
    let Some(to) = wanted else { return records };
    let since = status::refused_since(claim);
    let known = records.iter().any(|record| {
        let after = since
            .as_ref()
            .is_none_or(|since| record.finished_at.0 >= since.0);
        record.result == GrowthResult::Cancelled && record.to == to && after
    });
    if known {
        return records;
    }
    let record = GrowthRecord {
        by: requester(claim),
        requested_at: since.map_or_else(|| now.clone(), |since| MicroTime(since.0)),
        finished_at: now.clone(),
        from: status::reported(claim).unwrap_or_default(),
        to,
        result: GrowthResult::Cancelled,
        rungs: Vec::new(),
        behind: Vec::new(),
    };
    appended(records, record)
}

/// The records before the goal becomes `goal`. They include the growth that this change ends, or that was over and not
/// recorded yet, and an earlier request that never had room and is cancelled by this change.
pub fn before_change(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    goal: Bytes,
    now: &MicroTime,
) -> Vec<GrowthRecord> {
    let records = with_called_off(records(volume), claim, goal, now);
    let Some(growth) = &volume.spec.growth else {
        return records;
    };
    let known = records
        .iter()
        .any(|record| record.requested_at == growth.at);
    if known {
        return records;
    }
    let is_over = status::reported(claim).is_some_and(|size| size >= volume.spec.capacity);
    let record = GrowthRecord {
        by: growth.by.clone(),
        requested_at: growth.at.clone(),
        finished_at: if is_over {
            finished_at(view, &growth.at, now)
        } else {
            now.clone()
        },
        from: growth.from,
        to: volume.spec.capacity,
        result: match (is_over, goal > volume.spec.capacity) {
            (true, _) => GrowthResult::Succeeded,
            (false, true) => GrowthResult::Replaced,
            (false, false) => GrowthResult::Cancelled,
        },
        rungs: if is_over {
            rung_times(view, &growth.at)
        } else {
            Vec::new()
        },
        behind: if is_over {
            copies_behind(view, volume)
        } else {
            Vec::new()
        },
    };
    appended(records, record)
}

/// The records of a volume.
pub fn records(volume: &Volume) -> Vec<GrowthRecord> {
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
fn rung_times(view: &View, since: &MicroTime) -> Vec<RungTime> {
    let mut times: Vec<RungTime> = Vec::new();
    for status in view.rungs() {
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
fn finished_at(view: &View, since: &MicroTime, now: &MicroTime) -> MicroTime {
    let raised = view
        .rungs()
        .filter_map(|status| Some(status.raised.as_ref()?.at.clone()))
        .filter(|at| at >= since);
    raised.max().unwrap_or_else(|| now.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};
    use trellis_api::Rung;

    fn at(second: i64) -> MicroTime {
        MicroTime(Timestamp::from_second(second).expect("a valid time"))
    }

    fn claim(reported: &str, status: Value) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": { "name": "c" },
            "spec": { "resources": { "requests": { "storage": "2Gi" } } },
            "status": { "phase": "Bound", "capacity": { "storage": reported } },
        });
        for (field, value) in status.as_object().expect("fields") {
            claim["status"][field] = value.clone();
        }
        serde_json::from_value(claim).expect("a claim")
    }

    /// A claim that asked at second 5 for a size that could not be given.
    fn refused(size: &str) -> PersistentVolumeClaim {
        claim(
            "1Gi",
            json!({
                "allocatedResources": { "storage": size },
                "allocatedResourceStatuses": { "storage": "ControllerResizeInfeasible" },
                "conditions": [{
                    "type": "ControllerResizeError", "status": "True",
                    "lastTransitionTime": "1970-01-01T00:00:05Z",
                }],
            }),
        )
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

    fn view(filesystem: &str) -> View {
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
        View {
            attachments: vec![std::sync::Arc::new(attachment)],
            ..View::default()
        }
    }

    // Fails if a growth that is over is not recorded, or recorded at every look.
    #[test]
    fn a_growth_succeeds_once() {
        let (claim, view) = (claim("2Gi", json!({})), view("2Gi"));
        let records = succeeded(&view, &claim, &growing(Vec::new()), &at(20));
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
        let again = succeeded(&view, &claim, &growing(records.clone()), &at(30));
        assert_eq!(again, records);
    }

    // Fails if a growth whose raises were never told is said to have been over before it was asked for.
    #[test]
    fn a_growth_is_not_over_before_it_was_asked_for() {
        let (claim, view) = (claim("2Gi", json!({})), view("2Gi"));
        let mut volume = growing(Vec::new());
        if let Some(growth) = &mut volume.spec.growth {
            growth.at = at(15);
        }
        let records = succeeded(&view, &claim, &volume, &at(20));
        assert_eq!(records[0].finished_at, at(20));
        assert_eq!(records[0].rungs, []);
    }

    // Fails if success is recorded before the claim and all rungs are where they should be.
    #[test]
    fn a_growth_has_not_succeeded_before_every_rung_is_there() {
        let volume = growing(Vec::new());
        let done = claim("2Gi", json!({}));
        assert_eq!(succeeded(&view("1Gi"), &done, &volume, &at(20)), []);
        let behind = claim("1Gi", json!({}));
        assert_eq!(succeeded(&view("2Gi"), &behind, &volume, &at(20)), []);
        let pending = json!({ "allocatedResourceStatuses": { "storage": "NodeResizePending" } });
        let pending = claim("2Gi", pending);
        assert_eq!(succeeded(&view("2Gi"), &pending, &volume, &at(20)), []);
    }

    // Fails if a growth that a new request ends gets the wrong word, none, or two.
    #[test]
    fn a_growth_under_way_is_replaced_by_more_and_cancelled_by_less() {
        let claim = claim("1Gi", json!({}));
        for (goal, result) in [
            (Bytes::gib(3), GrowthResult::Replaced),
            (Bytes::gib(1), GrowthResult::Cancelled),
        ] {
            let view = view("1Gi");
            let records = before_change(&view, &claim, &growing(Vec::new()), goal, &at(20));
            assert_eq!(records.len(), 1);
            assert_eq!(records[0].result, result);
            assert_eq!(records[0].to, Bytes::gib(2));
            let again = before_change(&view, &claim, &growing(records.clone()), goal, &at(30));
            assert_eq!(again, records);
        }
    }

    // Fails if a growth that was finished just before the next request is forgotten, counts as replaced, or is told
    // twice.
    #[test]
    fn a_finished_growth_is_recorded_before_the_next_one() {
        let (claim, view) = (claim("2Gi", json!({})), view("2Gi"));
        let goal = Bytes::gib(3);
        let records = before_change(&view, &claim, &growing(Vec::new()), goal, &at(20));
        assert_eq!(
            records,
            succeeded(&view, &claim, &growing(Vec::new()), &at(20))
        );
        assert_eq!(records[0].result, GrowthResult::Succeeded);
        let again = before_change(&view, &claim, &growing(records.clone()), goal, &at(30));
        assert_eq!(again, records);
    }

    // Fails if a request that never had room vanishes from the history, or is told at every look.
    #[test]
    fn a_request_that_never_had_room_is_cancelled_once() {
        let mut volume = growing(Vec::new());
        volume.spec.growth = None;
        let claim = refused("9Gi");
        let records = succeeded(&View::default(), &claim, &volume, &at(20));
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].result, GrowthResult::Cancelled);
        assert_eq!(
            (&records[0].requested_at, records[0].to),
            (&at(5), Bytes::gib(9))
        );
        let mut known = growing(records.clone());
        known.spec.growth = None;
        let again = succeeded(&View::default(), &claim, &known, &at(30));
        assert_eq!(again, records);
        let given = succeeded(&View::default(), &refused("2Gi"), &volume, &at(20));
        assert_eq!(given, [], "what was refused is what there is now");
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

    // Fails if a growth is ascribed to whoever wrote the claim last, for whatever reason.
    #[test]
    fn the_requester_is_who_last_set_the_size() {
        let size = json!({ "f:spec": { "f:resources": { "f:requests": { "f:storage": {} } } } });
        let entry = |manager: &str, second, fields: &Value| {
            json!({ "manager": manager, "time": k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(second).0),
                "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields })
        };
        let mut claim = claim("1Gi", json!({}));
        assert_eq!(requester(&claim), "unknown");
        let entries = json!([
            entry("first", 1, &size),
            entry("second", 2, &size),
            entry("labels", 3, &json!({ "f:metadata": {} })),
        ]);
        claim.metadata.managed_fields = serde_json::from_value(entries).ok();
        assert_eq!(requester(&claim), "second");
    }
}
