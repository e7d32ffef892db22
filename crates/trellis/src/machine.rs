//! This machine, as the agent needs it: joins the replica store and the kernel behind the agent's traits, and turns
//! their errors into the holds that a user reads.

mod about;
mod consumers;
mod copies;
mod hold;
mod pools;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use trellis_api::about::About;
use trellis_engine::replica::{Pool, Replica};

pub use self::consumers::fill;
pub use self::hold::node_hold;
use crate::serve::{Links, Supervisor, TargetStatus, Wake};

/// This machine. Private mounts and notes about filesystems in the making live in its data directory.
pub struct ThisMachine {
    /// Its own directory.
    data: PathBuf,
    mounts: PathBuf,
    notes: PathBuf,
    pools: Mutex<HashMap<PathBuf, Arc<Pool>>>,
    /// The processes of volumes with several copies.
    processes: Arc<Supervisor>,
    /// What copies on this machine say about themselves, as it was last read or written.
    descriptions: Mutex<HashMap<(PathBuf, String), About>>,
    /// Replicas that are open. Opening one checks and syncs it; measuring an open one only reads.
    replicas: Mutex<HashMap<(PathBuf, String), Replica>>,
}

impl ThisMachine {
    /// The machine with `data` as its own directory, which is a node with these links.
    pub fn new(data: &Path, target_silence_max: Duration, links: Links) -> std::io::Result<Self> {
        let (mounts, notes) = (data.join("mounts"), data.join("formatting"));
        trellis_files::make_directory(&mounts)?;
        trellis_files::make_directory(&notes)?;
        Ok(ThisMachine {
            data: data.to_owned(),
            mounts,
            notes,
            pools: Mutex::default(),
            processes: Arc::new(Supervisor::new(data.join("run"), target_silence_max, links)),
            descriptions: Mutex::default(),
            replicas: Mutex::default(),
        })
    }

    /// From now on reports which volume to look at when something happens to its processes.
    pub fn listen_to_processes(&self, wake: Wake) -> std::io::Result<()> {
        self.processes.listen(wake)
    }

    /// Sets the nodes that there are. One that is gone loses its links at once.
    pub fn know_nodes(&self, nodes: BTreeSet<String>) {
        self.processes.know_nodes(nodes);
    }

    /// What the target of a volume says; none if it does not run or does not answer. This may take a few seconds.
    pub fn target_status(&self, volume: &str) -> Option<TargetStatus> {
        self.processes.target_status(volume)
    }

    /// Where private mounts are; each bears the name of its volume.
    pub fn mounts(&self) -> &Path {
        &self.mounts
    }
}
