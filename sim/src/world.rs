//! The world of a history: its clock, its queue of events, its machines.

use std::collections::BTreeMap;

use trellis_engine::coordinator::{self, Coordinator, Limits, Settings};
use trellis_engine::member::{self, Member};
use trellis_engine::proto::{Config, Geometry, Meta, Promise, View};
use uuid::Uuid;

use crate::client::Client;
use crate::disk::{Disk, Submitted};
use crate::net::Net;
use crate::oracle::Oracle;
use crate::recovery::Recovery;
use crate::rng::Rng;
use crate::{Failure, Found, Options, Stats};

pub(crate) const GEOMETRY: Geometry = Geometry {
    block_bytes: 16,
    region_bytes: 64,
};

/// The most events of one history. A history that needs more goes in circles.
const EVENTS_MAX: u64 = 400_000;

/// So many of a thousand events are taken together with others that come soon after.
const BATCHED_PER_MILLE: u64 = 250;

/// How soon.
const BATCH_US: u64 = 300;

pub(crate) const VOLUME: Uuid = Uuid::from_u128(0x7e11);

/// What can happen, and to whom.
#[derive(Debug)]
pub(crate) enum Happening {
    /// A message or the end of a connection reaches a replica.
    Member {
        node: usize,
        life: u64,
        event: member::Event,
    },
    /// A message or the end of a connection reaches a coordinator.
    Coordinator {
        index: usize,
        event: coordinator::Event,
    },
    /// A disk has finished something.
    Disk { node: usize, life: u64, token: u64 },
    /// A coordinator tries to reach a replica.
    Connect { index: usize, node: usize },
    /// Time passes for a coordinator.
    Tick { index: usize },
    /// A coordinator goes on after several events.
    Advance { index: usize },
    /// A replica goes on after several events.
    Pump { node: usize, life: u64 },
    /// Clients do something.
    Client,
    /// Something goes wrong.
    Fault,
    /// A replica's process starts.
    Start { node: usize },
    /// A coordinator starts, unless a later one has.
    TakeOver { generation: u64 },
}

/// A machine with a replica.
pub(crate) struct Node {
    pub(crate) id: Uuid,
    pub(crate) disk: Disk,
    pub(crate) member: Option<Member>,
    /// Counts the lives of its process.
    pub(crate) life: u64,
    pub(crate) under_way: BTreeMap<u64, Submitted>,
    /// When the last change of the meta data will be done: they are done in order.
    pub(crate) persist_at: u64,
    pub(crate) slow_until: u64,
    /// It was given up, and is not started again for now.
    pub(crate) away: bool,
}

/// A coordinator.
pub(crate) struct Chief {
    pub(crate) coordinator: Coordinator,
    pub(crate) alive: bool,
    pub(crate) generation: u64,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) options: Options,
    /// Microseconds.
    pub(crate) now: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    queued: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) chiefs: Vec<Chief>,
    /// The coordinator that clients use: the last one that began to serve.
    pub(crate) current: usize,
    /// The last one that was started.
    pub(crate) newest: usize,
    pub(crate) generation_last: u64,
    pub(crate) net: Net,
    pub(crate) client: Client,
    pub(crate) oracle: Oracle,
    pub(crate) views: Vec<View>,
    pub(crate) size_served: u64,
    /// A recovery from survivors, until it is served.
    pub(crate) recovery: Option<Recovery>,
    pub(crate) faulty: bool,
    /// The longest time between two faults.
    pub(crate) fault_us: u64,
    pub(crate) stats: Stats,
    pub(crate) failure: Option<Failure>,
}

