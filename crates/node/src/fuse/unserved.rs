//! Open connections, the number of requests that wait in each, and their end by force.
//!
//! A connection lives as long as some process has it open. That process may not serve it, and may not even be able to
//! end, because it waits in the kernel for an answer that only a server could give. Then everything on top of the
//! connection waits for ever, and so does every query about loop devices. The kernel's control files, `fusectl`, show
//! how many requests wait. They can also end a connection; the waiting requests then get an error.

use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::sys::{fuse as device, mountinfo};

/// A mounted connection of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its number, which `fusectl` calls it by.
    pub number: u32,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// How many requests wait for an answer.
    pub waiting: u64,
}

/// The connections that are mounted below a directory. Nothing is asked of them, so that this never waits.
pub fn standing(below: &Path) -> Result<Vec<Standing>> {
    let mounts = mountinfo::read()?;
    let ours = mounts
        .iter()
        .filter(|mount| mount.fs_type == device::FS_TYPE && mount.mount_point.starts_with(below));
    let ours: Vec<_> = ours.collect();
    if ours.is_empty() {
        return Ok(Vec::new());
    }
    let control = device::Control::open().context("mount", "fusectl")?;
    let mut found = Vec::new();
    for mount in ours {
        let number = mount.device.minor;
        // One that was unmounted since is not there any more.
        if let Some(waiting) = control.waiting(number).context("look at", "fusectl")? {
            found.push(Standing {
                number,
                mount_point: mount.mount_point.clone(),
                waiting,
            });
        }
    }
    Ok(found)
}

/// Ends a connection: waiting requests get an error, and nobody can use it any more.
pub fn abort(number: u32) -> Result<()> {
    let control = device::Control::open().context("mount", "fusectl")?;
    control
        .abort(number)
        .context("end a connection of", "fusectl")
}
