//! ext4 and ext3: block groups of a size that the block size decides.

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;
use trellis_api::Bytes;
use uuid::Uuid;

use super::{FilesystemKind, State, Superblock, read};
use crate::error::{Error, Result};
use crate::sys::fsctl;

pub(super) const SUPERBLOCK_OFFSET: u64 = 1024;
pub(super) const SUPERBLOCK_BYTES: usize = 1024;
pub(super) const MAGIC: u16 = 0xef53;

const STATE_CLEAN: u16 = 1;
const STATE_ERRORS: u16 = 2;
const COMPAT_JOURNAL: u32 = 0x4;
const INCOMPAT_RECOVER: u32 = 0x4;
const INCOMPAT_META_BG: u32 = 0x10;
const INCOMPAT_64BIT: u32 = 0x80;
/// Incompatible features that ext3 does not have: extents, 64bit, multi-mount protection, flexible
/// groups and all above.
const INCOMPAT_EXT4: u32 = !0x1f;
const RO_COMPAT_SPARSE_SUPER: u32 = 0x1;
/// Read-only compatible features that ext3 does not have: huge files and all above.
const RO_COMPAT_EXT4: u32 = !0x7;

/// A last group that has fewer blocks left than this beyond what it keeps for itself is not made.
const LAST_GROUP_USEFUL_BLOCKS: u64 = 50;
/// What the reserve of group descriptors can serve at most, with 4 KiB blocks and 64-byte descriptors.
const RESERVE_BYTES_MAX: u64 = 8 << 40;
/// The growth for which descriptors are reserved.
const RESERVE_FACTOR: u64 = 1024;
/// The block that is always used, whatever the size: 1 KiB blocks, which mke2fs prefers for small
/// devices, cannot grow far.
const BLOCK: u64 = 4096;

/// The shape of an ext filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtGeometry {
    /// ext4 or ext3.
    pub kind: FilesystemKind,
    /// Bytes in a block, not zero.
    pub block: u32,
    /// Blocks in a group, not zero.
    pub group_blocks: u32,
    /// Blocks of the filesystem.
    pub blocks: u64,
    /// Where the first group begins.
    pub first_block: u32,
    /// Blocks of a group's inode table.
    pub inode_table_blocks: u32,
    /// Group descriptors in a block.
    pub descriptors_in_block: u32,
    /// Blocks reserved for descriptors of later groups.
    pub reserved_descriptor_blocks: u16,
    /// The number of descriptor blocks beside each copy of the superblock, where it does not grow.
    pub fixed_descriptor_blocks: Option<u32>,
    /// Whether only some groups have a copy of the superblock.
    pub sparse_copies: bool,
    /// Whether its superblock has the flag of recorded errors.
    pub errors: bool,
    /// Its identity.
    pub uuid: Uuid,
}

impl ExtGeometry {
    pub(super) fn size(&self) -> Bytes {
        Bytes::new(self.blocks.saturating_mul(u64::from(self.block)))
    }

    /// Whole blocks, and no last group with hardly any room beside its own tables: it is left off,
    /// by the rule that mke2fs and resize2fs follow.
    pub(super) fn largest_fit(&self, device: Bytes) -> Bytes {
        let (block, group) = (
            u64::from(self.block).max(1),
            u64::from(self.group_blocks).max(1),
        );
        let blocks = device.get() / block;
        let in_groups = blocks.saturating_sub(u64::from(self.first_block));
        let remainder = in_groups % group;
        let groups = in_groups.div_ceil(group);
        let needed = self.overhead(groups) + LAST_GROUP_USEFUL_BLOCKS;
        let dropped = if groups > 1 && remainder > 0 && remainder < needed {
            remainder
        } else {
            0
        };
        Bytes::new((blocks - dropped) * block)
    }

    /// What the last of so many groups keeps for itself: two bitmaps, the inode table and, where it
    /// has them, a superblock and all descriptors.
    fn overhead(&self, groups: u64) -> u64 {
        let tables = 2 + u64::from(self.inode_table_blocks);
        if !self.has_copy(groups.saturating_sub(1)) {
            return tables;
        }
        let descriptors = match self.fixed_descriptor_blocks {
            Some(fixed) => u64::from(fixed),
            None => {
                // The reserve shrinks as the descriptors grow into it: their sum stays what it is now.
                let per_block = u64::from(self.descriptors_in_block).max(1);
                let now =
                    self.groups().div_ceil(per_block) + u64::from(self.reserved_descriptor_blocks);
                now.max(groups.div_ceil(per_block))
            }
        };
        tables + 1 + descriptors
    }

    fn groups(&self) -> u64 {
        self.blocks
            .saturating_sub(u64::from(self.first_block))
            .div_ceil(u64::from(self.group_blocks).max(1))
    }

    /// Whether the group has a copy of the superblock: with sparse copies 0, 1 and the powers of 3, 5
    /// and 7.
    fn has_copy(&self, group: u64) -> bool {
        let is_power_of = |base: u64| {
            let mut power = base;
            while power < group {
                power = power.saturating_mul(base);
            }
            power == group
        };
        !self.sparse_copies || group <= 1 || [3, 5, 7].into_iter().any(is_power_of)
    }