fn limits() -> Limits {
    Limits {
        log_entries_max: 48,
        log_bytes_max: 4096,
        window_entries_max: 12,
        window_bytes_max: 1024,
        waiting_max: 64,
        straggler_ms: 250,
        lag_ms: 40,
        hedge_ms: 60,
        hang_ms: 800,
        call_ms: 100,
        silent_ms: 200,
        gather_ms: 60,
        growth_ms: 400,
        growth_retry_ms: 700,
        roll_ms: 300,
        repairs_per_replica_max: 3,
        repair_bytes_per_second: 64 * 200,
        scrub_bytes_per_second: 64 * 400,
        repair_retry_ms: 150,
        retake_ms: 300,
    }
}

impl World {
    pub(crate) fn new(seed: u64, options: Options) -> World {
        let mut rng = Rng::new(seed);
        let replicas = [1, 2, 3, 3, 3, 3, 4, 5][rng.index(8)];
        let ids: Vec<Uuid> = (0..replicas).map(node_id).collect();
        let mut config = Config::majority(ids.iter().copied().collect());
        if rng.chance(200) {
            config.consistency = 1 + rng.index(ids.len());
        }
        let view = View::first(config);
        let size = u64::from(GEOMETRY.block_bytes) * rng.between(9, 40);
        let fault_us = [60_000, 250_000, 700_000, 700_000][rng.index(4)];
        let liar = rng.chance(30).then(|| rng.index(ids.len()));
        let mut world = World {
            rng,
            options,
            now: 0,
            queue: BTreeMap::new(),
            queued: 0,
            nodes: Vec::new(),
            chiefs: Vec::new(),
            current: 0,
            newest: 0,
            generation_last: 0,
            net: Net::default(),
            client: Client::default(),
            oracle: Oracle::default(),
            views: vec![view.clone()],
            size_served: size,
            recovery: None,
            faulty: true,
            fault_us,
            stats: Stats::default(),
            failure: None,
        };
        for _ in 0..replicas {
            world.add_node(Meta::fresh(GEOMETRY, size, view.clone()));
        }
        if let Some(node) = liar {
            world.trace(|| format!("node {node} lies about syncs"));
            world.nodes[node].disk.lies = true;
        }
        world
    }

    /// Puts a machine with a new replica into the world, and starts it.
    pub(crate) fn add_node(&mut self, meta: Meta) -> usize {
        let node = self.nodes.len();
        self.nodes.push(Node {
            id: node_id(node),
            disk: Disk::new(GEOMETRY, meta),
            member: None,
            life: 0,
            under_way: BTreeMap::new(),
            persist_at: 0,
            slow_until: 0,
            away: false,
        });
        self.start_node(node);
        node
    }

    pub(crate) fn run(&mut self) -> Result<(), Found> {
        let trouble_ms = self.rng.between(4_000, 14_000);
        self.later(0, Happening::TakeOver { generation: 1 });
        self.later(1_000, Happening::Client);
        self.later(400_000, Happening::Fault);
        self.go_on_until(trouble_ms * 1_000, |_| false)?;
        self.heal();
        self.finale()
    }

    /// Works on events until the time has come or the world is as wanted. Says whether it is.
    pub(crate) fn go_on_until(
        &mut self,
        end: u64,
        wanted: impl Fn(&World) -> bool,
    ) -> Result<bool, Found> {
        loop {
            if let Some(failure) = self.failure.take() {
                return Err(self.found(failure));
            }
            if wanted(self) {
                return Ok(true);
            }
            let Some((&(at, _), _)) = self.queue.first_key_value() else {
                return Ok(false);
            };
            if at > end {
                self.now = end;
                return Ok(wanted(self));
            }
            let Some((_, happening)) = self.queue.pop_first() else {
                return Ok(false);
            };
            self.now = at;
            self.stats.events += 1;
            if self.stats.events > EVENTS_MAX {
                let waits_for = "an end of events".to_owned();
                return Err(self.found(Failure::Stuck { waits_for }));
            }
            self.happen(happening);
        }
    }

    pub(crate) fn found(&self, failure: Failure) -> Found {
        Found {
            failure,
            at_ms: self.now / 1_000,
        }
    }

