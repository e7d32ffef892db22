//! `Volume`: one claim's bytes, whatever carries them.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{FilesystemKind, Recovery, RecoveryRecord};
use crate::{Bytes, Hold, IscsiAccess, Rung};

/// How many growths a volume remembers.
pub const GROWTH_RECORDS_MAX: usize = 25;

/// What is wanted of a volume.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "trellis.dev",
    version = "v1alpha1",
    kind = "Volume",
    plural = "volumes",
    singular = "volume",
    shortname = "tv",
    category = "trellis",
    status = "VolumeStatus",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSpec {
    /// The size that is wanted. Another one replaces it at once. How far it has come is in the status: `granted`,
    /// `capacity`, `usable`.
    pub capacity: Bytes,
    /// The claim it was made for, if it was made for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimRef>,
    /// The volume's identity, which its copies carry on disk. Empty until the volume is bound: then it is the uid of
    /// this object. It stays when the object is made anew from its copies or from a backup.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub volume_id: String,
    /// The uid of the claim whose deletion was seen. Only if it is that of `claim` do the bytes go with their claim: a
    /// claim that is merely not there takes nothing with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_by: Option<String>,
    /// The bytes go when this object is deleted. Whoever owns the claim, or CSI, says so. Without it a deleted volume
    /// waits, and keeps its bytes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discard: bool,
    /// No PersistentVolume was made for it yet, so nobody has used it: it goes with its claim.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub provisional: bool,
    /// The claim's StorageClass.
    pub class: String,
    /// Where its first copies are, in the order of their numbers. Decided together with their reservations, by the
    /// embedded home when it makes the volume, by the volume controller if the volume comes without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placement: Vec<Placement>,
    /// The pools that its copies may be on; any, if it names none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<String>,
    /// How it may be used, in Kubernetes' words: `ReadWriteOnce` and so on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub access_modes: Vec<String>,
    /// The node that CSI has published it to, if any. Uses that are not made by CSI do not ask for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published_to: Option<PublishedTo>,
    /// The options that its filesystem is mounted with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mount_options: Vec<String>,
    /// How many copies there shall be. Of a volume with several it may be changed: copies are added and let go of
    /// while the volume is in use.
    pub replicas: u32,
    /// How many copies must have a write before it is acknowledged.
    #[serde(default = "one")]
    pub consistency_factor: u32,
    /// How a volume behind a target is brought to a node. None: it has a single copy, which is used where it lies.
    /// Decided when the volume is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// Whether every byte is allocated from the start.
    #[serde(default)]
    pub thick: bool,
    /// Whether copies keep sums of their blocks, so that rot is found and mended. Decided when the volume is made.
    #[serde(default = "by_default")]
    pub checksums: bool,
    /// How often all copies are compared with their sums, in seconds; 0: only when it is asked for.
    #[serde(default = "scrub_interval")]
    pub scrub_interval_seconds: u64,
    /// When somebody last asked for that (RFC 3339). Another value is another request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_requested: Option<String>,
    /// The filesystem to make at the first use; none for a block volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<FilesystemKind>,
    /// Whether the filesystem may grow while it is mounted; if not, it grows when nobody uses it.
    #[serde(default = "by_default")]
    pub online_growth: bool,
    /// What becomes of requests when too few copies are there. Decided when the volume is made.
    #[serde(default)]
    pub when_below_quorum: WhenBelowQuorum,
    /// What becomes of a write for which too many pools have no space. Decided when the volume is made.
    #[serde(default)]
    pub when_full: WhenFull,
    /// How long a request waits for a quorum, in seconds, before it fails; with `wait`, before it is asked anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience_seconds: Option<u32>,
    /// Whether two copies may be on one filesystem. If not, they never count as two there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_shared_disk: bool,
    /// How initiators may use it, if it is behind a target. Decided when the volume is made.
    #[serde(default, skip_serializing_if = "IscsiAccess::is_usual")]
    pub iscsi: IscsiAccess,
    /// With which copies the volume goes on after others were lost for good; the last such decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
    /// The growth that led to the present goal; none while it has the size it was made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<GrowthRequest>,
}

/// What becomes of requests to a volume of which too few copies are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WhenBelowQuorum {
    /// They wait until there are enough again, however long that takes.
    #[default]
    Wait,
    /// They fail after a time.
    Fail,
}

/// What becomes of a write that needs space which too many pools do not have. What has its space already is written
/// in either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WhenFull {
    /// It waits until there is space, however long that takes.
    #[default]
    Wait,
    /// It fails at once, with `ENOSPC`.
    Fail,
}

/// How long requests wait for a quorum that is to `fail` without one, unless it is said: as long as iSCSI initiators
/// wait for a lost target.
const PATIENCE_SECONDS: u32 = 120;

/// The way that a volume's bytes take between a node's kernel and its copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// A loop device on the file of the only copy, where it lies.
    Local,
    /// A loop device on a file that the target shows.
    Fuse,
    /// A disk of the kernel's own iSCSI initiator, logged in at the target.
    Iscsi,
}

impl WhenBelowQuorum {
    /// Its word in objects and classes.
    pub const fn name(self) -> &'static str {
        match self {
            WhenBelowQuorum::Wait => "wait",
            WhenBelowQuorum::Fail => "fail",
        }
    }
}

impl WhenFull {
    /// Its word in objects and classes.
    pub const fn name(self) -> &'static str {
        match self {
            WhenFull::Wait => "wait",
            WhenFull::Fail => "fail",
        }
    }
}

