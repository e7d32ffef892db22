//! How much of each pool has been promised, and to whom.
//!
//! A replica's `spec.capacity` is its reservation, durable like every object. From the decision to reserve until the
//! stored object is seen again, the promise stands here, under one lock. So two claims that want the last gibibyte at
//! the same time cannot both get it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kube::ResourceExt;
use trellis_api::Bytes;
use trellis_api::kinds::Replica;

/// The reservations on every pool.
#[derive(Default)]
pub struct Ledger {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    replicas: HashMap<String, Entry>,
    reserved: HashMap<String, u64>,
    /// Keys that were refused room and are to be told when some appears.
    waiting: BTreeSet<String>,
}

#[derive(Clone)]
struct Entry {
    pool: String,
    /// What the stored object holds: its goal, or its measured size if that is larger.
    stored: Bytes,
    /// What has been promised beyond that and is not stored yet.
    promised: Bytes,
    /// What its volume will give it, as long as the replica itself is not stored.
    expected: Bytes,
}

impl Entry {
    fn weight(&self) -> u64 {
        self.stored.max(self.promised).max(self.expected).get()
    }
}

/// The ledger, locked: what is decided on it and written to it is one step.
pub struct Open<'a> {
    state: MutexGuard<'a, State>,
}

impl Ledger {
    /// Locks the ledger for a decision.
    pub fn open(&self) -> Open<'_> {
        Open {
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Takes in the size of a volume whose replica may not be stored yet, under the name that the replica will have.
    /// Without this, a process that starts between the two would give the room away. `size` is none when the volume is
    /// gone. Returns who waits for room, if any appeared.
    pub fn note_volume(&self, replica: &str, pool: &str, size: Option<Bytes>) -> Vec<String> {
        let mut open = self.open();
        let known = open.state.replicas.get(replica).cloned();
        let stored = known.as_ref().map(|entry| entry.stored).unwrap_or_default();
        match size {
            Some(size) if stored == Bytes::ZERO => {
                let promised = known.map(|entry| entry.promised).unwrap_or_default();
                let entry = Entry {
                    pool: pool.to_owned(),
                    stored,
                    promised,
                    expected: size,
                };
                open.put(replica.to_owned(), entry);
                Vec::new()
            }
            Some(_) => Vec::new(),
            None => open.replace(replica, |entry| {
                entry.promised = Bytes::ZERO;
                entry.expected = Bytes::ZERO;
            }),
        }
    }

    /// Takes in a replica that was stored, changed or removed. Returns who waits for room, if any appeared.
    pub fn note(&self, old: Option<&Replica>, new: Option<&Replica>) -> Vec<String> {
        let mut open = self.open();
        let Some(name) = new.or(old).map(|replica| replica.name_any()) else {
            return Vec::new();
        };
        let freed = match new {
            Some(replica) => {
                let measured = replica.status.as_ref().and_then(|status| status.capacity);
                let stored = replica.spec.capacity.max(measured.unwrap_or_default());
                let promised = open.state.replicas.get(&name).map(|entry| entry.promised);
                let promised = promised.filter(|size| *size > stored).unwrap_or_default();
                let pool = replica.spec.pool.clone();
                open.put(
                    name,
                    Entry {
                        pool,
                        stored,
                        promised,
                        expected: Bytes::ZERO,
                    },
                )
            }
            None => open.forget(&name) > 0,
        };
        if freed {
            open.take_waiting()
        } else {
            Vec::new()
        }
    }
}

impl Open<'_> {
    /// What is reserved on `pool`, leaving out one replica.
    pub fn reserved_beside(&self, pool: &str, replica: &str) -> Bytes {
        let all = self.state.reserved.get(pool).copied().unwrap_or(0);
        let own = self
            .state
            .replicas
            .get(replica)
            .filter(|entry| entry.pool == pool);
        Bytes::new(all.saturating_sub(own.map_or(0, Entry::weight)))
    }

