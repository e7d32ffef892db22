//! Clients. They never write the same value twice, and check what they read.

use std::collections::BTreeMap;

use bytes::Bytes;
use trellis_engine::coordinator::{Event, IoError, IoOp, IoResult};
use trellis_engine::proto::Content;

use crate::Failure;
use crate::world::{GEOMETRY, Happening, World};

const OUTSTANDING_MAX: usize = 12;
const BLOCKS_PER_IO_MAX: u64 = 7;

/// Requests from here on come from clients that have not heard of the takeover. Nobody may ever see
/// what they write.
const LOST_CLIENTS: u64 = 1 << 48;

#[derive(Debug)]
enum Asked {
    Read,
    Write {
        blocks: std::ops::Range<u64>,
        fua: bool,
    },
    Flush,
}

#[derive(Debug, Default)]
pub(crate) struct Client {
    asked: BTreeMap<u64, Asked>,
    last: u64,
    pub(crate) resting: bool,
}

impl Client {
    /// Answers of the old coordinator will not be heard.
    pub(crate) fn coordinator_lost(&mut self) {
        self.asked.clear();
    }

    pub(crate) fn waits(&self) -> usize {
        self.asked.len()
    }

    /// Whether two requests may be under way at the same time. Where two writes overlap, the model
    /// needs to know their order, and only writes inside one region are acknowledged in theirs.
    fn may_write(&self, blocks: &std::ops::Range<u64>, fua: bool) -> bool {
        self.asked.values().all(|asked| match asked {
            Asked::Write {
                blocks: other,
                fua: other_fua,
            } => {
                let apart = blocks.end <= other.start || other.end <= blocks.start;
                let plain = !fua && !other_fua && one_region(blocks) && one_region(other);
                apart || plain
            }
            _ => true,
        })
    }
}

fn one_region(blocks: &std::ops::Range<u64>) -> bool {
    let per_region = u64::from(GEOMETRY.region_bytes / GEOMETRY.block_bytes);
    blocks.start / per_region == (blocks.end - 1) / per_region
}

/// The bytes of a block with that value.
fn block_bytes(value: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&value.to_le_bytes());
    bytes[8..].copy_from_slice(&value.rotate_left(17).to_le_bytes());
    bytes
}

/// The value of a block, or a value that nobody has written.
pub(crate) fn value_of(bytes: &[u8]) -> u64 {
    let mut head = [0; 8];
    head.copy_from_slice(&bytes[..8]);
    let value = u64::from_le_bytes(head);
    if block_bytes(value) == bytes {
        value
    } else {
        u64::MAX
    }
}

impl World {
    pub(crate) fn client_turn(&mut self) {
        let delay = self.rng.between(200, 6_000);
        self.later(delay, Happening::Client);
        if self.client.resting || self.client.waits() >= OUTSTANDING_MAX {
            return;
        }
        self.lost_client_turn();
        let index = self.current;
        if !self.chiefs[index].alive || !self.chiefs[index].coordinator.is_serving() {
            return;
        }
        let blocks = self.size_served / u64::from(GEOMETRY.block_bytes);
        let first = self.rng.below(blocks);
        let count = self.rng.between(1, BLOCKS_PER_IO_MAX).min(blocks - first);
        let range = first..first + count;
        match self.rng.below(100) {
            0..45 => {
                let fua = self.rng.chance(80);
                self.client_write(range, fua, false);
            }
            45..50 => self.client_write(range, false, true),
            50..90 => self.client_read(range),
            _ => self.client_flush(),
        }
    }

    /// A client that still uses a superseded coordinator writes.
    fn lost_client_turn(&mut self) {
        let superseded = (0..self.current).rev().find(|index| {
            self.chiefs[*index].alive && self.chiefs[*index].coordinator.is_serving()
        });
        let Some(index) = superseded else { return };
        self.client.last += 1;
        let id = LOST_CLIENTS + self.client.last;
        let size = u64::from(GEOMETRY.block_bytes);
        let op = IoOp::Write {
            offset: self.rng.below(4) * size,
            data: vec![Bytes::copy_from_slice(&block_bytes(id))],
            fua: false,
        };
        self.tell_chief(index, Event::Io { id, op });
    }

    /// A superseded coordinator has answered.
    pub(crate) fn lost_client_replied(&mut self, id: u64, result: &IoResult) {
        if id > LOST_CLIENTS && result.is_ok() {
            self.fail(Failure::SplitBrain);
        }
    }

