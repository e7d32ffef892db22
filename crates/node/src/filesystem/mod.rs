//! The filesystems that grow: how each is made, measured and raised.
//!
//! | kind | measured when mounted | measured when idle | raised when mounted |
//! |---|---|---|---|
//! | xfs | geometry ioctl | superblock | `XFS_IOC_FSGROWFSDATA` |
//! | btrfs | device-info ioctl | superblock | `BTRFS_IOC_RESIZE` |
//! | ext4, ext3 | superblock, read through the device | superblock | `EXT4_IOC_RESIZE_FS` |
//!
//! ext has no ioctl for its size, and `statfs` subtracts what the filesystem keeps for itself. Its superblock, read
//! through the block device, is exact even while mounted: the driver keeps it in the device's own page cache, which
//! such a read sees.
//!
//! A filesystem rarely fills its device to the last byte, and what it leaves follows exact rules:
//! [`Geometry::largest_fit`] is the size that a filesystem of this geometry has when it cannot grow
//! any further. Growth is complete when the measured size equals it; there is no tolerance.

mod btrfs;
mod ext;
mod make;
mod mounted;
mod outgrown;
mod refusal;
mod xfs;
mod xfs_log;

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::Serialize;
use trellis_api::Bytes;
use uuid::Uuid;

use crate::error::{Context, Error, Result};
use crate::sys::block;

pub use btrfs::BtrfsGeometry;
pub use ext::ExtGeometry;
pub(crate) use make::require_size;
pub use make::{make, maker};
pub(crate) use mounted::{Mounted, device_errors, growth};
pub use mounted::{grow_mounted, measure_mounted};
pub use outgrown::{Outgrown, XFS_GROUPS_MANY};
pub(crate) use refusal::is_down;
pub use xfs::XfsGeometry;
pub(crate) use xfs_log::is_clean as xfs_log_is_clean;

pub use trellis_api::FilesystemKind;

/// The shape of one filesystem: enough to know its size and the largest it can have on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Geometry {
    /// Of an xfs.
    Xfs(XfsGeometry),
    /// Of a btrfs.
    Btrfs(BtrfsGeometry),
    /// Of an ext4 or ext3.
    Ext(ExtGeometry),
}

impl Geometry {
    /// The size of the filesystem.
    pub fn size(&self) -> Bytes {
        match self {
            Geometry::Xfs(geometry) => geometry.size(),
            Geometry::Btrfs(geometry) => geometry.size(),
            Geometry::Ext(geometry) => geometry.size(),
        }
    }

    /// Its identity.
    pub fn uuid(&self) -> Uuid {
        match self {
            Geometry::Xfs(geometry) => geometry.uuid,
            Geometry::Btrfs(geometry) => geometry.uuid,
            Geometry::Ext(geometry) => geometry.uuid,
        }
    }

    /// Which filesystem it is.
    pub fn kind(&self) -> FilesystemKind {
        match self {
            Geometry::Xfs(_) => FilesystemKind::Xfs,
            Geometry::Btrfs(_) => FilesystemKind::Btrfs,
            Geometry::Ext(geometry) => geometry.kind,
        }
    }

    /// The size that it has when it fills a device of that size as far as it can.
    pub fn largest_fit(&self, device: Bytes) -> Bytes {
        match self {
            Geometry::Xfs(geometry) => geometry.largest_fit(device),
            Geometry::Btrfs(geometry) => geometry.largest_fit(device),
            Geometry::Ext(geometry) => geometry.largest_fit(device),
        }
    }

    /// The largest size that a filesystem of this shape can ever have, where that is less than what a
    /// volume can have.
    pub fn limit(&self) -> Option<Bytes> {
        match self {
            // 2^32 groups of at least 16 MiB, and 2^64 bytes, are above every volume.
            Geometry::Xfs(_) | Geometry::Btrfs(_) => None,
            Geometry::Ext(geometry) => Some(geometry.limit()),
        }
    }
}

/// What a raise did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing was to do: it already had this size.
    Unchanged {
        /// What was measured.
        size: Bytes,
    },
    /// It is larger now.
    Raised {
        /// What was measured before.
        from: Bytes,
        /// What was measured afterwards.
        to: Bytes,
    },
}

impl Outcome {
    /// The measured size after the raise.
    pub fn size(self) -> Bytes {
        match self {
            Outcome::Unchanged { size } => size,
            Outcome::Raised { to, .. } => to,
        }
    }
}

