//! The real planner and agent, on a store and a machine in memory, moved one step at a time.
//!
//! The caches get the store's events only when a step says so, each kind separately. So plans and passes see outdated
//! objects in every way in which a watch can lag. A plan or a pass that has looked may write much later.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{self, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use trellis_api::kinds::{FSTYPE_PARAMETER, PROVISIONER, Replica, Volume};
use trellis_api::{Bytes, Rung};

use super::machine::Model;
use super::store::{Event, KINDS, Store};
use crate::cache::Cache;
use crate::carry::{Decided, conclude};
use crate::claim::finish::claim_write;
use crate::claim::status;
use crate::embedded::{decide, plan};
use crate::node::job::{Job, Node, job};
use crate::node::machine::{Consumers, Machine};
use crate::node::reconcile::missing_finalizers;
use crate::node::report::{early_writes, replica_writes, use_writes};
use crate::node::work::work;
use crate::stored::{StoredClaim, now};
use crate::volume::nodes::Nodes;
use crate::volume::parts;
use crate::volume::rooms::Pools;
use crate::volume::surroundings::{Surroundings, Waits};
use crate::world::{World, attachment_key, volume_name};
use crate::write::{Object, Place, Write, Written};

pub const NAMESPACE: &str = "default";
pub const NODE: &str = "node";
pub const POOLS: [&str; 4] = ["p0", "p1", "p2", "p3"];
pub const CLASSES: [&str; 6] = ["delete", "retain", "waits", "p0-only", "two", "three"];

/// One step of a history.
#[derive(Clone, Debug)]
pub enum Step {
    /// A claim is made, unless one of that name exists.
    Create {
        claim: usize,
        class: usize,
        mib: u64,
        block: bool,
    },
    /// A bound claim asks for another size, as far as the API lets it.
    Ask {
        claim: usize,
        mib: u64,
    },
    Attach {
        claim: usize,
        which: usize,
        read_only: bool,
    },
    Detach {
        claim: usize,
        which: usize,
    },
    DeleteClaim {
        claim: usize,
    },
    /// The reclaim policy of a claim's persistent volume is changed.
    Policy {
        claim: usize,
        retain: bool,
    },
    /// A volume with several copies is to have so many.
    Scale {
        claim: usize,
        copies: u32,
    },
    /// One of several copies is deleted, to be replaced.
    Replace {
        claim: usize,
        which: usize,
    },
    /// Copies on this pool cannot be reached from now on; with none, all can.
    LosePool {
        pool: Option<usize>,
    },
    PoolSize {
        pool: usize,
        mib: u64,
    },
    Overcommit {
        pool: usize,
        percent: u32,
    },
    /// No raise of this rung succeeds from now on; with none, all do.
    Break {
        rung: Option<Rung>,
    },
    /// The cache of one kind is told some of what it has not seen.
    Deliver {
        kind: usize,
        count: usize,
    },
    /// The planner looks at a volume, if it does not have a plan for it in its hands.
    Plan {
        volume: usize,
    },
    /// A plan is written; of its writes, those in the mask are lost on the way.
    Write {
        volume: usize,
        lost: u8,
    },
    /// The agent looks at a volume, if it has not looked at it already.
    Look {
        volume: usize,
    },
    /// The agent does what it saw, and reports.
    Work {
        volume: usize,
    },
    /// The process dies and starts again.
    Restart,
    /// One round in which every cache is told everything and every volume has its turn.
    CatchUp,
}

pub struct Simulation {
    pub store: Store,
    pub world: World,
    pub machine: Arc<Model>,
    plans: BTreeMap<String, Decided>,
    looks: BTreeMap<String, StoredClaim>,
}

/// Caches that know the only node. A target rests as soon as it can, so that histories come across that.
fn new_world() -> World {
    let waits = Waits {
        rest: Duration::ZERO,
        ..Waits::USUAL
    };
    let world = World::waiting(waits);
    let mut node = v1::Node::default();
    node.metadata.name = Some(NODE.to_owned());
    world.nodes.apply(watcher::Event::Apply(node));
    let _ = world.home.set(NODE.to_owned());
    world
}

