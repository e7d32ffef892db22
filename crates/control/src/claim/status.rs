//! The status of a claim, in Kubernetes' own words: phase, capacity, `allocatedResources` and the conditions that the
//! resize controllers of a cluster write.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use serde_json::{Value, json};
use trellis_api::quantity::QuantityError;
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
/// The condition of a bound claim that does not have the copies that are asked for, and why. It has nothing to do with
/// sizes, so reports about sizes leave it alone.
pub const COPIES: &str = "CopiesHeld";
/// The condition of a bound claim some of whose copies have a full pool.
pub const POOL_FULL: &str = "PoolFull";

/// The size that a claim asks for, as it was written.
pub fn requested_text(claim: &PersistentVolumeClaim) -> Option<&str> {
    let requests = claim.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?;
    requests.get("storage").map(|quantity| quantity.0.as_str())
}

/// The size that a claim asks for. None if it asks for none, or for something that is not a size. A size beyond all
/// sizes is the largest, as in Kubernetes.
pub fn requested(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    match requested_text(claim)?.parse() {
        Ok(size) => Some(size),
        Err(QuantityError::TooLarge { .. }) => Some(Bytes::MAX),
        Err(_) => None,
    }
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

/// What is said about a request that cannot be granted.
pub fn refusal(claim: &PersistentVolumeClaim) -> Option<&PersistentVolumeClaimCondition> {
    let mut conditions = claim.status.as_ref()?.conditions.as_ref()?.iter();
    conditions.find(|each| each.type_ == "ControllerResizeError" && each.status == "True")
}

/// Since when the present request cannot be granted.
pub fn refused_since(claim: &PersistentVolumeClaim) -> Option<Time> {
    refusal(claim)?.last_transition_time.clone()
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
        "conditions": exactly(&OUR_CONDITIONS, Vec::new()),
    }})
}

/// The claim cannot be provisioned now.
pub fn held(claim: &PersistentVolumeClaim, hold: &Hold, now: &MicroTime) -> Value {
    let held = condition(claim, HELD, hold.reason.code(), &hold.message, now);
    json!({ "status": { "conditions": exactly(&OUR_CONDITIONS, vec![held]) } })
}

/// What is wrong with the copies of a claim, one condition each, and which of these conditions are to go. None if the
/// claim already says all of that.
pub fn of_copies(
    claim: &PersistentVolumeClaim,
    said: &[(&str, Option<&Hold>)],
    now: &MicroTime,
) -> Option<Value> {
    let says = said.iter().filter_map(|(kind, hold)| {
        hold.map(|it| condition(claim, kind, it.reason.code(), &it.message, now))
    });
    let kinds: Vec<&str> = said.iter().map(|(kind, _)| *kind).collect();
    let body = json!({ "status": { "conditions": exactly(&kinds, says.collect()) } });
    changes(claim, &body).then_some(body)
}

