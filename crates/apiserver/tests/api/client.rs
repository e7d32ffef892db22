//! The way the controllers use it: `kube::Client`, typed objects, watchers, appliers.

use futures::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;

use crate::support::{Server, claim};

#[tokio::test]
async fn typed_claims_are_made_patched_and_deleted() {
    // Fails if kube's own types and calls do not work on the embedded API.
    let server = Server::new();
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(server.api.client());
    let made: PersistentVolumeClaim = serde_json::from_value(claim("x", "1Gi")).unwrap();
    let made = claims.create(&PostParams::default(), &made).await.unwrap();
    assert!(made.metadata.uid.is_some());
    let status = json!({ "status": { "phase": "Bound" } });
    let bound = claims
        .patch_status("x", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    assert_eq!(bound.status.unwrap().phase.as_deref(), Some("Bound"));
    let list = claims.list(&ListParams::default().limit(1)).await.unwrap();
    assert_eq!(list.items.len(), 1);
    assert!(
        claims
            .delete("x", &DeleteParams::default())
            .await
            .unwrap()
            .is_left()
    );
    let error = claims.get("y").await.unwrap_err();
    assert!(
        matches!(error, kube::Error::Api(status) if status.code == 404 && status.reason == "NotFound")
    );
}

#[tokio::test]
async fn watchers_follow_in_both_ways_of_starting() {
    // Fails if kube-runtime's watcher misses an event, with a list first or with a streamed list.
    for config in [
        watcher::Config::default(),
        watcher::Config::default().streaming_lists(),
    ] {
        let server = Server::new();
        let maps: Api<ConfigMap> = Api::default_namespaced(server.api.client());
        let make = |name: &str| ConfigMap {
            metadata: kube::core::ObjectMeta {
                name: Some(name.to_owned()),
                ..Default::default()
            },
            ..Default::default()
        };
        maps.create(&PostParams::default(), &make("a"))
            .await
            .unwrap();
        let mut events = std::pin::pin!(watcher(maps.clone(), config).applied_objects());
        let first = events.next().await.unwrap().unwrap();
        assert_eq!(first.metadata.name.as_deref(), Some("a"));
        maps.create(&PostParams::default(), &make("b"))
            .await
            .unwrap();
        let second = events.next().await.unwrap().unwrap();
        assert_eq!(second.metadata.name.as_deref(), Some("b"));
    }
}

#[tokio::test]
async fn appliers_take_turns() {
    // Fails if server-side apply through kube does not create, change and force.
    let server = Server::new();
    let maps: Api<ConfigMap> = Api::default_namespaced(server.api.client());
    let body = |value: &str| {
        Patch::Apply(
            json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m" }, "data": { "k": value } }),
        )
    };
    maps.patch("m", &PatchParams::apply("one"), &body("1"))
        .await
        .unwrap();
    let error = maps
        .patch("m", &PatchParams::apply("two"), &body("2"))
        .await
        .unwrap_err();
    assert!(matches!(error, kube::Error::Api(status) if status.code == 409));
    let forced = maps
        .patch("m", &PatchParams::apply("two").force(), &body("2"))
        .await
        .unwrap();
    assert_eq!(forced.data.unwrap()["k"], "2");
}
