//! Buffers for large reads and writes, used again and again.
//!
//! An allocator gives a buffer of this size back to the system when it is freed, and the next one is paid for
//! with a page fault for every page: for a read of 1 MiB that is more than the reading itself.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::limits::POOL_BYTES_MAX;

/// The largest buffer holds what goes into one PDU,
pub const PIECE_BYTES: usize = 256 << 10;
/// with what follows it on the wire: a checksum.
const TAIL_BYTES: usize = 64;
/// The smallest buffer. Between these each size is twice the one before, so that no buffer is less than half used.
const SMALLEST_BYTES: usize = 32 << 10;
const SIZES: usize = 4;
const _: () = assert!(SMALLEST_BYTES << (SIZES - 1) == PIECE_BYTES);

#[derive(Debug, Default)]
struct Free {
    /// By size, from the smallest on.
    buffers: [Vec<Box<[u8]>>; SIZES],
    bytes: usize,
}

/// Buffers that nobody has.
#[derive(Debug, Default)]
pub struct Pool {
    free: Mutex<Free>,
}

impl Pool {
    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for `len` bytes, but not for more than [`PIECE_BYTES`] and a checksum; with any content.
    pub fn take(self: &Arc<Self>, len: usize) -> Piece {
        let size = (0..SIZES)
            .find(|size| len <= (SMALLEST_BYTES << size) + TAIL_BYTES)
            .unwrap_or(SIZES - 1);
        let mut free = self.free();
        // The one that came back last: it is still in the processor's cache.
        let used = free.buffers[size].pop();
        free.bytes -= used.as_ref().map_or(0, |bytes| bytes.len());
        drop(free);
        let bytes = used
            .unwrap_or_else(|| vec![0; (SMALLEST_BYTES << size) + TAIL_BYTES].into_boxed_slice());
        Piece {
            len: len.min(bytes.len()),
            bytes,
            size,
            pool: Arc::clone(self),
        }
    }
}

/// A buffer that goes back when the last reader has dropped it.
#[derive(Debug)]
pub struct Piece {
    bytes: Box<[u8]>,
    len: usize,
    size: usize,
    pool: Arc<Pool>,
}

impl Piece {
    /// What was asked for.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }

    /// The first `len` bytes, to be handed out.
    pub fn freeze(mut self, len: usize) -> Bytes {
        self.len = self.len.min(len);
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut free = self.pool.free();
        if free.bytes + bytes.len() <= POOL_BYTES_MAX {
            free.bytes += bytes.len();
            free.buffers[self.size].push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_only_when_nobody_reads_it() {
        // Fails if a buffer is given out while a part of it is still held, or is not used again afterwards.
        let pool: Arc<Pool> = Arc::default();
        let mut piece = pool.take(PIECE_BYTES);
        piece.room()[..10].fill(1);
        let all = piece.freeze(10);
        let part = all.slice(3..5);
        let at = all.as_ptr();
        drop(all);
        let mut other = pool.take(PIECE_BYTES);
        other.room().fill(2);
        assert_eq!(&part[..], [1, 1]);
        drop(part);
        let mut again = pool.take(PIECE_BYTES - 1);
        assert_eq!(again.room().as_ptr(), at);
    }

    #[test]
    fn no_buffer_is_twice_as_large_as_what_it_is_for() {
        // Fails if a small transfer gets a large buffer, a large one too small a buffer, or too much is kept.
        let pool: Arc<Pool> = Arc::default();
        for len in [
            SMALLEST_BYTES,
            64 << 10,
            (64 << 10) + 65,
            PIECE_BYTES + TAIL_BYTES,
        ] {
            let piece = pool.take(len);
            assert_eq!(piece.as_ref().len(), len);
            assert!(piece.bytes.len() <= 2 * len + TAIL_BYTES, "{len}");
        }
        let many: Vec<Piece> = (0..POOL_BYTES_MAX / PIECE_BYTES + 10)
            .map(|_| pool.take(PIECE_BYTES))
            .collect();
        drop(many);
        assert!(pool.free().bytes <= POOL_BYTES_MAX);
    }
}
