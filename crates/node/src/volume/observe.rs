//! The state of a volume on this node, from the kernel alone.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use trellis_api::Bytes;

use super::device::{self, AttachedDevice};
use super::fault::Fault;
use super::own;
use super::place::{self, MountPlace};
use crate::error::{Context, Error, Result};
use crate::filesystem::{self, FilesystemKind, Geometry, State};
use crate::probe::{self, Content};
use crate::sys::block::DeviceNumber;
use crate::sys::mountinfo::{self, Mount};

/// Everything that this node knows about a volume, measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The size of the volume's file, if it has one.
    pub backing: Option<Bytes>,
    /// The device on it.
    pub device: Option<AttachedDevice>,
    /// The filesystem on the device, unless the device itself is published.
    pub filesystem: Option<ObservedFilesystem>,
    /// Whether it is mounted at its private place.
    pub staged: bool,
    /// Whether that mount refuses writes.
    pub staged_read_only: bool,
    /// Where else it can be seen.
    pub publications: Vec<Publication>,
    /// Its faults, as far as the kernel alone knows; [`Observation::missing`] has the rest.
    pub faults: Vec<Fault>,
}

/// A filesystem as measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedFilesystem {
    /// Its shape, and with it its kind and size.
    pub geometry: Geometry,
    /// The largest it can be on the device as it is now. Growth is complete when the size is this.
    pub largest_fit: Bytes,
}

/// A path at which a volume can be seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    /// The path.
    pub path: PathBuf,
    /// Whether it refuses writes. A path to a device refuses what the device refuses.
    pub read_only: bool,
    /// Whether the path is the device itself, not its filesystem.
    pub block: bool,
}

/// How full a mounted filesystem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// All bytes that files could have.
    pub bytes_total: Bytes,
    /// Bytes in use.
    pub bytes_used: Bytes,
    /// Bytes that a user without privileges can still write.
    pub bytes_available: Bytes,
    /// All inodes; zero where they are made as needed.
    pub inodes_total: u64,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Inodes that can still be made.
    pub inodes_available: u64,
}

/// How many volumes this process has observed.
static OBSERVATIONS: AtomicU64 = AtomicU64::new(0);

/// How often this process has observed a volume, over all volumes.
pub fn observations() -> u64 {
    OBSERVATIONS.load(Ordering::Relaxed)
}

