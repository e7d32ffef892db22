//! `Target`: what serves a volume, and what it was measured to serve.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Content, RungStatus};
use crate::{Bytes, Hold};

/// What is wanted of a target.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "trellis.dev",
    version = "v1alpha1",
    kind = "Target",
    plural = "targets",
    singular = "target",
    category = "trellis",
    status = "TargetStatus",
    selectable = ".spec.node",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct TargetSpec {
    /// The volume it serves.
    pub volume: String,
    /// The node that runs it: that of its user.
    pub node: String,
    /// Counts the nodes to which it was given. Copies that have heard of a later term refuse a target of an earlier one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub term: u32,
    /// Nobody uses the volume and nothing is to be done for it, so that it does not run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rests: bool,
    /// The size it shall serve.
    pub capacity: Bytes,
    /// The copies that are asked for. Which of them count, the target agrees with them: it sees how they are.
    #[serde(default)]
    pub copies: CopiesWanted,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The copies that are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopiesWanted {
    /// How many.
    pub count: u32,
    /// How many of them must have a write before it is acknowledged.
    pub consistency_factor: u32,
    /// The identities of those that are to stay. Others that count go as soon as they can be spared.
    pub staying: Vec<String>,
}

/// The reason of the condition `Available` of a target that rests.
pub const RESTING: &str = "Resting";

/// What its node found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetStatus {
    /// The wishes that this answers: the object's generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The term that copies were found to have promised, if it is later than that of this target. It gets one above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outbid: Option<u32>,
    /// The size it serves, measured through the data path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    /// The `volume` rung.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rung: Option<RungStatus>,
    /// The iSCSI name under which it is served, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iqn: Option<String>,
    /// Where it is served by iSCSI: address and port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub portal: Option<String>,
    /// How many initiators are logged in there.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sessions: u32,
    /// Who the copies are that count, as the target has agreed with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<Members>,
    /// Which history of the volume it serves: `original`, or the one that a recovery began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<String>,
    /// How each copy is, as the target sees it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<ReplicaSeen>,
    /// What the bytes are of a volume that is not in use and has several copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
    /// What comparing the copies with the sums of their blocks has found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub: Option<ScrubSeen>,
    /// What keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
    /// `Resizing`; and of several copies `Available`, `RedundancyMet` and `SizeConverged`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// How far a scrub is, and what the last one has found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScrubSeen {
    /// How much of the volume the one that runs has looked at, in hundredths; none if none runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_percent: Option<u32>,
    /// When the last one ended (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished: Option<String>,
    /// The request that the last one has met, as the volume had it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Bytes of the volume that it looked at, in every copy that was there.
    #[serde(default)]
    pub checked: Bytes,
    /// Blocks that did not match their sums.
    #[serde(default)]
    pub found: u64,
    /// How many of these were mended.
    #[serde(default)]
    pub mended: u64,
    /// Regions in which copies differed although their sums matched.
    #[serde(default)]
    pub differed: u64,
    /// Regions that no copy could compare.
    #[serde(default)]
    pub skipped: u64,
    /// Blocks that did not match, by copy, since its target began; found by scrubs and by repairs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rotten: BTreeMap<String, u64>,
}

/// The copies that count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Members {
    /// Rises with every change.
    pub version: u64,
    /// How many of them must have a write before it is acknowledged.
    pub consistency_factor: u32,
    /// Their identities.
    pub replicas: Vec<String>,
}

/// A copy as its target sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaSeen {
    /// Its identity.
    pub id: String,
    /// How it is, as it was seen last.
    pub state: ReplicaState,
    /// When the target last heard of it, if it does not hear of it now: it is `Away` or `Silent`. None if it has never
    /// heard of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_at: Option<MicroTime>,
    /// Its size, as it told at last; none before it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// Bytes that were written and that it has not taken yet, roughly: a power of two, zero below a mebibyte.
    #[serde(default)]
    pub behind: Bytes,
    /// Bytes of it that are still to be repaired, in steps of a twentieth of all.
    #[serde(default)]
    pub repair_left: Bytes,
    /// Bytes that were to be repaired when it came back.
    #[serde(default)]
    pub repair_total: Bytes,
    /// Its pool has no space left for what was not written before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
    /// Why the target and the copy's node do not let each other in, if they are on two nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_hold: Option<Hold>,
}

/// How a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ReplicaState {
    /// It cannot be reached.
    Away,
    /// It is there, and has not answered for two seconds or more.
    Silent,
    /// It is being greeted.
    Arriving,
    /// It takes part, and a part of it is being repaired.
    Repairing,
    /// It holds everything.
    InSync,
}

impl ReplicaState {
    /// Its word in objects, tables and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            ReplicaState::Away => "Away",
            ReplicaState::Silent => "Silent",
            ReplicaState::Arriving => "Arriving",
            ReplicaState::Repairing => "Repairing",
            ReplicaState::InSync => "InSync",
        }
    }
}
