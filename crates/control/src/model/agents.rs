//! The agents of the nodes, each with the caches that its role has, and what can happen to a node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node as NodeObject, NodeCondition, NodeStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};

use super::fabric::Fabric;
use super::machine::Model;
use super::planners::{known_keys, new_world, take_next};
use super::simulation::{Simulation, node_name, nth};
use super::store::{KIND_COUNT, Store};
use crate::claim::finish::claim_write;
use crate::node::LOST_AFTER;
use crate::node::job::{Job, Node, job};
use crate::node::machine::{Consumers, Copies, Machine};
use crate::node::reconcile::missing_finalizers;
use crate::node::report::{early_writes, replica_writes, use_writes};
use crate::node::work::work;
use crate::stored::StoredClaim;
use crate::volume::nodes::{READY, UNKNOWN};
use crate::world::{Sees, World};
use crate::write::Write;

/// The agent of one node.
pub struct AgentRole {
    name: String,
    machine: Arc<Model>,
    /// Its own caches and their watch. The agent of the embedded home shares those of the planner.
    own: Option<(usize, World)>,
    pub(super) looks: BTreeMap<String, StoredClaim>,
    is_down: bool,
    is_frozen: bool,
    /// Nothing that it sends to the API arrives, and it is told nothing.
    is_cut: bool,
    /// It has not had its first listing. Nothing is decided before.
    is_blind: bool,
    /// When its lease was renewed last.
    heard: MicroTime,
    is_lost: bool,
}

impl AgentRole {
    pub(super) fn new(store: &mut Store, fabric: &Arc<Fabric>, node: usize, is_home: bool) -> Self {
        let name = node_name(node);
        let sees = || Sees::Node(name.clone());
        let own = (!is_home).then(|| (store.watch(sees()), new_world()));
        let agent = AgentRole {
            machine: Arc::new(Model {
                fabric: fabric.clone(),
                at: node,
            }),
            own,
            looks: BTreeMap::new(),
            is_down: false,
            is_frozen: false,
            is_cut: false,
            is_blind: false,
            heard: store.now.clone(),
            is_lost: false,
            name,
        };
        agent.tell(store);
        agent
    }

    /// Whether it does anything.
    fn runs(&self) -> bool {
        !self.is_down && !self.is_frozen && !self.is_blind
    }

    /// What was only in memory is lost; the caches begin with a full listing as soon as the API can be reached.
    fn begin_again(&mut self, store: &mut Store) {
        self.looks.clear();
        self.is_blind = true;
        self.list(store);
    }

    fn list(&mut self, store: &mut Store) {
        let can_list = self.is_blind && !self.is_cut && !self.is_down && !self.is_frozen;
        let own = self.own.as_mut().filter(|_| can_list);
        if let Some((watch, world)) = own {
            *world = new_world();
            store.list_again(*watch);
            for kind in 0..KIND_COUNT {
                while take_next(world, store, *watch, kind) {}
            }
            self.is_blind = false;
        }
    }

    /// Stores whether the node is there, as `health` does it.
    fn tell(&self, store: &mut Store) {
        let mut node = NodeObject::default();
        node.metadata.name = Some(self.name.clone());
        node.status = Some(NodeStatus {
            conditions: Some(vec![NodeCondition {
                type_: READY.to_owned(),
                status: if self.is_lost { UNKNOWN } else { "True" }.to_owned(),
                last_transition_time: Some(Time(store.now.0)),
                ..NodeCondition::default()
            }]),
            ..NodeStatus::default()
        });
        store.put_node(&node);
    }
}

impl Simulation {
    /// Whether a node is that of the embedded home.
    pub(super) fn is_home(&self, node: usize) -> bool {
        self.agents[node].own.is_none()
    }

    fn world_of(&self, node: usize) -> &World {
        let own = self.agents[node].own.as_ref();
        own.map_or(&self.leading().world, |(_, world)| world)
    }

    /// Time passes: nodes renew their leases, and those that do not are lost.
    pub(super) fn pass_time(&mut self, time: Duration) {
        self.store.now.0 += time;
        let now = self.now();
        for agent in &mut self.agents {
            if agent.runs() && !agent.is_cut {
                agent.heard = now.clone();
            }
            let silent = now.0.duration_since(agent.heard.0);
            let is_lost = Duration::try_from(silent).unwrap_or_default() >= LOST_AFTER;
            if is_lost != agent.is_lost {
                agent.is_lost = is_lost;
                agent.tell(&mut self.store);
            }
        }
    }

    pub(super) fn deliver_to_agent(&mut self, node: usize, kind: usize) -> bool {
        let agent = &self.agents[node];
        match &agent.own {
            Some((watch, world)) if agent.runs() && !agent.is_cut => {
                take_next(world, &mut self.store, *watch, kind)
            }
            _ => false,
        }
    }

    pub(super) fn look_one(&mut self, node: usize, volume: usize) {
        let node = node % self.agents.len();
        if let Some(key) = nth(known_keys(self.world_of(node)).iter(), volume) {
            self.look(node, &key);
        }
    }

    pub(super) fn work_one(&mut self, node: usize, volume: usize) {
        let node = node % self.agents.len();
        if let Some(key) = nth(self.agents[node].looks.keys(), volume) {
            self.work(node, &key);
        }
    }

