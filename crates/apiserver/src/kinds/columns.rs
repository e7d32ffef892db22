//! What `kubectl get` prints for each kind.
//!
//! Kubernetes' own kinds print as in a cluster of version 1.34: the same headings, the same cells, the same columns
//! behind `-o wide`. The columns of pods and of our own kinds have files of their own.

mod pod;
mod read;
mod trellis;

pub(crate) use pod::POD;
pub(crate) use trellis::{ATTACHMENT, POOL, REPLICA, TARGET, VOLUME};

use jiff::Timestamp;
use read::{age, count, item, or, since, text};
use serde_json::{Value, json};

use crate::kind::Column;

/// What stands in a cell whose optional field is absent.
const UNSET: &str = "<unset>";
const NONE: &str = "<none>";
const UNKNOWN: &str = "<unknown>";

const NAME: Column = column(
    "Name",
    0,
    "Name, unique among the objects of this kind in its namespace.",
    name,
);
const AGE: Column = column("Age", 0, "Time since the object was created.", age);

pub(crate) static NAMESPACE: &[Column] = &[
    NAME,
    column("Status", 0, "The status of the namespace", |o, _| {
        text(o, "/status/phase")
    }),
    AGE,
];

pub(crate) static CONFIGMAP: &[Column] = &[
    NAME,
    column("Data", 0, "Number of entries.", |o, _| {
        json!(count(o, "/data") + count(o, "/binaryData"))
    }),
    AGE,
];

pub(crate) static SECRET: &[Column] = &[
    NAME,
    column("Type", 0, "What the secret is meant for.", |o, _| {
        text(o, "/type")
    }),
    column("Data", 0, "Number of entries.", |o, _| {
        json!(count(o, "/data"))
    }),
    AGE,
];

pub(crate) static LEASE: &[Column] = &[
    NAME,
    column("Holder", 0, "Who holds the lease now.", |o, _| {
        text(o, "/spec/holderIdentity")
    }),
    AGE,
];

pub(crate) static SIGNING_REQUEST: &[Column] = &[
    NAME,
    AGE,
    column("SignerName", 0, "Who is to sign.", |o, _| {
        text(o, "/spec/signerName")
    }),
    column("Requestor", 0, "Who asks.", |o, _| {
        text(o, "/spec/username")
    }),
    column(
        "RequestedDuration",
        0,
        "How long the certificate is to be valid.",
        |o, _| match item(o, "/spec/expirationSeconds").and_then(Value::as_i64) {
            Some(seconds) => json!(read::human_duration(seconds)),
            None => json!(NONE),
        },
    ),
    column("Condition", 0, "What has become of the request.", |o, _| {
        json!(super::certificate::condition(o))
    }),
];

pub(crate) static NODE: &[Column] = &[
    NAME,
    column("Status", 0, "The status of the node", node_status),
    column("Roles", 0, "The roles of the node", node_roles),
    AGE,
    column("Version", 0, "Version that the node reports.", |o, _| {
        text(o, "/status/nodeInfo/kubeletVersion")
    }),
    column("Internal-IP", 1, "First internal address.", |o, _| {
        node_address(o, "InternalIP")
    }),
    column("External-IP", 1, "First external address.", |o, _| {
        node_address(o, "ExternalIP")
    }),
    column(
        "OS-Image",
        1,
        "Operating system that the node reports.",
        |o, _| or(o, "/status/nodeInfo/osImage", UNKNOWN),
    ),
    column(
        "Kernel-Version",
        1,
        "Kernel that the node reports.",
        |o, _| or(o, "/status/nodeInfo/kernelVersion", UNKNOWN),
    ),
    column(
        "Container-Runtime",
        1,
        "Container runtime that the node reports.",
        |o, _| or(o, "/status/nodeInfo/containerRuntimeVersion", UNKNOWN),
    ),
];

pub(crate) static PVC: &[Column] = &[
    NAME,
    column("Status", 0, "Phase of the claim.", phase),
    column("Volume", 0, "Volume that the claim is bound to.", |o, _| {
        text(o, "/spec/volumeName")
    }),
    column(
        "Capacity",
        0,
        "Size of the volume that the claim is bound to.",
        claim_capacity,
    ),
    column(
        "Access Modes",
        0,
        "Access modes of the volume that the claim is bound to.",
        claim_access_modes,
    ),
    column("StorageClass", 0, "StorageClass of the pvc", |o, _| {
        storage_class(o)
    }),
    column(
        "VolumeAttributesClass",
        0,
        "VolumeAttributesClass of the pvc",
        attributes_class,
    ),
    AGE,
    column(
        "VolumeMode",
        1,
        "Whether the claim is a filesystem or a block device.",
        volume_mode,
    ),
];