/// Observes the volume whose file is `backing` and whose private place is `staging`.
pub fn observe(backing: &Path, staging: &Path) -> Result<Observation> {
    OBSERVATIONS.fetch_add(1, Ordering::Relaxed);
    let found = device::find_loop(backing)?;
    let mounts = mountinfo::read()?;
    let backing_size = match device::backing_size(backing) {
        Ok(size) => Some(size),
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let owner = own::other_owner(backing).map(|pid| Fault::ForeignUse { pid });
    let mut faults: Vec<Fault> = owner.into_iter().collect();
    let Some(found) = found else {
        return Ok(Observation {
            backing: backing_size,
            faults,
            ..Observation::default()
        });
    };
    faults.extend(found.backing_deleted.then_some(Fault::BackingDeleted));
    faults.extend(found.autoclear.then_some(Fault::DeviceLeaving));
    let device = device::describe(found, true)?;
    on_device(backing_size, device, &mounts, staging, faults)
}

/// Observes the volume that a disk of the initiator carries, and whose private place is `staging`.
pub(super) fn observe_disk(device: Option<AttachedDevice>, staging: &Path) -> Result<Observation> {
    OBSERVATIONS.fetch_add(1, Ordering::Relaxed);
    match device {
        Some(device) => on_device(None, device, &mountinfo::read()?, staging, Vec::new()),
        None => Ok(Observation::default()),
    }
}

/// What is on a device, and where it can be seen.
fn on_device(
    backing: Option<Bytes>,
    device: AttachedDevice,
    mounts: &[Mount],
    staging: &Path,
    mut faults: Vec<Fault>,
) -> Result<Observation> {
    let staging_mount = match MountPlace::find(staging)? {
        Some(place) => place.mounted_id()?,
        None => None,
    };
    let is_staging = |mount: &Mount| Some(mount.id) == staging_mount;
    let staged = mountinfo::of(mounts, device.number).find(|mount| is_staging(mount));
    let publications: Vec<Publication> = mounts
        .iter()
        .filter_map(|mount| publication(mount, &device, &is_staging))
        .collect();
    let filesystem = match staged {
        Some(mount) => mounted_filesystem(mount, &device.path, &mut faults)?,
        // What somebody does with a device that was given as such is not looked at.
        None if publications.iter().any(|each| each.block) => None,
        None => idle_filesystem(&device.path, &mut faults)?,
    };
    faults.extend(cut_off(backing, &device, filesystem));
    Ok(Observation {
        backing,
        staged: staged.is_some(),
        staged_read_only: staged.is_some_and(Mount::read_only),
        filesystem: filesystem.map(|geometry| ObservedFilesystem {
            geometry,
            largest_fit: geometry.largest_fit(device.size),
        }),
        publications,
        device: Some(device),
        faults,
    })
}

/// Whether something ends before what it carries.
fn cut_off(
    backing: Option<Bytes>,
    device: &AttachedDevice,
    filesystem: Option<Geometry>,
) -> Option<Fault> {
    if let Some(filesystem) = filesystem.map(|geometry| geometry.size())
        && filesystem > device.size
    {
        return Some(Fault::DeviceCutOff {
            device: device.size,
            filesystem,
        });
    }
    let backing = backing.filter(|backing| *backing < device.size)?;
    Some(Fault::BackingCutOff {
        backing,
        device: device.size,
    })
}

/// Every path at which the volume on `device` can be seen: its filesystem, or the device itself.
pub fn shown_at(device: &Path) -> Result<Vec<PathBuf>> {
    let number = place::number_of(device)?;
    let shows = |mount: &Mount| mount.is_of(number) || shows_node(mount, device, number);
    let mounts = mountinfo::read()?.into_iter();
    let shown = mounts.filter(shows).map(|mount| mount.mount_point);
    Ok(shown.collect())
}

/// How full the filesystem at `path` is.
pub fn usage(path: &Path) -> Result<Usage> {
    let stat = rustix::fs::statvfs(path).context("read the usage of", path)?;
    let bytes = |blocks: u64| Bytes::new(blocks.saturating_mul(stat.f_frsize));
    Ok(Usage {
        bytes_total: bytes(stat.f_blocks),
        bytes_used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
        bytes_available: bytes(stat.f_bavail),
        inodes_total: stat.f_files,
        inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
        inodes_available: stat.f_favail,
    })
}

fn mounted_filesystem(
    mount: &Mount,
    device: &Path,
    faults: &mut Vec<Fault>,
) -> Result<Option<Geometry>> {
    let Ok(kind) = mount.fs_type.parse::<FilesystemKind>() else {
        return Ok(None);
    };
    faults.extend(mount.stopped_writing().then_some(Fault::StoppedWriting));
    faults.extend(filesystem::has_recorded_errors(kind, device).then_some(Fault::RecordedErrors));
    match filesystem::measure_mounted(kind, &mount.mount_point, device) {
        Ok(_) if mount.has_shut_down() => faults.push(Fault::FilesystemDown),
        Ok(geometry) => {
            let errors = filesystem::device_errors(&geometry, &mount.mount_point, device)?;
            faults.extend((errors > 0).then_some(Fault::DeviceErrors { errors }));
            return Ok(Some(geometry));
        }
        Err(Error::FilesystemDown { .. }) => faults.push(Fault::FilesystemDown),
        Err(error) => return Err(error),
    }
    Ok(None)
}

fn idle_filesystem(device: &Path, faults: &mut Vec<Fault>) -> Result<Option<Geometry>> {
    match probe::probe(device)? {
        Content::Filesystem {
            geometry, state, ..
        } => {
            faults.extend((state == State::Errors).then_some(Fault::RecordedErrors));
            Ok(Some(geometry))
        }
        Content::Empty | Content::Foreign { .. } => Ok(None),
    }
}

fn publication(
    mount: &Mount,
    device: &AttachedDevice,
    is_staging: &impl Fn(&Mount) -> bool,
) -> Option<Publication> {
    let path = mount.mount_point.clone();
    if mount.is_of(device.number) {
        return (!is_staging(mount)).then(|| Publication {
            path,
            read_only: mount.read_only(),
            block: false,
        });
    }
    shows_node(mount, &device.path, device.number).then_some(Publication {
        path,
        read_only: device.read_only,
        block: true,
    })
}

/// Whether the mount is a bind of the device's node: it shows as a piece of the filesystem of /dev,
/// also where another mount hides it.
pub(super) fn shows_node(mount: &Mount, device: &Path, number: DeviceNumber) -> bool {
    let is_visible = || {
        let shown = DeviceNumber::of_block_device(&mount.mount_point);
        shown.ok().flatten() == Some(number)
    };
    let is_of_its_filesystem = || {
        let node = rustix::fs::stat(device);
        node.is_ok_and(|node| DeviceNumber::from_stat(node.st_dev) == mount.device)
    };
    mount.root.file_name() == device.file_name() && (is_visible() || is_of_its_filesystem())
}
