//! Requests that were taken and not answered, kept where a successor finds them.
//!
//! The kernel delivers a request once. A request that a server had taken when it died would wait for ever unless
//! somebody knows of it. So requests are read into a memory file that outlives the server. The process that keeps the
//! connection keeps this file with it.
//!
//! ```text
//!   table: 1024 entries of 128 bytes        rooms: where requests are read into, as many as are needed
//!   ┌────────┬─────────┬─────────┬─────     ┌──────────────┬──────────────┬────
//!   │ header │ entry 1 │ entry 2 │ …        │ room 0       │ room 1       │ …
//!   └────────┴─────────┴─────────┴─────     └──────────────┴──────────────┴────
//! ```
//!
//! An entry goes through these states. The state is written last, so that it never promises what is not there:
//!
//! ```text
//!   Free ─► Reading ─────► Taken ───────────► Answering ─► Free
//!           the header     the request is     the result of a change is here;
//!           was zeroed     here or in its     the kernel may have it already
//!           before         room
//! ```
//!
//! What a successor does with an entry:
//! - **Reading**: if the kernel has written a header, the request was taken. The kernel writes a request without a
//!   pause even if the process is killed meanwhile, because all of the memory is resident ([`crate::sys::resident`]),
//!   and a successor begins only when its predecessor is gone.
//! - **Taken**: the successor serves it. A write may then be done twice, and nobody was told in between.
//! - **Answering**: the successor answers with the recorded result. It does not make the change again: the requester
//!   may have the answer, and may have changed the same place since. If the kernel already has the answer, it says so,
//!   and that is all.
//!
//! All leftover requests are served before anything new is taken. The kernel may have given up a request that is found
//! here (it does so when it cannot write the request to the process). Even then, whatever the requester does next
//! comes later.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rustix::io::{Errno, Result};
use zerocopy::FromBytes;

use super::abi::{InHeader, WriteIn};
use super::buffer::ROOM_BYTES;
use crate::sys::resident::{Memory, MemoryFile, Room, Words};

/// How many requests can be in flight. The kernel has 512 in the background, and a few more.
const ENTRIES: usize = 1024;
const ENTRY_WORDS: usize = 16;
const TABLE_BYTES: usize = ENTRIES * ENTRY_WORDS * size_of::<u64>();
/// The first word of the table: its magic number and format. Code that changes the format must still read this one.
const FORM: u64 = u64::from_be_bytes(*b"trellis1");

/// The words of an entry. The request itself stands from `INLINE` on, if it is short.
const STATE: usize = 0;
const UNIQUE: usize = 1;
const OFFSET: usize = 2;
const LENGTH: usize = 3;
const RESULT: usize = 4;
const INLINE: usize = 5;
/// The longest request that needs no room: all requests without data or a name. A write of a byte is longer.
const INLINE_BYTES_MAX: usize = size_of::<InHeader>() + size_of::<WriteIn>();
const _: () = assert!(INLINE_BYTES_MAX <= (ENTRY_WORDS - INLINE) * size_of::<u64>());

mod state {
    pub const FREE: u64 = 0;
    pub const READING: u64 = 1;
    /// Taken; the request stands in the entry.
    pub const HERE: u64 = 2;
    /// Taken; the request stands in its room.
    pub const IN_ROOM: u64 = 3;
    pub const ANSWERING: u64 = 4;
}

/// The entry of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(usize);

/// What a change came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// It was made; a write tells how much was written.
    Made(Option<u32>),
    /// It was refused with this error.
    Refused(Errno),
}

/// A request that a predecessor has left.
pub(super) enum Left {
    /// It was taken.
    Taken(Entry, Bytes),
    /// It was done, and may be answered.
    Answering(Entry, u64, Done),
}

/// The requests of one connection.
pub(super) struct Journal {
    shared: Arc<Shared>,
    free: Mutex<Vec<Entry>>,
}

/// What a room needs to know when it is unmapped.
struct Shared {
    file: MemoryFile,
    words: Words,
    rooms: Mutex<Rooms>,
}

/// How many rooms stay mapped when they are full, to be used again. To map one takes longer than to read two requests
/// of a MiB. This is enough for what a loop device with a few large requests has under way. It is given back when
/// nothing is asked for a while ([`Journal::give_back`]).
const KEPT_ROOMS_MAX: usize = 8;

