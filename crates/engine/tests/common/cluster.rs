//! Replicas as processes, so that they can be killed and frozen.
#![allow(dead_code, reason = "every test binary uses its own part of this")]

#[path = "pki.rs"]
pub(crate) mod pki;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use pki::Home;
use rustix::process::{Pid, Signal, kill_process};
use trellis_api::Bytes;
use trellis_api::step::Step;
use trellis_engine::coordinator::Status;
use trellis_engine::drive::{Address, Credentials, Volume, VolumeSettings};
use trellis_engine::proto::{Config, ReplicaId};
use trellis_engine::replica::{Identity, Pool, Provisioning, Purpose};
use uuid::Uuid;

/// How long a test waits for what must come.
const LONG: Duration = Duration::from_secs(60);

/// Waits until the volume is as wanted.
pub(crate) async fn until(
    volume: &Volume,
    what: &str,
    wanted: impl FnMut(&Status) -> bool,
) -> Status {
    match tokio::time::timeout(LONG, volume.until(wanted)).await {
        Ok(status) => status.unwrap(),
        Err(_) => panic!("{what} did not come: {:#?}", volume.status()),
    }
}

/// Everything is there, everywhere.
pub(crate) fn is_whole(status: &Status) -> bool {
    status.available && status.redundancy_met && status.size_converged
}

/// A program from `examples/`.
pub(crate) fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .join("examples")
        .join(name);
    assert!(
        path.exists(),
        "{} is missing; `cargo build -p trellis-engine --examples` makes it",
        path.display()
    );
    path
}

/// A process that is killed when this goes away, frozen or not.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Process {
        Process(
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, signal).unwrap();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A replica, on a pool of its own.
pub(crate) struct Replica {
    pub(crate) identity: Identity,
    pub(crate) pool: PathBuf,
    provisioning: Provisioning,
    listen: Address,
    /// Where the credentials of its node are, if it listens for other nodes.
    credentials: Option<PathBuf>,
    process: Option<Process>,
}

impl Replica {
    /// Makes a replica on the pool in that directory.
    pub(crate) fn make(
        pool: &Path,
        identity: Identity,
        size: u64,
        provisioning: Provisioning,
        listen: Address,
    ) -> Replica {
        Pool::open(pool)
            .unwrap()
            .create_for(
                "r",
                identity,
                Bytes::new(size),
                provisioning,
                Purpose::Served,
                None,
            )
            .unwrap();
        Replica {
            identity,
            pool: pool.to_owned(),
            provisioning,
            listen,
            credentials: None,
            process: None,
        }
    }

    pub(crate) fn start(&mut self) {
        assert!(self.start_to_die(None), "the replica did not start");
    }

    /// Starts it, to die at a step. Says whether it came so far as to listen.
    pub(crate) fn start_to_die(&mut self, step: Option<Step>) -> bool {
        let mut command = Command::new(example("replica-serve"));
        command
            .arg(self.path())
            .arg(self.identity.volume.to_string())
            .arg(self.identity.replica.to_string())
            .arg(self.listen.to_string());
        if self.provisioning == Provisioning::Thick {
            command.arg("thick");
        }
        if let Some(dir) = &self.credentials {
            command.arg(format!("credentials={}", dir.display()));
            command.arg(format!("allow={COORDINATOR}"));
        }
        if let Some(step) = step {
            command.env("DIES_AT", step.name());
        }
        let mut process = Process::start(&mut command);
        let mut line = String::new();
        let out = process.child().stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        let listens = line.trim().parse();
        if let Ok(listen) = &listens {
            self.listen = Address::clone(listen);
        }
        self.process = Some(process);
        listens.is_ok()
    }

    /// Waits until it has died by itself.
    pub(crate) fn wait_for_death(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.child().wait().unwrap();
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.pool.join("replicas/r")
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path().join("data")
    }

    pub(crate) fn address(&self) -> Address {
        self.listen.clone()
    }

    /// Kills it, without a chance to say anything.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }

    /// Lets it end by itself: what it has is settled then.
    pub(crate) fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            drop(process.child().stdin.take());
            process.child().wait().unwrap();
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.process.as_ref().unwrap().signal(signal);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().pid()
    }
}

/// The node that coordinates, if the replicas are on nodes of their own.
pub(crate) const COORDINATOR: &str = "coordinator";

