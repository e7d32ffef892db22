//! What the agent needs of the machine that it runs on.
//!
//! The binary joins the replica store and the kernel behind this trait. Every call blocks, is
//! idempotent, measures instead of remembering, and answers a refusal as the hold that a user will read.

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
    /// What the copy shall say about itself in its own directory; none if its volume is not known.
    pub about: Option<About>,
    /// Whether a process of its own serves it.
    pub served: bool,
    /// Whether it keeps sums of its blocks, if it is one of several.
    pub checksums: bool,
}

/// A volume in use on this machine, whoever uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The volume's name.
    pub volume: String,
    /// The file that holds its bytes, or through which its target shows them.
    pub backing: PathBuf,
    /// The way that they take from there to the kernel.
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
    /// It has been there in this run of the kernel. If it is not any more, somebody took it away, and it is not
    /// put back behind their back.
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
    /// What a reader of its data gets: the `volume` rung of a volume that is used where it lies.
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

/// When the copies of a volume shall be compared with the sums of their blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScrubWish {
    /// The last request. Another value is another request.
    #[serde(default)]
    pub requested: Option<String>,
    /// How often it is done unasked, in seconds; 0 for never.
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
    /// Who counts, as far as it is known: to begin with. The copies themselves know better.
    pub members: Members,
    /// The copies that are asked for. The target decides from what it sees of them who counts
    /// ([`crate::claim::members::who_counts`]).
    pub wanted: CopiesWanted,
    /// With which copies it goes on after others were lost for good.
    pub recovery: Option<Recovery>,
    /// It has been served so: from now on it begins as any other.
    pub is_recovered: bool,
    /// After which time a request without a quorum fails; none if it waits without a limit.
    pub fails_after: Option<Duration>,
    /// After which time a request without a quorum is asked anew, if that is said.
    pub asks_every: Option<Duration>,
    /// What becomes of a write for which too many pools have no space.
    pub when_full: WhenFull,
    /// Where the copies can be reached, by identity; also those that do not count yet or not any more.
    pub addresses: BTreeMap<String, String>,
    /// When they are compared with the sums of their blocks.
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
    /// The identities of those that shall stay. Others that count are to go as soon as they can be spared.
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
    /// Who counts, just now; while that changes, those of both sides.
    pub members: Members,
    /// Which history it serves; none while it serves nothing.
    pub lineage: Option<String>,
    /// How each copy is.
    pub replicas: Vec<ReplicaSeen>,
    /// I/O is served.
    pub available: bool,
    /// As many copies as are asked for are there, and each of them holds everything.
    pub redundancy_met: bool,
    /// Every copy has the volume's size.
    pub size_converged: bool,
    /// What comparing the copies with their sums has found.
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
    /// For each use, in the order of the uses, why it cannot be.
    pub refused: Vec<Option<Hold>>,
}

/// The machine.
pub trait Machine: Send + Sync + 'static {
    /// Opens the pool if it is not open yet, and measures it. A directory of another identity than `id` is
    /// refused.
    fn measure_pool(&self, pool: &Path, id: Option<&str>) -> Result<PoolMeasured, Hold>;

    /// Whether a directory can become a pool, beside these others of this machine.
    fn judge_pool(&self, path: &Path, others: &[(String, PathBuf)]) -> Result<(), Hold>;

    /// Lets go of every pool directory but these.
    fn keep_pools(&self, paths: &[PathBuf]);

    /// What a copy on a pool says about itself that no object names.
    fn look_at_stranger(&self, pool: &Path, id: &str, name: &str) -> UnknownCopy;

    /// Makes a new replica, or finds the one that an earlier try has made.
    fn make_replica(&self, replica: &ReplicaPlace, size: Bytes) -> Result<ReplicaFound, Hold>;

    /// Finds a replica that must be there.
    fn find_replica(&self, replica: &ReplicaPlace) -> Result<ReplicaFound, Hold>;

    /// Raises a replica, durably.
    fn raise_replica(&self, replica: &ReplicaPlace, to: Bytes) -> Result<(), Hold>;

    /// Lets a replica say about itself what shall stand in its directory, if it says something else.
    fn describe_replica(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Removes a replica and its bytes.
    fn remove_replica(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Has one of several copies served by a process of its own, which is started if it does not run.
    fn serve_copy(&self, replica: &ReplicaPlace) -> Result<CopyFound, Hold>;

    /// Whether there is a file of that path.
    fn is_there(&self, path: &Path) -> bool;

    /// Has whatever shall run for a volume run, at once. A pass over the volume does the same, but may be waiting for
    /// I/O that only these processes can answer.
    fn serve_again(&self, volume: &str);

    /// Ends the process that serves a copy; without one it does nothing.
    fn retire_copy(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Has a target run with these copies, in a process of its own, and measures it.
    fn serve_target(&self, target: &TargetPlace) -> Result<TargetFound, Hold>;

    /// Raises the copies and what the target serves.
    fn raise_target(&self, target: &TargetPlace, to: Bytes) -> Result<(), Hold>;

    /// Ends a target; without one it does nothing.
    fn retire_target(&self, volume: &str) -> Result<(), Hold>;

    /// The file through which a volume of several copies is used on this machine, whether it is there or not.
    fn target_backing(&self, volume: &str) -> PathBuf;

    /// What the bytes of a volume are that is not in use.
    fn content(&self, backing: &Path, size: Bytes) -> Option<Content>;

    /// Raises the filesystem in a file that nobody uses to fill it.
    fn grow_idle(&self, backing: &Path, kind: FilesystemKind) -> Result<(), Hold>;

    /// Which run of the kernel this is.
    fn boot_id(&self) -> String;

    /// Brings a volume into use and shows it at the paths of its uses: device, filesystem if there is
    /// none yet and never was one, private mount, binds. What is already there is left as it is. What was there and has
    /// been taken away is refused. That there is a filesystem is written down in the copies before anybody can use it.
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
