//! A deleted claim, and what happens to its volume.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::{PROVISIONER, Volume};
use trellis_api::{Hold, HoldReason};

use crate::plan::{Note, Plan, claim_place};
use crate::stored::StoredClaim;
use crate::write::{Object, Place, Write};

const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";
const VOLUME_PROTECTION: &str = "kubernetes.io/pv-protection";

/// A claim that is being deleted goes as soon as nothing uses it.
pub fn release_claim(look: &StoredClaim, claim: &PersistentVolumeClaim) -> Plan {
    if !claim
        .finalizers()
        .iter()
        .any(|each| each == CLAIM_PROTECTION)
    {
        return Plan::default();
    }
    if let Some(user) = look.uses().next() {
        let message = format!(
            "still in use by attachment {:?} at {}",
            user.name_any(),
            user.spec.consumer.path()
        );
        let hold = Hold::new(HoldReason::InUse, message);
        let note = Note {
            warning: false,
            ..Note::held(claim, "ClaimInUse", &hold)
        };
        return Plan {
            notes: vec![note],
            ..Plan::default()
        };
    }
    if let Some(write) = note_release(look, claim) {
        return Plan {
            writes: vec![write],
            ..Plan::default()
        };
    }
    let kept: Vec<&String> = claim
        .finalizers()
        .iter()
        .filter(|each| *each != CLAIM_PROTECTION)
        .collect();
    let body = json!({ "metadata": {
        "finalizers": kept,
        "resourceVersion": claim.metadata.resource_version,
    }});
    Plan {
        writes: vec![Write::Patch(claim_place(claim), body)],
        ..Plan::default()
    }
}

/// Records in the volume that its claim is being deleted, before the claim is gone. Afterwards nobody could tell a
/// deleted claim from one that a lost store does not know.
fn note_release(look: &StoredClaim, claim: &PersistentVolumeClaim) -> Option<Write> {
    let volume = look.stored.volume.as_ref()?;
    let made_for = volume.spec.claim.as_ref();
    let is_its_claim = made_for.is_some_and(|made_for| claim.uid().as_ref() == Some(&made_for.uid));
    if !is_its_claim || volume.is_released() {
        return None;
    }
    let body = json!({
        "metadata": { "uid": volume.uid() },
        "spec": { "releasedBy": claim.uid() },
    });
    Some(Write::Patch(
        Place::named(Object::Volume, &look.stored.key),
        body,
    ))
}

/// The claim is gone: deletes or keeps what it had. Bytes go only if the claim was deleted, or if a person deleted the
/// volume or its persistent volume. A claim that is merely absent takes nothing with it.
pub fn reclaim(look: &StoredClaim) -> Plan {
    let Some(persistent) = &look.persistent_volume else {
        return orphan(look);
    };
    let spec = persistent.spec.as_ref();
    let ours = spec
        .and_then(|spec| spec.csi.as_ref())
        .is_some_and(|csi| csi.driver == PROVISIONER);
    let deleting = persistent.metadata.deletion_timestamp.is_some();
    let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    // A volume that is only reserved for a future claim has no uid of it.
    let claimed = spec.is_some_and(|spec| {
        let reference = spec.claim_ref.as_ref();
        let uid = reference.and_then(|each| each.uid.as_deref());
        uid.is_some_and(|uid| !uid.is_empty())
    });
    // A volume that somebody made by hand is theirs to delete, whatever its policy says.
    if !ours || policy != Some("Delete") {
        return if deleting {
            unprotect(look)
        } else {
            keep(look, claimed)
        };
    }
    // A volume without a claim that has never been bound to one is somebody's preparation.
    if !claimed && !deleting {
        return keep(look, claimed);
    }
    if let Some(volume) = &look.stored.volume {
        let is_deleted = deleting || volume.metadata.deletion_timestamp.is_some();
        if !volume.is_released() && !is_deleted {
            return keep(look, claimed);
        }
        return let_go(look, volume, !deleting);
    }
    if !look.stored.replicas.is_empty() {
        return Plan::default();
    }
    if !deleting {
        // It was marked together with its volume. If it was not, its volume is not known.
        return keep(look, claimed);
    }
    unprotect(look)
}

