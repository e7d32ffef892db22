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
//! **Growth.** The kernel caches no attribute of the file, so whoever looks at its size sees the size of that
//! moment. That alone is not enough: the kernel throws an answer about the size away when a write has ended
//! while it was on its way, and then refuses to read where it believes the end to be. [`Server::grown`]
//! therefore tells the new size instead of waiting to be asked; when it has returned, `stat`,
//! `LOOP_SET_CAPACITY` and reads all know it, under any load.
//!
//! **Death of the server.** The connection belongs to the open `/dev/fuse`, not to a process. Whoever has a
//! duplicate of [`Server::fd`] (sent with [`crate::sys::fdpass`]) keeps it alive: while there is no server,
//! consumers wait. [`Server::resume`] goes on where the dead one stopped, on every kernel: what was taken and not
//! answered stands in memory that is kept beside the connection ([`Server::requests`], [`journal`]), and is done
//! first. Numbers and handles are constants, so nothing else is to be handed over. When the last duplicate is closed,
//! every request fails with ENOTCONN: a filesystem on top stops, and [`dismantle`] clears what is left.
//! That is why all readers share one descriptor: what was taken through a clone of it
//! (`FUSE_DEV_IOC_CLONE`) fails with the clone. (Linux 6.9 and later can deliver such requests again. One way that
//! works on every kernel is better than two, so that is not used.)
//!
//! A successor has to come before anything else: who asks about a loop device (`loopdev::list`,
//! `volume::observe`) has the kernel ask the device's file, and waits too while nobody serves it.
//!
//! **Space.** A loop device on the file passes discards on as holes ([`Backing::zero`]), so `fstrim` of the
//! filesystem on top gives the volume's space back. The device takes its unit for that from STATFS.
//!
//! **A write may be done twice**, by the dead server and by its successor. In between nobody has been told of
//! it, so the consumer has not written to the same place again; but a write that the dead server left on its
//! way must not arrive later than what the successor is asked afterwards. Whoever is behind [`Backing`]
//! fences its predecessor before it serves (the engine's generations do), and [`Server::leave`] waits until
//! nothing is under way.
//!
//! **Errors.** Medium → EIO, NoSpace → ENOSPC, ReadOnly → EROFS, OutOfRange → ENXIO. NotReady is not told: a
//! filesystem on top would stop at an error that waiting could have cured. The request is kept and asked
//! again, without a limit, or for [`Options::patience`] and then fails with ETIMEDOUT. NoSpaceYet is not told either,
//! and always asked again without a limit.
//!
//! **Memory.** A server is on the way of the machine's own writes: should it wait for memory that only its own
//! writes can free, all stands still. The readers say so to the kernel ([`crate::sys::fuse::flush_io`]);
//! threads of a backing that allocate while they write should say it too.
//!
//! Invariant: nothing that the kernel sends can panic; what is not known is answered ENOSYS.
//! Invariant: every request that was taken is answered once, also if the backing loses the [`Reply`].

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

pub use dismantle::dismantle;
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
/// Every call returns at once and is answered by its [`Reply`], now or later, from any thread. Requests come
/// from several threads, and are independent of each other: one that was not answered yet is in no order to
/// the others. Ranges lie within what [`Backing::size`] has answered.
pub trait Backing: Send + Sync + 'static {
    /// How many bytes there are now. Never less than before.
    fn size(&self) -> u64;

    /// Whether it may only be read.
    fn read_only(&self) -> bool {
        false
    }

    /// Read a range: exactly `len` bytes, in any number of pieces.
    fn read(&self, offset: u64, len: u32, reply: Reply<Chunks>);

    /// Write a range. With `fua` it is durable when answered. The data is a part of the buffer that it was
    /// received into, and begins at a multiple of 4096 in memory; who keeps it for long should copy it.
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
    /// There is no room now, and whoever asked waits until there is.
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
