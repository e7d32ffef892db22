//! Pod, as far as one can be stored without a kubelet.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{Names, at, built_in, columns, fill, quantity, text, typed};
use crate::kind::{Change, FieldError, Kind, Origin};
use crate::names;

pub(super) fn row() -> Kind {
    let names = Names {
        plural: "pods",
        singular: "pod",
        short: &["po"],
    };
    Kind {
        namespaced: true,
        status: true,
        categories: &["all"],
        normalise: |value| {
            let mut pod = typed::<Pod>(value)?;
            let count = |list: &str| at(&pod, list).and_then(Value::as_array).map_or(0, Vec::len);
            let mut maps = Vec::new();
            for list in ["/spec/containers", "/spec/initContainers"] {
                for index in 0..count(list) {
                    maps.push(format!("{list}/{index}/resources/requests"));
                    maps.push(format!("{list}/{index}/resources/limits"));
                }
            }
            let maps: Vec<&str> = maps.iter().map(String::as_str).collect();
            quantity::canonicalise(&mut pod, &maps)?;
            Ok(pod)
        },
        default: fill_in,
        validate,
        selectable_fields: &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ],
        keyed_lists: &[
            ("spec.containers", &["name"]),
            ("spec.containers.env", &["name"]),
            ("spec.containers.ports", &["containerPort", "protocol"]),
            ("spec.containers.volumeMounts", &["mountPath"]),
            ("spec.containers.volumeDevices", &["devicePath"]),
            ("spec.initContainers", &["name"]),
            ("spec.initContainers.env", &["name"]),
            ("spec.initContainers.ports", &["containerPort", "protocol"]),
            ("spec.initContainers.volumeMounts", &["mountPath"]),
            ("spec.initContainers.volumeDevices", &["devicePath"]),
            ("spec.volumes", &["name"]),
            ("spec.imagePullSecrets", &["name"]),
            ("spec.hostAliases", &["ip"]),
            ("status.conditions", &["type"]),
            ("status.podIPs", &["ip"]),
        ],
        atomic_maps: &["spec.nodeSelector"],
        origin: Origin::BuiltIn {
            generation: true,
            status_at_creation: false,
        },
        ..built_in::<Pod>(names, columns::POD)
    }
}

fn fill_in(pod: &mut Value) {
    for (field, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("securityContext", json!({})),
        ("schedulerName", json!("default-scheduler")),
        ("enableServiceLinks", json!(true)),
    ] {
        fill(pod, "spec", field, value);
    }
    fill(pod, "status", "phase", "Pending");
    for list in ["/spec/containers", "/spec/initContainers"] {
        let Some(Value::Array(containers)) = pod.pointer_mut(list) else {
            continue;
        };
        for container in containers {
            let image = text(container, "/image");
            let moves = image.ends_with(":latest")
                || !image
                    .rsplit('/')
                    .next()
                    .unwrap_or_default()
                    .contains([':', '@']);
            let policy = if moves { "Always" } else { "IfNotPresent" };
            let Value::Object(container) = container else {
                continue;
            };
            for (field, value) in [
                ("resources", json!({})),
                ("terminationMessagePath", json!("/dev/termination-log")),
                ("terminationMessagePolicy", json!("File")),
                ("imagePullPolicy", json!(policy)),
            ] {
                container.entry(field).or_insert(value);
            }
        }
    }
}

fn validate(change: Change<'_>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let containers = at(change.new, "/spec/containers").and_then(Value::as_array);
    if containers.is_none_or(Vec::is_empty) {
        errors.push(FieldError::required("spec.containers", ""));
    }
    for (index, container) in containers.into_iter().flatten().enumerate() {
        let field = |name: &str| format!("spec.containers[{index}].{name}");
        let name = text(container, "/name");
        if name.is_empty() {
            errors.push(FieldError::required(&field("name"), ""));
        } else {
            for why in names::label(name) {
                errors.push(FieldError::invalid(&field("name"), &json!(name), &why));
            }
        }
        if text(container, "/image").is_empty() {
            errors.push(FieldError::required(&field("image"), ""));
        }
    }
    errors
}
