//! Observed faults of a volume.

use std::fmt;
use std::path::PathBuf;

use trellis_api::{Bytes, HoldReason};

use super::observe::Observation;

/// Something that is not as it should be. Nothing was changed about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The file behind the device has been deleted.
    BackingDeleted,
    /// The file behind the device is shorter than the device.
    BackingCutOff {
        /// What the file has.
        backing: Bytes,
        /// What the device has.
        device: Bytes,
    },
    /// The device ends before its filesystem.
    DeviceCutOff {
        /// What the device has.
        device: Bytes,
        /// What the filesystem has.
        filesystem: Bytes,
    },
    /// No device carries the file.
    DeviceGone,
    /// Somebody has detached the device; it is there until its last user goes.
    DeviceLeaving,
    /// The filesystem is not mounted at its private place.
    MountGone,
    /// It cannot be seen at a path where it should be.
    PathGone {
        /// The path.
        path: PathBuf,
    },
    /// The mounted filesystem does not answer.
    FilesystemDown,
    /// The mounted filesystem has turned itself read-only.
    StoppedWriting,
    /// The filesystem records errors.
    RecordedErrors,
    /// The filesystem has counted errors of its device, and goes on.
    DeviceErrors {
        /// How many, since it was made or the count was reset.
        errors: u64,
    },
    /// Another process has the volume as its own.
    ForeignUse {
        /// Which, where the kernel tells.
        pid: Option<u32>,
    },
}

impl Fault {
    /// Whether the volume cannot be used as it is: nothing is mounted on top, because that would repair nothing. With
    /// the other faults it is used at its present size, and a growth is refused when it is tried.
    pub fn breaks_use(&self) -> bool {
        match self {
            Fault::BackingDeleted
            | Fault::BackingCutOff { .. }
            | Fault::DeviceCutOff { .. }
            | Fault::DeviceLeaving
            | Fault::FilesystemDown
            | Fault::ForeignUse { .. } => true,
            Fault::StoppedWriting
            | Fault::RecordedErrors
            | Fault::DeviceErrors { .. }
            | Fault::DeviceGone
            | Fault::MountGone
            | Fault::PathGone { .. } => false,
        }
    }

    /// The reason under which this holds a volume.
    pub fn reason(&self) -> HoldReason {
        match self {
            Fault::BackingCutOff { .. } | Fault::DeviceCutOff { .. } => HoldReason::DeviceShrunk,
            Fault::BackingDeleted => HoldReason::ReplicaUnavailable,
            Fault::DeviceGone | Fault::DeviceLeaving => HoldReason::DeviceGone,
            Fault::MountGone | Fault::PathGone { .. } => HoldReason::MountGone,
            Fault::FilesystemDown => HoldReason::FilesystemDown,
            Fault::StoppedWriting | Fault::RecordedErrors | Fault::DeviceErrors { .. } => {
                HoldReason::FilesystemErrors
            }
            Fault::ForeignUse { .. } => HoldReason::ForeignUse,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::BackingDeleted => out.write_str("the file behind the device has been deleted"),
            Fault::BackingCutOff { backing, device } => write!(
                out,
                "the file behind the device has only {backing}, but the device has {device}"
            ),
            Fault::DeviceCutOff { device, filesystem } => write!(
                out,
                "the device has only {device}, but its filesystem has {filesystem}"
            ),
            Fault::DeviceGone => out.write_str("no device carries the volume's file"),
            Fault::DeviceLeaving => {
                out.write_str("somebody has detached the device; it goes with its last user")
            }
            Fault::MountGone => out.write_str("the volume is not mounted at its private place"),
            Fault::PathGone { path } => {
                write!(out, "the volume cannot be seen at {}", path.display())
            }
            Fault::FilesystemDown => out.write_str("the mounted filesystem does not answer"),
            Fault::StoppedWriting => {
                out.write_str("the filesystem has found damage and turned itself read-only")
            }
            Fault::RecordedErrors => out.write_str("the filesystem has recorded errors"),
            Fault::DeviceErrors { errors } => write!(
                out,
                "the filesystem has counted {errors} errors of its device (`btrfs device stats`)"
            ),
            Fault::ForeignUse { pid: Some(pid) } => {
                write!(out, "process {pid} uses the volume as its own")
            }
            Fault::ForeignUse { pid: None } => {
                out.write_str("another process uses the volume as its own")
            }
        }
    }
}

impl Observation {
    /// What is missing of a volume that was in use: with a filesystem or as a device, at these paths. The kernel alone
    /// does not know what should be there; the caller that brought it into use does.
    pub fn missing(&self, with_filesystem: bool, paths: &[PathBuf]) -> Vec<Fault> {
        if self.device.is_none() {
            return vec![Fault::DeviceGone];
        }
        let mut missing = Vec::new();
        if with_filesystem && !self.staged {
            missing.push(Fault::MountGone);
        }
        let is_seen = |path: &PathBuf| self.publications.iter().any(|each| each.path == *path);
        let gone = paths.iter().filter(|path| !is_seen(path));
        missing.extend(gone.map(|path| Fault::PathGone { path: path.clone() }));
        missing
    }
}
