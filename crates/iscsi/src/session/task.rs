//! The open commands of a session, and what they hold.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::limits::{DATA_IN_BYTES_MAX, DATA_OUT_BYTES_MAX, TRANSFER_BYTES_MAX};
use crate::lun::Chunks;
use crate::scsi::Sense;
use crate::scsi::cdb::Command;
use crate::unit::Unit;

use super::transfer::Transfer;

/// How far a command is.
#[derive(Debug)]
pub enum Stage {
    /// Its data is coming.
    Collecting(Box<Transfer>),
    /// It waits for its turn.
    Ready(Chunks),
    /// The volume is at work.
    Running,
}

/// An open command.
#[derive(Debug)]
pub struct Task {
    /// The order in which commands came.
    pub order: u64,
    /// The number of the logical unit, and the unit if there is one.
    pub number: u16,
    /// The logical unit.
    pub unit: Option<Arc<Unit>>,
    /// What it asks for.
    pub command: Result<Command, Sense>,
    /// Whether it takes a place in the command window.
    pub numbered: bool,
    /// Whether it must wait for all before it and be waited for by all after it.
    pub ordered: bool,
    /// The room that the initiator has for data.
    pub read_room: u32,
    /// The data that the initiator announced.
    pub write_announced: u32,
    /// The data that the command wants.
    pub write_wanted: u64,
    /// R2Ts that were sent.
    pub r2ts: u32,
    /// Write data that it has a claim on.
    pub held_out: u64,
    /// Read data that it may come to hold.
    pub held_in: u64,
    /// How far it is.
    pub stage: Stage,
    /// No status is to be sent any more.
    pub aborted: bool,
}

impl Task {
    /// The data that it may answer with.
    fn data_in_bytes(&self) -> u64 {
        let block = self
            .unit
            .as_ref()
            .map_or(0, |unit| u64::from(unit.block_size()));
        match &self.command {
            Ok(Command::Read { range }) => range
                .count
                .saturating_mul(block)
                .min(u64::from(TRANSFER_BYTES_MAX)),
            _ => 0,
        }
    }
}

/// The open commands of one session.
#[derive(Debug, Default)]
pub struct Tasks {
    open: HashMap<u32, Task>,
    ready: VecDeque<u32>,
    /// Writes that wait until there is room for their data.
    waiting: VecDeque<u32>,
    /// Open ordered commands by the order in which they came.
    ordered: BTreeMap<u64, u32>,
    held_out: u64,
    held_in: u64,
    next_order: u64,
    immediate: usize,
}

impl Tasks {
    /// Whether a tag is in use.
    pub fn contains(&self, itt: u32) -> bool {
        self.open.contains_key(&itt)
    }

    /// Immediate commands that are open.
    pub fn immediate(&self) -> usize {
        self.immediate
    }

    /// An open command.
    pub fn get_mut(&mut self, itt: u32) -> Option<&mut Task> {
        self.open.get_mut(&itt)
    }

    /// The place of the next command in the order.
    pub fn next_order(&mut self) -> u64 {
        self.next_order += 1;
        self.next_order
    }

    /// A command has come.
    pub fn insert(&mut self, itt: u32, task: Task) {
        if task.ordered {
            self.ordered.insert(task.order, itt);
        }
        if !task.numbered {
            self.immediate += 1;
        }
        self.open.insert(itt, task);
    }

    /// A command is over.
    pub fn remove(&mut self, itt: u32) -> Option<Task> {
        let task = self.open.remove(&itt)?;
        self.held_out -= task.held_out;
        self.held_in -= task.held_in;
        if task.ordered {
            self.ordered.remove(&task.order);
        }
        if !task.numbered {
            self.immediate -= 1;
        }
        match task.stage {
            Stage::Collecting(_) => self.waiting.retain(|each| *each != itt),
            Stage::Ready(_) => self.ready.retain(|each| *each != itt),
            Stage::Running => {}
        }
        Some(task)
    }

    /// All data of a command has come.
    pub fn make_ready(&mut self, itt: u32, head_of_queue: bool) {
        if let Some(task) = self.open.get_mut(&itt)
            && let Stage::Collecting(_) = task.stage
            && let Stage::Collecting(transfer) = std::mem::replace(&mut task.stage, Stage::Running)
        {
            task.r2ts = transfer.bursts_made();
            task.stage = Stage::Ready(transfer.into_data());
            if head_of_queue {
                self.ready.push_front(itt);
            } else {
                self.ready.push_back(itt);
            }
        }
    }

    /// A command's remaining data has to be asked for; it queues for room.
    pub fn wait_for_room(&mut self, itt: u32) {
        self.waiting.push_back(itt);
    }

    /// The next command that has been given room for all of its data. First come, first served: a command never holds
    /// a part of the room while it waits for the rest.
    pub fn give_room(&mut self) -> Option<u32> {
        let itt = *self.waiting.front()?;
        let task = self.open.get_mut(&itt)?;
        let Stage::Collecting(transfer) = &task.stage else {
            return None;
        };
        let need = u64::from(transfer.unasked());
        if self.held_out > 0 && self.held_out + need > DATA_OUT_BYTES_MAX {
            return None;
        }
        task.held_out = need;
        self.held_out += need;
        self.waiting.pop_front();
        Some(itt)
    }

    /// The next command that may run, with its data. `unsent` is what waits to be written to the peer.
    pub fn next_to_run(&mut self, unsent: u64) -> Option<(u32, Chunks)> {
        let at = if self.ordered.is_empty() {
            if self.ready.is_empty() {
                return None;
            }
            0
        } else {
            self.ready.iter().position(|itt| self.in_order(*itt))?
        };
        let itt = self.ready[at];
        let task = self.open.get_mut(&itt)?;
        let need = task.data_in_bytes();
        let held = self.held_in + unsent;
        if need > 0 && held > 0 && held + need > DATA_IN_BYTES_MAX {
            return None;
        }
        self.ready.remove(at);
        task.held_in = need;
        self.held_in += need;
        match std::mem::replace(&mut task.stage, Stage::Running) {
            Stage::Ready(data) => Some((itt, data)),
            // Only ready commands are in the queue.
            Stage::Collecting(_) | Stage::Running => Some((itt, Vec::new())),
        }
    }

    /// Whether no ordered command is in the way; an ordered one must have nothing before it.
    fn in_order(&self, itt: u32) -> bool {
        let Some(task) = self.open.get(&itt) else {
            return false;
        };
        let barrier = self.ordered.range(..task.order).next().is_some();
        let first = !task.ordered || self.open.values().all(|other| other.order >= task.order);
        !barrier && first
    }

    /// The tags of the commands for which something holds.
    pub fn tags(&self, which: impl Fn(&Task) -> bool) -> Vec<u32> {
        self.open
            .iter()
            .filter(|(_, task)| which(task))
            .map(|(itt, _)| *itt)
            .collect()
    }
}
