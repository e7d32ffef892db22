//! `Attachment`: a volume in use on a node.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{FilesystemKind, RungStatus, Via};
use crate::{Bytes, Hold};

/// What uses a volume, and where. Made by whoever wants to use it; deleting it ends the use.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "trellis.dev",
    version = "v1alpha1",
    kind = "Attachment",
    plural = "attachments",
    singular = "attachment",
    category = "trellis",
    namespaced,
    status = "AttachmentStatus",
    selectable = ".spec.node",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct AttachmentSpec {
    /// The claim, in the attachment's own namespace. One that names only a claim gets the claim's volume when the claim
    /// is bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim_name: Option<String>,
    /// The volume. It never changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The node on which it is used.
    pub node: String,
    /// What uses it.
    pub consumer: Consumer,
}

/// What uses a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Consumer {
    /// A directory shows its filesystem.
    Mount(AtPath),
    /// A file is its block device.
    Device(AtPath),
}

/// A place in the filesystem of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AtPath {
    /// Where the volume appears, absolute.
    pub path: String,
    /// Whether it may only be read there.
    #[serde(default)]
    pub read_only: bool,
}

impl Consumer {
    /// Where the volume appears.
    pub fn path(&self) -> &str {
        let (Consumer::Mount(at) | Consumer::Device(at)) = self;
        &at.path
    }

    /// Whether it may only be read.
    pub fn read_only(&self) -> bool {
        let (Consumer::Mount(at) | Consumer::Device(at)) = self;
        at.read_only
    }
}

impl Attachment {
    /// The volume that is used: the one that it names, or, of an attachment from an earlier release, the one that its
    /// node has attached.
    pub fn volume(&self) -> Option<&str> {
        let attached = self.status.as_ref();
        let attached = attached.and_then(|status| status.volume.as_deref());
        self.spec.volume.as_deref().or(attached)
    }
}

/// What its node found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachmentStatus {
    /// In one word.
    #[serde(default)]
    pub phase: AttachmentPhase,
    /// The volume that the claim is bound to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The way the bytes take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// The block device on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The filesystem on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<FilesystemKind>,
    /// The run of the node's kernel in which it was brought there. What is missing in a later run went with the
    /// restart; what is missing in the same run was taken away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// The smallest of its rungs: the size that the consumer can rely on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    /// The rungs on this node, lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<RungStatus>,
    /// How full it was when last measured; told again when it has changed by a hundredth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// What keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
    /// `Attached`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// An attachment's state in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AttachmentPhase {
    /// Not there yet; the hold says why.
    #[default]
    Pending,
    /// The path shows the volume.
    Attached,
    /// On its way out.
    Detaching,
}

/// How full a filesystem is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Bytes that files take.
    pub used: Bytes,
    /// Bytes that a user can still write.
    pub available: Bytes,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Inodes that are free.
    pub inodes_free: u64,
    /// When it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_at: Option<MicroTime>,
}
