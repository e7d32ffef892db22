//! Watches.

use serde_json::json;

use crate::support::{MAPS, MERGE, Server, config};

fn pair(kind: &str, name: &str) -> (String, String) {
    (kind.to_owned(), name.to_owned())
}

#[tokio::test]
async fn a_watch_shows_what_is_there_and_what_happens() {
    // Fails if an event is missed, doubled or out of order.
    let server = Server::new();
    server.post(MAPS, config("a", "1")).await.expect(201);
    let mut watch = server.watch(&format!("{MAPS}?watch=1")).await;
    assert_eq!(watch.event().await, pair("ADDED", "a"));
    server.post(MAPS, config("b", "1")).await.expect(201);
    server
        .patch(
            &format!("{MAPS}/a"),
            MERGE,
            json!({ "data": { "key": "2" } }),
        )
        .await
        .expect(200);
    server
        .delete(&format!("{MAPS}/a"), json!({}))
        .await
        .expect(200);
    assert_eq!(watch.event().await, pair("ADDED", "b"));
    assert_eq!(watch.event().await, pair("MODIFIED", "a"));
    assert_eq!(watch.event().await, pair("DELETED", "a"));
}

#[tokio::test]
async fn a_watch_from_a_version_shows_what_came_after_it() {
    // Fails if a client that lists and then watches misses what happened in between.
    let server = Server::new();
    let made = server.post(MAPS, config("a", "1")).await.expect(201);
    let version = made["metadata"]["resourceVersion"].as_str().unwrap();
    server.post(MAPS, config("b", "1")).await.expect(201);
    let mut watch = server
        .watch(&format!("{MAPS}?watch=1&resourceVersion={version}"))
        .await;
    assert_eq!(watch.event().await, pair("ADDED", "b"));
    assert_eq!(
        server
            .get(&format!("{MAPS}?watch=1&resourceVersion=99999"))
            .await
            .code,
        504
    );
}

#[tokio::test]
async fn what_leaves_the_selection_is_deleted_and_what_enters_is_added() {
    // Fails if a selective watcher keeps an object that is no longer its own.
    let server = Server::new();
    let mut watch = server
        .watch(&format!("{MAPS}?watch=1&labelSelector=on%3Dyes"))
        .await;
    let label = |value: &str| json!({ "metadata": { "labels": { "on": value } } });
    server.post(MAPS, config("a", "1")).await.expect(201);
    let path = format!("{MAPS}/a");
    server.patch(&path, MERGE, label("yes")).await.expect(200);
    server
        .patch(&path, MERGE, json!({ "data": { "key": "2" } }))
        .await
        .expect(200);
    let out = server.patch(&path, MERGE, label("no")).await.expect(200);
    server.patch(&path, MERGE, label("yes")).await.expect(200);
    server.delete(&path, json!({})).await.expect(200);
    assert_eq!(watch.event().await, pair("ADDED", "a"));
    assert_eq!(watch.event().await, pair("MODIFIED", "a"));
    let gone = watch.next().await.unwrap();
    assert_eq!(gone["type"], "DELETED");
    assert_eq!(
        gone["object"]["metadata"]["resourceVersion"],
        out["metadata"]["resourceVersion"]
    );
    assert_eq!(gone["object"]["metadata"]["labels"]["on"], "yes");
    assert_eq!(watch.event().await, pair("ADDED", "a"));
    assert_eq!(watch.event().await, pair("DELETED", "a"));
}

#[tokio::test]
async fn a_forgotten_past_is_expired_also_after_a_restart() {
    // Fails if a watcher with an old version misses events without being told.
    let server = Server::new();
    let made = server.post(MAPS, config("a", "1")).await.expect(201);
    let version = made["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned();
    server.post(MAPS, config("b", "1")).await.expect(201);
    let server = server.reopened();
    let mut watch = server
        .watch(&format!("{MAPS}?watch=1&resourceVersion={version}"))
        .await;
    let error = watch.next().await.unwrap();
    assert_eq!(error["type"], "ERROR");
    assert_eq!(
        (&error["object"]["code"], &error["object"]["reason"]),
        (&json!(410), &json!("Expired"))
    );
    assert!(watch.next().await.is_none());
    let exact = format!("{MAPS}?resourceVersionMatch=Exact&resourceVersion={version}");
    assert_eq!(server.get(&exact).await.expect(410)["reason"], "Expired");
    let mut last = server.watch(&format!("{MAPS}?watch=1")).await;
    let newest = last.next().await.unwrap();
    let newest = newest["object"]["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned();
    let list = server.get(MAPS).await.expect(200);
    assert!(
        list["metadata"]["resourceVersion"]
            .as_str()
            .unwrap()
            .parse::<u64>()
            .unwrap()
            >= newest.parse().unwrap()
    );
}

#[tokio::test]
async fn a_slow_watcher_is_cut_off_and_told() {
    // Fails if a watcher that does not read makes the server keep everything for it.
    let server = Server::new();
    let mut watch = server.watch(&format!("{MAPS}?watch=1")).await;
    server.post(MAPS, config("a", "0")).await.expect(201);
    let path = format!("{MAPS}/a");
    let writes = (0..1200).map(|index| {
        server.patch(
            &path,
            MERGE,
            json!({ "data": { "key": index.to_string() } }),
        )
    });
    futures::future::join_all(writes).await;
    let event = watch.next().await.unwrap();
    assert_eq!(
        (&event["type"], &event["object"]["code"]),
        (&json!("ERROR"), &json!(410))
    );
    assert!(watch.next().await.is_none());
}

#[tokio::test]
async fn a_streamed_list_ends_with_its_bookmark_and_a_watch_with_another() {
    // Fails if kube-runtime's streaming lists never become ready, or if a quiet watch grows old.
    let server = Server::new();
    server.post(MAPS, config("a", "1")).await.expect(201);
    let query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=1";
    let mut watch = server.watch(&format!("{MAPS}?{query}")).await;
    assert_eq!(watch.event().await, pair("ADDED", "a"));
    let bookmark = watch.next().await.unwrap();
    assert_eq!(bookmark["type"], "BOOKMARK");
    assert_eq!(
        bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
        "true"
    );
    server
        .post("/api/v1/namespaces", json!({ "metadata": { "name": "n" } }))
        .await
        .expect(201);
    let last = watch.next().await.unwrap();
    assert_eq!(last["type"], "BOOKMARK");
    assert!(
        last["object"]["metadata"]["resourceVersion"].as_str()
            >= bookmark["object"]["metadata"]["resourceVersion"].as_str()
    );
    assert!(watch.next().await.is_none());
}

#[tokio::test]
async fn a_watch_ends_when_the_store_closes() {
    // Fails if a forgotten watcher keeps a closed server's memory.
    let server = Server::new();
    let mut watch = server.watch("/api/v1/pods?watch=1").await;
    drop(server);
    assert!(watch.next().await.is_none());
}
