//! Regions under repair: which blocks entries have written since the repair began.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::{DiskOp, Member};
use crate::proto::{Content, Region};

/// The blocks of a region that are newer than the bytes that will come.
#[derive(Default)]
pub(super) struct Overlay {
    blocks: BTreeSet<u64>,
}

impl Member {
    /// Remembers that an entry has written these bytes of a region under repair.
    pub(super) fn overlay(&mut self, region: Region, offset: u64, length: u64) {
        let block = u64::from(self.geometry.block_bytes);
        if let Some(overlay) = self.repairs.get_mut(&region) {
            overlay
                .blocks
                .extend(offset / block..(offset + length).div_ceil(block));
        }
    }

    /// The writes that put the older bytes of a region where no entry has written since, the last one first.
    pub(super) fn repair_writes(
        &self,
        region: Region,
        overlay: &Overlay,
        content: &Content,
    ) -> Vec<DiskOp> {
        let block = u64::from(self.geometry.block_bytes);
        let (start, length) = self.geometry.extent(region, self.meta.size);
        let end = start + length.min(content.length());
        let mut writes = Vec::new();
        let mut at = start;
        while at < end {
            if overlay.blocks.contains(&(at / block)) {
                at += block;
                continue;
            }
            let zeros = is_zero(content, at - start, block);
            let mut stop = at + block;
            while stop < end
                && !overlay.blocks.contains(&(stop / block))
                && is_zero(content, stop - start, block) == zeros
            {
                stop += block;
            }
            let stop = stop.min(end);
            writes.push(piece(content, start, at, stop));
            at = stop;
        }
        writes.reverse();
        writes
    }
}

/// Whether a block is all zeros. Such a block is not written into a hole, so a repair takes no more space than the
/// bytes need.
fn is_zero(content: &Content, from: u64, length: u64) -> bool {
    match content {
        Content::Zeros(_) => true,
        Content::Data(data) => slice(data, from, from + length)
            .iter()
            .all(|byte| *byte == 0),
    }
}

fn piece(content: &Content, start: u64, from: u64, to: u64) -> DiskOp {
    let (offset, length) = (from, to - from);
    match content {
        Content::Zeros(_) => DiskOp::Zero { offset, length },
        Content::Data(data) => {
            let data = slice(data, from - start, to - start);
            if data.iter().all(|byte| *byte == 0) {
                DiskOp::Clear { offset, length }
            } else {
                DiskOp::Write { offset, data }
            }
        }
    }
}

fn slice(data: &Bytes, from: u64, to: u64) -> Bytes {
    let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(data.len());
    data.slice(index(from)..index(to))
}
