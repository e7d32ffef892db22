//! btrfs on one device.

use rustix::io::Errno;
use trellis_api::Bytes;
use uuid::Uuid;

use super::{Mounted, State, Superblock, read};
use crate::error::{Error, Result};
use crate::sys::fsctl;

pub(super) const SUPERBLOCK_OFFSET: u64 = 64 << 10;
pub(super) const SUPERBLOCK_BYTES: usize = 4096;
pub(super) const MAGIC: &[u8; 8] = b"_BHRfS_M";
/// What mkfs.btrfs writes until it is done.
pub(super) const MAGIC_UNFINISHED: &[u8; 8] = b"!BHRfS_M";

/// The driver has found damage.
const FLAG_ERROR: u64 = 1 << 2;

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
    pub(super) fn of_mounted(mounted: &Mounted<'_>) -> Result<Self> {
        let failed = |errno| mounted.refused("read the geometry of", errno);
        let info = fsctl::btrfs_info(&mounted.place).map_err(failed)?;
        if info.devices != 1 {
            return Err(Error::ManyDevices {
                what: mounted.mount_point.to_owned(),
                devices: info.devices,
            });
        }
        for device_id in 1..=info.device_id_max.min(DEVICE_ID_MAX) {
            match fsctl::btrfs_device_bytes(&mounted.place, device_id) {
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

    pub(super) fn grow(&self, mounted: &Mounted<'_>, wanted: Bytes) -> Result<()> {
        fsctl::btrfs_resize(&mounted.place, self.device_id, wanted.get())
            .map_err(|errno| mounted.refused("grow", errno))
    }
}

/// Reads a superblock; `None` if it is not one of btrfs.
pub(super) fn parse(bytes: &[u8]) -> Option<Superblock<BtrfsGeometry>> {
    let (flags, log_root) = (read::le64(bytes, 0x38)?, read::le64(bytes, 0x60)?);
    let state = match &read::array::<8>(bytes, 0x40)? {
        MAGIC if flags & FLAG_ERROR != 0 => State::Errors,
        MAGIC if log_root != 0 => State::Unclean,
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
