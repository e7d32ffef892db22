//! Memory that a volume shares with the replicas on its machine. Without it the bytes of a write would be copied into
//! a socket and out of it again, once for every replica.
//!
//! The volume has an [`Arena`], a file in memory in which the bytes of every write get a [`Slot`]. A replica on the
//! same machine maps the file for reading ([`Borrowed`]) and is told where the bytes are, instead of getting the
//! bytes. If any step of that is impossible, the bytes go through the socket.
//!
//! # Why nobody reads what was overwritten
//!
//! A slot is reused when the last [`Bytes`] of it is dropped. The volume's end of a connection keeps one for every
//! slot that it has lent there, until the replica has answered the entry or the connection is closed *at the other
//! end*. The replica's end stays open as long as it still needs a payload, even if its process is frozen. When a
//! volume's process dies, its file stays unchanged for as long as anybody maps it.
//!
//! This is the only file of the crate with `unsafe`: it maps the file and reads the mapping.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use tokio::net::UnixStream;

use crate::wire::Lend;

/// The shortest slot is a block. Each further size is twice the one before.
const SLOT_BYTES_MIN: usize = 4 << 10;
/// The longest slot: longer writes are several entries anyway.
pub(super) const SLOT_BYTES_MAX: usize = 256 << 10;
const SIZES: usize = 7;
const _: () = assert!(SLOT_BYTES_MIN << (SIZES - 1) == SLOT_BYTES_MAX);

/// The size of the arena: what a coordinator keeps for replicas that are behind, and the same again for writes in
/// flight. It takes memory only where it was used.
const ARENA_BYTES: usize = 128 << 20;

/// When nothing is in use, no more memory than this is kept.
const KEPT_BYTES_MAX: usize = 16 << 20;

/// A file in memory, as this process sees it.
struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: a mapping is memory that belongs to no thread. Who may write to which part of it is the concern of
// `Slot`, which takes `&mut self` for it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: impl AsFd, length: usize, access: ProtFlags) -> io::Result<Mapping> {
        // SAFETY: the kernel chooses a free range of addresses, so that nothing that is in use is replaced.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                access,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, length })
    }

    /// Where a range is, if it is inside.
    fn range(&self, at: usize, length: usize) -> Option<NonNull<u8>> {
        let end = at.checked_add(length)?;
        // SAFETY: `at` is at most the length of the mapping.
        (end <= self.length).then(|| unsafe { self.base.add(at) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: whoever holds a part of the mapping holds the mapping, so that nobody looks at it any more.
        // It was mapped by us, with this length; there is nothing to do about an error.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Memory that can be lent. Clones of the [`Arc`] share it.
pub(super) struct Arena {
    file: File,
    mapping: Mapping,
    state: Mutex<State>,
    /// Somebody has borrowed it, so that it is worth while to put something there.
    is_wanted: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Free slots, by size. The one that came back last is still in the processor's cache.
    free: [Vec<usize>; SIZES],
    /// Nothing behind this was ever used, or has been given back.
    top: usize,
    slots_used: usize,
}

impl Arena {
    pub(super) fn new() -> io::Result<Arc<Arena>> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("trellis-writes", flags)?);
        file.set_len(u64::try_from(ARENA_BYTES).unwrap_or(u64::MAX))?;
        // Whoever maps it can rely on its length.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let mapping = Mapping::new(&file, ARENA_BYTES, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Arc::new(Arena {
            file,
            mapping,
            state: Mutex::default(),
            is_wanted: AtomicBool::new(false),
        }))
    }

    /// What to tell a replica that may borrow it.
    pub(super) fn lend(&self) -> io::Result<Lend> {
        let stat = self.file.metadata()?;
        Ok(Lend {
            descriptor: u32::try_from(self.file.as_raw_fd()).unwrap_or(u32::MAX),
            length: stat.size(),
            device: stat.dev(),
            inode: stat.ino(),
        })
    }

    /// A replica has borrowed it.
    pub(super) fn borrowed(&self) {
        self.is_wanted.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Relaxed)
    }

    /// Where these bytes are in the arena, if they are there.
    pub(super) fn place_of(&self, bytes: &Bytes) -> Option<u64> {
        let base = self.mapping.base.as_ptr().addr();
        let at = bytes.as_ptr().addr().checked_sub(base)?;
        (at < self.mapping.length).then(|| u64::try_from(at).unwrap_or(u64::MAX))
    }

    /// A slot for that many bytes, unless they are too many or none is free.
    pub(super) fn take(self: &Arc<Arena>, length: usize) -> Option<Slot> {
        let size = (0..SIZES).find(|size| length <= SLOT_BYTES_MIN << size)?;
        let mut state = self.state();
        let at = match state.free[size].pop() {
            Some(at) => at,
            None => {
                let at = state.top;
                let top = at + (SLOT_BYTES_MIN << size);
                if top > ARENA_BYTES {
                    return None;
                }
                state.top = top;
                at
            }
        };
        state.slots_used += 1;
        Some(Slot {
            arena: Arc::clone(self),
            at,
            size,
            length,
        })
    }

    fn put(&self, at: usize, size: usize) {
        let mut state = self.state();
        state.free[size].push(at);
        state.slots_used -= 1;
        if state.slots_used == 0 && state.top > KEPT_BYTES_MAX {
            let used = u64::try_from(state.top).unwrap_or(u64::MAX);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // If the kernel does not take it back, we have it for the next time.
            let _ = rustix::fs::fallocate(&self.file, flags, 0, used);
            *state = State::default();
        }
    }

    /// The state is whole at any time, also after a panic elsewhere.
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that nobody else has, and that replicas on this machine will see.
pub struct Slot {
    arena: Arc<Arena>,
    at: usize,
    size: usize,
    length: usize,
}

