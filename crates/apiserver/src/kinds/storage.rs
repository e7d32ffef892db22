//! StorageClass and Lease.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::{Value, json};

use super::{Names, at, built_in, columns, immutable, text};
use crate::kind::{Change, FieldError, Kind};
use crate::meta;

const POLICIES: [&str; 2] = ["Delete", "Retain"];
const BINDING_MODES: [&str; 2] = ["Immediate", "WaitForFirstConsumer"];

pub(super) fn storage_class() -> Kind {
    let names = Names {
        plural: "storageclasses",
        singular: "storageclass",
        short: &["sc"],
    };
    Kind {
        default: |class| {
            let map = meta::as_map(class);
            for (field, value) in [
                ("reclaimPolicy", "Delete"),
                ("volumeBindingMode", "Immediate"),
            ] {
                let there = map.entry(field).or_insert(Value::Null);
                if there.is_null() {
                    *there = json!(value);
                }
            }
        },
        validate: check_class,
        ..built_in::<StorageClass>(names, columns::STORAGECLASS)
    }
}

fn check_class(change: Change<'_>) -> Vec<FieldError> {
    let class = change.new;
    let mut errors = Vec::new();
    if text(class, "/provisioner").is_empty() {
        errors.push(FieldError::required("provisioner", ""));
    }
    for (field, supported) in [
        ("reclaimPolicy", POLICIES),
        ("volumeBindingMode", BINDING_MODES),
    ] {
        let value = text(class, &format!("/{field}"));
        if !supported.contains(&value) {
            errors.push(FieldError::unsupported(field, &json!(value), &supported));
        }
    }
    for (field, why) in [
        ("parameters", "updates to parameters are forbidden."),
        ("provisioner", "updates to provisioner are forbidden."),
        ("reclaimPolicy", "updates to reclaimPolicy are forbidden."),
    ] {
        errors.extend(immutable(change, &format!("/{field}"), field, why));
    }
    if let Some(old) = change.old
        && at(old, "/volumeBindingMode") != at(class, "/volumeBindingMode")
    {
        let mode = at(class, "/volumeBindingMode").cloned().unwrap_or_default();
        errors.push(FieldError::invalid(
            "volumeBindingMode",
            &mode,
            "field is immutable",
        ));
    }
    errors
}

pub(super) fn lease() -> Kind {
    let names = Names {
        plural: "leases",
        singular: "lease",
        short: &[],
    };
    Kind {
        namespaced: true,
        validate: check_lease,
        ..built_in::<Lease>(names, columns::LEASE)
    }
}

fn check_lease(change: Change<'_>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if let Some(seconds) = at(change.new, "/spec/leaseDurationSeconds")
        && seconds.as_i64().is_some_and(|seconds| seconds <= 0)
    {
        errors.push(FieldError::invalid(
            "spec.leaseDurationSeconds",
            seconds,
            "must be greater than 0",
        ));
    }
    if let Some(count) = at(change.new, "/spec/leaseTransitions")
        && count.as_i64().is_some_and(|count| count < 0)
    {
        errors.push(FieldError::invalid(
            "spec.leaseTransitions",
            count,
            "must be greater than or equal to 0",
        ));
    }
    errors
}