/// A volume without claim and persistent volume.
fn orphan(look: &StoredClaim) -> Plan {
    let Some(volume) = &look.stored.volume else {
        return Plan::default();
    };
    // A retained volume whose persistent volume was removed by hand stays: that is what Retain means. It goes when
    // somebody deletes it as well. A volume that was never bound goes with its claim. One that does not even have
    // copies yet is nobody's, whatever became of the claim.
    let is_deleting = volume.metadata.deletion_timestamp.is_some();
    let is_new = volume.spec.volume_id.is_empty() && look.stored.replicas.is_empty();
    if is_deleting || (volume.spec.provisional && (volume.is_released() || is_new)) {
        return let_go(look, volume, false);
    }
    Plan::default()
}

/// Deletes a volume, says that its bytes go with it, and marks its persistent volume if that is not done yet. This is
/// the only place that says so. Anybody else who deletes a volume only marks it, and its bytes stay as long as it has a
/// claim or a use.
fn let_go(look: &StoredClaim, volume: &Volume, mark_persistent: bool) -> Plan {
    if !look.stored.attachments.is_empty() {
        return Plan::default();
    }
    let place = Place::named(Object::Volume, &look.stored.key);
    let mut writes = Vec::new();
    if !volume.spec.discard {
        let body = json!({
            "metadata": { "uid": volume.uid() },
            "spec": { "discard": true },
        });
        writes.push(Write::Patch(place.clone(), body));
    }
    if mark_persistent {
        let persistent = Place::named(Object::PersistentVolume, &look.stored.key);
        writes.push(Write::Delete(persistent));
    }
    if volume.metadata.deletion_timestamp.is_none() {
        writes.push(Write::Delete(place));
    }
    Plan {
        writes,
        ..Plan::default()
    }
}

fn keep(look: &StoredClaim, claimed: bool) -> Plan {
    let phase = if claimed { "Released" } else { "Available" };
    let now = look
        .persistent_volume
        .as_ref()
        .and_then(|each| each.status.as_ref()?.phase.clone());
    if now.as_deref() == Some(phase) {
        return Plan::default();
    }
    let place = Place::named(Object::PersistentVolume, &look.stored.key);
    let write = Write::PatchStatus(place, json!({ "status": { "phase": phase } }));
    Plan {
        writes: vec![write],
        ..Plan::default()
    }
}

