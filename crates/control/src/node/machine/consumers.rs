//! Volumes in use on a machine: devices, filesystems and mounts.

use std::path::{Path, PathBuf};

use trellis_api::kinds::{Content, FilesystemKind, Usage, Via};
use trellis_api::{Bytes, Hold, Rung};

use super::copies::ReplicaPlace;

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
    /// The options that its filesystem is mounted with.
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

/// What a machine can do for those who use a volume.
pub trait Consumers: Send + Sync + 'static {
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

    /// What the bytes of an idle volume are.
    fn content(&self, backing: &Path, size: Bytes) -> Option<Content>;

    /// Grows the filesystem in a file that nobody uses, to fill the file.
    fn grow_idle(&self, backing: &Path, kind: FilesystemKind) -> Result<(), Hold>;
}
