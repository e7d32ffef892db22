use super::*;
use crate::kinds;

fn kind(plural: &str) -> &'static Kind {
    kinds::all()
        .iter()
        .find(|kind| kind.plural == plural)
        .unwrap()
}

fn now() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().unwrap()
}

/// The table as `kubectl get -o wide` would print it.
fn wide(plural: &str, objects: &[Value]) -> String {
    let table = render(
        kind(plural),
        objects,
        json!({"resourceVersion": "7"}),
        IncludeObject::None,
        now(),
    );
    let mut lines = vec![Vec::new()];
    for column in table["columnDefinitions"].as_array().unwrap() {
        lines[0].push(column["name"].as_str().unwrap().to_uppercase());
    }
    for row in table["rows"].as_array().unwrap() {
        let cells = row["cells"].as_array().unwrap();
        lines.push(
            cells
                .iter()
                .map(|cell| cell.as_str().map_or(cell.to_string(), str::to_owned))
                .collect(),
        );
    }
    let width = |at: usize| lines.iter().map(|line| line[at].len()).max().unwrap();
    let print = |line: &Vec<String>| {
        let cells: Vec<String> = line
            .iter()
            .enumerate()
            .map(|(at, cell)| format!("{cell:0$}", width(at)))
            .collect();
        cells.join("   ").trim_end().to_owned()
    };
    format!(
        "{plural}\n{}\n",
        lines.iter().map(print).collect::<Vec<_>>().join("\n")
    )
}

#[test]
fn claims_volumes_and_classes_print_as_in_a_cluster() {
    // Fails when a heading, the order of columns or the form of a cell differs from what kubectl's users know.
    let meta = |name: &str| json!({"name": name, "namespace": "default", "creationTimestamp": "2026-03-01T11:55:00Z"});
    let bound = json!({
        "metadata": meta("bound"),
        "spec": {"volumeName": "pv-1", "storageClassName": "trellis", "volumeMode": "Filesystem",
                 "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "4Gi"}}},
        "status": {"phase": "Bound", "accessModes": ["ReadWriteOnce", "ReadOnlyMany"], "capacity": {"storage": "2Gi"}},
    });
    let pending = json!({
        "metadata": meta("pending"),
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeAttributesClassName": "gold"},
        "status": {"phase": "Pending"},
    });
    let mut leaving = bound.clone();
    leaving["metadata"]["deletionTimestamp"] = json!("2026-03-01T11:59:00Z");
    let volume = json!({
        "metadata": meta("pv-1"),
        "spec": {"capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteOncePod"], "storageClassName": "trellis",
                 "persistentVolumeReclaimPolicy": "Delete", "volumeMode": "Block",
                 "claimRef": {"namespace": "default", "name": "bound"}},
        "status": {"phase": "Bound"},
    });
    let class = json!({
        "metadata": {"name": "trellis", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "trellis.dev", "allowVolumeExpansion": true, "volumeBindingMode": "WaitForFirstConsumer",
    });
    let tables = [
        wide("persistentvolumeclaims", &[bound, pending, leaving]),
        wide(
            "persistentvolumes",
            &[volume, json!({"metadata": meta("pv-2")})],
        ),
        wide(
            "storageclasses",
            &[
                class,
                json!({"metadata": meta("plain"), "provisioner": "x"}),
            ],
        ),
    ]
    .join("\n");
    insta::assert_snapshot!(tables);
}

#[test]
fn the_other_kinds_of_a_cluster_print_as_in_a_cluster() {
    // Fails when a heading, the order of columns or the form of a cell differs from what kubectl's users know.
    let meta =
        json!({"name": "a", "namespace": "default", "creationTimestamp": "2026-02-27T10:00:00Z"});
    let node = json!({
        "metadata": {"name": "n1", "labels": {"node-role.kubernetes.io/control-plane": "", "kubernetes.io/role": "db"}},
        "spec": {"unschedulable": true},
        "status": {
            "conditions": [{"type": "Ready", "status": "False"}],
            "addresses": [{"type": "Hostname", "address": "n1"}, {"type": "InternalIP", "address": "10.0.0.1"}],
            "nodeInfo": {"kubeletVersion": "v1.34.0", "osImage": "Debian 12", "kernelVersion": "6.1"},
        },
    });
    let pod = json!({
        "metadata": meta,
        "spec": {"nodeName": "n1", "containers": [{"name": "c"}], "readinessGates": [{"conditionType": "g"}]},
        "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.2"}],
                   "containerStatuses": [{"name": "c", "ready": true, "restartCount": 0, "state": {"running": {}}}]},
    });
    let event = json!({
        "metadata": meta, "type": "Normal", "reason": "Resizing", "message": " grows\n",
        "involvedObject": {"kind": "PersistentVolumeClaim", "name": "data"},
        "source": {"component": "trellis", "host": "n1"},
        "firstTimestamp": "2026-03-01T11:00:00Z", "lastTimestamp": "2026-03-01T11:59:30Z", "count": 4,
    });
    let single_event = json!({"metadata": meta, "eventTime": "2026-03-01T11:59:50.000001Z", "reportingComponent": "trellis"});
    let tables = [
        wide(
            "namespaces",
            &[json!({"metadata": meta, "status": {"phase": "Active"}})],
        ),
        wide("nodes", &[node, json!({"metadata": meta})]),
        wide("pods", &[pod]),
        wide(
            "configmaps",
            &[json!({"metadata": meta, "data": {"k": "v"}, "binaryData": {"b": ""}})],
        ),
        wide(
            "secrets",
            &[json!({"metadata": meta, "type": "Opaque", "data": {"k": ""}})],
        ),
        wide("events", &[event, single_event]),
        wide(
            "leases",
            &[json!({"metadata": meta, "spec": {"holderIdentity": "n1"}})],
        ),
    ]
    .join("\n");
    insta::assert_snapshot!(tables);
}