impl Via {
    /// Its word in objects and classes.
    pub const fn name(self) -> &'static str {
        match self {
            Via::Local => "local",
            Via::Fuse => "fuse",
            Via::Iscsi => "iscsi",
        }
    }
}

impl VolumeSpec {
    /// After which time a request without a quorum fails; none if it waits without a limit.
    pub fn fails_after(&self) -> Option<Duration> {
        let patience = self.patience_seconds.unwrap_or(PATIENCE_SECONDS);
        let fails = self.when_below_quorum == WhenBelowQuorum::Fail;
        fails.then(|| Duration::from_secs(patience.into()))
    }

    /// The way that its bytes take.
    pub fn way(&self) -> Via {
        self.via.unwrap_or(Via::Local)
    }

    /// Whether a process of its own serves it, and keeps its copies the same.
    pub fn is_behind_target(&self) -> bool {
        self.way() != Via::Local
    }
}

impl Volume {
    /// The volume's identity.
    pub fn identity(&self) -> String {
        let named = Some(&self.spec.volume_id).filter(|id| !id.is_empty());
        let uid = || self.metadata.uid.clone().unwrap_or_default();
        named.cloned().unwrap_or_else(uid)
    }

    /// Whether the claim that it was made for was deleted, and did not just vanish.
    pub fn is_released(&self) -> bool {
        let claim = self.spec.claim.as_ref();
        claim.is_some_and(|claim| self.spec.released_by.as_ref() == Some(&claim.uid))
    }

    /// Whether that claim is the one that it was made for.
    pub fn is_of(&self, claim: &ClaimRef) -> bool {
        self.spec.claim.as_ref() == Some(claim)
    }
}

/// How often copies are compared with their sums, unless a class says otherwise: once a week.
pub const SCRUB_INTERVAL_SECONDS: u64 = 7 * 24 * 60 * 60;

fn scrub_interval() -> u64 {
    SCRUB_INTERVAL_SECONDS
}

fn by_default() -> bool {
    true
}

fn one() -> u32 {
    1
}

/// Who asked for the present goal, and when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GrowthRequest {
    /// Who changed the claim.
    pub by: String,
    /// When the change was first seen.
    pub at: MicroTime,
    /// The claim's size before it.
    pub from: Bytes,
}

/// A node that may use a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishedTo {
    /// The node.
    pub node: String,
    /// Whether it may only read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// Where a copy lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// The pool.
    pub pool: String,
    /// The pool's node.
    pub node: String,
}

/// Names a claim for good: a claim of the same name made later is another one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// Where a volume stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStatus {
    /// In one word.
    #[serde(default)]
    pub phase: VolumePhase,
    /// The size that its copies have a promise for: the goal of every layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted: Option<Bytes>,
    /// What its target was measured to serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    /// The size that every use of it was measured to have; of a volume that is not in use, the size that its filesystem
    /// was found with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usable: Option<Bytes>,
    /// It has carried a filesystem that somebody could use. If it is found empty from then on, that is a loss to tell,
    /// and never a reason to format it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub formatted: bool,
    /// Since when nobody uses it and there is nothing to do for it, if it has several copies. Its target rests after a
    /// while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_since: Option<MicroTime>,
    /// What keeps it from its goal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
    /// `Ready` and `Resizing`; `CopiesHeld` and `PoolFull` while that is so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The growths that are over, oldest first, at most [`GROWTH_RECORDS_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub growths: Vec<GrowthRecord>,
    /// The recoveries that are done, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recoveries: Vec<RecoveryRecord>,
}

/// The condition of a volume that does not have the copies that are asked for, and why.
pub const COPIES_HELD: &str = "CopiesHeld";
/// The condition of a volume some of whose copies have a full pool.
pub const POOL_FULL: &str = "PoolFull";

/// A volume's state in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VolumePhase {
    /// Not all of its copies exist yet.
    #[default]
    Pending,
    /// It can be used.
    Ready,
    /// It can be used, and is on its way to a larger size.
    Resizing,
    /// It is going away.
    Deleting,
}

/// One growth that is over.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GrowthRecord {
    /// Who asked.
    pub by: String,
    /// When it was first seen.
    pub requested_at: MicroTime,
    /// When it ended.
    pub finished_at: MicroTime,
    /// The size before.
    pub from: Bytes,
    /// The size asked for.
    pub to: Bytes,
    /// How it ended.
    pub result: GrowthResult,
    /// How long each rung took.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<RungTime>,
    /// The pools of copies that had not reached the size when it ended. They are raised when they are back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub behind: Vec<String>,
}

impl GrowthRecord {
    /// Which copies were behind, in a sentence that follows another one; nothing if none was.
    pub fn behind_sentence(&self) -> String {
        behind_sentence(&self.behind)
    }
}

/// The pools of copies that have not reached a size, in a sentence that follows another one; nothing if there are none.
pub fn behind_sentence(pools: &[String]) -> String {
    match pools {
        [] => String::new(),
        [one] => format!(". The copy on pool {one} is behind, and is raised when it is back."),
        many => format!(
            ". The copies on pools {} are behind, and are raised when they are back.",
            many.join(", ")
        ),
    }
}

/// How a growth ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GrowthResult {
    /// Every rung was measured at the size asked for.
    Succeeded,
    /// A larger request took its place before it was done.
    Replaced,
    /// The request was lowered before it was committed.
    Cancelled,
}

/// The time that one rung took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RungTime {
    /// Which rung.
    pub rung: Rung,
    /// Microseconds for the raise itself.
    pub micros: u64,
}
