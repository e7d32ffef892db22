//! Memory that is there from the start and stays: never a page that has to be fetched when it is used.

#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};

struct Memory {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: it is plain memory that belongs to no thread. Who may write to which part of it is the concern of `Room`,
// which takes `&mut self` for it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(length: usize) -> Result<Memory> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: the kernel chooses a free range of addresses, so that nothing that is in use is replaced.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, access, flags)? };
        let memory = Memory {
            base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?,
            length,
        };
        // SAFETY: the range is the one that was just mapped.
        if let Err(errno) = unsafe { rustix::mm::mlock(base, length) } {
            tracing::debug!(%errno, "memory cannot be kept from being paged out");
        }
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: whoever holds a part of the memory holds the memory, so that nobody looks at it any more. It was
        // mapped by us, with this length; there is nothing to do about an error.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Memory whose parts are handed out, one behind the other, until all of them have come back.
pub struct Room {
    memory: Arc<Memory>,
    /// What was handed out, from the beginning.
    taken: usize,
}

impl Room {
    /// Room for so many bytes. It begins at the start of a page.
    pub fn new(length: usize) -> Result<Room> {
        Ok(Room {
            memory: Arc::new(Memory::new(length)?),
            taken: 0,
        })
    }

    /// How much of it was handed out.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// What was not handed out yet.
    pub fn free(&self) -> &[u8] {
        // SAFETY: the range lies inside of the memory, which is initialised by the kernel. Nobody writes to it while
        // `self` is borrowed: writing needs `&mut self`, and what was handed out ends before it.
        unsafe {
            let start = self.memory.base.add(self.taken);
            std::slice::from_raw_parts(start.as_ptr(), self.memory.length - self.taken)
        }
    }

    /// What was not handed out yet, to be filled.
    pub fn free_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else looks at it: there is one `Room` of a memory, borrowed by the caller.
        unsafe {
            let start = self.memory.base.add(self.taken);
            std::slice::from_raw_parts_mut(start.as_ptr(), self.memory.length - self.taken)
        }
    }

    /// Hands out the first `length` bytes of what is free, all of it at most.
    pub fn take(&mut self, length: usize) -> Bytes {
        let start = self.taken;
        self.skip(length);
        Bytes::from_owner(Part {
            memory: self.memory.clone(),
            start,
            length: self.taken - start,
        })
    }

    /// Leaves `length` bytes unused.
    pub fn skip(&mut self, length: usize) {
        self.taken = self.taken.saturating_add(length).min(self.memory.length);
    }

    /// All of it is free again, if nobody has a part of it; answers whether.
    pub fn start_over(&mut self) -> bool {
        let is_alone = Arc::get_mut(&mut self.memory).is_some();
        if is_alone {
            self.taken = 0;
        }
        is_alone
    }
}

impl std::fmt::Debug for Room {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Room")
            .field("length", &self.memory.length)
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}

/// A part that was handed out.
struct Part {
    memory: Arc<Memory>,
    start: usize,
    length: usize,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies inside of the memory, and before what `Room` still writes to, for as long as this
        // part keeps the memory from being used again.
        unsafe {
            let start = self.memory.base.add(self.start);
            std::slice::from_raw_parts(start.as_ptr(), self.length)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // Fails if a part changes while somebody has it, or room does not come back when nobody has.
    #[test]
    fn what_was_taken_stays_until_it_is_let_go_of() {
        let mut room = Room::new(8192).unwrap();
        room.free_mut()[..4].copy_from_slice(b"some");
        let some = room.take(4);
        room.skip(4);
        room.free_mut().fill(b'x');
        assert_eq!(room.free().len(), 8192 - 8);
        assert!(!room.start_over());
        let end = some.slice(2..);
        drop(some);
        assert!(!room.start_over());
        assert_eq!(&end[..], b"me");
        drop(end);
        assert!(room.start_over());
        assert_eq!(room.free().len(), 8192);
        let all = room.take(usize::MAX);
        assert_eq!(all.len(), 8192);
        assert!(room.free().is_empty());
        drop(room);
        assert_eq!(all[8191], b'x');
    }
}
