//! The status of a claim, in Kubernetes' own words: phase, capacity, `allocatedResources` and the
//! conditions that the resize controllers of a cluster write.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use serde_json::{Value, json};
use trellis_api::{Bytes, Hold};

/// The conditions that we write: Kubernetes' four of a resize, which success removes, and our own for a
/// claim that cannot be provisioned.
const OUR_CONDITIONS: [&str; 5] = [
    "Resizing",
    "FileSystemResizePending",
    "ControllerResizeError",
    "NodeResizeError",
    HELD,
];
/// The condition of a claim that cannot be provisioned now. Kubernetes has only events for that, which
/// vanish after an hour.
pub const HELD: &str = "Held";

/// The size that a claim asks for.
pub fn requested(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    let requests = claim.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?;
    size(requests.get("storage")?)
}

/// The size that a claim's status reports.
pub fn reported(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    size(claim.status.as_ref()?.capacity.as_ref()?.get("storage")?)
}

/// The size that is being made for a claim.
pub fn allocated(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    size(
        claim
            .status
            .as_ref()?
            .allocated_resources
            .as_ref()?
            .get("storage")?,
    )
}

/// Where the resize stands, in the word of `allocatedResourceStatuses`.
pub fn progress(claim: &PersistentVolumeClaim) -> Option<&str> {
    let statuses = claim
        .status
        .as_ref()?
        .allocated_resource_statuses
        .as_ref()?;
    statuses.get("storage").map(String::as_str)
}

/// Since when the present request cannot be given.
pub fn refused_since(claim: &PersistentVolumeClaim) -> Option<Time> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    let refused = conditions
        .iter()
        .find(|each| each.type_ == "ControllerResizeError")?;
    refused.last_transition_time.clone()
}

fn size(quantity: &Quantity) -> Option<Bytes> {
    quantity.0.parse().ok()
}

/// The claim is bound to a volume of `capacity`.
pub fn bound(claim: &PersistentVolumeClaim, capacity: Bytes) -> Value {
    let modes = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.access_modes.clone())
        .unwrap_or_default();
    json!({ "status": {
        "phase": "Bound",
        "accessModes": modes,
        "capacity": { "storage": capacity },
        "conditions": or_none(others(claim)),
    }})
}

/// The claim cannot be provisioned now.
pub fn held(claim: &PersistentVolumeClaim, hold: &Hold, now: &MicroTime) -> Value {
    let mut conditions = others(claim);
    conditions.push(condition(
        claim,
        HELD,
        hold.reason.code(),
        &hold.message,
        now,
    ));
    json!({ "status": { "conditions": conditions } })
}

/// A growth to `to` has begun.
pub fn growing(claim: &PersistentVolumeClaim, to: Bytes, now: &MicroTime) -> Value {
    resizing(
        claim,
        to,
        "ControllerResizeInProgress",
        &[("Resizing", "", "")],
        now,
    )
}

/// A growth to `to` cannot be done now.
pub fn infeasible(claim: &PersistentVolumeClaim, to: Bytes, hold: &Hold, now: &MicroTime) -> Value {
    let said = (
        "ControllerResizeError",
        hold.reason.code(),
        hold.message.as_str(),
    );
    resizing(
        claim,
        to,
        "ControllerResizeInfeasible",
        &[("Resizing", "", ""), said],
        now,
    )
}

/// The volume has grown; its filesystem will when it is mounted.
pub fn filesystem_pending(
    claim: &PersistentVolumeClaim,
    to: Bytes,
    hold: &Hold,
    now: &MicroTime,
) -> Value {
    let said = (
        "FileSystemResizePending",
        hold.reason.code(),
        hold.message.as_str(),
    );
    resizing(claim, to, "NodeResizePending", &[said], now)
}

/// The volume has grown; the node cannot finish.
pub fn node_held(claim: &PersistentVolumeClaim, to: Bytes, hold: &Hold, now: &MicroTime) -> Value {
    let said = ("NodeResizeError", hold.reason.code(), hold.message.as_str());
    resizing(claim, to, "NodeResizeInProgress", &[said], now)
}

/// The claim has `capacity`, measured by its consumer.
pub fn finished(claim: &PersistentVolumeClaim, capacity: Bytes) -> Value {
    json!({ "status": {
        "capacity": { "storage": capacity },
        "allocatedResources": { "storage": capacity },
        "allocatedResourceStatuses": null,
        "conditions": or_none(others(claim)),
    }})
}

/// Makes a status patch fail when the claim is not the one that the plan saw.
pub fn pinned(claim: &PersistentVolumeClaim, mut body: Value) -> Value {
    body["metadata"] = json!({ "resourceVersion": claim.metadata.resource_version });
    body
}

/// Whether merging `body` into the claim's status would change anything but times.
pub fn changes(claim: &PersistentVolumeClaim, body: &Value) -> bool {
    let Ok(status) = serde_json::to_value(&claim.status) else {
        return true;
    };
    let wanted = &body["status"];
    let Some(fields) = wanted.as_object() else {
        return false;
    };
    fields.iter().any(|(field, value)| match field.as_str() {
        "conditions" => !same_conditions(&status["conditions"], value),
        _ => &status[field] != value,
    })
}

fn same_conditions(old: &Value, new: &Value) -> bool {
    let strip = |list: &Value| -> Vec<Value> {
        let mut list = list.as_array().cloned().unwrap_or_default();
        for condition in &mut list {
            if let Some(fields) = condition.as_object_mut() {
                fields.retain(|field, value| {
                    !matches!(field.as_str(), "lastTransitionTime" | "lastProbeTime")
                        && !value.is_null()
                });
            }
        }
        list
    };
    strip(old) == strip(new)
}

fn resizing(
    claim: &PersistentVolumeClaim,
    to: Bytes,
    progress: &str,
    said: &[(&str, &str, &str)],
    now: &MicroTime,
) -> Value {
    let mut conditions = others(claim);
    conditions.extend(
        said.iter()
            .map(|(kind, reason, message)| condition(claim, kind, reason, message, now)),
    );
    json!({ "status": {
        "allocatedResources": { "storage": to },
        "allocatedResourceStatuses": { "storage": progress },
        "conditions": conditions,
    }})
}

/// A list, or the absence that Kubernetes prefers to an empty one.
fn or_none(
    conditions: Vec<PersistentVolumeClaimCondition>,
) -> Option<Vec<PersistentVolumeClaimCondition>> {
    Some(conditions).filter(|conditions| !conditions.is_empty())
}

/// The conditions that are not ours to touch.
fn others(claim: &PersistentVolumeClaim) -> Vec<PersistentVolumeClaimCondition> {
    let all = claim
        .status
        .as_ref()
        .and_then(|status| status.conditions.clone())
        .unwrap_or_default();
    all.into_iter()
        .filter(|each| !OUR_CONDITIONS.contains(&each.type_.as_str()))
        .collect()
}

/// One condition, true. Its time of transition stays as it was if it was true already; its words are
/// always the present ones.
fn condition(
    claim: &PersistentVolumeClaim,
    kind: &str,
    reason: &str,
    message: &str,
    now: &MicroTime,
) -> PersistentVolumeClaimCondition {
    let before = claim
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let since = before
        .and_then(|all| {
            all.iter()
                .find(|each| each.type_ == kind && each.status == "True")
        })
        .and_then(|each| each.last_transition_time.clone());
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    PersistentVolumeClaimCondition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        reason: text(reason),
        message: text(message),
        last_probe_time: None,
        last_transition_time: since.or(Some(Time(now.0))),
    }
}
