//! How long a growth takes, compared with the bare system calls that it needs.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::watch_object;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use trellis_api::kinds::{Attachment, Replica, Target, Volume};
use trellis_api::{Bytes, Rung};
use trellis_node::filesystem::{self, FilesystemKind};
use trellis_node::sys::loopdev;
use trellis_node::volume;

use super::service::{Service, written};
use super::statistics::{Times, millis};

/// The size that claims begin with, and by how much each growth raises it.
const FIRST: Bytes = Bytes::gib(1);
const BY: Bytes = Bytes::mib(8);

/// What grows.
pub struct Growing<'a> {
    /// Where.
    pub below: &'a Path,
    /// The filesystem.
    pub kind: &'a str,
    /// How many copies the claim has.
    pub copies: usize,
}

/// Runs `growths` growths, each followed by a bare one.
pub async fn run(binary: &Path, what: &Growing<'_>, growths: usize) -> anyhow::Result<()> {
    let Growing {
        below,
        kind,
        copies,
    } = *what;
    let service = Service::start(binary, below)?;
    let client = service.client().await?;
    let claims = Api::<PersistentVolumeClaim>::default_namespaced(client.clone());
    for copy in 0..copies {
        let (name, path) = (
            format!("pool-{copy}"),
            service.path(&format!("pool-{copy}")),
        );
        std::fs::create_dir(&path)?;
        let path = path.to_str().context("a plain path")?;
        service.verb(binary, &["pool", "add", &name, path])?;
    }
    make_claim(&client, &claims, kind, copies).await?;
    let mount = service.path("mnt");
    service.verb(
        binary,
        &["mount", "data", mount.to_str().context("a plain path")?],
    )?;
    let kind: FilesystemKind = kind.parse()?;
    let bare = Bare::make(service.path("bare"), kind)?;
    let mut events = watch_object(claims.clone(), "data").boxed();
    let (mut whole, mut over, mut raw, mut acknowledged) = (
        Times::default(),
        Times::default(),
        Times::default(),
        Times::default(),
    );
    let mut rungs = RungTimes::default();
    let mut stages = Stages::default();
    let mut in_a_row = Vec::new();
    let before = written(&client).await?;
    for index in 0..growths {
        let want = Bytes::new(FIRST.get() + BY.get() * u64::try_from(index + 1)?);
        let (started, clock) = (Instant::now(), Timestamp::now());
        let body = json!({ "spec": { "resources": { "requests": { "storage": want } } } });
        let asked = claims
            .patch("data", &PatchParams::default(), &Patch::Merge(body))
            .await?;
        acknowledged.push(started.elapsed());
        let done = reported(&mut events, want).await?;
        let measured = bare.measure(kind, &mount)?;
        let took = started.elapsed();
        anyhow::ensure!(
            measured >= want,
            "the claim says {want}, the filesystem {measured}"
        );
        let raw_took = bare.grow(kind, want)?;
        whole.push(took);
        raw.push(raw_took);
        over.push(took.saturating_sub(raw_took));
        stages.push("done, as the client sees it", took);
        in_a_row.push(flushes_between(&client, &asked, &done).await?);
        rungs.take(&client, clock, &mut stages).await?;
        // Let the reports that nobody waited for settle, so that each growth is measured alone.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let after = written(&client).await?;
    let flushes = after.flushes - before.flushes;
    let each = after.in_flushes.saturating_sub(before.in_flushes) / u32::try_from(flushes.max(1))?;
    println!(
        "growth of a mounted {kind} with {copies} {} below {}, {growths} times by {BY}",
        if copies == 1 { "copy" } else { "copies" },
        below.display()
    );
    println!("  {:<30} {:>9}  {:>9}", "", "median", "p99");
    let row = |name: &str, times: &Times| {
        println!(
            "  {name:<16} {:>9}  {:>9}",
            millis(times.median()),
            millis(times.permille(990))
        );
    };
    row("patch to done", &whole);
    row("bare", &raw);
    row("overhead", &over);
    row("patch answered", &acknowledged);
    for (rung, times) in &rungs.0 {
        row(&format!("  {rung} rung"), times);
    }
    println!("  since the patch was sent:");
    for (name, times) in &stages.0 {
        row(&format!("  {name}"), times);
    }
    let ratio = whole.median().as_secs_f64() / raw.median().as_secs_f64();
    println!("  patch to done / bare: {ratio:.2}");
    println!(
        "  one flush of the store: {}; {:.1} flushes and {:.1} object writes a growth",
        millis(each),
        ratio_of(flushes, growths),
        ratio_of(after.writes - before.writes, growths),
    );
    in_a_row.sort_unstable();
    let at = |index: usize| in_a_row.get(index).copied().unwrap_or_default();
    println!(
        "  flushes from the one with the request to the one with the claim done, both counted: median {}, most {}; \
         and 1 sync of each copy\n",
        at(in_a_row.len() / 2),
        at(in_a_row.len().saturating_sub(1)),
    );
    Ok(())
}

fn ratio_of(count: u64, of: usize) -> f64 {
    let exact = |number: u64| {
        u32::try_from(number)
            .map(f64::from)
            .unwrap_or(f64::INFINITY)
    };
    exact(count) / exact(u64::try_from(of).unwrap_or(1).max(1))
}

async fn make_claim(
    client: &Client,
    claims: &Api<PersistentVolumeClaim>,
    kind: &str,
    copies: usize,
) -> anyhow::Result<()> {
    let class: k8s_openapi::api::storage::v1::StorageClass = serde_json::from_value(json!({
        "metadata": { "name": "bench" },
        "provisioner": "trellis.dev",
        "allowVolumeExpansion": true,
        "parameters": {
            "csi.storage.k8s.io/fstype": kind, "replicas": copies.to_string(), "allowSharedDisk": "true",
        },
    }))?;
    Api::all(client.clone())
        .create(&PostParams::default(), &class)
        .await?;
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": { "name": "data" },
        "spec": {
            "storageClassName": "bench",
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": FIRST } },
        },
    }))?;
    claims.create(&PostParams::default(), &claim).await?;
    let mut events = watch_object(claims.clone(), "data").boxed();
    reported(&mut events, FIRST).await.map(drop)
}

