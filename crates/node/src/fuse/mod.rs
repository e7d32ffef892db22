//! A volume as a file: a FUSE mount with the one file `volume`, whose bytes are the volume's.
//!
//! With a loop device on that file, a volume that lives elsewhere becomes a block device on any Linux, with
//! no kernel module and no other program:
//!
//! ```text
//!   filesystem ── loop device (direct I/O) ── MOUNT_POINT/volume ── /dev/fuse ── Server ── Backing
//! ```
//!
//! The happy path is [`Server::mount`] → `volume::attach(server.file(), …)` → … → `volume::detach` →
//! [`Server::unmount`]. After the backing has grown, [`Server::grown`], and then `volume::grow_device`.
//!
//! **Growth.** The kernel caches no attribute of the file, so a look at its size shows the current size. That alone is
//! not enough: if a write ends while an answer about the size is on its way, the kernel discards the answer, and then
//! refuses to read past the end that it believes in. So [`Server::grown`] tells the kernel the new size instead of
//! waiting to be asked. When it has returned, `stat`, `LOOP_SET_CAPACITY` and reads all know the size, under any load.
//!
//! **Death of the server.** The connection belongs to the open `/dev/fuse`, not to a process. A process with a
//! duplicate of [`Server::fd`] (sent with [`crate::sys::fdpass`]) keeps it alive; while there is no server, consumers
//! wait. [`Server::resume`] goes on where the dead server stopped, on every kernel. It first serves the requests that
//! were taken and not answered, from memory that is kept with the connection ([`Server::requests`], [`journal`]).
//! Numbers and handles are constants, so nothing else has to be handed over. When the last duplicate is closed, every
//! request fails with ENOTCONN: a filesystem on top stops, and [`dismantle`] clears what is left. So all readers share
//! one descriptor: requests taken through a clone of it (`FUSE_DEV_IOC_CLONE`) would fail with the clone. (Linux 6.9
//! and later can deliver such requests again. One way that works on every kernel is better than two, so that is not
//! used.)
//!
//! A successor must come before anything else. Asking about a loop device (`loopdev::list`, `volume::observe`) makes
//! the kernel ask the device's file, and so waits too while nobody serves it.
//!
//! **Space.** A loop device on the file passes discards on as holes ([`Backing::zero`]), so `fstrim` of the
//! filesystem on top gives the volume's space back. The device takes its unit for that from STATFS.
//!
//! **A write may be done twice**, by the dead server and by its successor. Nobody has been told of it in between, so
//! the consumer has not written to the same place again. But a write that the dead server left in flight must not
//! arrive later than requests that the successor gets afterwards. So a [`Backing`] must fence its predecessor before
//! it serves (the engine's generations do), and [`Server::leave`] waits until nothing is in flight.
//!
//! **Errors.** Medium → EIO, NoSpace → ENOSPC, ReadOnly → EROFS, OutOfRange → ENXIO. NotReady is not passed on: a
//! filesystem on top would stop at an error that waiting could have cured. The request is kept and asked again,
//! without a limit, or for [`Options::patience`], and then fails with ETIMEDOUT. NoSpaceYet is not passed on either,
//! and is always asked again without a limit.
//!
//! **Memory.** A server is in the path of the machine's own writes. If it waited for memory that only its own writes
//! can free, everything would stop. The readers tell the kernel so ([`crate::sys::fuse::flush_io`]); threads of a
//! backing that allocate while they write should do the same.
//!
//! Invariant: nothing that the kernel sends can panic; an unknown request is answered with ENOSYS.
//! Invariant: every request that was taken is answered once, even if the backing loses the [`Reply`].

mod abi;
mod buffer;
mod connection;
mod dismantle;
mod journal;
mod reply;
mod request;
mod server;
mod tree;
mod unserved;
mod wait;

use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use dismantle::{detach_dead, dismantle};
pub use reply::Reply;
pub use server::Server;
pub use unserved::{Standing, abort, standing};

/// The name of the one file.
pub const VOLUME_NAME: &str = "volume";

/// The most that is read or written by one request.
pub const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Data as a list of pieces, so that nobody has to copy it into one.
pub type Chunks = Vec<Bytes>;

/// What is shown as a file.
///
/// Every call returns at once and is answered through its [`Reply`], now or later, from any thread. Requests come from
/// several threads and are independent: there is no order among unanswered ones. Ranges lie within the size that
/// [`Backing::size`] has returned.
pub trait Backing: Send + Sync + 'static {
    /// How many bytes there are now. Never less than before.
    fn size(&self) -> u64;

    /// Whether it may only be read.
    fn read_only(&self) -> bool {
        false
    }

    /// Read a range: exactly `len` bytes, in any number of pieces.
    fn read(&self, offset: u64, len: u32, reply: Reply<Chunks>);

    /// Write a range. With `fua` it is durable when answered. The data is a part of the receive buffer, and begins at
    /// a multiple of 4096 in memory; copy it to keep it for long.
    fn write(&self, offset: u64, data: Bytes, fua: bool, reply: Reply<()>);

    /// Make a range read as zeros. With `deallocate` its space should be given back.
    fn zero(&self, offset: u64, len: u64, deallocate: bool, reply: Reply<()>);

    /// Make every write durable that was answered before.
    fn flush(&self, reply: Reply<()>);
}

/// Why a volume could not do what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackingError {
    /// The medium failed for this range.
    #[error("the medium could not be read or written")]
    Medium,
    /// There is no room left behind a thin volume.
    #[error("no space is left behind the volume")]
    NoSpace,
    /// There is no space now, and the requester waits until there is.
    #[error("no space is left behind the volume now")]
    NoSpaceYet,
    /// The volume cannot serve now and may later.
    #[error("the volume cannot serve now")]
    NotReady,
    /// The volume may not be written to.
    #[error("the volume is read-only")]
    ReadOnly,
    /// The range is outside of the volume.
    #[error("the range is outside of the volume")]
    OutOfRange,
}

/// How a file is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How many threads take requests.
    pub readers: usize,
    /// How long a request waits for a volume that is not ready; without a limit if none.
    pub patience: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            readers: 2,
            patience: None,
        }
    }
}

/// What kernel and server have agreed on. A successor needs it, because the kernel says it only once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiated {
    /// The protocol's minor version.
    pub minor: u32,
    /// What both sides can, as the bits of the protocol.
    pub flags: u64,
}

/// What is kept of a connection for a successor.
#[derive(Debug)]
pub struct Kept {
    /// A duplicate of [`Server::fd`].
    pub fuse: OwnedFd,
    /// A duplicate of [`Server::requests`].
    pub requests: OwnedFd,
    /// What it was begun with.
    pub negotiated: Negotiated,
}

impl Kept {
    /// That of a server.
    pub fn of(server: &Server) -> std::io::Result<Kept> {
        Ok(Kept {
            fuse: server.fd().try_clone_to_owned()?,
            requests: server.requests().try_clone_to_owned()?,
            negotiated: server.negotiated(),
        })
    }
}
