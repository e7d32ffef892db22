//! A volume of three copies, served by the service itself.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::core::DynamicObject;
use kube::discovery::ApiResource;
use kube::{Client, core::GroupVersionKind};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::server::{Life, Role, Server};
use super::targets::BackingDir;
use super::{Programs, Work};
use crate::bench::replicated;
use crate::bench::service::Service;

pub const NAME: &str = "three copies";
/// Three copies without sums of their blocks: what the sums cost.
pub const UNSUMMED: &str = "without sums";
const CLAIM: &str = "three";
const COPIES: u32 = 3;
/// The processes of a volume, by the names of their locks.
const PROCESSES: [&str; 4] = ["target", "0", "1", "2"];
/// How long the volume may take to be there.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// What fills the volume.
const FILLING: Work = super::work(1 << 20, false, 8, true);
/// How often the filling may take longer than was thought; each time it gets twice as long.
const FILLINGS_MAX: u32 = 7;

/// The service with one volume.
pub struct Copies {
    claims: Api<PersistentVolumeClaim>,
    runtime: Runtime,
    volume: PathBuf,
    // Last: it takes everything with it.
    _service: Service,
}

impl Copies {
    /// Asks for a larger volume, as any client of the service does.
    pub fn grow(&self, mib: u64) -> anyhow::Result<()> {
        let storage = format!("{mib}Mi");
        let body = json!({ "spec": { "resources": { "requests": { "storage": storage } } } });
        let (how, what) = (PatchParams::default(), Patch::Merge(body));
        self.runtime
            .block_on(self.claims.patch(CLAIM, &how, &what))
            .context("the claim cannot be patched")?;
        Ok(())
    }

    /// The process that serves the volume, and those of its copies.
    pub fn pids(&self) -> anyhow::Result<Vec<u32>> {
        let pid = |name: &&str| {
            let lock = self.volume.join(format!("{name}.lock"));
            let text = std::fs::read_to_string(&lock)
                .with_context(|| format!("no process has {}", lock.display()))?;
            text.trim().parse().context("a lock without a process")
        };
        PROCESSES.iter().map(pid).collect()
    }
}

/// Starts the service next to the backing directory, and has it make a volume with all of its bytes.
pub fn start(programs: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Server> {
    start_with(programs, backing_dir, true)
}

/// The same without sums of their blocks.
pub fn start_unsummed(programs: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Server> {
    start_with(programs, backing_dir, false)
}

fn start_with(
    programs: &Programs,
    backing_dir: &BackingDir,
    checksums: bool,
) -> anyhow::Result<Server> {
    let binary = &programs.trellis;
    let service = Service::start(binary, backing_dir.parent())?;
    replicated::add_pools(&service, binary)?;
    let runtime = Runtime::new().context("no asynchronous runtime")?;
    let client = runtime.block_on(service.client())?;
    let size = format!("{}Mi", backing_dir.size_mib);
    replicated::claim_block(&service, CLAIM, COPIES, checksums, &size)?;
    let status = runtime.block_on(served(&client))?;
    let word = |name: &str| status[name].as_str().map(str::to_owned);
    let (target, address) = word("iqn").zip(word("portal")).context("not served")?;
    let volume = only_entry(&service.path("data/run"))?;
    let user = volume
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let secret =
        std::fs::read_to_string(volume.join("secret")).context("the volume has no secret")?;
    let life = Life::Copies(Box::new(Copies {
        claims: Api::default_namespaced(client),
        runtime,
        volume,
        _service: service,
    }));
    let (name, role) = if checksums {
        (NAME, Role::Copies)
    } else {
        (UNSUMMED, Role::Unsummed)
    };
    let mut server = Server::of(name, role, life, address, &target, 0);
    server.proof = user.map(|user| (user, secret));
    fill(programs, &server, backing_dir.size_mib)?;
    Ok(server)
}

/// The status of the target, once initiators can use it and every copy counts.
async fn served(client: &Client) -> anyhow::Result<Value> {
    let kind = GroupVersionKind::gvk("trellis.dev", "v1alpha1", "Target");
    let kind = ApiResource::from_gvk(&kind);
    let targets = Api::<DynamicObject>::all_with(client.clone(), &kind);
    let deadline = Instant::now() + START_TIME_MAX;
    loop {
        let list = targets.list(&ListParams::default()).await?;
        let status = list.items.into_iter().next().map(|target| target.data);
        let status = status.unwrap_or_default()["status"].clone();
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        let whole =
            conditions.any(|each| each["type"] == "RedundancyMet" && each["status"] == "True");
        if status["portal"].is_string() && whole {
            return Ok(status);
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "the volume is not served: {status}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn only_entry(directory: &Path) -> anyhow::Result<PathBuf> {
    let mut entries = std::fs::read_dir(directory)
        .with_context(|| format!("{} cannot be read", directory.display()))?;
    let entry = entries.next().context("no volume of several copies")??;
    Ok(entry.path())
}

/// Writes the whole volume once, as the files of the others have been.
fn fill(programs: &Programs, server: &Server, size_mib: u64) -> anyhow::Result<()> {
    for doubled in 0..FILLINGS_MAX {
        let seconds = f64::from(1_u32 << doubled);
        let sample = server.measure(programs, FILLING, seconds)?;
        let places = f64::from(u32::try_from(size_mib).context("too large a volume")?);
        if sample.a_second * seconds >= places {
            return Ok(());
        }
    }
    anyhow::bail!("the volume cannot be filled")
}
