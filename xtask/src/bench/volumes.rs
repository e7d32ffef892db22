//! Many volumes mounted on one node: what a change to one of them costs, and what all of them cost at rest.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use trellis_api::Bytes;
use trellis_api::kinds::{
    ATTACHMENT_FINALIZER, AtPath, Attachment, AttachmentPhase, AttachmentSpec, Consumer, Pool,
};

use super::claims::{all_at_once, all_have};
use super::service::{SETTLES, Service};
use super::statistics::{Times, millis};

const FIRST: Bytes = Bytes::mib(320);
const BY: Bytes = Bytes::mib(16);
/// How many of them are grown, one after the other.
const GROWTHS: usize = 20;

/// Mounts `count` volumes, grows some of them one by one, and looks at the service when idle.
pub async fn run(
    binary: &Path,
    below: &Path,
    count: usize,
    idle_seconds: u64,
) -> anyhow::Result<()> {
    let service = Service::start_told(binary, below, &["--metrics", "127.0.0.1:0"])?;
    let client = service.client().await?;
    let claims = Api::<PersistentVolumeClaim>::default_namespaced(client.clone());
    make_room(&client).await?;

    let started = Instant::now();
    all_at_once(count, |index| make_claim(&claims, index)).await?;
    all_have(&claims, count, FIRST).await?;
    let attachments = Api::<Attachment>::default_namespaced(client.clone());
    all_at_once(count, |index| attach(&attachments, &service, index)).await?;
    all_attached(&attachments, count).await?;
    let mounted = started.elapsed();
    tokio::time::sleep(SETTLES).await;

    let mut times = Times::default();
    let mut observations = Vec::new();
    for index in 0..GROWTHS.min(count) {
        let before = observed(&service)?;
        let started = Instant::now();
        let want = Bytes::new(FIRST.get() + BY.get());
        service.verb(binary, &["grow", &name(index), &want.to_string(), "--wait"])?;
        times.push(started.elapsed());
        // Reports that nobody waited for may cause a last look.
        tokio::time::sleep(Duration::from_millis(300)).await;
        observations.push(observed(&service)? - before);
    }
    drop((claims, attachments, client));

    tokio::time::sleep(SETTLES).await;
    let before = observed(&service)?;
    let idle = service.idle_percent(idle_seconds).await?;
    let at_rest = observed(&service)? - before;
    let (resident, peak) = service.memory_mb()?;

    observations.sort_unstable();
    println!(
        "{count} volumes with a mounted xfs below {}",
        below.display()
    );
    println!("  all mounted after {:.1} s", mounted.as_secs_f64());
    println!(
        "  one grows: {} median, {} p99 with the program's own start; observations of volumes, of all: {} median, {} most",
        millis(times.median()),
        millis(times.permille(990)),
        observations
            .get(observations.len() / 2)
            .copied()
            .unwrap_or_default(),
        observations.last().copied().unwrap_or_default(),
    );
    println!("  idle: {idle:.2} % of a core and {at_rest} observations in {idle_seconds} s");
    println!("  memory: {resident} MB now, {peak} MB at most");
    Ok(())
}

fn name(index: usize) -> String {
    format!("claim-{index}")
}

/// The volumes are sparse and nearly empty: together they may promise far more than there is.
async fn make_room(client: &Client) -> anyhow::Result<()> {
    let pools = Api::<Pool>::all(client.clone());
    let body = json!({ "spec": { "overcommitPercent": 10000 } });
    pools
        .patch("default", &PatchParams::default(), &Patch::Merge(body))
        .await?;
    Ok(())
}

async fn make_claim(claims: &Api<PersistentVolumeClaim>, index: usize) -> anyhow::Result<()> {
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": { "name": name(index) },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": FIRST } },
        },
    }))?;
    claims.create(&PostParams::default(), &claim).await?;
    Ok(())
}

async fn attach(
    attachments: &Api<Attachment>,
    service: &Service,
    index: usize,
) -> anyhow::Result<()> {
    let spec = AttachmentSpec {
        claim_name: Some(name(index)),
        volume: None,
        node: "bench".to_owned(),
        consumer: Consumer::Mount(AtPath {
            path: service.path(&format!("mnt-{index}")).display().to_string(),
            read_only: false,
        }),
    };
    let mut attachment = Attachment::new(&name(index), spec);
    attachment.metadata.finalizers = Some(vec![ATTACHMENT_FINALIZER.to_owned()]);
    attachments
        .create(&PostParams::default(), &attachment)
        .await?;
    Ok(())
}

async fn all_attached(attachments: &Api<Attachment>, count: usize) -> anyhow::Result<()> {
    let waiting = async {
        let mut events = watcher(attachments.clone(), watcher::Config::default())
            .applied_objects()
            .boxed();
        let mut done = std::collections::HashSet::new();
        while done.len() < count {
            let attachment = events.try_next().await?.context("the watch ended")?;
            let status = attachment.status.clone().unwrap_or_default();
            if status.phase == AttachmentPhase::Attached {
                done.insert(attachment.name_any());
            }
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(600), waiting)
        .await
        .context("not all volumes were mounted in 600 s")?
}

/// How often the service has looked at a volume.
fn observed(service: &Service) -> anyhow::Result<u64> {
    let metrics = service.metrics()?;
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix("trellis_volume_observations_total "))
        .context("the service does not tell how often it observed")?;
    Ok(line.trim().parse()?)
}
