//! Events from the kernel: block devices that change, and mounts that come and go.
//!
//! Both sources are plain descriptors. A caller polls them (or gives them to its reactor) and then calls
//! `read_events`, which never blocks. Events are hints: they say which volume to observe again, and the observation
//! decides. So a superfluous event costs one look. Lost events are reported as [`DeviceEvent::Lost`]; then everything
//! must be observed again.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};

use super::block::DeviceNumber;
use super::mountinfo::{self, Mount};
use crate::error::{Context, Result};

/// The kernel's own messages come in this group; the others belong to udev.
const KERNEL_GROUP: u32 = 1;
/// The kernel's messages have at most 2 KiB of variables and a path.
const MESSAGE_BYTES_MAX: usize = 16 << 10;
/// Room for the events of a machine that attaches some hundred volumes at once.
const BACKLOG_BYTES: usize = 4 << 20;
/// How many messages one call takes, so that a storm does not keep the caller for ever.
const MESSAGES_MAX: usize = 1024;
const NETLINK: &str = "the kernel's device events";
const MOUNTINFO: &str = "/proc/self/mountinfo";

/// What happened to a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// One device changed.
    Device {
        /// Which.
        number: DeviceNumber,
        /// Its name below /dev.
        name: String,
        /// How.
        change: DeviceChange,
    },
    /// Events were lost: every device may have changed.
    Lost,
}

/// How a block device changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChange {
    /// It is new.
    Added,
    /// It is gone.
    Removed,
    /// Its size is another one.
    Resized,
    /// Something else, such as its medium: a loop device that gets or loses its file.
    Changed,
}

/// The changes of this machine's block devices, as the kernel tells them.
#[derive(Debug)]
pub struct DeviceEvents {
    socket: OwnedFd,
}

impl DeviceEvents {
    /// Listens from now on.
    pub fn open() -> Result<DeviceEvents> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            flags,
            Some(netlink::KOBJECT_UEVENT),
        )
        .context("open", NETLINK)?;
        // Without the privilege the machine's default has to do; a loss is told.
        let _ = sockopt::set_socket_recv_buffer_size_force(&socket, BACKLOG_BYTES);
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))
            .context("listen to", NETLINK)?;
        Ok(DeviceEvents { socket })
    }

    /// The events that have come since, oldest first. Does not wait.
    pub fn read_events(&self) -> Result<Vec<DeviceEvent>> {
        let mut events = Vec::new();
        let mut buffer = vec![0; MESSAGE_BYTES_MAX];
        for _ in 0..MESSAGES_MAX {
            let received = rustix::net::recvfrom(&self.socket, &mut buffer[..], RecvFlags::TRUNC);
            let (length, sender) = match received {
                Ok((_, length, sender)) => (length, sender),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => continue,
                Err(Errno::NOBUFS) => {
                    events.push(DeviceEvent::Lost);
                    continue;
                }
                Err(errno) => return Err(errno).context("read", NETLINK),
            };
            // Other processes can write to the socket; only the kernel has the number zero.
            let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
            if sender.is_none_or(|sender| sender.pid() != 0) {
                continue;
            }
            match buffer.get(..length) {
                Some(message) => events.extend(parse(message)),
                None => events.push(DeviceEvent::Lost),
            }
        }
        Ok(events)
    }

    /// Waits until there are events, or until the time is over. Returns whether there are.
    pub fn wait(&self, time: Duration) -> Result<bool> {
        wait_for(self.as_fd(), PollFlags::IN, time).context("wait for", NETLINK)
    }
}

impl AsFd for DeviceEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for DeviceEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Parses a message: a line that repeats what follows, then variables, each ended by a zero byte. `None` if it is not
/// an event of a block device.
fn parse(message: &[u8]) -> Option<DeviceEvent> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let variables: BTreeMap<String, String> = message
        .split(|byte| *byte == 0)
        .skip(1)
        .filter_map(|variable| {
            let middle = variable.iter().position(|byte| *byte == b'=')?;
            Some((
                text(variable.get(..middle)?),
                text(variable.get(middle + 1..)?),
            ))
        })
        .collect();
    let get = |name: &str| variables.get(name).map(String::as_str);
    if get("SUBSYSTEM")? != "block" {
        return None;
    }
    let change = match get("ACTION")? {
        "add" => DeviceChange::Added,
        "remove" => DeviceChange::Removed,
        "change" if get("RESIZE") == Some("1") => DeviceChange::Resized,
        _ => DeviceChange::Changed,
    };
    Some(DeviceEvent::Device {
        number: DeviceNumber {
            major: get("MAJOR")?.parse().ok()?,
            minor: get("MINOR")?.parse().ok()?,
        },
        name: get("DEVNAME")?.to_owned(),
        change,
    })
}

