//! `/dev/fuse`: opening, mounting, waiting for and reading requests.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags};

use super::block::DeviceNumber;
use super::mount;

/// Where the kernel is asked for a connection.
pub const DEVICE: &str = "/dev/fuse";
/// The name under which mountinfo shows our mounts.
pub const FS_TYPE: &str = "fuse.trellis";

const SOURCE: &str = "trellis";
const NUMBER: DeviceNumber = DeviceNumber {
    major: 10,
    minor: 229,
};

/// Opens a connection that nothing is mounted on yet. Reading it does not block.
pub fn open() -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(DEVICE, flags, Mode::empty())
}

/// Whether the descriptor is a connection; makes it one that does not block.
pub fn check(fuse: BorrowedFd<'_>) -> Result<()> {
    let stat = rustix::fs::fstat(fuse)?;
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    if !is_device || DeviceNumber::from_stat(stat.st_rdev) != NUMBER {
        return Err(Errno::NODEV);
    }
    let flags = rustix::fs::fcntl_getfl(fuse)?;
    rustix::fs::fcntl_setfl(fuse, flags | OFlags::NONBLOCK)
}

/// Mounts the connection at a directory. Only the mounting user and the kernel's own workers (a loop device)
/// get in.
pub fn mount(fuse: BorrowedFd<'_>, directory: &Path, read_bytes_max: u32) -> Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let place = rustix::fs::open(directory, flags, Mode::empty())?;
    let user = rustix::process::geteuid().as_raw();
    let group = rustix::process::getegid().as_raw();
    let options = format!(
        "fd={},rootmode=40000,user_id={user},group_id={group},max_read={read_bytes_max}",
        fuse.as_raw_fd()
    );
    let options = std::ffi::CString::new(options).map_err(|_| Errno::INVAL)?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NOATIME;
    let target = mount::proc_path(&place);
    rustix::mount::mount(SOURCE, target, FS_TYPE, flags, Some(options.as_c_str()))
}

/// Unmounts the mount at `directory`. Never lazily: EBUSY if somebody uses it.
pub fn unmount(directory: &Path) -> Result<()> {
    rustix::mount::unmount(directory, UnmountFlags::NOFOLLOW)
}

/// The kernel's control files of all connections, mounted where no path leads.
#[derive(Debug)]
pub struct Control {
    root: OwnedFd,
}

impl Control {
    /// Mounts them. There is one instance of them, however often it is mounted.
    pub fn open() -> Result<Control> {
        let context = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
        let root = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        Ok(Control { root })
    }

    fn file(&self, connection: u32, name: &str, access: OFlags) -> Result<OwnedFd> {
        let path = format!("{connection}/{name}");
        rustix::fs::openat(&self.root, path, access | OFlags::CLOEXEC, Mode::empty())
    }

    /// How many requests of a connection wait; none if there is no such connection.
    pub fn waiting(&self, connection: u32) -> Result<Option<u64>> {
        let file = match self.file(connection, "waiting", OFlags::RDONLY) {
            Err(Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let mut text = [0; 32];
        let length = rustix::io::read(&file, &mut text)?;
        let text = text.get(..length).unwrap_or_default();
        let text = std::str::from_utf8(text).map_err(|_| Errno::INVAL)?;
        text.trim().parse().map(Some).map_err(|_| Errno::INVAL)
    }

    /// Ends a connection. One that has ended is none.
    pub fn abort(&self, connection: u32) -> Result<()> {
        match self.file(connection, "abort", OFlags::WRONLY) {
            Err(Errno::NOENT) => Ok(()),
            file => rustix::io::write(file?, b"1").map(drop),
        }
    }
}

/// Reads one request; answers how long it is.
pub fn read_request(fuse: impl AsFd, into: &mut [u8]) -> Result<usize> {
    rustix::io::read(fuse, into)
}

/// Waits until there is a request; answers whether there is one.
pub fn readable(fuse: BorrowedFd<'_>, limit: Duration) -> Result<bool> {
    let limit = Timespec::try_from(limit).map_err(|_| Errno::INVAL)?;
    let mut polled = [PollFd::new(&fuse, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&limit)))?;
    Ok(ready > 0)
}

/// Whether the connection is still mounted somewhere and was not ended by force.
pub fn is_connected(fuse: BorrowedFd<'_>) -> Result<bool> {
    let mut polled = [PollFd::new(&fuse, PollFlags::IN)];
    let at_once = Timespec::default();
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&at_once)))?;
    Ok(!polled[0].revents().contains(PollFlags::ERR))
}

/// A descriptor that wakes everybody who waits for it, for ever, once it was rung.
pub fn bell() -> Result<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Rings a bell.
pub fn ring(bell: impl AsFd) {
    // It fails only if it was rung some 2^64 times before, and then it rings already.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Waits for requests, or for the bell. Of several that wait, the kernel wakes one for a request.
#[derive(Debug)]
pub struct Waiter {
    set: OwnedFd,
}

impl Waiter {
    /// Waits for requests of this connection.
    pub fn new(fuse: impl AsFd, bell: impl AsFd) -> Result<Waiter> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // A blocking read would wake one reader too, but could not be ended without a signal.
        let one_of_us = EventFlags::IN | EventFlags::EXCLUSIVE;
        epoll::add(&set, fuse, EventData::new_u64(0), one_of_us)?;
        epoll::add(&set, bell, EventData::new_u64(1), EventFlags::IN)?;
        Ok(Waiter { set })
    }

    /// Waits, for so long at most; answers whether something is there.
    pub fn wait(&self, limit: Option<Duration>) -> Result<bool> {
        let limit = limit.map(Timespec::try_from).transpose();
        let limit = limit.map_err(|_| Errno::INVAL)?;
        let mut events = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 2];
        match epoll::wait(&self.set, &mut events[..], limit.as_ref()) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(errno),
        }
    }
}

/// Tells the kernel that the calling thread is in the path of the machine's own writes: when the thread needs memory,
/// the kernel must not wait for dirty pages that only this thread can write. Without the capability for it
/// (CAP_SYS_RESOURCE) nothing changes. Returns whether it was accepted.
pub fn flush_io() -> bool {
    rustix::process::configure_io_flusher_behavior(true).is_ok()
}
