//! Reusable memory for reads. New memory would have to be cleared each time, and for long reads that costs as much as
//! the read.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Shorter reads get memory of their own.
const LENGTH_MIN: usize = 16 << 10;

/// Longer ones too: nobody reads more than a region at a time.
const LENGTH_MAX: usize = 1 << 20;

/// How many bytes are kept for later.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// Memory that is kept for later. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Buffers {
    shelf: Arc<Mutex<Shelf>>,
}

#[derive(Default)]
struct Shelf {
    /// Each of a length that is a power of two.
    kept: Vec<Vec<u8>>,
    kept_bytes: usize,
}

/// Memory of a certain length, with whatever was in it before.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    home: Option<Arc<Mutex<Shelf>>>,
}

impl Buffers {
    pub(super) fn get(&self, length: usize) -> Buffer {
        if !(LENGTH_MIN..=LENGTH_MAX).contains(&length) {
            return Buffer {
                bytes: vec![0; length],
                length,
                home: None,
            };
        }
        let whole = length.next_power_of_two();
        let kept = lock(&self.shelf).take(whole);
        Buffer {
            bytes: kept.unwrap_or_else(|| vec![0; whole]),
            length,
            home: Some(Arc::clone(&self.shelf)),
        }
    }
}

impl Buffer {
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }

    /// The bytes, for as long as somebody has them. Then the memory is used again.
    pub(super) fn freeze(mut self) -> Bytes {
        if self.home.is_none() {
            return Bytes::from(std::mem::take(&mut self.bytes));
        }
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            lock(&home).put(std::mem::take(&mut self.bytes));
        }
    }
}

impl Shelf {
    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        let at = self.kept.iter().rposition(|kept| kept.len() == length)?;
        self.kept_bytes -= length;
        Some(self.kept.swap_remove(at))
    }

    fn put(&mut self, bytes: Vec<u8>) {
        if self.kept_bytes + bytes.len() <= KEPT_BYTES_MAX {
            self.kept_bytes += bytes.len();
            self.kept.push(bytes);
        }
    }
}

/// The shelf is whole at any time, also after a panic elsewhere.
fn lock(shelf: &Mutex<Shelf>) -> std::sync::MutexGuard<'_, Shelf> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_when_nobody_has_it_any_more_and_not_before() {
        // Fails if two readers get the same memory, or all memory that was ever used is kept.
        let buffers = Buffers::default();
        let mut first = buffers.get(100 << 10);
        first.bytes_mut().fill(1);
        let first = first.freeze();
        let mut second = buffers.get(100 << 10);
        second.bytes_mut().fill(2);
        assert!(first.iter().all(|byte| *byte == 1));
        let part = first.slice(10..20);
        drop(first);
        drop(second.freeze());
        assert_eq!(lock(&buffers.shelf).kept.len(), 1);
        assert!(part.iter().all(|byte| *byte == 1));
        drop(part);
        assert_eq!(lock(&buffers.shelf).kept.len(), 2);
        let many: Vec<Buffer> = (0..32).map(|_| buffers.get(1 << 20)).collect();
        drop(many);
        assert!(lock(&buffers.shelf).kept_bytes <= KEPT_BYTES_MAX);
    }
}
