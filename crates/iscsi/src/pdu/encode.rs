//! The send queue: a list of pieces that the kernel writes in one call.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::unix::fs::FileExt;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::HEADER_BYTES;
use crate::lun::Span;

/// Memory for headers is taken in pieces of this size.
const ARENA_BYTES: usize = 16 * 1024;
/// A piece of data up to this size is copied behind its header: that is cheaper than a separate slice.
const INLINE_BYTES_MAX: usize = 256;

#[derive(Debug)]
enum Piece {
    Memory(Bytes),
    File(Span),
}

/// PDUs waiting to be written, as pieces.
#[derive(Debug, Default)]
pub struct Outbox {
    header_digest: bool,
    data_digest: bool,
    arena: BytesMut,
    pieces: VecDeque<Piece>,
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
    pub fn push(&mut self, header: [u8; HEADER_BYTES], data: &[Bytes]) {
        let data_len: usize = data.iter().map(Bytes::len).sum();
        self.put_header(header, u32::try_from(data_len).unwrap_or(u32::MAX));
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
                self.pieces.push_back(Piece::Memory(piece.clone()));
            }
        }
        self.arena.put_slice(&[0; 3][..pad]);
        if let Some(digest) = digest {
            self.arena.put_slice(&digest.to_le_bytes());
        }
        self.cut();
    }

    /// Append a PDU whose data lies in a file and is not read here. It has no checksum, so data digests must not have
    /// been negotiated.
    pub fn push_span(&mut self, header: [u8; HEADER_BYTES], data: Span) {
        debug_assert!(!self.data_digest, "a checksum needs the bytes");
        let pad = data.len.next_multiple_of(4) - data.len;
        self.put_header(header, data.len);
        self.cut();
        self.bytes += u64::from(data.len);
        self.pieces.push_back(Piece::File(data));
        self.arena
            .put_slice(&[0; 3][..usize::try_from(pad).unwrap_or(0)]);
        self.cut();
    }

    fn put_header(&mut self, mut header: [u8; HEADER_BYTES], data_len: u32) {
        let [_, high, mid, low] = data_len.to_be_bytes();
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
    }

    /// Make what is in the arena a piece.
    fn cut(&mut self) {
        if !self.arena.is_empty() {
            let piece = self.arena.split().freeze();
            self.bytes += u64::try_from(piece.len()).unwrap_or(0);
            self.pieces.push_back(Piece::Memory(piece));
        }
    }

    /// Fill `slices` with the first pieces that are in memory. Returns how many, and whether data in a file follows
    /// them.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> (usize, bool) {
        let mut count = 0;
        for (slot, piece) in slices.iter_mut().zip(&self.pieces) {
            match piece {
                Piece::Memory(bytes) => *slot = IoSlice::new(bytes),
                Piece::File(_) => return (count, true),
            }
            count += 1;
        }
        (count, false)
    }

    /// What is next, if it lies in a file.
    pub fn first_span(&self) -> Option<&Span> {
        match self.pieces.front()? {
            Piece::Memory(_) => None,
            Piece::File(span) => Some(span),
        }
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
            let len = front.len();
            if len > written {
                return front.advance(written);
            }
            written -= len;
            self.pieces.pop_front();
        }
    }

    /// The whole queue in one piece, for tests and for callers without vectored writes. Ends early where a file cannot
    /// be read.
    pub fn take(&mut self) -> Bytes {
        let mut all = BytesMut::new();
        for piece in std::mem::take(&mut self.pieces) {
            match piece {
                Piece::Memory(bytes) => all.extend_from_slice(&bytes),
                Piece::File(span) => {
                    let start = all.len();
                    all.resize(start + usize::try_from(span.len).unwrap_or(0), 0);
                    let read = span.file.read_exact_at(&mut all[start..], span.offset);
                    if read.is_err() {
                        all.truncate(start);
                        break;
                    }
                }
            }
        }
        self.bytes = 0;
        all.freeze()
    }
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Memory(bytes) => bytes.len(),
            Piece::File(span) => usize::try_from(span.len).unwrap_or(usize::MAX),
        }
    }

    fn advance(&mut self, written: usize) {
        match self {
            Piece::Memory(bytes) => bytes.advance(written),
            Piece::File(span) => {
                let written = u32::try_from(written).unwrap_or(span.len).min(span.len);
                span.offset += u64::from(written);
                span.len -= written;
            }
        }
    }
}
