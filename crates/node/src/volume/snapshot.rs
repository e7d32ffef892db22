//! One look at all loop devices and all mounts, for many observations.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::Result;
use crate::sys::block::DeviceNumber;
use crate::sys::loopdev::{self, FileIdentity, LoopDevice};
use crate::sys::mountinfo::{self, Mount};

/// Which devices and mounts there are. What is measured of a volume is measured when it is observed; this
/// only says where to look, and is as old as it is.
#[derive(Clone, Debug)]
pub struct Snapshot {
    devices: BTreeMap<FileIdentity, LoopDevice>,
    mounts: Vec<Mount>,
}

impl Snapshot {
    /// Looks now.
    pub fn take() -> Result<Snapshot> {
        let devices = loopdev::list()?
            .into_iter()
            .map(|device| (device.identity(), device))
            .collect();
        Ok(Snapshot {
            devices,
            mounts: mountinfo::read()?,
        })
    }

    pub(super) fn mounts(&self) -> &[Mount] {
        &self.mounts
    }

    /// The device on the file, if it still is.
    pub(super) fn find(&self, backing: &Path) -> Result<Option<LoopDevice>> {
        let seen = match fs::metadata(backing) {
            Ok(meta) => self
                .devices
                .get(&(DeviceNumber::from_stat(meta.dev()), meta.ino())),
            Err(_) => self
                .devices
                .values()
                .find(|device| device.backing_deleted && device.backing_hint == backing),
        };
        let Some(seen) = seen else {
            return Ok(None);
        };
        let now = loopdev::status_of(&seen.path)?;
        Ok(now.filter(|now| now.identity() == seen.identity()))
    }
}
