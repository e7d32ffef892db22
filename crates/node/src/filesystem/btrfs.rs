//! btrfs on one device.

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;
use trellis_api::Bytes;
use uuid::Uuid;

use super::{FilesystemKind, State, Superblock, read};
use crate::error::{Error, Result};
use crate::sys::fsctl;

pub(super) const SUPERBLOCK_OFFSET: u64 = 64 << 10;
pub(super) const SUPERBLOCK_BYTES: usize = 4096;
pub(super) const MAGIC: &[u8; 8] = b"_BHRfS_M";
/// What mkfs.btrfs writes until it is done.
pub(super) const MAGIC_UNFINISHED: &[u8; 8] = b"!BHRfS_M";

/// Device numbers are looked for up to this one.
const DEVICE_ID_MAX: u64 = 1024;

/// The shape of a btrfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BtrfsGeometry {
    /// Bytes in a sector, not zero.
    pub sector: u32,
    /// The number of its one device.
    pub device_id: u64,
    /// How much of that device it uses.
    pub device_bytes: u64,
    /// Its identity.
    pub uuid: Uuid,
}

impl BtrfsGeometry {
    pub(super) fn of_mounted(place: &File, mount_point: &Path) -> Result<Self> {
        let failed = |errno: Errno| Error::Io {
            action: "read the geometry of",
            path: mount_point.to_owned(),
            source: errno.into(),
        };
        let info = fsctl::btrfs_info(place).map_err(|errno| match errno {
            Errno::NOTTY => Error::NotThatFilesystem {
                what: mount_point.to_owned(),
                kind: FilesystemKind::Btrfs,
            },
            other => failed(other),
        })?;
        if info.devices != 1 {
            return Err(Error::ManyDevices {
                what: mount_point.to_owned(),
                devices: info.devices,
            });
        }
        for device_id in 1..=info.device_id_max.min(DEVICE_ID_MAX) {
            match fsctl::btrfs_device_bytes(place, device_id) {
                Ok(device_bytes) => {
                    return Ok(BtrfsGeometry {
                        sector: info.sector,
                        device_id,
                        device_bytes,
                        uuid: info.uuid,
                    });
                }
                // Numbers of devices that were removed stay unused.
                Err(Errno::NODEV) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        Err(failed(Errno::NODEV))
    }

    pub(super) fn size(&self) -> Bytes {
        Bytes::new(self.device_bytes)
    }

    /// Whole sectors.
    pub(super) fn largest_fit(&self, device: Bytes) -> Bytes {
        let sector = u64::from(self.sector).max(1);
        Bytes::new(device.get() / sector * sector)
    }

    pub(super) fn grow(&self, place: &File, wanted: Bytes, mount_point: &Path) -> Result<()> {
        fsctl::btrfs_resize(place, self.device_id, wanted.get()).map_err(|errno| match errno {
            Errno::ROFS => Error::ReadOnly {
                what: mount_point.to_owned(),
            },
            Errno::PERM => Error::MissingCapability {
                what: mount_point.to_owned(),
                capability: "CAP_SYS_ADMIN",
            },
            // A balance, a device replacement or another resize is running.
            Errno::INPROGRESS | Errno::BUSY => Error::Busy {
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

/// Reads a superblock; `None` if it is not one of btrfs.
pub(super) fn parse(bytes: &[u8]) -> Option<Superblock<BtrfsGeometry>> {
    let state = match &read::array::<8>(bytes, 0x40)? {
        MAGIC => State::Clean,
        MAGIC_UNFINISHED => State::Unfinished,
        _ => return None,
    };
    // The device's own record begins at 0xc9: its number, then how much of it is used.
    let geometry = BtrfsGeometry {
        uuid: Uuid::from_bytes(read::array(bytes, 0x20)?),
        sector: read::le32(bytes, 0x90).filter(|sector| (512..=65_536).contains(sector))?,
        device_id: read::le64(bytes, 0xc9)?,
        device_bytes: read::le64(bytes, 0xd1)?,
    };
    Some(Superblock { geometry, state })
}

/// The arguments that make a btrfs: metadata twice, because one bad sector there can lose the whole
/// filesystem; data once. Both grow by chunks, so there is no geometry to choose for later.
pub(super) fn make_arguments(uuid: Uuid) -> Vec<String> {
    [
        "-q",
        "-K",
        "-m",
        "dup",
        "-d",
        "single",
        "-U",
        &uuid.to_string(),
    ]
    .map(str::to_owned)
    .into()
}