    pub(super) fn look(&mut self, node: usize, key: &str) {
        if self.agents[node].runs() && !self.agents[node].looks.contains_key(key) {
            let view = StoredClaim::gather(self.world_of(node), key);
            self.agents[node].looks.insert(key.to_owned(), view);
        }
    }

    /// A pass over each volume that the node knows of or has something of, beyond those that the planner knows.
    pub(super) fn work_leftovers(&mut self, node: usize) {
        let mut keys = known_keys(self.world_of(node));
        let state = self.fabric.state();
        keys.extend(state.hosts[node].targets.keys().cloned());
        drop(state);
        let known = self.leading().keys();
        keys.retain(|key| !known.contains(key));
        for key in keys {
            self.look(node, &key);
            self.work(node, &key);
        }
    }

    /// One pass of the agent, as its reconciler does it, with early reports of the lower rungs.
    pub(super) fn work(&mut self, node: usize, key: &str) {
        if !self.agents[node].runs() {
            return;
        }
        let Some(view) = self.agents[node].looks.remove(key) else {
            return;
        };
        let machine = self.agents[node].machine.clone();
        let this = Node {
            name: self.agents[node].name.clone(),
            boot_id: machine.boot_id(),
            online_growth: true,
        };
        let stored = &view.stored;
        let world = self.world_of(node);
        let job: Job = job(stored, &this, &|name| world.pools.get("", name));
        if !job.has_work() && !machine.has_target(key) {
            return;
        }
        if let Some(writes) = missing_finalizers(&job) {
            self.report(node, &writes);
            return;
        }
        let ladders = std::cell::RefCell::new(Vec::new());
        let early = |ladder: &[_]| ladders.borrow_mut().push(ladder.to_vec());
        let outcome = work(&Machine::of(machine), &job, &early);
        let at = self.now();
        let mut writes = Vec::new();
        for ladder in ladders.into_inner() {
            writes.extend(early_writes(stored, &job, &ladder, &at));
        }
        if self.is_home(node) {
            let claim = view.claim.as_ref();
            let finished = claim.and_then(|it| claim_write(it, stored, &job, &outcome, &at));
            writes.extend(finished.map(|(write, _)| write));
        }
        writes.extend(use_writes(stored, &job, &outcome, &this.boot_id, &at));
        writes.extend(replica_writes(stored, &job, &outcome, &at));
        self.report(node, &writes);
    }

    /// What a node writes arrives if the node is not cut off. Of nodes other than the home, the API takes only what is
    /// theirs.
    fn report(&mut self, node: usize, writes: &[Write]) {
        if self.agents[node].is_cut {
            return;
        }
        let is_home = self.is_home(node);
        for write in writes {
            if is_home {
                self.store.apply(write);
            } else {
                self.store.apply_of_node(&self.agents[node].name, write);
            }
        }
    }
}

/// What can happen to a node. The home's own machine carries the API, so it comes back before anything else happens.
impl Simulation {
    pub(super) fn restart_agent(&mut self, node: usize) {
        let node = node % self.agents.len();
        if self.is_home(node) {
            self.restart_planner();
        } else if !self.agents[node].is_down && !self.agents[node].is_frozen {
            self.agents[node].begin_again(&mut self.store);
        }
    }

    pub(super) fn die(&mut self, node: usize) {
        let node = node % self.agents.len();
        self.fabric.die(node);
        self.agents[node].is_down = true;
        self.agents[node].is_frozen = false;
        if self.is_home(node) {
            self.start(node);
        }
    }

    pub(super) fn start(&mut self, node: usize) {
        let node = node % self.agents.len();
        if !self.agents[node].is_down {
            return;
        }
        self.fabric.start(node);
        self.agents[node].is_down = false;
        if self.is_home(node) {
            self.restart_planner();
        } else {
            self.agents[node].begin_again(&mut self.store);
        }
    }

    pub(super) fn freeze(&mut self, node: usize) {
        let node = node % self.agents.len();
        if !self.is_home(node) && !self.agents[node].is_down {
            self.agents[node].is_frozen = true;
            self.fabric.freeze(node, true);
        }
    }

    pub(super) fn wake(&mut self, node: usize) {
        let node = node % self.agents.len();
        self.agents[node].is_frozen = false;
        self.fabric.freeze(node, false);
        self.agents[node].list(&mut self.store);
    }

    pub(super) fn cut(&mut self, node: usize, data: bool) {
        let node = node % self.agents.len();
        if !self.is_home(node) {
            self.agents[node].is_cut = true;
            self.fabric.cut(node, data);
        }
    }

    pub(super) fn heal(&mut self, node: usize) {
        let node = node % self.agents.len();
        self.agents[node].is_cut = false;
        self.fabric.cut(node, false);
        self.agents[node].list(&mut self.store);
    }

    /// Every node is there, reaches the others, and goes on; every pool is there.
    pub fn heal_all(&mut self) {
        for node in 0..self.agents.len() {
            self.start(node);
            self.wake(node);
            self.heal(node);
        }
        self.fabric.lose_pool(None);
    }
}
