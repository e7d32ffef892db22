//! The operations on a volume at this node.
//!
//! ```text
//!   file ──attach──▶ device ──ensure_filesystem──▶ device with a filesystem
//!                       │                               │ stage
//!                       │ publish (block)               ▼
//!                       ▼                        private mount ──publish──▶ consumer's path
//!                consumer's path
//! ```
//!
//! Every operation observes first and then does only what is missing, so it can be repeated after a crash at any
//! point. Its answer says whether it changed anything. A volume's filesystem is mounted once, at a private place that
//! is writable; consumers see it through binds, which may be read-only. Growth goes through the private mount, because
//! a read-only bind refuses it.
//!
//! The caller runs one operation on a volume at a time, and no two processes work on one volume: the first that
//! attaches, grows or detaches it owns it until it detaches it or ends.

mod carried;
mod carrier;
mod cover;
mod device;
mod disk;
mod fault;
mod format;
mod idle;
mod observe;
mod own;
mod place;
mod publish;

use std::path::Path;

use trellis_api::step::{Step, reached};

use crate::error::Result;
use crate::filesystem::{self, FilesystemKind, Outcome};

pub use carried::{Carried, CarriedBy, carried, refuse_used_mount};
pub use carrier::Carrier;
pub use device::{AttachedDevice, attach, detach, grow_device, is_unreachable};
pub use fault::Fault;
pub use format::{Formatted, Past, ensure_filesystem, ensure_filesystem_with_past};
pub use idle::grow_idle;
pub use observe::{
    Observation, ObservedFilesystem, Publication, Usage, observations, observe, shown_at, usage,
};
pub(crate) use own::disown;
pub use own::lock_holder;
pub use publish::{Published, Source, publish, stage, stage_with, unpublish, unstage};

/// Raises the filesystem staged at `staging` to fill its device, and reads the size back.
pub fn grow_filesystem(kind: FilesystemKind, staging: &Path, device: &Path) -> Result<Outcome> {
    place::require_staged(staging, device)?;
    let outcome = filesystem::grow_mounted(kind, staging, device)?;
    if let Outcome::Raised { from, to } = outcome {
        tracing::info!(staging = %staging.display(), %kind, %from, %to, "filesystem raised");
        reached(Step::FilesystemRaised);
    }
    Ok(outcome)
}
