//! `Pool`: a directory on a node where replicas live.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Bytes;

/// What the user wants of a pool.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "trellis.dev",
    version = "v1alpha1",
    kind = "Pool",
    plural = "pools",
    singular = "pool",
    category = "trellis",
    status = "PoolStatus",
    selectable = ".spec.node",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct PoolSpec {
    /// The node whose directory it is.
    pub node: String,
    /// The directory, absolute.
    pub path: String,
    /// How much may be promised, in percent of what the directory can hold. 100 promises nothing that
    /// is not there; 200 promises every byte twice.
    #[serde(default = "overcommit_default")]
    pub overcommit_percent: u32,
    /// The pool shall be emptied: it gets no new copies, and those of volumes with several copies move to other pools.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drain: bool,
}

fn overcommit_default() -> u32 {
    100
}

/// What the owning node found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    /// The identity that the directory was given at its first use. A directory without it is another one:
    /// most likely its disk is not mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The filesystem below the directory, told apart from every other on its node. Pools with the same one share its
    /// space, and are lost together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<String>,
    /// Measured sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<PoolCapacity>,
    /// Copies on it that no Replica names. They are kept; `trellis recover --from-pools` takes them in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<UnknownCopy>,
    /// How many there are, of which only the first are listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unknown_count: u32,
    /// `Ready`, with the reason when it is not; and `Removable` while somebody wants it gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

impl Pool {
    /// Whether it may get new copies, as far as its wishes tell: nobody wants it empty or gone.
    pub fn takes_copies(&self) -> bool {
        self.metadata.deletion_timestamp.is_none() && !self.spec.drain
    }

    /// Whether both are on one filesystem. Of a pool that was never measured it is not known.
    pub fn shares_disk_with(&self, other: &Pool) -> bool {
        let filesystem = |pool: &Pool| pool.status.as_ref()?.filesystem.clone();
        let own = filesystem(self);
        self.spec.node == other.spec.node && own.is_some() && own == filesystem(other)
    }
}

/// How many unknown copies of a pool are listed.
pub const UNKNOWN_COPIES_MAX: usize = 32;

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// A copy that no object names, as it describes itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnknownCopy {
    /// Its directory on the pool.
    pub name: String,
    /// The claim that it was made for, as `NAMESPACE/NAME`; none if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// Its size; none if its superblocks cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
}

/// How large a pool is, measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolCapacity {
    /// Size of the filesystem that holds the directory.
    pub total: Bytes,
    /// Free on it now.
    pub free: Bytes,
    /// Taken on it by replicas.
    pub allocated: Bytes,
    /// When it was measured.
    pub observed_at: MicroTime,
}

impl PoolCapacity {
    /// All that replicas could ever take: what they have and what is free. Other users of the same
    /// filesystem are thereby left out of the promise.
    pub fn usable(&self) -> Bytes {
        [self.free, self.allocated].into_iter().sum()
    }

    /// How much may be promised altogether at so many percent, rounded down.
    pub fn promisable(&self, overcommit_percent: u32) -> Bytes {
        let product = u128::from(self.usable().get()) * u128::from(overcommit_percent) / 100;
        u64::try_from(product)
            .map_or(Bytes::MAX, Bytes::new)
            .min(Bytes::MAX)
    }
}
