//! Removes a mount, even one that nobody serves any more.

use std::path::Path;

use rustix::io::Errno;

use super::VOLUME_NAME;
use crate::error::{Context, Error, Result};
use crate::holders;
use crate::sys::{block, fuse as device, loopdev, mountinfo};
use crate::volume::disown;

/// Unmounts what is mounted there, if nobody uses it.
pub(super) fn unmount(mount_point: &Path) -> Result<()> {
    match device::unmount(mount_point) {
        Err(Errno::BUSY) => Err(Error::Busy {
            what: mount_point.to_owned(),
            holders: holders::of_mount(mount_point),
            covered_by: None,
        }),
        other => other.context("unmount", mount_point),
    }
}

/// Removes a mount whose server has died and that nobody can resume: detaches loop devices from its file, and unmounts
/// it. Returns whether there was one. Only the process that mounts there may call this, or whoever knows that there is
/// none: anybody else could remove the mount that has just taken the dead one's place.
pub fn dismantle(mount_point: &Path) -> Result<bool> {
    let mounts = mountinfo::read()?;
    let Some(mount) = mountinfo::at(&mounts, mount_point) else {
        return Ok(false);
    };
    if mount.fs_type != device::FS_TYPE {
        return Ok(false);
    }
    detach_dead(mount_point)?;
    unmount(mount_point)?;
    Ok(true)
}

/// Detaches loop devices from a file whose server has died, and gives the file free. A device that is still mounted is
/// [`Error::Busy`]: unmount its filesystem first, which has stopped.
///
/// `volume::detach` cannot do that: it asks the file for its identity, and a dead file does not answer. Here a device
/// is known by the path that it was made with.
pub fn detach_dead(mount_point: &Path) -> Result<()> {
    let mounts = mountinfo::read()?;
    let file = mount_point.join(VOLUME_NAME);
    for (path, number) in loopdev::on_path(&file)? {
        if mountinfo::of(&mounts, number).next().is_some() {
            return Err(Error::Busy {
                holders: holders::of_device(&path, number),
                what: path,
                covered_by: None,
            });
        }
        let node = block::open(&path).context("open", &path)?;
        match loopdev::clear(&node) {
            // Somebody else was faster.
            Ok(()) | Err(Errno::NXIO) => {}
            Err(errno) => return Err(errno).context("detach", &path),
        }
    }
    // If this process worked on the volume, it still has its lock, on the dead file.
    disown(&file);
    Ok(())
}