    pub(crate) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    pub(crate) fn later(&mut self, delay: u64, happening: Happening) {
        self.at(self.now + delay, happening);
    }

    pub(crate) fn at(&mut self, time: u64, happening: Happening) {
        self.queued += 1;
        self.queue.insert((time, self.queued), happening);
    }

    pub(crate) fn trace(&self, what: impl FnOnce() -> String) {
        if self.options.trace {
            println!("{:>10} {}", self.now, what());
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Member { node, life, event } => {
                if self.nodes[node].life == life {
                    self.tell_member(node, event);
                }
            }
            Happening::Coordinator { index, event } => self.tell_chief(index, event),
            Happening::Disk { node, life, token } => self.disk_done(node, life, token),
            Happening::Connect { index, node } => self.connect(index, node),
            Happening::Tick { index } => {
                if self.chiefs[index].alive {
                    self.tell_chief(index, coordinator::Event::Tick);
                    self.later(50_000, Happening::Tick { index });
                }
            }
            Happening::Advance { index } => {
                let mut effects = Vec::new();
                if self.chiefs[index].alive {
                    self.chiefs[index].coordinator.advance(&mut effects);
                }
                for effect in effects {
                    self.chief_effect(index, effect);
                }
            }
            Happening::Pump { node, life } => {
                let mut effects = Vec::new();
                if self.nodes[node].life == life
                    && let Some(member) = &mut self.nodes[node].member
                {
                    member.pump(&mut effects);
                    member.speak(&mut effects);
                }
                for effect in effects {
                    self.member_effect(node, effect);
                }
            }
            Happening::Client => self.client_turn(),
            Happening::Fault => self.fault(),
            Happening::Start { node } => self.start_node(node),
            Happening::TakeOver { generation } => {
                if generation > self.generation_last {
                    self.take_over();
                }
            }
        }
    }

    /// Starts a coordinator with a generation of its own, which clients use once it serves. Until then
    /// they go on with the one that they have.
    pub(crate) fn take_over(&mut self) {
        let (view, takeover) = self.start_of_chief();
        self.generation_last += 1;
        let generation = self.generation_last;
        let promise = Promise {
            generation,
            owner: self.rng.draw(),
        };
        let settings = Settings {
            volume: VOLUME,
            geometry: GEOMETRY,
            promise,
            view,
            takeover,
            limits: limits(),
            flaws: self.options.flaws.coordinator,
        };
        let index = self.chiefs.len();
        self.trace(|| format!("coordinator {index} starts with generation {generation}"));
        self.chiefs.push(Chief {
            coordinator: Coordinator::new(settings),
            alive: true,
            generation,
        });
        self.newest = index;
        for node in 0..self.nodes.len() {
            let delay = self.rng.below(20_000);
            self.later(delay, Happening::Connect { index, node });
        }
        self.later(50_000, Happening::Tick { index });
    }

    /// A coordinator's process dies.
    pub(crate) fn kill_chief(&mut self, index: usize) {
        self.trace(|| format!("coordinator {index} dies"));
        self.chiefs[index].alive = false;
        self.net_chief_died(index);
    }

    pub(crate) fn start_node(&mut self, node: usize) {
        let flaws = self.options.flaws.member;
        let slot = &mut self.nodes[node];
        if slot.member.is_some() || slot.away {
            return;
        }
        slot.life += 1;
        let rotten = slot.disk.open(slot.id);
        let member = Member::open(
            VOLUME,
            slot.id,
            GEOMETRY,
            slot.disk.meta.clone(),
            slot.disk.note,
        );
        slot.member = Some(member.suspecting(rotten).with_flaws(flaws));
        self.trace(|| {
            let member = self.nodes[node].member.as_ref();
            format!("node {node} starts at {:?}", member.map(Member::applied))
        });
    }

