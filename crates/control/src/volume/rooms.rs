//! Which pool has room: the rule, and the pools as they are stored.

use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::kinds::{Placement, Pool};
use trellis_api::{Bytes, Hold, HoldReason};

use super::nodes::Nodes;
use crate::disks;
use crate::ledger::Open;
use crate::plan::Promise;

/// A copy that needs a place.
#[derive(Clone, Copy, Debug)]
pub struct NewCopy<'a> {
    /// The name that its replica will have.
    pub replica: &'a str,
    /// Its size.
    pub size: Bytes,
    /// Whether every byte is allocated at once.
    pub thick: bool,
    /// Whether it may be on a filesystem that has another copy of the volume.
    pub allow_shared_disk: bool,
    /// Where the other copies are: no pool has two.
    pub beside: &'a [Placement],
    /// Where the copies that stay are: no filesystem has two, unless that is allowed.
    pub apart_from: &'a [Placement],
    /// What the same plan promises to other copies, which the ledger does not know yet.
    pub planned: &'a [Promise],
}

/// A copy that should grow where it is.
#[derive(Clone, Copy, Debug)]
pub struct LargerCopy<'a> {
    /// Its replica.
    pub replica: &'a str,
    /// Its pool.
    pub pool: &'a str,
    /// The size that it has.
    pub from: Bytes,
    /// The total size that it should have.
    pub to: Bytes,
    /// Whether every byte is allocated at once.
    pub thick: bool,
    /// What the same plan promises to other copies, which the ledger does not know yet.
    pub planned: &'a [Promise],
}

