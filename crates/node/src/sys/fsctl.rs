//! The growth and geometry ioctls of xfs, btrfs and ext.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::AsFd;

use rustix::io::{Errno, Result};
use rustix::ioctl::{Getter, Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl, opcode};
use uuid::Uuid;

/// `struct xfs_fsop_geom_v1`: the form that every kernel answers.
#[repr(C)]
#[derive(Clone, Copy)]
struct XfsGeometryRaw {
    blocksize: u32,
    rtextsize: u32,
    agblocks: u32,
    agcount: u32,
    logblocks: u32,
    sectsize: u32,
    inodesize: u32,
    imaxpct: u32,
    datablocks: u64,
    rtblocks: u64,
    rtextents: u64,
    logstart: u64,
    uuid: [u8; 16],
    sunit: u32,
    swidth: u32,
    version: i32,
    flags: u32,
    logsectsize: u32,
    rtsectsize: u32,
    dirblocksize: u32,
}

/// `struct xfs_growfs_data`.
#[repr(C)]
struct XfsGrowRaw {
    newblocks: u64,
    imaxpct: u32,
}

/// `struct btrfs_ioctl_fs_info_args`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BtrfsFsInfoRaw {
    max_id: u64,
    num_devices: u64,
    fsid: [u8; 16],
    nodesize: u32,
    sectorsize: u32,
    clone_alignment: u32,
    rest: [u8; 980],
}

/// `struct btrfs_ioctl_dev_info_args`.
#[repr(C)]
struct BtrfsDevInfoRaw {
    devid: u64,
    uuid: [u8; 16],
    bytes_used: u64,
    total_bytes: u64,
    rest: [u8; 4056],
}

/// `struct btrfs_ioctl_get_dev_stats`.
#[repr(C)]
struct BtrfsStatsRaw {
    devid: u64,
    nr_items: u64,
    flags: u64,
    values: [u64; 5],
    rest: [u64; 121],
}

/// Errors of writing, reading and flushing, bad checksums, and blocks of another age.
const BTRFS_COUNTERS: u64 = 5;

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct BtrfsVolumeRaw {
    fd: i64,
    name: [u8; 4088],
}

const XFS_GEOMETRY: u32 = opcode::read::<XfsGeometryRaw>(b'X', 100);
const XFS_GROW: u32 = opcode::write::<XfsGrowRaw>(b'X', 110);
const BTRFS_RESIZE: u32 = opcode::write::<BtrfsVolumeRaw>(0x94, 3);
const BTRFS_DEV_INFO: u32 = opcode::read_write::<BtrfsDevInfoRaw>(0x94, 30);
const BTRFS_FS_INFO: u32 = opcode::read::<BtrfsFsInfoRaw>(0x94, 31);
const BTRFS_STATS: u32 = opcode::read_write::<BtrfsStatsRaw>(0x94, 52);
const EXT_RESIZE: u32 = opcode::write::<u64>(b'f', 16);

const _: () = assert!(size_of::<XfsGeometryRaw>() == 112 && size_of::<XfsGrowRaw>() == 16);
const _: () = assert!(size_of::<BtrfsFsInfoRaw>() == 1024 && size_of::<BtrfsVolumeRaw>() == 4096);
const _: () = assert!(size_of::<BtrfsDevInfoRaw>() == 4096 && size_of::<BtrfsStatsRaw>() == 1032);

/// What a mounted xfs says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsGeometry {
    /// Bytes in a block.
    pub block: u32,
    /// Blocks in an allocation group.
    pub group_blocks: u32,
    /// How many groups there are.
    pub groups: u32,
    /// Blocks of the data section: its size.
    pub data_blocks: u64,
    /// The share of the space that inodes may take, in percent.
    pub inode_percent_max: u32,
    /// Its identity.
    pub uuid: Uuid,
}

/// The geometry of the xfs that `place` is in.
pub fn xfs_geometry(place: impl AsFd) -> Result<XfsGeometry> {
    // SAFETY: XFS_IOC_FSGEOMETRY_V1 fills one `struct xfs_fsop_geom_v1`, which the type lays out
    // field by field and for which every bit pattern is valid.
    let raw = unsafe { ioctl(place, Getter::<XFS_GEOMETRY, XfsGeometryRaw>::new()) }?;
    Ok(XfsGeometry {
        block: raw.blocksize,
        group_blocks: raw.agblocks,
        groups: raw.agcount,
        data_blocks: raw.datablocks,
        inode_percent_max: raw.imaxpct,
        uuid: Uuid::from_bytes(raw.uuid),
    })
}