#[test]
fn our_kinds_print_what_was_asked_for_and_what_was_measured() {
    // Fails when a field of our types is renamed and its column goes blank, or when a column is lost.
    let meta = json!({"name": "a", "creationTimestamp": "2026-03-01T11:59:30Z"});
    let hold = json!({"reason": "NoSpaceInPool", "message": "full"});
    let pool = json!({
        "metadata": meta, "spec": {"node": "n1", "path": "/srv/pool"},
        "status": {"capacity": {"total": "100Gi", "free": "60Gi", "allocated": "40Gi"},
                   "conditions": [{"type": "Ready", "status": "True"}]},
    });
    let volume = json!({
        "metadata": meta,
        "spec": {"capacity": "4Gi", "class": "trellis", "replicas": 1, "filesystem": "xfs",
                 "claim": {"namespace": "default", "name": "data"}},
        "status": {"phase": "Resizing", "capacity": "2Gi", "hold": hold},
    });
    let target = json!({
        "metadata": meta, "spec": {"volume": "v", "node": "n1", "capacity": "4Gi"}, "status": {"capacity": "2Gi"},
    });
    let replica = json!({
        "metadata": meta, "spec": {"volume": "v", "pool": "default", "node": "n1", "capacity": "4Gi"},
        "status": {"phase": "Ready", "capacity": "2Gi", "path": "/srv/pool/v/data", "hold": hold},
    });
    let attachment = json!({
        "metadata": meta, "spec": {"claimName": "data", "node": "n1", "consumer": {"mount": {"path": "/mnt/data"}}},
        "status": {"phase": "Attached", "capacity": "2Gi", "device": "/dev/loop0", "via": "local"},
    });
    let bare = json!({"metadata": meta});
    let tables = [
        wide("pools", &[pool, bare.clone()]),
        wide("volumes", &[volume, bare.clone()]),
        wide("targets", &[target, bare.clone()]),
        wide("replicas", &[replica, bare.clone()]),
        wide("attachments", &[attachment, bare]),
    ]
    .join("\n");
    insta::assert_snapshot!(tables);
}

#[test]
fn a_row_carries_of_its_object_what_the_client_asked_for() {
    // Fails when kubectl cannot find the namespace of a row, or when a whole object travels unasked.
    let object = json!({"metadata": {"name": "a", "namespace": "default"}, "spec": {"big": true}});
    let row = |include| {
        let objects = std::slice::from_ref(&object);
        render(kind("configmaps"), objects, json!({}), include, now())["rows"][0]["object"].clone()
    };
    assert_eq!(
        row(IncludeObject::Metadata),
        json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]}),
    );
    assert_eq!(row(IncludeObject::Object), object);
    assert_eq!(row(IncludeObject::None), Value::Null);
    assert_eq!(
        IncludeObject::parse("Metadata"),
        Some(IncludeObject::Metadata)
    );
    assert_eq!(IncludeObject::parse("metadata"), None);
}

#[test]
fn only_a_client_that_prefers_a_table_gets_one() {
    // Fails when kubectl get sees no table, or when a plain client sees one.
    let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
    for (accept, wants) in [
        (kubectl, true),
        ("application/json; as=Table; g=meta.k8s.io; v=v1", true),
        (
            "application/vnd.kubernetes.protobuf;as=Table;g=meta.k8s.io;v=v1,application/json;as=Table;g=meta.k8s.io;v=v1",
            true,
        ),
        ("application/json", false),
        (
            "application/json,application/json;as=Table;v=v1;g=meta.k8s.io",
            false,
        ),
        (
            "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json",
            false,
        ),
        ("application/json;as=Table;v=v1beta1;g=meta.k8s.io", false),
        ("", false),
        ("*/*", false),
    ] {
        assert_eq!(wanted(accept), wants, "{accept}");
    }
}