    /// What `replica` has or was promised.
    pub fn held_by(&self, replica: &str) -> Bytes {
        let entry = self.state.replicas.get(replica);
        Bytes::new(entry.map_or(0, Entry::weight))
    }

    /// The pool on which `replica` has or was promised room.
    pub fn pool_of(&self, replica: &str) -> Option<&str> {
        let entry = self.state.replicas.get(replica);
        entry.map(|entry| entry.pool.as_str())
    }

    /// Promises `size` on `pool` to `replica`, and returns what it was promised before. A larger earlier promise stands
    /// until the store has taken the smaller one ([`Open::settle`]).
    pub fn promise(&mut self, replica: &str, pool: &str, size: Bytes) -> Bytes {
        let known = self.state.replicas.get(replica);
        let stored = known.map(|entry| entry.stored).unwrap_or_default();
        let before = known.map(|entry| entry.promised).unwrap_or_default();
        let expected = known.map(|entry| entry.expected).unwrap_or_default();
        let entry = Entry {
            pool: pool.to_owned(),
            stored,
            promised: before.max(size),
            expected,
        };
        self.put(replica.to_owned(), entry);
        before
    }

    /// Sets what is on its way for `replica` to `size`, because that was stored or because a promise was not. A replica
    /// that is gone meanwhile stays gone. Returns who waits for room, if any appeared.
    pub fn settle(&mut self, replica: &str, size: Bytes) -> Vec<String> {
        self.replace(replica, |entry| entry.promised = size)
    }

    /// Changes an entry that exists; one that weighs nothing then is forgotten.
    fn replace(&mut self, replica: &str, change: impl FnOnce(&mut Entry)) -> Vec<String> {
        let Some(mut entry) = self.state.replicas.get(replica).cloned() else {
            return Vec::new();
        };
        change(&mut entry);
        let freed = if entry.weight() == 0 {
            self.forget(replica) > 0
        } else {
            self.put(replica.to_owned(), entry)
        };
        if freed {
            self.take_waiting()
        } else {
            Vec::new()
        }
    }

    /// Remembers that `key` was refused.
    pub fn wait(&mut self, key: &str) {
        self.state.waiting.insert(key.to_owned());
    }

    /// Everyone who was refused, to be asked again.
    pub fn take_waiting(&mut self) -> Vec<String> {
        std::mem::take(&mut self.state.waiting)
            .into_iter()
            .collect()
    }

    /// Replaces an entry; true when it weighs less than before.
    fn put(&mut self, name: String, entry: Entry) -> bool {
        let before = self.forget(&name);
        let weight = entry.weight();
        let reserved = self.state.reserved.entry(entry.pool.clone()).or_default();
        *reserved = reserved.saturating_add(weight);
        self.state.replicas.insert(name, entry);
        weight < before
    }

