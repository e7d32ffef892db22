//! Making a filesystem with the system's mkfs programs.

use std::path::Path;
use std::time::Duration;

use trellis_api::Bytes;
use uuid::Uuid;

use super::{FilesystemKind, Geometry, btrfs, ext, measure_idle, xfs};
use crate::error::{Context, Error, Result};
use crate::exec::Program;
use crate::sys::block;

/// Making a filesystem writes little. A device that has not taken it within this time does not answer.
const TIME_MAX: Duration = Duration::from_secs(300);

/// The program that makes a filesystem of that kind.
pub const fn maker(kind: FilesystemKind) -> Program {
    match kind {
        FilesystemKind::Xfs => Program {
            name: "mkfs.xfs",
            package: "xfsprogs",
        },
        FilesystemKind::Btrfs => Program {
            name: "mkfs.btrfs",
            package: "btrfs-progs",
        },
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => Program {
            name: "mke2fs",
            package: "e2fsprogs",
        },
    }
}

fn make_arguments(kind: FilesystemKind, device_size: Bytes, uuid: Uuid) -> Vec<String> {
    match kind {
        FilesystemKind::Xfs => xfs::make_arguments(device_size, uuid),
        FilesystemKind::Btrfs => btrfs::make_arguments(uuid),
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => ext::make_arguments(kind, device_size, uuid),
    }
}

/// Makes a filesystem of that identity on the whole device, with a geometry that can grow, and reads
/// it back.
///
/// The caller is responsible for the content; [`crate::volume::ensure_filesystem`] checks it first. `overwrite` lets
/// the program replace what it finds; without it xfs and btrfs check once more themselves.
pub fn make(kind: FilesystemKind, device: &Path, uuid: Uuid, overwrite: bool) -> Result<Geometry> {
    let size = require_size(kind, device)?;
    let mut arguments = make_arguments(kind, size, uuid);
    if overwrite {
        arguments.push(
            if maker(kind).name == "mke2fs" {
                "-F"
            } else {
                "-f"
            }
            .to_owned(),
        );
    }
    arguments.push(device.to_string_lossy().into_owned());
    maker(kind).run(&arguments, TIME_MAX)?;
    let made = measure_idle(kind, device)?;
    if made.uuid() != uuid {
        return Err(Error::OtherIdentity {
            device: device.to_owned(),
            wanted: uuid,
            found: made.uuid(),
        });
    }
    Ok(made)
}

/// The device's size, which has to be enough for the filesystem.
pub(crate) fn require_size(kind: FilesystemKind, device: &Path) -> Result<Bytes> {
    let node = block::open(device).context("open", device)?;
    let size = block::size(&node).context("read the size of", device)?;
    let minimum = kind.size_min();
    if size < minimum {
        return Err(Error::TooSmall {
            device: device.to_owned(),
            size,
            kind,
            minimum,
        });
    }
    Ok(size)
}
