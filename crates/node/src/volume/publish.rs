//! Mounts a volume at its private place, and shows it to consumers.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::FileType;
use rustix::io::Errno;
use trellis_api::MountOptions;
use trellis_api::step::{Step, reached};

use super::cover::refuse_covered;
use super::place::{self, MountPlace, Wanted};
use crate::error::{Context, Error, Result};
use crate::filesystem::FilesystemKind;
use crate::sys::block::{self, DeviceNumber};
use crate::sys::mount;

/// How often a mount is tried while the device is claimed by another, and the pause between.
const MOUNT_ATTEMPTS_MAX: u32 = 50;
const MOUNT_PAUSE: Duration = Duration::from_millis(10);

/// What a consumer is to see at its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'a> {
    /// The filesystem that is staged there.
    Filesystem {
        /// The private mount.
        staging: &'a Path,
    },
    /// The device itself.
    Block {
        /// The device node.
        device: &'a Path,
    },
}

/// What [`publish`] and [`stage`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// It was there already, in the mode asked for.
    AlreadyThere,
    /// It was mounted now.
    Mounted,
    /// It was there, and was made read-only now: an earlier call was cut short.
    MadeReadOnly,
    /// It was there read-only, and can be written to now.
    MadeWritable,
}

/// The options that a kind is always mounted with: a copy of a volume has the identity of the original,
/// which xfs refuses unless told; ext stops writing when it finds itself damaged, as the others do.
pub(super) const fn mount_options(kind: FilesystemKind) -> &'static str {
    match kind {
        FilesystemKind::Xfs => "nouuid",
        FilesystemKind::Btrfs => "",
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => "errors=remount-ro",
    }
}

/// Mounts the device's filesystem at the volume's private place, which is made if it is absent.
///
/// A private mount that is read-only because all its consumers were is made writable when the first writing consumer
/// comes; the others' binds stay read-only. It is never changed back: a writable mount serves readers as well.
pub fn stage(
    device: &Path,
    kind: FilesystemKind,
    staging: &Path,
    read_only: bool,
) -> Result<Published> {
    stage_with(device, kind, staging, read_only, &MountOptions::default())
}

/// As [`stage`], with mount options of the owner. An existing mount keeps the options that it was made with.
pub fn stage_with(
    device: &Path,
    kind: FilesystemKind,
    staging: &Path,
    read_only: bool,
    options: &MountOptions,
) -> Result<Published> {
    let number = place::number_of(device)?;
    let place = MountPlace::open(staging)?;
    if let Some(found) = place.mounted()? {
        if !found.is_of(number) {
            return Err(place.taken_by(&found));
        }
        if found.read_only() && !read_only {
            mount::make_writable(&place.path, &options.flags)
                .context("make writable", &place.path)?;
            reached(Step::FilesystemMounted);
            return Ok(Published::MadeWritable);
        }
        return Ok(Published::AlreadyThere);
    }
    let target = place.prepare(Wanted::Directory)?;
    match mount_patiently(device, &target, kind, read_only, options) {
        Err(Errno::INVAL) if *options != MountOptions::default() => {
            let options = options.of_filesystem.join(",");
            return Err(Error::MountOptions {
                device: device.to_owned(),
                options,
            });
        }
        other => other.context("mount", device)?,
    }
    reached(Step::FilesystemMounted);
    Ok(Published::Mounted)
}

/// Mounts, and waits while another process claims the device for a moment: mkfs.btrfs looks into every device of the
/// machine, and holds each for an instant.
fn mount_patiently(
    device: &Path,
    target: &OwnedFd,
    kind: FilesystemKind,
    read_only: bool,
    options: &MountOptions,
) -> rustix::io::Result<()> {
    let own = mount_options(kind);
    let asked = options.of_filesystem.iter().map(String::as_str);
    let all: Vec<&str> = asked.chain([own]).filter(|each| !each.is_empty()).collect();
    let (all, flags) = (all.join(","), options.flags.as_slice());
    let mut attempts_left = MOUNT_ATTEMPTS_MAX;
    loop {
        attempts_left -= 1;
        match mount::mount(device, target, kind.name(), read_only, &all, flags) {
            Err(Errno::BUSY) if attempts_left > 0 => thread::sleep(MOUNT_PAUSE),
            answer => return answer,
        }
    }
}