/// Grows the data section of the xfs that `place` is in. The inode share is set by the same call, so
/// the present one has to be given.
pub fn xfs_grow(place: impl AsFd, blocks: u64, inode_percent_max: u32) -> Result<()> {
    let request = XfsGrowRaw {
        newblocks: blocks,
        imaxpct: inode_percent_max,
    };
    // SAFETY: XFS_IOC_FSGROWFSDATA reads one `struct xfs_growfs_data`, which the type lays out.
    unsafe { ioctl(place, Setter::<XFS_GROW, XfsGrowRaw>::new(request)) }
}

/// What a mounted btrfs says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BtrfsInfo {
    /// The largest number that a device of it has.
    pub device_id_max: u64,
    /// How many devices it has.
    pub devices: u64,
    /// Bytes in a sector: sizes are multiples of it.
    pub sector: u32,
    /// Its identity.
    pub uuid: Uuid,
}

/// The shape of the btrfs that `place` is in.
pub fn btrfs_info(place: impl AsFd) -> Result<BtrfsInfo> {
    // SAFETY: BTRFS_IOC_FS_INFO fills 1024 bytes, which is the size of the type; every bit pattern
    // is valid for it.
    let raw = unsafe { ioctl(place, Getter::<BTRFS_FS_INFO, BtrfsFsInfoRaw>::new()) }?;
    Ok(BtrfsInfo {
        device_id_max: raw.max_id,
        devices: raw.num_devices,
        sector: raw.sectorsize,
        uuid: Uuid::from_bytes(raw.fsid),
    })
}

/// How much of its device number `device_id` the btrfs uses.
pub fn btrfs_device_bytes(place: impl AsFd, device_id: u64) -> Result<u64> {
    let mut raw = BtrfsDevInfoRaw {
        devid: device_id,
        uuid: [0; 16],
        bytes_used: 0,
        total_bytes: 0,
        rest: [0; 4056],
    };
    // SAFETY: BTRFS_IOC_DEV_INFO reads and writes one structure of 4096 bytes, which is the size of
    // the type; every bit pattern is valid for it.
    unsafe {
        ioctl(
            place,
            Updater::<BTRFS_DEV_INFO, BtrfsDevInfoRaw>::new(&mut raw),
        )
    }?;
    Ok(raw.total_bytes)
}

/// How many errors the btrfs has counted on its device number `device_id`, over its whole life.
pub fn btrfs_device_errors(place: impl AsFd, device_id: u64) -> Result<u64> {
    let mut raw = BtrfsStatsRaw {
        devid: device_id,
        nr_items: BTRFS_COUNTERS,
        flags: 0,
        values: [0; 5],
        rest: [0; 121],
    };
    // SAFETY: BTRFS_IOC_GET_DEV_STATS reads and writes one structure of 1032 bytes, which is the size of
    // the type; every bit pattern is valid for it.
    unsafe { ioctl(place, Updater::<BTRFS_STATS, BtrfsStatsRaw>::new(&mut raw)) }?;
    Ok(raw
        .values
        .iter()
        .fold(0, |sum, count| sum.saturating_add(*count)))
}

/// Sets how much of its device number `device_id` the btrfs uses.
pub fn btrfs_resize(place: impl AsFd, device_id: u64, bytes: u64) -> Result<()> {
    let mut request = BtrfsVolumeRaw {
        fd: 0,
        name: [0; 4088],
    };
    for (to, from) in request
        .name
        .iter_mut()
        .zip(format!("{device_id}:{bytes}").bytes())
    {
        *to = from;
    }
    // SAFETY: BTRFS_IOC_RESIZE reads one `struct btrfs_ioctl_vol_args`, which the type lays out; the
    // name is far shorter than its field and so ends with a zero byte.
    let answer = unsafe { ioctl(place, BtrfsResize(request)) }?;
    // The driver answers some refusals with a positive number. The one for a resize is that another
    // exclusive operation runs.
    if answer == 0 {
        Ok(())
    } else {
        Err(Errno::INPROGRESS)
    }
}

/// `BTRFS_IOC_RESIZE`, whose return value matters.
struct BtrfsResize(BtrfsVolumeRaw);

// SAFETY: the opcode is the driver's for a pointer to `struct btrfs_ioctl_vol_args`, which the type lays
// out and the kernel only reads; the output is the plain return value.
unsafe impl Ioctl for BtrfsResize {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        BTRFS_RESIZE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    // SAFETY: the pointer is not used.
    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> Result<IoctlOutput> {
        Ok(out)
    }
}

/// Grows the ext3 or ext4 that `place` is in to so many blocks.
pub fn ext_resize(place: impl AsFd, blocks: u64) -> Result<()> {
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64.
    unsafe { ioctl(place, Setter::<EXT_RESIZE, u64>::new(blocks)) }
}
