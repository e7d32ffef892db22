//! The model disk: which values each block may have, as far as clients have been told.
//!
//! - A read returns an acknowledged write until the next one is acknowledged.
//! - Before a flush has covered it, a write may be lost, but only if a replica has lost power since it was issued. Once
//!   a later value has been read, it stays lost.
//! - A write whose coordinator was superseded may or may not have happened. It can no longer happen once the successor
//!   serves.
//! - A read never shows a write that has not been acknowledged, except a part of one that has several parts or must be
//!   durable first. What it has shown stays.

use std::collections::{BTreeMap, BTreeSet};

/// A value of a block. Zero is what a block has before the first write and after zeros were written.
pub type Value = u64;

/// What a read has seen that it must not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The block.
    pub block: u64,
    /// What was read.
    pub read: Value,
    /// What would have been right.
    pub permitted: BTreeSet<Value>,
}

#[derive(Clone, Debug)]
struct Acked {
    value: Value,
    number: u64,
    /// It may be lost.
    excused: bool,
}

#[derive(Clone, Debug)]
struct Block {
    /// What is durable: one of these.
    firm: BTreeSet<Value>,
    /// What was acknowledged since, in order.
    tail: Vec<Acked>,
    /// A disk that lied about a flush has lost this block. Nothing can be said of it any more.
    tainted: bool,
}

impl Block {
    fn permitted_of(&self, tail: &[Acked]) -> BTreeSet<Value> {
        let mut values = BTreeSet::new();
        for acked in tail.iter().rev() {
            values.insert(acked.value);
            if !acked.excused {
                return values;
            }
        }
        values.extend(&self.firm);
        values
    }

    fn permitted(&self) -> BTreeSet<Value> {
        self.permitted_of(&self.tail)
    }

    /// What was read is what there is. What came later and was not read is lost.
    fn saw(&mut self, value: Value) {
        match self.tail.iter().rposition(|acked| acked.value == value) {
            Some(index) => self.tail.truncate(index + 1),
            None => {
                self.tail.clear();
                self.firm = BTreeSet::from([value]);
            }
        }
    }
}

#[derive(Clone, Debug)]
struct PendingWrite {
    blocks: std::ops::Range<u64>,
    /// The value of each block.
    zeros: bool,
    value: Value,
    excused: bool,
    /// A part of it may be seen before it is acknowledged.
    partial: bool,
}

#[derive(Clone, Debug)]
struct PendingRead {
    first: u64,
    /// What each block may be, and whether it was written meanwhile.
    allowed: Vec<(BTreeSet<Value>, bool)>,
}

/// Whether one of the values that survivors had is right. Zeros are not one write's own: those that a survivor had may
/// be from before all writes.
fn any_is_right(had: &BTreeSet<Value>, permitted: &BTreeSet<Value>) -> bool {
    had.iter()
        .any(|value| *value != 0 && permitted.contains(value))
}

/// The model disk.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    blocks: Vec<Block>,
    writes: BTreeMap<u64, PendingWrite>,
    reads: BTreeMap<u64, PendingRead>,
    flushes: BTreeMap<u64, u64>,
    acked_last: u64,
    /// How many values were compared.
    pub compared: u64,
}

impl Oracle {
    fn extend(&mut self, blocks: u64) {
        let wanted = usize::try_from(blocks).unwrap_or(0);
        let blank = Block {
            firm: BTreeSet::from([0]),
            tail: Vec::new(),
            tainted: false,
        };
        if self.blocks.len() < wanted {
            self.blocks.resize(wanted, blank);
        }
    }

    fn block(&mut self, block: u64) -> &mut Block {
        self.extend(block + 1);
        let index = usize::try_from(block).unwrap_or(0);
        &mut self.blocks[index]
    }

    /// A client writes a value to some blocks, or zeros. A write in several parts may be seen in part.
    pub fn write_issued(
        &mut self,
        io: u64,
        blocks: std::ops::Range<u64>,
        value: Value,
        partial: bool,
    ) {
        self.writes.insert(
            io,
            PendingWrite {
                blocks,
                zeros: value == 0,
                value,
                excused: false,
                partial,
            },
        );
    }

    /// The client was told that it is done.
    pub fn write_acked(&mut self, io: u64) {
        if let Some(write) = self.writes.remove(&io) {
            let excused = write.excused;
            self.happened(&write, excused);
        }
    }

    /// The client was told that it was not begun.
    pub fn write_refused(&mut self, io: u64) {
        self.writes.remove(&io);
    }

    fn happened(&mut self, write: &PendingWrite, excused: bool) {
        self.acked_last += 1;
        let number = self.acked_last;
        let value = if write.zeros { 0 } else { write.value };
        for block in write.blocks.clone() {
            self.block(block).tail.push(Acked {
                value,
                number,
                excused,
            });
            self.changed_under_reads(block, value);
        }
    }

    /// Reads that are under way may show the block as it was, or with this value.
    fn changed_under_reads(&mut self, block: u64, value: Value) {
        for read in self.reads.values_mut() {
            let index = block.checked_sub(read.first);
            let slot = index.and_then(|at| read.allowed.get_mut(usize::try_from(at).ok()?));
            if let Some(slot) = slot {
                slot.0.insert(value);
                slot.1 = true;
            }
        }
    }

    /// A new coordinator serves: what nobody was told about has happened by now, or never will.
    pub fn sealed(&mut self) {
        for (_, write) in std::mem::take(&mut self.writes) {
            self.happened(&write, true);
        }
        self.reads.clear();
        self.flushes.clear();
    }

