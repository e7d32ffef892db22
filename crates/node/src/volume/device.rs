//! The device rung: a loop device on the volume's file.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use trellis_api::Bytes;
use trellis_api::step::{Step, reached};

use super::observe::shows_node;
use super::own::{disown, own};
use super::place;
use crate::error::{Context, Error, Result};
use crate::filesystem::Outcome;
use crate::holders;
use crate::sys::block::{self, DeviceNumber};
use crate::sys::loopdev::{self, LoopDevice};
use crate::sys::mountinfo;

/// A device that was just detached may be open for a moment in a scan.
pub(super) const CLEAR_POLLS_MAX: u32 = 100;
/// A mount's last user may still be ending, and some programs claim every device of the machine in turn while they
/// search for one (mkfs.btrfs does).
const CLAIM_ATTEMPTS_MAX: u32 = 50;
pub(super) const CLEAR_PAUSE: Duration = Duration::from_millis(10);
/// A file on FUSE may show its old size for a second (the kernel caches its attributes).
const SIZE_POLLS_MAX: u32 = 40;
const SIZE_PAUSE: Duration = Duration::from_millis(50);

/// A volume's file as a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedDevice {
    /// The device node.
    pub path: PathBuf,
    /// Its number.
    pub number: DeviceNumber,
    /// Its size.
    pub size: Bytes,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Whether it works past the page cache of the backing filesystem. Where that filesystem refuses,
    /// the device is buffered: correct, but every byte is cached twice.
    pub direct_io: bool,
    /// Whether the device was there before.
    pub adopted: bool,
}

/// Puts a device on the file, or adopts the one that is already on it.
///
/// A device in the other mode is replaced if nobody uses it: its mode is fixed when it is made, and the next user of a
/// volume may want another. One that is in use is [`Error::AttachedInOtherMode`], and a volume that another process
/// owns is [`Error::ForeignUse`].
pub fn attach(backing: &Path, read_only: bool) -> Result<AttachedDevice> {
    own(backing)?;
    let attached = match loopdev::attach(backing, read_only) {
        Err(error @ Error::AttachedInOtherMode { .. }) => {
            clear_other_mode(backing, read_only, error)?;
            loopdev::attach(backing, read_only)?
        }
        other => other?,
    };
    if !attached.adopted {
        reached(Step::DeviceAttached);
    }
    if !attached.device.direct_io {
        tracing::warn!(device = %attached.device.path.display(), "no direct I/O on this backing file");
    }
    describe(attached.device, attached.adopted)
}

/// Detaches the device whose mode is not `read_only` from the file, or returns `otherwise` if that device is in use.
fn clear_other_mode(backing: &Path, read_only: bool, otherwise: Error) -> Result<()> {
    match detach_owned(backing) {
        Ok(_) => {
            tracing::info!(backing = %backing.display(), read_only, "device detached for another mode");
            Ok(())
        }
        Err(Error::Busy { .. }) => {
            // A program that merely has the device open would lose it when it closes it, because the
            // kernel only defers what was asked. Adopting the device in its own mode takes that back.
            loopdev::attach(backing, !read_only)?;
            Err(otherwise)
        }
        Err(error) => Err(error),
    }
}

/// The device on the file, if there is one.
pub(super) fn find(backing: &Path) -> Result<Option<AttachedDevice>> {
    match find_loop(backing)? {
        Some(device) => describe(device, true).map(Some),
        None => Ok(None),
    }
}

pub(super) fn describe(device: LoopDevice, adopted: bool) -> Result<AttachedDevice> {
    let node = block::open(&device.path).context("open", &device.path)?;
    let size = block::size(&node).context("read the size of", &device.path)?;
    let read_only = block::read_only(&node).context("read the mode of", &device.path)?;
    Ok(AttachedDevice {
        size,
        read_only,
        path: device.path,
        number: device.number,
        direct_io: device.direct_io,
        adopted,
    })
}

/// Detaches the device from the file. Returns whether there was one.
///
/// A device that is mounted or otherwise claimed, in any mount namespace, or whose node is published in
/// this one, is [`Error::Busy`] and is not touched. One that a program merely has open goes away when the program closes it; until then
/// this is [`Error::Busy`] too.
pub fn detach(backing: &Path) -> Result<bool> {
    own(backing)?;
    let detached = detach_owned(backing)?;
    disown(backing);
    Ok(detached)
}