/// What happened to a mount that this process can see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountEvent {
    /// It is new.
    Mounted(Mount),
    /// It is gone; this is what it was.
    Unmounted(Mount),
    /// It is another one now, such as read-only.
    Changed(Mount),
}

/// The changes of the mounts that this process can see.
///
/// The descriptor becomes ready with a priority event (`POLLPRI`), once per change, for whichever poller is first.
/// [`MountEvents::read_events`] compares with what it saw last, so it does not depend on that.
#[derive(Debug)]
pub struct MountEvents {
    file: File,
    known: BTreeMap<u64, Mount>,
}

impl MountEvent {
    /// The mount as it is, or was last.
    pub fn mount(&self) -> &Mount {
        match self {
            MountEvent::Mounted(mount)
            | MountEvent::Unmounted(mount)
            | MountEvent::Changed(mount) => mount,
        }
    }
}

impl MountEvents {
    /// Watches from now on: what is mounted already is no event.
    pub fn open() -> Result<MountEvents> {
        let file = File::open(MOUNTINFO).context("open", MOUNTINFO)?;
        Ok(MountEvents {
            file,
            known: by_number(mountinfo::read()?),
        })
    }

    /// What has changed since the last call. Does not wait.
    pub fn read_events(&mut self) -> Result<Vec<MountEvent>> {
        let now = by_number(mountinfo::read()?);
        let before = std::mem::replace(&mut self.known, now);
        // Numbers are given again: one that stands for another place now is two events.
        let is_same = |one: &Mount, other: &Mount| {
            (one.device, &one.root, &one.mount_point)
                == (other.device, &other.root, &other.mount_point)
        };
        let still = |mount: &Mount| {
            let now = self.known.get(&mount.id);
            now.is_some_and(|now| is_same(now, mount))
        };
        let gone = before.values().filter(|mount| !still(mount));
        let there = self.known.values().filter_map(|mount| {
            match before.get(&mount.id).filter(|known| is_same(known, mount)) {
                None => Some(MountEvent::Mounted(mount.clone())),
                Some(known) if known != mount => Some(MountEvent::Changed(mount.clone())),
                Some(_) => None,
            }
        });
        let gone = gone.map(|mount| MountEvent::Unmounted(mount.clone()));
        Ok(gone.chain(there).collect())
    }

    /// Waits until a mount has changed, or until the time is over. Returns whether one has.
    pub fn wait(&self, time: Duration) -> Result<bool> {
        wait_for(self.as_fd(), PollFlags::PRI, time).context("wait for", MOUNTINFO)
    }
}

impl AsFd for MountEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for MountEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

fn by_number(mounts: Vec<Mount>) -> BTreeMap<u64, Mount> {
    mounts.into_iter().map(|mount| (mount.id, mount)).collect()
}

fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, time: Duration) -> rustix::io::Result<bool> {
    let timeout = Timespec::try_from(time).map_err(|_| Errno::INVAL)?;
    let mut polled = [PollFd::from_borrowed_fd(fd, flags)];
    match rustix::event::poll(&mut polled, Some(&timeout)) {
        Err(Errno::INTR) => Ok(false),
        answer => answer.map(|ready| ready > 0),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(lines: &[&str]) -> Vec<u8> {
        lines.join("\0").into_bytes()
    }

    #[test]
    fn a_resize_is_told_from_another_change() {
        // Fails if the variable that marks a resize is overlooked, or if the device is another one.
        let resized = message(&[
            "change@/devices/virtual/block/loop3",
            "ACTION=change",
            "DEVPATH=/devices/virtual/block/loop3",
            "SUBSYSTEM=block",
            "RESIZE=1",
            "MAJOR=7",
            "MINOR=3",
            "DEVNAME=loop3",
            "SEQNUM=77",
            "",
        ]);
        let expected = |change| DeviceEvent::Device {
            number: DeviceNumber { major: 7, minor: 3 },
            name: "loop3".into(),
            change,
        };
        assert_eq!(parse(&resized), Some(expected(DeviceChange::Resized)));
        let text = String::from_utf8(resized).unwrap();
        let changed = text.replace("RESIZE=1", "OTHER=1").into_bytes();
        assert_eq!(parse(&changed), Some(expected(DeviceChange::Changed)));
        let removed = text.replace("ACTION=change", "ACTION=remove").into_bytes();
        assert_eq!(parse(&removed), Some(expected(DeviceChange::Removed)));
        let network = text
            .replace("SUBSYSTEM=block", "SUBSYSTEM=net")
            .into_bytes();
        assert_eq!(parse(&network), None);
    }

    proptest! {
        #[test]
        fn arbitrary_messages_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            // Fails if some message makes the parser panic.
            let _ = parse(&bytes);
        }
    }
}
