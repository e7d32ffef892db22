//! PersistentVolumeClaim: what a user asks for.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::{
    Names, at, built_in, check_access_modes, check_volume_mode, columns, fill, quantity, text,
    texts, typed,
};
use crate::kind::{Change, FieldError, Kind, Part, Peers};
use crate::{meta, names};

const REQUEST: &str = "/spec/resources/requests/storage";
const PROTECTION: &str = "kubernetes.io/pvc-protection";
const DEFAULT_CLASS: &str = "/metadata/annotations/storageclass.kubernetes.io~1is-default-class";
const CLASS_ANNOTATION: &str = "/metadata/annotations/volume.beta.kubernetes.io~1storage-class";

pub(super) fn row() -> Kind {
    let names = Names {
        plural: "persistentvolumeclaims",
        singular: "persistentvolumeclaim",
        short: &["pvc"],
    };
    Kind {
        namespaced: true,
        status: true,
        normalise: |value| {
            let mut claim = typed::<PersistentVolumeClaim>(value)?;
            quantity::canonicalise(
                &mut claim,
                &[
                    "/spec/resources/requests",
                    "/spec/resources/limits",
                    "/status/capacity",
                    "/status/allocatedResources",
                ],
            )?;
            Ok(claim)
        },
        default: |claim| {
            fill(claim, "spec", "volumeMode", "Filesystem");
            fill(claim, "status", "phase", "Pending");
        },
        admit,
        validate,
        forbid,
        keyed_lists: &[("status.conditions", &["type"])],
        atomic_maps: &["spec.selector", "spec.dataSource"],
        ..built_in::<PersistentVolumeClaim>(names, columns::PVC)
    }
}

/// The default class, and the finalizer that keeps a claim while it is in use.
fn admit(claim: &mut Value, peers: &Peers<'_>) {
    if at(claim, "/spec/storageClassName").is_none() && at(claim, CLASS_ANNOTATION).is_none() {
        let mut classes = peers.list("storageclasses");
        classes.retain(|class| text(class, DEFAULT_CLASS) == "true");
        // The newest default wins, and the first by name among those of one second.
        classes.sort_by(|a, b| {
            let time = |class: &Value| meta::text(class, "creationTimestamp").to_owned();
            time(b)
                .cmp(&time(a))
                .then_with(|| meta::text(a, "name").cmp(meta::text(b, "name")))
        });
        if let Some(class) = classes.first() {
            fill(claim, "spec", "storageClassName", meta::text(class, "name"));
        }
    }
    super::core::protect(claim, PROTECTION);
}

fn validate(change: Change<'_>) -> Vec<FieldError> {
    let claim = change.new;
    if change.part != Part::Main {
        return Vec::new();
    }
    let mut errors = Vec::new();
    if texts(claim, "/spec/accessModes").is_empty() {
        errors.push(FieldError::required(
            "spec.accessModes",
            "at least 1 access mode is required",
        ));
    }
    errors.extend(check_access_modes(claim));
    match quantity::nanos(claim, REQUEST) {
        None => errors.push(FieldError::required("spec.resources[storage]", "")),
        Some(nanos) if nanos <= 0 => {
            let value = at(claim, REQUEST).cloned().unwrap_or_default();
            errors.push(FieldError::invalid(
                "spec.resources[storage]",
                &value,
                "must be greater than zero",
            ));
        }
        Some(_) => {}
    }
    let class = text(claim, "/spec/storageClassName");
    if !class.is_empty() {
        for why in names::subdomain(class) {
            errors.push(FieldError::invalid(
                "spec.storageClassName",
                &json!(class),
                &why,
            ));
        }
    }
    errors.extend(check_volume_mode(claim));
    for field in ["dataSource", "dataSourceRef"] {
        errors.extend(check_source(claim, field));
    }
    errors.extend(check_selector(claim));
    if let Some(old) = change.old
        && errors.is_empty()
    {
        errors.extend(check_update(old, claim));
    }
    errors
}

