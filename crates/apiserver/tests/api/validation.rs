//! What Kubernetes refuses, it is refused here, with the same words.

use serde_json::{Value, json};

use crate::support::{CLAIMS, CLASSES, MAPS, MERGE, STRATEGIC, Server, claim};

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";

#[tokio::test]
async fn metadata_is_checked() {
    // Fails if a name or label that a cluster refuses is stored.
    let server = Server::new();
    let make = |metadata: Value| server.post(MAPS, json!({ "metadata": metadata }));
    let status = make(json!({ "name": "A_" })).await.refused(
        422,
        "Invalid",
        &format!("ConfigMap \"A_\" is invalid: metadata.name: Invalid value: \"A_\": {SUBDOMAIN}"),
    );
    assert_eq!(
        status["details"]["causes"][0]["reason"],
        "FieldValueInvalid"
    );
    assert_eq!(status["details"]["causes"][0]["field"], "metadata.name");
    make(json!({})).await.refused(
        422,
        "Invalid",
        "ConfigMap \"\" is invalid: metadata.name: Required value: name or generateName is required",
    );
    make(json!({ "name": "x", "namespace": "other" }))
        .await
        .refused(
            400,
            "BadRequest",
            "the namespace of the provided object does not match the namespace sent on the request",
        );
    make(json!({ "name": "x", "resourceVersion": "5" }))
        .await
        .refused(
            500,
            "",
            "resourceVersion should not be set on objects to be created",
        );
    make(json!({ "name": "x", "labels": { "a": "c d" } })).await.refused(
        422,
        "Invalid",
        "ConfigMap \"x\" is invalid: metadata.labels: Invalid value: \"c d\": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')",
    );
    server
        .post(
            "/api/v1/namespaces/nope/configmaps",
            json!({ "metadata": { "name": "x" } }),
        )
        .await
        .refused(404, "NotFound", "namespaces \"nope\" not found");
}

#[tokio::test]
async fn a_new_claim_is_checked_and_completed() {
    // Fails if a claim that a cluster refuses is stored, or lacks what a cluster fills in.
    let server = Server::new();
    server.post(CLAIMS, json!({ "metadata": { "name": "x" } })).await.refused(
        422,
        "Invalid",
        "PersistentVolumeClaim \"x\" is invalid: [spec.accessModes: Required value: at least 1 access mode is required, spec.resources[storage]: Required value]",
    );
    server.post(CLAIMS, claim("x", "abc")).await.refused(
        400,
        "BadRequest",
        "PersistentVolumeClaim in version \"v1\" cannot be handled as a PersistentVolumeClaim: quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
    );
    let mut wrong = claim("x", "-1");
    wrong["spec"]["accessModes"] = json!(["RWO"]);
    wrong["spec"]["storageClassName"] = json!("A_");
    server.post(CLAIMS, wrong).await.refused(
        422,
        "Invalid",
        &format!("PersistentVolumeClaim \"x\" is invalid: [spec.accessModes: Unsupported value: \"RWO\": supported values: \"ReadOnlyMany\", \"ReadWriteMany\", \"ReadWriteOnce\", \"ReadWriteOncePod\", spec.resources[storage]: Invalid value: \"-1\": must be greater than zero, spec.storageClassName: Invalid value: \"A_\": {SUBDOMAIN}]"),
    );
    let made = server.post(CLAIMS, claim("x", "1.5Gi")).await.expect(201);
    assert_eq!(made["spec"]["resources"]["requests"]["storage"], "1536Mi");
    assert_eq!(made["spec"]["volumeMode"], "Filesystem");
    assert_eq!(made["status"], json!({ "phase": "Pending" }));
    assert_eq!(
        made["metadata"]["finalizers"],
        json!(["kubernetes.io/pvc-protection"])
    );
    server.post(CLAIMS, claim("x", "1Gi")).await.refused(
        409,
        "AlreadyExists",
        "persistentvolumeclaims \"x\" already exists",
    );
}

#[tokio::test]
async fn a_claim_says_in_full_what_it_is_filled_from_and_which_volumes_it_takes() {
    // Fails if a source or a selector that a cluster refuses is stored, where nobody could ever honour it.
    let server = Server::new();
    let mut wrong = claim("x", "1Gi");
    wrong["spec"]["dataSource"] = json!({ "kind": "Thing", "name": "" });
    server.post(CLAIMS, wrong).await.refused(
        422,
        "Invalid",
        "PersistentVolumeClaim \"x\" is invalid: [spec.dataSource.name: Required value, spec.dataSource: Invalid value: \"Thing\": must be 'PersistentVolumeClaim' when referencing the default apiGroup]",
    );
    let mut wrong = claim("x", "1Gi");
    wrong["spec"]["selector"] = json!({ "matchExpressions": [
        { "key": "a", "operator": "In" },
        { "key": "a", "operator": "Exists", "values": ["b"] },
        { "key": "a", "operator": "Near" },
    ] });
    server.post(CLAIMS, wrong).await.refused(
        422,
        "Invalid",
        "PersistentVolumeClaim \"x\" is invalid: [spec.selector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn', spec.selector.matchExpressions[1].values: Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist', spec.selector.matchExpressions[2].operator: Invalid value: \"Near\": not a valid selector operator]",
    );
}

