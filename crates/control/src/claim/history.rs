//! Who asked for which growth, how long it took, and how it ended.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, MicroTime};
use trellis_api::Bytes;
use trellis_api::kinds::{
    GROWTH_RECORDS_MAX, GrowthRecord, GrowthResult, RungStatus, RungTime, Volume,
};

use super::status;
use crate::view::View;

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
    // The claim may be seen before the rungs that it was finished from; their times belong to the record.
    let behind = rungs(view)
        .iter()
        .any(|rung| rung.size < volume.spec.capacity && !rung.full);
    if !reached || known || behind {
        return records;
    }
    let record = GrowthRecord {
        by: growth.by.clone(),
        requested_at: growth.at.clone(),
        finished_at: finished_at(view, now),
        from: growth.from,
        to: volume.spec.capacity,
        result: GrowthResult::Succeeded,
        rungs: rung_times(view, &growth.at),
    };
    appended(records, record)
}

/// A growth that never had room and whose request was lowered again leaves a record too, once.
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
    };
    appended(records, record)
}

/// The records as they are before the goal becomes `goal`: with the growth that is ended by it, and with
/// the one that was asked for before, never had room, and is called off by it.
pub fn before_change(
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    goal: Bytes,
    now: &MicroTime,
) -> Vec<GrowthRecord> {
    let records = with_called_off(records(volume), claim, goal, now);
    let under_way = status::reported(claim).is_some_and(|size| size < volume.spec.capacity);
    let Some(growth) = volume.spec.growth.as_ref().filter(|_| under_way) else {
        return records;
    };
    if records
        .iter()
        .any(|record| record.requested_at == growth.at)
    {
        return records;
    }
    let larger = goal > volume.spec.capacity;
    let record = GrowthRecord {
        by: growth.by.clone(),
        requested_at: growth.at.clone(),
        finished_at: now.clone(),
        from: growth.from,
        to: volume.spec.capacity,
        result: if larger {
            GrowthResult::Replaced
        } else {
            GrowthResult::Cancelled
        },
        rungs: Vec::new(),
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

fn rungs(view: &View) -> Vec<&RungStatus> {
    let replicas = view
        .replicas
        .iter()
        .filter_map(|each| each.status.as_ref()?.rung.as_ref());
    let target = view
        .target
        .iter()
        .filter_map(|each| each.status.as_ref()?.rung.as_ref());
    let attached = view
        .attachments
        .iter()
        .filter_map(|each| each.status.as_ref());
    replicas
        .chain(target)
        .chain(attached.flat_map(|status| &status.rungs))
        .collect()
}

/// The time of each rung that was raised for this growth; the slowest where there are several.
fn rung_times(view: &View, since: &MicroTime) -> Vec<RungTime> {
    let mut times: Vec<RungTime> = Vec::new();
    for status in rungs(view) {
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

/// The moment when the last rung was raised, or now if none was.
fn finished_at(view: &View, now: &MicroTime) -> MicroTime {
    let raised = rungs(view)
        .into_iter()
        .filter_map(|status| Some(status.raised.as_ref()?.at.clone()));
    raised.max().unwrap_or_else(|| now.clone())
}
