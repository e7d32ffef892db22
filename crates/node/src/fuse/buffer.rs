//! Where requests are read into.
//!
//! A process that is killed while the kernel copies a request into its memory goes on copying; but a page that is not
//! there is not fetched for it any more, and then the kernel gives the request up: EIO to the consumer, although a
//! successor is about to come. So all of this memory is there before anything is read into it.

use std::os::fd::AsFd;

use bytes::Bytes;

use super::REQUEST_BYTES_MAX;
use super::abi;
use super::connection::PAGE_BYTES;
use crate::sys::fuse as device;
use crate::sys::resident::Room;

/// What a write's data begins behind.
const WRITE_HEAD_BYTES: usize = size_of::<abi::InHeader>() + size_of::<abi::WriteIn>();
const DATA_BYTES_MAX: usize = 1 << 20;
const _: () = assert!(DATA_BYTES_MAX == 1 << REQUEST_BYTES_MAX.trailing_zeros());
/// The largest request, and the alignment before it.
const REQUEST_ROOM_BYTES: usize = PAGE_BYTES + WRITE_HEAD_BYTES + DATA_BYTES_MAX;
/// One room serves many small writes.
const ROOM_BYTES: usize = 2 * REQUEST_ROOM_BYTES.next_multiple_of(PAGE_BYTES);
/// How many full rooms are kept, until nobody has a part of them any more and they can be used again.
const FULL_ROOMS_MAX: usize = 1;

/// Where requests are read into. A write's data is handed out as a part of it; the room behind is used for
/// the next requests, and the whole again when nobody has a part of it any more.
pub(super) struct RequestBuffer {
    room: Room,
    full: Vec<Room>,
    request_bytes: usize,
}

impl RequestBuffer {
    pub(super) fn new() -> rustix::io::Result<Self> {
        Ok(RequestBuffer {
            room: Room::new(ROOM_BYTES)?,
            full: Vec::new(),
            request_bytes: 0,
        })
    }

    /// Reads one request.
    pub(super) fn read(&mut self, fuse: impl AsFd) -> rustix::io::Result<()> {
        self.request_bytes = 0;
        if self.room.free().len() < REQUEST_ROOM_BYTES && !self.room.start_over() {
            let next = match self.full.iter_mut().position(Room::start_over) {
                Some(index) => self.full.swap_remove(index),
                None => Room::new(ROOM_BYTES)?,
            };
            let full = std::mem::replace(&mut self.room, next);
            // One that is not kept lives as long as the last part of it.
            if self.full.len() < FULL_ROOMS_MAX {
                self.full.push(full);
            }
        }
        // So that the data of a write lies on a page's boundary, as direct I/O further down likes it.
        let at = self.room.taken() + WRITE_HEAD_BYTES;
        self.room.skip(at.next_multiple_of(PAGE_BYTES) - at);
        self.request_bytes = device::read_request(fuse, self.room.free_mut())?;
        Ok(())
    }

    /// The request that was read last.
    pub(super) fn request(&self) -> &[u8] {
        let free = self.room.free();
        free.get(..self.request_bytes).unwrap_or(free)
    }

    /// The same, to be kept.
    pub(super) fn take(&mut self) -> Bytes {
        self.room.take(std::mem::take(&mut self.request_bytes))
    }
}
