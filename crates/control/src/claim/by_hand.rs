//! Persistent volumes that somebody made by hand. A claim that names one, or fits one, is bound to it, as a cluster's
//! own binder does. Only the binding is ours; the rest of such a volume is not.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec,
    PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use serde_json::json;
use trellis_api::{Bytes, Hold, HoldReason};

use super::provision::{BIND_COMPLETED, BOUND_BY_CONTROLLER};
use super::status;
use crate::plan::{Plan, claim_place};
use crate::stored::StoredClaim;
use crate::write::{Object, Place, Write};

/// The volume that fits a claim best: one that is reserved for it, or else the smallest.
pub fn best_fit(
    claim: &PersistentVolumeClaim,
    volumes: Vec<Arc<PersistentVolume>>,
) -> Option<Arc<PersistentVolume>> {
    volumes
        .into_iter()
        .filter(|volume| misfit(claim, volume).is_none())
        .min_by_key(|volume| {
            let is_reserved = reservation(volume).is_some();
            (!is_reserved, capacity(volume), volume.name_any())
        })
}

/// The next step towards a volume that was made by hand; none if the claim does not take one. A hold says why the claim
/// cannot have the volume that it insists on.
pub fn bind(look: &StoredClaim, claim: &PersistentVolumeClaim) -> Result<Option<Plan>, Hold> {
    let spec = claim.spec.clone().unwrap_or_default();
    let phase = claim
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let named = spec.volume_name.as_deref().filter(|name| !name.is_empty());
    if phase == Some("Bound") {
        return Ok(Some(Plan::default()));
    }
    let volume = match named {
        None => match &look.offered {
            Some(volume) => volume,
            None if asks_for_labels(&spec) => return Err(unmatched(claim)),
            None => return Ok(None),
        },
        Some(name) => {
            let volume = look.persistent_volume.as_ref();
            let volume = volume.ok_or_else(|| not_found(name))?;
            if let Some(why) = misfit(claim, volume) {
                let message = format!("PersistentVolume {name:?} {why}.");
                return Err(Hold::new(HoldReason::VolumeMismatch, message));
            }
            volume
        }
    };
    Ok(Some(next_step(claim, named, volume)))
}

fn not_found(name: &str) -> Hold {
    let message = format!("The claim names the PersistentVolume {name:?}, and there is none.");
    Hold::new(HoldReason::VolumeNotFound, message)
}

fn unmatched(claim: &PersistentVolumeClaim) -> Hold {
    let message = format!(
        "No PersistentVolume has the labels that claim {} selects by, its class, mode and size, and is free.",
        claim.name_any()
    );
    Hold::new(HoldReason::SelectorUnmatched, message)
}

/// The volume names the claim, then the claim names the volume, then both say that they are bound.
fn next_step(
    claim: &PersistentVolumeClaim,
    named: Option<&str>,
    volume: &PersistentVolume,
) -> Plan {
    let name = volume.name_any();
    let place = Place::named(Object::PersistentVolume, &name);
    let write = |write: Write| Plan {
        writes: vec![write],
        ..Plan::default()
    };
    let is_ours = reservation(volume).is_some_and(|each| each.uid == claim.uid());
    if !is_ours {
        let body = json!({
            "metadata": {
                "annotations": { BOUND_BY_CONTROLLER: "yes" },
                "resourceVersion": volume.resource_version(),
            },
            "spec": { "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": claim.namespace(),
                "name": claim.name_any(),
                "uid": claim.uid(),
                "resourceVersion": claim.resource_version(),
            }},
        });
        return write(Write::Patch(place, body));
    }
    let completed = claim.annotations().contains_key(BIND_COMPLETED);
    if named.is_none() || !completed {
        let mut annotations = json!({ BIND_COMPLETED: "yes" });
        if named.is_none() {
            annotations[BOUND_BY_CONTROLLER] = json!("yes");
        }
        let body = json!({
            "metadata": { "annotations": annotations },
            "spec": { "volumeName": name },
        });
        return write(Write::Patch(claim_place(claim), body));
    }
    let modes = volume
        .spec
        .as_ref()
        .and_then(|spec| spec.access_modes.clone());
    let mut bound = status::bound(claim, capacity(volume));
    bound["status"]["accessModes"] = json!(modes);
    Plan {
        writes: vec![
            Write::PatchStatus(place, json!({ "status": { "phase": "Bound" } })),
            Write::PatchStatus(claim_place(claim), bound),
        ],
        ..Plan::default()
    }
}

