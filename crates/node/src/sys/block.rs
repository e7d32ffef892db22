//! Facts about a block device: its number, size, logical block and mode.

#![allow(unsafe_code)]

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Result;
use rustix::ioctl::{Getter, NoArg, Setter, ioctl, opcode};
use serde::Serialize;
use trellis_api::Bytes;

const BLKROSET: u32 = opcode::none(0x12, 93);
const BLKROGET: u32 = opcode::none(0x12, 94);
const BLKFLSBUF: u32 = opcode::none(0x12, 97);
const BLKSSZGET: u32 = opcode::none(0x12, 104);
const BLKGETSIZE64: u32 = opcode::read::<usize>(0x12, 114);

/// The kernel's number of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct DeviceNumber {
    /// Which driver.
    pub major: u32,
    /// Which of the driver's devices.
    pub minor: u32,
}

impl DeviceNumber {
    /// Takes apart a number as `stat` gives it.
    pub fn from_stat(number: u64) -> Self {
        DeviceNumber {
            major: rustix::fs::major(number),
            minor: rustix::fs::minor(number),
        }
    }

    /// The number of the block device at `path`, or `None` if something else is there.
    pub fn of_block_device(path: &Path) -> std::io::Result<Option<Self>> {
        let meta = std::fs::metadata(path)?;
        Ok(meta
            .file_type()
            .is_block_device()
            .then(|| Self::from_stat(meta.rdev())))
    }

    /// The device's node, by the name that the kernel gives it; `None` if there is no such device.
    pub fn node(self) -> Option<PathBuf> {
        let described = std::fs::read_link(self.sysfs()).ok()?;
        Some(Path::new("/dev").join(described.file_name()?))
    }

    /// Where sysfs describes the device.
    pub fn sysfs(self) -> PathBuf {
        PathBuf::from(format!("/sys/dev/block/{self}"))
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.major, self.minor)
    }
}

/// The device's size (`BLKGETSIZE64`).
pub fn size(device: impl AsFd) -> Result<Bytes> {
    // SAFETY: BLKGETSIZE64 writes one u64 into the Getter's own buffer of that type.
    unsafe { ioctl(device, Getter::<BLKGETSIZE64, u64>::new()) }.map(Bytes::new)
}

/// The device's logical block (`BLKSSZGET`): the smallest write that it takes.
pub fn logical_block(device: impl AsFd) -> Result<Bytes> {
    // SAFETY: BLKSSZGET writes one C int into the Getter's own buffer of that type.
    let size = unsafe { ioctl(device, Getter::<BLKSSZGET, i32>::new()) }?;
    u64::try_from(size)
        .map(Bytes::new)
        .map_err(|_| rustix::io::Errno::RANGE)
}

/// Whether the device refuses writes (`BLKROGET`).
pub fn read_only(device: impl AsFd) -> Result<bool> {
    // SAFETY: BLKROGET writes one C int into the Getter's own buffer of that type.
    unsafe { ioctl(device, Getter::<BLKROGET, i32>::new()) }.map(|flag| flag != 0)
}

/// Has the device refuse writes, or take them (`BLKROSET`).
pub fn set_read_only(device: impl AsFd, read_only: bool) -> Result<()> {
    // SAFETY: BLKROSET reads one C int, which the Setter owns for the duration of the call.
    unsafe { ioctl(device, Setter::<BLKROSET, i32>::new(read_only.into())) }
}

/// Writes back and drops what the kernel caches of the device (`BLKFLSBUF`), so that the next read
/// comes from the device itself.
pub fn drop_cache(device: impl AsFd) -> Result<()> {
    // SAFETY: BLKFLSBUF takes no argument and touches no memory of this process.
    unsafe { ioctl(device, NoArg::<BLKFLSBUF>::new()) }
}

/// Opens a device for reading, without a claim on it.
pub fn open(device: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(no_surprises())
        .open(device)
}

/// Opens a block device so that no other exclusive user (a mount, mkfs, another claim) can have it
/// at the same time; fails with EBUSY if one has it.
pub fn open_exclusive(device: &Path) -> std::io::Result<File> {
    let exclusive = no_surprises() | i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
    OpenOptions::new()
        .read(true)
        .custom_flags(exclusive)
        .open(device)
}

/// A path that names a FIFO or a terminal must neither block us nor become our terminal.
fn no_surprises() -> i32 {
    i32::try_from((OFlags::NONBLOCK | OFlags::NOCTTY).bits()).unwrap_or_default()
}