/// A volume with its replicas.
pub(crate) struct Cluster {
    pub(crate) volume: Uuid,
    pub(crate) replicas: Vec<Replica>,
    home: tempfile::TempDir,
    /// If the replicas are on nodes of their own: who signs certificates, and what the coordinator has.
    nodes: Option<(Home, Credentials)>,
}

impl Cluster {
    /// A volume with so many replicas, which run.
    pub(crate) fn start(count: usize, size: u64) -> Cluster {
        Cluster::start_on(tempfile::tempdir().unwrap(), None, count, size)
    }

    /// The same with replicas on nodes of their own, which are reached by TLS.
    pub(crate) fn start_tls(count: usize, size: u64) -> Cluster {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new();
        let credentials = home.credentials(dir.path(), COORDINATOR);
        Cluster::start_on(dir, Some((home, credentials)), count, size)
    }

    fn start_on(
        home: tempfile::TempDir,
        nodes: Option<(Home, Credentials)>,
        count: usize,
        size: u64,
    ) -> Cluster {
        let mut cluster = Cluster {
            volume: Uuid::new_v4(),
            replicas: Vec::new(),
            home,
            nodes,
        };
        for _ in 0..count {
            let pool = cluster.new_pool();
            cluster.add(&pool, size, Provisioning::Thin);
        }
        cluster
    }

    /// An empty directory for a pool.
    pub(crate) fn new_pool(&self) -> PathBuf {
        let pool = self
            .home
            .path()
            .join(format!("pool-{}", self.replicas.len()));
        std::fs::create_dir(&pool).unwrap();
        pool
    }

    /// Adds a replica on a pool, and starts it.
    pub(crate) fn add(&mut self, pool: &Path, size: u64, provisioning: Provisioning) {
        let index = self.replicas.len();
        let identity = Identity {
            volume: self.volume,
            replica: Uuid::new_v4(),
        };
        let home = self.home.path();
        let (listen, credentials) = match &self.nodes {
            None => (Address::Unix(home.join(format!("{index}.sock"))), None),
            Some((authority, _)) => {
                let node = format!("node-{index}");
                authority.credentials(home, &node);
                let listen = format!("tls:{node}@127.0.0.1:0").parse().unwrap();
                (listen, Some(home.join(node)))
            }
        };
        let mut replica = Replica::make(pool, identity, size, provisioning, listen);
        replica.credentials = credentials;
        replica.start();
        self.replicas.push(replica);
    }

    pub(crate) fn addresses(&self) -> BTreeMap<ReplicaId, Address> {
        self.replicas
            .iter()
            .map(|it| (it.identity.replica, it.address()))
            .collect()
    }

    pub(crate) fn config(&self) -> Config {
        Config::majority(self.replicas.iter().map(|it| it.identity.replica).collect())
    }

    /// What the coordinator proves itself with, if the replicas are on other nodes.
    pub(crate) fn credentials(&self) -> Option<&Credentials> {
        self.nodes.as_ref().map(|(_, credentials)| credentials)
    }

    /// Where the coordinator has its credentials.
    pub(crate) fn credentials_dir(&self) -> PathBuf {
        self.home.path().join(COORDINATOR)
    }

    pub(crate) fn settings(&self) -> VolumeSettings {
        VolumeSettings {
            credentials: self.credentials().cloned(),
            ..VolumeSettings::new(self.volume, self.config(), self.addresses())
        }
    }

    pub(crate) fn id(&self, index: usize) -> ReplicaId {
        self.replicas[index].identity.replica
    }

    /// The data files of all replicas are the same, to the last byte of the volume.
    pub(crate) fn assert_same(&self, size: u64) {
        use std::os::unix::fs::FileExt;
        let files: Vec<_> = self
            .replicas
            .iter()
            .map(|replica| std::fs::File::open(replica.data()).unwrap())
            .collect();
        let mut buffers = vec![vec![0; 1 << 20]; files.len()];
        let mut at = 0;
        while at < size {
            let length = usize::try_from((size - at).min(1 << 20)).unwrap();
            for (file, buffer) in files.iter().zip(&mut buffers) {
                file.read_exact_at(&mut buffer[..length], at).unwrap();
            }
            for buffer in &buffers[1..] {
                assert!(
                    buffer[..length] == buffers[0][..length],
                    "the replicas differ near byte {at}"
                );
            }
            at += u64::try_from(length).unwrap();
        }
    }
}