/// Where there is room. Implemented by the pools under the ledger's lock, and by tests.
pub trait Rooms {
    /// A pool among `names` (any, if empty) with room for a new copy, and its node. A replica that was already promised
    /// room keeps its pool. A pool with another copy of the volume is never taken, and one on a filesystem with another
    /// copy only if that is allowed. Pools on nodes without a copy are preferred.
    fn place(&self, names: &[String], copy: NewCopy<'_>) -> Result<Placement, Hold>;
    /// Whether copies on this pool are to move away.
    fn is_drained(&self, pool: &str) -> bool;
    /// Whether a copy can have its new size on its pool.
    fn room(&self, copy: LargerCopy<'_>) -> Result<(), Hold>;
}

/// The pools, with the ledger locked for the time of one decision.
pub struct Pools<'a> {
    /// All pools.
    pub pools: Vec<Arc<Pool>>,
    /// The nodes that they are on.
    pub nodes: &'a Nodes,
    /// The reservations on them.
    pub ledger: &'a Open<'a>,
}

/// What a pool can still promise to a replica.
struct Room {
    promised: Bytes,
    limit: Bytes,
    free: Bytes,
}

/// How good a pool is for a new copy: first a node without a copy, then a filesystem without one, then the most room.
type Worth = (bool, bool, Bytes);

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
        let capacity = disks::capacity(&self.pools, pool).unwrap_or(capacity);
        let limit = capacity.promisable(pool.spec.overcommit_percent);
        let promised = disks::reserved_beside(&self.pools, pool, self.ledger, replica);
        Ok(Room {
            promised,
            limit,
            free: capacity.free,
        })
    }

    /// What a new copy could have on a pool; none if the pool takes none now.
    pub fn left(&self, pool: &Pool, thick: bool) -> Option<Bytes> {
        if !pool.takes_copies() || self.nodes.is_lost(&pool.spec.node) {
            return None;
        }
        let room = self.room_of(pool, "").ok()?;
        let left = room.limit.saturating_sub(room.promised);
        Some(if thick { left.min(room.free) } else { left })
    }

    /// Which pools share the same space, for a sentence.
    fn along_with(&self, pool: &Pool) -> String {
        let sharing = disks::sharing(&self.pools, pool);
        if sharing.is_empty() {
            return String::new();
        }
        let names: Vec<String> = sharing.iter().map(|other| other.name_any()).collect();
        format!(", on one filesystem with {},", names.join(", "))
    }

    /// The first pool of `beside` that is on the filesystem of `pool`.
    fn on_disk_of<'a>(&self, pool: &Pool, beside: &'a [Placement]) -> Option<&'a str> {
        let sharing = disks::sharing(&self.pools, pool);
        let shares = |other: &&Placement| sharing.iter().any(|each| each.name_any() == other.pool);
        beside.iter().find(shares).map(|other| other.pool.as_str())
    }

    /// What the same plan promises on the filesystem of `pool`, beyond what the ledger has.
    fn planned_on(&self, pool: &Pool, planned: &[Promise]) -> Bytes {
        let sharing = disks::sharing(&self.pools, pool);
        let is_there = |promise: &&Promise| {
            promise.pool == pool.name_any()
                || sharing.iter().any(|other| other.name_any() == promise.pool)
        };
        planned
            .iter()
            .filter(is_there)
            .map(|promise| {
                let held = self.ledger.held_by(&promise.replica);
                promise.size.saturating_sub(held)
            })
            .sum()
    }

    fn check(&self, pool: &Pool, copy: LargerCopy<'_>) -> Result<Bytes, Hold> {
        let LargerCopy {
            from, to, thick, ..
        } = copy;
        let mut room = self.room_of(pool, copy.replica)?;
        let planned = self.planned_on(pool, copy.planned);
        room.promised = [room.promised, planned].into_iter().sum();
        room.free = room.free.saturating_sub(planned);
        let name = pool.name_any();
        let left = room.limit.saturating_sub(room.promised);
        if to > left {
            let message = format!(
                "Pool {name:?}{} can promise {} at {}% of what it can hold; {} is promised to others, and {} is asked for.",
                self.along_with(pool),
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
    fn place(&self, names: &[String], copy: NewCopy<'_>) -> Result<Placement, Hold> {
        let NewCopy {
            replica, beside, ..
        } = copy;
        let promised = self.ledger.pool_of(replica);
        let mut eligible: Vec<&Arc<Pool>> = self
            .pools
            .iter()
            .filter(|pool| names.is_empty() || names.contains(&pool.name_any()))
            .filter(|pool| promised.is_none_or(|promised| promised == pool.name_any()))
            .filter(|pool| pool.takes_copies() && !self.nodes.is_lost(&pool.spec.node))
            .filter(|pool| beside.iter().all(|other| other.pool != pool.name_any()))
            .collect();
        eligible.sort_by_key(|pool| pool.name_any());
        let (mut refusal, mut shared) = (None, None);
        let mut best: Option<(Worth, &Arc<Pool>)> = None;
        for pool in eligible {
            let sharing = self.on_disk_of(pool, copy.apart_from);
            if let Some(other) = sharing.filter(|_| !copy.allow_shared_disk) {
                shared = Some((pool.name_any(), other));
                continue;
            }
            let name = pool.name_any();
            let wanted = LargerCopy {
                replica,
                pool: &name,
                from: Bytes::ZERO,
                to: copy.size,
                thick: copy.thick,
                planned: copy.planned,
            };
            match self.check(pool, wanted) {
                Ok(left) => {
                    let new_node = beside.iter().all(|other| other.node != pool.spec.node);
                    let worth = (new_node, sharing.is_none(), left);
                    if best.as_ref().is_none_or(|(most, _)| worth > *most) {
                        best = Some((worth, pool));
                    }
                }
                Err(hold) => refusal = Some(hold),
            }
        }
        if let Some((_, pool)) = best {
            return Ok(Placement {
                pool: pool.name_any(),
                node: pool.spec.node.clone(),
            });
        }
        Err(refusal.unwrap_or_else(|| nowhere(names, beside, shared)))
    }

    fn is_drained(&self, pool: &str) -> bool {
        let found = self.pools.iter().find(|each| each.name_any() == pool);
        found.is_some_and(|pool| pool.spec.drain)
    }

    fn room(&self, copy: LargerCopy<'_>) -> Result<(), Hold> {
        let LargerCopy { replica, pool, .. } = copy;
        let Some(found) = self.pools.iter().find(|each| each.name_any() == pool) else {
            let message =
                format!("Replica {replica:?} lives on pool {pool:?}, which does not exist.");
            return Err(Hold::new(HoldReason::PoolNotFound, message));
        };
        self.check(found, copy).map(drop)
    }
}

/// Why no pool was eligible at all.
fn nowhere(names: &[String], beside: &[Placement], shared: Option<(String, &str)>) -> Hold {
    if let Some((pool, other)) = shared {
        let message = format!(
            "Pool {pool:?} is on the same filesystem as pool {other:?}, which has a copy of the volume, and no pool on \
             another one is there for one more copy; the class does not say allowSharedDisk: \"true\"."
        );
        return Hold::new(HoldReason::DiskShared, message);
    }
    if !beside.is_empty() {
        let taken: Vec<&str> = beside.iter().map(|other| other.pool.as_str()).collect();
        let message = format!(
            "Pools with a copy of the volume: {}; no other pool is there for one more copy.",
            taken.join(", ")
        );
        return Hold::new(HoldReason::TooFewPools, message);
    }
    let wanted = if names.is_empty() {
        "any".to_owned()
    } else {
        names.join(", ")
    };
    let message = format!("The class allows these pools: {wanted}; none of them exists.");
    Hold::new(HoldReason::PoolNotFound, message)
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

    fn copy<'a>(replica: &'a str, gib: u64, beside: &'a [Placement]) -> NewCopy<'a> {
        NewCopy {
            replica,
            size: Bytes::gib(gib),
            thick: false,
            allow_shared_disk: false,
            beside,
            apart_from: beside,
            planned: &[],
        }
    }

    fn larger<'a>(pool: &'a str, replica: &'a str, from: Bytes, to: Bytes) -> LargerCopy<'a> {
        LargerCopy {
            replica,
            pool,
            from,
            to,
            thick: false,
            planned: &[],
        }
    }

    fn on(filesystem: &str, pool: Arc<Pool>) -> Arc<Pool> {
        let mut pool = Arc::unwrap_or_clone(pool);
        let status = pool.status.get_or_insert_default();
        status.filesystem = Some(filesystem.to_owned());
        Arc::new(pool)
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
            nodes: &Nodes::there(&["n", "m", "other"]),
            ledger: &open,
        };
        let room = |to| rooms.room(larger("p", "own", Bytes::gib(2), to));
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
            nodes: &Nodes::there(&["n", "m", "other"]),
            ledger: &open,
        };
        let room = |to, thick| {
            let larger = larger("p", "r", Bytes::gib(1), Bytes::gib(to));
            rooms.room(LargerCopy { thick, ..larger })
        };
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
            nodes: &Nodes::there(&["n", "m", "other"]),
            ledger: &open,
        };
        let hold = rooms.place(&[], copy("r", 1, &[])).expect_err("not ready");
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
            nodes: &Nodes::there(&["n", "m", "other"]),
            ledger: &open,
        };
        let place = |name: &str| rooms.place(&[name.to_owned()], copy("r", 1, &[]));
        assert_eq!(reason(place("other")), HoldReason::PoolNotFound);
        assert_eq!(reason(place("going")), HoldReason::PoolNotFound);
        assert_eq!(place("p").expect("placed").pool, "p");
        let room = rooms.room(larger("other", "r", Bytes::ZERO, Bytes::GIB));
        assert_eq!(reason(room), HoldReason::PoolNotFound);
    }

    // Fails if the emptier pool is not taken, or a replica moves that was promised a place already.
    #[test]
    fn the_emptiest_pool_is_taken_and_kept() {
        let ledger = Ledger::default();
        let place = |open: &Open<'_>| {
            let rooms = Pools {
                pools: vec![pool("a", 4, 100, "True"), pool("b", 5, 100, "True")],
                nodes: &Nodes::there(&["n", "m", "other"]),
                ledger: open,
            };
            rooms.place(&[], copy("r", 2, &[]))
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
            nodes: &Nodes::there(&["n", "m", "other"]),
            ledger: &open,
        };
        let mut placed: Vec<Placement> = Vec::new();
        for expected in ["a", "c", "b"] {
            let name = format!("r-{}", placed.len());
            let place = rooms.place(&[], copy(&name, 2, &placed));
            let place = place.expect("placed");
            assert_eq!(place.pool, expected);
            placed.push(place);
        }
        let one_more = rooms.place(&[], copy("r-3", 2, &placed));
        assert_eq!(reason(one_more), HoldReason::TooFewPools);
    }

    // Fails if the space of one filesystem is promised once for each pool on it.
    #[test]
    fn pools_on_one_filesystem_share_its_space() {
        let ledger = Ledger::default();
        ledger.open().promise("other", "b", Bytes::gib(7));
        let open = ledger.open();
        let rooms = Pools {
            pools: vec![
                on("xfs 1", pool("a", 10, 100, "True")),
                on("xfs 1", pool("b", 10, 100, "True")),
                on("xfs 2", pool("c", 10, 100, "True")),
            ],
            nodes: &Nodes::there(&["n", "m", "other"]),
            ledger: &open,
        };
        let room = |pool: &str, gib| rooms.room(larger(pool, "r", Bytes::ZERO, Bytes::gib(gib)));
        // 9 GiB are free, and each of the two has a copy of 1 GiB.
        assert_eq!(room("a", 4), Ok(()));
        let hold = room("a", 5).expect_err("promised to pool b");
        assert_eq!(hold.reason, HoldReason::NoSpaceInPool);
        assert!(
            hold.message.contains("one filesystem with b"),
            "{}",
            hold.message
        );
        assert_eq!(room("c", 10), Ok(()));
        // The copies of one plan count for each other.
        let planned = [Promise {
            replica: "r-0".to_owned(),
            pool: "b".to_owned(),
            size: Bytes::gib(2),
        }];
        let second = |gib| {
            let larger = larger("a", "r", Bytes::ZERO, Bytes::gib(gib));
            rooms.room(LargerCopy {
                planned: &planned,
                ..larger
            })
        };
        assert_eq!(second(2), Ok(()));
        assert_eq!(reason(second(3)), HoldReason::NoSpaceInPool);
    }

    // Fails if two copies are put onto one filesystem unasked, it is not said what would help, or it is done where
    // another filesystem is free.
    #[test]
    fn two_copies_are_on_one_filesystem_only_where_that_is_allowed() {
        let ledger = Ledger::default();
        let open = ledger.open();
        let there = [Placement {
            pool: "a".to_owned(),
            node: "n".to_owned(),
        }];
        let mut rooms = Pools {
            pools: vec![
                on("xfs 1", pool("a", 10, 100, "True")),
                on("xfs 1", pool("b", 10, 100, "True")),
            ],
            nodes: &Nodes::there(&["n", "m", "other"]),
            ledger: &open,
        };
        let hold = rooms.place(&[], copy("r", 1, &there));
        let hold = hold.expect_err("b is lost with a");
        assert_eq!(hold.reason, HoldReason::DiskShared);
        assert!(hold.message.contains("allowSharedDisk"), "{}", hold.message);
        let allowed = NewCopy {
            allow_shared_disk: true,
            ..copy("r", 1, &there)
        };
        assert_eq!(rooms.place(&[], allowed).expect("allowed").pool, "b");
        rooms.pools.push(on("xfs 2", pool("c", 5, 100, "True")));
        assert_eq!(rooms.place(&[], allowed).expect("apart").pool, "c");
        let other_node = |pool: &Arc<Pool>| {
            let mut pool = Arc::unwrap_or_clone(pool.clone());
            pool.spec.node = "m".to_owned();
            Arc::new(pool)
        };
        rooms.pools = vec![rooms.pools[0].clone(), other_node(&rooms.pools[1])];
        let elsewhere = rooms.place(&[], copy("r", 1, &there));
        assert_eq!(elsewhere.expect("on another node").pool, "b");
    }
}
