//! The kinds of `trellis.dev/v1alpha1`, and the names that users, charts and tests rely on.
//!
//! Spec flows down, status flows up: a controller writes the spec of the kind below and the status of
//! its own. `Pool`, `Volume`, `Target` and `Replica` belong to no namespace; an `Attachment` lives
//! beside the claim that it attaches.

pub mod conditions;

mod attachment;
mod pool;
mod recovery;
mod replica;
mod rung;
mod target;
mod volume;

pub use crate::{FilesystemKind, IscsiAccess, PortalAt};
pub use attachment::{
    AtPath, Attachment, AttachmentPhase, AttachmentSpec, AttachmentStatus, Consumer, Usage,
};
pub use pool::{Pool, PoolCapacity, PoolSpec, PoolStatus, UNKNOWN_COPIES_MAX, UnknownCopy};
pub use recovery::{Recovery, RecoveryRecord};
pub use replica::{Content, EMPTY_CONTENT, Replica, ReplicaPhase, ReplicaSpec, ReplicaStatus};
pub use rung::{Raised, RungStatus};
pub use target::{
    CopiesWanted, Members, RESTING, ReplicaSeen, ReplicaState, ScrubSeen, Target, TargetSpec,
    TargetStatus,
};
pub use volume::{
    COPIES_HELD, ClaimRef, GROWTH_RECORDS_MAX, GrowthRecord, GrowthRequest, GrowthResult,
    POOL_FULL, Placement, PublishedTo, RungTime, SCRUB_INTERVAL_SECONDS, Via, Volume, VolumePhase,
    VolumeSpec, VolumeStatus, WhenBelowQuorum, WhenFull, behind_sentence,
};

/// API group of our kinds, and the name of provisioner and CSI driver.
pub const GROUP: &str = "trellis.dev";
/// The provisioner's name in a StorageClass.
pub const PROVISIONER: &str = "trellis.dev";
/// The namespace of the leases by which nodes say that they are there, as in Kubernetes.
pub const NODE_LEASES_NAMESPACE: &str = "kube-node-lease";
/// The label of a Secret that says which node may read it.
pub const NODE_LABEL: &str = "trellis.dev/node";
/// The namespace of what belongs to no claim: the authority of the home, and secrets of volumes.
pub const SYSTEM_NAMESPACE: &str = "trellis-system";
/// The ConfigMap there in which nodes find the certificates of the home's authority.
pub const AUTHORITY: &str = "trellis-authority";
/// The entry of that ConfigMap.
pub const AUTHORITY_ENTRY: &str = "ca.crt";
/// The type of the Secret there that has what initiators of a volume must know.
pub const CHAP_SECRET: &str = "trellis.dev/chap";
/// The name of that Secret of a volume.
pub fn chap_secret_name(volume: &str) -> String {
    format!("{volume}-chap")
}
/// The label by which a Target or Replica names its volume.
pub const VOLUME_LABEL: &str = "trellis.dev/volume";
/// The finalizer that keeps a Replica until its files are gone.
pub const DATA_FINALIZER: &str = "trellis.dev/data";
/// The finalizer that keeps a Volume, and with it the bytes of its replicas, until its claim is gone and
/// nothing uses it.
pub const VOLUME_FINALIZER: &str = "trellis.dev/volume";
/// The finalizer that keeps an Attachment until its mounts and devices are gone.
pub const ATTACHMENT_FINALIZER: &str = "trellis.dev/attachment";
/// The finalizer that keeps a Pool while copies are on it, and until its directory was let go of.
pub const POOL_FINALIZER: &str = "trellis.dev/pool";
/// The annotation of a Pool that has its node measure it at once: the time at which somebody asked.
pub const MEASURE_ANNOTATION: &str = "trellis.dev/measure";
/// The class parameter that names the filesystem.
pub const FSTYPE_PARAMETER: &str = "csi.storage.k8s.io/fstype";
