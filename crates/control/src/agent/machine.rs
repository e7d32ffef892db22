//! What the agent needs from its machine.
//!
//! The binary implements this trait with the replica store and the kernel. Every call blocks, is idempotent, and
//! measures instead of remembering. A refusal is returned as the hold that a user will read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trellis_api::about::About;
use trellis_api::kinds::{
    Content, FilesystemKind, Members, Recovery, ReplicaSeen, ScrubSeen, UnknownCopy, Usage, Via,
    WhenFull,
};
use trellis_api::{Bytes, Hold, Rung};

/// A copy of a volume on a pool of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaPlace {
    /// The pool's directory.
    pub pool: PathBuf,
    /// The identity that the directory must have, once it is known.
    pub pool_id: Option<String>,
    /// The replica's name.
    pub name: String,
    /// The volume's name.
    pub volume: String,
    /// Identity of the volume.
    pub volume_id: String,
    /// Identity of the copy.
    pub replica_id: String,
    /// Whether every byte is allocated.
    pub thick: bool,
    /// What the copy should say about itself in its own directory; none if its volume is not known.
    pub about: Option<About>,
    /// Whether a process of its own serves it.
    pub served: bool,
    /// Whether it keeps checksums of its blocks, if it is one of several.
    pub checksums: bool,
}

/// A volume in use on this machine, whoever uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The volume's name.
    pub volume: String,
    /// The file that holds its bytes, or through which its target shows them.
    pub backing: PathBuf,
    /// How they get from there to the kernel.
    pub via: Via,
    /// Its filesystem; none for a block volume.
    pub filesystem: Option<FilesystemKind>,
    /// The mount options of its PersistentVolume.
    pub mount_options: Vec<String>,
    /// Every use is read-only.
    pub read_only: bool,
    /// Whether the filesystem may grow while it is mounted.
    pub online_growth: bool,
    /// It is known to have carried a filesystem. The copies may know it too.
    pub formatted: bool,
    /// The copies of the volume on this machine.
    pub copies: Vec<ReplicaPlace>,
}

/// One use of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// Where it appears.
    pub path: PathBuf,
    /// Whether it may only be read.
    pub read_only: bool,
    /// It existed in this run of the kernel. If it is gone, somebody took it away, and it is not put back behind their
    /// back.
    pub established: bool,
}

/// A pool's sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolMeasured {
    /// Its identity.
    pub id: String,
    /// The filesystem that it is on.
    pub filesystem: String,
    /// Size of its filesystem.
    pub total: Bytes,
    /// Free on it.
    pub free: Bytes,
    /// Taken by replicas.
    pub allocated: Bytes,
    /// The names of the copies on it.
    pub copies: Vec<String>,
}

/// A replica as it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaFound {
    /// Its size: the `replica` rung.
    pub size: Bytes,
    /// What a reader of its data gets: the `volume` rung of a volume that is used in place.
    pub served: Bytes,
    /// The file that holds the bytes.
    pub data: PathBuf,
}

/// One of several copies, served by a process of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyFound {
    /// Its size: its `replica` rung.
    pub size: Bytes,
    /// The file that holds the bytes.
    pub data: PathBuf,
    /// Where its process can be reached.
    pub address: String,
}

/// When the copies of a volume are to be compared with their checksums.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScrubWish {
    /// The last request. Another value is another request.
    #[serde(default)]
    pub requested: Option<String>,
    /// How often a scrub runs by itself, in seconds; 0 for never.
    #[serde(default)]
    pub interval_seconds: u64,
}

/// A target on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPlace {
    /// The volume's name.
    pub volume: String,
    /// The volume's identity.
    pub volume_id: String,
    /// The copies that count, as far as is known, to start with. The copies themselves know better.
    pub members: Members,
    /// The copies that are asked for. The target decides from what it sees of them which ones count
    /// ([`crate::claim::members::who_counts`]).
    pub wanted: CopiesWanted,
    /// The copies that it goes on with after others were lost for good.
    pub recovery: Option<Recovery>,
    /// The recovered volume has been served. From now on it starts like any other.
    pub is_recovered: bool,
    /// How long a request without a quorum waits before it fails; none for no limit.
    pub fails_after: Option<Duration>,
    /// How long a request without a quorum waits before it is asked again, if set.
    pub asks_every: Option<Duration>,
    /// What happens to a write if too many pools have no space for it.
    pub when_full: WhenFull,
    /// Where the copies can be reached, by identity. Includes copies that do not count yet, or no longer.
    pub addresses: BTreeMap<String, String>,
    /// When they are compared with their checksums.
    pub scrub: ScrubWish,
}

/// The copies that are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopiesWanted {
    /// How many.
    pub count: u32,
    /// How many of them must have a write before it is acknowledged.
    pub consistency_factor: u32,
    /// The identities of those that are to stay. Others that count go as soon as they can be spared.
    pub staying: Vec<String>,
}