pub(crate) static PV: &[Column] = &[
    NAME,
    column("Capacity", 0, "Size of the volume.", |o, _| {
        or(o, "/spec/capacity/storage", "0")
    }),
    column(
        "Access Modes",
        0,
        "Ways in which the volume can be mounted.",
        |o, _| access_modes(o, "/spec/accessModes"),
    ),
    column(
        "Reclaim Policy",
        0,
        "What happens to the volume when its claim is deleted.",
        |o, _| text(o, "/spec/persistentVolumeReclaimPolicy"),
    ),
    column("Status", 0, "Phase of the volume.", phase),
    column(
        "Claim",
        0,
        "Claim that the volume is bound to.",
        volume_claim,
    ),
    column("StorageClass", 0, "StorageClass of the pv", |o, _| {
        storage_class(o)
    }),
    column(
        "VolumeAttributesClass",
        0,
        "VolumeAttributesClass of the pv",
        attributes_class,
    ),
    column(
        "Reason",
        0,
        "Why the volume is in its phase, in one word.",
        |o, _| text(o, "/status/reason"),
    ),
    AGE,
    column(
        "VolumeMode",
        1,
        "Whether the volume is a filesystem or a block device.",
        volume_mode,
    ),
];

pub(crate) static STORAGECLASS: &[Column] = &[
    column(
        "Name",
        0,
        "Name of the class; the default class is marked.",
        storage_class_name,
    ),
    column(
        "Provisioner",
        0,
        "Who makes the volumes of the class.",
        |o, _| text(o, "/provisioner"),
    ),
    column(
        "ReclaimPolicy",
        0,
        "What happens to a volume when its claim is deleted.",
        |o, _| or(o, "/reclaimPolicy", "Delete"),
    ),
    column(
        "VolumeBindingMode",
        0,
        "When a volume is made for a claim.",
        |o, _| or(o, "/volumeBindingMode", "Immediate"),
    ),
    column(
        "AllowVolumeExpansion",
        0,
        "Whether claims of the class may grow.",
        |o, _| {
            json!(
                item(o, "/allowVolumeExpansion")
                    .and_then(Value::as_bool)
                    .unwrap_or(false)
            )
        },
    ),
    AGE,
];

pub(crate) static EVENT: &[Column] = &[
    column(
        "Last Seen",
        0,
        "Time since the event was last seen.",
        event_last_seen,
    ),
    column("Type", 0, "Normal or Warning.", |o, _| text(o, "/type")),
    column("Reason", 0, "What happened, in one word.", |o, _| {
        text(o, "/reason")
    }),
    column("Object", 0, "Object that the event is about.", event_object),
    column(
        "Subobject",
        1,
        "Part of the object that the event is about.",
        |o, _| text(o, "/involvedObject/fieldPath"),
    ),
    column("Source", 1, "Who reported the event.", event_source),
    column("Message", 0, "What happened, in a sentence.", |o, _| {
        json!(str_of(o, "/message").trim())
    }),
    column(
        "First Seen",
        1,
        "Time since the event was first seen.",
        event_first_seen,
    ),
    column("Count", 1, "How often the event was seen.", event_count),
    column("Name", 1, "Name of the event.", name),
];

const fn column(
    name: &'static str,
    priority: u8,
    description: &'static str,
    cell: fn(&Value, Timestamp) -> Value,
) -> Column {
    Column {
        name,
        r#type: "string",
        priority,
        description,
        cell,
    }
}

fn name(object: &Value, _now: Timestamp) -> Value {
    text(object, "/metadata/name")
}

/// The string at a path, or an empty one.
fn str_of<'a>(object: &'a Value, path: &str) -> &'a str {
    item(object, path)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn phase(object: &Value, _now: Timestamp) -> Value {
    if item(object, "/metadata/deletionTimestamp").is_some() {
        return json!("Terminating");
    }
    text(object, "/status/phase")
}

fn is_bound_to_a_volume(claim: &Value) -> bool {
    !str_of(claim, "/spec/volumeName").is_empty()
}

fn claim_capacity(claim: &Value, _now: Timestamp) -> Value {
    if is_bound_to_a_volume(claim) {
        or(claim, "/status/capacity/storage", "0")
    } else {
        json!("")
    }
}

fn claim_access_modes(claim: &Value, _now: Timestamp) -> Value {
    if is_bound_to_a_volume(claim) {
        access_modes(claim, "/status/accessModes")
    } else {
        json!("")
    }
}

