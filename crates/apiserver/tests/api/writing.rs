//! Creating, updating, patching, listing.

use serde_json::json;

use crate::support::{APPLY, CLAIMS, JSON_PATCH, MAPS, MERGE, STRATEGIC, Server, claim, config};

#[tokio::test]
async fn a_stale_update_conflicts_and_a_current_one_does_not() {
    // Fails if a writer can undo what it has not seen.
    let server = Server::new();
    let first = server.post(MAPS, config("x", "1")).await.expect(201);
    let mut second = first.clone();
    second["data"]["key"] = json!("2");
    let path = format!("{MAPS}/x");
    server.put(&path, second).await.expect(200);
    let message = "Operation cannot be fulfilled on configmaps \"x\": the object has been modified; please apply your changes to the latest version and try again";
    server
        .put(&path, first)
        .await
        .refused(409, "Conflict", message);
    let pinned = json!({ "metadata": { "resourceVersion": "1" }, "data": { "key": "3" } });
    server
        .patch(&path, MERGE, pinned)
        .await
        .refused(409, "Conflict", message);
    let renamed = json!({ "metadata": { "name": "y" } });
    server.patch(&path, MERGE, renamed).await.refused(
        400,
        "BadRequest",
        "the name of the object (y) does not match the name on the URL (x)",
    );
    server
        .patch(&path, MERGE, json!({ "metadata": { "uid": "y" } }))
        .await
        .refused(
            422,
            "Invalid",
            "ConfigMap \"x\" is invalid: metadata.uid: Invalid value: \"y\": field is immutable",
        );
    assert_eq!(server.get(&path).await.expect(200)["data"]["key"], "2");
}

#[tokio::test]
async fn a_write_meant_for_an_object_that_is_gone_does_not_hit_its_successor() {
    // Fails if a whole object with the uid of an earlier one replaces, or brings back, another.
    let server = Server::new();
    let path = format!("{MAPS}/x");
    let first = server.post(MAPS, config("x", "1")).await.expect(201);
    let gone = first["metadata"]["uid"].as_str().unwrap();
    server.delete(&path, json!({})).await.expect(200);
    let applied = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x", "uid": gone }, "data": { "key": "0" } });
    let apply = format!("{path}?fieldManager=a");
    server.patch(&apply, APPLY, applied.clone()).await.refused(
        409,
        "Conflict",
        &format!("Operation cannot be fulfilled on configmaps \"x\": uid mismatch: the provided object specified uid {gone}, and no existing object was found"),
    );
    assert_eq!(server.get(&path).await.code, 404);
    let second = server.post(MAPS, config("x", "2")).await.expect(201);
    let there = second["metadata"]["uid"].as_str().unwrap();
    let message = format!(
        "Operation cannot be fulfilled on configmaps \"x\": Precondition failed: UID in precondition: {gone}, UID in object meta: {there}"
    );
    server
        .put(&path, first)
        .await
        .refused(409, "Conflict", &message);
    server
        .patch(&apply, APPLY, applied)
        .await
        .refused(409, "Conflict", &message);
    assert_eq!(server.get(&path).await.expect(200), second);
}

#[tokio::test]
async fn a_write_that_changes_nothing_keeps_its_version() {
    // Fails if a controller that writes what is already there wakes itself for ever.
    let server = Server::new();
    let made = server.post(CLAIMS, claim("x", "1Gi")).await.expect(201);
    let before = server.api.stats();
    let path = format!("{CLAIMS}/x");
    let same = server.patch(
        &path,
        MERGE,
        json!({ "spec": { "resources": { "requests": { "storage": "1024Mi" } } } }),
    );
    assert_eq!(same.await.expect(200), made);
    assert_eq!(server.put(&path, made.clone()).await.expect(200), made);
    assert_eq!(server.api.stats(), before);
}

