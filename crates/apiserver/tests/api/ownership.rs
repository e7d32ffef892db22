//! Who owns which field, and server-side apply.

use serde_json::{Value, json};

use crate::support::{APPLY, CLASSES, MAPS, MERGE, Server};

fn class(fields: Value) -> Value {
    let mut class = json!({ "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "c" } });
    class
        .as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    class
}

fn map(data: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m" }, "data": data })
}

#[tokio::test]
async fn an_update_is_recorded_as_a_cluster_records_it() {
    // Fails if managed fields differ from those that kube-apiserver writes for the same request.
    let server = Server::new();
    let body =
        json!({ "metadata": { "name": "c" }, "provisioner": "p", "parameters": { "a": "b" } });
    let made = server.post(CLASSES, body).await.expect(201);
    let entry = &made["metadata"]["managedFields"][0];
    assert_eq!(entry["manager"], "tester");
    assert_eq!(entry["operation"], "Update");
    assert_eq!(
        entry["fieldsV1"],
        json!({ "f:parameters": { ".": {}, "f:a": {} }, "f:provisioner": {}, "f:reclaimPolicy": {}, "f:volumeBindingMode": {} })
    );
}

#[tokio::test]
async fn applying_creates_conflicts_forces_and_lets_go() {
    // Fails if an applier overwrites another's field unasked, or leaves behind what it no longer applies.
    let server = Server::new();
    let apply = |manager: &str, data: Value| {
        let path = format!("{MAPS}/m?fieldManager={manager}");
        let server = &server;
        async move { server.patch(&path, APPLY, map(data)).await }
    };
    apply("one", json!({ "a": "1", "b": "1" }))
        .await
        .expect(201);
    apply("two", json!({ "a": "1", "c": "2" }))
        .await
        .expect(200);
    apply("two", json!({ "a": "2" })).await.refused(
        409,
        "Conflict",
        "Apply failed with 1 conflict: conflict with \"one\": .data.a",
    );
    let forced = server
        .patch(
            &format!("{MAPS}/m?fieldManager=two&force=true"),
            APPLY,
            map(json!({ "a": "2" })),
        )
        .await;
    assert_eq!(forced.expect(200)["data"], json!({ "a": "2", "b": "1" }));
    let dropped = apply("one", json!({ "z": "9" })).await.expect(200);
    assert_eq!(dropped["data"], json!({ "a": "2", "z": "9" }));
    let again = apply("one", json!({ "z": "9" })).await.expect(200);
    assert_eq!(
        again["metadata"]["resourceVersion"],
        dropped["metadata"]["resourceVersion"]
    );
    server
        .patch(&format!("{MAPS}/m"), MERGE, json!({ "data": { "z": "0" } }))
        .await
        .expect(200);
    apply("one", json!({ "z": "9" })).await.refused(
        409,
        "Conflict",
        "Apply failed with 1 conflict: conflict with \"tester\" using v1: .data.z",
    );
}

#[tokio::test]
async fn what_is_applied_must_be_known_and_signed() {
    // Fails if a typo in an applied manifest passes, or if nobody answers for a field.
    let server = Server::new();
    let path = format!("{CLASSES}/c");
    server.patch(&format!("{path}?fieldManager=a"), APPLY, class(json!({ "provisioner": "p", "foo": 1 }))).await.refused(
        500,
        "",
        "failed to create typed patch object (/c; storage.k8s.io/v1, Kind=StorageClass): .foo: field not declared in schema",
    );
    server.patch(&path, APPLY, class(json!({ "provisioner": "p" }))).await.refused(
        422,
        "Invalid",
        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch",
    );
    let made = server
        .patch(
            &format!("{path}?fieldManager=a1"),
            APPLY,
            class(json!({ "provisioner": "p", "allowVolumeExpansion": false })),
        )
        .await;
    let made = made.expect(201);
    assert_eq!(
        made["metadata"]["managedFields"][0]["fieldsV1"],
        json!({ "f:allowVolumeExpansion": {}, "f:provisioner": {} })
    );
    assert_eq!(made["reclaimPolicy"], "Delete");
    let partial = server
        .patch(
            &format!("{path}?fieldManager=a2"),
            APPLY,
            class(json!({ "metadata": { "name": "c", "labels": { "x": "y" } } })),
        )
        .await;
    assert_eq!(
        partial.expect(200)["metadata"]["labels"],
        json!({ "x": "y" })
    );
}
