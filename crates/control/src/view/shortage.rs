//! What is full or gone below a claim. None of this holds the claim at its size, but programs that write to it get
//! errors, or wait, or soon will.

use kube::ResourceExt;
use trellis_api::Bytes;
use trellis_api::kinds::{Pool, Usage};

use super::measured::PoolNow;

/// A pool with less than this is full: a filesystem needs more for its next writes.
const POOL_FREE_MIN: Bytes = Bytes::mib(1);

/// A filesystem with less than this, and less than this share of its size, is full for its users: it keeps some blocks
/// for itself that it tells as free.
const FILESYSTEM_FREE_MIN: Bytes = Bytes::mib(1);
const FILESYSTEM_FREE_SHARE: u64 = 100;

/// One thing that is full or gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// The claim's filesystem has no space left.
    FilesystemFull {
        /// What is used of it.
        used: Bytes,
    },
    /// The claim's filesystem has no inode left.
    NoInodes {
        /// How many are used.
        used: u64,
    },
    /// The directory of a pool is not there, or is not the pool that it was.
    PoolGone {
        /// The pool.
        pool: String,
        /// Its directory.
        path: String,
    },
    /// A pool has no space left.
    PoolFull {
        /// The pool.
        pool: String,
        /// Its directory.
        path: String,
        /// What is free there.
        free: Bytes,
    },
}

impl Shortage {
    /// What a filesystem lacks.
    pub fn of_filesystem(usage: &Usage) -> Option<Shortage> {
        let share = usage.used.get().saturating_add(usage.available.get()) / FILESYSTEM_FREE_SHARE;
        if usage.available < FILESYSTEM_FREE_MIN && usage.available.get() <= share {
            return Some(Shortage::FilesystemFull { used: usage.used });
        }
        // A filesystem that makes inodes as it needs them reports that it has none and uses none.
        let is_out_of_inodes = usage.inodes_free == 0 && usage.inodes_used > 0;
        is_out_of_inodes.then_some(Shortage::NoInodes {
            used: usage.inodes_used,
        })
    }

    /// What a pool lacks.
    pub fn of_pool(pool: &Pool, found: &PoolNow) -> Option<Shortage> {
        let (name, path) = (pool.name_any(), pool.spec.path.clone());
        match found {
            PoolNow::Gone => Some(Shortage::PoolGone { pool: name, path }),
            PoolNow::Measured(capacity) if capacity.free < POOL_FREE_MIN => {
                Some(Shortage::PoolFull {
                    pool: name,
                    path,
                    free: capacity.free,
                })
            }
            PoolNow::Measured(_) | PoolNow::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(available: Bytes, inodes_used: u64, inodes_free: u64) -> Usage {
        Usage {
            used: Bytes::mib(256),
            available,
            inodes_used,
            inodes_free,
            observed_at: None,
        }
    }

    // Fails if a filesystem that has room is called full, or one without room or inodes is not.
    #[test]
    fn a_filesystem_is_full_without_room_or_without_inodes() {
        let lacks = |available, used, free| Shortage::of_filesystem(&usage(available, used, free));
        let full = Some(Shortage::FilesystemFull {
            used: Bytes::mib(256),
        });
        assert_eq!(lacks(Bytes::mib(1), 3, 5), None);
        assert_eq!(lacks(Bytes::mib(1), 0, 0), None, "as btrfs tells it");
        assert_eq!(lacks(Bytes::ZERO, 3, 5), full);
        assert_eq!(lacks(Bytes::new(20 << 10), 3, 5), full);
        let no_inodes = Some(Shortage::NoInodes { used: 3 });
        assert_eq!(lacks(Bytes::mib(1), 3, 0), no_inodes);
    }
}
