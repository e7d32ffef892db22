//! Many claims at once: how fast they are bound and grown, and what the service costs during and after that.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;
use trellis_api::Bytes;

use super::service::{Service, written};
use super::statistics::millis;

const FIRST: Bytes = Bytes::mib(16);
const GROWN: Bytes = Bytes::mib(32);
/// Requests under way at the same time.
const AT_ONCE: usize = 64;

/// Creates `count` claims, waits until all are bound, grows all, and looks at the service when idle.
pub async fn run(
    binary: &Path,
    below: &Path,
    count: usize,
    idle_seconds: u64,
) -> anyhow::Result<()> {
    let service = Service::start(binary, below)?;
    let client = service.client().await?;
    let claims = Api::<PersistentVolumeClaim>::default_namespaced(client.clone());
    let (empty, _) = service.memory_mb()?;

    let started = Instant::now();
    let create = |index: usize| {
        let claims = claims.clone();
        async move {
            let claim: PersistentVolumeClaim = serde_json::from_value(json!({
                "metadata": { "name": format!("claim-{index}") },
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "volumeMode": "Block",
                    "resources": { "requests": { "storage": FIRST } },
                },
            }))?;
            claims.create(&PostParams::default(), &claim).await?;
            anyhow::Ok(())
        }
    };
    all_at_once(count, create).await?;
    let created = started.elapsed();
    all_have(&claims, count, FIRST).await?;
    let bound = started.elapsed();

    let started = Instant::now();
    let grow = |index: usize| {
        let claims = claims.clone();
        async move {
            let body = json!({ "spec": { "resources": { "requests": { "storage": GROWN } } } });
            claims
                .patch(
                    &format!("claim-{index}"),
                    &PatchParams::default(),
                    &Patch::Merge(body),
                )
                .await?;
            anyhow::Ok(())
        }
    };
    all_at_once(count, grow).await?;
    let asked = started.elapsed();
    all_have(&claims, count, GROWN).await?;
    let grown = started.elapsed();
    let store = written(&client).await?;
    drop(client);
    drop(claims);

    let idle = service.idle_percent(idle_seconds).await?;
    let (resident, peak) = service.memory_mb()?;

    let number = f64::from(u32::try_from(count)?);
    let rate = |time: Duration| number / time.as_secs_f64();
    println!("{count} claims below {}", below.display());
    println!("  created        {:>8.0} claims/s", rate(created));
    println!(
        "  bound          {:>8.0} claims/s, all after {}",
        rate(bound),
        millis(bound)
    );
    println!("  growth asked   {:>8.0} claims/s", rate(asked));
    println!(
        "  grown          {:>8.0} claims/s, all after {}",
        rate(grown),
        millis(grown)
    );
    println!(
        "  {} object writes in {} flushes",
        store.writes, store.flushes
    );
    println!("  memory         {empty} MB empty, {resident} MB now, {peak} MB at most");
    println!("  idle           {idle:.2} % of a core over {idle_seconds} s");
    Ok(())
}

/// Does `work` for every number below `count`, many at a time.
pub async fn all_at_once<F, W>(count: usize, work: F) -> anyhow::Result<()>
where
    F: Fn(usize) -> W,
    W: Future<Output = anyhow::Result<()>>,
{
    futures::stream::iter((0..count).map(work))
        .buffer_unordered(AT_ONCE)
        .try_collect::<Vec<()>>()
        .await
        .map(drop)
}

/// Waits until every claim reports `want`.
pub async fn all_have(
    claims: &Api<PersistentVolumeClaim>,
    count: usize,
    want: Bytes,
) -> anyhow::Result<()> {
    let waiting = async {
        let mut events = watcher(claims.clone(), watcher::Config::default())
            .applied_objects()
            .boxed();
        let mut done = std::collections::HashSet::new();
        while done.len() < count {
            let claim = events.try_next().await?.context("the watch ended")?;
            let name = claim.metadata.name.unwrap_or_default();
            let status = claim.status.and_then(|status| status.capacity);
            let size = status.and_then(|capacity| capacity.get("storage")?.0.parse::<Bytes>().ok());
            if size.is_some_and(|size| size >= want) {
                done.insert(name);
            }
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(600), waiting)
        .await
        .context("not all claims were done in 600 s")?
}
