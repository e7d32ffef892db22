//! The hold that a person reads for each error.

use trellis_api::HoldReason;

use crate::error::{Error, PathProblem};
use crate::iscsi::Problem;

impl Error {
    /// The reason, from the finite list, under which this error holds a volume.
    pub fn reason(&self) -> HoldReason {
        match self {
            Error::MountOptions { .. } => HoldReason::MountOptionRefused,
            Error::Busy { .. } => HoldReason::StillInUse,
            Error::MissingCapability { .. } => HoldReason::MissingCapability,
            Error::FilesystemErrors { .. } => HoldReason::FilesystemErrors,
            Error::FilesystemDown { .. } => HoldReason::FilesystemDown,
            Error::FilesystemUnclean { .. } => HoldReason::FilesystemUnclean,
            Error::GeometryLimit { .. } => HoldReason::GeometryLimit,
            Error::OperationRunning { .. } => HoldReason::OperationRunning,
            Error::WouldShrink { .. } | Error::DeviceCutOff { .. } => HoldReason::DeviceShrunk,
            Error::ForeignUse { .. } => HoldReason::ForeignUse,
            Error::ReadOnly { .. } => HoldReason::ReadOnly,
            Error::ManyDevices { .. }
            | Error::NotThatFilesystem { .. }
            | Error::GrowthUnsupported { .. } => HoldReason::FilesystemUnsupported,
            Error::FilesystemGone { .. } => HoldReason::FilesystemGone,
            Error::OtherFilesystem { .. } => HoldReason::FilesystemMismatch,
            Error::NotEmpty { .. } | Error::BadIntent { .. } | Error::OtherIdentity { .. } => {
                HoldReason::ForeignData
            }
            Error::ProgramMissing { .. } => HoldReason::MissingProgram,
            Error::UnusablePath { reason, .. } => match reason {
                PathProblem::NotAbsolute
                | PathProblem::Symlink
                | PathProblem::ParentNotADirectory
                | PathProblem::LinkLoop
                | PathProblem::TooLong => HoldReason::PathInvalid,
                _ => HoldReason::PathBusy,
            },
            Error::NotAttached { .. } => HoldReason::DeviceGone,
            Error::NotStaged { .. } => HoldReason::MountGone,
            Error::TooSmall { .. } => HoldReason::SizeTooSmall,
            Error::Initiator { problem, .. } => match problem {
                Problem::Unreachable => HoldReason::TargetDown,
                _ => HoldReason::KernelRefused,
            },
            Error::Io { .. }
            | Error::LoopDevicesContended { .. }
            | Error::AttachedInOtherMode { .. }
            | Error::AttachedInPart { .. }
            | Error::NotRaised { .. }
            | Error::DeviceWritable { .. }
            | Error::ProgramFailed { .. }
            | Error::ProgramTimedOut { .. }
            | Error::FuseTooOld { .. }
            | Error::KernelText { .. } => HoldReason::KernelRefused,
        }
    }
}