impl Slot {
    fn start(&self) -> NonNull<u8> {
        // SAFETY: `Arena::take` gives out slots that end inside the mapping.
        unsafe { self.arena.mapping.base.add(self.at) }
    }

    /// Its memory, with whatever was in it before.
    pub fn room(&mut self) -> &mut [u8] {
        // SAFETY: a slot is inside the mapping, which it keeps, and no two slots have a byte in common. No
        // replica looks at it: it would have been told of it only after `freeze`.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.length) }
    }

    /// The bytes, for as long as somebody has them. Then the memory is used again.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as in `room`; nobody can write to it through `&self`, and replicas map it for reading only.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.length) }
    }
}

impl AsMut<[u8]> for Slot {
    fn as_mut(&mut self) -> &mut [u8] {
        self.room()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.arena.put(self.at, self.size);
    }
}

/// What one replica may still look at, by entry. Slots that are left when this is dropped are never reused; call
/// [`Loans::end`] first if they can be.
#[derive(Default)]
pub(super) struct Loans {
    entries: VecDeque<(u64, Bytes)>,
}

impl Loans {
    /// The bytes of the next entry are lent.
    pub(super) fn add(&mut self, entry: u64, bytes: Bytes) {
        self.entries.push_back((entry, bytes));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Nobody looks at the bytes of all entries up to that one any more.
    pub(super) fn end(&mut self, entry: u64) {
        while self.entries.front().is_some_and(|(at, _)| *at <= entry) {
            self.entries.pop_front();
        }
    }
}

impl Drop for Loans {
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.entries));
    }
}

/// The arena of a volume, as a replica on the same machine sees it.
pub(super) struct Borrowed {
    mapping: Mapping,
    /// Keeps the connection open for as long as something of the arena is in use here.
    _connection: OwnedFd,
}

impl Borrowed {
    /// Maps the arena of the process at the other end of a connection.
    pub(super) fn open(stream: &UnixStream, lend: &Lend) -> io::Result<Arc<Borrowed>> {
        let refused = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why.to_owned()));
        let Some(process) = stream.peer_cred()?.pid() else {
            return refused("the other process is not known here");
        };
        let file = File::open(format!("/proc/{process}/fd/{}", lend.descriptor))?;
        let stat = file.metadata()?;
        if (stat.dev(), stat.ino(), stat.size()) != (lend.device, lend.inode, lend.length) {
            return refused("it is another file here");
        }
        // A file that could become shorter would end this process when it looks at what is gone.
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return refused("it could become shorter");
        }
        let length = usize::try_from(lend.length).unwrap_or(usize::MAX);
        Ok(Arc::new(Borrowed {
            mapping: Mapping::new(&file, length, ProtFlags::READ)?,
            _connection: stream.as_fd().try_clone_to_owned()?,
        }))
    }

    /// The bytes at a place, if there are as many.
    pub(super) fn bytes(self: &Arc<Borrowed>, at: u64, length: usize) -> Option<Bytes> {
        let start = self.mapping.range(usize::try_from(at).ok()?, length)?;
        Some(Bytes::from_owner(Part {
            start,
            length,
            _of: Arc::clone(self),
        }))
    }
}

