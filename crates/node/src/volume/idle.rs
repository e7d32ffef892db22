//! Growth of a filesystem that nobody uses.
//!
//! None of the filesystems grows without being mounted, except with tools that want a full check first. So it is
//! mounted just for its growth, where no path leads to it, on a device that exists only for that:
//!
//! ```text
//!   temporary device ──▶ check ──▶ detached mount ──▶ grow, read back ──▶ close ──▶ read back
//! ```
//!
//! Only open descriptors of this process hold both. When the process ends, for whatever reason, they close, the kernel
//! unmounts and detaches, and there is nothing to clean up.
//!
//! Invariant: a filesystem that was not unmounted cleanly, or that records errors, is not mounted here. Its next mount
//! by a user replays the journal, and grows it then. No full check by the filesystem's own program is made: it reads
//! all metadata, which takes minutes where the growth takes milliseconds, and the drivers verify what they read.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use trellis_api::step::{Step, reached};

use super::device::{self, CLEAR_PAUSE, CLEAR_POLLS_MAX, claim};
use super::own;
use super::publish::mount_options;
use crate::error::{Context, Error, Repair, Result};
use crate::filesystem::{self, FilesystemKind, Geometry, Mounted, Outcome, State};
use crate::holders;
use crate::probe::{self, Content};
use crate::sys::block::{self, DeviceNumber};
use crate::sys::loopdev::{self, LoopDevice, Temporary};
use crate::sys::mount::{self, Detached};
use crate::sys::mountinfo::{self, Mount};

/// How often a mount is tried while a scan has the device for a moment, and the pause in between.
const MOUNT_ATTEMPTS_MAX: u32 = 50;
const MOUNT_PAUSE: Duration = Duration::from_millis(10);

/// Raises the filesystem in the file `backing` to fill it, and reads the size back. The volume need not be in use, and
/// its users are not disturbed.
///
/// If a device is already on the file, it is used, and raised with it; otherwise a temporary device is. If the volume
/// turns out to be mounted where this process can see it, it grows through that mount. If it is in use elsewhere, this
/// is [`Error::Busy`].
pub fn grow_idle(backing: &Path, kind: FilesystemKind) -> Result<Outcome> {
    let newly_owned = own::own(backing)?;
    let outcome = grow_owned(backing, kind);
    // What was nobody's before is nobody's again. A device that stays keeps its owner.
    if newly_owned && !matches!(loopdev::find(backing), Ok(Some(_))) {
        own::disown(backing);
    }
    outcome
}

fn grow_owned(backing: &Path, kind: FilesystemKind) -> Result<Outcome> {
    match loopdev::attach_temporary(backing)? {
        Ok(temporary) => {
            reached(Step::IdleAttached);
            let outcome = grow_on(&temporary.device, kind);
            release(temporary)?;
            if matches!(outcome, Ok(Outcome::Raised { .. })) {
                reached(Step::IdleReleased);
            }
            outcome
        }
        Err(found) => {
            device::grow_device(backing, device::backing_size(backing)?)?;
            let mounts = mountinfo::read()?;
            // One that can be written through, if there is one.
            let mount = mountinfo::of(&mounts, found.number).min_by_key(|mount| mount.read_only());
            if let Some(mount) = mount {
                return grow_through(mount, &found, kind);
            }
            let outcome = grow_on(&found, kind)?;
            if matches!(outcome, Outcome::Raised { .. }) {
                reached(Step::IdleReleased);
            }
            Ok(outcome)
        }
    }
}

