//! Those who plan: the embedded home, or two processes of which one has the lease.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use trellis_api::Bytes;
use trellis_api::kinds::{FSTYPE_PARAMETER, PROVISIONER};

use super::CLASSES;
use super::law::{Breach, Law};
use super::simulation::{Simulation, nth};
use super::store::{Event, KIND_COUNT, KINDS, NODES, Store};
use crate::cache::Cache;
use crate::carry::{self, Decided, conclude};
use crate::embedded::plan;
use crate::stored::StoredClaim;
use crate::volume::nodes::Nodes;
use crate::volume::rooms::Pools;
use crate::volume::surroundings::{Surroundings, Waits};
use crate::world::{Sees, World, attachment_key, volume_name};
use crate::write::{Object, Write, Written};

/// A process that can plan.
pub struct PlannerRole {
    watch: usize,
    home: Option<String>,
    pub world: World,
    pub(super) plans: BTreeMap<String, Decided>,
}

/// Empty caches. A target rests as soon as it can, so that histories come across that.
pub(super) fn new_world() -> World {
    World::waiting(Waits {
        rest: Duration::ZERO,
        ..Waits::USUAL
    })
}

fn new_home(home: Option<&String>) -> World {
    let world = new_world();
    if let Some(home) = home {
        let _ = world.home.set(home.clone());
    }
    add_classes(&world);
    world
}

fn add_classes(world: &World) {
    for name in CLASSES {
        let mut class = StorageClass {
            provisioner: PROVISIONER.to_owned(),
            ..StorageClass::default()
        };
        class.metadata.name = Some(name.to_owned());
        class.reclaim_policy = (name == "retain").then(|| "Retain".to_owned());
        if name == "waits" {
            class.volume_binding_mode = Some("WaitForFirstConsumer".to_owned());
        }
        // The filesystem that may be the smallest: the pools of the histories are small.
        let filesystem = (FSTYPE_PARAMETER.to_owned(), "ext4".to_owned());
        let mut parameters = BTreeMap::from([filesystem]);
        let parameter = match name {
            "p0-only" => Some(("pools", "p0")),
            "two" => Some(("replicas", "2")),
            "three" => Some(("replicas", "3")),
            _ => None,
        };
        parameters.extend(parameter.map(|(name, value)| (name.to_owned(), value.to_owned())));
        class.parameters = Some(parameters);
        world.classes.apply(watcher::Event::Apply(class));
    }
}

impl PlannerRole {
    pub(super) fn new(store: &mut Store, home: Option<String>) -> Self {
        PlannerRole {
            watch: store.watch(Sees::Claims),
            world: new_home(home.as_ref()),
            home,
            plans: BTreeMap::new(),
        }
    }

    /// What was only in memory is lost; the caches begin with a full listing.
    fn begin_again(&mut self, store: &mut Store) {
        self.plans.clear();
        self.world = new_home(self.home.as_ref());
        store.list_again(self.watch);
        for kind in 0..KIND_COUNT {
            while take_next(&self.world, store, self.watch, kind) {}
        }
    }

    /// The names under which anything is known, as the planners would be told them.
    pub fn keys(&self) -> Vec<String> {
        known_keys(&self.world)
    }
}

