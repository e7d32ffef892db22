//! What goes wrong, and what people ask for in the middle of it.

use trellis_engine::coordinator::Event;
use trellis_engine::member;
use trellis_engine::proto::{Answer, Body, Config, Envelope, Meta, Promise, Request};
use uuid::Uuid;

use crate::Failure;
use crate::disk::Damage;
use crate::world::{GEOMETRY, Happening, VOLUME, World, node_id};

/// Sessions above this belong to strangers: coordinators of another volume.
const STRANGERS: u64 = 1 << 40;

/// The most machines in a world.
const NODES_MAX: usize = 7;

impl World {
    pub(crate) fn fault(&mut self) {
        if !self.faulty {
            return;
        }
        let delay = self.rng.between(self.fault_us / 20, self.fault_us);
        self.later(delay, Happening::Fault);
        let node = self.rng.index(self.nodes.len());
        match self.rng.below(100) {
            0..12 => self.crash(node, false),
            12..26 => self.crash(node, true),
            26..29 => {
                for node in 0..self.nodes.len() {
                    self.crash(node, true);
                }
            }
            29..37 => {
                let index = self.current;
                self.cut(index, node);
            }
            37..43 => self.uncut(),
            43..49 => {
                let index = self.current;
                if self.chiefs[index].alive {
                    self.kill_chief(index);
                    let generation = self.generation_last + 1;
                    let delay = self.rng.between(10_000, 400_000);
                    self.later(delay, Happening::TakeOver { generation });
                }
            }
            // The old one lives on and does not know.
            49..55 => self.take_over(),
            55..60 => {
                let longest = self.rng.between(100_000, 900_000);
                self.nodes[node].slow_until = self.now + longest;
                self.trace(|| format!("node {node} has a slow disk"));
            }
            60..64 => {
                let full = !self.nodes[node].disk.full;
                self.nodes[node].disk.full = full;
                // It may be noticed before a write fails, or not.
                if self.rng.chance(500) {
                    self.tell_member(node, member::Event::Space { is_low: full });
                }
                self.trace(|| format!("node {node} is full: {full}"));
            }
            64..66 => self.rot(node),
            66..67 => self.flip(node),
            67..68 => self.lose_memory(node),
            68..82 => self.grow(),
            82..83 => self.tell_chief(self.current, Event::Scrub),
            83..89 => self.reconfigure(),
            89..93 => {
                self.net.bad_per_mille = [0, 0, 2, 20][self.rng.index(4)];
                self.net.delay_us = [0, 0, 5_000, 60_000][self.rng.index(4)];
            }
            93..96 => {
                let size = self.size_served + self.rng.below(160);
                let slot = &mut self.nodes[node].disk;
                slot.space = if slot.space == u64::MAX {
                    size
                } else {
                    u64::MAX
                };
            }
            96..99 => self.stranger(node),
            _ => self.recover(),
        }
    }

    /// Everything is in sync: bits of some blocks flip, on one disk each. Says how many.
    pub(crate) fn flip_some(&mut self) -> u64 {
        let before = self.stats.flips;
        let members = self.chiefs[self.current]
            .coordinator
            .status()
            .view
            .members();
        let nodes: Vec<usize> = (0..self.nodes.len())
            .filter(|node| members.contains(&self.nodes[*node].id))
            .collect();
        if nodes.len() > 1 {
            for _ in 0..8 {
                let node = nodes[self.rng.index(nodes.len())];
                self.flip(node);
            }
        }
        self.stats.flips - before
    }

    /// A replica dies, and comes back after a while.
    fn crash(&mut self, node: usize, power: bool) {
        self.kill_node(node, power);
        let delay = self.rng.between(5_000, self.fault_us + 5_000);
        self.later(delay, Happening::Start { node });
    }

    /// A replica dies, and its meta data are lost before it comes back.
    fn lose_memory(&mut self, node: usize) {
        let power = self.rng.chance(300);
        self.crash(node, power);
        let damage = if self.rng.chance(500) {
            Damage::Gone
        } else {
            Damage::Old
        };
        if self.nodes[node].disk.damage(damage, &mut self.rng) {
            self.stats.memories_lost += 1;
            self.forgets_what_it_held(node);
            self.trace(|| format!("node {node} loses its memory: {damage:?}"));
        }
    }

