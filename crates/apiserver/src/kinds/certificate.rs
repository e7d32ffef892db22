//! CertificateSigningRequest: somebody asks for a certificate, somebody approves, somebody signs.
//!
//! As in Kubernetes: the spec never changes, and who asks stands in it, written by the server. What was approved or
//! denied comes through `/approval` and stays; the certificate comes through `/status`, once.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use serde_json::{Value, json};

use super::{Names, at, built_in, columns, text, texts};
use crate::kind::{Change, FieldError, Kind, Part};
use crate::meta;
use crate::users::User;

const APPROVED: &str = "Approved";
const DENIED: &str = "Denied";
const FAILED: &str = "Failed";

/// The shortest life that can be asked for, in seconds, as in Kubernetes.
const SECONDS_MIN: i64 = 600;

pub(super) fn signing_request() -> Kind {
    let names = Names {
        plural: "certificatesigningrequests",
        singular: "certificatesigningrequest",
        short: &["csr"],
    };
    Kind {
        status: true,
        approval: true,
        keep,
        sign,
        validate: check,
        selectable_fields: &["spec.signerName"],
        keyed_lists: &[("status.conditions", &["type"])],
        ..built_in::<CertificateSigningRequest>(names, columns::SIGNING_REQUEST)
    }
}

/// Who asks is what the server knows, and not what the request says.
fn sign(object: &mut Value, user: &User) {
    let spec = meta::child(meta::as_map(object), "spec");
    for field in ["uid", "extra"] {
        spec.remove(field);
    }
    spec.insert("username".to_owned(), json!(user.name()));
    spec.insert("groups".to_owned(), json!(user.groups()));
}

/// The spec stays. `/approval` writes conditions alone, and `/status` leaves the decision alone. Conditions get their
/// times.
fn keep(part: Part, old: &Value, new: &mut Value) {
    let spec = old.get("spec").cloned();
    let map = meta::as_map(new);
    if let Some(spec) = spec {
        map.insert("spec".to_owned(), spec);
    }
    let before = conditions(old);
    let mut after = conditions(new);
    match part {
        Part::Main => return,
        Part::Approval => {
            let mut status = old.get("status").cloned().unwrap_or(json!({}));
            set_times(&before, &mut after);
            meta::as_map(&mut status).insert("conditions".to_owned(), json!(after));
            meta::as_map(new).insert("status".to_owned(), status);
            return;
        }
        Part::Status => {}
    }
    for decided in &before {
        let kind = text(decided, "/type");
        let is_lost = !after.iter().any(|each| text(each, "/type") == kind);
        if is_lost && [APPROVED, DENIED].contains(&kind) {
            after.push(decided.clone());
        }
    }
    set_times(&before, &mut after);
    if !after.is_empty() {
        let status = meta::child(meta::as_map(new), "status");
        status.insert("conditions".to_owned(), json!(after));
    }
}

fn conditions(object: &Value) -> Vec<Value> {
    let list = at(object, "/status/conditions").and_then(Value::as_array);
    list.cloned().unwrap_or_default()
}

fn set_times(before: &[Value], after: &mut [Value]) {
    let now = meta::time(jiff::Timestamp::now());
    for condition in after {
        let known = before
            .iter()
            .find(|each| text(each, "/type") == text(condition, "/type"));
        let is_same =
            known.is_some_and(|known| text(known, "/status") == text(condition, "/status"));
        let map = meta::as_map(condition);
        let fill = |map: &mut serde_json::Map<String, Value>, field: &str, value: Value| {
            let there = map.entry(field.to_owned()).or_insert(Value::Null);
            if there.is_null() {
                *there = value;
            }
        };
        fill(map, "lastUpdateTime", json!(now));
        let since = known.and_then(|known| known.get("lastTransitionTime").cloned());
        fill(
            map,
            "lastTransitionTime",
            since.filter(|_| is_same).unwrap_or(json!(now)),
        );
    }
}

fn check(change: Change<'_>) -> Vec<FieldError> {
    let mut errors = match change.old {
        None => check_spec(change.new),
        Some(_) => Vec::new(),
    };
    errors.extend(check_conditions(change));
    let certificate = "/status/certificate";
    if let Some(before) = change.old.and_then(|old| at(old, certificate))
        && at(change.new, certificate) != Some(before)
    {
        let why = "updates may not set or modify the certificate once it is set";
        errors.push(FieldError::forbidden("status.certificate", why));
    }
    errors
}

fn check_spec(object: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let signer = text(object, "/spec/signerName");
    if signer.is_empty() {
        errors.push(FieldError::required("spec.signerName", ""));
    } else if signer
        .split_once('/')
        .is_none_or(|(domain, path)| domain.is_empty() || path.is_empty())
    {
        let why = "must be a fully qualified domain and path of the form 'example.com/signer-name'";
        errors.push(FieldError::invalid("spec.signerName", &json!(signer), why));
    }
    if text(object, "/spec/request").is_empty() {
        let why = "PEM block type must be CERTIFICATE REQUEST";
        errors.push(FieldError::invalid("spec.request", &json!(""), why));
    }
    if texts(object, "/spec/usages").is_empty() {
        errors.push(FieldError::required(
            "spec.usages",
            "usages must be provided",
        ));
    }
    if let Some(seconds) = at(object, "/spec/expirationSeconds")
        && seconds
            .as_i64()
            .is_some_and(|seconds| seconds < SECONDS_MIN)
    {
        errors.push(FieldError::invalid(
            "spec.expirationSeconds",
            seconds,
            "may not specify a duration less than 600 seconds (10 minutes)",
        ));
    }
    errors
}

/// A decision is one of two, is never taken back, and is made through `/approval` alone.
fn check_conditions(change: Change<'_>) -> Vec<FieldError> {
    const FIELD: &str = "status.conditions";
    let after = conditions(change.new);
    let before = change.old.map(conditions).unwrap_or_default();
    let has = |list: &[Value], kind: &str| list.iter().any(|each| text(each, "/type") == kind);
    let mut errors = Vec::new();
    for (index, condition) in after.iter().enumerate() {
        let kind = text(condition, "/type");
        let field = |name: &str| format!("{FIELD}[{index}].{name}");
        if kind.is_empty() {
            errors.push(FieldError::required(&field("type"), ""));
        }
        let status = text(condition, "/status");
        if [APPROVED, DENIED, FAILED].contains(&kind) && status != "True" {
            let supported = ["True"];
            errors.push(FieldError::unsupported(
                &field("status"),
                &json!(status),
                &supported,
            ));
        }
        if has(&after[..index], kind) {
            errors.push(FieldError {
                reason: "FieldValueDuplicate",
                field: field("type"),
                message: format!("Duplicate value: {}", json!(kind)),
            });
        }
    }
    if has(&after, APPROVED) && has(&after, DENIED) {
        let why = "Approved and Denied conditions are mutually exclusive";
        errors.push(FieldError::invalid(FIELD, &json!(DENIED), why));
    }
    for kind in [APPROVED, DENIED, FAILED] {
        if has(&before, kind) && !has(&after, kind) {
            let why = format!("updates may not remove a condition of type {kind:?}");
            errors.push(FieldError::forbidden(FIELD, &why));
        }
        let decides = kind != FAILED && change.part != Part::Approval;
        if decides && change.old.is_some() && has(&after, kind) && !has(&before, kind) {
            let why = format!("updates may not add a condition of type {kind:?}");
            errors.push(FieldError::forbidden(FIELD, &why));
        }
    }
    errors
}
