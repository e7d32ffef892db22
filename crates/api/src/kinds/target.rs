//! `Target`: what serves a volume, and what it was measured to serve.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::RungStatus;
use crate::Bytes;

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
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct TargetSpec {
    /// The volume it serves.
    pub volume: String,
    /// The node that runs it.
    pub node: String,
    /// The size it shall serve.
    pub capacity: Bytes,
}

/// What its node found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetStatus {
    /// The size it serves, measured through the data path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    /// The `volume` rung.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rung: Option<RungStatus>,
    /// `Resizing`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}
