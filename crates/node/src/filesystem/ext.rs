//! ext4 and ext3: block groups, whose size depends on the block size.

use std::os::unix::fs::FileExt;
use std::path::Path;

use trellis_api::Bytes;
use uuid::Uuid;

use super::{FilesystemKind, Mounted, State, Superblock, read};
use crate::error::Result;
use crate::sys::{block, fsctl};

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
/// What 32 bits can number in blocks of 4 KiB. It is also what the reserve serves with 32-byte descriptors.
const EXT3_BYTES_MAX: u64 = (1 << 44) - BLOCK;
/// The growth for which a filesystem is made.
const GROWTH_FACTOR: u64 = 1024;
/// A block group, which one block's bitmap describes.
const GROUP_BYTES: u64 = BLOCK * 8 * BLOCK;
/// mke2fs makes one inode per this many bytes by default, and one per two and four times as many on big and huge
/// devices. Fewer inodes, with a longer growth in mind, would run out by surprise.
const BYTES_PER_INODE: u64 = 16_384;
const BIG_BYTES: u64 = 4 << 40;
const HUGE_BYTES: u64 = 16 << 40;
/// The journal is fixed for life. A small device gets twice the share that mke2fs gives it, up to 64 MiB,
/// and a large one 1/64 up to what mke2fs gives at most to 100 GiB.
const JOURNAL_SHARE_SMALL: u64 = 16;
const JOURNAL_BYTES_SMALL: u64 = 64 << 20;
const JOURNAL_BYTES_MIN: u64 = 4 << 20;
const JOURNAL_SHARE: u64 = 64;
const JOURNAL_BYTES_MAX: u64 = 512 << 20;
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
    /// The number of descriptor blocks behind each copy of the superblock, where it does not grow.
    pub fixed_descriptor_blocks: Option<u32>,
    /// Whether only some groups have a copy of the superblock.
    pub sparse_copies: bool,
    /// Inodes in a group.
    pub inodes_in_group: u32,
    /// Whether a block's number may have more than 32 bits.
    pub wide: bool,
    /// Its identity.
    pub uuid: Uuid,
}

impl ExtGeometry {
    pub(super) fn size(&self) -> Bytes {
        Bytes::new(self.blocks.saturating_mul(u64::from(self.block)))
    }

    /// Whole blocks. A last group with hardly any room besides its own tables is left off, by the rule of mke2fs and
    /// resize2fs.
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

    /// The largest possible size. Without the `64bit` feature a block number has 32 bits. With it, an inode number
    /// still has, and every group adds its inodes.
    pub(super) fn limit(&self) -> Bytes {
        let groups = u64::from(u32::MAX) / u64::from(self.inodes_in_group).max(1);
        let by_inodes =
            groups.saturating_mul(u64::from(self.group_blocks)) + u64::from(self.first_block);
        let by_blocks = match self.wide {
            true => u64::MAX,
            false => u64::from(u32::MAX),
        };
        Bytes::new(
            by_inodes
                .min(by_blocks)
                .saturating_mul(u64::from(self.block)),
        )
    }

    pub(super) fn grow(&self, mounted: &Mounted<'_>, wanted: Bytes) -> Result<()> {
        let blocks = wanted.get() / u64::from(self.block).max(1);
        fsctl::ext_resize(&mounted.place, blocks).map_err(|errno| mounted.refused("grow", errno))
    }
}