fn unprotect(look: &StoredClaim) -> Plan {
    let Some(persistent) = &look.persistent_volume else {
        return Plan::default();
    };
    if !persistent
        .finalizers()
        .iter()
        .any(|each| each == VOLUME_PROTECTION)
    {
        return Plan::default();
    }
    let kept: Vec<&String> = persistent
        .finalizers()
        .iter()
        .filter(|each| *each != VOLUME_PROTECTION)
        .collect();
    let body = json!({ "metadata": {
        "finalizers": kept,
        "resourceVersion": persistent.metadata.resource_version,
    }});
    let place = Place::named(Object::PersistentVolume, &look.stored.key);
    Plan {
        writes: vec![Write::Patch(place, body)],
        ..Plan::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stored::StoredVolume;
    use serde_json::Value;
    use std::sync::Arc;

    fn persistent(policy: &str, claimed: bool) -> Value {
        json!({
            "metadata": {
                "name": "v", "resourceVersion": "3",
                "finalizers": [VOLUME_PROTECTION, "example.com/other"],
            },
            "spec": {
                "persistentVolumeReclaimPolicy": policy,
                "claimRef": claimed.then(|| json!({ "name": "c", "uid": "u" })),
                "csi": { "driver": PROVISIONER, "volumeHandle": "v" },
            },
            "status": { "phase": "Bound" },
        })
    }

    fn volume(capacity: Option<&str>) -> Value {
        json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
            "spec": {
                "capacity": "1Gi", "class": "s", "replicas": 1,
                "claim": { "namespace": "d", "name": "c", "uid": "u" },
            },
            "status": { "capacity": capacity },
        })
    }

    fn released(mut volume: Value) -> Value {
        volume["spec"]["releasedBy"] = json!("u");
        volume
    }

    fn provisional(mut volume: Value) -> Value {
        volume["spec"]["provisional"] = json!(true);
        volume
    }

    fn replica() -> Value {
        json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Replica", "metadata": { "name": "v-0" },
            "spec": {
                "volume": "v", "volumeId": "", "replicaId": "", "pool": "p", "node": "n",
                "capacity": "1Gi",
            },
        })
    }

    fn claim() -> Value {
        json!({ "metadata": {
            "name": "c", "namespace": "d", "resourceVersion": "5",
            "deletionTimestamp": "2024-01-01T00:00:00Z",
            "finalizers": [CLAIM_PROTECTION, "example.com/other"],
        }})
    }

    fn attachment() -> Value {
        json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
            "metadata": { "name": "a", "namespace": "d" },
            "spec": { "claimName": "c", "node": "n", "consumer": { "mount": { "path": "/mnt" } } },
        })
    }

    fn object<K: serde::de::DeserializeOwned>(value: Value) -> Arc<K> {
        Arc::new(serde_json::from_value(value).expect("an object of its kind"))
    }

    fn look(persistent: Option<Value>, volume: Option<Value>, replicas: Vec<Value>) -> StoredClaim {
        StoredClaim {
            persistent_volume: persistent.map(object),
            stored: StoredVolume {
                key: "v".to_owned(),
                volume: volume.map(object),
                replicas: replicas.into_iter().map(object).collect(),
                ..StoredVolume::default()
            },
            ..StoredClaim::default()
        }
    }

    fn deleting(mut object: Value) -> Value {
        object["metadata"]["deletionTimestamp"] = json!("2024-01-01T00:00:00Z");
        object
    }

    // Fails if a claim goes while something uses it, or takes finalizers along that are not ours.
    #[test]
    fn a_claim_goes_when_its_last_use_has_ended() {
        let mut look = look(None, None, Vec::new());
        look.claim = Some(object(claim()));
        look.stored.attachments = vec![object(attachment())];
        let claim = look.claim.clone().expect("there is one");
        let waits = release_claim(&look, &claim);
        assert_eq!(waits.writes, []);
        assert_eq!(waits.notes.len(), 1);
        assert!(waits.notes[0].message.contains("/mnt"));
        look.stored.attachments.clear();
        let body = json!({ "metadata": {
            "finalizers": ["example.com/other"], "resourceVersion": "5",
        }});
        let plan = release_claim(&look, &claim);
        assert_eq!(plan.writes, [Write::Patch(claim_place(&claim), body)]);
    }

    // Fails if the claim goes before its deletion stands in the volume, or a claim that the volume was not made for
    // counts.
    #[test]
    fn the_deletion_of_a_claim_is_written_down_before_the_claim_is_gone() {
        let mut deleted = claim();
        deleted["metadata"]["uid"] = json!("u");
        let mut look = look(None, Some(volume(Some("1Gi"))), Vec::new());
        look.claim = Some(object(deleted.clone()));
        let claim = look.claim.clone().expect("there is one");
        let body = json!({ "metadata": { "uid": null }, "spec": { "releasedBy": "u" } });
        let place = Place::named(Object::Volume, "v");
        let noted = release_claim(&look, &claim);
        assert_eq!(noted.writes, [Write::Patch(place, body)]);
        look.stored.volume = Some(object(released(volume(Some("1Gi")))));
        let lifted = release_claim(&look, &claim);
        assert!(
            matches!(&lifted.writes[..], [Write::Patch(place, _)] if place.object == Object::Claim)
        );
        deleted["metadata"]["uid"] = json!("another");
        let another: Arc<PersistentVolumeClaim> = object(deleted);
        look.stored.volume = Some(object(volume(Some("1Gi"))));
        let lifted = release_claim(&look, &another);
        assert!(
            matches!(&lifted.writes[..], [Write::Patch(place, _)] if place.object == Object::Claim)
        );
    }

    // Fails if a claim that is merely not known costs the volume, its copies or the persistent volume.
    #[test]
    fn a_claim_that_is_not_known_takes_nothing_with_it() {
        let mut there = persistent("Delete", true);
        there["status"]["phase"] = json!("Released");
        let mut once_bound = volume(None);
        once_bound["spec"]["volumeId"] = json!("i");
        for volume in [volume(Some("1Gi")), volume(None), once_bound.clone()] {
            let plan = reclaim(&look(Some(there.clone()), Some(volume), vec![replica()]));
            assert_eq!(plan.writes, []);
        }
        assert_eq!(reclaim(&look(Some(there), None, Vec::new())).writes, []);
        let orphans = [
            look(None, Some(volume(None)), vec![replica()]),
            look(None, Some(provisional(volume(None))), vec![replica()]),
            look(None, Some(released(volume(None))), Vec::new()),
            look(None, Some(once_bound), Vec::new()),
            look(None, Some(volume(Some("1Gi"))), Vec::new()),
        ];
        for orphan in orphans {
            assert_eq!(reclaim(&orphan).writes, []);
        }
    }

    // Fails if the order of deletion changes: it is said that the bytes may go, then they go, and the persistent volume
    // when they are gone.
    #[test]
    fn delete_takes_the_volume_then_its_copies_then_the_persistent_volume() {
        let of = |persistent, volume, replicas| reclaim(&look(Some(persistent), volume, replicas));
        let delete = |object| Write::Delete(Place::named(object, "v"));
        let there = persistent("Delete", true);
        let bound = released(volume(Some("1Gi")));
        let plan = of(there.clone(), Some(bound.clone()), vec![replica()]);
        let body = json!({ "metadata": { "uid": null }, "spec": { "discard": true } });
        let marks = [
            Write::Patch(Place::named(Object::Volume, "v"), body),
            delete(Object::PersistentVolume),
            delete(Object::Volume),
        ];
        assert_eq!(plan.writes, marks);
        let marked = deleting(there.clone());
        let mut going = deleting(bound);
        going["spec"]["discard"] = json!(true);
        let plan = of(marked.clone(), Some(going), vec![replica()]);
        assert_eq!(plan.writes, [], "the volume controller does the rest");
        assert_eq!(of(marked, None, vec![replica()]).writes, []);
        let body = json!({ "metadata": {
            "finalizers": ["example.com/other"], "resourceVersion": "3",
        }});
        let place = Place::named(Object::PersistentVolume, "v");
        let plan = of(deleting(there), None, Vec::new());
        assert_eq!(plan.writes, [Write::Patch(place, body)]);
    }

    // Fails if Retain deletes anything, or says so more than once.
    #[test]
    fn retain_keeps_the_volume_and_releases_the_persistent_volume() {
        let place = Place::named(Object::PersistentVolume, "v");
        let body = json!({ "status": { "phase": "Released" } });
        let mut kept = persistent("Retain", true);
        let plan = reclaim(&look(
            Some(kept.clone()),
            Some(volume(Some("1Gi"))),
            vec![replica()],
        ));
        assert_eq!(plan.writes, [Write::PatchStatus(place, body)]);
        kept["status"]["phase"] = json!("Released");
        let plan = reclaim(&look(
            Some(kept.clone()),
            Some(volume(Some("1Gi"))),
            vec![replica()],
        ));
        assert_eq!(plan.writes, []);
        let plan = reclaim(&look(None, Some(volume(Some("1Gi"))), vec![replica()]));
        assert_eq!(plan.writes, [], "the persistent volume was removed by hand");
    }

    // Fails if a volume that somebody prepared, or that is not ours, is deleted.
    #[test]
    fn what_was_never_claimed_or_is_not_ours_stays() {
        let prepared = persistent("Delete", false);
        let place = Place::named(Object::PersistentVolume, "v");
        let body = json!({ "status": { "phase": "Available" } });
        let plan = reclaim(&look(Some(prepared), Some(volume(Some("1Gi"))), Vec::new()));
        assert_eq!(plan.writes, [Write::PatchStatus(place, body)]);
        let mut foreign = persistent("Delete", true);
        foreign["spec"]["csi"]["driver"] = json!("other");
        let place = Place::named(Object::PersistentVolume, "v");
        let body = json!({ "status": { "phase": "Released" } });
        let plan = reclaim(&look(Some(foreign.clone()), None, Vec::new()));
        assert_eq!(plan.writes, [Write::PatchStatus(place.clone(), body)]);
        let plan = reclaim(&look(Some(deleting(foreign)), None, Vec::new()));
        assert!(
            matches!(&plan.writes[..], [Write::Patch(at, _)] if *at == place),
            "its owner has deleted it, and no claim needs it"
        );
    }

    // Fails if a volume is left behind whose claim vanished before the two were bound.
    #[test]
    fn a_volume_that_was_never_bound_goes_with_its_claim() {
        for (volume, copies) in [
            (provisional(volume(None)), Vec::new()),
            (released(provisional(volume(Some("1Gi")))), vec![replica()]),
        ] {
            let plan = reclaim(&look(None, Some(volume), copies));
            let place = Place::named(Object::Volume, "v");
            let body = json!({ "metadata": { "uid": null }, "spec": { "discard": true } });
            let marks = [Write::Patch(place.clone(), body), Write::Delete(place)];
            assert_eq!(plan.writes, marks);
        }
        assert_eq!(reclaim(&look(None, None, Vec::new())).writes, []);
    }
}
