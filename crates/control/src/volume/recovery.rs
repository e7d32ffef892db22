//! What happens when an operator says that copies are lost for good (`Volume.spec.recovery`): the target goes on with
//! the copies that are left, the others are deleted so that new ones can take their place, and the recovery is
//! recorded.
//!
//! Each step is planned from what is stored, so a crash after any step changes nothing. The target does the recovery
//! itself, and is told the same until it has served.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::{GROWTH_RECORDS_MAX, RecoveryRecord, Replica, Volume};
use trellis_api::step::Step;

use crate::plan::{Note, Plan};
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// Whether the target has served the history that the last recovery began.
pub fn is_recovered(view: &StoredVolume, volume: &Volume) -> bool {
    let served = view.target.as_ref();
    let served = served.and_then(|target| target.status.as_ref()?.lineage.as_ref());
    let begun = volume.spec.recovery.as_ref();
    begun.is_some_and(|recovery| served == Some(&recovery.lineage))
}

/// Whether a copy was given up.
pub fn is_given_up(view: &StoredVolume, replica: &Replica) -> bool {
    let recovery = view.volume.as_ref();
    let recovery = recovery.and_then(|volume| volume.spec.recovery.as_ref());
    let id = replica.identity();
    recovery.is_some_and(|recovery| recovery.given_up.contains(&id))
}

/// Deletes a copy that was given up. Its bytes go when it can be reached and the target says that it does not count.
pub(super) fn give_up(view: &StoredVolume) -> Option<Plan> {
    let mut copies = view.replicas.iter();
    let copy = copies
        .find(|each| each.metadata.deletion_timestamp.is_none() && is_given_up(view, each))?;
    let place = Place::named(Object::Replica, copy.name_any());
    Some(Plan {
        writes: vec![Write::Delete(place)],
        step: Some(Step::CopyGivenUp),
        ..Plan::default()
    })
}

/// Records a finished recovery, once.
pub fn record(view: &StoredVolume, volume: &Volume, now: &MicroTime) -> Option<Plan> {
    let recovery = volume.spec.recovery.as_ref()?;
    if !is_recovered(view, volume) {
        return None;
    }
    let known = volume
        .status
        .as_ref()
        .map(|status| status.recoveries.as_slice());
    let mut records = known.unwrap_or_default().to_vec();
    if records
        .iter()
        .any(|each| each.recovery.lineage == recovery.lineage)
    {
        return None;
    }
    records.push(RecoveryRecord {
        recovery: recovery.clone(),
        finished_at: now.clone(),
    });
    let surplus = records.len().saturating_sub(GROWTH_RECORDS_MAX);
    records.drain(..surplus);
    let body = json!({
        "metadata": { "resourceVersion": volume.resource_version() },
        "status": { "recoveries": records },
    });
    let message = format!(
        "{} gave up {} copies of volume {}; it goes on with the {} that were left. What only the others held is lost.",
        recovery.by,
        recovery.given_up.len(),
        view.key,
        recovery.survivors.len()
    );
    let claim = volume.spec.claim.as_ref();
    let note = claim.map(|claim| Note::warning(claim, "VolumeRecovered", message));
    Some(Plan {
        writes: vec![Write::PatchStatus(
            Place::named(Object::Volume, volume.name_any()),
            body,
        )],
        notes: note.into_iter().collect(),
        step: Some(Step::RecoveryRecorded),
        ..Plan::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn view(served: &str, deleted: bool) -> StoredVolume {
        let volume = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume",
            "metadata": { "name": "v", "uid": "u" },
            "spec": {
                "capacity": "1Gi", "class": "c", "replicas": 2, "consistencyFactor": 2, "replicated": true,
                "claim": { "namespace": "d", "name": "c", "uid": "x" },
                "recovery": {
                    "lineage": "1-00", "survivors": ["a"], "givenUp": ["b"], "consistencyFactor": 1,
                    "by": "somebody", "at": "2026-01-01T00:00:00.000000Z",
                },
            },
            "status": { "capacity": "1Gi" },
        });
        let replica = |name: &str, deleted: bool| {
            let mut replica = json!({
                "apiVersion": "trellis.dev/v1alpha1", "kind": "Replica",
                "metadata": { "name": format!("v-{name}"), "uid": name },
                "spec": { "volume": "v", "volumeId": "u", "pool": name, "node": "n", "capacity": "1Gi" },
            });
            if deleted {
                replica["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            Arc::new(serde_json::from_value(replica).expect("a replica"))
        };
        let target = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Target", "metadata": { "name": "v" },
            "spec": { "volume": "v", "node": "n", "capacity": "1Gi" }, "status": { "lineage": served },
        });
        StoredVolume {
            key: "v".to_owned(),
            volume: Some(Arc::new(serde_json::from_value(volume).expect("a volume"))),
            target: Some(Arc::new(serde_json::from_value(target).expect("a target"))),
            replicas: vec![replica("a", false), replica("b", deleted)],
            ..StoredVolume::default()
        }
    }

    // Fails if a copy that is left is deleted, or one that was given up is not or again and again.
    #[test]
    fn only_what_was_given_up_goes_and_once() {
        let plan = give_up(&view("original", false)).expect("something to do");
        let place = Place::named(Object::Replica, "v-b");
        assert_eq!(plan.writes, [Write::Delete(place)]);
        assert_eq!(give_up(&view("original", true)), None);
        assert!(!is_given_up(&view("", false), &view("", false).replicas[0]));
    }

    // Fails if a recovery is recorded before the volume is served, or twice.
    #[test]
    fn a_recovery_is_recorded_when_it_is_done_and_once() {
        let now = crate::stored::now();
        let recorded = |view: &StoredVolume| {
            let volume = view.volume.clone().expect("a volume");
            record(view, &volume, &now)
        };
        assert_eq!(recorded(&view("original", false)), None);
        let mut done = view("1-00", false);
        let plan = recorded(&done).expect("something to record");
        let [Write::PatchStatus(_, body)] = plan.writes.as_slice() else {
            panic!("one status is written: {plan:?}");
        };
        let mut volume = Volume::clone(done.volume.as_ref().expect("a volume"));
        let recoveries = body["status"]["recoveries"].clone();
        volume.status.as_mut().expect("a status").recoveries =
            serde_json::from_value(recoveries).expect("records");
        done.volume = Some(Arc::new(volume));
        assert_eq!(recorded(&done), None);
    }
}