/// Raises the filesystem on a device that nothing uses.
fn grow_on(device: &LoopDevice, kind: FilesystemKind) -> Result<Outcome> {
    let path = &device.path;
    let before = check(path, device.number, kind)?;
    if filesystem::growth(&before, path, path)?.is_none() {
        let size = before.size();
        return Ok(Outcome::Unchanged { size });
    }
    let Detached { root, mount } = mount_patiently(path, device.number, kind)?;
    reached(Step::IdleMounted);
    let grown = Mounted::at(kind, root, path, path).grow();
    drop(mount);
    let Outcome::Raised { from, to } = grown? else {
        let size = check(path, device.number, kind)?.size();
        return Ok(Outcome::Unchanged { size });
    };
    reached(Step::IdleRaised);
    // The unmount has written everything. What is reported is what is on the device now.
    let after = check(path, device.number, kind)?.size();
    if after < to {
        return Err(Error::NotRaised {
            what: path.clone(),
            measured: after,
            wanted: to,
        });
    }
    tracing::info!(device = %path.display(), %kind, %from, to = %after, "idle filesystem raised");
    Ok(Outcome::Raised { from, to: after })
}

/// Raises the filesystem through the mount that somebody made meanwhile.
fn grow_through(mount: &Mount, device: &LoopDevice, kind: FilesystemKind) -> Result<Outcome> {
    let outcome = filesystem::grow_mounted(kind, &mount.mount_point, &device.path)?;
    if matches!(outcome, Outcome::Raised { .. }) {
        reached(Step::FilesystemRaised);
    }
    Ok(outcome)
}

/// Checks the filesystem on a device that nobody else claims, read from the disk: it must be of that kind, cleanly
/// unmounted and without recorded errors.
fn check(path: &Path, number: DeviceNumber, kind: FilesystemKind) -> Result<Geometry> {
    let claim = claim(path)?.ok_or_else(|| busy(path, number))?;
    block::drop_cache(&claim).context("drop the cache of", path)?;
    let (found, geometry, state) = match probe::probe_open(&claim, path)? {
        Content::Filesystem {
            kind,
            geometry,
            state,
            ..
        } => (kind, geometry, state),
        Content::Empty => {
            return Err(Error::NotThatFilesystem {
                what: path.to_owned(),
                kind,
            });
        }
        found @ Content::Foreign { .. } => {
            return Err(Error::NotEmpty {
                device: path.to_owned(),
                found: Box::new(found),
            });
        }
    };
    if found != kind {
        return Err(Error::OtherFilesystem {
            device: path.to_owned(),
            found,
            asked: kind,
        });
    }
    let is_clean = match state {
        State::Errors => {
            return Err(Error::FilesystemErrors {
                what: path.to_owned(),
                repair: Repair {
                    kind,
                    device: path.to_owned(),
                },
            });
        }
        State::Clean if kind == FilesystemKind::Xfs => filesystem::xfs_log_is_clean(&claim, path)?,
        State::Clean => true,
        State::Unclean | State::Unfinished => false,
    };
    match is_clean {
        true => Ok(geometry),
        false => Err(Error::FilesystemUnclean {
            device: path.to_owned(),
            kind,
        }),
    }
}

fn mount_patiently(path: &Path, number: DeviceNumber, kind: FilesystemKind) -> Result<Detached> {
    let mut attempts_left = MOUNT_ATTEMPTS_MAX;
    loop {
        attempts_left -= 1;
        match mount::mount_detached(path, kind.name(), mount_options(kind)) {
            Err(Errno::BUSY) if attempts_left > 0 => thread::sleep(MOUNT_PAUSE),
            Err(Errno::BUSY) => return Err(busy(path, number)),
            other => return other.context("mount", path),
        }
    }
}

/// Closes the device and waits until it is gone. A scan that has it open delays that; the device then goes with the
/// scan.
fn release(temporary: Temporary) -> Result<()> {
    let device = temporary.release();
    for _ in 0..CLEAR_POLLS_MAX {
        let now = loopdev::status_of(&device.path)?;
        if now.is_none_or(|now| now.identity() != device.identity() || !now.autoclear) {
            break;
        }
        thread::sleep(CLEAR_PAUSE);
    }
    Ok(())
}

fn busy(path: &Path, number: DeviceNumber) -> Error {
    Error::Busy {
        what: PathBuf::from(path),
        holders: holders::of_device(path, number),
        covered_by: None,
    }
}