/// Whether the superblock on the device records errors now, which may be later than the geometry was read. An
/// unreadable one records none.
pub(super) fn errors_on(device: &Path) -> bool {
    let read = || -> Option<bool> {
        let mut bytes = vec![0; SUPERBLOCK_BYTES];
        let node = block::open(device).ok()?;
        node.read_exact_at(&mut bytes, SUPERBLOCK_OFFSET).ok()?;
        Some(parse(&bytes)?.state == State::Errors)
    };
    read().unwrap_or(false)
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
    let inodes_in_group = read::le32(bytes, 0x28)?;
    // A check clears the flag and the count. The driver refuses to grow for the flag alone; the count
    // also tells of errors that it went on after.
    let errors = state & STATE_ERRORS != 0 || read::le32(bytes, 0x194)? != 0;
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
            inodes_in_group,
            wide,
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

/// The arguments that make an ext filesystem for a thousandfold growth. The descriptor reserve, the inodes of a group
/// and the journal are fixed for life, so they are chosen for the future size. Nothing is discarded, and the kernel
/// zeroes the inode tables and the journal later. So a sparse file stays sparse, and a large filesystem takes no
/// longer to make.
pub(super) fn make_arguments(kind: FilesystemKind, device_size: Bytes, uuid: Uuid) -> Vec<String> {
    let size = device_size.get();
    // Descriptors have 64 bytes with the `64bit` feature and 32 without.
    let (features, reserve_max) = match kind {
        FilesystemKind::Ext4 => ("64bit,resize_inode", RESERVE_BYTES_MAX),
        _ => ("resize_inode", EXT3_BYTES_MAX),
    };
    let reserve = size.saturating_mul(GROWTH_FACTOR).min(reserve_max) / BLOCK;
    let mut extended = "nodiscard,lazy_itable_init=1,lazy_journal_init=1".to_owned();
    if reserve > size / BLOCK {
        extended.push_str(&format!(",resize={reserve}"));
    }
    let (by, inodes) = match size {
        // mke2fs counts for the part of a group that is there; the rest of the group comes later.
        ..GROUP_BYTES => ("-N", GROUP_BYTES / BYTES_PER_INODE),
        GROUP_BYTES..BIG_BYTES => ("-i", BYTES_PER_INODE),
        BIG_BYTES..HUGE_BYTES => ("-i", BYTES_PER_INODE * 2),
        _ => ("-i", BYTES_PER_INODE * 4),
    };
    let small = (size / JOURNAL_SHARE_SMALL).clamp(JOURNAL_BYTES_MIN, JOURNAL_BYTES_SMALL);
    let journal = small.max((size / JOURNAL_SHARE).min(JOURNAL_BYTES_MAX)) >> 20;
    [
        "-q",
        "-t",
        kind.name(),
        "-b",
        &BLOCK.to_string(),
        "-O",
        features,
        by,
        &inodes.to_string(),
        "-J",
        &format!("size={journal}"),
        "-U",
        &uuid.to_string(),
        "-E",
        &extended,
    ]
    .map(str::to_owned)
    .into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn geometry(wide: bool, inodes_in_group: u32) -> ExtGeometry {
        ExtGeometry {
            kind: FilesystemKind::Ext4,
            block: 4096,
            group_blocks: 32_768,
            blocks: 32_768,
            first_block: 0,
            inode_table_blocks: 512,
            descriptors_in_block: 64,
            reserved_descriptor_blocks: 0,
            fixed_descriptor_blocks: None,
            sparse_copies: true,
            inodes_in_group,
            wide,
            uuid: Uuid::nil(),
        }
    }

    #[test]
    fn the_limit_is_the_smaller_of_block_and_inode_numbers() {
        // Fails if a growth is tried that overflows the number of a block or of an inode.
        let tib = Bytes::TIB.get();
        assert_eq!(geometry(false, 8192).limit().get(), 16 * tib - 4096);
        assert_eq!(geometry(true, 8192).limit().get(), 64 * tib - (128 << 20));
        assert_eq!(geometry(true, 32_768).limit().get(), 16 * tib - (128 << 20));
    }

    #[test]
    fn a_small_device_gets_the_inodes_of_a_whole_group() {
        // Fails if the inodes of a group follow from the part of it that is there at first.
        let inodes = |size: Bytes| {
            let all = make_arguments(FilesystemKind::Ext4, size, Uuid::nil());
            let at = all
                .iter()
                .position(|one| one == "-i" || one == "-N")
                .unwrap();
            (all[at].clone(), all[at + 1].clone())
        };
        assert_eq!(inodes(Bytes::mib(16)), ("-N".into(), "8192".into()));
        assert_eq!(inodes(Bytes::mib(128)), ("-i".into(), "16384".into()));
        assert_eq!(inodes(Bytes::gib(4096)), ("-i".into(), "32768".into()));
        assert_eq!(inodes(Bytes::gib(16_384)), ("-i".into(), "65536".into()));
    }
}