    /// A client asks for blocks.
    pub fn read_issued(&mut self, io: u64, blocks: std::ops::Range<u64>) {
        let first = blocks.start;
        let allowed = blocks
            .map(|block| (self.block(block).permitted(), false))
            .collect();
        self.reads.insert(io, PendingRead { first, allowed });
    }

    /// The client has its values.
    pub fn read_done(&mut self, io: u64, values: &[Value]) -> Result<(), Violation> {
        let Some(read) = self.reads.remove(&io) else {
            return Ok(());
        };
        for ((block, (allowed, written)), value) in (read.first..).zip(read.allowed).zip(values) {
            self.compared += 1;
            // Zeros are not one write's own. Where the block may have had them when the read began, they
            // say nothing of a write of zeros that is under way.
            let ambiguous = *value == 0 && allowed.contains(value);
            let part = self.writes.values().find(|write| {
                let has = write.blocks.contains(&block) && write.value == *value;
                write.partial && has
            });
            if part.is_some() && ambiguous {
                // Nor do they say that the block has the zeros of before: nothing is known that was not.
                continue;
            }
            let part = part.map(|write| write.excused);
            if part.is_some() {
                // What was shown is kept by the flushes that are asked for from now on, not by those that
                // were asked for before.
                self.acked_last += 1;
            }
            let number = self.acked_last;
            let slot = self.block(block);
            if slot.tainted {
                continue;
            }
            if let Some(excused) = part {
                slot.tail.push(Acked {
                    value: *value,
                    number,
                    excused,
                });
                continue;
            }
            let now = slot.permitted();
            if now.contains(value) && !written {
                slot.saw(*value);
            } else if !allowed.contains(value) && !now.contains(value) {
                return Err(Violation {
                    block,
                    read: *value,
                    permitted: now,
                });
            }
        }
        Ok(())
    }

    /// The client was told that its read failed.
    pub fn read_failed(&mut self, io: u64) {
        self.reads.remove(&io);
    }

    /// A client asks for a flush.
    pub fn flush_issued(&mut self, io: u64) {
        self.flushes.insert(io, self.acked_last);
    }

    /// The flush is done: what was acknowledged before it was asked for cannot be lost.
    pub fn flush_done(&mut self, io: u64) {
        let Some(number) = self.flushes.remove(&io) else {
            return;
        };
        for block in &mut self.blocks {
            let covered = block.tail.partition_point(|acked| acked.number <= number);
            if covered > 0 {
                block.firm = block.permitted_of(&block.tail[..covered]);
                block.tail.drain(..covered);
            }
        }
    }

    /// A write with forced unit access is done: it is durable by itself. A power loss since it was
    /// issued excuses nothing.
    pub fn durable_write_acked(&mut self, io: u64) {
        let Some(write) = self.writes.remove(&io) else {
            return;
        };
        self.happened(&write, false);
        let number = self.acked_last;
        for block in write.blocks {
            let slot = self.block(block);
            if let Some(index) = slot.tail.iter().position(|acked| acked.number == number) {
                slot.firm = BTreeSet::from([slot.tail[index].value]);
                slot.tail.drain(..=index);
            }
        }
    }

    /// A replica has lost what was not durable on it.
    pub fn power_lost(&mut self) {
        for block in &mut self.blocks {
            for acked in &mut block.tail {
                acked.excused = true;
            }
        }
        for write in self.writes.values_mut() {
            write.excused = true;
        }
    }

    /// The volume goes on from survivors, and they have this value. It may be another than it must be only if none of
    /// the values that they had was right.
    pub fn recovered(
        &mut self,
        block: u64,
        now: Value,
        had: &BTreeSet<Value>,
    ) -> Result<(), Violation> {
        let slot = self.block(block);
        let permitted = slot.permitted();
        if slot.tainted || permitted.contains(&now) {
            slot.saw(now);
            return Ok(());
        }
        if any_is_right(had, &permitted) {
            return Err(Violation {
                block,
                read: now,
                permitted,
            });
        }
        self.given_up(block, [now].into());
        Ok(())
    }

    /// The volume goes on from survivors, and which of their values counts is not decided yet. If none of those that
    /// they held is right, it is any that they have.
    pub fn left_to(&mut self, block: u64, had: &BTreeSet<Value>, any: BTreeSet<Value>) {
        if !any_is_right(had, &self.block(block).permitted()) {
            self.given_up(block, any);
        }
    }

    /// The block has one of these values, and whatever it had before is lost.
    pub fn given_up(&mut self, block: u64, values: BTreeSet<Value>) {
        let slot = self.block(block);
        slot.tail.clear();
        slot.firm = values;
    }

    /// A power loss has torn a block of a replica. It may be seen only where a write was not yet kept by a flush.
    pub fn torn(&mut self, block: u64, value: Value) {
        let is_written = self.writes.values().any(|it| it.blocks.contains(&block));
        let number = self.acked_last;
        let slot = self.block(block);
        if slot.tail.is_empty() && !is_written {
            return;
        }
        // It is older than the last write: who has seen that on another replica may still be shown this one.
        let number = slot.tail.first().map_or(number, |acked| acked.number);
        let torn = Acked {
            value,
            number,
            excused: true,
        };
        slot.tail.insert(0, torn);
        self.changed_under_reads(block, value);
    }

    /// A disk that lied has lost this block.
    pub fn taint(&mut self, block: u64) {
        self.block(block).tainted = true;
    }

    /// Whether something can be said of that block.
    pub fn is_tainted(&self, block: u64) -> bool {
        usize::try_from(block)
            .ok()
            .and_then(|index| self.blocks.get(index))
            .is_some_and(|block| block.tainted)
    }
}
