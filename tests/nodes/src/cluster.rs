//! Nodes that carry volumes: the service on the first, and every other one joined to it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Context, Error, Result};
use crate::ip::run;
use crate::machine::Machine;
use crate::network::Network;
use crate::program::trellis;
use crate::service::Service;

/// How long to wait for what must come.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long a node may be silent before it counts as lost.
const LOST_AFTER: &str = "3s";

/// Nodes that carry volumes.
pub struct Cluster {
    /// The nodes.
    pub network: Network,
    home: Option<Service>,
    joined: Vec<Option<Child>>,
    arguments: Vec<String>,
}

impl Cluster {
    /// Three nodes for a test.
    pub fn up(arguments: &[&str]) -> Result<Cluster> {
        Cluster::on(Network::new(&["a", "b", "c"])?, arguments)
    }

    /// Starts the service on the first node with these arguments, and lets the others join. Every node has a pool of its
    /// own.
    pub fn on(network: Network, arguments: &[&str]) -> Result<Cluster> {
        let mut cluster = Cluster {
            joined: network.machines().iter().map(|_| None).collect(),
            arguments: arguments.iter().map(|&text| text.to_owned()).collect(),
            network,
            home: None,
        };
        cluster.start("a")?;
        let names = cluster.network.machines()[1..].iter();
        let names: Vec<String> = names.map(|machine| machine.name().to_owned()).collect();
        for name in &names {
            cluster.home()?.add(cluster.machine(name)?)?;
            cluster.start(name)?;
        }
        let pools = names.iter().map(|name| format!("default-{name}"));
        for pool in pools.chain(["default".to_owned()]) {
            cluster.wait(&format!("pool {pool} is measured"), |cluster| {
                let pool = cluster.object("pools.trellis.dev", &pool)?;
                Ok(!pool["status"]["capacity"].is_null())
            })?;
        }
        cluster.apply(&json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "three" },
            "provisioner": "trellis.dev", "allowVolumeExpansion": true, "parameters": { "replicas": "3" },
        }))?;
        Ok(cluster)
    }

    fn home(&self) -> Result<&Service> {
        self.home.as_ref().ok_or_else(|| Error::NoNode {
            name: "a".to_owned(),
        })
    }

    /// Lets everything run on when this process ends.
    pub fn leave(mut self) {
        if let Some(home) = self.home.take() {
            home.leave();
        }
        self.joined.clear();
        self.network.stay();
    }

    /// The node of that name.
    pub fn machine(&self, name: &str) -> Result<&Machine> {
        self.network.machine(name)
    }

    /// Starts Trellis on a node, for the first time or again.
    pub fn start(&mut self, name: &str) -> Result<()> {
        let machine = self.machine(name)?.clone();
        let address = machine.address().to_string();
        if name == "a" {
            let mut arguments = vec!["--link-address", &address];
            arguments.extend(self.arguments.iter().map(String::as_str));
            self.home = Some(Service::up(&machine, &arguments)?);
            return Ok(());
        }
        let log = machine.directory().join("log");
        let stderr = File::options().create(true).append(true).open(&log);
        let stderr = stderr.context("open", &log)?;
        let mut command = machine.command(trellis()?);
        command.arg("--data").arg(machine.data());
        command.args(["node", "run", "--link-address", &address]);
        command.args(["--lost-after", LOST_AFTER, "--join"]);
        command.arg(machine.directory().join("kubeconfig"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let spawned = command.stderr(stderr).spawn();
        let child = spawned.map_err(|source| Error::NoProgram {
            program: "nsenter".to_owned(),
            source,
        })?;
        let machines = self.network.machines().iter();
        let index = machines.take_while(|each| each.name() != name).count();
        self.joined[index] = Some(child);
        Ok(())
    }

    /// Kills everything on a node, as a power loss does that spares the disks.
    pub fn kill(&mut self, name: &str) -> Result<()> {
        self.machine(name)?.kill()?;
        let machines = self.network.machines().iter();
        let index = machines.take_while(|each| each.name() != name).count();
        if name == "a" {
            self.home = None;
        } else if let Some(mut child) = self.joined[index].take() {
            let _ = child.wait();
        }
        Ok(())
    }

    /// Runs a verb, as the administrator on the service's node; what it printed.
    pub fn trellis(&self, arguments: &[&str]) -> Result<String> {
        self.home()?.trellis(arguments)
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let machine = self.machine("a")?;
        run(&mut machine.kubectl(&machine.data().join("kubeconfig"), arguments))
    }

    /// Makes an object, or changes it.
    pub fn apply(&self, object: &Value) -> Result<()> {
        let file = self.machine("a")?.directory().join("object.json");
        std::fs::write(&file, object.to_string()).context("write", &file)?;
        let file = file.to_string_lossy();
        self.kubectl(&["apply", "-f", &file]).map(drop)
    }

    /// Deletes an object, and does not wait until it is gone.
    pub fn delete(&self, kind: &str, name: &str) -> Result<()> {
        let arguments = ["delete", kind, name, "--wait=false", "--ignore-not-found"];
        self.kubectl(&arguments).map(drop)
    }

    /// An object; null if there is none.
    pub fn object(&self, kind: &str, name: &str) -> Result<Value> {
        let text = self.kubectl(&["get", kind, name, "--ignore-not-found", "-o", "json"])?;
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }

    /// All objects of a kind.
    pub fn objects(&self, kind: &str) -> Result<Vec<Value>> {
        let text = self.kubectl(&["get", kind, "-o", "json"])?;
        let mut list: Value = serde_json::from_str(&text).unwrap_or_default();
        Ok(list["items"]
            .as_array_mut()
            .map(std::mem::take)
            .unwrap_or_default())
    }

    /// Grows a claim, and waits until it has grown.
    pub fn grow(&self, claim: &str, size: &str) -> Result<()> {
        let grown = self.trellis(&["grow", claim, size, "--wait"]);
        grown.inspect_err(|_| self.show()).map(drop)
    }

    /// Asks for a larger claim, and does not wait.
    pub fn ask_growth(&self, claim: &str, size: &str) -> Result<()> {
        self.trellis(&["grow", claim, size]).map(drop)
    }

    /// Waits until a claim has that size.
    pub fn wait_grown(&self, claim: &str, size: &str) -> Result<Duration> {
        self.wait(&format!("{claim} has {size}"), |cluster| {
            let status = &cluster.object("pvc", claim)?["status"];
            let is_done = status["allocatedResourceStatuses"].is_null();
            Ok(is_done && status["capacity"]["storage"] == size)
        })
    }

    /// Shows how things stand, for whoever reads why a test has failed.
    fn show(&self) {
        let shown = self.trellis(&["node", "ls"]).unwrap_or_default();
        let kinds = "pvc,volumes.trellis.dev,targets.trellis.dev,replicas.trellis.dev,attachments.trellis.dev";
        let objects = self.kubectl(&["get", kinds, "-o", "yaml"]);
        eprintln!("{shown}{}", objects.unwrap_or_default());
    }

    /// Waits until it is so.
    pub fn wait(
        &self,
        what: &str,
        mut is_so: impl FnMut(&Cluster) -> Result<bool>,
    ) -> Result<Duration> {
        let began = Instant::now();
        loop {
            if is_so(self)? {
                return Ok(began.elapsed());
            }
            if began.elapsed() >= PATIENCE {
                self.show();
                return Err(Error::Never {
                    what: what.to_owned(),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A claim of three copies.
    pub fn claim(&self, name: &str, size: &str) -> Result<()> {
        self.apply(&json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "three",
                "resources": { "requests": { "storage": size } },
            },
        }))
    }

    /// Where a claim is to appear on a node.
    pub fn path(&self, claim: &str, node: &str) -> Result<PathBuf> {
        Ok(self.machine(node)?.directory().join(format!("mnt-{claim}")))
    }

    /// Asks for a claim on a node.
    pub fn ask_mount(&self, claim: &str, node: &str) -> Result<PathBuf> {
        let path = self.path(claim, node)?;
        self.apply(&json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
            "metadata": { "name": format!("{claim}-on-{node}") },
            "spec": { "claimName": claim, "node": node, "consumer": { "mount": { "path": path } } },
        }))?;
        Ok(path)
    }

    /// Mounts a claim on a node, and waits until it is there; where, and how long that took.
    pub fn mount(&self, claim: &str, node: &str) -> Result<(PathBuf, Duration)> {
        let path = self.ask_mount(claim, node)?;
        let name = format!("{claim}-on-{node}");
        let took = self.wait(&format!("{claim} is mounted on {node}"), |cluster| {
            let found = cluster.object("attachments.trellis.dev", &name)?;
            let status = &found["status"];
            Ok(status["phase"] == "Attached" && status["hold"].is_null())
        })?;
        Ok((path, took))
    }

    /// Ends the use of a claim on a node, and does not wait until it has ended.
    pub fn ask_unmount(&self, claim: &str, node: &str) -> Result<()> {
        self.delete("attachments.trellis.dev", &format!("{claim}-on-{node}"))
    }

    /// Waits until the use of a claim on a node has ended.
    pub fn wait_unmounted(&self, claim: &str, node: &str) -> Result<Duration> {
        let name = format!("{claim}-on-{node}");
        self.wait(&format!("{claim} is not used on {node}"), |cluster| {
            Ok(cluster.object("attachments.trellis.dev", &name)?.is_null())
        })
    }

    /// Waits until every copy of the only volume holds everything at that size.
    pub fn wait_whole(&self, size: &str) -> Result<Duration> {
        self.wait(
            &format!("three copies hold everything at {size}"),
            |cluster| {
                let targets = cluster.objects("targets.trellis.dev")?;
                let seen = targets
                    .iter()
                    .flat_map(|target| target["status"]["replicas"].as_array());
                let whole = seen
                    .flatten()
                    .filter(|copy| copy["state"] == "InSync" && copy["size"] == size);
                Ok(whole.count() == 3)
            },
        )
    }

    /// The node on which the only volume is served.
    pub fn served_on(&self) -> Result<String> {
        let targets = self.objects("targets.trellis.dev")?;
        let node = targets
            .first()
            .and_then(|target| target["spec"]["node"].as_str());
        Ok(node.unwrap_or_default().to_owned())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for machine in self.network.machines() {
                let log = machine.directory().join("log");
                tell_end(machine.name(), &log);
                // Those of its copies and targets.
                for log in logs_below(&machine.data().join("run")) {
                    tell_end(machine.name(), &log);
                }
            }
        }
        for child in self.joined.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The logs of the processes of volumes.
fn logs_below(run: &Path) -> Vec<PathBuf> {
    let within = |directory: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(directory).into_iter().flatten();
        entries.flatten().map(|entry| entry.path()).collect()
    };
    let files = within(run).into_iter().flat_map(|volume| within(&volume));
    let mut logs: Vec<PathBuf> = files
        .filter(|file| file.extension().is_some_and(|it| it == "log"))
        .collect();
    logs.sort();
    logs
}

/// Shows the last lines of a log.
fn tell_end(node: &str, log: &Path) {
    let said = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = said.lines().collect();
    let from = lines.len().saturating_sub(60);
    let name = log.file_name().unwrap_or_default().to_string_lossy();
    eprintln!(
        "{name} of node {node} said at last:\n{}",
        lines[from..].join("\n")
    );
}