/// Access modes in the order and in the abbreviations in which kubectl's users know them.
fn access_modes(object: &Value, path: &str) -> Value {
    const SHORT: [(&str, &str); 4] = [
        ("ReadWriteOnce", "RWO"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteMany", "RWX"),
        ("ReadWriteOncePod", "RWOP"),
    ];
    let modes = item(object, path)
        .and_then(Value::as_array)
        .map_or(&[][..], Vec::as_slice);
    let short: Vec<&str> = SHORT
        .iter()
        .filter(|(long, _)| modes.iter().any(|mode| mode == long))
        .map(|(_, short)| *short)
        .collect();
    json!(short.join(","))
}

/// The class of a claim or a volume; the deprecated annotation wins over the field, as in a cluster.
fn storage_class(object: &Value) -> Value {
    item(
        object,
        "/metadata/annotations/volume.beta.kubernetes.io~1storage-class",
    )
    .cloned()
    .unwrap_or_else(|| text(object, "/spec/storageClassName"))
}

fn attributes_class(object: &Value, _now: Timestamp) -> Value {
    item(object, "/spec/volumeAttributesClassName")
        .cloned()
        .unwrap_or_else(|| json!(UNSET))
}

fn volume_mode(object: &Value, _now: Timestamp) -> Value {
    item(object, "/spec/volumeMode")
        .cloned()
        .unwrap_or_else(|| json!(UNSET))
}

fn volume_claim(volume: &Value, _now: Timestamp) -> Value {
    match item(volume, "/spec/claimRef") {
        Some(claim) => json!(format!(
            "{}/{}",
            str_of(claim, "/namespace"),
            str_of(claim, "/name")
        )),
        None => json!(""),
    }
}

fn storage_class_name(class: &Value, _now: Timestamp) -> Value {
    const MARKS: [&str; 2] = [
        "/metadata/annotations/storageclass.kubernetes.io~1is-default-class",
        "/metadata/annotations/storageclass.beta.kubernetes.io~1is-default-class",
    ];
    let suffix = if MARKS.iter().any(|mark| str_of(class, mark) == "true") {
        " (default)"
    } else {
        ""
    };
    json!(format!("{}{suffix}", str_of(class, "/metadata/name")))
}

fn node_status(node: &Value, _now: Timestamp) -> Value {
    let ready = match read::condition(node, "Ready") {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    };
    let cordoned = item(node, "/spec/unschedulable").and_then(Value::as_bool) == Some(true);
    json!(format!(
        "{ready}{}",
        if cordoned { ",SchedulingDisabled" } else { "" }
    ))
}

fn node_roles(node: &Value, _now: Timestamp) -> Value {
    let labels = item(node, "/metadata/labels").and_then(Value::as_object);
    let mut roles: Vec<&str> = labels
        .into_iter()
        .flatten()
        .filter_map(
            |(label, value)| match label.strip_prefix("node-role.kubernetes.io/") {
                Some(role) => Some(role),
                None if label == "kubernetes.io/role" => value.as_str(),
                None => None,
            },
        )
        .filter(|role| !role.is_empty())
        .collect();
    roles.sort_unstable();
    roles.dedup();
    json!(if roles.is_empty() {
        NONE.to_owned()
    } else {
        roles.join(",")
    })
}

fn node_address(node: &Value, r#type: &str) -> Value {
    let addresses = item(node, "/status/addresses").and_then(Value::as_array);
    addresses
        .into_iter()
        .flatten()
        .find(|address| str_of(address, "/type") == r#type)
        .map_or_else(|| json!(NONE), |address| text(address, "/address"))
}

fn event_first_seen(event: &Value, now: Timestamp) -> Value {
    let time = item(event, "/firstTimestamp").or_else(|| item(event, "/eventTime"));
    json!(since(time, now))
}

fn event_last_seen(event: &Value, now: Timestamp) -> Value {
    let time = item(event, "/series/lastObservedTime").or_else(|| item(event, "/lastTimestamp"));
    if time.is_some() {
        json!(since(time, now))
    } else {
        event_first_seen(event, now)
    }
}

/// An event without a count was seen once: the newer API sets none for single events.
fn event_count(event: &Value, _now: Timestamp) -> Value {
    let count = item(event, "/series/count")
        .or_else(|| item(event, "/count"))
        .and_then(Value::as_i64);
    json!(count.filter(|count| *count != 0).unwrap_or(1))
}

fn event_object(event: &Value, _now: Timestamp) -> Value {
    let kind = str_of(event, "/involvedObject/kind").to_lowercase();
    match str_of(event, "/involvedObject/name") {
        "" => json!(kind),
        name => json!(format!("{kind}/{name}")),
    }
}

fn event_source(event: &Value, _now: Timestamp) -> Value {
    let either = |old, new| match str_of(event, old) {
        "" => str_of(event, new),
        found => found,
    };
    let component = either("/source/component", "/reportingComponent");
    match either("/source/host", "/reportingInstance") {
        "" => json!(component),
        instance => json!(format!("{component}, {instance}")),
    }
}