/// Which rooms are there.
#[derive(Default)]
struct Rooms {
    /// Those that are not mapped.
    unused: Vec<u64>,
    /// Full ones with their places, which can be used again when nobody looks at them any more.
    full: Vec<(Room, u64)>,
    ever: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wide(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

fn place_of(room: u64) -> u64 {
    wide(TABLE_BYTES) + room * wide(ROOM_BYTES)
}

impl Journal {
    /// A new one.
    pub(super) fn new() -> Result<Journal> {
        let file = MemoryFile::new("trellis-requests")?;
        file.extend(wide(TABLE_BYTES))?;
        let journal = Journal::on(file)?;
        if let Some(form) = journal.shared.words.all().first() {
            form.store(FORM, Ordering::Release);
        }
        *lock(&journal.free) = (1..ENTRIES).rev().map(Entry).collect();
        Ok(journal)
    }

    fn on(file: MemoryFile) -> Result<Journal> {
        let shared = Shared {
            words: Words::new(Memory::map(&file, 0, TABLE_BYTES)?),
            file,
            rooms: Mutex::default(),
        };
        Ok(Journal {
            shared: Arc::new(shared),
            free: Mutex::default(),
        })
    }

    /// The journal of a predecessor that is gone, and the requests that it left, in the order in which they were
    /// taken.
    pub(super) fn resume(file: MemoryFile) -> Result<(Journal, Vec<Left>)> {
        let journal = Journal::on(file)?;
        let form = journal.shared.words.all().first();
        if form.is_none_or(|form| form.load(Ordering::Acquire) != FORM) {
            return Err(Errno::INVAL);
        }
        let length = journal
            .shared
            .file
            .length()?
            .saturating_sub(wide(TABLE_BYTES));
        let rooms = length / wide(ROOM_BYTES);
        let mut mapped: Vec<Option<Arc<Memory>>> = Vec::new();
        mapped.resize_with(usize::try_from(rooms).map_err(|_| Errno::INVAL)?, || None);
        lock(&journal.shared.rooms).ever = rooms;
        let mut left = Vec::new();
        for entry in (1..ENTRIES).map(Entry) {
            match journal.left(entry, &mut mapped)? {
                Some((unique, request)) => left.push((unique, request)),
                None => journal.free(entry),
            }
        }
        // Rooms that nobody looks at can be used again; the others are given back when they have been looked at.
        let unused = (0..rooms)
            .zip(&mapped)
            .filter(|(_, memory)| memory.is_none());
        for (room, _) in unused {
            journal.shared.give_back(room);
        }
        left.sort_by_key(|(unique, _)| *unique);
        Ok((journal, left.into_iter().map(|(_, left)| left).collect()))
    }

    /// What stands in an entry, with the number of the request.
    fn left(
        &self,
        entry: Entry,
        mapped: &mut [Option<Arc<Memory>>],
    ) -> Result<Option<(u64, Left)>> {
        let unique = self.load(entry, UNIQUE);
        match self.load(entry, STATE) {
            state::READING => {
                let Some(request) = self.in_room(entry, size_of::<InHeader>(), mapped)? else {
                    return Ok(None);
                };
                let header = InHeader::read_from_bytes(&request).map_err(|_| Errno::INVAL)?;
                let length = usize::try_from(header.len).unwrap_or(usize::MAX);
                if length < size_of::<InHeader>() {
                    // Nothing was read.
                    return Ok(None);
                }
                let request = self.in_room(entry, length, mapped)?;
                Ok(request.map(|request| (header.unique, Left::Taken(entry, request))))
            }
            state::HERE => {
                let length = usize::try_from(self.load(entry, LENGTH)).unwrap_or(usize::MAX);
                let words = self.of(entry).get(INLINE..).unwrap_or_default();
                let load = |word: &AtomicU64| word.load(Ordering::Acquire).to_ne_bytes();
                let mut request: Vec<u8> = words.iter().flat_map(load).collect();
                request.truncate(length);
                Ok(Some((unique, Left::Taken(entry, request.into()))))
            }
            state::IN_ROOM => {
                let length = usize::try_from(self.load(entry, LENGTH)).unwrap_or(usize::MAX);
                let request = self.in_room(entry, length, mapped)?;
                Ok(request.map(|request| (unique, Left::Taken(entry, request))))
            }
            state::ANSWERING => {
                let done = Done::from_word(self.load(entry, RESULT));
                Ok(Some((unique, Left::Answering(entry, unique, done))))
            }
            _ => Ok(None),
        }
    }

    /// The first bytes of the request of an entry, in its room.
    fn in_room(
        &self,
        entry: Entry,
        length: usize,
        mapped: &mut [Option<Arc<Memory>>],
    ) -> Result<Option<Bytes>> {
        let Some(offset) = self.load(entry, OFFSET).checked_sub(wide(TABLE_BYTES)) else {
            return Ok(None);
        };
        let room = offset / wide(ROOM_BYTES);
        let start = usize::try_from(offset % wide(ROOM_BYTES)).map_err(|_| Errno::INVAL)?;
        let index = usize::try_from(room).map_err(|_| Errno::INVAL)?;
        let Some(place) = mapped.get_mut(index) else {
            return Ok(None);
        };
        if place.is_none() {
            *place = Some(Arc::new(self.map(room)?));
        }
        Ok(place.as_ref().and_then(|memory| memory.part(start, length)))
    }

    /// Maps a room, which can be used by others again when nobody looks at it any more.
    fn map(&self, room: u64) -> Result<Memory> {
        let memory = Memory::map(&self.shared.file, place_of(room), ROOM_BYTES)?;
        // After the end of this journal, rooms are a successor's.
        let shared = Arc::downgrade(&self.shared);
        Ok(memory.when_unmapped(move || {
            if let Some(shared) = shared.upgrade()
                && !shared.is_needed(room)
            {
                shared.give_back(room);
            }
        }))
    }

    /// Room for requests, and where in the file it is.
    pub(super) fn room(&self) -> Result<(Room, u64)> {
        let room = {
            let mut rooms = lock(&self.shared.rooms);
            let again = rooms
                .full
                .iter_mut()
                .position(|(room, _)| room.start_over());
            if let Some(index) = again {
                return Ok(rooms.full.remove(index));
            }
            match rooms.unused.pop() {
                Some(room) => room,
                None => {
                    let next = rooms.ever;
                    self.shared.file.extend(place_of(next + 1))?;
                    rooms.ever += 1;
                    next
                }
            }
        };
        Ok((Room::new(self.map(room)?), place_of(room)))
    }

    /// Takes a full room back. It is used again when nobody looks at it any more.
    pub(super) fn keep(&self, room: (Room, u64)) {
        let mut rooms = lock(&self.shared.rooms);
        if rooms.full.len() < KEPT_ROOMS_MAX {
            rooms.full.push(room);
        } else {
            // It lives as long as the last part of it. Then it is unmapped, which takes the lock.
            drop(rooms);
            drop(room);
        }
    }

    /// Whether full rooms are kept.
    pub(super) fn keeps_rooms(&self) -> bool {
        !lock(&self.shared.rooms).full.is_empty()
    }

    /// Gives the memory of the rooms back that are kept and that nobody looks at.
    pub(super) fn give_back(&self) {
        let unused: Vec<(Room, u64)> = {
            let mut rooms = lock(&self.shared.rooms);
            let is_unused = |(room, _): &mut (Room, u64)| room.start_over();
            rooms.full.extract_if(.., is_unused).collect()
        };
        // To unmap them takes the lock.
        drop(unused);
    }

    /// The file, for the process that keeps it.
    pub(super) fn file(&self) -> &MemoryFile {
        &self.shared.file
    }

    /// An entry for the next request; none if too many are under way.
    pub(super) fn begin(&self) -> Option<Entry> {
        lock(&self.free).pop()
    }

    /// A request is about to be read to that place of the file, where there is no header.
    pub(super) fn reading(&self, entry: Entry, offset: u64) {
        self.store(entry, OFFSET, offset);
        self.store(entry, STATE, state::READING);
    }

    /// The request was read, and can stand in its entry. Answers whether it can.
    pub(super) fn taken_here(&self, entry: Entry, unique: u64, request: &[u8]) -> bool {
        if request.len() > INLINE_BYTES_MAX {
            return false;
        }
        for (index, bytes) in request.chunks(size_of::<u64>()).enumerate() {
            let mut word = [0; size_of::<u64>()];
            if let Some(room) = word.get_mut(..bytes.len()) {
                room.copy_from_slice(bytes);
            }
            self.store(entry, INLINE + index, u64::from_ne_bytes(word));
        }
        self.taken(entry, unique, request.len(), state::HERE);
        true
    }

    /// The request was read, and stays in its room.
    pub(super) fn taken_in_room(&self, entry: Entry, unique: u64, length: usize) {
        self.taken(entry, unique, length, state::IN_ROOM);
    }

    fn taken(&self, entry: Entry, unique: u64, length: usize, state: u64) {
        self.store(entry, UNIQUE, unique);
        self.store(entry, LENGTH, wide(length));
        self.store(entry, STATE, state);
    }

    /// A change was made, or refused, and is about to be answered.
    pub(super) fn answering(&self, entry: Entry, done: Done) {
        self.store(entry, RESULT, done.word());
        self.store(entry, STATE, state::ANSWERING);
    }

    /// The request was answered.
    pub(super) fn free(&self, entry: Entry) {
        self.store(entry, STATE, state::FREE);
        lock(&self.free).push(entry);
    }

    fn of(&self, entry: Entry) -> &[AtomicU64] {
        self.shared.of(entry)
    }

    fn load(&self, entry: Entry, word: usize) -> u64 {
        self.shared.load(entry, word)
    }

    fn store(&self, entry: Entry, word: usize, value: u64) {
        if let Some(word) = self.of(entry).get(word) {
            word.store(value, Ordering::Release);
        }
    }
}

impl Shared {
    fn of(&self, entry: Entry) -> &[AtomicU64] {
        let first = entry.0 * ENTRY_WORDS;
        let words = self.words.all().get(first..first + ENTRY_WORDS);
        words.unwrap_or_default()
    }

    fn load(&self, entry: Entry, word: usize) -> u64 {
        let word = self.of(entry).get(word);
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Whether a request stands in the room that was taken and never answered: whoever leaves forgets such requests,
    /// and a successor serves them.
    fn is_needed(&self, room: u64) -> bool {
        let places = place_of(room)..place_of(room + 1);
        let stands_there = |entry| {
            self.load(entry, STATE) == state::IN_ROOM && places.contains(&self.load(entry, OFFSET))
        };
        (1..ENTRIES).map(Entry).any(stands_there)
    }

    /// Gives the memory of a room back, which can then be used again.
    fn give_back(&self, room: u64) {
        if let Err(errno) = self.file.give_back(place_of(room), ROOM_BYTES) {
            tracing::debug!(%errno, "memory of requests stays");
        }
        lock(&self.rooms).unused.push(room);
    }
}

/// Marks in the word of a result.
const WRITTEN: u64 = 1 << 62;
const REFUSED: u64 = 1 << 63;

impl Done {
    fn word(self) -> u64 {
        match self {
            Done::Made(None) => 0,
            Done::Made(Some(written)) => WRITTEN | u64::from(written),
            Done::Refused(errno) => REFUSED | u64::from(errno.raw_os_error().unsigned_abs()),
        }
    }

    fn from_word(word: u64) -> Done {
        let number = u32::try_from(word & u64::from(u32::MAX)).unwrap_or_default();
        if word & REFUSED != 0 {
            let raw = i32::try_from(number).unwrap_or_default();
            Done::Refused(Errno::from_raw_os_error(raw))
        } else if word & WRITTEN != 0 {
            Done::Made(Some(number))
        } else {
            Done::Made(None)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use zerocopy::IntoBytes;

    fn header(unique: u64, len: u32) -> InHeader {
        InHeader {
            unique,
            len,
            ..InHeader::default()
        }
    }

    fn next(journal: &Journal) -> (Journal, Vec<Left>) {
        let file = journal.file().as_fd().try_clone_to_owned().unwrap();
        Journal::resume(MemoryFile::of(file)).unwrap()
    }

    // Fails if a successor does not find a request that was taken, does a change again whose answer may have been seen,
    // or takes memory for a request that nobody read.
    #[test]
    fn a_successor_finds_what_was_left_in_every_state() {
        let journal = Journal::new().unwrap();
        let (mut room, place) = journal.room().unwrap();
        let entries: Vec<Entry> = (0..5).map(|_| journal.begin().unwrap()).collect();
        // A short one, one in its room, one that was read and not yet noted, one that was not read, one that was done.
        assert!(journal.taken_here(entries[0], 10, &[7; 80]));
        room.free_mut()[4096..4100].copy_from_slice(b"data");
        journal.reading(entries[1], place + 4096);
        assert!(!journal.taken_here(entries[1], 12, &[0; INLINE_BYTES_MAX + 1]));
        journal.taken_in_room(entries[1], 12, 4);
        let request = header(8, 44);
        room.free_mut()[8192..8232].copy_from_slice(request.as_bytes());
        room.free_mut()[8232..8236].copy_from_slice(b"body");
        journal.reading(entries[2], place + 8192);
        journal.reading(entries[3], place + 16384);
        journal.taken_in_room(entries[4], 14, 4);
        journal.answering(entries[4], Done::Made(Some(4096)));

        let (after, left) = next(&journal);
        let said: Vec<String> = left
            .iter()
            .map(|left| match left {
                Left::Taken(_, request) => {
                    let from = request.len().saturating_sub(4);
                    String::from_utf8_lossy(&request[from..]).into_owned()
                }
                Left::Answering(_, unique, done) => format!("{unique} {done:?}"),
            })
            .collect();
        // In the order in which they were made.
        assert_eq!(
            said,
            [
                "body",
                "\u{7}\u{7}\u{7}\u{7}",
                "data",
                "14 Made(Some(4096))"
            ]
        );
        // A room that is still looked at is not used for something else.
        let (_, other) = after.room().unwrap();
        assert_ne!(other, place);
        for left in left {
            match left {
                Left::Taken(entry, _) | Left::Answering(entry, ..) => after.free(entry),
            }
        }
        let (_, left) = next(&after);
        assert!(left.is_empty());
    }

    // Fails if the bytes of a request go with whoever has left without answering it.
    #[test]
    fn a_request_that_was_given_up_stands_where_it_was_taken() {
        let journal = Journal::new().unwrap();
        let (mut room, place) = journal.room().unwrap();
        let entry = journal.begin().unwrap();
        room.free_mut()[..4].copy_from_slice(b"data");
        journal.reading(entry, place);
        journal.taken_in_room(entry, 12, 4);
        drop(room.take(4));
        drop(room);
        // The place is not used for something else either.
        assert_ne!(journal.room().unwrap().1, place);
        let file = journal.file().as_fd().try_clone_to_owned().unwrap();
        drop(journal);
        let (_after, left) = Journal::resume(MemoryFile::of(file)).unwrap();
        assert!(matches!(&left[..], [Left::Taken(_, request)] if request[..] == *b"data"));
    }

    // Fails if a full room is mapped anew although nobody looks at it any more, is used while somebody does, or keeps its
    // memory when it is no longer needed.
    #[test]
    fn full_rooms_are_used_again_and_given_back() {
        let journal = Journal::new().unwrap();
        let (mut room, place) = journal.room().unwrap();
        room.free_mut()[..4].copy_from_slice(b"data");
        let data = room.take(4);
        let start = data.as_ptr();
        assert!(!journal.keeps_rooms());
        journal.keep((room, place));
        assert!(journal.keeps_rooms());
        let (other, elsewhere) = journal.room().unwrap();
        assert_ne!(elsewhere, place);
        journal.give_back();
        assert_eq!(&data[..], b"data");
        drop(data);
        let (mut room, again) = journal.room().unwrap();
        assert_eq!((again, room.free().as_ptr()), (place, start));
        assert!(!journal.keeps_rooms());
        assert_eq!(room.take(4)[..], *b"data", "it was unmapped meanwhile");
        journal.keep((room, place));
        journal.keep((other, elsewhere));
        journal.give_back();
        assert!(!journal.keeps_rooms());
        let (room, _) = journal.room().unwrap();
        assert_eq!(room.free()[..4], [0; 4], "its memory was not given back");
        // No more are kept than a few.
        let many: Vec<_> = (0..=KEPT_ROOMS_MAX)
            .map(|_| journal.room().unwrap())
            .collect();
        many.into_iter().for_each(|room| journal.keep(room));
        assert_eq!(lock(&journal.shared.rooms).full.len(), KEPT_ROOMS_MAX);
        let shared = Arc::downgrade(&journal.shared);
        drop(journal);
        assert!(shared.upgrade().is_none(), "kept rooms keep the journal");
    }

    // Fails if a result is told otherwise than it was noted.
    #[test]
    fn results_are_what_they_were() {
        for done in [
            Done::Made(None),
            Done::Made(Some(0)),
            Done::Made(Some(1 << 20)),
            Done::Refused(Errno::NOSPC),
        ] {
            assert_eq!(Done::from_word(done.word()), done);
        }
    }

    // Fails if memory that is something else is taken for requests.
    #[test]
    fn other_memory_is_refused() {
        let file = MemoryFile::new("test").unwrap();
        assert!(Journal::resume(file).is_err());
        let file = MemoryFile::new("test").unwrap();
        file.extend(wide(TABLE_BYTES)).unwrap();
        assert!(Journal::resume(file).is_err());
    }
}