/// What a claim shall be filled from must be named in full.
fn check_source(claim: &Value, field: &str) -> Vec<FieldError> {
    let Some(source) = at(claim, &format!("/spec/{field}")) else {
        return Vec::new();
    };
    let path = format!("spec.{field}");
    let mut errors: Vec<FieldError> = ["name", "kind"]
        .into_iter()
        .filter(|part| text(source, &format!("/{part}")).is_empty())
        .map(|part| FieldError::required(&format!("{path}.{part}"), ""))
        .collect();
    let (group, kind) = (text(source, "/apiGroup"), text(source, "/kind"));
    if group.is_empty() && kind != "PersistentVolumeClaim" {
        errors.push(FieldError::invalid(
            &path,
            &json!(kind),
            "must be 'PersistentVolumeClaim' when referencing the default apiGroup",
        ));
    }
    if !group.is_empty() {
        let why = names::subdomain(group).into_iter();
        errors.extend(
            why.map(|why| FieldError::invalid(&format!("{path}.apiGroup"), &json!(group), &why)),
        );
    }
    errors
}

/// A selector of volumes must be one that a volume can meet.
fn check_selector(claim: &Value) -> Vec<FieldError> {
    const OPERATORS: [&str; 4] = ["DoesNotExist", "Exists", "In", "NotIn"];
    let expressions = at(claim, "/spec/selector/matchExpressions").and_then(Value::as_array);
    let mut errors = Vec::new();
    for (index, expression) in expressions.into_iter().flatten().enumerate() {
        let path = format!("spec.selector.matchExpressions[{index}]");
        let operator = text(expression, "/operator");
        let values = texts(expression, "/values");
        let field = format!("{path}.values");
        match operator {
            "In" | "NotIn" if values.is_empty() => errors.push(FieldError::required(
                &field,
                "must be specified when `operator` is 'In' or 'NotIn'",
            )),
            "Exists" | "DoesNotExist" if !values.is_empty() => errors.push(FieldError::forbidden(
                &field,
                "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
            )),
            known if OPERATORS.contains(&known) => {}
            unknown => errors.push(FieldError::invalid(
                &format!("{path}.operator"),
                &json!(unknown),
                "not a valid selector operator",
            )),
        }
    }
    errors
}

fn check_update(old: &Value, new: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if mutable_removed(old, old) != mutable_removed(new, old) {
        errors.push(FieldError::forbidden(
            "spec",
            "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims",
        ));
    }
    let request = |claim: &Value| quantity::nanos(claim, REQUEST).unwrap_or(0);
    let capacity = quantity::nanos(old, "/status/capacity/storage").unwrap_or(0);
    if request(new) < request(old) && request(new) <= capacity {
        errors.push(FieldError::forbidden(
            "spec.resources.requests.storage",
            "field can not be less than status.capacity",
        ));
    }
    let mode = at(new, "/spec/volumeMode");
    if at(old, "/spec/volumeMode") != mode {
        let mode = mode.cloned().unwrap_or_default();
        errors.push(FieldError::invalid(
            "volumeMode",
            &mode,
            "field is immutable",
        ));
    }
    errors
}

/// The spec without what may change in the state that `old` is in.
fn mutable_removed(claim: &Value, old: &Value) -> Value {
    let mut spec = claim.get("spec").cloned().unwrap_or_default();
    let map = meta::as_map(&mut spec);
    map.remove("volumeAttributesClassName");
    if text(old, "/spec/volumeName").is_empty() {
        map.remove("volumeName");
        if at(old, "/spec/storageClassName").is_none() {
            map.remove("storageClassName");
        }
    }
    if text(old, "/status/phase") == "Bound"
        && let Some(Value::Object(requests)) = spec.pointer_mut("/resources/requests")
    {
        requests.remove("storage");
    }
    spec
}

/// Growth is for classes that allow it.
fn forbid(change: Change<'_>) -> Option<String> {
    let old = change.old?;
    if change.part != Part::Main
        || quantity::nanos(change.new, REQUEST)? <= quantity::nanos(old, REQUEST)?
    {
        return None;
    }
    if text(old, "/status/phase") != "Bound" {
        return Some("Only bound persistent volume claims can be expanded".to_owned());
    }
    let class = match text(change.new, CLASS_ANNOTATION) {
        "" => text(change.new, "/spec/storageClassName"),
        class => class,
    };
    let class = (change.lookup)("storageclasses", "", class);
    let expandable =
        class.is_some_and(|class| at(&class, "/allowVolumeExpansion") == Some(&json!(true)));
    (!expandable).then(|| {
        "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize"
            .to_owned()
    })
}
