//! What is to be sent: a queue of pieces, written by the kernel in one call.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::HEADER_BYTES;

/// Memory for headers is taken in pieces of this size.
const ARENA_BYTES: usize = 16 * 1024;
/// A piece of data up to this size is copied behind its header: cheaper than a slice of its own.
const INLINE_BYTES_MAX: usize = 256;

/// PDUs waiting to be written, as pieces.
#[derive(Debug, Default)]
pub struct Outbox {
    header_digest: bool,
    data_digest: bool,
    arena: BytesMut,
    pieces: VecDeque<Bytes>,
    bytes: u64,
}

impl Outbox {
    /// From the next PDU on, add these checksums.
    pub fn set_digests(&mut self, header: bool, data: bool) {
        self.header_digest = header;
        self.data_digest = data;
    }

    /// How much waits.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Append a PDU. The header's data length is taken from `data`, which may be in several pieces.
    pub fn push(&mut self, mut header: [u8; HEADER_BYTES], data: &[Bytes]) {
        let data_len: usize = data.iter().map(Bytes::len).sum();
        let [_, high, mid, low] = u32::try_from(data_len).unwrap_or(u32::MAX).to_be_bytes();
        header[4] = 0;
        header[5..8].copy_from_slice(&[high, mid, low]);

        self.arena
            .reserve(if self.arena.capacity() < 512 + INLINE_BYTES_MAX {
                ARENA_BYTES
            } else {
                0
            });
        self.arena.put_slice(&header);
        if self.header_digest {
            self.arena.put_slice(&crc32c::crc32c(&header).to_le_bytes());
        }
        if data_len == 0 {
            return self.cut();
        }
        let pad = data_len.next_multiple_of(4) - data_len;
        let digest = self.data_digest.then(|| {
            let crc = data
                .iter()
                .fold(0, |crc, piece| crc32c::crc32c_append(crc, piece));
            crc32c::crc32c_append(crc, &[0; 3][..pad])
        });
        if data_len <= INLINE_BYTES_MAX {
            for piece in data {
                self.arena.put_slice(piece);
            }
        } else {
            self.cut();
            for piece in data.iter().filter(|piece| !piece.is_empty()) {
                self.bytes += u64::try_from(piece.len()).unwrap_or(0);
                self.pieces.push_back(piece.clone());
            }
        }
        self.arena.put_slice(&[0; 3][..pad]);
        if let Some(digest) = digest {
            self.arena.put_slice(&digest.to_le_bytes());
        }
        self.cut();
    }

    /// Make what is in the arena a piece.
    fn cut(&mut self) {
        if !self.arena.is_empty() {
            let piece = self.arena.split().freeze();
            self.bytes += u64::try_from(piece.len()).unwrap_or(0);
            self.pieces.push_back(piece);
        }
    }

    /// Fill `slices` with the first pieces; answers how many.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        for (slot, piece) in slices.iter_mut().zip(&self.pieces) {
            *slot = IoSlice::new(piece);
            count += 1;
        }
        count
    }

    /// So many bytes have been written.
    pub fn advance(&mut self, mut written: usize) {
        self.bytes = self
            .bytes
            .saturating_sub(u64::try_from(written).unwrap_or(u64::MAX));
        while written > 0 {
            let Some(front) = self.pieces.front_mut() else {
                return;
            };
            if front.len() > written {
                front.advance(written);
                return;
            }
            written -= front.len();
            self.pieces.pop_front();
        }
    }

    /// Everything that waits, in one piece: for tests and for callers without vectored writes.
    pub fn take(&mut self) -> Bytes {
        let mut all = BytesMut::new();
        for piece in self.pieces.drain(..) {
            all.extend_from_slice(&piece);
        }
        self.bytes = 0;
        all.freeze()
    }
}
