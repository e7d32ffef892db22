//! What is full or gone below a claim, measured now. None of this holds the claim at its size, but programs that write
//! to it get errors, or wait, or soon will.

use kube::api::ListParams;
use kube::{Api, ResourceExt};
use trellis_api::Bytes;
use trellis_api::kinds::{Pool, Usage};
use trellis_control::view::View;

use super::measured::{self, PoolNow};
use crate::claim_view::list;
use crate::connect::{Service, own_node};
use crate::output::human;

/// A pool with less than this is full: a filesystem needs more for its next writes.
const POOL_FREE_MIN: Bytes = Bytes::mib(1);

/// A filesystem with less than this, and less than this share of its size, is full for its users: it keeps some blocks
/// for itself that it tells as free.
const FILESYSTEM_FREE_MIN: Bytes = Bytes::mib(1);
const FILESYSTEM_FREE_SHARE: u64 = 100;

/// What was found of a claim.
#[derive(Default)]
pub struct Space {
    /// How full its filesystem is, if it is mounted here.
    pub usage: Option<Usage>,
    /// What is full or gone, each in a sentence.
    pub shortages: Vec<String>,
}

/// Measures the claim's filesystem and the pools of its copies, those that are on this machine.
pub async fn look(service: &Service, view: &View) -> Space {
    let timely = measured::timely();
    let now = measured::claim(&timely, view).await;
    let usage = now.usage;
    let mut shortages: Vec<String> = usage.iter().filter_map(of_filesystem).collect();
    let pools = Api::<Pool>::all(service.client.clone());
    let pools = list(pools, &ListParams::default())
        .await
        .unwrap_or_default();
    let node = own_node(service).await.unwrap_or_default();
    for replica in &view.replicas {
        let name = &replica.spec.pool;
        let pool = pools.iter().find(|pool| pool.name_any() == *name);
        if let Some(pool) = pool.filter(|pool| pool.spec.node == node) {
            let found = measured::pool(&timely, name, pool).await;
            shortages.extend(of_pool(pool, &found));
        }
    }
    Space { usage, shortages }
}

fn of_filesystem(usage: &Usage) -> Option<String> {
    // A filesystem that makes inodes as it needs them reports that it has none and uses none.
    let is_out_of_inodes = usage.inodes_free == 0 && usage.inodes_used > 0;
    let share = (usage.used.get() + usage.available.get()) / FILESYSTEM_FREE_SHARE;
    if usage.available < FILESYSTEM_FREE_MIN && usage.available.get() <= share {
        let used = human(usage.used);
        return Some(format!(
            "Its filesystem is full: {used} are used, and whoever writes to it gets \"no space left on device\". Grow \
             the claim (`trellis grow CLAIM +25%`), or delete something."
        ));
    }
    is_out_of_inodes.then(|| {
        format!(
            "Its filesystem has no inode left: {} are used, and no file can be made. Grow the claim (`trellis grow CLAIM \
             +25%`), or delete files.",
            usage.inodes_used
        )
    })
}

fn of_pool(pool: &Pool, found: &PoolNow) -> Option<String> {
    let (name, path) = (pool.name_any(), &pool.spec.path);
    match found {
        PoolNow::Gone => Some(format!(
            "Pool {name:?} is gone: {path} is not there, or is not the pool that it was. Is its disk mounted?"
        )),
        PoolNow::Measured(capacity) if capacity.free < POOL_FREE_MIN => Some(format!(
            "Pool {name:?} is full: {} are free on the filesystem of {path}. What was never written to the volume cannot \
             be written. Free space there, or add a pool.",
            human(capacity.free)
        )),
        PoolNow::Measured(_) | PoolNow::Unknown => None,
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
        let said = |usage| of_filesystem(&usage).unwrap_or_default();
        assert_eq!(said(usage(Bytes::mib(1), 3, 5)), "");
        assert_eq!(said(usage(Bytes::mib(1), 0, 0)), "", "as btrfs tells it");
        assert!(said(usage(Bytes::ZERO, 3, 5)).contains("is full"));
        assert!(said(usage(Bytes::new(20 << 10), 3, 5)).contains("is full"));
        assert!(said(usage(Bytes::mib(1), 3, 0)).contains("no inode left"));
    }
}