    /// A replica's process dies, with or without its machine's memory.
    pub(crate) fn kill_node(&mut self, node: usize, power: bool) {
        let slot = &mut self.nodes[node];
        if slot.member.take().is_none() && !power {
            return;
        }
        slot.life += 1;
        slot.persist_at = 0;
        let under_way = std::mem::take(&mut slot.under_way).into_values().collect();
        if power {
            slot.disk.power_loss(under_way, &mut self.rng);
            let lost = std::mem::take(&mut slot.disk.lost_by_lies);
            for block in lost {
                self.oracle.taint(block);
            }
            self.oracle.power_lost();
            for (block, bytes) in std::mem::take(&mut self.nodes[node].disk.torn) {
                self.oracle.torn(block, crate::client::value_of(&bytes));
                self.stats.torn += 1;
                self.trace(|| format!("block {block} of node {node} is torn"));
            }
            self.stats.power_losses += 1;
        } else {
            slot.disk.process_death(under_way, &mut self.rng);
        }
        self.trace(|| format!("node {node} dies, power lost: {power}"));
        self.net_node_died(node);
    }

    pub(crate) fn tell_member(&mut self, node: usize, event: member::Event) {
        let mut effects = Vec::new();
        let in_a_batch = self.rng.chance(BATCHED_PER_MILLE);
        if in_a_batch {
            let life = self.nodes[node].life;
            let delay = self.rng.below(BATCH_US);
            self.later(delay, Happening::Pump { node, life });
        }
        if let Some(member) = &mut self.nodes[node].member {
            if in_a_batch {
                member.take(event, &mut effects);
            } else {
                member.apply(event, &mut effects);
            }
        }
        for effect in effects {
            self.member_effect(node, effect);
        }
    }

    fn member_effect(&mut self, node: usize, effect: member::Effect) {
        match effect {
            member::Effect::Send { session, envelope } => self.answer(node, session, envelope),
            member::Effect::Close { session } => self.close_from_node(session),
            member::Effect::Disk { token, op } => self.disk_op(node, token, op),
            member::Effect::Note { key } => self.nodes[node].disk.note = Some(key),
            member::Effect::Halt => {
                self.kill_node(node, false);
                let delay = self.rng.between(10_000, 200_000);
                self.later(delay, Happening::Start { node });
            }
        }
    }

    fn disk_op(&mut self, node: usize, token: u64, op: member::DiskOp) {
        let persists = matches!(op, member::DiskOp::Persist(_));
        let mut delay = match op {
            member::DiskOp::Sync { .. } => self.rng.between(200, 3_000),
            member::DiskOp::Persist(_) => self.rng.between(100, 1_000),
            _ => self.rng.between(10, 300),
        };
        let slot = &mut self.nodes[node];
        if self.now < slot.slow_until {
            delay *= 60;
        }
        let submitted = slot.disk.submit(op, &mut self.rng);
        slot.under_way.insert(token, submitted);
        let mut at = self.now + delay;
        if persists {
            at = at.max(slot.persist_at + 1);
            slot.persist_at = at;
        }
        let life = slot.life;
        self.at(at, Happening::Disk { node, life, token });
    }

    fn disk_done(&mut self, node: usize, life: u64, token: u64) {
        // A disk that lies about syncs does not admit that one failed either.
        let sync_fails = self.faulty && self.rng.chance(1) && !self.nodes[node].disk.lies;
        let slot = &mut self.nodes[node];
        if slot.life != life {
            return;
        }
        let Some(submitted) = slot.under_way.remove(&token) else {
            return;
        };
        if sync_fails && submitted.is_sync() {
            self.oracle.power_lost();
        }
        let result = slot.disk.complete(submitted, &mut self.rng, sync_fails);
        self.tell_member(node, member::Event::Disk { token, result });
    }

