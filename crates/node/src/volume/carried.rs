//! Devices that carry volumes, found in the kernel alone and taken away: for the time when no service knows of them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;

use super::device::{self, CLEAR_PAUSE};
use super::observe::shows_node;
use super::place::MountPlace;
use crate::error::{Error, Result};
use crate::holders::{self, Holder};
use crate::iscsi::{self, sessions};
use crate::sys::block::DeviceNumber;
use crate::sys::loopdev;
use crate::sys::mountinfo::{self, Mount};

/// How often a use is looked at before it is believed: a scan may have a file open for a moment.
const LOOKS_MAX: u32 = 20;

/// A device that carries a volume, and where it can be seen.
#[derive(Clone, Debug)]
pub struct Carried {
    /// The device node.
    pub device: PathBuf,
    /// Its number.
    pub number: DeviceNumber,
    /// What it stands on.
    pub by: CarriedBy,
    /// The mounts of its filesystem and of its node, in the order in which they were made.
    pub mounts: Vec<Mount>,
}

/// What a device that carries a volume stands on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CarriedBy {
    /// A file: it is a loop device.
    File(PathBuf),
    /// A session with an iSCSI target.
    Session {
        /// The target's name.
        target: String,
        /// Where it was logged in.
        portal: SocketAddr,
    },
}

/// The devices on the files and targets that are wanted, and those that are mounted at a place that is. Nothing is asked
/// of a file, so that one that nobody serves keeps this from nothing.
pub fn carried(
    is_our_file: impl Fn(&Path) -> bool,
    is_our_target: impl Fn(&str) -> bool,
    is_our_place: impl Fn(&Path) -> bool,
) -> Result<Vec<Carried>> {
    let mounts = mountinfo::read()?;
    let describe = |device: PathBuf, number: DeviceNumber, by: CarriedBy| {
        let is_of = |mount: &&Mount| mount.is_of(number) || shows_node(mount, &device, number);
        Carried {
            mounts: mounts.iter().filter(is_of).cloned().collect(),
            device: device.clone(),
            number,
            by,
        }
    };
    let mut found = Vec::new();
    for each in loopdev::on_paths(|_| true)? {
        let is_wanted = is_our_file(&each.backing_hint);
        let device = describe(each.path, each.number, CarriedBy::File(each.backing_hint));
        let mut places = device.mounts.iter().map(|mount| &mount.mount_point);
        if is_wanted || places.any(|place| is_our_place(place)) {
            found.push(device);
        }
    }
    for session in sessions()? {
        if !is_our_target(&session.target) {
            continue;
        }
        for device in session.devices()? {
            // One that vanishes while it is looked at is gone.
            if let Ok(Some(number)) = DeviceNumber::of_block_device(&device) {
                let by = CarriedBy::Session {
                    target: session.target.clone(),
                    portal: session.portal,
                };
                found.push(describe(device, number, by));
            }
        }
    }
    Ok(found)
}

/// Refuses with [`Error::Busy`] if the mount that is visible at `path` could not be unmounted now. Nothing is changed.
pub fn refuse_used_mount(path: &Path) -> Result<()> {
    for _ in 0..LOOKS_MAX {
        match MountPlace::find(path)? {
            Some(place) if place.is_in_use()? => thread::sleep(CLEAR_PAUSE),
            _ => return Ok(()),
        }
    }
    Err(Error::Busy {
        what: path.to_owned(),
        holders: holders::of_mount(path),
        covered_by: None,
    })
}

impl Carried {
    /// Refuses with [`Error::Busy`] if a program has the device open, other than the process `except`.
    pub fn refuse_open_device(&self, except: Option<u32>) -> Result<()> {
        let mut holders: Vec<Holder> = Vec::new();
        for _ in 0..LOOKS_MAX {
            holders = holders::of_device(&self.device, self.number);
            holders.retain(|holder| Some(holder.pid) != except);
            if holders.is_empty() {
                return Ok(());
            }
            thread::sleep(CLEAR_PAUSE);
        }
        Err(Error::Busy {
            what: self.device.clone(),
            holders,
            covered_by: None,
        })
    }

    /// Takes the device away, which nothing is mounted from any more. One on a file that nobody serves stays:
    /// `fuse::dismantle` takes it away with the file.
    pub fn detach(&self) -> Result<()> {
        match &self.by {
            CarriedBy::File(backing) if device::is_unreachable(backing) => Ok(()),
            CarriedBy::File(backing) => device::detach(backing).map(drop),
            CarriedBy::Session { target, portal } => {
                let target = iscsi::Target {
                    name: target.clone(),
                    portal: *portal,
                };
                iscsi::detach(&target).map(drop)
            }
        }
    }
}
