//! Connections. They keep their order while they last, but messages may be late, lost, repeated or overtaken.

use std::collections::{BTreeMap, BTreeSet};

use trellis_engine::coordinator;
use trellis_engine::member::{self, DiskResult};
use trellis_engine::proto::{Answer, Body, Content, Envelope};

use crate::world::{Happening, World};

/// So many of a thousand connections are between processes of one machine.
const NEAR_PER_MILLE: u64 = 600;

/// So many of a thousand connections are to replicas that compare blocks with their sums on demand.
const VERIFIES_PER_MILLE: u64 = 800;

/// So many of a thousand looks at such a replica's disk find what they look for in memory.
const PEEKS_PER_MILLE: u64 = 800;

#[derive(Debug)]
struct Connection {
    index: usize,
    node: usize,
    life: u64,
    open: bool,
    /// How often the node's disk had lost its cache when the connection was made. Both ends are on one
    /// machine, if there is such a number.
    near: Option<u64>,
    /// When the last message in each direction arrives.
    to_node_at: u64,
    to_chief_at: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Net {
    connections: BTreeMap<u64, Connection>,
    last: u64,
    /// Pairs of coordinator and node that cannot reach each other.
    pub(crate) cut: BTreeSet<(usize, usize)>,
    /// So many of a thousand messages are lost, repeated or overtaken.
    pub(crate) bad_per_mille: u64,
    /// The longest delay of a message.
    pub(crate) delay_us: u64,
}

impl World {
    pub(crate) fn connect(&mut self, index: usize, node: usize) {
        if !self.chiefs[index].alive {
            return;
        }
        let connected = self.net.connections.values().any(|connection| {
            connection.open && (connection.index, connection.node) == (index, node)
        });
        if connected {
            return;
        }
        if self.nodes[node].member.is_none() || self.net.cut.contains(&(index, node)) {
            let delay = self.rng.between(20_000, 100_000);
            return self.later(delay, Happening::Connect { index, node });
        }
        self.net.last += 1;
        let session = self.net.last;
        let near = self
            .rng
            .chance(NEAR_PER_MILLE)
            .then(|| self.nodes[node].disk.losses);
        self.net.connections.insert(
            session,
            Connection {
                index,
                node,
                life: self.nodes[node].life,
                open: true,
                near,
                to_node_at: 0,
                to_chief_at: 0,
            },
        );
        let replica = self.nodes[node].id;
        self.tell_chief(index, coordinator::Event::Opened { replica, session });
        // An older replica does not say what it knows.
        if self.rng.chance(VERIFIES_PER_MILLE) || !self.faulty {
            let event = coordinator::Event::Verifies { replica, session };
            self.tell_chief(index, event);
            let event = coordinator::Event::TakesCalls { replica, session };
            self.tell_chief(index, event);
        }
        if near.is_some() {
            let delay = self.rng.below(20_000);
            let event = coordinator::Event::Near { replica, session };
            self.later(delay, Happening::Coordinator { index, event });
        }
    }

    /// A coordinator looks at the disk of a replica on its machine, whether or not the replica's process still
    /// lives or has hung up on it. A machine that loses its memory takes the coordinator with it, and a disk
    /// that could not write what it was given may show anything to anybody: neither is looked at.
    pub(crate) fn peek(&mut self, session: u64, offset: u64, length: u64) -> Option<Content> {
        let is_in_memory = self.rng.chance(PEEKS_PER_MILLE);
        let connection = self.net.connections.get(&session)?;
        let disk = &self.nodes[connection.node].disk;
        if !is_in_memory || connection.near != Some(disk.losses) {
            return None;
        }
        match disk.read(offset, length) {
            DiskResult::Read(content) => Some(content),
            _ => None,
        }
    }

    fn delay(&mut self) -> u64 {
        let longest = self.net.delay_us.max(300);
        self.rng.between(20, longest)
    }

    /// A coordinator sends to a replica.
    pub(crate) fn request(&mut self, index: usize, session: u64, envelope: Envelope) {
        let Some(at) = self.arrival(session, true) else {
            return;
        };
        let Some(connection) = self.net.connections.get(&session) else {
            return;
        };
        let (node, life) = (connection.node, connection.life);
        if self.net.cut.contains(&(index, node)) {
            return;
        }
        for at in at {
            let event = member::Event::Received {
                session,
                envelope: envelope.clone(),
            };
            self.at(at, Happening::Member { node, life, event });
        }
    }

