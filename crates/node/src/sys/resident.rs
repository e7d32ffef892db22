//! Memory that is resident from the start and stays so: no page is ever fetched on use. It is part of a memory file,
//! so another process can continue with its contents.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bytes::Bytes;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags};

const PAGE_BYTES: usize = 4096;

/// A file in memory. It lives as long as somebody has it open or mapped.
#[derive(Debug)]
pub struct MemoryFile {
    fd: OwnedFd,
}

impl MemoryFile {
    /// A new one, with nothing in it.
    pub fn new(name: &str) -> Result<MemoryFile> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
        Ok(MemoryFile { fd })
    }

    /// One that another process has made.
    pub fn of(fd: OwnedFd) -> MemoryFile {
        MemoryFile { fd }
    }

    /// How long it is.
    pub fn length(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.fd)?;
        u64::try_from(stat.st_size).map_err(|_| Errno::INVAL)
    }

    /// Makes it at least so long.
    pub fn extend(&self, length: u64) -> Result<()> {
        if self.length()? < length {
            rustix::fs::ftruncate(&self.fd, length)?;
        }
        Ok(())
    }

    /// Gives the memory of a part back; it reads as zeros.
    pub fn give_back(&self, offset: u64, length: usize) -> Result<()> {
        let length = u64::try_from(length).map_err(|_| Errno::INVAL)?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.fd, hole, offset, length)
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A part of a file in memory, as this process sees it.
pub struct Memory {
    base: NonNull<u8>,
    length: usize,
    /// Called when nobody looks at it any more.
    unmapped: Option<Box<dyn FnOnce() + Send + Sync>>,
}

// SAFETY: it is plain memory that belongs to no thread. Who may write to which part of it is the concern of `Room`,
// which takes `&mut self` for it, and of `Words`, which has atomics only.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps whole pages of a file. Nobody else may write to them meanwhile.
    pub fn map(file: &MemoryFile, offset: u64, length: usize) -> Result<Memory> {
        let end = u64::try_from(length)
            .ok()
            .and_then(|length| offset.checked_add(length));
        // Beyond the end of the file there would be no memory at all.
        if length == 0 || end.is_none_or(|end| file.length().map_or(true, |have| have < end)) {
            return Err(Errno::INVAL);
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses a free range of addresses, so that nothing that is in use is replaced.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, access, flags, file, offset)? };
        let memory = Memory {
            base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?,
            length,
            unmapped: None,
        };
        // SAFETY: the range is the one that was just mapped.
        if let Err(errno) = unsafe { rustix::mm::mlock(base, length) } {
            tracing::debug!(%errno, "memory cannot be kept from being paged out");
        }
        memory.touch();
        Ok(memory)
    }

    /// Writes to every page what is there: populating has made them readable only, perhaps.
    fn touch(&self) {
        for at in (0..self.length).step_by(PAGE_BYTES) {
            // SAFETY: the byte lies inside of the memory, and nobody else writes to it while it is being mapped.
            unsafe {
                let byte = self.base.add(at).as_ptr();
                byte.write_volatile(byte.read_volatile());
            }
        }
    }

    /// Has something done when nobody looks at it any more.
    pub fn when_unmapped(mut self, act: impl FnOnce() + Send + Sync + 'static) -> Memory {
        self.unmapped = Some(Box::new(act));
        self
    }

    /// Hands out a part of what another process has left there; none if it reaches beyond the end. Nobody may write to
    /// it as long as it is looked at.
    pub fn part(self: &Arc<Self>, start: usize, length: usize) -> Option<Bytes> {
        let end = start.checked_add(length)?;
        (end <= self.length).then(|| {
            Bytes::from_owner(Part {
                memory: self.clone(),
                start,
                length,
            })
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: whoever holds a part of the memory holds the memory, so that nobody looks at it any more. It was
        // mapped by us, with this length; there is nothing to do about an error.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
        if let Some(act) = self.unmapped.take() {
            act();
        }
    }
}

/// Memory as numbers that several threads, and one process after the other, read and write.
pub struct Words {
    memory: Memory,
}

impl Words {
    /// All of that memory.
    pub fn new(memory: Memory) -> Words {
        Words { memory }
    }

    /// All of them.
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: the memory begins at a page, so that it is aligned; it is initialised by the kernel; any bits are a
        // number; and everybody who has it looks at it through atomics only, as long as `self` keeps it mapped.
        unsafe {
            let first = self.memory.base.as_ptr().cast::<AtomicU64>();
            std::slice::from_raw_parts(first, self.memory.length / size_of::<AtomicU64>())
        }
    }
}

/// Memory whose parts are handed out, one behind the other, until all of them have come back.
pub struct Room {
    memory: Arc<Memory>,
    /// What was handed out, from the beginning.
    taken: usize,
}

impl Room {
    /// All of that memory. It begins at the start of a page.
    pub fn new(memory: Memory) -> Room {
        Room {
            memory: Arc::new(memory),
            taken: 0,
        }
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
        let file = MemoryFile::new("test").unwrap();
        file.extend(8192).unwrap();
        let mut room = Room::new(Memory::map(&file, 0, 8192).unwrap());
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

    // Fails if another look at the file shows something else than what was left there, or memory that is not there
    // can be mapped: touching it would kill the process.
    #[test]
    fn what_was_left_is_found_by_whoever_comes_next() {
        let file = MemoryFile::new("test").unwrap();
        file.extend(2 * 4096).unwrap();
        let mut room = Room::new(Memory::map(&file, 4096, 4096).unwrap());
        room.free_mut()[..4].copy_from_slice(b"left");
        drop(room);
        let next = Arc::new(Memory::map(&file, 4096, 4096).unwrap());
        assert_eq!(&next.part(0, 4).unwrap()[..], b"left");
        assert!(next.part(4090, 7).is_none() && next.part(usize::MAX, 2).is_none());
        file.give_back(4096, 4096).unwrap();
        assert_eq!(&next.part(0, 4).unwrap()[..], [0; 4]);
        assert!(Memory::map(&file, 4096, 8192).is_err());
        assert!(Memory::map(&file, u64::MAX, 4096).is_err());
    }
}
