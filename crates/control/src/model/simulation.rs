//! The real planners and agents, on a store and on machines in memory, moved one step at a time.
//!
//! The caches of each process get the store's events only when a step says so, each kind separately. So plans and passes
//! see outdated objects in every way in which a watch can lag. A plan or a pass that has looked may write much later.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use trellis_api::Bytes;
use trellis_api::kinds::{Replica, Volume};

use super::agents::AgentRole;
use super::fabric::Fabric;
use super::law::{Breach, Law};
use super::planners::PlannerRole;
use super::step::Step;
use super::store::{KIND_COUNT, Store};
use crate::claim::status;
use crate::volume::parts;
use crate::world::volume_name;
use crate::write::{Object, Place, Write};

pub const NAMESPACE: &str = "default";
pub const POOLS: [&str; 4] = ["p0", "p1", "p2", "p3"];
/// How long a step takes, and a round.
const STEP_TAKES: Duration = Duration::from_millis(10);
const ROUND_TAKES: Duration = Duration::from_secs(1);

/// The nodes of a history, and who plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    pub nodes: usize,
    /// Two processes plan in turns, on no node. Otherwise the first node is the embedded home.
    pub has_leaders: bool,
}

impl Cluster {
    pub const ONE: Cluster = Cluster {
        nodes: 1,
        has_leaders: false,
    };
}

pub struct Simulation {
    pub store: Store,
    pub fabric: Arc<Fabric>,
    pub cluster: Cluster,
    pub(super) planners: Vec<PlannerRole>,
    /// Which of them plans.
    pub(super) leader: usize,
    pub(super) agents: Vec<AgentRole>,
    /// Replicas for which a process reserved room after it had lost the lease.
    pub(super) late: Vec<String>,
}

/// The name of a node.
pub fn node_name(node: usize) -> String {
    format!("n{node}")
}