    /// A replica sends to a coordinator.
    pub(crate) fn answer(&mut self, node: usize, session: u64, envelope: Envelope) {
        if matches!(&envelope.body, Body::Answer(Answer::RepairDone { .. })) {
            self.stats.repairs += 1;
        }
        self.stranger_was_answered(session, &envelope);
        let Some(at) = self.arrival(session, false) else {
            return;
        };
        let Some(connection) = self.net.connections.get(&session) else {
            return;
        };
        let index = connection.index;
        if self.net.cut.contains(&(index, node)) {
            return;
        }
        let replica = self.nodes[node].id;
        for at in at {
            let event = coordinator::Event::Received {
                replica,
                session,
                envelope: envelope.clone(),
            };
            self.at(at, Happening::Coordinator { index, event });
        }
    }

    /// When a message arrives: never, once, or twice. Nothing if the connection is gone.
    fn arrival(&mut self, session: u64, to_node: bool) -> Option<Vec<u64>> {
        let delay = self.delay();
        let bad = self.rng.chance(self.net.bad_per_mille);
        let kind = self.rng.below(3);
        let (node, life) = {
            let connection = self.net.connections.get(&session).filter(|it| it.open)?;
            (connection.node, connection.life)
        };
        if self.nodes[node].life != life {
            return None;
        }
        let connection = self.net.connections.get_mut(&session)?;
        let last = if to_node {
            &mut connection.to_node_at
        } else {
            &mut connection.to_chief_at
        };
        let in_order = (self.now + delay).max(*last + 1);
        if bad && kind == 0 {
            return Some(Vec::new());
        }
        if bad && kind == 1 {
            return Some(vec![self.now + delay]);
        }
        *last = in_order;
        if bad {
            return Some(vec![in_order, in_order + delay]);
        }
        Some(vec![in_order])
    }

    pub(crate) fn close_from_chief(&mut self, session: u64) {
        self.close(session, true, false);
    }

    pub(crate) fn close_from_node(&mut self, session: u64) {
        self.close(session, false, true);
    }

    /// Ends a connection. Both sides learn of it, unless it was their own doing.
    fn close(&mut self, session: u64, by_chief: bool, by_node: bool) {
        let Some(connection) = self.net.connections.get_mut(&session) else {
            return;
        };
        if !connection.open {
            return;
        }
        connection.open = false;
        let (index, node, life) = (connection.index, connection.node, connection.life);
        let (to_node_at, to_chief_at) = (connection.to_node_at, connection.to_chief_at);
        let replica = self.nodes[node].id;
        if !by_node {
            let event = member::Event::Closed { session };
            let at = to_node_at.max(self.now) + self.rng.below(5_000);
            self.at(at, Happening::Member { node, life, event });
        }
        if !by_chief {
            let event = coordinator::Event::Closed { replica, session };
            let at = to_chief_at.max(self.now) + self.rng.below(5_000);
            self.at(at, Happening::Coordinator { index, event });
        }
        let delay = self.rng.between(5_000, 60_000);
        self.later(delay, Happening::Connect { index, node });
    }

    fn close_where(&mut self, which: impl Fn(usize, usize) -> bool) {
        let sessions: Vec<u64> = self
            .net
            .connections
            .iter()
            .filter(|(_, it)| it.open && which(it.index, it.node))
            .map(|(session, _)| *session)
            .collect();
        for session in sessions {
            self.close(session, false, false);
        }
        self.net
            .connections
            .retain(|_, it| it.open || it.near.is_some());
    }

    pub(crate) fn net_node_died(&mut self, node: usize) {
        self.close_where(|_, at| at == node);
    }

    pub(crate) fn net_chief_died(&mut self, index: usize) {
        self.close_where(|at, _| at == index);
    }

    /// Two machines cannot reach each other any more. They notice later.
    pub(crate) fn cut(&mut self, index: usize, node: usize) {
        self.trace(|| format!("cut between coordinator {index} and node {node}"));
        self.net.cut.insert((index, node));
    }

    /// All connections end, and are made anew.
    pub(crate) fn reset_all(&mut self) {
        self.close_where(|_, _| true);
    }

    pub(crate) fn uncut(&mut self) {
        self.trace(|| "cuts heal".to_owned());
        for (index, node) in std::mem::take(&mut self.net.cut) {
            // What was lost in between would never arrive: the connections are reset.
            self.close_where(|at, to| (at, to) == (index, node));
        }
    }
}
