//! A service in a temporary directory, and what a person and a program do with it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use trellis_api::Bytes;
use trellis_api::kinds::{Attachment, Replica};
use trellis_node::filesystem::FilesystemKind;

/// How long anything may take that is waited for. Generous: the processor may be an emulated one, and a
/// growth a thousandfold.
const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(5);

/// A running service. It ends with this, and nothing of it stays.
pub struct Service {
    dir: TempDir,
    child: Child,
    runtime: Runtime,
    client: Client,
    claims: Api<PersistentVolumeClaim>,
}

impl Service {
    /// Starts a service.
    pub fn start() -> Service {
        let dir = TempDir::with_prefix("trellis-scenario-").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let (child, client) = up(dir.path(), &runtime, None);
        Service {
            dir,
            child,
            runtime,
            claims: Api::default_namespaced(client.clone()),
            client,
        }
    }

    /// Kills the service, unless it has ended by itself, and starts it again: so that it dies at a step, if one is
    /// named.
    pub fn restart(&mut self, dies_at: Option<&str>) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
        let (child, client) = up(self.dir.path(), &self.runtime, dies_at);
        self.child = child;
        self.claims = Api::default_namespaced(client.clone());
        self.client = client;
    }

    /// Waits until the service has died at the step that it was told.
    pub fn wait_death(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the step is never reached");
            std::thread::sleep(POLL);
        }
    }

    /// A path of the scenario.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes a class for the filesystem.
    pub fn class(&self, kind: FilesystemKind) {
        self.class_with(kind, &[]);
    }

    /// Makes a class for the filesystem with more parameters.
    pub fn class_with(&self, kind: FilesystemKind, more: &[(&str, &str)]) {
        let mut parameters = BTreeMap::from([("csi.storage.k8s.io/fstype", kind.name())]);
        parameters.extend(more.iter().copied());
        let class: StorageClass = serde_json::from_value(json!({
            "metadata": { "name": kind.name() },
            "provisioner": "trellis.dev",
            "allowVolumeExpansion": true,
            "parameters": parameters,
        }))
        .unwrap();
        let classes = Api::all(self.client.clone());
        self.runtime
            .block_on(classes.create(&PostParams::default(), &class))
            .unwrap();
    }

    /// Makes a claim and waits until it is bound.
    pub fn claim(&self, name: &str, kind: FilesystemKind, size: Bytes) {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": {
                "storageClassName": kind.name(),
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": size } },
            },
        }))
        .unwrap();
        self.runtime
            .block_on(self.claims.create(&PostParams::default(), &claim))
            .unwrap();
        self.wait_size(name, size);
    }

    /// Asks for a size, and waits for nothing.
    pub fn request(&self, name: &str, size: Bytes) {
        let body = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
        let (how, patch) = (PatchParams::default(), Patch::Merge(body));
        self.runtime
            .block_on(self.claims.patch(name, &how, &patch))
            .unwrap();
    }

    /// Waits until the claim reports a size of at least this.
    pub fn wait_size(&self, name: &str, size: Bytes) {
        self.wait(&format!("{name} reports {size}"), || {
            self.reported(name).filter(|found| *found >= size)
        });
    }

    /// The size that the claim reports.
    pub fn reported(&self, name: &str) -> Option<Bytes> {
        let claim = self.runtime.block_on(self.claims.get(name)).unwrap();
        let capacity = claim.status?.capacity?;
        capacity.get("storage")?.0.parse().ok()
    }

    /// The volume of a claim.
    pub fn volume(&self, claim: &str) -> String {
        let claim = self.runtime.block_on(self.claims.get(claim)).unwrap();
        claim.spec.unwrap().volume_name.unwrap()
    }

    /// The uses of volumes.
    pub fn attachments(&self) -> Vec<Attachment> {
        let attachments = Api::<Attachment>::default_namespaced(self.client.clone());
        let all = ListParams::default();
        let list = self.runtime.block_on(attachments.list(&all));
        list.unwrap().items
    }

    /// The file of the first copy of the claim's volume.
    pub fn data_file(&self, name: &str) -> PathBuf {
        let volume = self.volume(name);
        let replicas = Api::<Replica>::all(self.client.clone());
        let all = ListParams::default();
        let list = self.runtime.block_on(replicas.list(&all)).unwrap();
        let replica = list.into_iter().find(|each| each.spec.volume == volume);
        replica.unwrap().status.unwrap().path.unwrap().into()
    }

    /// Mounts a claim below the scenario's directory.
    pub fn mount(&self, claim: &str) -> PathBuf {
        let path = self.dir.path().join(format!("mnt-{claim}"));
        self.verb(&["mount", claim, path.to_str().unwrap()]);
        path
    }

    /// Unmounts a claim everywhere.
    pub fn umount(&self, claim: &str) {
        self.verb(&["umount", claim]);
    }

    /// Removes a claim, and waits until it and its file are gone.
    pub fn delete(&self, claim: &str) {
        let data = self.data_file(claim);
        let how = DeleteParams::default();
        self.runtime
            .block_on(self.claims.delete(claim, &how))
            .unwrap();
        self.wait(&format!("the data of {claim} is gone"), || {
            (!data.exists()).then_some(())
        });
    }

    /// Runs a verb that must succeed, and answers what it printed.
    pub fn verb(&self, arguments: &[&str]) -> String {
        let output = Command::new(trellis())
            .args(arguments)
            .arg("--data")
            .arg(self.dir.path().join("data"))
            .env_remove("KUBECONFIG")
            .output()
            .unwrap();
        let (stdout, stderr) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert!(
            output.status.success(),
            "trellis {arguments:?} failed with {}:\n{stdout}{stderr}",
            output.status
        );
        stdout.into_owned()
    }

    /// Waits until `check` answers something, and says `what` was waited for if it never does.
    pub fn wait<T>(&self, what: &str, mut check: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(answer) = check() {
                return answer;
            }
            assert!(Instant::now() < deadline, "gave up waiting for: {what}");
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        crate::volume::sweep(self.dir.path());
        // It stays for a moment when there is nothing left to keep.
        let lock = self.dir.path().join("data/keeper/keeper.lock");
        let pid = std::fs::read_to_string(lock).unwrap_or_default();
        if let Some(pid) = pid.trim().parse().ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Starts the service on the data below `dir`.
fn up(dir: &Path, runtime: &Runtime, dies_at: Option<&str>) -> (Child, Client) {
    let data = dir.join("data");
    let mut child = Command::new(trellis())
        .args(["up", "--node", "guest", "--data"])
        .arg(&data)
        .envs(dies_at.map(|step| ("TRELLIS_CRASH_AT", step)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert!(line.contains("trellis is up"), "{line}");
    let client = runtime.block_on(async {
        let file = Kubeconfig::read_from(data.join("kubeconfig")).unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(file, &options);
        Client::try_from(config.await.unwrap()).unwrap()
    });
    (child, client)
}

/// The binary under test.
fn trellis() -> PathBuf {
    let named = std::env::var_os("TRELLIS").expect("TRELLIS names the binary");
    named.into()
}
