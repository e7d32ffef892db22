//! Buffers of long reads, which are used again: fresh memory costs a page fault for every page, which would be measured
//! with the target.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The length of a buffer.
pub(crate) const PIECE_BYTES: usize = 256 << 10;

/// The most buffers that are kept.
const SPARE_MAX: usize = 64;

/// Buffers that nobody has.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Vec<Box<[u8]>>>);

impl Spare {
    fn lock(&self) -> MutexGuard<'_, Vec<Box<[u8]>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for `len` bytes, at most [`PIECE_BYTES`], with any content.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> LongBuffer {
        let used = self.lock().pop();
        LongBuffer {
            bytes: used.unwrap_or_else(|| vec![0; PIECE_BYTES].into_boxed_slice()),
            len: len.min(PIECE_BYTES),
            spare: Arc::clone(self),
        }
    }
}

/// A buffer that goes back when the last reader has dropped it.
#[derive(Debug)]
pub(crate) struct LongBuffer {
    bytes: Box<[u8]>,
    len: usize,
    spare: Arc<Spare>,
}

impl LongBuffer {
    /// What was asked for.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl AsRef<[u8]> for LongBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Drop for LongBuffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_MAX {
            spare.push(bytes);
        }
    }
}