impl Simulation {
    pub fn new(cluster: Cluster) -> Self {
        let mut store = Store::default();
        let fabric = Arc::new(Fabric::of(cluster.nodes));
        let count = if cluster.has_leaders { 2 } else { 1 };
        let home = (!cluster.has_leaders).then(|| node_name(0));
        let planners = (0..count).map(|_| PlannerRole::new(&mut store, home.clone()));
        let planners = planners.collect();
        let agents = (0..cluster.nodes).map(|node| {
            let is_home = node == 0 && !cluster.has_leaders;
            AgentRole::new(&mut store, &fabric, node, is_home)
        });
        let agents = agents.collect();
        let mut simulation = Simulation {
            store,
            fabric,
            cluster,
            planners,
            leader: 0,
            agents,
            late: Vec::new(),
        };
        for (index, pool) in POOLS.into_iter().enumerate() {
            let place = Place::named(Object::Pool, pool);
            let node = node_name(index % cluster.nodes);
            let spec = json!({ "node": node, "path": pool_path(pool), "overcommitPercent": 100 });
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

    pub(super) fn now(&self) -> MicroTime {
        self.store.now.clone()
    }

    /// Takes one step. The error is a rule that the step broke.
    pub fn step(&mut self, step: &Step) -> Result<(), Breach> {
        self.pass_time(STEP_TAKES);
        self.carry_out(step)?;
        self.fabric.tick();
        Ok(())
    }

    fn carry_out(&mut self, step: &Step) -> Result<(), Breach> {
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
                node,
                read_only,
            } => self.attach(*claim, *which, *node, *read_only),
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
                self.fabric.lose_pool(path);
            }
            Step::PoolSize { pool, mib } => self.set_pool_size(POOLS[*pool % POOLS.len()], *mib),
            Step::Overcommit { pool, percent } => {
                let place = Place::named(Object::Pool, POOLS[*pool % POOLS.len()]);
                let body = json!({ "spec": { "overcommitPercent": percent } });
                self.store.apply(&Write::Patch(place, body));
            }
            Step::Break { rung } => self.fabric.break_rung(*rung),
            Step::Deliver { seat, kind, count } => {
                for _ in 0..*count {
                    self.deliver(*seat, *kind);
                }
            }
            Step::Plan { volume } => self.plan_one(*volume)?,
            Step::Write { volume, lost } => self.write_one(*volume, *lost),
            Step::Look { node, volume } => self.look_one(*node, *volume),
            Step::Work { node, volume } => self.work_one(*node, *volume),
            Step::Restart => self.restart_planner(),
            Step::RestartNode { node } => self.restart_agent(*node),
            Step::Die { node } => self.die(*node),
            Step::Start { node } => self.start(*node),
            Step::Freeze { node } => self.freeze(*node),
            Step::Wake { node } => self.wake(*node),
            Step::Cut { node, data } => self.cut(*node, *data),
            Step::Heal { node } => self.heal(*node),
            Step::Wait { seconds } => self.pass_time(Duration::from_secs(u64::from(*seconds))),
            Step::ChangeLeader => self.change_leader(),
            Step::WriteLate { volume } => self.write_late(*volume),
            Step::CatchUp => self.round()?,
        }
        Ok(())
    }

    fn create(&mut self, claim: usize, class: usize, mib: u64, block: bool) {
        let place = claim_place(claim);
        let body = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": { "finalizers": ["kubernetes.io/pvc-protection"] },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": super::CLASSES[class % super::CLASSES.len()],
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

    /// Somebody wants to use a claim: a block volume as a device, and any other at a path.
    fn attach(&mut self, claim: usize, which: usize, node: usize, read_only: bool) {
        let place = attachment_place(claim, which);
        let stored = self.store.get(&claim_place(claim));
        let is_block = stored.is_some_and(|claim| claim["spec"]["volumeMode"] == "Block");
        let path = json!({ "path": format!("/mnt/{}", place.name), "readOnly": read_only });
        let body = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
            "metadata": {},
            "spec": {
                "claimName": format!("c{claim}"), "node": node_name(node % self.cluster.nodes),
                "consumer": if is_block { json!({ "device": path }) } else { json!({ "mount": path }) },
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
        let now = self.now();
        let capacity = json!({ "total": size, "free": size, "allocated": "0", "observedAt": now });
        let ready = json!([{
            "type": "Ready", "status": "True", "reason": "Measured", "message": "",
            "lastTransitionTime": "2024-01-01T00:00:00Z",
        }]);
        let body = json!({ "status": { "capacity": capacity, "conditions": ready } });
        let place = Place::named(Object::Pool, pool);
        self.store.apply(&Write::PatchStatus(place, body));
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

    /// Tells everybody who can be told everything.
    pub fn deliver_all(&mut self) {
        let seats = self.planners.len() + self.agents.len();
        for seat in 0..seats {
            for kind in 0..KIND_COUNT {
                while self.deliver(seat, kind) {}
            }
        }
    }

    /// Lets everything come to rest, and returns how many rounds that took.
    pub fn settle(&mut self, rounds_max: usize) -> Result<usize, Breach> {
        for round in 0..rounds_max {
            let before = self.store.version();
            self.round()?;
            self.fabric.tick();
            if self.store.version() == before {
                return Ok(round);
            }
        }
        let what = format!("still writing after {rounds_max} rounds");
        Err(Breach::of(Law::ComesToRest, what))
    }

    fn round(&mut self) -> Result<(), Breach> {
        self.pass_time(ROUND_TAKES);
        self.finish_begun();
        self.deliver_all();
        for key in self.leading().keys() {
            self.plan(&key)?;
            self.write(&key, 0);
            self.deliver_all();
            for node in 0..self.agents.len() {
                self.look(node, &key);
                self.work(node, &key);
            }
            self.deliver_all();
        }
        for node in 0..self.agents.len() {
            self.work_leftovers(node);
        }
        self.deliver_all();
        Ok(())
    }

    /// Whatever has looked does what it saw.
    fn finish_begun(&mut self) {
        self.write_all_late();
        for key in self.leading().plans.keys().cloned().collect::<Vec<_>>() {
            self.write(&key, 0);
        }
        for node in 0..self.agents.len() {
            for key in self.agents[node].looks.keys().cloned().collect::<Vec<_>>() {
                self.work(node, &key);
            }
        }
    }
}

fn pool_path(pool: &str) -> String {
    format!("/{pool}")
}

pub fn claim_place(claim: usize) -> Place {
    Place::within(Object::Claim, NAMESPACE, format!("c{claim}"))
}

pub fn attachment_place(claim: usize, which: usize) -> Place {
    Place::within(Object::Attachment, NAMESPACE, format!("a{claim}-{which}"))
}

pub(super) fn nth<'a>(
    names: impl ExactSizeIterator<Item = &'a String>,
    index: usize,
) -> Option<String> {
    let count = names.len();
    let mut names = names;
    names.nth(index.checked_rem(count)?).cloned()
}

/// An object of the store in its own type.
pub fn read<K: DeserializeOwned>(stored: &Value) -> K {
    K::deserialize(stored).expect("what is stored is of its kind")
}