#[tokio::test]
async fn a_patch_that_spoils_an_object_is_invalid() {
    // Fails if a size that cannot be read is told otherwise than in a cluster when it comes by a patch.
    let server = Server::new();
    server.post(CLAIMS, claim("x", "1Gi")).await.expect(201);
    let path = format!("{CLAIMS}/x");
    let patch = json!({ "spec": { "resources": { "requests": { "storage": "abc" } } } });
    let expression = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
    let status = server.patch(&path, STRATEGIC, patch.clone()).await.refused(
        422,
        "Invalid",
        &format!(" \"\" is invalid: patch: Invalid value: \"map[spec:map[resources:map[requests:map[storage:abc]]]]\": {expression}"),
    );
    assert_eq!(status["details"]["causes"][0]["field"], "patch");
    server.patch(&path, MERGE, patch).await.expect(422);
}

#[tokio::test]
async fn a_claim_without_a_class_gets_the_default_one() {
    // Fails if a claim waits for ever because nobody told it a class.
    let server = Server::new();
    let mut bare = claim("a", "1Gi");
    bare["spec"]
        .as_object_mut()
        .unwrap()
        .remove("storageClassName");
    let made = server.post(CLAIMS, bare.clone()).await.expect(201);
    assert_eq!(made["spec"].get("storageClassName"), None);
    let annotations = json!({ "storageclass.kubernetes.io/is-default-class": "true" });
    let class =
        json!({ "metadata": { "name": "d", "annotations": annotations }, "provisioner": "p" });
    server.post(CLASSES, class).await.expect(201);
    bare["metadata"]["name"] = json!("b");
    let made = server.post(CLAIMS, bare).await.expect(201);
    assert_eq!(made["spec"]["storageClassName"], "d");
}

#[tokio::test]
async fn a_claim_changes_only_as_it_may() {
    // Fails if a claim shrinks, or grows where its class forbids it, or moves to another volume.
    let server = Server::new();
    let immutable = "PersistentVolumeClaim \"x\" is invalid: spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";
    server.post(CLAIMS, claim("x", "1Gi")).await.expect(201);
    let path = format!("{CLAIMS}/x");
    let request =
        |size: &str| json!({ "spec": { "resources": { "requests": { "storage": size } } } });
    server
        .patch(&path, MERGE, request("2Gi"))
        .await
        .refused(422, "Invalid", immutable);
    server
        .patch(&path, MERGE, json!({ "spec": { "volumeName": "v" } }))
        .await
        .expect(200);
    server
        .patch(&path, MERGE, json!({ "spec": { "volumeName": "w" } }))
        .await
        .refused(422, "Invalid", immutable);
    let bound = json!({ "status": { "phase": "Bound", "capacity": { "storage": "1Gi" } } });
    server
        .patch(&format!("{path}/status"), MERGE, bound)
        .await
        .expect(200);
    let forbidden = "persistentvolumeclaims \"x\" is forbidden: only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize";
    server
        .patch(&path, MERGE, request("2Gi"))
        .await
        .refused(403, "Forbidden", forbidden);
    let class = json!({ "metadata": { "name": "grows" }, "provisioner": "p" });
    server.post(CLASSES, class).await.expect(201);
    server
        .patch(&path, MERGE, request("2Gi"))
        .await
        .refused(403, "Forbidden", forbidden);
    server
        .patch(
            &format!("{CLASSES}/grows"),
            MERGE,
            json!({ "allowVolumeExpansion": true }),
        )
        .await
        .expect(200);
    server.patch(&path, MERGE, request("3Gi")).await.expect(200);
    server.patch(&path, MERGE, request("2Gi")).await.expect(200);
    for size in ["1Gi", "512Mi"] {
        server.patch(&path, MERGE, request(size)).await.refused(
            422,
            "Invalid",
            "PersistentVolumeClaim \"x\" is invalid: spec.resources.requests.storage: Forbidden: field can not be less than status.capacity",
        );
    }
}