/// How many flushes the store made from the one that made `asked` durable to the one that made `done` durable:
/// as many as can have stood in a row on the way, since a store flushes one batch at a time.
async fn flushes_between(
    client: &Client,
    asked: &PersistentVolumeClaim,
    done: &PersistentVolumeClaim,
) -> anyhow::Result<u64> {
    let flushes = written(client).await?.recent;
    let number = |claim: &PersistentVolumeClaim| {
        let revision = claim.resource_version().unwrap_or_default();
        let revision: u64 = revision.parse()?;
        let flush = flushes.iter().find(|flush| flush.revision >= revision);
        flush
            .map(|flush| flush.number)
            .context("the store has forgotten the flush")
    };
    Ok(number(done)? - number(asked)? + 1)
}

/// Waits until the claim's status reports `want`.
async fn reported<S>(events: &mut S, want: Bytes) -> anyhow::Result<PersistentVolumeClaim>
where
    S: futures::Stream<Item = Result<Option<PersistentVolumeClaim>, kube::runtime::watcher::Error>>
        + Unpin,
{
    let waiting = async {
        while let Some(claim) = events.try_next().await? {
            let Some(claim) = claim else { continue };
            let capacity = claim
                .status
                .as_ref()
                .and_then(|each| each.capacity.as_ref());
            let size = capacity.and_then(|each| each.get("storage")?.0.parse::<Bytes>().ok());
            if size.is_some_and(|size| size >= want) {
                return Ok(claim);
            }
        }
        anyhow::bail!("the watch ended")
    };
    tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .context("a growth was not done in 30 s")?
}

