//! The pools of a machine.

use std::path::{Path, PathBuf};

use trellis_api::kinds::UnknownCopy;
use trellis_api::{Bytes, Hold};

/// A pool's sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolMeasured {
    /// Its identity.
    pub id: String,
    /// The filesystem that it is on.
    pub filesystem: String,
    /// Size of its filesystem.
    pub total: Bytes,
    /// Free on it.
    pub free: Bytes,
    /// Taken by replicas.
    pub allocated: Bytes,
    /// The names of the copies on it.
    pub copies: Vec<String>,
}

/// What a machine can do with directories that are pools.
pub trait Pools: Send + Sync + 'static {
    /// Opens the pool if it is not open yet, and measures it. A directory with another identity than `id` is refused.
    fn measure_pool(&self, pool: &Path, id: Option<&str>) -> Result<PoolMeasured, Hold>;

    /// Whether a directory can become a pool, next to these other pools of this machine.
    fn judge_pool(&self, path: &Path, others: &[(String, PathBuf)]) -> Result<(), Hold>;

    /// Releases every pool directory except these.
    fn keep_pools(&self, paths: &[PathBuf]);

    /// What a copy on a pool says about itself, if no object names it.
    fn look_at_stranger(&self, pool: &Path, id: &str, name: &str) -> UnknownCopy;
}