/// Whether a condition says exactly this already.
pub fn says(claim: &PersistentVolumeClaim, kind: &str, hold: &Hold) -> bool {
    let conditions = claim.status.as_ref().and_then(|it| it.conditions.as_ref());
    let is_same = |each: &PersistentVolumeClaimCondition| {
        each.type_ == kind
            && each.reason.as_deref() == Some(hold.reason.code())
            && each.message.as_deref() == Some(&hold.message)
    };
    conditions.is_some_and(|all| all.iter().any(is_same))
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
pub fn finished(capacity: Bytes) -> Value {
    json!({ "status": {
        "capacity": { "storage": capacity },
        "allocatedResources": { "storage": capacity },
        "allocatedResourceStatuses": null,
        "conditions": exactly(&OUR_CONDITIONS, Vec::new()),
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

/// Whether a list of conditions already is what a patch of it wants, but for times.
fn same_conditions(old: &Value, patch: &Value) -> bool {
    let words = |condition: &Value| {
        let mut condition = condition.clone();
        if let Some(fields) = condition.as_object_mut() {
            fields.retain(|field, value| {
                !matches!(field.as_str(), "lastTransitionTime" | "lastProbeTime")
                    && !value.is_null()
            });
        }
        condition
    };
    let old: Vec<Value> = old.as_array().into_iter().flatten().map(words).collect();
    let mut patches = patch.as_array().into_iter().flatten();
    patches.all(|patch| {
        let has = old.iter().find(|each| each["type"] == patch["type"]);
        if patch[DIRECTIVE].is_null() {
            has == Some(&words(patch))
        } else {
            has.is_none()
        }
    })
}

fn resizing(
    claim: &PersistentVolumeClaim,
    to: Bytes,
    progress: &str,
    said: &[(&str, &str, &str)],
    now: &MicroTime,
) -> Value {
    let is_same_growth = allocated(claim) == Some(to);
    let said = said.iter().map(|(kind, reason, message)| {
        let mut said = condition(claim, kind, reason, message, now);
        if !is_same_growth {
            said.last_transition_time = Some(Time(now.0));
        }
        said
    });
    json!({ "status": {
        "allocatedResources": { "storage": to },
        "allocatedResourceStatuses": { "storage": progress },
        "conditions": exactly(&OUR_CONDITIONS, said.collect()),
    }})
}

/// The word of a strategic merge for what becomes of an element of a list.
const DIRECTIVE: &str = "$patch";

/// A patch after which the claim has these conditions of the given types, and no other of them. Conditions of other types
/// are somebody else's, and stay, also those that this process has not seen yet.
fn exactly(types: &[&str], says: Vec<PersistentVolumeClaimCondition>) -> Value {
    let is_said = |kind: &&&str| says.iter().any(|each| each.type_ == ***kind);
    let gone = types.iter().filter(|kind| !is_said(kind));
    let gone = gone.map(|kind| json!({ "type": kind, DIRECTIVE: "delete" }));
    let says = says.iter().map(|each| json!(each));
    says.chain(gone).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;
    use trellis_api::HoldReason;

    fn at(second: i64) -> MicroTime {
        MicroTime(Timestamp::from_second(second).expect("a valid time"))
    }

    fn hold(message: &str) -> Hold {
        Hold::new(HoldReason::NoSpaceInPool, message)
    }

    fn claim() -> PersistentVolumeClaim {
        let claim = json!({
            "metadata": { "name": "c", "namespace": "d", "resourceVersion": "7" },
            "spec": { "resources": { "requests": { "storage": "2Gi" } } },
            "status": { "phase": "Bound", "capacity": { "storage": "1Gi" }, "conditions": [
                { "type": "Foreign", "status": "True", "lastProbeTime": null },
            ]},
        });
        serde_json::from_value(claim).expect("a claim")
    }

    /// The claim after a status patch; no field of ours is patched deeper than these.
    fn patched(claim: &PersistentVolumeClaim, body: &Value) -> PersistentVolumeClaim {
        let mut value = json!(claim);
        for (field, new) in body["status"].as_object().expect("a status") {
            if field == "conditions" {
                crate::write::merge_conditions(&mut value["status"][field], new);
            } else {
                value["status"][field] = new.clone();
            }
        }
        serde_json::from_value(value).expect("a claim")
    }

    fn types(claim: &PersistentVolumeClaim) -> Vec<String> {
        let conditions = claim
            .status
            .as_ref()
            .and_then(|each| each.conditions.as_ref());
        let conditions = conditions.into_iter().flatten();
        conditions.map(|each| each.type_.clone()).collect()
    }

    // Fails if a patch that says what is said already is sent again, for ever.
    #[test]
    fn the_same_words_are_no_change_whenever_they_are_said() {
        type Body<'a> = &'a dyn Fn(&PersistentVolumeClaim, i64) -> Value;
        let bodies: [Body<'_>; 6] = [
            &|claim, second| growing(claim, Bytes::gib(2), &at(second)),
            &|claim, second| infeasible(claim, Bytes::gib(2), &hold("no"), &at(second)),
            &|claim, second| filesystem_pending(claim, Bytes::gib(2), &hold("no"), &at(second)),
            &|claim, second| node_held(claim, Bytes::gib(2), &hold("no"), &at(second)),
            &|claim, second| held(claim, &hold("no"), &at(second)),
            &|_, _| finished(Bytes::gib(2)),
        ];
        for (index, body) in bodies.iter().enumerate() {
            let first = body(&claim(), 1);
            assert!(changes(&claim(), &first), "body {index}");
            let after = patched(&claim(), &first);
            assert!(!changes(&after, &body(&after, 2)), "body {index}");
        }
    }

    // Fails if a hold whose words changed is not told anew.
    #[test]
    fn other_words_are_a_change() {
        let first = infeasible(&claim(), Bytes::gib(2), &hold("4Gi is free"), &at(1));
        let after = patched(&claim(), &first);
        let again = infeasible(&after, Bytes::gib(2), &hold("3Gi is free"), &at(2));
        assert!(changes(&after, &again));
        let larger = infeasible(&after, Bytes::gib(3), &hold("4Gi is free"), &at(2));
        assert!(changes(&after, &larger));
    }

    // Fails if the time of a condition moves although the growth is the same, or stays although it is another one.
    #[test]
    fn a_condition_keeps_the_time_since_which_its_growth_is_wanted() {
        let first = infeasible(&claim(), Bytes::gib(2), &hold("a"), &at(1));
        let after = patched(&claim(), &first);
        let again = infeasible(&after, Bytes::gib(2), &hold("b"), &at(9));
        let again = patched(&after, &again);
        assert_eq!(refused_since(&again), Some(Time(at(1).0)));
        let moved = infeasible(&after, Bytes::gib(3), &hold("b"), &at(9));
        let moved = patched(&after, &moved);
        assert_eq!(refused_since(&moved), Some(Time(at(9).0)));
    }

    // Fails if success leaves a condition of a resize behind, or takes one away that is not ours.
    #[test]
    fn success_removes_our_conditions_and_no_others() {
        let first = infeasible(&claim(), Bytes::gib(2), &hold("a"), &at(1));
        let refused = patched(&claim(), &first);
        assert_eq!(
            types(&refused),
            ["Foreign", "Resizing", "ControllerResizeError"]
        );
        assert_eq!(progress(&refused), Some("ControllerResizeInfeasible"));
        let done = patched(&refused, &finished(Bytes::gib(2)));
        assert_eq!(types(&done), ["Foreign"]);
        assert_eq!(progress(&done), None);
        assert_eq!(reported(&done), Some(Bytes::gib(2)));
        assert_eq!(allocated(&done), Some(Bytes::gib(2)));
    }

    // Fails if a claim that was held and then bound still says that it is held.
    #[test]
    fn a_binding_ends_the_hold() {
        let waiting = patched(&claim(), &held(&claim(), &hold("a"), &at(1)));
        assert_eq!(types(&waiting), ["Foreign", HELD]);
        let after = patched(&waiting, &bound(&waiting, Bytes::gib(2)));
        assert_eq!(types(&after), ["Foreign"]);
    }

    // Fails if a size is reported while it is only being made.
    #[test]
    fn only_success_reports_a_size() {
        let growing = patched(&claim(), &growing(&claim(), Bytes::gib(2), &at(1)));
        assert_eq!(reported(&growing), Some(Bytes::gib(1)));
        assert_eq!(allocated(&growing), Some(Bytes::gib(2)));
    }

    // Fails if a plan from an outdated claim could be stored.
    #[test]
    fn a_pinned_patch_names_the_version_that_was_seen() {
        let body = pinned(&claim(), finished(Bytes::gib(2)));
        assert_eq!(body["metadata"]["resourceVersion"], "7");
    }
}