/// Unmounts the private mount and removes its directory. Returns whether something was mounted; anything else there is
/// treated as in [`unpublish`].
pub fn unstage(staging: &Path, device: Option<DeviceNumber>) -> Result<bool> {
    let Some(place) = MountPlace::find(staging)? else {
        refuse_covered(staging, device)?;
        return Ok(false);
    };
    let was_mounted = match place.mounted()? {
        Some(found) if device.is_some_and(|device| found.is_of(device)) => {
            place.unmount()?;
            reached(Step::FilesystemUnmounted);
            true
        }
        other => {
            refuse_covered(&place.path, device)?;
            if let Some(found) = other {
                return Err(place.taken_by(&found));
            }
            false
        }
    };
    place.remove_if_made_here()?;
    Ok(was_mounted)
}

/// Shows the volume at the consumer's path: a filesystem by a bind of its private mount, a device by
/// a bind of its node onto a file. The path is made if it is absent; its parent has to exist. A path
/// that is in use for anything else is an error, and nothing is changed.
pub fn publish(source: Source<'_>, path: &Path, read_only: bool) -> Result<Published> {
    let (origin, wanted) = match source {
        Source::Filesystem { staging } => {
            let staged = MountPlace::open(staging)?;
            if staged.mounted()?.is_none() {
                return Err(Error::NotStaged {
                    staging: staging.to_owned(),
                });
            }
            (staging, Wanted::Directory)
        }
        Source::Block { device } => {
            let node = block::open(device).context("open", device)?;
            let writable = !block::read_only(&node).context("read the mode of", device)?;
            if read_only && writable {
                return Err(Error::DeviceWritable {
                    device: device.to_owned(),
                });
            }
            (device, Wanted::File)
        }
    };
    let place = MountPlace::open(path)?;
    if let Some(found) = place.mounted()? {
        let Some((at_path, stat)) = place.look()? else {
            return Err(place.taken_by(&found));
        };
        let original = rustix::fs::stat(origin).context("look at", origin)?;
        let same = match source {
            Source::Filesystem { .. } => {
                (stat.st_dev, stat.st_ino) == (original.st_dev, original.st_ino)
            }
            Source::Block { .. } => is_node(stat.st_mode) && stat.st_rdev == original.st_rdev,
        };
        return match (same, read_only, found.read_only(), source) {
            (true, false, false, _)
            | (true, true, true, _)
            | (true, _, _, Source::Block { .. }) => Ok(Published::AlreadyThere),
            (true, true, false, Source::Filesystem { .. }) => {
                mount::set_read_only(&at_path).context("make read-only", path)?;
                reached(Step::PathPublished);
                Ok(Published::MadeReadOnly)
            }
            _ => Err(place.taken_by(&found)),
        };
    }
    let target = place.prepare(wanted)?;
    let bind_read_only = read_only && wanted == Wanted::Directory;
    mount::bind(origin, &target, bind_read_only).context("publish at", path)?;
    reached(Step::PathPublished);
    Ok(Published::Mounted)
}

/// Removes the volume on that device from the consumer's path, and removes the path if publishing made it. `None` says
/// that the volume no longer has a device, so nothing of it can be mounted. Returns whether something was unmounted.
///
/// Anything else at the path is an error and stays: [`Error::Busy`] if the volume is still mounted underneath it, else
/// [`Error::UnusablePath`].
pub fn unpublish(path: &Path, device: Option<DeviceNumber>) -> Result<bool> {
    let Some(place) = MountPlace::find(path)? else {
        refuse_covered(path, device)?;
        return Ok(false);
    };
    let was_mounted = match place.mounted()? {
        Some(found) => {
            // A filesystem of the device is not asked anything: it may have stopped.
            let ours = match device {
                Some(device) => found.is_of(device) || shows(&place, device)?,
                None => false,
            };
            if !ours {
                refuse_covered(&place.path, device)?;
                return Err(place.taken_by(&found));
            }
            place.unmount()?;
            reached(Step::PathUnpublished);
            true
        }
        None => {
            refuse_covered(&place.path, device)?;
            false
        }
    };
    place.remove_if_made_here()?;
    Ok(was_mounted)
}

/// Whether the place is the node of that device.
fn shows(place: &MountPlace, device: DeviceNumber) -> Result<bool> {
    let node = place.look()?.filter(|(_, stat)| is_node(stat.st_mode));
    Ok(node.is_some_and(|(_, stat)| DeviceNumber::from_stat(stat.st_rdev) == device))
}

fn is_node(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::BlockDevice
}
