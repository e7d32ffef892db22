//! What the claim says about copies whose pools are full.

use trellis_api::kinds::{ReplicaSeen, Volume, WhenFull};
use trellis_api::{Hold, HoldReason};

use crate::stored::StoredVolume;

/// What is wrong if pools of copies have no space left, as the target sees it.
pub fn full_pools(view: &StoredVolume, volume: &Volume) -> Option<Hold> {
    let status = view.target.as_ref()?.status.as_ref()?;
    let members = status.members.as_ref()?;
    let counts = |seen: &&ReplicaSeen| members.replicas.contains(&seen.id);
    let (full, others): (Vec<_>, Vec<_>) = status
        .replicas
        .iter()
        .filter(counts)
        .partition(|it| it.full);
    let pool_of = |seen: &&ReplicaSeen| {
        let replica = view.replicas.iter().find(|it| it.identity() == seen.id);
        replica.map(|it| format!("{:?}", it.spec.pool))
    };
    let mut pools: Vec<String> = full.iter().filter_map(pool_of).collect();
    pools.sort();
    pools.dedup();
    let named = match pools.as_slice() {
        [] => return None,
        [one] => format!("Pool {one} is full"),
        [most @ .., last] => format!("Pools {} and {last} are full", most.join(", ")),
    };
    let needed = usize::try_from(members.consistency_factor).unwrap_or(usize::MAX);
    let rest = if others.len() >= needed {
        "its copy misses what does not fit and is repaired when there is space; the volume goes on."
    } else {
        match volume.spec.when_full {
            WhenFull::Wait => {
                "a write that needs new space waits until there is some (whenFull: wait); reading and overwriting go on."
            }
            WhenFull::Fail => {
                "a write that needs new space fails (whenFull: fail); reading and overwriting go on."
            }
        }
    };
    Some(Hold::new(HoldReason::PoolFull, format!("{named}: {rest}")))
}
