//! The volume room alone, on the real embedded API: what it makes of a volume that somebody else has stored, and what
//! happens when the process that plans is gone.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use trellis_api::Bytes;
use trellis_api::kinds::{Pool, Replica, Target, Volume};
use trellis_apiserver::EmbeddedApi;
use trellis_control::lease::{self, LeaseSettings};
use trellis_control::run::run_volumes;
use trellis_control::volume::surroundings::Waits;

/// How long anything may take that takes milliseconds, or the time of a lease.
const PATIENCE: Duration = Duration::from_secs(60);
/// The shortest time that a lease can say.
const LASTS: Duration = Duration::from_secs(1);
const NEVER: Duration = Duration::from_secs(3600);

struct Home {
    api: EmbeddedApi,
    _dir: TempDir,
}

impl Home {
    async fn with_pool() -> Home {
        let dir = tempfile::tempdir().unwrap();
        let api = EmbeddedApi::open(&dir.path().join("store")).unwrap();
        let home = Home { api, _dir: dir };
        let pool = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Pool", "metadata": { "name": "p" },
            "spec": { "node": "n", "path": "/p", "overcommitPercent": 100 },
        });
        let node = serde_json::from_value(json!({ "metadata": { "name": "n" } })).unwrap();
        let nodes = Api::<Node>::all(home.client());
        nodes.create(&PostParams::default(), &node).await.unwrap();
        let pools = Api::<Pool>::all(home.client());
        let pool = serde_json::from_value(pool).unwrap();
        pools.create(&PostParams::default(), &pool).await.unwrap();
        let status = json!({ "status": {
            "id": "p", "filesystem": "p",
            "capacity": {
                "total": "10Gi", "free": "10Gi", "allocated": "0",
                "observedAt": "2026-01-01T00:00:00.000000Z",
            },
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Measured", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        }});
        patch_status::<Pool>(&home.client(), "p", &status).await;
        home
    }

    fn client(&self) -> Client {
        self.api.client()
    }

    fn settings(&self, identity: &str) -> LeaseSettings {
        LeaseSettings {
            namespace: "default".to_owned(),
            name: "volumes".to_owned(),
            identity: identity.to_owned(),
            lasts: LASTS,
        }
    }

    fn controller(&self, identity: &str) -> JoinHandle<()> {
        tokio::spawn(run_volumes(
            self.client(),
            self.settings(identity),
            Waits::USUAL,
            NEVER,
        ))
    }

    async fn holder(&self) -> Option<String> {
        let leases =
            Api::<k8s_openapi::api::coordination::v1::Lease>::namespaced(self.client(), "default");
        leases
            .get_opt("volumes")
            .await
            .unwrap()?
            .spec?
            .holder_identity
    }
}

async fn patch_status<K>(client: &Client, name: &str, body: &Value)
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>,
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let api = Api::<K>::all(client.clone());
    let patch = Patch::Merge(body);
    api.patch_status(name, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "gave up waiting for: {what}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

// Fails if a volume without a claim is not planned, if it grows beyond its pool, if it does not say why it cannot, or if
// another controller does not go on where a dead one stopped.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_planned_without_a_claim_and_by_the_next_controller() {
    let home = Home::with_pool().await;
    let first = home.controller("first");
    let volumes = Api::<Volume>::all(home.client());
    let volume = json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
        "spec": { "capacity": "1Gi", "class": "c", "replicas": 1 },
    });
    let volume = serde_json::from_value(volume).unwrap();
    volumes
        .create(&PostParams::default(), &volume)
        .await
        .unwrap();
    let replicas = Api::<Replica>::all(home.client());
    let replica = eventually("the copy has a place", async || {
        replicas.get_opt("v-0").await.unwrap()
    })
    .await;
    assert_eq!(
        (replica.spec.pool.as_str(), replica.spec.node.as_str()),
        ("p", "n")
    );
    let measured = json!({ "status": { "capacity": "1Gi" } });
    patch_status::<Replica>(&home.client(), "v-0", &measured).await;
    patch_status::<Target>(&home.client(), "v", &measured).await;
    let status = eventually("the volume says what it serves", async || {
        let status = volumes.get("v").await.unwrap().status?;
        status.capacity.is_some().then_some(status)
    })
    .await;
    assert_eq!(status.granted, Some(Bytes::gib(1)));

    // The next one waits until it has not heard of the first for as long as the lease lasts.
    first.abort();
    assert_eq!(home.holder().await.as_deref(), Some("first"));
    let second = home.controller("second");
    let wish = |size: &str| json!({ "spec": { "capacity": size } });
    let patch = async |size: &str| {
        let patch = Patch::Merge(wish(size));
        volumes
            .patch("v", &PatchParams::default(), &patch)
            .await
            .unwrap();
    };
    patch("2Gi").await;
    eventually("the goals are raised by the second", async || {
        let goal = replicas.get("v-0").await.unwrap().spec.capacity;
        (goal == Bytes::gib(2)).then_some(())
    })
    .await;
    assert_eq!(home.holder().await.as_deref(), Some("second"));
    patch("20Gi").await;
    let hold = eventually("the volume says why it does not grow", async || {
        volumes.get("v").await.unwrap().status?.hold
    })
    .await;
    assert!(hold.message.contains("20Gi"), "{}", hold.message);
    assert_eq!(
        replicas.get("v-0").await.unwrap().spec.capacity,
        Bytes::gib(2)
    );
    second.abort();
}

// Fails if somebody gets a lease that another one has for good, or a holder goes on when its lease is somebody else's.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_has_one_holder() {
    let home = Home::with_pool().await;
    let client = home.client();
    let held = lease::acquire(&client, &home.settings("first")).await;
    let kept = tokio::spawn({
        let (client, settings) = (client.clone(), home.settings("first"));
        async move { lease::keep(&client, &settings, held).await }
    });
    let other = home.settings("second");
    let waits = tokio::time::timeout(LASTS * 3, lease::acquire(&client, &other));
    assert!(waits.await.is_err(), "a lease that is renewed was taken");
    lease::take_for_good(&client, &home.settings("owner"))
        .await
        .unwrap();
    tokio::time::timeout(PATIENCE, kept).await.unwrap().unwrap();
    let waits = tokio::time::timeout(LASTS * 3, lease::acquire(&client, &other));
    assert!(
        waits.await.is_err(),
        "a lease that is held for good was taken"
    );
    lease::release(&client, &home.settings("owner"))
        .await
        .unwrap();
    lease::acquire(&client, &other).await;
    assert_eq!(home.holder().await.as_deref(), Some("second"));
}
