//! CertificateSigningRequest: how a node asks for a certificate.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use serde_json::{Value, json};

use super::{Names, at, built_in, columns, text};
use crate::kind::{Change, FieldError, Kind, Peers};
use crate::meta;

pub(super) fn signing_request() -> Kind {
    let names = Names {
        plural: "certificatesigningrequests",
        singular: "certificatesigningrequest",
        short: &["csr"],
    };
    Kind {
        status: true,
        admit: name_the_asker,
        validate: check,
        selectable_fields: &["spec.signerName"],
        keyed_lists: &[("status.conditions", &["type"])],
        ..built_in::<CertificateSigningRequest>(names, columns::SIGNING_REQUEST)
    }
}

/// Who asks is what the server knows, not what the request says.
fn name_the_asker(request: &mut Value, peers: &Peers<'_>) {
    let spec = meta::child(meta::as_map(request), "spec");
    for field in ["uid", "extra"] {
        spec.remove(field);
    }
    spec.insert("username".to_owned(), json!(peers.user.name()));
    spec.insert("groups".to_owned(), json!(peers.user.groups()));
}

fn check(change: Change<'_>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for field in ["request", "signerName"] {
        if text(change.new, &format!("/spec/{field}")).is_empty() {
            errors.push(FieldError::required(&format!("spec.{field}"), ""));
        }
    }
    if at(change.new, "/spec/usages").is_none() {
        errors.push(FieldError::required("spec.usages", ""));
    }
    if let Some(old) = change.old
        && at(old, "/spec") != at(change.new, "/spec")
    {
        let spec = at(change.new, "/spec").unwrap_or(&Value::Null);
        errors.push(FieldError::invalid("spec", spec, "field is immutable"));
    }
    errors
}

/// What has become of a request, in kubectl's words.
pub(super) fn condition(request: &Value) -> String {
    let conditions = at(request, "/status/conditions").and_then(Value::as_array);
    let has = |kind: &str| {
        let mut all = conditions.into_iter().flatten();
        all.any(|each| text(each, "/type") == kind)
    };
    let mut words: Vec<&str> = ["Approved", "Denied", "Failed"]
        .into_iter()
        .filter(|kind| has(kind))
        .collect();
    if words.is_empty() {
        words.push("Pending");
    }
    if !text(request, "/status/certificate").is_empty() {
        words.push("Issued");
    }
    words.join(",")
}
