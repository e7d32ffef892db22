//! The device rung of a volume over iSCSI: the disk of a session.

use std::path::{Path, PathBuf};

use trellis_api::Bytes;
use trellis_api::step::{Step, reached};

use super::device::{AttachedDevice, claim};
use super::place;
use crate::error::{Context, Error, Result};
use crate::filesystem::Outcome;
use crate::iscsi::{self, Login, Target};
use crate::sys::block;

/// The logical unit that is a volume. A target of ours has no other.
const UNIT: u64 = 0;

/// Logs in to the target, unless that is done already.
///
/// A disk in the wrong mode (read-only or writable) is changed if nobody uses it.
pub(super) fn attach(target: &Target, login: &Login, read_only: bool) -> Result<AttachedDevice> {
    let attached = iscsi::attach(target, login, UNIT)?;
    if !attached.adopted {
        reached(Step::DeviceAttached);
    }
    let device = describe(&attached.device, attached.adopted)?;
    if device.read_only == read_only {
        return Ok(device);
    }
    let Some(claim) = claim(&device.path)? else {
        return Err(Error::AttachedInOtherMode {
            device: device.path,
            backing: PathBuf::from(&target.name),
            found_read_only: device.read_only,
        });
    };
    block::set_read_only(&claim, read_only).context("change the mode of", &device.path)?;
    describe(&attached.device, attached.adopted)
}

/// The disk of the session with the target, if there is one.
pub(super) fn find(target: &Target) -> Result<Option<AttachedDevice>> {
    match iscsi::find(target, UNIT)? {
        Some(path) => describe(&path, true).map(Some),
        None => Ok(None),
    }
}

/// Has the kernel take over the size that the target tells.
pub(super) fn grow(target: &Target, want: Bytes) -> Result<Outcome> {
    let path = iscsi::find(target, UNIT)?.ok_or_else(|| Error::NotAttached {
        backing: PathBuf::from(&target.name),
    })?;
    let outcome = iscsi::rescan(&path, want)?;
    if let Outcome::Raised { from, to } = outcome {
        tracing::info!(device = %path.display(), %from, %to, "disk raised");
        reached(Step::DeviceRaised);
    }
    Ok(outcome)
}

/// Logs out. A disk in use is [`Error::Busy`], and stays.
pub(super) fn detach(target: &Target) -> Result<bool> {
    let detached = iscsi::detach(target)?;
    if detached {
        reached(Step::DeviceDetached);
    }
    Ok(detached)
}

fn describe(path: &Path, adopted: bool) -> Result<AttachedDevice> {
    let node = block::open(path).context("open", path)?;
    Ok(AttachedDevice {
        path: path.to_owned(),
        number: place::number_of(path)?,
        size: block::size(&node).context("read the size of", path)?,
        read_only: block::read_only(&node).context("read the mode of", path)?,
        direct_io: true,
        adopted,
    })
}
