//! A mounted filesystem, measured and raised through its open root.

use std::fs::File;
use std::path::Path;

use rustix::io::Errno;
use trellis_api::Bytes;

use super::{BtrfsGeometry, FilesystemKind, Geometry, Outcome, XfsGeometry, measure_idle, refusal};
use crate::error::{Context, Error, Result};
use crate::sys::{block, fsctl};

/// A mounted filesystem, held open by its root. It may be mounted where no path leads.
pub(crate) struct Mounted<'a> {
    pub(super) kind: FilesystemKind,
    pub(super) place: File,
    /// Where it is mounted: its name in errors.
    pub(super) mount_point: &'a Path,
    pub(super) device: &'a Path,
}

impl<'a> Mounted<'a> {
    /// Opens the root of the filesystem that is mounted at `mount_point` from `device`.
    pub(crate) fn open(
        kind: FilesystemKind,
        mount_point: &'a Path,
        device: &'a Path,
    ) -> Result<Mounted<'a>> {
        let place = File::open(mount_point).map_err(|source| {
            let is_down = Errno::from_io_error(&source).is_some_and(refusal::is_down);
            let what = mount_point.to_owned();
            match is_down {
                true => Error::FilesystemDown { what, source },
                false => Error::Io {
                    action: "open",
                    path: what,
                    source,
                },
            }
        })?;
        Ok(Self::at(kind, place, mount_point, device))
    }

    /// The filesystem whose root is open already.
    pub(crate) fn at(
        kind: FilesystemKind,
        place: File,
        mount_point: &'a Path,
        device: &'a Path,
    ) -> Mounted<'a> {
        Mounted {
            kind,
            place,
            mount_point,
            device,
        }
    }

    pub(crate) fn measure(&self) -> Result<Geometry> {
        match self.kind {
            FilesystemKind::Xfs => XfsGeometry::of_mounted(self).map(Geometry::Xfs),
            FilesystemKind::Btrfs => BtrfsGeometry::of_mounted(self).map(Geometry::Btrfs),
            FilesystemKind::Ext4 | FilesystemKind::Ext3 => measure_idle(self.kind, self.device)
                .map_err(|error| match error {
                    Error::NotThatFilesystem { kind, .. } => Error::NotThatFilesystem {
                        what: self.mount_point.to_owned(),
                        kind,
                    },
                    other => other,
                }),
        }
    }

    /// Raises it to fill its device, and reads the size back.
    pub(crate) fn grow(&self) -> Result<Outcome> {
        let before = self.measure()?;
        let Some(wanted) = growth(&before, self.mount_point, self.device)? else {
            let size = before.size();
            return Ok(Outcome::Unchanged { size });
        };
        match before {
            Geometry::Xfs(geometry) => geometry.grow(self, wanted)?,
            Geometry::Btrfs(geometry) => geometry.grow(self, wanted)?,
            Geometry::Ext(geometry) => geometry.grow(self, wanted)?,
        }
        let measured = self.measure()?.size();
        if measured < wanted {
            return Err(Error::NotRaised {
                what: self.mount_point.to_owned(),
                measured,
                wanted,
            });
        }
        Ok(Outcome::Raised {
            from: before.size(),
            to: measured,
        })
    }
}

/// The size to which a filesystem of that shape can be raised on its device; `None` if it is already there. It is an
/// error if the device ends before its filesystem, or if the shape cannot reach the size.
pub(crate) fn growth(before: &Geometry, what: &Path, device: &Path) -> Result<Option<Bytes>> {
    let node = block::open(device).context("open", device)?;
    let device_size = block::size(&node).context("read the size of", device)?;
    if before.size() > device_size {
        return Err(Error::DeviceCutOff {
            device: device.to_owned(),
            size: device_size,
            filesystem: before.size(),
        });
    }
    let wanted = before.largest_fit(device_size);
    if before.size() >= wanted {
        return Ok(None);
    }
    match before.limit() {
        Some(limit) if wanted > limit => Err(Error::GeometryLimit {
            what: what.to_owned(),
            kind: before.kind(),
            limit,
            wanted,
        }),
        _ => Ok(Some(wanted)),
    }
}

/// The number of device errors that a mounted btrfs has counted; the other filesystems keep no such count.
pub(crate) fn device_errors(geometry: &Geometry, mount_point: &Path, device: &Path) -> Result<u64> {
    let Geometry::Btrfs(shape) = geometry else {
        return Ok(0);
    };
    let mounted = Mounted::open(FilesystemKind::Btrfs, mount_point, device)?;
    fsctl::btrfs_device_errors(&mounted.place, shape.device_id)
        .map_err(|errno| mounted.refused("read the error counts of", errno))
}

/// Measures the filesystem that is mounted at `mount_point` from the device `device`.
pub fn measure_mounted(
    kind: FilesystemKind,
    mount_point: &Path,
    device: &Path,
) -> Result<Geometry> {
    Mounted::open(kind, mount_point, device)?.measure()
}

/// Raises the filesystem mounted at `mount_point` to fill its device, and reads the size back.
pub fn grow_mounted(kind: FilesystemKind, mount_point: &Path, device: &Path) -> Result<Outcome> {
    Mounted::open(kind, mount_point, device)?.grow()
}