/// The names under which a process knows anything.
pub(super) fn known_keys(world: &World) -> Vec<String> {
    let claims = world.claims.all();
    let mut keys: Vec<String> = claims.iter().filter_map(|each| volume_name(each)).collect();
    keys.extend(world.volumes.all().iter().map(|each| each.name_any()));
    let persistent = world.persistent_volumes.all();
    keys.extend(persistent.iter().map(|each| each.name_any()));
    let replicas = world.replicas.all();
    keys.extend(replicas.iter().map(|each| each.spec.volume.clone()));
    for each in world.attachments.all() {
        keys.extend(attachment_key(&each));
    }
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// Tells a process the next event of one kind; false when it has seen all.
pub(super) fn take_next(world: &World, store: &mut Store, watch: usize, kind: usize) -> bool {
    let Some(event) = store.next_event(watch, kind) else {
        return false;
    };
    if kind == NODES {
        take(&world.nodes, event);
        return true;
    }
    match KINDS[kind] {
        Object::Claim => take(&world.claims, event),
        Object::PersistentVolume => take(&world.persistent_volumes, event),
        Object::Volume => {
            for change in world.volumes.apply(typed(event)) {
                world.note_volume(&change);
            }
        }
        Object::Pod => take(&world.pods, event),
        Object::Target => take(&world.targets, event),
        Object::Replica => {
            for change in world.replicas.apply(typed(event)) {
                world.note_replica(&change);
            }
        }
        Object::Attachment => take(&world.attachments, event),
        Object::Pool => take(&world.pools, event),
        // Nobody looks at it.
        Object::Secret => {}
    }
    true
}

fn typed<K: DeserializeOwned>(event: Event) -> watcher::Event<K> {
    match event {
        Event::Apply(body) => watcher::Event::Apply(super::simulation::read(&body)),
        Event::Delete(body) => watcher::Event::Delete(super::simulation::read(&body)),
    }
}

fn take<K: ResourceExt + DeserializeOwned>(cache: &Cache<K>, event: Event) {
    cache.apply(typed(event));
}

impl Simulation {
    /// The process that plans.
    pub fn leading(&self) -> &PlannerRole {
        &self.planners[self.leader]
    }

    pub(super) fn leader(&mut self) -> &mut PlannerRole {
        &mut self.planners[self.leader]
    }

    /// Tells a process its next event of one kind; false when it has seen all, or cannot be told.
    pub fn deliver(&mut self, seat: usize, kind: usize) -> bool {
        let seat = seat % (self.planners.len() + self.agents.len());
        let kind = kind % KIND_COUNT;
        match self.planners.get(seat) {
            Some(planner) => take_next(&planner.world, &mut self.store, planner.watch, kind),
            None => self.deliver_to_agent(seat - self.planners.len(), kind),
        }
    }

    pub(super) fn plan_one(&mut self, volume: usize) -> Result<(), Breach> {
        match nth(self.leading().keys().iter(), volume) {
            Some(key) => self.plan(&key),
            None => Ok(()),
        }
    }

    pub(super) fn write_one(&mut self, volume: usize, lost: u8) {
        if let Some(key) = nth(self.leading().plans.keys(), volume) {
            self.write(&key, lost);
        }
    }

    /// Looks and decides, under the ledger's lock. Deciding twice must give the same.
    pub(super) fn plan(&mut self, key: &str) -> Result<(), Breach> {
        if self.leading().plans.contains_key(key) {
            return Ok(());
        }
        let at = self.now();
        let world = &self.leading().world;
        let view = StoredClaim::gather(world, key);
        let look = || {
            let ledger = world.ledger.open();
            let nodes = Nodes::of(&world.nodes.all());
            let pools = Pools {
                pools: world.pools.all(),
                nodes: &nodes,
                ledger: &ledger,
            };
            let around = Surroundings {
                rooms: &pools,
                nodes: &nodes,
                waits: world.waits,
            };
            plan(&view, around, &at)
        };
        if look() != look() {
            let what = format!("two plans of {key} from the same view differ");
            return Err(Breach::of(Law::PlansArePure, what));
        }
        let decided = carry::decide(world, key, |around| plan(&view, around, &at));
        let promises = decided.plan.promises.clone();
        self.leader().plans.insert(key.to_owned(), decided);
        for promise in promises {
            let stored = self.stored_reservations();
            let held = stored.get(&promise.replica).map(|(_, size)| *size);
            if Some(promise.size) > held {
                self.check_limit(&promise.pool, &promise.replica)?;
            }
        }
        Ok(())
    }

    /// What is stored and what has been promised and is on its way must fit the pool as it is known.
    fn check_limit(&self, pool: &str, to: &str) -> Result<(), Breach> {
        let mut held = self.stored_reservations();
        held.retain(|name, (on, _)| on == pool && !self.late.contains(name));
        let plans = self.leading().plans.values();
        for promise in plans.flat_map(|each| &each.plan.promises) {
            if promise.pool == pool {
                let entry = held.entry(promise.replica.clone());
                let entry = entry.or_insert((pool.to_owned(), Bytes::ZERO));
                entry.1 = entry.1.max(promise.size);
            }
        }
        let breach = |what: String| Breach::of(Law::RoomOnce, what);
        let known = self.leading().world.pools.get("", pool);
        let known = known.ok_or_else(|| breach(format!("{pool} is not known")))?;
        let status = known.status.as_ref();
        let capacity = status.and_then(|status| status.capacity.clone());
        let limit = capacity.ok_or_else(|| breach(format!("{pool} was not measured")))?;
        let limit = limit.promisable(known.spec.overcommit_percent);
        let sum: Bytes = held.values().map(|(_, size)| *size).sum();
        super::law::rule(Law::RoomOnce, sum <= limit, || {
            format!("{to} was promised room on {pool}, which then has {sum} of {limit}: {held:?}")
        })
    }

    /// Sends a plan's writes.
    pub(super) fn write(&mut self, key: &str, lost: u8) {
        let Some(decided) = self.leader().plans.remove(key) else {
            return;
        };
        let mut written = Vec::new();
        for (index, write) in decided.plan.writes.iter().enumerate() {
            let is_lost = index < 8 && lost & (1 << index) != 0;
            written.push(if is_lost {
                Written::Failed(kube::Error::TlsRequired)
            } else {
                self.send(write)
            });
        }
        conclude(&self.leading().world, key, &decided, &written);
    }

    fn send(&mut self, write: &Write) -> Written {
        if self.store.apply(write) {
            Written::Stored
        } else {
            Written::Outdated
        }
    }

    pub(super) fn restart_planner(&mut self) {
        let leader = self.leader;
        self.planners[leader].begin_again(&mut self.store);
        if self.is_home(0) {
            self.agents[0].looks.clear();
        }
    }

    /// The other process gets the lease, and begins with empty caches. What the first has decided is in its hands.
    pub(super) fn change_leader(&mut self) {
        if self.planners.len() > 1 {
            self.leader = (self.leader + 1) % self.planners.len();
            let leader = self.leader;
            self.planners[leader].begin_again(&mut self.store);
        }
    }

    /// A process that has lost the lease sends what it had decided before.
    pub(super) fn write_late(&mut self, volume: usize) {
        for index in 0..self.planners.len() {
            let key = nth(self.planners[index].plans.keys(), volume);
            let Some(key) = key.filter(|_| index != self.leader) else {
                continue;
            };
            if let Some(decided) = self.planners[index].plans.remove(&key) {
                let promises = decided.plan.promises.iter();
                self.late.extend(promises.map(|each| each.replica.clone()));
                for write in &decided.plan.writes {
                    self.store.apply(write);
                }
            }
        }
    }

    pub(super) fn write_all_late(&mut self) {
        let others = self.planners.iter().enumerate();
        let others = others.filter(|(index, _)| *index != self.leader);
        let count: usize = others.map(|(_, each)| each.plans.len()).sum();
        for _ in 0..count {
            self.write_late(0);
        }
    }
}
