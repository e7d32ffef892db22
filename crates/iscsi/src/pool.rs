//! Reusable buffers for large reads and writes.
//!
//! An allocator returns a buffer of this size to the system when it is freed, and the next one costs a page fault for
//! every page. For a read of 1 MiB that is more than the reading itself.

use std::fmt;
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

/// Room that somebody else gave, with any content.
pub trait Room: AsRef<[u8]> + AsMut<[u8]> + Send + Sync {}

impl<T: AsRef<[u8]> + AsMut<[u8]> + Send + Sync> Room for T {}

/// Where a volume wants the data of long writes: data received there need not be copied.
pub trait Memory: fmt::Debug + Send + Sync {
    /// Room for so many bytes, if there is some.
    fn take(&self, len: usize) -> Option<Box<dyn Room>>;
}

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
    memory: Option<Arc<dyn Memory>>,
}

impl Pool {
    /// One that prefers room of `memory`.
    pub fn new(memory: Option<Arc<dyn Memory>>) -> Self {
        Pool {
            free: Mutex::default(),
            memory,
        }
    }

    /// Whether a volume has said where it wants the data of long writes.
    pub fn has_wishes(&self) -> bool {
        self.memory.is_some()
    }

    fn free(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for `len` bytes, but not for more than [`PIECE_BYTES`] and a checksum; with any content.
    pub fn take(self: &Arc<Self>, len: usize) -> Piece {
        if let Some(given) = self.memory.as_ref().and_then(|memory| memory.take(len)) {
            return Piece {
                store: Store::Given(given),
                len,
                pool: Arc::clone(self),
            };
        }
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
            store: Store::Own(bytes, size),
            pool: Arc::clone(self),
        }
    }
}

/// What a buffer is made of.
enum Store {
    /// Ours, of one of our sizes.
    Own(Box<[u8]>, usize),
    Given(Box<dyn Room>),
}

/// A buffer that goes back when the last reader has dropped it.
pub struct Piece {
    store: Store,
    len: usize,
    pool: Arc<Pool>,
}

impl fmt::Debug for Piece {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Piece({})", self.len)
    }
}

impl Piece {
    /// What was asked for.
    pub fn room(&mut self) -> &mut [u8] {
        let bytes = match &mut self.store {
            Store::Own(bytes, _) => bytes,
            Store::Given(given) => (**given).as_mut(),
        };
        &mut bytes[..self.len]
    }

    /// The first `len` bytes, to be handed out.
    pub fn freeze(mut self, len: usize) -> Bytes {
        self.len = self.len.min(len);
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        let bytes = match &self.store {
            Store::Own(bytes, _) => bytes,
            Store::Given(given) => (**given).as_ref(),
        };
        &bytes[..self.len]
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let Store::Own(bytes, size) = &mut self.store else {
            return;
        };
        let (bytes, size) = (std::mem::take(bytes), *size);
        let mut free = self.pool.free();
        if free.bytes + bytes.len() <= POOL_BYTES_MAX {
            free.bytes += bytes.len();
            free.buffers[size].push(bytes);
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
            let Store::Own(bytes, _) = &piece.store else {
                panic!("nobody gave anything");
            };
            assert!(bytes.len() <= 2 * len + TAIL_BYTES, "{len}");
        }
        let many: Vec<Piece> = (0..POOL_BYTES_MAX / PIECE_BYTES + 10)
            .map(|_| pool.take(PIECE_BYTES))
            .collect();
        drop(many);
        assert!(pool.free().bytes <= POOL_BYTES_MAX);
    }

    #[derive(Debug)]
    struct Elsewhere;

    impl Memory for Elsewhere {
        fn take(&self, len: usize) -> Option<Box<dyn Room>> {
            (len <= 100).then(|| Box::new(vec![9u8; 100]) as Box<dyn Room>)
        }
    }

    #[test]
    fn room_that_a_volume_gives_is_preferred_to_our_own() {
        // Fails if a volume gets its data elsewhere than where it wanted it, or nowhere when it has no room.
        let pool = Arc::new(Pool::new(Some(Arc::new(Elsewhere))));
        let mut given = pool.take(40);
        assert_eq!(given.room(), [9; 40]);
        given.room()[3] = 1;
        let at = given.as_ref().as_ptr();
        let bytes = given.freeze(30);
        assert_eq!((bytes.len(), bytes[3], bytes.as_ptr()), (30, 1, at));
        drop(bytes);
        assert_eq!(pool.free().bytes, 0);
        let own = pool.take(101);
        assert!(matches!(own.store, Store::Own(..)));
    }
}
