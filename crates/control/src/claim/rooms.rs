//! Which pool has room: the rule, and the pools as they are stored.

use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::kinds::Pool;
use trellis_api::{Bytes, Hold, HoldReason};

use super::plan::{PlaceOfCopy, Rooms};
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
    fn place(
        &self,
        names: &[String],
        replica: &str,
        size: Bytes,
        thick: bool,
        beside: &[PlaceOfCopy],
    ) -> Result<PlaceOfCopy, Hold> {
        let promised = self.ledger.pool_of(replica);
        let mut eligible: Vec<&Arc<Pool>> = self
            .pools
            .iter()
            .filter(|pool| names.is_empty() || names.contains(&pool.name_any()))
            .filter(|pool| promised.is_none_or(|promised| promised == pool.name_any()))
            .filter(|pool| pool.metadata.deletion_timestamp.is_none())
            .filter(|pool| beside.iter().all(|other| other.pool != pool.name_any()))
            .collect();
        eligible.sort_by_key(|pool| pool.name_any());
        // A node that has no copy yet comes first, then the pool with the most room.
        let mut refusal = None;
        let mut best: Option<((bool, Bytes), &Arc<Pool>)> = None;
        for pool in eligible {
            match self.check(pool, replica, Bytes::ZERO, size, thick) {
                Ok(left) => {
                    let new_node = beside.iter().all(|other| other.node != pool.spec.node);
                    let worth = (new_node, left);
                    if best.as_ref().is_none_or(|(most, _)| worth > *most) {
                        best = Some((worth, pool));
                    }
                }
                Err(hold) => refusal = Some(hold),
            }
        }
        match (best, refusal) {
            (Some((_, pool)), _) => Ok(PlaceOfCopy {
                pool: pool.name_any(),
                node: pool.spec.node.clone(),
            }),
            (None, Some(hold)) => Err(hold),
            (None, None) if !beside.is_empty() => {
                let taken: Vec<&str> = beside.iter().map(|other| other.pool.as_str()).collect();
                let message = format!(
                    "Pools with a copy of the volume: {}; no other pool is there for one more copy.",
                    taken.join(", ")
                );
                Err(Hold::new(HoldReason::TooFewPools, message))
            }
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
    use crate::ledger::Ledger;
    use serde_json::json;

    fn pool(name: &str, gib: u64, percent: u32, ready: &str) -> Arc<Pool> {
        let pool = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Pool",
            "metadata": { "name": name },
            "spec": { "node": "n", "path": "/p", "overcommitPercent": percent },
            "status": {
                "capacity": {
                    "total": Bytes::gib(gib * 2), "free": Bytes::gib(gib - 1),
                    "allocated": "1Gi", "observedAt": "2024-01-01T00:00:00.000000Z",
                },
                "conditions": [{
                    "type": "Ready", "status": ready, "reason": "R", "message": "the disk is gone",
                    "lastTransitionTime": "2024-01-01T00:00:00Z",
                }],
            },
        });
        Arc::new(serde_json::from_value(pool).expect("a pool"))
    }

    fn reason(answer: Result<impl std::fmt::Debug, Hold>) -> HoldReason {
        answer.expect_err("refused").reason
    }

    // Fails if a sentence shows a size that nobody can read, or one that is larger than the truth.
    #[test]
    fn sizes_in_sentences_are_short_and_never_too_large() {
        assert_eq!(human(Bytes::gib(2)), "2Gi");
        assert_eq!(human(Bytes::ZERO), "0");
        assert_eq!(human(Bytes::new(71_848_696 << 10)), "68.5Gi");
        assert_eq!(human(Bytes::new((1 << 20) - 1)), "1023.9Ki");
    }

    // Fails if the limit is off by a byte, counts a replica against itself, or forgets the others.
    #[test]
    fn a_replica_may_have_what_the_others_leave_of_the_limit() {
        let ledger = Ledger::default();
        ledger.open().promise("own", "p", Bytes::gib(2));
        ledger.open().promise("other", "p", Bytes::gib(4));
        let open = ledger.open();
        let rooms = Pools {
            pools: vec![pool("p", 10, 150, "True")],
            ledger: &open,
        };
        let room = |to| rooms.room("p", "own", Bytes::gib(2), to, false);
        assert_eq!(room(Bytes::gib(11)), Ok(()));
        let more = Bytes::new(Bytes::gib(11).get() + 1);
        let hold = room(more).expect_err("one byte too much");
        assert_eq!(hold.reason, HoldReason::NoSpaceInPool);
        assert!(hold.message.contains("15Gi"), "{}", hold.message);
        assert!(hold.message.contains("4Gi is promised"), "{}", hold.message);
    }

    // Fails if a thick replica is promised bytes that are not free, whatever may be over-committed.
    #[test]
    fn a_thick_replica_needs_free_bytes_for_what_it_adds() {
        let ledger = Ledger::default();
        let open = ledger.open();
        let rooms = Pools {
            pools: vec![pool("p", 4, 300, "True")],
            ledger: &open,
        };
        let room = |to, thick| rooms.room("p", "r", Bytes::gib(1), Bytes::gib(to), thick);
        assert_eq!(room(4, true), Ok(()));
        assert_eq!(reason(room(5, true)), HoldReason::NoSpaceInPool);
        assert_eq!(room(5, false), Ok(()));
    }

    // Fails if a pool is used whose directory was not found to work.
    #[test]
    fn a_pool_that_is_not_ready_says_why() {
        let ledger = Ledger::default();
        let open = ledger.open();
        let rooms = Pools {
            pools: vec![pool("p", 4, 100, "False")],
            ledger: &open,
        };
        let hold = rooms
            .place(&[], "r", Bytes::GIB, false, &[])
            .expect_err("not ready");
        assert_eq!(hold.reason, HoldReason::PoolNotReady);
        assert!(
            hold.message.contains("the disk is gone"),
            "{}",
            hold.message
        );
    }

    // Fails if a replica is placed on a pool that its class does not name, or silently nowhere.
    #[test]
    fn without_an_eligible_pool_nothing_is_placed() {
        let ledger = Ledger::default();
        let open = ledger.open();
        let mut going = Arc::unwrap_or_clone(pool("going", 4, 100, "True"));
        going.metadata.deletion_timestamp =
            serde_json::from_value(json!("2024-01-01T00:00:00Z")).ok();
        let rooms = Pools {
            pools: vec![pool("p", 4, 100, "True"), Arc::new(going)],
            ledger: &open,
        };
        let place = |name: &str| rooms.place(&[name.to_owned()], "r", Bytes::GIB, false, &[]);
        assert_eq!(reason(place("other")), HoldReason::PoolNotFound);
        assert_eq!(reason(place("going")), HoldReason::PoolNotFound);
        assert_eq!(place("p").expect("placed").pool, "p");
        let room = rooms.room("other", "r", Bytes::ZERO, Bytes::GIB, false);
        assert_eq!(reason(room), HoldReason::PoolNotFound);
    }

    // Fails if the emptier pool is not taken, or a replica moves that was promised a place already.
    #[test]
    fn the_emptiest_pool_is_taken_and_kept() {
        let ledger = Ledger::default();
        let place = |open: &Open<'_>| {
            let rooms = Pools {
                pools: vec![pool("a", 4, 100, "True"), pool("b", 5, 100, "True")],
                ledger: open,
            };
            rooms.place(&[], "r", Bytes::gib(2), false, &[])
        };
        let first = place(&ledger.open()).expect("placed").pool;
        assert_eq!(first, "b");
        ledger.open().promise("r", "b", Bytes::gib(2));
        ledger.open().promise("other", "b", Bytes::gib(3));
        assert_eq!(place(&ledger.open()).expect("placed").pool, "b");
    }

    // Fails if two copies share a pool, a copy goes to a node that has one while another node is free, or it is
    // not said that pools are missing.
    #[test]
    fn copies_are_kept_apart() {
        let ledger = Ledger::default();
        let open = ledger.open();
        let mut elsewhere = Arc::unwrap_or_clone(pool("c", 4, 100, "True"));
        elsewhere.spec.node = "m".to_owned();
        let rooms = Pools {
            pools: vec![
                pool("a", 9, 100, "True"),
                pool("b", 8, 100, "True"),
                Arc::new(elsewhere),
            ],
            ledger: &open,
        };
        let mut placed: Vec<PlaceOfCopy> = Vec::new();
        for expected in ["a", "c", "b"] {
            let name = format!("r-{}", placed.len());
            let place = rooms.place(&[], &name, Bytes::gib(2), false, &placed);
            let place = place.expect("placed");
            assert_eq!(place.pool, expected);
            placed.push(place);
        }
        let one_more = rooms.place(&[], "r-3", Bytes::gib(2), false, &placed);
        assert_eq!(reason(one_more), HoldReason::TooFewPools);
    }
}
