//! Deleting: finalizers, owners, namespaces, preconditions.

use serde_json::{Value, json};

use crate::support::{CLAIMS, MAPS, MERGE, Server, claim, config};

fn owned(name: &str, owners: &[&Value], blocks: bool) -> Value {
    let owner = |owner: &&Value| {
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"], "blockOwnerDeletion": blocks })
    };
    let owners: Vec<Value> = owners.iter().map(owner).collect();
    json!({ "metadata": { "name": name, "ownerReferences": owners } })
}

#[tokio::test]
async fn an_object_with_finalizers_stays_until_the_last_one_goes() {
    // Fails if a claim vanishes while something still holds it, or stays when nothing does.
    let server = Server::new();
    server.post(CLAIMS, claim("x", "1Gi")).await.expect(201);
    let path = format!("{CLAIMS}/x");
    let held = server.delete(&path, json!({})).await.expect(200);
    assert!(held["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(held["metadata"]["deletionGracePeriodSeconds"], 0);
    let again = server.delete(&path, json!({})).await.expect(200);
    assert_eq!(
        again["metadata"]["resourceVersion"],
        held["metadata"]["resourceVersion"]
    );
    let more = json!({ "metadata": { "finalizers": ["a/b", "kubernetes.io/pvc-protection"] } });
    server.patch(&path, MERGE, more).await.refused(
        422,
        "Invalid",
        "PersistentVolumeClaim \"x\" is invalid: metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers []string{\"a/b\"}",
    );
    server
        .patch(&path, MERGE, json!({ "metadata": { "finalizers": null } }))
        .await
        .expect(200);
    assert_eq!(server.get(&path).await.code, 404);
}

#[tokio::test]
async fn preconditions_guard_a_deletion() {
    // Fails if an object that was made anew under the same name is deleted.
    let server = Server::new();
    let made = server.post(MAPS, config("x", "1")).await.expect(201);
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let path = format!("{MAPS}/x");
    server.delete(&path, json!({ "preconditions": { "uid": "u" } })).await.refused(
        409,
        "Conflict",
        &format!("Operation cannot be fulfilled on ConfigMap \"x\": the UID in the precondition (u) does not match the UID in record ({uid}). The object might have been deleted and then recreated"),
    );
    assert_eq!(
        server
            .delete(
                &path,
                json!({ "preconditions": { "resourceVersion": "1" } })
            )
            .await
            .code,
        409
    );
    assert_eq!(
        server
            .delete(&path, json!({ "propagationPolicy": "Foo" }))
            .await
            .code,
        422
    );
    let done = server
        .delete(&path, json!({ "preconditions": { "uid": uid } }))
        .await
        .expect(200);
    assert_eq!(
        (&done["kind"], &done["status"]),
        (&json!("Status"), &json!("Success"))
    );
}

#[tokio::test]
async fn dependents_go_with_their_last_owner() {
    // Fails if a dependent is left behind, or goes while another owner still has it.
    let server = Server::new();
    let a = server.post(MAPS, config("a", "1")).await.expect(201);
    let b = server.post(MAPS, config("b", "1")).await.expect(201);
    let child = server
        .post(MAPS, owned("child", &[&a], false))
        .await
        .expect(201);
    server
        .post(MAPS, owned("grandchild", &[&child], false))
        .await
        .expect(201);
    server
        .post(MAPS, owned("shared", &[&a, &b], false))
        .await
        .expect(201);
    server
        .delete(&format!("{MAPS}/a"), json!({}))
        .await
        .expect(200);
    assert_eq!(server.get(&format!("{MAPS}/child")).await.code, 404);
    assert_eq!(server.get(&format!("{MAPS}/grandchild")).await.code, 404);
    let shared = server.get(&format!("{MAPS}/shared")).await.expect(200);
    assert_eq!(
        shared["metadata"]["ownerReferences"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    server
        .delete(
            &format!("{MAPS}/b"),
            json!({ "propagationPolicy": "Orphan" }),
        )
        .await
        .expect(200);
    let shared = server.get(&format!("{MAPS}/shared")).await.expect(200);
    assert_eq!(shared["metadata"].get("ownerReferences"), None);
}

#[tokio::test]
async fn an_owner_in_the_foreground_waits_for_those_who_block_it() {
    // Fails if the owner goes before a dependent that is still held by a finalizer.
    let server = Server::new();
    let owner = server.post(MAPS, config("owner", "1")).await.expect(201);
    let mut child = owned("child", &[&owner], true);
    child["metadata"]["finalizers"] = json!(["a/b"]);
    server.post(MAPS, child).await.expect(201);
    let held = server
        .delete(
            &format!("{MAPS}/owner"),
            json!({ "propagationPolicy": "Foreground" }),
        )
        .await
        .expect(200);
    assert_eq!(
        held["metadata"]["finalizers"],
        json!(["foregroundDeletion"])
    );
    let child = server.get(&format!("{MAPS}/child")).await.expect(200);
    assert!(child["metadata"]["deletionTimestamp"].is_string());
    server.get(&format!("{MAPS}/owner")).await.expect(200);
    server
        .patch(
            &format!("{MAPS}/child"),
            MERGE,
            json!({ "metadata": { "finalizers": null } }),
        )
        .await
        .expect(200);
    assert_eq!(server.get(&format!("{MAPS}/child")).await.code, 404);
    assert_eq!(server.get(&format!("{MAPS}/owner")).await.code, 404);
}

#[tokio::test]
async fn an_object_whose_owner_was_never_there_is_collected() {
    // Fails if an object that was made a moment after its owner went stays for ever.
    let server = Server::new();
    let ghost = json!({ "metadata": { "name": "ghost", "uid": "no-such-uid" } });
    let mut watch = server.watch(&format!("{MAPS}?watch=1")).await;
    server
        .post(MAPS, owned("orphan", &[&ghost], false))
        .await
        .expect(201);
    assert_eq!(
        watch.event().await,
        ("ADDED".to_owned(), "orphan".to_owned())
    );
    assert_eq!(
        watch.event().await,
        ("DELETED".to_owned(), "orphan".to_owned())
    );
}

#[tokio::test]
async fn a_namespace_takes_its_content_with_it_and_some_may_not_go() {
    // Fails if content survives its namespace, if the namespace goes before its content, or if `default` can go.
    let server = Server::new();
    server
        .delete("/api/v1/namespaces/default", json!({}))
        .await
        .refused(
            403,
            "Forbidden",
            "namespaces \"default\" is forbidden: this namespace may not be deleted",
        );
    let made = server
        .post("/api/v1/namespaces", json!({ "metadata": { "name": "n" } }))
        .await
        .expect(201);
    assert_eq!(made["status"]["phase"], "Active");
    assert_eq!(
        made["metadata"]["labels"]["kubernetes.io/metadata.name"],
        "n"
    );
    let maps = "/api/v1/namespaces/n/configmaps";
    let claims = "/api/v1/namespaces/n/persistentvolumeclaims";
    server.post(maps, config("m", "1")).await.expect(201);
    server.post(claims, claim("c", "1Gi")).await.expect(201);
    let going = server
        .delete("/api/v1/namespaces/n", json!({}))
        .await
        .expect(200);
    assert_eq!(going["status"]["phase"], "Terminating");
    assert_eq!(server.get(&format!("{maps}/m")).await.code, 404);
    server.post(maps, config("late", "1")).await.refused(
        403,
        "Forbidden",
        "configmaps \"late\" is forbidden: unable to create new content in namespace n because it is being terminated",
    );
    server.get("/api/v1/namespaces/n").await.expect(200);
    let server = server.reopened();
    server
        .patch(
            &format!("{claims}/c"),
            MERGE,
            json!({ "metadata": { "finalizers": null } }),
        )
        .await
        .expect(200);
    assert_eq!(server.get("/api/v1/namespaces/n").await.code, 404);
}

#[tokio::test]
async fn a_collection_is_deleted_by_selection() {
    // Fails if objects outside of the selection go.
    let server = Server::new();
    for (name, colour) in [("a", "red"), ("b", "blue")] {
        server
            .post(
                MAPS,
                json!({ "metadata": { "name": name, "labels": { "colour": colour } } }),
            )
            .await
            .expect(201);
    }
    server
        .delete(&format!("{MAPS}?labelSelector=colour%3Dred"), json!({}))
        .await
        .expect(200);
    assert_eq!(server.get(&format!("{MAPS}/a")).await.code, 404);
    server.get(&format!("{MAPS}/b")).await.expect(200);
}

#[tokio::test]
async fn there_are_never_too_many_events() {
    // Fails if a chatty controller can fill the memory with events.
    let server = Server::new();
    let path = "/api/v1/namespaces/default/events";
    let mut writes = Vec::new();
    for index in 0..2100 {
        let event = json!({ "metadata": { "name": format!("e{index}") }, "involvedObject": { "namespace": "default" } });
        writes.push(server.post(path, event));
    }
    for reply in futures::future::join_all(writes).await {
        reply.expect(201);
    }
    let list = server.get(path).await.expect(200);
    let count = list["items"].as_array().unwrap().len();
    assert!((1000..=2000).contains(&count), "{count}");
    server.get(&format!("{path}/e2099")).await.expect(200);
    assert_eq!(server.get(&format!("{path}/e0")).await.code, 404);
}