    fn rot(&mut self, node: usize) {
        let blocks = self.size_served / u64::from(GEOMETRY.block_bytes);
        let block = self.rng.below(blocks);
        self.nodes[node].disk.rot.insert(block);
        self.trace(|| format!("block {block} of node {node} rots"));
    }

    /// Bits flip on a disk, without a word. Nobody must ever see them.
    fn flip(&mut self, node: usize) {
        let blocks = self.size_served / u64::from(GEOMETRY.block_bytes);
        let block = self.rng.below(blocks);
        let elsewhere = |it: &crate::world::Node| it.disk.flipped.contains_key(&block);
        if self.nodes.iter().any(elsewhere) {
            return;
        }
        if self.nodes[node].disk.flip(block, &mut self.rng) {
            self.stats.flips += 1;
            self.trace(|| format!("bits of block {block} of node {node} flip"));
        }
    }

    fn grow(&mut self) {
        let block = u64::from(GEOMETRY.block_bytes);
        let to = self.size_served + block * self.rng.below(10);
        // A volume without an end would make long histories slow.
        if to <= block * 120 {
            self.trace(|| format!("growth to {to} is asked for"));
            self.tell_chief(self.current, Event::Grow { to });
        }
    }

    /// Somebody wants another replica, one less, another one instead, or another consistency factor.
    fn reconfigure(&mut self) {
        let Some(view) = self.views.last() else {
            return;
        };
        let mut members = view.current.members.clone();
        let has_candidate = self.nodes.len() < NODES_MAX
            || self.nodes.iter().any(|node| !members.contains(&node.id));
        let add = self.rng.chance(600) && has_candidate && members.len() < 5;
        if add {
            let spare = (0..self.nodes.len()).find(|node| !members.contains(&node_id(*node)));
            let node = match spare {
                Some(node) if self.rng.chance(500) || self.nodes.len() >= NODES_MAX => node,
                _ => {
                    let mut meta = Meta::fresh(GEOMETRY, self.size_served, view.clone());
                    // It knows nothing that anybody else does not know.
                    meta.view.version = 0;
                    let node = self.add_node(meta);
                    for index in 0..self.chiefs.len() {
                        self.later(1_000, Happening::Connect { index, node });
                    }
                    node
                }
            };
            members.insert(node_id(node));
        }
        if members.len() > 1 && (!add || self.rng.chance(500)) {
            let index = self.rng.index(members.len());
            if let Some(gone) = members.iter().nth(index).copied() {
                members.remove(&gone);
            }
        }
        let mut config = Config::majority(members);
        if self.rng.chance(100) {
            config.consistency = 1 + self.rng.index(config.members.len());
        }
        self.trace(|| format!("the replicas should be {config:?}"));
        self.tell_chief(self.current, Event::Reconfigure { config });
    }

    /// A coordinator of another volume, or for another replica, has reached this one by mistake.
    fn stranger(&mut self, node: usize) {
        let session = STRANGERS + self.rng.below(1 << 20);
        let other_volume = self.rng.chance(500);
        let envelope = Envelope {
            volume: if other_volume {
                Uuid::from_u128(5)
            } else {
                VOLUME
            },
            replica: if other_volume {
                self.nodes[node].id
            } else {
                Uuid::from_u128(6)
            },
            promise: Promise {
                generation: 1 << 30,
                owner: 1,
            },
            size_version: 1,
            index: 0,
            body: Body::Request(Request::Hello),
        };
        let event = member::Event::Received { session, envelope };
        self.tell_member(node, event);
    }

    pub(crate) fn stranger_was_answered(&mut self, session: u64, envelope: &Envelope) {
        if session >= STRANGERS && matches!(envelope.body, Body::Answer(Answer::Welcome(_))) {
            self.fail(Failure::ObeyedStranger);
        }
    }

    /// Everything that can be mended is mended.
    pub(crate) fn heal(&mut self) {
        self.trace(|| "everything heals".to_owned());
        self.faulty = false;
        self.uncut();
        self.reset_all();
        self.net.bad_per_mille = 0;
        self.net.delay_us = 0;
        for node in 0..self.nodes.len() {
            let disk = &mut self.nodes[node].disk;
            disk.full = false;
            disk.space = u64::MAX;
            disk.lies = false;
            disk.heal();
            self.nodes[node].slow_until = 0;
            self.start_node(node);
            self.tell_member(node, member::Event::Space { is_low: false });
        }
        self.recover_if_needed();
        if !self.chiefs[self.newest].alive {
            self.take_over();
        }
    }
}