#[tokio::test]
async fn volumes_are_checked_and_completed() {
    // Fails if a volume without a source, or with two, is stored, or if its source can be swapped.
    let server = Server::new();
    const VOLUMES: &str = "/api/v1/persistentvolumes";
    server.post(VOLUMES, json!({ "metadata": { "name": "v" } })).await.refused(
        422,
        "Invalid",
        "PersistentVolume \"v\" is invalid: [spec.accessModes: Required value, spec.capacity: Required value, spec.capacity: Unsupported value: null: supported values: \"storage\", spec: Required value: must specify a volume type]",
    );
    let mut volume = json!({ "metadata": { "name": "v" }, "spec": {
        "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteOnce"],
        "csi": { "driver": "trellis.dev", "volumeHandle": "h" }, "nfs": { "path": "/x", "server": "y" },
    } });
    server.post(VOLUMES, volume.clone()).await.refused(
        422,
        "Invalid",
        "PersistentVolume \"v\" is invalid: spec.nfs: Forbidden: may not specify more than 1 volume type",
    );
    volume["spec"].as_object_mut().unwrap().remove("nfs");
    let made = server.post(VOLUMES, volume).await.expect(201);
    assert_eq!(made["spec"]["persistentVolumeReclaimPolicy"], "Retain");
    assert_eq!(made["spec"]["volumeMode"], "Filesystem");
    assert_eq!(made["status"]["phase"], "Pending");
    assert_eq!(
        made["metadata"]["finalizers"],
        json!(["kubernetes.io/pv-protection"])
    );
    let swap = json!({ "spec": { "csi": { "volumeHandle": "k" } } });
    server.patch(&format!("{VOLUMES}/v"), MERGE, swap).await.refused(
        422,
        "Invalid",
        "PersistentVolume \"v\" is invalid: spec.persistentvolumesource: Forbidden: spec.persistentvolumesource is immutable after creation",
    );
}

#[tokio::test]
async fn classes_are_checked_and_completed() {
    // Fails if a class changes under the volumes that were made by it.
    let server = Server::new();
    server.post(CLASSES, json!({ "metadata": { "name": "c" }, "reclaimPolicy": "x" })).await.refused(
        422,
        "Invalid",
        "StorageClass.storage.k8s.io \"c\" is invalid: [provisioner: Required value, reclaimPolicy: Unsupported value: \"x\": supported values: \"Delete\", \"Retain\"]",
    );
    let class =
        json!({ "metadata": { "name": "c" }, "provisioner": "p", "parameters": { "a": "b" } });
    let made = server.post(CLASSES, class).await.expect(201);
    assert_eq!(
        (&made["reclaimPolicy"], &made["volumeBindingMode"]),
        (&json!("Delete"), &json!("Immediate"))
    );
    let change = json!({ "parameters": { "a": "c" } });
    server.patch(&format!("{CLASSES}/c"), MERGE, change).await.refused(
        422,
        "Invalid",
        "StorageClass.storage.k8s.io \"c\" is invalid: parameters: Forbidden: updates to parameters are forbidden.",
    );
    for (field, value) in [("provisioner", "q"), ("reclaimPolicy", "Retain")] {
        assert_eq!(
            server
                .patch(&format!("{CLASSES}/c"), MERGE, json!({ field: value }))
                .await
                .code,
            422
        );
    }
}

#[tokio::test]
async fn secrets_pods_leases_and_maps_behave_as_in_a_cluster() {
    // Fails if plain text stays in a secret, or a default or check of the small kinds is missing.
    let server = Server::new();
    let secret =
        json!({ "metadata": { "name": "s" }, "stringData": { "a": "b" }, "data": { "a": "eA==" } });
    let made = server
        .post("/api/v1/namespaces/default/secrets", secret)
        .await
        .expect(201);
    assert_eq!(
        (&made["type"], &made["data"]),
        (&json!("Opaque"), &json!({ "a": "Yg==" }))
    );
    assert_eq!(made.get("stringData"), None);
    let pods = "/api/v1/namespaces/default/pods";
    server
        .post(pods, json!({ "metadata": { "name": "p" } }))
        .await
        .refused(
            422,
            "Invalid",
            "Pod \"p\" is invalid: spec.containers: Required value",
        );
    let pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [{ "name": "c", "image": "i" }] } });
    let made = server.post(pods, pod).await.expect(201);
    assert_eq!(made["spec"]["restartPolicy"], "Always");
    assert_eq!(made["spec"]["containers"][0]["imagePullPolicy"], "Always");
    assert_eq!(made["metadata"]["generation"], 1);
    let lease = json!({ "metadata": { "name": "l" }, "spec": { "leaseDurationSeconds": 0 } });
    server.post("/apis/coordination.k8s.io/v1/namespaces/default/leases", lease).await.refused(
        422,
        "Invalid",
        "Lease.coordination.k8s.io \"l\" is invalid: spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0",
    );
    let fixed = json!({ "metadata": { "name": "m" }, "immutable": true, "data": { "a": "x" } });
    server.post(MAPS, fixed).await.expect(201);
    server.patch(&format!("{MAPS}/m"), MERGE, json!({ "data": { "a": "y" } })).await.refused(
        422,
        "Invalid",
        "ConfigMap \"m\" is invalid: data: Forbidden: field is immutable when `immutable` is set",
    );
}