    /// Removes an entry and returns what it weighed.
    fn forget(&mut self, name: &str) -> u64 {
        let Some(entry) = self.state.replicas.remove(name) else {
            return 0;
        };
        if let Some(reserved) = self.state.reserved.get_mut(&entry.pool) {
            *reserved = reserved.saturating_sub(entry.weight());
        }
        entry.weight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_api::kinds::{ReplicaSpec, ReplicaStatus};

    fn replica(name: &str, goal: u64, measured: Option<u64>) -> Replica {
        let spec = ReplicaSpec {
            volume: "v".to_owned(),
            volume_id: String::new(),
            replica_id: String::new(),
            discard: false,
            pool: "p".to_owned(),
            node: "n".to_owned(),
            capacity: Bytes::gib(goal),
            thick: false,
        };
        let mut replica = Replica::new(name, spec);
        let capacity = measured.map(Bytes::gib);
        replica.status = Some(ReplicaStatus {
            capacity,
            ..ReplicaStatus::default()
        });
        replica
    }

    // Fails if a promise counts twice once its object is stored, or is lost before.
    #[test]
    fn a_promise_counts_until_it_is_stored_and_then_once() {
        let ledger = Ledger::default();
        ledger.open().promise("a", "p", Bytes::gib(2));
        assert_eq!(ledger.open().reserved_beside("p", "other"), Bytes::gib(2));
        ledger.note(None, Some(&replica("a", 1, None)));
        assert_eq!(ledger.open().reserved_beside("p", "other"), Bytes::gib(2));
        ledger.note(None, Some(&replica("a", 2, None)));
        assert_eq!(ledger.open().reserved_beside("p", "other"), Bytes::gib(2));
        assert_eq!(ledger.open().reserved_beside("p", "a"), Bytes::ZERO);
    }

    // Fails if a copy that was raised just before its request was lowered is not paid for.
    #[test]
    fn a_measured_size_counts_even_above_the_goal() {
        let ledger = Ledger::default();
        ledger.note(None, Some(&replica("a", 1, Some(3))));
        assert_eq!(ledger.open().reserved_beside("p", "other"), Bytes::gib(3));
    }

    // Fails if those who were refused are not told when room appears, or are told when none did.
    #[test]
    fn those_who_wait_are_told_when_room_appears() {
        let ledger = Ledger::default();
        let (small, large) = (replica("a", 1, None), replica("a", 2, None));
        ledger.note(None, Some(&small));
        ledger.open().wait("v");
        assert!(ledger.note(Some(&small), Some(&large)).is_empty());
        assert_eq!(ledger.note(Some(&large), Some(&small)), ["v"]);
        ledger.open().wait("v");
        assert_eq!(ledger.note(Some(&small), None), ["v"]);
        assert_eq!(ledger.open().reserved_beside("p", "other"), Bytes::ZERO);
    }

    // Fails if a smaller promise gives room away before the store has taken it.
    #[test]
    fn a_smaller_promise_counts_when_it_is_stored() {
        let ledger = Ledger::default();
        ledger.open().promise("a", "p", Bytes::gib(3));
        assert_eq!(
            ledger.open().promise("a", "p", Bytes::gib(2)),
            Bytes::gib(3)
        );
        assert_eq!(ledger.open().reserved_beside("p", ""), Bytes::gib(3));
        ledger.open().wait("v");
        assert_eq!(ledger.open().settle("a", Bytes::gib(2)), ["v"]);
        assert_eq!(ledger.open().reserved_beside("p", ""), Bytes::gib(2));
    }

    // Fails if a promise that was never stored keeps room for ever, or brings back a replica that is gone.
    #[test]
    fn a_promise_that_came_to_nothing_leaves_nothing() {
        let ledger = Ledger::default();
        ledger.open().promise("a", "p", Bytes::gib(3));
        ledger.open().settle("a", Bytes::ZERO);
        assert_eq!(ledger.open().pool_of("a"), None);
        ledger.open().settle("a", Bytes::gib(3));
        assert_eq!(ledger.open().reserved_beside("p", ""), Bytes::ZERO);
    }

    // Fails if a volume whose replica is not stored yet holds no room, or holds it twice afterwards.
    #[test]
    fn a_volume_reserves_until_its_replica_does() {
        let ledger = Ledger::default();
        ledger.note_volume("a", "p", Some(Bytes::gib(3)));
        assert_eq!(ledger.open().reserved_beside("p", ""), Bytes::gib(3));
        ledger.note(None, Some(&replica("a", 2, None)));
        ledger.note_volume("a", "p", Some(Bytes::gib(5)));
        assert_eq!(ledger.open().reserved_beside("p", ""), Bytes::gib(2));
    }

    // Fails if a volume that goes before it had a replica keeps its room for ever.
    #[test]
    fn a_volume_that_is_gone_reserves_nothing() {
        let ledger = Ledger::default();
        ledger.open().promise("a", "p", Bytes::gib(2));
        ledger.note_volume("a", "p", Some(Bytes::gib(2)));
        ledger.open().wait("v");
        assert_eq!(ledger.note_volume("a", "p", None), ["v"]);
        assert_eq!(ledger.open().reserved_beside("p", ""), Bytes::ZERO);
    }
}
