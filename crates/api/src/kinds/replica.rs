//! `Replica`: one copy of a volume on a pool.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::RungStatus;
use crate::{Bytes, Hold};

/// What is wanted of a copy. Its capacity is also the reservation on its pool.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "trellis.dev",
    version = "v1alpha1",
    kind = "Replica",
    plural = "replicas",
    singular = "replica",
    category = "trellis",
    status = "ReplicaStatus",
    selectable = ".spec.node",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaSpec {
    /// The volume it is a copy of.
    pub volume: String,
    /// The volume's identity, which the copy carries on disk.
    pub volume_id: String,
    /// The copy's own identity, which it carries on disk. That of a single copy is the volume's. One of several begins
    /// with none here: then it is the uid of this object, which is written down as soon as the volume is bound, and
    /// stays when the object is made anew.
    #[serde(default)]
    pub replica_id: String,
    /// The pool it lives on.
    pub pool: String,
    /// The node of that pool.
    pub node: String,
    /// The size it shall have.
    pub capacity: Bytes,
    /// Whether every byte is allocated.
    #[serde(default)]
    pub thick: bool,
    /// The bytes go with this object: the volume's claim was deleted, or somebody deleted the volume. An object that
    /// goes without it leaves the bytes where they are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discard: bool,
}

impl Replica {
    /// The copy's identity.
    pub fn identity(&self) -> String {
        let named = Some(&self.spec.replica_id).filter(|id| !id.is_empty());
        let uid = || self.metadata.uid.clone().unwrap_or_default();
        named.cloned().unwrap_or_else(uid)
    }

    /// Whether it is one of several copies behind a target.
    pub fn is_of_several(&self) -> bool {
        self.spec.replica_id.is_empty() || self.spec.replica_id != self.spec.volume_id
    }
}

/// What its node found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaStatus {
    /// In one word.
    #[serde(default)]
    pub phase: ReplicaPhase,
    /// Its size, measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    /// The `replica` rung.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rung: Option<RungStatus>,
    /// The file that holds the bytes, on its node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Where its process can be reached on its node, if it is one of several copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Where other nodes reach its process, `tls:NODE@IP:PORT`; none if its node has no address for links.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// What keeps other nodes from reaching it: which one was refused lately and why, or why nobody can be listened to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_hold: Option<Hold>,
    /// What the bytes are, as far as it can be told without mounting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
    /// What keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
    /// `Ready` and `Resizing`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A replica's state in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ReplicaPhase {
    /// Its files do not exist yet.
    #[default]
    Pending,
    /// It is there and passes its checks.
    Ready,
    /// It cannot be used; the hold says why.
    Failed,
}

/// The kind of a [`Content`] that is nothing.
pub const EMPTY_CONTENT: &str = "empty";

/// What was found on a volume that is not mounted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Content {
    /// `empty`, the name of a filesystem, or what else was recognised.
    pub kind: String,
    /// The size that its superblock records, for a filesystem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// It covers all that it can cover of a volume of the size `of`.
    #[serde(default)]
    pub full: bool,
    /// The size of the volume when this was found. What was found at another size says nothing about
    /// the present one.
    #[serde(default)]
    pub of: Bytes,
    /// Why the filesystem was not grown where it lies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
}