#[tokio::test]
async fn status_and_spec_are_written_by_different_doors() {
    // Fails if a write to the one changes the other, or if a generation counts a change of status.
    let server = Server::new();
    const POOLS: &str = "/apis/trellis.dev/v1alpha1/pools";
    let pool =
        json!({ "metadata": { "name": "p" }, "spec": { "node": "n", "path": "/a" }, "status": {} });
    let made = server.post(POOLS, pool).await.expect(201);
    assert_eq!(made["metadata"]["generation"], 1);
    assert_eq!(made.get("status"), None);
    let path = format!("{POOLS}/p");
    let condition = json!({ "type": "Ready", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let both = json!({ "metadata": { "labels": { "a": "b" } }, "spec": { "node": "m" }, "status": { "conditions": [condition] } });
    let after = server
        .patch(&format!("{path}/status"), MERGE, both.clone())
        .await
        .expect(200);
    assert_eq!(after["spec"]["node"], "n");
    assert_eq!(after["metadata"].get("labels"), None);
    assert_eq!(after["metadata"]["generation"], 1);
    assert_eq!(after["status"]["conditions"][0]["type"], "Ready");
    let after = server
        .patch(
            &path,
            MERGE,
            json!({ "spec": { "overcommitPercent": 150 }, "status": null }),
        )
        .await
        .expect(200);
    assert_eq!(after["metadata"]["generation"], 2);
    assert_eq!(after["status"]["conditions"][0]["type"], "Ready");
    let unconditional =
        json!({ "metadata": { "name": "p" }, "spec": { "node": "n", "path": "/a" } });
    assert_eq!(server.put(&path, unconditional).await.code, 422);
    assert_eq!(server.patch(&path, STRATEGIC, json!({})).await.code, 415);
}

#[tokio::test]
async fn a_dry_run_answers_and_changes_nothing() {
    // Fails if a trial leaves a trace.
    let server = Server::new();
    let before = server.api.stats();
    let made = server
        .post(&format!("{MAPS}?dryRun=All"), config("x", "1"))
        .await
        .expect(201);
    assert!(made["metadata"]["uid"].is_string());
    assert_eq!(made["metadata"].get("resourceVersion"), None);
    assert_eq!(server.get(&format!("{MAPS}/x")).await.code, 404);
    assert_eq!(server.api.stats(), before);
    server.post(MAPS, config("x", "1")).await.expect(201);
    let path = format!("{MAPS}/x");
    let patched = server
        .patch(
            &format!("{path}?dryRun=All"),
            MERGE,
            json!({ "data": { "key": "2" } }),
        )
        .await;
    assert_eq!(patched.expect(200)["data"]["key"], "2");
    server
        .delete(&format!("{path}?dryRun=All"), json!({}))
        .await
        .expect(200);
    assert_eq!(server.get(&path).await.expect(200)["data"]["key"], "1");
}

#[tokio::test]
async fn a_name_is_made_from_its_beginning() {
    // Fails if generated names collide or lack their prefix.
    let server = Server::new();
    let mut names = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let made = server
            .post(MAPS, json!({ "metadata": { "generateName": "pre-" } }))
            .await
            .expect(201);
        let name = made["metadata"]["name"].as_str().unwrap().to_owned();
        assert!(name.starts_with("pre-") && name.len() == 9, "{name}");
        names.insert(name);
    }
    assert_eq!(names.len(), 20);
}

#[tokio::test]
async fn json_patches_apply_or_are_refused_whole() {
    // Fails if half of a patch is kept, or a failed test passes.
    let server = Server::new();
    server.post(MAPS, config("x", "1")).await.expect(201);
    let path = format!("{MAPS}/x");
    let good = json!([{ "op": "test", "path": "/data/key", "value": "1" }, { "op": "add", "path": "/data/new", "value": "n" }]);
    assert_eq!(
        server.patch(&path, JSON_PATCH, good).await.expect(200)["data"]["new"],
        "n"
    );
    let bad = json!([{ "op": "remove", "path": "/data/new" }, { "op": "test", "path": "/data/key", "value": "2" }]);
    let message = "the server rejected our request due to an error in our request";
    server
        .patch(&path, JSON_PATCH, bad)
        .await
        .refused(422, "Invalid", message);
    assert_eq!(server.get(&path).await.expect(200)["data"]["new"], "n");
    assert_eq!(
        server
            .patch(&path, JSON_PATCH, json!({ "a": 1 }))
            .await
            .code,
        400
    );
}

#[tokio::test]
async fn lists_are_selected_and_come_in_pages_of_one_moment() {
    // Fails if a selector picks wrong objects, or if a page shows changes made after the first page.
    let server = Server::new();
    for (name, colour) in [("a", "red"), ("b", "blue"), ("c", "red"), ("d", "green")] {
        let object = json!({ "metadata": { "name": name, "labels": { "colour": colour } } });
        server.post(MAPS, object).await.expect(201);
    }
    let names = |list: &serde_json::Value| -> Vec<String> {
        let items = list["items"].as_array().unwrap().iter();
        items
            .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    };
    for (query, expected) in [
        ("labelSelector=colour%3Dred", "a c"),
        ("labelSelector=colour+in+(red,green),colour!%3Dgreen", "a c"),
        ("labelSelector=colour+notin+(red)", "b d"),
        ("labelSelector=!colour", ""),
        ("fieldSelector=metadata.name%3Db", "b"),
        (
            "fieldSelector=metadata.name!%3Db,metadata.namespace%3D%3Ddefault",
            "a c d",
        ),
    ] {
        let list = server.get(&format!("{MAPS}?{query}")).await.expect(200);
        assert_eq!(names(&list).join(" "), expected, "{query}");
    }
    server.get(&format!("{MAPS}?fieldSelector=spec.foo%3Da")).await.refused(
        400,
        "BadRequest",
        "\"spec.foo\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"",
    );
    server
        .get(&format!("{MAPS}?labelSelector=a+in"))
        .await
        .refused(
            400,
            "BadRequest",
            "unable to parse requirement: found '' expected: '('",
        );
    let first = server.get(&format!("{MAPS}?limit=2")).await.expect(200);
    assert_eq!(names(&first), ["a", "b"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 2);
    server
        .delete(&format!("{MAPS}/c"), json!({}))
        .await
        .expect(200);
    server.post(MAPS, config("e", "1")).await.expect(201);
    let token = first["metadata"]["continue"].as_str().unwrap();
    let second = server
        .get(&format!("{MAPS}?limit=5&continue={token}"))
        .await
        .expect(200);
    assert_eq!(names(&second), ["c", "d"]);
    assert_eq!(
        second["metadata"]["resourceVersion"],
        first["metadata"]["resourceVersion"]
    );
    let exact = format!(
        "{MAPS}?resourceVersionMatch=Exact&resourceVersion={}",
        first["metadata"]["resourceVersion"].as_str().unwrap()
    );
    assert_eq!(
        names(&server.get(&exact).await.expect(200)),
        ["a", "b", "c", "d"]
    );
    assert_eq!(server.get(&format!("{MAPS}?continue=abc")).await.code, 400);
    assert_eq!(
        server
            .get(&format!("{MAPS}?resourceVersion=99999"))
            .await
            .code,
        504
    );
}
