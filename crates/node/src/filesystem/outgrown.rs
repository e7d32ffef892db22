//! Filesystems that have outgrown the shape they were made with.
//!
//! Such a filesystem still grows, but growth costs more. A filesystem that Trellis made at a useful size stays below
//! these bounds for a thousandfold growth. One that was made elsewhere, or very small, may not.

use std::fmt;

use super::Geometry;

/// Above this many allocation groups a mount of xfs took more than half a second when measured
/// (`docs/filesystems.md`), and every growth pays for its groups as well.
pub const XFS_GROUPS_MANY: u64 = 2048;

/// What an outgrown shape costs. A copy to a new volume has the shape of its present size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgrown {
    /// An xfs has many allocation groups, because they were made small.
    Groups {
        /// How many.
        groups: u64,
    },
    /// An ext has used up its reserve of group descriptors. Those of later groups are scattered, and a mount reads
    /// each from its place.
    Descriptors,
}

impl fmt::Display for Outgrown {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outgrown::Groups { groups } => write!(
                out,
                "it has {groups} allocation groups, which slow down every mount and growth"
            ),
            Outgrown::Descriptors => out.write_str(
                "its reserve of group descriptors is used up, which slows down every mount",
            ),
        }
    }
}

impl Geometry {
    /// Whether the filesystem has outgrown the shape that it was made with, and what that costs.
    pub fn outgrown(&self) -> Option<Outgrown> {
        match self {
            Geometry::Xfs(geometry) => {
                let groups = geometry.groups();
                (groups > XFS_GROUPS_MANY).then_some(Outgrown::Groups { groups })
            }
            Geometry::Ext(geometry) => geometry
                .fixed_descriptor_blocks
                .is_some()
                .then_some(Outgrown::Descriptors),
            Geometry::Btrfs(_) => None,
        }
    }
}