/// The claim that a volume is kept for or bound to.
fn reservation(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

fn capacity(volume: &PersistentVolume) -> Bytes {
    let quantity = || {
        let spec = volume.spec.as_ref()?;
        spec.capacity.as_ref()?.get("storage")?.0.parse().ok()
    };
    quantity().unwrap_or_default()
}

/// Why a claim cannot have a volume, as text that follows the volume's name. None if it can.
fn misfit(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<String> {
    let nothing = PersistentVolumeSpec::default();
    let has = volume.spec.as_ref().unwrap_or(&nothing);
    let wants = claim.spec.clone().unwrap_or_default();
    if let Some(reference) = &has.claim_ref
        && !is_for(reference, claim)
    {
        return Some(format!(
            "belongs to the claim {}/{}",
            reference.namespace.as_deref().unwrap_or_default(),
            reference.name.as_deref().unwrap_or_default()
        ));
    }
    if volume.metadata.deletion_timestamp.is_some() {
        return Some("is being deleted".to_owned());
    }
    let class = |name: &Option<String>| name.clone().unwrap_or_default();
    if class(&has.storage_class_name) != class(&wants.storage_class_name) {
        return Some(format!(
            "is of the class {:?}",
            class(&has.storage_class_name)
        ));
    }
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".to_owned());
    if mode(&has.volume_mode) != mode(&wants.volume_mode) {
        return Some(format!("has the volumeMode {}", mode(&has.volume_mode)));
    }
    let modes = has.access_modes.clone().unwrap_or_default();
    let missing = wants
        .access_modes
        .iter()
        .flatten()
        .find(|mode| !modes.contains(mode));
    if let Some(mode) = missing {
        return Some(format!("does not have the access mode {mode}"));
    }
    let requested = status::requested(claim).unwrap_or_default();
    if capacity(volume) < requested {
        return Some(format!(
            "has {}, and {requested} is asked for",
            capacity(volume)
        ));
    }
    let selected = wants.selector.as_ref();
    (!selected.is_none_or(|selector| selects(selector, volume)))
        .then(|| "does not have the labels that the claim selects by".to_owned())
}

/// Whether a reference means this claim, and not an earlier one of its name.
fn is_for(reference: &ObjectReference, claim: &PersistentVolumeClaim) -> bool {
    reference.name == Some(claim.name_any())
        && reference.namespace == claim.namespace()
        && (reference.uid.as_ref().is_none_or(String::is_empty) || reference.uid == claim.uid())
}

fn asks_for_labels(spec: &PersistentVolumeClaimSpec) -> bool {
    spec.selector.as_ref().is_some_and(|selector| {
        selector
            .match_labels
            .as_ref()
            .is_some_and(|labels| !labels.is_empty())
            || selector
                .match_expressions
                .as_ref()
                .is_some_and(|list| !list.is_empty())
    })
}

fn selects(selector: &LabelSelector, volume: &PersistentVolume) -> bool {
    let labels = volume.labels();
    let mut equal = selector.match_labels.iter().flatten();
    let mut expressions = selector.match_expressions.iter().flatten();
    equal.all(|(key, value)| labels.get(key) == Some(value))
        && expressions.all(|each| {
            let value = labels.get(&each.key);
            let listed =
                value.is_some_and(|value| each.values.iter().flatten().any(|one| one == value));
            match each.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                _ => false,
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn claim(change: impl FnOnce(&mut Value)) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": { "name": "c", "namespace": "d", "uid": "u" },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "manual",
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        change(&mut claim);
        serde_json::from_value(claim).expect("a claim")
    }

    fn volume(name: &str, size: &str, change: impl FnOnce(&mut Value)) -> Arc<PersistentVolume> {
        let mut volume = json!({
            "metadata": { "name": name, "labels": { "disk": "fast" } },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "manual",
                "capacity": { "storage": size }, "hostPath": { "path": "/srv" },
            },
        });
        change(&mut volume);
        Arc::new(serde_json::from_value(volume).expect("a volume"))
    }

    // Fails if a claim gets a volume that Kubernetes' binder would not give it, or another than that.
    #[test]
    fn the_smallest_volume_that_fits_is_taken_and_a_reserved_one_first() {
        let volumes = |more: Vec<Arc<PersistentVolume>>| {
            let mut all = vec![
                volume("small", "512Mi", |_| {}),
                volume("large", "9Gi", |_| {}),
                volume("fits", "2Gi", |_| {}),
                volume("other-class", "1Gi", |each| {
                    each["spec"]["storageClassName"] = json!("")
                }),
                volume("block", "1Gi", |each| {
                    each["spec"]["volumeMode"] = json!("Block")
                }),
                volume("read-only", "1Gi", |each| {
                    each["spec"]["accessModes"] = json!(["ReadOnlyMany"])
                }),
                volume("taken", "1Gi", |each| {
                    each["spec"]["claimRef"] =
                        json!({ "name": "c", "namespace": "d", "uid": "before" });
                }),
            ];
            all.extend(more);
            all
        };
        let best = |more| best_fit(&claim(|_| {}), volumes(more)).map(|each| each.name_any());
        assert_eq!(best(Vec::new()).as_deref(), Some("fits"));
        let reserved = volume("reserved", "8Gi", |each| {
            each["spec"]["claimRef"] = json!({ "name": "c", "namespace": "d" });
        });
        assert_eq!(best(vec![reserved]).as_deref(), Some("reserved"));
        let selective = |operator: &str| {
            claim(|each| {
                each["spec"]["selector"] = json!({ "matchExpressions": [
                    { "key": "disk", "operator": operator, "values": ["fast"] },
                ] });
            })
        };
        assert!(best_fit(&selective("In"), volumes(Vec::new())).is_some());
        assert!(best_fit(&selective("NotIn"), volumes(Vec::new())).is_none());
    }

    // Fails if a claim that insists on a volume gets another one, or waits without a word.
    #[test]
    fn a_claim_that_names_a_volume_gets_that_one_or_a_reason() {
        let look = |persistent_volume| StoredClaim {
            persistent_volume,
            ..StoredClaim::default()
        };
        let named = claim(|each| each["spec"]["volumeName"] = json!("v"));
        let reason = |look: &StoredClaim, claim| bind(look, claim).expect_err("it is held").reason;
        assert_eq!(reason(&look(None), &named), HoldReason::VolumeNotFound);
        let small = look(Some(volume("v", "512Mi", |_| {})));
        assert_eq!(reason(&small, &named), HoldReason::VolumeMismatch);
        let selective =
            claim(|each| each["spec"]["selector"] = json!({ "matchLabels": { "a": "b" } }));
        assert_eq!(
            reason(&look(None), &selective),
            HoldReason::SelectorUnmatched
        );
        let plan = bind(&look(Some(volume("v", "1Gi", |_| {}))), &named);
        let plan = plan.expect("possible").expect("something to do");
        assert!(matches!(&plan.writes[..], [Write::Patch(place, _)] if place.name == "v"));
        assert_eq!(bind(&look(None), &claim(|_| {})), Ok(None));
    }

    // Fails if the two ends are not bound in this order, or it never comes to an end.
    #[test]
    fn a_binding_goes_from_the_volume_to_the_claim_to_both() {
        let ours = |each: &mut Value| {
            each["spec"]["claimRef"] = json!({ "name": "c", "namespace": "d", "uid": "u" });
        };
        let mut look = StoredClaim {
            offered: Some(volume("v", "2Gi", ours)),
            ..StoredClaim::default()
        };
        let writes = |look: &StoredClaim, claim: &PersistentVolumeClaim| {
            bind(look, claim)
                .expect("possible")
                .expect("something")
                .writes
        };
        let unnamed = claim(|_| {});
        let [Write::Patch(place, body)] = &writes(&look, &unnamed)[..] else {
            panic!("the claim names the volume");
        };
        assert_eq!(
            (place, &body["spec"]["volumeName"]),
            (&claim_place(&unnamed), &json!("v"))
        );
        look.persistent_volume = look.offered.take();
        let complete = |each: &mut Value| {
            each["spec"]["volumeName"] = json!("v");
            each["metadata"]["annotations"] = json!({ BIND_COMPLETED: "yes" });
        };
        let [_, Write::PatchStatus(_, body)] = &writes(&look, &claim(complete))[..] else {
            panic!("both say that they are bound");
        };
        assert_eq!(body["status"]["capacity"]["storage"], "2Gi");
        assert_eq!(body["status"]["phase"], "Bound");
        let done = claim(|each| {
            complete(each);
            each["status"] = json!({ "phase": "Bound" });
        });
        assert_eq!(writes(&look, &done), []);
    }
}
