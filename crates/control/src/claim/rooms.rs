//! Which pool has room: the rule, and the pools as they are stored.

use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::kinds::Pool;
use trellis_api::{Bytes, Hold, HoldReason};

use super::plan::Rooms;
use crate::ledger::Open;

/// The pools, with the ledger locked for the time of one decision.
pub struct Pools<'a> {
    /// All pools.
    pub pools: Vec<Arc<Pool>>,
    /// The reservations on them.
    pub ledger: &'a Open<'a>,
}

/// What a pool can still promise to a replica.
struct Room {
    promised: Bytes,
    limit: Bytes,
    free: Bytes,
}

impl Pools<'_> {
    fn room_of(&self, pool: &Pool, replica: &str) -> Result<Room, Hold> {
        let name = pool.name_any();
        let status = pool.status.clone().unwrap_or_default();
        let ready = status.conditions.iter().find(|each| each.type_ == "Ready");
        let capacity = status
            .capacity
            .filter(|_| ready.is_some_and(|each| each.status == "True"));
        let Some(capacity) = capacity else {
            let why = ready.map_or("it has not been measured yet", |each| each.message.as_str());
            let message = format!("Pool {name:?} at {} is not ready: {why}.", pool.spec.path);
            return Err(Hold::new(HoldReason::PoolNotReady, message));
        };
        let limit = capacity.promisable(pool.spec.overcommit_percent);
        let promised = self.ledger.reserved_beside(&name, replica);
        Ok(Room {
            promised,
            limit,
            free: capacity.free,
        })
    }

    fn check(
        &self,
        pool: &Pool,
        replica: &str,
        from: Bytes,
        to: Bytes,
        thick: bool,
    ) -> Result<Bytes, Hold> {
        let room = self.room_of(pool, replica)?;
        let name = pool.name_any();
        let left = room.limit.saturating_sub(room.promised);
        if to > left {
            let message = format!(
                "Pool {name:?} can promise {} at {}% of what it can hold; {} is promised to others, and {} is asked for.",
                human(room.limit),
                pool.spec.overcommit_percent,
                human(room.promised),
                human(to)
            );
            return Err(Hold::new(HoldReason::NoSpaceInPool, message));
        }
        let allocates = to.saturating_sub(from);
        if thick && allocates > room.free {
            let message = format!(
                "Pool {name:?} has {} free, and {} must be allocated at once because the class is thick.",
                human(room.free),
                human(allocates)
            );
            return Err(Hold::new(HoldReason::NoSpaceInPool, message));
        }
        Ok(left)
    }
}

impl Rooms for Pools<'_> {
    fn place(&self, names: &[String], size: Bytes, thick: bool) -> Result<(String, String), Hold> {
        let mut eligible: Vec<&Arc<Pool>> = self
            .pools
            .iter()
            .filter(|pool| names.is_empty() || names.contains(&pool.name_any()))
            .filter(|pool| pool.metadata.deletion_timestamp.is_none())
            .collect();
        eligible.sort_by_key(|pool| pool.name_any());
        let mut refusal = None;
        let mut best: Option<(Bytes, &Arc<Pool>)> = None;
        for pool in eligible {
            match self.check(pool, "", Bytes::ZERO, size, thick) {
                Ok(left) if best.as_ref().is_none_or(|(most, _)| left > *most) => {
                    best = Some((left, pool))
                }
                Ok(_) => {}
                Err(hold) => refusal = Some(hold),
            }
        }
        match (best, refusal) {
            (Some((_, pool)), _) => Ok((pool.name_any(), pool.spec.node.clone())),
            (None, Some(hold)) => Err(hold),
            (None, None) => {
                let wanted = if names.is_empty() {
                    "any".to_owned()
                } else {
                    names.join(", ")
                };
                let message =
                    format!("The class allows these pools: {wanted}; none of them exists.");
                Err(Hold::new(HoldReason::PoolNotFound, message))
            }
        }
    }

    fn room(
        &self,
        pool: &str,
        replica: &str,
        from: Bytes,
        to: Bytes,
        thick: bool,
    ) -> Result<(), Hold> {
        let Some(found) = self.pools.iter().find(|each| each.name_any() == pool) else {
            let message =
                format!("Replica {replica:?} lives on pool {pool:?}, which does not exist.");
            return Err(Hold::new(HoldReason::PoolNotFound, message));
        };
        self.check(found, replica, from, to, thick).map(drop)
    }
}

/// A size for a sentence: exact where that is short, else in the unit that suits it, with one decimal,
/// rounded down, since it tells what there is.
fn human(size: Bytes) -> String {
    let exact = size.to_string();
    if exact.len() <= 6 {
        return exact;
    }
    const UNITS: [(u32, &str); 5] = [(50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
    let fitting = UNITS.iter().find(|(shift, _)| size.get() >> shift > 0);
    let Some((shift, unit)) = fitting else {
        return exact;
    };
    let tenths = (u128::from(size.get()) * 10) >> shift;
    format!("{}.{}{unit}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a sentence shows a size that nobody can read, or one that is larger than the truth.
    #[test]
    fn sizes_in_sentences_are_short_and_never_too_large() {
        assert_eq!(human(Bytes::gib(2)), "2Gi");
        assert_eq!(human(Bytes::ZERO), "0");
        assert_eq!(human(Bytes::new(71_848_696 << 10)), "68.5Gi");
        assert_eq!(human(Bytes::new((1 << 20) - 1)), "1023.9Ki");
    }
}