/// A target as it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetFound {
    /// The size that as many copies have as must have a write: the `replica` rung of the volume.
    pub copies: Bytes,
    /// What a reader gets: the `volume` rung.
    pub served: Bytes,
    /// The file through which the volume is used on this machine.
    pub backing: PathBuf,
    /// Its iSCSI name.
    pub iqn: Option<String>,
    /// Its iSCSI address.
    pub portal: Option<String>,
    /// The copies that count now. During a change of the view, those of both sides.
    pub members: Members,
    /// Which history it serves; none while it serves nothing.
    pub lineage: Option<String>,
    /// The state of each copy.
    pub replicas: Vec<ReplicaSeen>,
    /// I/O is served.
    pub available: bool,
    /// As many copies as are asked for are there, and each of them holds everything.
    pub redundancy_met: bool,
    /// Every copy has the volume's size.
    pub size_converged: bool,
    /// What scrubs have found.
    pub scrub: Option<ScrubSeen>,
    /// What keeps it from serving or growing.
    pub hold: Option<Hold>,
}

/// One rung of a volume in use as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RungFound {
    /// Which rung.
    pub rung: Rung,
    /// Its size.
    pub size: Bytes,
    /// It covers all that it can cover of the rung below.
    pub full: bool,
    /// What else is worth knowing of it.
    pub note: Option<String>,
}

/// A volume in use as it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct StageFound {
    /// The block device.
    pub device: String,
    /// Its rungs on this machine, lowest first.
    pub rungs: Vec<RungFound>,
    /// How full it is.
    pub usage: Option<Usage>,
}

/// A volume that was brought into use.
#[derive(Clone, Debug, PartialEq)]
pub struct Provided {
    /// The volume as it was found.
    pub found: StageFound,
    /// For each use, in the order of the uses, why it cannot exist.
    pub refused: Vec<Option<Hold>>,
}

/// The machine.
pub trait Machine: Send + Sync + 'static {
    /// Opens the pool if it is not open yet, and measures it. A directory with another identity than `id` is refused.
    fn measure_pool(&self, pool: &Path, id: Option<&str>) -> Result<PoolMeasured, Hold>;

    /// Whether a directory can become a pool, next to these other pools of this machine.
    fn judge_pool(&self, path: &Path, others: &[(String, PathBuf)]) -> Result<(), Hold>;

    /// Releases every pool directory except these.
    fn keep_pools(&self, paths: &[PathBuf]);

    /// What a copy on a pool says about itself, if no object names it.
    fn look_at_stranger(&self, pool: &Path, id: &str, name: &str) -> UnknownCopy;

    /// Makes a new replica, or finds the one that an earlier try has made.
    fn make_replica(&self, replica: &ReplicaPlace, size: Bytes) -> Result<ReplicaFound, Hold>;

    /// Finds a replica that must be there.
    fn find_replica(&self, replica: &ReplicaPlace) -> Result<ReplicaFound, Hold>;

    /// Raises a replica, durably.
    fn raise_replica(&self, replica: &ReplicaPlace, to: Bytes) -> Result<(), Hold>;

    /// Updates what a replica says about itself in its directory, if it says something else.
    fn describe_replica(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Removes a replica and its bytes.
    fn remove_replica(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Serves one of several copies by a process of its own, which is started if it does not run.
    fn serve_copy(&self, replica: &ReplicaPlace) -> Result<CopyFound, Hold>;

    /// Whether there is a file at that path.
    fn is_there(&self, path: &Path) -> bool;

    /// Starts at once whatever should run for a volume. A pass over the volume does the same, but may be waiting for
    /// I/O that only these processes can answer.
    fn serve_again(&self, volume: &str);

    /// Ends the process that serves a copy; does nothing if there is none.
    fn retire_copy(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Runs a target with these copies, in a process of its own, and measures it.
    fn serve_target(&self, target: &TargetPlace) -> Result<TargetFound, Hold>;

    /// Raises the copies and what the target serves.
    fn raise_target(&self, target: &TargetPlace, to: Bytes) -> Result<(), Hold>;

    /// Ends a target; does nothing if there is none.
    fn retire_target(&self, volume: &str) -> Result<(), Hold>;

    /// The file through which a replicated volume is used on this machine, whether it exists or not.
    fn target_backing(&self, volume: &str) -> PathBuf;

    /// What the bytes of an idle volume are.
    fn content(&self, backing: &Path, size: Bytes) -> Option<Content>;

    /// Grows the filesystem in a file that nobody uses, to fill the file.
    fn grow_idle(&self, backing: &Path, kind: FilesystemKind) -> Result<(), Hold>;

    /// Which run of the kernel this is.
    fn boot_id(&self) -> String;

    /// Brings a volume into use and shows it at the paths of its uses: device, private mount, binds, and a filesystem
    /// if there is none and never was. What is already there is left as it is. What was there and has been taken away
    /// is refused. That there is a filesystem is recorded in the copies before anybody can use it.
    fn provide(&self, stage: &Stage, uses: &[Use]) -> Result<Provided, Hold>;

    /// Measures a volume in use.
    fn find_stage(&self, stage: &Stage) -> Result<StageFound, Hold>;

    /// Raises the device or the filesystem of a volume in use.
    fn raise_stage(&self, stage: &Stage, rung: Rung, to: Bytes) -> Result<(), Hold>;

    /// Takes it away from a path.
    fn unpublish(&self, stage: &Stage, usage: &Use) -> Result<(), Hold>;

    /// Takes a volume out of use: private mount and device.
    fn unstage(&self, stage: &Stage) -> Result<(), Hold>;
}