    pub(super) fn grow(&self, place: &File, wanted: Bytes, mount_point: &Path) -> Result<()> {
        let blocks = wanted.get() / u64::from(self.block).max(1);
        fsctl::ext_resize(place, blocks).map_err(|errno| match errno {
            // The driver says EPERM for two causes; the superblock tells which.
            Errno::PERM if self.errors => Error::FilesystemErrors {
                what: mount_point.to_owned(),
            },
            Errno::PERM => Error::MissingCapability {
                what: mount_point.to_owned(),
                capability: "CAP_SYS_RESOURCE",
            },
            Errno::ROFS => Error::ReadOnly {
                what: mount_point.to_owned(),
            },
            Errno::BUSY => Error::Busy {
                what: mount_point.to_owned(),
                holders: Vec::new(),
                covered_by: None,
            },
            Errno::UCLEAN | Errno::IO => Error::FilesystemErrors {
                what: mount_point.to_owned(),
            },
            other => Error::Io {
                action: "grow",
                path: mount_point.to_owned(),
                source: other.into(),
            },
        })
    }
}

/// Reads a superblock; `None` if it is not one of ext. ext2 has no geometry here: it does not grow.
pub(super) fn parse(bytes: &[u8]) -> Option<Superblock<Option<ExtGeometry>>> {
    if read::le16(bytes, 0x38)? != MAGIC {
        return None;
    }
    let (state, compat) = (read::le16(bytes, 0x3a)?, read::le32(bytes, 0x5c)?);
    let (incompat, ro_compat) = (read::le32(bytes, 0x60)?, read::le32(bytes, 0x64)?);
    let block = 1024u32
        .checked_shl(read::le32(bytes, 0x18)?)
        .filter(|block| (1024..=65_536).contains(block))?;
    let kind = if incompat & INCOMPAT_EXT4 != 0 || ro_compat & RO_COMPAT_EXT4 != 0 {
        Some(FilesystemKind::Ext4)
    } else {
        (compat & COMPAT_JOURNAL != 0).then_some(FilesystemKind::Ext3)
    };
    let wide = incompat & INCOMPAT_64BIT != 0;
    let high = if wide { read::le32(bytes, 0x150)? } else { 0 };
    let descriptor = if wide {
        u32::from(read::le16(bytes, 0xfe)?).max(32)
    } else {
        32
    };
    let inode_bytes =
        u64::from(read::le32(bytes, 0x28)?) * u64::from(read::le16(bytes, 0x58)?.max(128));
    let group_blocks = read::le32(bytes, 0x20).filter(|blocks| *blocks > 0)?;
    let first_meta_group = read::le32(bytes, 0x104)?;
    let errors = state & STATE_ERRORS != 0;
    let geometry = kind.map(|kind| {
        Some(ExtGeometry {
            kind,
            block,
            group_blocks,
            blocks: u64::from(read::le32(bytes, 0x04)?) | u64::from(high) << 32,
            first_block: read::le32(bytes, 0x14)?,
            inode_table_blocks: u32::try_from(inode_bytes.div_ceil(u64::from(block))).ok()?,
            descriptors_in_block: block / descriptor.min(block),
            reserved_descriptor_blocks: read::le16(bytes, 0xce)?,
            fixed_descriptor_blocks: (incompat & INCOMPAT_META_BG != 0).then_some(first_meta_group),
            sparse_copies: ro_compat & RO_COMPAT_SPARSE_SUPER != 0,
            errors,
            uuid: Uuid::from_bytes(read::array(bytes, 0x68)?),
        })
    });
    let geometry = match geometry {
        Some(read) => Some(read?),
        None => None,
    };
    let state = if errors {
        State::Errors
    } else if state & STATE_CLEAN == 0 || incompat & INCOMPAT_RECOVER != 0 {
        State::Unclean
    } else {
        State::Clean
    };
    Some(Superblock { geometry, state })
}

/// The arguments that make an ext filesystem with room for the descriptors of a thousandfold size.
/// Nothing is discarded, and the inode tables and the journal are left to the kernel to zero, so that
/// a sparse file stays sparse and making it takes no longer for a large one.
pub(super) fn make_arguments(kind: FilesystemKind, device_size: Bytes, uuid: Uuid) -> Vec<String> {
    let reserve = device_size
        .get()
        .saturating_mul(RESERVE_FACTOR)
        .min(RESERVE_BYTES_MAX);
    let mut extended = "nodiscard,lazy_itable_init=1,lazy_journal_init=1".to_owned();
    if reserve > device_size.get() {
        extended.push_str(&format!(",resize={}", reserve / BLOCK));
    }
    let features = if kind == FilesystemKind::Ext4 {
        "64bit,resize_inode"
    } else {
        "resize_inode"
    };
    [
        "-q",
        "-t",
        kind.name(),
        "-b",
        &BLOCK.to_string(),
        "-O",
        features,
        "-U",
        &uuid.to_string(),
        "-E",
        &extended,
    ]
    .map(str::to_owned)
    .into()
}