fn detach_owned(backing: &Path) -> Result<bool> {
    let Some(device) = find_loop(backing)? else {
        return Ok(false);
    };
    let busy = || Error::Busy {
        what: device.path.clone(),
        holders: holders::of_device(&device.path, device.number),
        covered_by: None,
    };
    // A path that shows the node would show another volume as soon as the device is used again.
    let mut mounts = mountinfo::read()?.into_iter();
    if mounts.any(|mount| shows_node(&mount, &device.path, device.number)) {
        return Err(busy());
    }
    let Some(claim) = claim(&device.path)? else {
        return Err(busy());
    };
    // Between the search and the claim the device may have been given to another file.
    let is_ours = |now: &LoopDevice| now.identity() == device.identity();
    if !loopdev::status_of(&device.path)?.is_some_and(|now| is_ours(&now)) {
        return Ok(false);
    }
    loopdev::clear(&claim).context("detach", &device.path)?;
    drop(claim);
    for _ in 0..CLEAR_POLLS_MAX {
        if !loopdev::status_of(&device.path)?.is_some_and(|now| is_ours(&now)) {
            reached(Step::DeviceDetached);
            return Ok(true);
        }
        thread::sleep(CLEAR_PAUSE);
    }
    Err(busy())
}

/// Opens the device with an exclusive claim; `None` if another process keeps one.
pub(super) fn claim(device: &Path) -> Result<Option<File>> {
    // A mount that can be seen from here does not go away by waiting.
    let number = place::number_of(device)?;
    if mountinfo::of(&mountinfo::read()?, number).next().is_some() {
        return Ok(None);
    }
    for _ in 0..CLAIM_ATTEMPTS_MAX {
        match block::open_exclusive(device) {
            Ok(claim) => return Ok(Some(claim)),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(CLEAR_PAUSE),
            Err(error) => return Err(error).context("claim", device),
        }
    }
    Ok(None)
}

/// Raises the device to the size of its file, which has to be at least `want`, and reads it back.
pub fn grow_device(backing: &Path, want: Bytes) -> Result<Outcome> {
    own(backing)?;
    let device = find(backing)?.ok_or_else(|| Error::NotAttached {
        backing: backing.to_owned(),
    })?;
    let available = usable(backing_size(backing)?);
    if available < device.size {
        return Err(Error::WouldShrink {
            device: device.path,
            current: device.size,
            backing: available,
        });
    }
    if available < want {
        return Err(Error::NotRaised {
            what: backing.to_owned(),
            measured: available,
            wanted: want,
        });
    }
    if device.size == available {
        return Ok(Outcome::Unchanged { size: device.size });
    }
    let node = block::open(&device.path).context("open", &device.path)?;
    let mut measured = device.size;
    for _ in 0..SIZE_POLLS_MAX {
        loopdev::refresh_size(&node).context("raise", &device.path)?;
        measured = block::size(&node).context("read the size of", &device.path)?;
        if measured >= available {
            tracing::info!(device = %device.path.display(), from = %device.size, to = %measured, "device raised");
            reached(Step::DeviceRaised);
            return Ok(Outcome::Raised {
                from: device.size,
                to: measured,
            });
        }
        thread::sleep(SIZE_PAUSE);
    }
    Err(Error::NotRaised {
        what: device.path,
        measured,
        wanted: available,
    })
}

/// What a device can use of a file: whole logical blocks.
fn usable(size: Bytes) -> Bytes {
    let block = loopdev::LOGICAL_BLOCK.get();
    Bytes::new(size.get() / block * block)
}

/// Whether the file is a FUSE file whose server is gone. It answers no request; it can only be removed.
pub fn is_unreachable(backing: &Path) -> bool {
    fs::metadata(backing).is_err_and(|error| error.kind() == io::ErrorKind::NotConnected)
}

/// The size of the file behind a device.
pub(super) fn backing_size(backing: &Path) -> Result<Bytes> {
    Ok(Bytes::new(
        fs::metadata(backing).context("look at", backing)?.len(),
    ))
}

/// The device on the file, also if the file has been deleted since.
pub(super) fn find_loop(backing: &Path) -> Result<Option<LoopDevice>> {
    match loopdev::find(backing) {
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            loopdev::on_deleted(backing)
        }
        other => other,
    }
}
