//! What an operator decided when too many copies of a volume were lost for good.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A history of a volume that begins with the copies that are left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Recovery {
    /// The name of the history that begins. A copy of an earlier one has no vote in it.
    pub lineage: String,
    /// The identities of the copies that are left.
    pub survivors: Vec<String>,
    /// The identities of the copies that were given up: what only they held is lost.
    pub given_up: Vec<String>,
    /// How many of the survivors must have a write before it is acknowledged.
    pub consistency_factor: u32,
    /// Who decided it.
    pub by: String,
    /// When.
    pub at: MicroTime,
}

/// A recovery that is done: the volume was served from the copies that were left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecoveryRecord {
    /// What was decided.
    pub recovery: Recovery,
    /// When the volume was seen to be served again.
    pub finished_at: MicroTime,
}
