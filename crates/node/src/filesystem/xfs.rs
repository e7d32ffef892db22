//! xfs: allocation groups, whose size is fixed when the filesystem is made.

use trellis_api::Bytes;
use uuid::Uuid;

use super::{Mounted, State, Superblock, read};
use crate::error::Result;
use crate::sys::fsctl;

pub(super) const SUPERBLOCK_OFFSET: u64 = 0;
pub(super) const SUPERBLOCK_BYTES: usize = 512;
pub(super) const MAGIC: &[u8; 4] = b"XFSB";

/// The mark that no mount is allowed before a repair.
const INCOMPAT_NEEDS_REPAIR: u32 = 1 << 4;

/// A last group of fewer blocks is not made by the kernel (`XFS_MIN_AG_BLOCKS`).
const LAST_GROUP_BLOCKS_MIN: u64 = 64;
/// The largest allocation group (`XFS_AG_MAX_BYTES`).
const GROUP_BYTES_MAX: u64 = 1 << 40;
/// A device of four such groups or more gets four groups, as from mkfs.xfs: groups let several writers allocate at
/// once, and after a thousandfold growth they are still few enough.
const GROUP_BYTES_ENOUGH: u64 = 64 << 30;
/// The smallest allocation group that mkfs.xfs makes.
const GROUP_BYTES_MIN: u64 = 16 << 20;
/// The log is fixed for life as well; this is the smallest that mkfs.xfs makes for such devices.
const LOG_BYTES_MIN: u64 = 64 << 20;
/// A larger log showed no benefit when measured, and its space is lost to data.
const LOG_BYTES_MAX: u64 = 512 << 20;
/// mkfs.xfs would take 1/2048; a filesystem that is expected to grow takes twice that.
const LOG_SHARE: u64 = 1024;
/// Group sizes are multiples of this, so that they are whole blocks of every size.
const GROUP_ROUNDING: u64 = 1 << 20;

/// The shape of an xfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsGeometry {
    /// Bytes in a block, not zero.
    pub block: u32,
    /// Blocks in an allocation group, not zero.
    pub group_blocks: u32,
    /// Blocks of the data section.
    pub data_blocks: u64,
    /// The share of the space that inodes may take, in percent; growth keeps it.
    pub inode_percent_max: u32,
    /// Its identity.
    pub uuid: Uuid,
}

impl XfsGeometry {
    pub(super) fn of_mounted(mounted: &Mounted<'_>) -> Result<Self> {
        let raw = fsctl::xfs_geometry(&mounted.place)
            .map_err(|errno| mounted.refused("read the geometry of", errno))?;
        Ok(XfsGeometry {
            block: raw.block,
            group_blocks: raw.group_blocks,
            data_blocks: raw.data_blocks,
            inode_percent_max: raw.inode_percent_max,
            uuid: raw.uuid,
        })
    }

    /// How many allocation groups it has.
    pub fn groups(&self) -> u64 {
        self.data_blocks
            .div_ceil(u64::from(self.group_blocks).max(1))
    }

    pub(super) fn size(&self) -> Bytes {
        Bytes::new(self.data_blocks.saturating_mul(u64::from(self.block)))
    }

    /// Whole blocks, and no last group below the kernel's minimum: such a remainder is dropped.
    pub(super) fn largest_fit(&self, device: Bytes) -> Bytes {
        let (block, group) = (
            u64::from(self.block).max(1),
            u64::from(self.group_blocks).max(1),
        );
        let blocks = device.get() / block;
        let remainder = blocks % group;
        let dropped = if remainder < LAST_GROUP_BLOCKS_MIN {
            remainder
        } else {
            0
        };
        Bytes::new((blocks - dropped) * block)
    }

    pub(super) fn grow(&self, mounted: &Mounted<'_>, wanted: Bytes) -> Result<()> {
        let blocks = wanted.get() / u64::from(self.block).max(1);
        fsctl::xfs_grow(&mounted.place, blocks, self.inode_percent_max)
            .map_err(|errno| mounted.refused("grow", errno))
    }
}

/// Reads a superblock; `None` if it is not one of xfs.
pub(super) fn parse(bytes: &[u8]) -> Option<Superblock<XfsGeometry>> {
    if read::array::<4>(bytes, 0)? != *MAGIC {
        return None;
    }
    let geometry = XfsGeometry {
        block: read::be32(bytes, 4)
            .filter(|block| (512..=65_536).contains(block) && block.is_power_of_two())?,
        data_blocks: read::be64(bytes, 8)?,
        uuid: Uuid::from_bytes(read::array(bytes, 32)?),
        group_blocks: read::be32(bytes, 84).filter(|blocks| *blocks > 0)?,
        inode_percent_max: u32::from(*bytes.get(127)?),
    };
    let in_progress = *bytes.get(126)? != 0;
    let needs_repair = read::be32(bytes, 216)? & INCOMPAT_NEEDS_REPAIR != 0;
    let state = if in_progress {
        State::Unfinished
    } else if needs_repair {
        State::Errors
    } else {
        State::Clean
    };
    Some(Superblock { geometry, state })
}

/// The arguments that make an xfs that can grow a thousandfold.
///
/// The size of a group is fixed for life, and each group costs time at growth and at every mount. So up to 64 GiB the
/// first group is as large as the device allows: everything except the 16 MiB that the second group needs at least.
/// (The second group holds the second superblock; the first growth fills it up.) The log then has to be in the first
/// group. `docs/filesystems.md` has the measurement.
pub(super) fn make_arguments(device_size: Bytes, uuid: Uuid) -> Vec<String> {
    let size = device_size.get();
    let nearly_all = size.saturating_sub(GROUP_BYTES_MIN);
    let group = nearly_all.min(GROUP_BYTES_ENOUGH.max(size / 4)) / GROUP_ROUNDING * GROUP_ROUNDING;
    let group = group.clamp(GROUP_BYTES_MIN, GROUP_BYTES_MAX - GROUP_ROUNDING);
    let log = (device_size.get() / LOG_SHARE / GROUP_ROUNDING * GROUP_ROUNDING)
        .clamp(LOG_BYTES_MIN, LOG_BYTES_MAX);
    [
        "-q".into(),
        "-K".into(),
        "-m".into(),
        format!("uuid={uuid}"),
        // Never a write below 4 KiB: what a modern disk, and direct I/O to one, handles best.
        "-s".into(),
        "size=4096".into(),
        "-d".into(),
        format!("agsize={group}"),
        "-l".into(),
        format!("agnum=0,size={log}"),
    ]
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(group_blocks: u32) -> XfsGeometry {
        XfsGeometry {
            block: 4096,
            group_blocks,
            data_blocks: 0,
            inode_percent_max: 25,
            uuid: Uuid::nil(),
        }
    }

    #[test]
    fn a_last_group_below_the_minimum_is_not_counted() {
        // Fails if the kernel's rule of 64 blocks is off by one.
        let shape = geometry(1000);
        let blocks = |count: u64| Bytes::new(count * 4096);
        assert_eq!(shape.largest_fit(blocks(2063)), blocks(2000));
        assert_eq!(shape.largest_fit(blocks(2064)), blocks(2064));
        assert_eq!(
            shape.largest_fit(Bytes::new(2064 * 4096 + 4095)),
            blocks(2064)
        );
        assert_eq!(shape.largest_fit(blocks(3000)), blocks(3000));
    }
}
