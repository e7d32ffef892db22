//! The entries that a replica may still need: those that it has not answered, and those that it
//! missed during a short absence.

use std::collections::VecDeque;

use crate::proto::{Entry, EntryOp, Region};

/// An entry and what it costs to keep.
#[derive(Clone, Debug)]
pub(super) struct Logged {
    pub(super) entry: Entry,
    /// The region that it writes, if it writes.
    pub(super) region: Option<Region>,
    pub(super) bytes: u64,
    /// The bytes of all entries up to this one.
    bytes_so_far: u64,
}

#[derive(Debug, Default)]
pub(super) struct Log {
    entries: VecDeque<Logged>,
    bytes: u64,
    /// The bytes of all entries that there ever were.
    bytes_ever: u64,
}

impl Log {
    pub(super) fn push(&mut self, entry: Entry, region: Option<Region>) {
        let bytes = match &entry.op {
            EntryOp::Write { data, .. } => u64::try_from(data.len()).unwrap_or(u64::MAX),
            _ => 0,
        };
        self.bytes += bytes;
        self.bytes_ever += bytes;
        self.entries.push_back(Logged {
            entry,
            region,
            bytes,
            bytes_so_far: self.bytes_ever,
        });
    }

    pub(super) fn pop(&mut self) {
        if let Some(logged) = self.entries.pop_front() {
            self.bytes -= logged.bytes;
        }
    }

    pub(super) fn first_seq(&self) -> Option<u64> {
        self.entries.front().map(|logged| logged.entry.key.seq)
    }

    pub(super) fn get(&self, seq: u64) -> Option<&Logged> {
        let index = seq.checked_sub(self.first_seq()?)?;
        self.entries.get(usize::try_from(index).ok()?)
    }

    /// How many bytes of entries follow that one, as far as the log goes back.
    pub(super) fn bytes_after(&self, seq: u64) -> u64 {
        match self.get(seq) {
            Some(logged) => self.bytes_ever - logged.bytes_so_far,
            None if self.first_seq().is_some_and(|first| seq < first) => self.bytes,
            None => 0,
        }
    }

    pub(super) fn is_over(&self, entries_max: usize, bytes_max: u64) -> bool {
        self.entries.len() > entries_max || self.bytes > bytes_max
    }
}