/// Bytes of a borrowed arena.
struct Part {
    start: NonNull<u8>,
    length: usize,
    _of: Arc<Borrowed>,
}

// SAFETY: it is a range of a mapping, which belongs to no thread, and nothing here writes to it.
unsafe impl Send for Part {}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range is inside the mapping, which this keeps. The volume that lent it writes there again
        // only when this is gone or the entry is answered, which is after the last look at it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_again_when_nobody_has_it_any_more_and_not_before() {
        // Fails if two writes share memory, or memory is never used again.
        let arena = Arena::new().unwrap();
        let mut first = arena.take(5000).unwrap();
        first.room().fill(1);
        let first = first.freeze();
        let part = first.slice(4000..4010);
        let at = arena.place_of(&first).unwrap();
        assert_eq!(arena.place_of(&part).unwrap(), at + 4000);
        drop(first);
        let mut second = arena.take(8 << 10).unwrap();
        second.room().fill(2);
        assert_eq!(&part[..], [1; 10]);
        drop(part);
        let third = arena.take(8 << 10).unwrap().freeze();
        assert_eq!(arena.place_of(&third), Some(at));
        assert_eq!(second.as_ref(), [2; 8 << 10]);
        assert!(arena.place_of(&Bytes::from_static(b"elsewhere")).is_none());
    }

    #[test]
    fn there_is_an_end_to_it_and_unused_memory_is_given_back() {
        // Fails if an arena hands out more than it has, or keeps for ever what was needed once.
        let arena = Arena::new().unwrap();
        assert!(arena.take(SLOT_BYTES_MAX + 1).is_none());
        let mut slots = Vec::new();
        while let Some(mut slot) = arena.take(SLOT_BYTES_MAX) {
            slot.room().fill(3);
            slots.push(slot);
        }
        assert_eq!(slots.len(), ARENA_BYTES / SLOT_BYTES_MAX);
        assert!(arena.take(1).is_none());
        let taken = || arena.file.metadata().unwrap().blocks() * 512;
        assert_eq!(taken(), 128 << 20);
        drop(slots);
        assert_eq!(taken(), 0);
        assert!(arena.take(SLOT_BYTES_MAX).is_some());
    }

    #[tokio::test]
    async fn what_is_borrowed_is_what_was_lent_and_keeps_the_connection_open() {
        // Fails if a replica sees other bytes, sees beyond the arena, or hangs up before the last of them is gone.
        let arena = Arena::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let borrowed = Borrowed::open(&theirs, &arena.lend().unwrap()).unwrap();
        let mut slot = arena.take(4096).unwrap();
        slot.room().fill(7);
        let lent = slot.freeze();
        let at = arena.place_of(&lent).unwrap();
        let seen = borrowed.bytes(at, 4096).unwrap();
        assert_eq!(seen, lent);
        let end = u64::try_from(ARENA_BYTES).unwrap();
        assert!(borrowed.bytes(end - 10, 11).is_none());
        assert!(borrowed.bytes(u64::MAX, 2).is_none());
        drop(theirs);
        drop(borrowed);
        let part = seen.slice(10..11);
        drop(seen);
        let mut byte = [0];
        let blocked = ours.try_read(&mut byte).unwrap_err();
        assert_eq!(blocked.kind(), io::ErrorKind::WouldBlock);
        drop(part);
        ours.readable().await.unwrap();
        assert_eq!(ours.try_read(&mut byte).unwrap(), 0);
    }

    #[tokio::test]
    async fn a_file_that_is_not_the_one_or_could_become_shorter_is_not_borrowed() {
        // Fails if a wrong number makes a replica map another file, or one that could be cut under it.
        let (_ours, theirs) = UnixStream::pair().unwrap();
        let arena = Arena::new().unwrap();
        let lend = arena.lend().unwrap();
        let other = Lend {
            inode: lend.inode + 1,
            ..lend
        };
        assert!(Borrowed::open(&theirs, &other).is_err());
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let stat = file.metadata().unwrap();
        let cuttable = Lend {
            descriptor: u32::try_from(file.as_raw_fd()).unwrap(),
            length: 4096,
            device: stat.dev(),
            inode: stat.ino(),
        };
        assert!(Borrowed::open(&theirs, &cuttable).is_err());
    }
}
