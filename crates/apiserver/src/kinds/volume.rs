//! PersistentVolume: what a claim is bound to.

use k8s_openapi::api::core::v1::PersistentVolume;
use serde_json::{Value, json};

use super::{
    Names, at, built_in, check_access_modes, check_volume_mode, columns, fill, immutable, quantity,
    text, texts, typed,
};
use crate::kind::{Change, FieldError, Kind, Part};
use crate::names;

const PROTECTION: &str = "kubernetes.io/pv-protection";
const POLICIES: [&str; 3] = ["Delete", "Recycle", "Retain"];
/// The ways in which a volume can be reached, one of which it must have.
const SOURCES: [&str; 22] = [
    "awsElasticBlockStore",
    "azureDisk",
    "azureFile",
    "cephfs",
    "cinder",
    "csi",
    "fc",
    "flexVolume",
    "flocker",
    "gcePersistentDisk",
    "glusterfs",
    "hostPath",
    "iscsi",
    "local",
    "nfs",
    "photonPersistentDisk",
    "portworxVolume",
    "quobyte",
    "rbd",
    "scaleIO",
    "storageos",
    "vsphereVolume",
];

pub(super) fn row() -> Kind {
    let names = Names {
        plural: "persistentvolumes",
        singular: "persistentvolume",
        short: &["pv"],
    };
    Kind {
        status: true,
        normalise: |value| {
            let mut volume = typed::<PersistentVolume>(value)?;
            quantity::canonicalise(&mut volume, &["/spec/capacity"])?;
            Ok(volume)
        },
        default: |volume| {
            fill(volume, "spec", "persistentVolumeReclaimPolicy", "Retain");
            fill(volume, "spec", "volumeMode", "Filesystem");
            fill(volume, "status", "phase", "Pending");
        },
        admit: |volume, _| super::core::protect(volume, PROTECTION),
        validate,
        ..built_in::<PersistentVolume>(names, columns::PV)
    }
}

fn validate(change: Change<'_>) -> Vec<FieldError> {
    let volume = change.new;
    if change.part != Part::Main {
        return Vec::new();
    }
    let mut errors = Vec::new();
    if texts(volume, "/spec/accessModes").is_empty() {
        errors.push(FieldError::required("spec.accessModes", ""));
    }
    errors.extend(check_access_modes(volume));
    errors.extend(check_capacity(volume));
    let policy = text(volume, "/spec/persistentVolumeReclaimPolicy");
    if !POLICIES.contains(&policy) {
        errors.push(FieldError::unsupported(
            "spec.persistentVolumeReclaimPolicy",
            &json!(policy),
            &POLICIES,
        ));
    }
    errors.extend(check_source(volume));
    errors.extend(check_volume_mode(volume));
    if let Some(old) = change.old {
        if source(old) != source(volume) {
            errors.push(FieldError::forbidden(
                "spec.persistentvolumesource",
                "spec.persistentvolumesource is immutable after creation",
            ));
        }
        errors.extend(immutable(
            change,
            "/spec/volumeMode",
            "spec.volumeMode",
            "field is immutable",
        ));
    }
    errors
}

fn check_capacity(volume: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let capacity = at(volume, "/spec/capacity").cloned().unwrap_or_default();
    let keys: Vec<&String> = capacity
        .as_object()
        .into_iter()
        .flat_map(|map| map.keys())
        .collect();
    if keys.is_empty() {
        errors.push(FieldError::required("spec.capacity", ""));
    }
    if keys != ["storage"] {
        errors.push(FieldError::unsupported(
            "spec.capacity",
            &capacity,
            &["storage"],
        ));
    }
    if quantity::nanos(volume, "/spec/capacity/storage").is_some_and(|nanos| nanos <= 0) {
        let value = at(volume, "/spec/capacity/storage")
            .cloned()
            .unwrap_or_default();
        errors.push(FieldError::invalid(
            "spec.capacity[storage]",
            &value,
            "must be greater than zero",
        ));
    }
    errors
}

fn source(volume: &Value) -> Vec<(&'static str, &Value)> {
    let find = |name: &&'static str| Some((*name, at(volume, &format!("/spec/{name}"))?));
    SOURCES.iter().filter_map(find).collect()
}

fn check_source(volume: &Value) -> Vec<FieldError> {
    let sources = source(volume);
    let mut errors = Vec::new();
    if sources.is_empty() {
        errors.push(FieldError::required("spec", "must specify a volume type"));
    }
    for (name, _) in sources.iter().skip(1) {
        let field = format!("spec.{name}");
        errors.push(FieldError::forbidden(
            &field,
            "may not specify more than 1 volume type",
        ));
    }
    if at(volume, "/spec/csi").is_some() {
        let driver = text(volume, "/spec/csi/driver");
        if driver.is_empty() {
            errors.push(FieldError::required("spec.csi.driver", ""));
        }
        for why in names::subdomain(driver) {
            errors.push(FieldError::invalid("spec.csi.driver", &json!(driver), &why));
        }
        if text(volume, "/spec/csi/volumeHandle").is_empty() {
            errors.push(FieldError::required("spec.csi.volumeHandle", ""));
        }
    }
    errors
}
