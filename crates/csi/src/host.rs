//! What the node service needs of its machine. The binary implements it with the kernel.

use std::path::{Path, PathBuf};

use trellis_api::{Bytes, Hold};

/// What is to appear at a pod's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown<'a> {
    /// The filesystem that is mounted at a staging path.
    Filesystem(&'a Path),
    /// A block device.
    Device(&'a Path),
}

/// What a path of a volume holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// A filesystem, and how full it is.
    Filesystem {
        /// All bytes.
        total: Bytes,
        /// Bytes in use.
        used: Bytes,
        /// Bytes that a user can still write.
        available: Bytes,
        /// All inodes; zero where they are made as needed.
        inodes: u64,
        /// Inodes in use.
        inodes_used: u64,
        /// Inodes that can still be made.
        inodes_free: u64,
    },
    /// A block device of that size.
    Device(Bytes),
}

/// A machine. Every call blocks, is idempotent, and asks the kernel instead of remembering. A refusal is the hold that a
/// person reads.
pub trait Host: Send + Sync + 'static {
    /// Which run of the kernel this is. What was staged in an earlier one went with it.
    fn boot_id(&self) -> String;

    /// Makes the volume appear at `target`, which is made if it is absent.
    fn show(&self, what: Shown<'_>, target: &Path, read_only: bool) -> Result<(), Hold>;

    /// Takes the volume on `device` away from `target`, and removes the path if [`Host::show`] made it. Without a device
    /// nothing of the volume can be there.
    fn hide(&self, target: &Path, device: Option<&Path>) -> Result<(), Hold>;

    /// The paths at which the volume on `device` can be seen, apart from Trellis' private mount.
    fn shown_at(&self, device: &Path) -> Result<Vec<PathBuf>, Hold>;

    /// A path as the kernel names it: links in the directories above are followed.
    fn real(&self, path: &Path) -> PathBuf;

    /// Measures what is at a path of a volume.
    fn measure(&self, path: &Path) -> Result<Measured, Hold>;
}