/// The same work done bare: a sparse file, a loop device, a mounted filesystem.
struct Bare {
    file: PathBuf,
    mount: PathBuf,
    device: PathBuf,
}

impl Bare {
    fn make(dir: PathBuf, kind: FilesystemKind) -> anyhow::Result<Bare> {
        std::fs::create_dir_all(&dir)?;
        let file = dir.join("file");
        std::fs::File::create(&file)?.set_len(FIRST.get())?;
        let device = volume::attach(&file, false)?.path;
        let mount = dir.join("mnt");
        volume::ensure_filesystem(&device, kind, &dir.join("note"))?;
        volume::stage(&device, kind, &mount, false)?;
        Ok(Bare {
            file,
            mount,
            device,
        })
    }

    /// Extends the file, the device and the filesystem, by one system call each.
    fn grow(&self, kind: FilesystemKind, to: Bytes) -> anyhow::Result<Duration> {
        let file = std::fs::OpenOptions::new().write(true).open(&self.file)?;
        let device = std::fs::File::open(&self.device)?;
        let started = Instant::now();
        file.set_len(to.get())?;
        loopdev::refresh_size(device.as_fd())?;
        filesystem::grow_mounted(kind, &self.mount, &self.device)?;
        Ok(started.elapsed())
    }

    fn measure(&self, kind: FilesystemKind, mount: &Path) -> anyhow::Result<Bytes> {
        let mounts = trellis_node::sys::mountinfo::read()?;
        let found = mounts
            .iter()
            .find(|each| each.mount_point == mount)
            .context("the claim is not mounted")?;
        let device = PathBuf::from(&found.source);
        Ok(filesystem::measure_mounted(kind, mount, &device)?.size())
    }
}

/// When each stage of a growth was reached, counted from the moment when the patch was sent.
#[derive(Default)]
struct Stages(Vec<(String, Times)>);

impl Stages {
    fn push_at(&mut self, name: &str, start: Timestamp, at: Timestamp) {
        self.push(
            name,
            at.duration_since(start).try_into().unwrap_or_default(),
        );
    }

    fn push(&mut self, name: &str, time: Duration) {
        if !self.0.iter().any(|(known, _)| known == name) {
            self.0.push((name.to_owned(), Times::default()));
        }
        let found = self.0.iter_mut().find(|(known, _)| known == name);
        if let Some((_, times)) = found {
            times.push(time);
        }
    }
}

/// How long the raise of each rung took, as the service reports it.
#[derive(Default)]
struct RungTimes(Vec<(Rung, Times)>);

impl RungTimes {
    async fn take(
        &mut self,
        client: &Client,
        start: Timestamp,
        stages: &mut Stages,
    ) -> anyhow::Result<()> {
        let all = ListParams::default();
        let mut found = Vec::new();
        for volume in Api::<Volume>::all(client.clone()).list(&all).await? {
            if let Some(growth) = volume.spec.growth {
                stages.push_at("planned", start, growth.at.0);
            }
        }
        for replica in Api::<Replica>::all(client.clone()).list(&all).await? {
            found.extend(replica.status.and_then(|status| status.rung));
        }
        for target in Api::<Target>::all(client.clone()).list(&all).await? {
            found.extend(target.status.and_then(|status| status.rung));
        }
        for attachment in Api::<Attachment>::all(client.clone()).list(&all).await? {
            found.extend(
                attachment
                    .status
                    .map(|status| status.rungs)
                    .unwrap_or_default(),
            );
        }
        for status in found {
            let Some(raised) = status.raised else {
                continue;
            };
            stages.push_at(&format!("{} raised", status.rung), start, raised.at.0);
            let time = Duration::from_micros(raised.took_micros);
            match self.0.iter_mut().find(|(rung, _)| *rung == status.rung) {
                Some((_, times)) => times.push(time),
                None => {
                    let mut times = Times::default();
                    times.push(time);
                    self.0.push((status.rung, times));
                }
            }
        }
        Ok(())
    }
}
