//! Memory that requests are read into.
//!
//! If a process is killed while the kernel copies a request into its memory, the kernel goes on copying, but no longer
//! fetches missing pages. At a missing page it gives the request up: the consumer gets EIO, although a successor is
//! about to come. So all of this memory is resident before anything is read into it. It belongs to the [`Journal`],
//! where a successor finds the requests that were taken.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::io::Errno;

use super::REQUEST_BYTES_MAX;
use super::abi;
use super::connection::{PAGE_BYTES, Taken};
use super::journal::{Entry, Journal};
use crate::sys::fuse as device;
use crate::sys::resident::Room;

/// What a write's data begins behind.
const WRITE_HEAD_BYTES: usize = size_of::<abi::InHeader>() + size_of::<abi::WriteIn>();
const DATA_BYTES_MAX: usize = 1 << 20;
const _: () = assert!(DATA_BYTES_MAX == 1 << REQUEST_BYTES_MAX.trailing_zeros());
/// The largest request, and the alignment before it.
const REQUEST_ROOM_BYTES: usize = PAGE_BYTES + WRITE_HEAD_BYTES + DATA_BYTES_MAX;
/// One room serves many small writes.
pub(super) const ROOM_BYTES: usize = 2 * REQUEST_ROOM_BYTES.next_multiple_of(PAGE_BYTES);
/// The pause when too many requests are under way for another one.
const CROWD_PAUSE: Duration = Duration::from_millis(1);

/// The buffer for requests. A write's data is handed out as a part of it. The space behind is used for the next
/// requests, and the whole again as soon as nobody has a part of it: what was used last is still in the processor's
/// cache.
pub(super) struct RequestBuffer {
    journal: Arc<Journal>,
    /// The room, and where it is in the journal.
    room: (Room, u64),
    /// The entry for the request that is read next, or was read last.
    entry: Option<Entry>,
    request_bytes: usize,
}

impl RequestBuffer {
    pub(super) fn new(journal: &Arc<Journal>) -> rustix::io::Result<Self> {
        Ok(RequestBuffer {
            room: journal.room()?,
            journal: Arc::clone(journal),
            entry: None,
            request_bytes: 0,
        })
    }

    /// Reads one request.
    pub(super) fn read(&mut self, fuse: impl AsFd) -> rustix::io::Result<()> {
        self.request_bytes = 0;
        let Some(entry) = self.entry.or_else(|| self.journal.begin()) else {
            std::thread::sleep(CROWD_PAUSE);
            return Err(Errno::AGAIN);
        };
        self.entry = Some(entry);
        let (room, _) = &mut self.room;
        if !room.start_over() && room.free().len() < REQUEST_ROOM_BYTES {
            let next = self.journal.room()?;
            self.journal.keep(std::mem::replace(&mut self.room, next));
        }
        // So that the data of a write lies on a page's boundary, as direct I/O further down likes it.
        let (room, place) = &mut self.room;
        let at = room.taken() + WRITE_HEAD_BYTES;
        room.skip(at.next_multiple_of(PAGE_BYTES) - at);
        // What was read here before is none of this request.
        let head = room.free_mut().get_mut(..WRITE_HEAD_BYTES);
        head.ok_or(Errno::NOBUFS)?.fill(0);
        let offset = u64::try_from(room.taken()).map_err(|_| Errno::OVERFLOW)?;
        self.journal.reading(entry, *place + offset);
        self.request_bytes = device::read_request(fuse, room.free_mut())?;
        Ok(())
    }

    /// The request that was read last.
    pub(super) fn request(&self) -> &[u8] {
        let free = self.room.0.free();
        free.get(..self.request_bytes).unwrap_or(free)
    }

    /// Records that the request was taken, with its number, and returns the handle to answer it with, and its bytes if
    /// they are to be kept.
    pub(super) fn take(&mut self, unique: u64) -> Option<(Taken, Option<Bytes>)> {
        let entry = self.entry.take()?;
        let taken = Taken { unique, entry };
        if self.journal.taken_here(entry, unique, self.request()) {
            return Some((taken, None));
        }
        let length = std::mem::take(&mut self.request_bytes);
        self.journal.taken_in_room(entry, unique, length);
        Some((taken, Some(self.room.0.take(length))))
    }
}

impl Drop for RequestBuffer {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            self.journal.free(entry);
        }
    }
}
