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
}

#[derive(Debug, Default)]
pub(super) struct Log {
    entries: VecDeque<Logged>,
    bytes: u64,
}

impl Log {
    pub(super) fn push(&mut self, entry: Entry, region: Option<Region>) {
        let bytes = match &entry.op {
            EntryOp::Write { data, .. } => u64::try_from(data.len()).unwrap_or(u64::MAX),
            _ => 0,
        };
        self.bytes += bytes;
        self.entries.push_back(Logged {
            entry,
            region,
            bytes,
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

    pub(super) fn is_over(&self, entries_max: usize, bytes_max: u64) -> bool {
        self.entries.len() > entries_max || self.bytes > bytes_max
    }
}
