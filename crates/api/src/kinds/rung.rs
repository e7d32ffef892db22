//! One rung as it stands in an object's status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Bytes, Hold, Observed, Rung};

/// What was measured of one rung, when, and what keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RungStatus {
    /// Which rung.
    pub rung: Rung,
    /// Its size, measured.
    pub size: Bytes,
    /// When it was measured.
    pub observed_at: MicroTime,
    /// It covers all that it can cover of the rung below.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
    /// The last time it was raised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raised: Option<Raised>,
    /// Why it cannot rise now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
    /// What else is worth knowing of it, such as that a filesystem has outgrown the shape it was made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// One raise of a rung.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Raised {
    /// The size before.
    pub from: Bytes,
    /// The size after, read back.
    pub to: Bytes,
    /// When the raise was done.
    pub at: MicroTime,
    /// How long the raise itself took, in microseconds.
    pub took_micros: u64,
}

impl From<&RungStatus> for Observed {
    fn from(status: &RungStatus) -> Observed {
        Observed {
            rung: status.rung,
            size: status.size,
            full: status.full,
            hold: status.hold.as_ref().map(|hold| hold.reason),
        }
    }
}