    pub(crate) fn tell_chief(&mut self, index: usize, event: coordinator::Event) {
        if !self.chiefs[index].alive {
            return;
        }
        let mut effects = Vec::new();
        let now_ms = self.now / 1_000;
        let in_a_batch = self.rng.chance(BATCHED_PER_MILLE);
        if in_a_batch {
            let delay = self.rng.below(BATCH_US);
            self.later(delay, Happening::Advance { index });
        }
        let coordinator = &mut self.chiefs[index].coordinator;
        if in_a_batch {
            coordinator.take(now_ms, event, &mut effects);
        } else {
            coordinator.apply(now_ms, event, &mut effects);
        }
        for effect in effects {
            self.chief_effect(index, effect);
        }
    }

    fn chief_effect(&mut self, index: usize, effect: coordinator::Effect) {
        use coordinator::Effect;
        let is_current = index == self.current;
        match effect {
            Effect::Send {
                session, envelope, ..
            } => self.request(index, session, envelope),
            Effect::Peek {
                session,
                tag,
                offset,
                length,
                ..
            } => {
                let content = self.peek(session, offset, length);
                self.stats.peeks += u64::from(content.is_some());
                let event = coordinator::Event::Peeked { tag, content };
                self.later(0, Happening::Coordinator { index, event });
            }
            Effect::Close { session, .. } => self.close_from_chief(session),
            Effect::Reply { id, result } if is_current => self.replied(id, result),
            Effect::Reply { id, result } => self.lost_client_replied(id, &result),
            Effect::Serving { size } if index >= self.current => {
                self.trace(|| format!("coordinator {index} serves {size}"));
                self.current = index;
                self.client.coordinator_lost();
                self.stats.takeovers += 1;
                self.oracle.sealed();
                self.recovered(index, size);
                self.check_size(index, size);
            }
            Effect::Resized { size } if is_current => {
                self.trace(|| format!("coordinator {index} is raised to {size}"));
                self.stats.growths += 1;
                self.check_size(index, size);
            }
            Effect::ViewChanged { view } => {
                self.check_full_copies(index, &view);
                let known = self.views.last().map_or(0, |view| view.version);
                if view.version > known {
                    self.trace(|| format!("view {} {:?}", view.version, view));
                    self.stats.view_changes += 1;
                    self.views.push(view);
                }
            }
            Effect::Deposed { .. } | Effect::Retake => {
                self.trace(|| format!("coordinator {index} ends: {effect:?}"));
                self.chiefs[index].alive = false;
                if index == self.newest {
                    let generation = self.generation_last + 1;
                    self.later(20_000, Happening::TakeOver { generation });
                }
            }
            _ => {}
        }
    }

    /// A size that is served never goes down, and CF replicas have it durably.
    fn check_size(&mut self, index: usize, size: u64) {
        if size < self.size_served {
            let from = self.size_served;
            self.fail(Failure::Shrunk { from, to: size });
        }
        self.size_served = size;
        let view = self.chiefs[index].coordinator.status().view;
        let has = |id: Uuid| {
            self.nodes
                .iter()
                .any(|node| node.id == id && node.disk.meta.size >= size)
        };
        if !view.write_quorum(has) {
            self.fail(Failure::RaisedEarly { size });
        }
    }

    /// A change of who the replicas are costs no full copy, unless fewer are wanted.
    fn check_full_copies(&mut self, index: usize, view: &View) {
        let Some(next) = &view.next else { return };
        let status = self.chiefs[index].coordinator.status();
        let is_full = |id: &&Uuid| {
            let replica = status.replicas.get(*id);
            replica.is_some_and(|it| it.state == coordinator::ReplicaState::InSync)
        };
        let before = view.current.members.iter().filter(is_full).count();
        let after = next.members.iter().filter(is_full).count();
        if after < before.min(next.members.len()) {
            self.fail(Failure::FullCopyLost { before, after });
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            virtual_ms: self.now / 1_000,
            compared: self.oracle.compared,
            ..self.stats
        }
    }
}

pub(crate) fn node_id(node: usize) -> Uuid {
    Uuid::from_u128(0x1000 + u128::try_from(node).unwrap_or(0))
}
