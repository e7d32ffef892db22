//! Which pools are on one filesystem. They share its space, so a promise on one is a promise on all of them. They are
//! lost together, so two copies there are worth one.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::Bytes;
use trellis_api::kinds::{Pool, PoolCapacity, Replica};

use crate::ledger::Open;

/// The other pools on the filesystem of `pool`, by name.
pub fn sharing<'a>(pools: &'a [Arc<Pool>], pool: &Pool) -> Vec<&'a Arc<Pool>> {
    let name = pool.name_any();
    let mut sharing: Vec<&Arc<Pool>> = pools
        .iter()
        .filter(|other| other.name_any() != name && other.shares_disk_with(pool))
        .collect();
    sharing.sort_by_key(|other| other.name_any());
    sharing
}

/// What the filesystem below `pool` can hold: what is free there, by the latest look of any pool on it, and what the
/// copies on all of them take. None if the pool was never measured.
pub fn capacity(pools: &[Arc<Pool>], pool: &Pool) -> Option<PoolCapacity> {
    let measured = |pool: &Pool| pool.status.as_ref()?.capacity.clone();
    let mut whole = measured(pool)?;
    for other in sharing(pools, pool)
        .into_iter()
        .filter_map(|pool| measured(pool))
    {
        whole.allocated = [whole.allocated, other.allocated].into_iter().sum();
        if other.observed_at > whole.observed_at {
            whole.total = other.total;
            whole.free = other.free;
            whole.observed_at = other.observed_at;
        }
    }
    Some(whole)
}

/// What is promised on the filesystem below `pool`, leaving out one replica.
pub fn reserved_beside(
    pools: &[Arc<Pool>],
    pool: &Pool,
    ledger: &Open<'_>,
    replica: &str,
) -> Bytes {
    let others = sharing(pools, pool);
    let names = others.iter().map(|other| other.name_any());
    names
        .chain([pool.name_any()])
        .map(|name| ledger.reserved_beside(&name, replica))
        .sum()
}

/// The pools of these copies that are on one filesystem, for each filesystem with more than one.
pub fn shared_by<'a>(
    replicas: impl Iterator<Item = &'a Arc<Replica>>,
    pool: &dyn Fn(&str) -> Option<Arc<Pool>>,
) -> Vec<Vec<String>> {
    let mut by_disk: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for replica in replicas {
        let Some(found) = pool(&replica.spec.pool) else {
            continue;
        };
        let filesystem = found
            .status
            .as_ref()
            .and_then(|status| status.filesystem.clone());
        if let Some(filesystem) = filesystem {
            let disk = by_disk.entry((found.spec.node.clone(), filesystem));
            disk.or_default().push(found.name_any());
        }
    }
    by_disk.retain(|_, pools| pools.len() > 1);
    by_disk.into_values().collect()
}