impl Simulation {
    pub fn new() -> Self {
        let mut simulation = Simulation {
            store: Store::default(),
            world: new_world(),
            machine: Arc::default(),
            plans: BTreeMap::new(),
            looks: BTreeMap::new(),
        };
        simulation.add_classes();
        for pool in POOLS {
            let place = Place::named(Object::Pool, pool);
            let spec = json!({ "node": NODE, "path": pool_path(pool), "overcommitPercent": 100 });
            let body = json!({
                "apiVersion": "trellis.dev/v1alpha1", "kind": "Pool",
                "metadata": { "name": pool }, "spec": spec,
            });
            simulation.store.apply(&Write::Create(place, body));
            simulation.set_pool_size(pool, 400);
        }
        simulation.deliver_all();
        simulation
    }

    fn add_classes(&self) {
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
            self.world.classes.apply(watcher::Event::Apply(class));
        }
    }

    /// Takes one step. The error is a rule that the step broke.
    pub fn step(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Create {
                claim,
                class,
                mib,
                block,
            } => self.create(*claim, *class, *mib, *block),
            Step::Ask { claim, mib } => self.ask(*claim, *mib),
            Step::Attach {
                claim,
                which,
                read_only,
            } => self.attach(*claim, *which, *read_only),
            Step::Detach { claim, which } => {
                let place = attachment_place(*claim, *which);
                self.store.apply(&Write::Delete(place));
            }
            Step::DeleteClaim { claim } => {
                self.store.apply(&Write::Delete(claim_place(*claim)));
            }
            Step::Policy { claim, retain } => self.set_policy(*claim, *retain),
            Step::Scale { claim, copies } => self.scale(*claim, *copies),
            Step::Replace { claim, which } => self.replace(*claim, *which),
            Step::LosePool { pool } => {
                let path = pool.map(|pool| pool_path(POOLS[pool % POOLS.len()]).into());
                self.machine.lose_pool(path);
            }
            Step::PoolSize { pool, mib } => self.set_pool_size(POOLS[*pool % POOLS.len()], *mib),
            Step::Overcommit { pool, percent } => {
                let place = Place::named(Object::Pool, POOLS[*pool % POOLS.len()]);
                let body = json!({ "spec": { "overcommitPercent": percent } });
                self.store.apply(&Write::Patch(place, body));
            }
            Step::Break { rung } => self.machine.break_rung(*rung),
            Step::Deliver { kind, count } => {
                for _ in 0..*count {
                    self.deliver(KINDS[*kind % KINDS.len()]);
                }
            }
            Step::Plan { volume } => {
                if let Some(key) = self.pick(*volume) {
                    self.plan(&key)?;
                }
            }
            Step::Write { volume, lost } => {
                let key = nth(self.plans.keys(), *volume);
                if let Some(key) = key {
                    self.write(&key, *lost);
                }
            }
            Step::Look { volume } => {
                if let Some(key) = self.pick(*volume) {
                    self.look(&key);
                }
            }
            Step::Work { volume } => {
                let key = nth(self.looks.keys(), *volume);
                if let Some(key) = key {
                    self.work(&key);
                }
            }
            Step::Restart => self.restart(),
            Step::CatchUp => self.round()?,
        }
        Ok(())
    }

    /// The names under which anything is known, as the controllers would be told them.
    pub fn keys(&self) -> Vec<String> {
        let world = &self.world;
        let claims = world.claims.all();
        let mut keys: Vec<String> = claims.iter().filter_map(|each| volume_name(each)).collect();
        keys.extend(world.volumes.all().iter().map(|each| each.name_any()));
        keys.extend(
            world
                .persistent_volumes
                .all()
                .iter()
                .map(|each| each.name_any()),
        );
        keys.extend(
            world
                .replicas
                .all()
                .iter()
                .map(|each| each.spec.volume.clone()),
        );
        for each in world.attachments.all() {
            keys.extend(attachment_key(&each));
        }
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    fn pick(&self, volume: usize) -> Option<String> {
        nth(self.keys().iter(), volume)
    }

    fn create(&mut self, claim: usize, class: usize, mib: u64, block: bool) {
        let place = claim_place(claim);
        let body = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": { "finalizers": ["kubernetes.io/pvc-protection"] },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": CLASSES[class % CLASSES.len()],
                "volumeMode": if block { "Block" } else { "Filesystem" },
                "resources": { "requests": { "storage": Bytes::mib(mib) } },
            },
        });
        if self.store.apply(&Write::Create(place.clone(), body)) {
            let body = json!({ "status": { "phase": "Pending" } });
            self.store.apply(&Write::PatchStatus(place, body));
        }
    }

    /// A request may rise, and may be lowered as long as it stays above what is reported.
    fn ask(&mut self, claim: usize, mib: u64) {
        let place = claim_place(claim);
        let Some(stored) = self.store.get(&place) else {
            return;
        };
        let stored: PersistentVolumeClaim = read(stored);
        let (asked, reported) = (status::requested(&stored), status::reported(&stored));
        let size = Bytes::mib(mib);
        let allowed = Some(size) > asked || Some(size) > reported;
        if reported.is_some() && allowed {
            let body = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
            self.store.apply(&Write::Patch(place, body));
        }
    }

    fn attach(&mut self, claim: usize, which: usize, read_only: bool) {
        let place = attachment_place(claim, which);
        let body = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
            "metadata": {},
            "spec": {
                "claimName": format!("c{claim}"), "node": NODE,
                "consumer": { "mount": {
                    "path": format!("/mnt/{}", place.name), "readOnly": read_only,
                }},
            },
        });
        self.store.apply(&Write::Create(place, body));
    }

    fn set_policy(&mut self, claim: usize, retain: bool) {
        let stored = self.store.get(&claim_place(claim));
        let name = stored.and_then(|each| each["spec"]["volumeName"].as_str());
        let Some(name) = name else { return };
        let place = Place::named(Object::PersistentVolume, name);
        let policy = if retain { "Retain" } else { "Delete" };
        let body = json!({ "spec": { "persistentVolumeReclaimPolicy": policy } });
        self.store.apply(&Write::Patch(place, body));
    }

    /// The stored volume of a claim, if it is one of several copies.
    fn replicated(&self, claim: usize) -> Option<Volume> {
        let stored = self.store.get(&claim_place(claim))?;
        let name = volume_name(&read(stored))?;
        let volume: Volume = read(self.store.get(&Place::named(Object::Volume, name))?);
        volume.spec.is_behind_target().then_some(volume)
    }

    fn scale(&mut self, claim: usize, copies: u32) {
        let Some(volume) = self.replicated(claim) else {
            return;
        };
        let factor = copies / 2 + 1;
        let body = json!({ "spec": { "replicas": copies, "consistencyFactor": factor } });
        let place = Place::named(Object::Volume, volume.name_any());
        self.store.apply(&Write::Patch(place, body));
    }

    fn replace(&mut self, claim: usize, which: usize) {
        let Some(volume) = self.replicated(claim) else {
            return;
        };
        let copies = self.copies(&volume.name_any());
        let names: Vec<String> = copies.iter().map(ResourceExt::name_any).collect();
        if let Some(name) = nth(names.iter(), which) {
            let place = Place::named(Object::Replica, name);
            self.store.apply(&Write::Delete(place));
        }
    }

    /// The stored replicas of a volume.
    pub fn copies(&self, volume: &str) -> Vec<Replica> {
        let all = self.store.all(Object::Replica).into_iter();
        all.map(read::<Replica>)
            .filter(|each| each.spec.volume == volume)
            .collect()
    }

    fn set_pool_size(&mut self, pool: &str, mib: u64) {
        let size = Bytes::mib(mib);
        let capacity =
            json!({ "total": size, "free": size, "allocated": "0", "observedAt": now() });
        let ready = json!([{
            "type": "Ready", "status": "True", "reason": "Measured", "message": "",
            "lastTransitionTime": "2024-01-01T00:00:00Z",
        }]);
        let body = json!({ "status": { "capacity": capacity, "conditions": ready } });
        let place = Place::named(Object::Pool, pool);
        self.store.apply(&Write::PatchStatus(place, body));
    }

    /// Tells the cache of one kind its next event; false when it has seen all.
    pub fn deliver(&mut self, object: Object) -> bool {
        let Some(event) = self.store.next_event(object) else {
            return false;
        };
        let world = &self.world;
        match object {
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

    pub fn deliver_all(&mut self) {
        for object in KINDS {
            while self.deliver(object) {}
        }
    }

    /// Looks and decides, under the ledger's lock. Deciding twice must give the same.
    fn plan(&mut self, key: &str) -> Result<(), String> {
        if self.plans.contains_key(key) {
            return Ok(());
        }
        let view = StoredClaim::gather(&self.world, key);
        let at = now();
        let look = || {
            let ledger = self.world.ledger.open();
            let nodes = Nodes::of(&self.world.nodes.all());
            let pools = Pools {
                pools: self.world.pools.all(),
                nodes: &nodes,
                ledger: &ledger,
            };
            let around = Surroundings {
                rooms: &pools,
                nodes: &nodes,
                waits: self.world.waits,
            };
            plan(&view, around, &at)
        };
        if look() != look() {
            return Err(format!("two plans of {key} from the same view differ"));
        }
        let decided = decide(&self.world, &view);
        let promises = decided.plan.promises.clone();
        self.plans.insert(key.to_owned(), decided);
        for promise in promises {
            let stored = self.stored_reservations();
            let held = stored.get(&promise.replica).map(|(_, size)| *size);
            if Some(promise.size) > held {
                self.check_limit(&promise.pool, &promise.replica)?;
            }
        }
        Ok(())
    }

    /// What the store holds against each pool: the goals of replicas, and those of volumes whose first replicas
    /// are not made yet.
    pub fn stored_reservations(&self) -> BTreeMap<String, (String, Bytes)> {
        let mut reservations = BTreeMap::new();
        for volume in self.store.all(Object::Volume) {
            let volume: Volume = read(volume);
            if parts::was_served(&volume) {
                continue;
            }
            for (name, pool) in parts::reservations(&volume) {
                reservations.insert(name, (pool, volume.spec.capacity));
            }
        }
        for replica in self.store.all(Object::Replica) {
            let replica: Replica = read(replica);
            let held = (replica.spec.pool.clone(), replica.spec.capacity);
            reservations.insert(replica.name_any(), held);
        }
        reservations
    }

    /// What is stored and what has been promised and is on its way must fit the pool as it is known.
    fn check_limit(&self, pool: &str, to: &str) -> Result<(), String> {
        let mut held = self.stored_reservations();
        held.retain(|_, (on, _)| on == pool);
        for promise in self.plans.values().flat_map(|each| &each.plan.promises) {
            if promise.pool == pool {
                let entry = held.entry(promise.replica.clone());
                let entry = entry.or_insert((pool.to_owned(), Bytes::ZERO));
                entry.1 = entry.1.max(promise.size);
            }
        }
        let known = self.world.pools.get("", pool).ok_or("an unknown pool")?;
        let capacity = known
            .status
            .as_ref()
            .and_then(|status| status.capacity.clone());
        let limit = capacity.ok_or("a pool that was not measured")?;
        let limit = limit.promisable(known.spec.overcommit_percent);
        let sum: Bytes = held.values().map(|(_, size)| *size).sum();
        if sum > limit {
            return Err(format!(
                "{to} was promised room on {pool}, which then has {sum} of {limit}: {held:?}"
            ));
        }
        Ok(())
    }

    /// Sends a plan's writes.
    fn write(&mut self, key: &str, lost: u8) {
        let Some(decided) = self.plans.remove(key) else {
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
        conclude(&self.world, key, &decided, &written);
    }

    fn send(&mut self, write: &Write) -> Written {
        if self.store.apply(write) {
            Written::Stored
        } else {
            Written::Outdated
        }
    }

    fn look(&mut self, key: &str) {
        if !self.looks.contains_key(key) {
            let view = StoredClaim::gather(&self.world, key);
            self.looks.insert(key.to_owned(), view);
        }
    }

    /// One pass of the agent, as its reconciler does it, with early reports of the lower rungs.
    fn work(&mut self, key: &str) {
        let Some(view) = self.looks.remove(key) else {
            return;
        };
        let node = Node {
            name: NODE.to_owned(),
            boot_id: self.machine.boot_id(),
            online_growth: true,
        };
        let stored = &view.stored;
        let job: Job = job(stored, &node, &|name| self.world.pools.get("", name));
        if !job.has_work() {
            return;
        }
        if let Some(writes) = missing_finalizers(&job) {
            for write in &writes {
                self.store.apply(write);
            }
            return;
        }
        let ladders = std::cell::RefCell::new(Vec::new());
        let early = |ladder: &[_]| ladders.borrow_mut().push(ladder.to_vec());
        let outcome = work(&Machine::of(self.machine.clone()), &job, &early);
        let at = now();
        let mut writes = Vec::new();
        for ladder in ladders.into_inner() {
            writes.extend(early_writes(stored, &job, &ladder, &at));
        }
        let claim = view.claim.as_ref();
        let finished = claim.and_then(|it| claim_write(it, stored, &job, &outcome, &at));
        writes.extend(finished.map(|(write, _)| write));
        writes.extend(use_writes(stored, &job, &outcome, &node.boot_id, &at));
        writes.extend(replica_writes(stored, &job, &outcome, &at));
        for write in &writes {
            self.store.apply(write);
        }
    }

    /// What was only in memory is lost; the caches begin with a full listing.
    fn restart(&mut self) {
        self.plans.clear();
        self.looks.clear();
        self.world = new_world();
        self.add_classes();
        self.store.list_again();
        self.deliver_all();
    }

    /// Lets everything come to rest, and returns how many rounds that took.
    pub fn settle(&mut self, rounds_max: usize) -> Result<usize, String> {
        for round in 0..rounds_max {
            let before = self.store.version();
            self.round()?;
            if self.store.version() == before {
                return Ok(round);
            }
        }
        Err(format!("still writing after {rounds_max} rounds"))
    }

    fn round(&mut self) -> Result<(), String> {
        for key in self.plans.keys().cloned().collect::<Vec<_>>() {
            self.write(&key, 0);
        }
        for key in self.looks.keys().cloned().collect::<Vec<_>>() {
            self.work(&key);
        }
        self.deliver_all();
        for key in self.keys() {
            self.plan(&key)?;
            self.write(&key, 0);
            self.deliver_all();
            self.look(&key);
            self.work(&key);
            self.deliver_all();
        }
        Ok(())
    }
}

fn pool_path(pool: &str) -> String {
    format!("/{pool}")
}

pub fn claim_place(claim: usize) -> Place {
    Place::within(Object::Claim, NAMESPACE, format!("c{claim}"))
}

fn attachment_place(claim: usize, which: usize) -> Place {
    Place::within(Object::Attachment, NAMESPACE, format!("a{claim}-{which}"))
}

fn nth<'a>(names: impl ExactSizeIterator<Item = &'a String>, index: usize) -> Option<String> {
    let count = names.len();
    let mut names = names;
    names.nth(index.checked_rem(count)?).cloned()
}

/// An object of the store in its own type.
pub fn read<K: DeserializeOwned>(stored: &Value) -> K {
    serde_json::from_value(stored.clone()).expect("what is stored is of its kind")
}

fn typed<K: DeserializeOwned>(event: Event) -> watcher::Event<K> {
    let (value, gone) = match event {
        Event::Apply(value) => (value, false),
        Event::Delete(value) => (value, true),
    };
    let object = serde_json::from_value(value).expect("what is stored is of its kind");
    if gone {
        watcher::Event::Delete(object)
    } else {
        watcher::Event::Apply(object)
    }
}

fn take<K: ResourceExt + DeserializeOwned>(cache: &Cache<K>, event: Event) {
    cache.apply(typed(event));
}