    fn ask(&mut self, asked: Asked) -> u64 {
        self.client.last += 1;
        let id = self.client.last;
        self.client.asked.insert(id, asked);
        id
    }

    fn client_write(&mut self, blocks: std::ops::Range<u64>, fua: bool, zeros: bool) {
        if !self.client.may_write(&blocks, fua) {
            return;
        }
        let id = self.ask(Asked::Write {
            blocks: blocks.clone(),
            fua,
        });
        let size = u64::from(GEOMETRY.block_bytes);
        let (offset, count) = (blocks.start * size, blocks.end - blocks.start);
        let value = if zeros { 0 } else { id };
        let partial = fua || !one_region(&blocks);
        self.oracle.write_issued(id, blocks, value, partial);
        let op = if zeros {
            IoOp::Zero {
                offset,
                length: count * size,
            }
        } else {
            let data: Vec<u8> = (0..count).flat_map(|_| block_bytes(value)).collect();
            IoOp::Write {
                offset,
                data: self.in_pieces(Bytes::from(data)),
                fua,
            }
        };
        self.tell_chief(self.current, Event::Io { id, op });
    }

    /// A client may hand over its bytes in pieces.
    fn in_pieces(&mut self, mut data: Bytes) -> Vec<Bytes> {
        let block = usize::try_from(GEOMETRY.block_bytes).unwrap_or(1);
        let mut pieces = Vec::new();
        // Only writes that may be seen in part anyway: the model knows those.
        let whole = data.len() <= usize::try_from(GEOMETRY.region_bytes).unwrap_or(0);
        while !whole && data.len() > block && self.rng.chance(500) {
            pieces.push(data.split_to(block));
        }
        pieces.push(data);
        pieces
    }

    pub(crate) fn client_read(&mut self, blocks: std::ops::Range<u64>) {
        let id = self.ask(Asked::Read);
        let size = u64::from(GEOMETRY.block_bytes);
        let op = IoOp::Read {
            offset: blocks.start * size,
            length: (blocks.end - blocks.start) * size,
        };
        self.oracle.read_issued(id, blocks);
        self.tell_chief(self.current, Event::Io { id, op });
    }

    pub(crate) fn client_flush(&mut self) {
        let id = self.ask(Asked::Flush);
        self.oracle.flush_issued(id);
        self.tell_chief(
            self.current,
            Event::Io {
                id,
                op: IoOp::Flush,
            },
        );
    }

    pub(crate) fn replied(&mut self, id: u64, result: IoResult) {
        let Some(asked) = self.client.asked.remove(&id) else {
            return;
        };
        self.stats.answered += 1;
        match (asked, result) {
            (Asked::Read, Ok(parts)) => {
                let bytes: Vec<u8> = parts.iter().flat_map(content_bytes).collect();
                let size = usize::try_from(GEOMETRY.block_bytes).unwrap_or(1);
                let values: Vec<u64> = bytes.chunks(size).map(value_of).collect();
                if let Err(violation) = self.oracle.read_done(id, &values) {
                    self.trace(|| format!("read {id} saw {violation:?}"));
                    self.fail(Failure::Read(violation));
                }
            }
            (Asked::Read, Err(_)) => self.oracle.read_failed(id),
            (Asked::Write { blocks, fua }, Ok(_)) => {
                self.trace(|| format!("write {id} of {blocks:?} acknowledged"));
                if fua {
                    self.oracle.durable_write_acked(id);
                } else {
                    self.oracle.write_acked(id);
                }
            }
            (Asked::Flush, Ok(_)) => {
                self.trace(|| format!("flush {id} acknowledged"));
                self.oracle.flush_done(id);
            }
            // It was not begun.
            (Asked::Write { .. }, Err(IoError::Busy | IoError::NoSpace | IoError::OutOfRange)) => {
                self.oracle.write_refused(id);
            }
            // Whether it was done is unknown until a successor serves.
            (Asked::Write { .. } | Asked::Flush, Err(_)) => {}
        }
    }
}

fn content_bytes(content: &Content) -> Vec<u8> {
    match content {
        Content::Data(data) => data.to_vec(),
        Content::Zeros(length) => vec![0; usize::try_from(*length).unwrap_or(0)],
    }
}
