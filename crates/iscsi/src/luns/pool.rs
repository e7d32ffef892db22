//! Buffers for large reads, used again and again.
//!
//! An allocator gives a buffer of this size back to the system when it is freed, and the next one is paid for
//! with a page fault for every page: for a read of 1 MiB that is more than the reading itself.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::limits::{DATA_IN_BYTES_MAX, SEND_SEGMENT_BYTES_MAX};

/// A buffer holds what goes into one PDU.
pub(super) const PIECE_BYTES: usize = {
    assert!(SEND_SEGMENT_BYTES_MAX == 256 << 10);
    256 << 10
};
/// As many are kept as one connection can have under way.
const KEPT_MAX: usize = {
    assert!(DATA_IN_BYTES_MAX == 16 << 20);
    (16 << 20) / PIECE_BYTES
};

/// Buffers that nobody has.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Mutex<Vec<Box<[u8]>>>,
}

impl Pool {
    /// A buffer of [`PIECE_BYTES`], with any content.
    pub(super) fn take(self: &Arc<Self>) -> Piece {
        let free = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        Piece {
            // The one that came back last: it is still in the processor's cache.
            bytes: free.unwrap_or_else(|| vec![0; PIECE_BYTES].into_boxed_slice()),
            len: 0,
            pool: Arc::clone(self),
        }
    }
}

/// A buffer that goes back when the last reader has dropped it.
#[derive(Debug)]
pub(super) struct Piece {
    bytes: Box<[u8]>,
    len: usize,
    pool: Arc<Pool>,
}

impl Piece {
    /// The room of the first `len` bytes, at most all of it.
    pub(super) fn room(&mut self, len: usize) -> &mut [u8] {
        self.len = len.min(PIECE_BYTES);
        &mut self.bytes[..self.len]
    }

    /// What was asked room for, to be handed out.
    pub(super) fn freeze(self) -> Bytes {
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
        let mut free = self
            .pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if free.len() < KEPT_MAX {
            free.push(bytes);
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
        let mut piece = pool.take();
        piece.room(10).fill(1);
        let all = piece.freeze();
        let part = all.slice(3..5);
        let at = all.as_ptr();
        drop(all);
        let mut other = pool.take();
        other.room(PIECE_BYTES).fill(2);
        assert_eq!(&part[..], [1, 1]);
        drop(part);
        let mut again = pool.take();
        assert_eq!(again.room(1).as_ptr(), at);
    }
}
