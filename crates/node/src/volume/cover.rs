//! Mounts of a volume that something else hides.
//!
//! A mount over a path, or over a directory above it, hides the volume there but leaves it mounted. The volume must
//! not be taken for unmounted at such a path.

use std::path::Path;

use super::observe::shows_node;
use crate::error::{Error, Result};
use crate::sys::block::DeviceNumber;
use crate::sys::mountinfo::{self, Mount};

/// Refuses with [`Error::Busy`] if the volume on that device is mounted at `path` after all. The caller
/// has seen that it is not visible there; `path` is free of links, as mountinfo has it.
pub(super) fn refuse_covered(path: &Path, device: Option<DeviceNumber>) -> Result<()> {
    let Some(device) = device else {
        return Ok(());
    };
    let mounts = mountinfo::read()?;
    let node = device.node();
    let is_ours = |mount: &Mount| {
        let node = node.as_deref();
        mount.is_of(device) || node.is_some_and(|node| shows_node(mount, node, device))
    };
    let ours = mounts
        .iter()
        .find(|mount| mount.mount_point == path && is_ours(mount));
    match ours {
        Some(ours) => Err(Error::Busy {
            what: path.to_owned(),
            holders: Vec::new(),
            covered_by: cover_of(&mounts, ours).cloned().map(Box::new),
        }),
        None => Ok(()),
    }
}

/// The latest mount at or above the place of `hidden` that `hidden` does not rest on.
fn cover_of<'a>(mounts: &'a [Mount], hidden: &Mount) -> Option<&'a Mount> {
    let ground = ground_of(mounts, hidden);
    mounts.iter().rev().find(|mount| {
        hidden.mount_point.starts_with(&mount.mount_point) && !ground.contains(&mount.id)
    })
}

/// The number of the mount, and of every mount that it rests on.
fn ground_of(mounts: &[Mount], mount: &Mount) -> Vec<u64> {
    let mut ground = vec![mount.id];
    let mut next = mount.parent;
    // No chain is longer than the list, also if the text was read in the middle of a change.
    for _ in mounts {
        let Some(below) = mounts.iter().find(|mount| mount.id == next) else {
            break;
        };
        ground.push(below.id);
        next = below.parent;
    }
    ground
}