/// Measures the filesystem on a device or in a file from its superblock.
pub fn measure_idle(kind: FilesystemKind, device: &Path) -> Result<Geometry> {
    let file = block::open(device).context("open", device)?;
    let (offset, length) = match kind {
        FilesystemKind::Xfs => (xfs::SUPERBLOCK_OFFSET, xfs::SUPERBLOCK_BYTES),
        FilesystemKind::Btrfs => (btrfs::SUPERBLOCK_OFFSET, btrfs::SUPERBLOCK_BYTES),
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => {
            (ext::SUPERBLOCK_OFFSET, ext::SUPERBLOCK_BYTES)
        }
    };
    let missing = || Error::NotThatFilesystem {
        what: device.to_owned(),
        kind,
    };
    let mut bytes = vec![0; length];
    match file.read_exact_at(&mut bytes, offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(missing()),
        other => other.context("read the superblock of", device)?,
    }
    let geometry = match kind {
        FilesystemKind::Xfs => xfs::parse(&bytes).map(|found| Geometry::Xfs(found.geometry)),
        FilesystemKind::Btrfs => btrfs::parse(&bytes).map(|found| Geometry::Btrfs(found.geometry)),
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => ext::parse(&bytes)
            .filter(|found| found.geometry.is_some_and(|geometry| geometry.kind == kind))
            .and_then(|found| found.geometry.map(Geometry::Ext)),
    };
    geometry.ok_or_else(missing)
}

/// Whether the superblock on the device has errors recorded by the driver, mounted or not.
pub(crate) fn has_recorded_errors(kind: FilesystemKind, device: &Path) -> bool {
    let is_ext = matches!(kind, FilesystemKind::Ext4 | FilesystemKind::Ext3);
    is_ext && ext::errors_on(device)
}

/// What the superblock on an idle device says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Superblock<G> {
    /// The shape.
    geometry: G,
    /// Whether its state says that everything was written.
    state: State,
}

/// The superblocks as [`crate::probe`] needs them: where, how long, and what they say.
pub(crate) mod superblock {
    use super::{Geometry, State, btrfs as of_btrfs, ext as of_ext, xfs as of_xfs};

    pub(crate) const XFS_MAGIC: &[u8; 4] = of_xfs::MAGIC;
    pub(crate) const XFS_BYTES: usize = of_xfs::SUPERBLOCK_BYTES;
    pub(crate) const EXT_MAGIC: [u8; 2] = of_ext::MAGIC.to_le_bytes();
    pub(crate) const EXT_BYTES: usize = of_ext::SUPERBLOCK_BYTES;
    pub(crate) const BTRFS_OFFSET: u64 = of_btrfs::SUPERBLOCK_OFFSET;
    pub(crate) const BTRFS_BYTES: usize = of_btrfs::SUPERBLOCK_BYTES;

    pub(crate) fn xfs(bytes: &[u8]) -> Option<(Geometry, State)> {
        of_xfs::parse(bytes).map(|found| (Geometry::Xfs(found.geometry), found.state))
    }

    pub(crate) fn btrfs(bytes: &[u8]) -> Option<(Geometry, State)> {
        of_btrfs::parse(bytes).map(|found| (Geometry::Btrfs(found.geometry), found.state))
    }

    /// ext2 has no geometry.
    pub(crate) fn ext(bytes: &[u8]) -> Option<(Option<Geometry>, State)> {
        of_ext::parse(bytes).map(|found| (found.geometry.map(Geometry::Ext), found.state))
    }
}

/// In which state a filesystem was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Nothing has to be done before mounting, as far as the superblock says. xfs records an unclean end not there but
    /// in its log, which the next mount replays.
    Clean,
    /// It was not unmounted; the next mount replays its journal.
    Unclean,
    /// It has recorded errors and wants its check program.
    Errors,
    /// The program that makes it did not finish.
    Unfinished,
}

/// Little-endian and big-endian numbers out of a superblock, `None` past its end.
pub(crate) mod read {
    /// `N` bytes at `offset`.
    pub(crate) fn array<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
        bytes.get(offset..offset.checked_add(N)?)?.try_into().ok()
    }
    pub(crate) fn le16(bytes: &[u8], offset: usize) -> Option<u16> {
        array(bytes, offset).map(u16::from_le_bytes)
    }
    pub(crate) fn le32(bytes: &[u8], offset: usize) -> Option<u32> {
        array(bytes, offset).map(u32::from_le_bytes)
    }
    pub(crate) fn le64(bytes: &[u8], offset: usize) -> Option<u64> {
        array(bytes, offset).map(u64::from_le_bytes)
    }
    pub(crate) fn be32(bytes: &[u8], offset: usize) -> Option<u32> {
        array(bytes, offset).map(u32::from_be_bytes)
    }
    pub(crate) fn be64(bytes: &[u8], offset: usize) -> Option<u64> {
        array(bytes, offset).map(u64::from_be_bytes)
    }
}
