//! The filesystems that Trellis makes and grows.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Bytes;

/// A filesystem that Trellis makes and grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FilesystemKind {
    /// XFS: grows while mounted, with no capability beyond mounting.
    #[default]
    Xfs,
    /// Btrfs: grows while mounted.
    Btrfs,
    /// Ext4: grows while mounted with CAP_SYS_RESOURCE.
    Ext4,
    /// Ext3: as ext4.
    Ext3,
}

impl FilesystemKind {
    /// All of them.
    pub const ALL: [FilesystemKind; 4] = [
        FilesystemKind::Xfs,
        FilesystemKind::Btrfs,
        FilesystemKind::Ext4,
        FilesystemKind::Ext3,
    ];

    /// The name that mount(8), StorageClasses and /proc/filesystems use.
    pub const fn name(self) -> &'static str {
        match self {
            FilesystemKind::Xfs => "xfs",
            FilesystemKind::Btrfs => "btrfs",
            FilesystemKind::Ext4 => "ext4",
            FilesystemKind::Ext3 => "ext3",
        }
    }

    /// The smallest device on which it is made.
    pub const fn size_min(self) -> Bytes {
        match self {
            // mkfs.xfs refuses less.
            FilesystemKind::Xfs => Bytes::mib(300),
            // With two copies of the metadata mkfs.btrfs needs 109 MiB; below this there is hardly
            // room for data.
            FilesystemKind::Btrfs => Bytes::mib(128),
            // Smaller ones have no room for a journal.
            FilesystemKind::Ext4 | FilesystemKind::Ext3 => Bytes::mib(16),
        }
    }
}

impl fmt::Display for FilesystemKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

/// The text names no filesystem that grows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a filesystem that can grow; use xfs, btrfs, ext4 or ext3")]
pub struct UnknownFilesystem(pub String);

impl FromStr for FilesystemKind {
    type Err = UnknownFilesystem;

    fn from_str(name: &str) -> Result<Self, UnknownFilesystem> {
        let found = FilesystemKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name);
        found.ok_or_else(|| UnknownFilesystem(name.to_owned()))
    }
}
