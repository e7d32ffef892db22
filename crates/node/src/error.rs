//! The one error type of the crate: what happened, to what, and what to do about it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use trellis_api::Bytes;
use uuid::Uuid;

use crate::filesystem::FilesystemKind;
use crate::holders::{self, Holder};
use crate::iscsi;
use crate::probe::Content;
use crate::sys::mountinfo::Mount;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on this machine could not be done. Unless a variant says otherwise, nothing was
/// changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a system call.
    #[error("could not {action} {path}", path = .path.display())]
    Io {
        /// What was tried, as a verb with its preposition ("open", "read the size of").
        action: &'static str,
        /// What it was tried on.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },

    /// The kernel does not take the options that a volume shall be mounted with.
    #[error("{device} cannot be mounted with {options:?}: this kernel does not take one of these options", device = .device.display())]
    MountOptions {
        /// The device.
        device: PathBuf,
        /// The options.
        options: String,
    },

    /// Every free loop device was taken by others before it could be configured.
    #[error(
        "no loop device could be claimed for {backing} in {attempts} attempts, others take them first; \
         retry when fewer devices are being attached",
        backing = .backing.display()
    )]
    LoopDevicesContended {
        /// The file that needs a device.
        backing: PathBuf,
        /// How often it was tried.
        attempts: u32,
    },

    /// A loop device is already on the file, in another mode than asked for.
    #[error(
        "{device} already carries {backing} {found}; detach it before attaching it in the other mode",
        device = .device.display(), backing = .backing.display(),
        found = if *.found_read_only { "read-only" } else { "for writing" }
    )]
    AttachedInOtherMode {
        /// The device that was found.
        device: PathBuf,
        /// The file it carries.
        backing: PathBuf,
        /// Whether the found device is read-only.
        found_read_only: bool,
    },

    /// A loop device is already on a part of the file.
    #[error(
        "{device} already carries a part of {backing}, not all of it; detach it, nothing of ours makes such a device",
        device = .device.display(), backing = .backing.display()
    )]
    AttachedInPart {
        /// The device that was found.
        device: PathBuf,
        /// The file it carries a part of.
        backing: PathBuf,
    },

    /// The backing file is smaller than the device on it: raising would shrink.
    #[error(
        "the file behind {device} has only {backing}, but the device already has {current}; \
         nothing is ever shrunk, restore the file to at least the device's size",
        device = .device.display()
    )]
    WouldShrink {
        /// The device.
        device: PathBuf,
        /// What the device has.
        current: Bytes,
        /// What the file has.
        backing: Bytes,
    },

    /// The size that was read back is not the size that was asked for.
    #[error(
        "{what} measures {measured} where {wanted} was wanted; raise the layer below first, or retry \
         if it was raised a moment ago",
        what = .what.display()
    )]
    NotRaised {
        /// The device or mount point.
        what: PathBuf,
        /// What was measured.
        measured: Bytes,
        /// What was wanted.
        wanted: Bytes,
    },

    /// Somebody still uses what should go away.
    #[error("{what} {state}", what = .what.display(), state = in_use(.holders, .covered_by.as_deref()))]
    Busy {
        /// The mount point or device.
        what: PathBuf,
        /// Who uses it, as far as it could be found cheaply.
        holders: Vec<Holder>,
        /// What is mounted over it, if that is what keeps it.
        covered_by: Option<Box<Mount>>,
    },

    /// The operation needs a capability that the process lacks.
    #[error("{what} needs the capability {capability}, which this process lacks; grant it and retry", what = .what.display())]
    MissingCapability {
        /// The mount point or device.
        what: PathBuf,
        /// The capability's name.
        capability: &'static str,
    },

    /// The filesystem has recorded errors and does not grow until they are repaired.
    #[error("the filesystem at {what} has recorded errors; unmount it, run `{repair}`, and retry", what = .what.display())]
    FilesystemErrors {
        /// The mount point or device.
        what: PathBuf,
        /// What repairs it.
        repair: Repair,
    },

    /// The filesystem does not answer any more: it has shut itself down, or its device fails.
    #[error("the filesystem at {what} has stopped; look at the disk below, then unmount it and mount it again", what = .what.display())]
    FilesystemDown {
        /// The mount point.
        what: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },

    /// An idle filesystem was left in the middle of its work.
    #[error("the {kind} filesystem on {device} was not unmounted cleanly; mount it, which replays its journal", device = .device.display())]
    FilesystemUnclean {
        /// The device.
        device: PathBuf,
        /// The filesystem.
        kind: FilesystemKind,
    },

    /// The filesystem was made so that it cannot become that large.
    #[error(
        "the {kind} filesystem at {what} cannot become {wanted}, its geometry ends at {limit}; \
         ask for that at most, or copy the data to a new volume",
        what = .what.display()
    )]
    GeometryLimit {
        /// The mount point or device.
        what: PathBuf,
        /// The filesystem.
        kind: FilesystemKind,
        /// The largest size that it can have.
        limit: Bytes,
        /// What was wanted.
        wanted: Bytes,
    },

    /// The kernel does not grow a filesystem with these features.
    #[error("this kernel does not grow the {kind} filesystem at {what} with the features that it has; use its own tools", what = .what.display())]
    GrowthUnsupported {
        /// The mount point.
        what: PathBuf,
        /// The filesystem.
        kind: FilesystemKind,
    },

    /// The filesystem does one such operation at a time, and another one is running.
    #[error("another operation on the filesystem at {what} is running; retry when it has ended", what = .what.display())]
    OperationRunning {
        /// The mount point.
        what: PathBuf,
    },

    /// The device ends before the filesystem that is on it.
    #[error(
        "{device} has only {size}, but its filesystem has {filesystem}: it has been cut off; \
         restore what is below to at least that size",
        device = .device.display()
    )]
    DeviceCutOff {
        /// The device.
        device: PathBuf,
        /// What the device has.
        size: Bytes,
        /// What the filesystem has.
        filesystem: Bytes,
    },

    /// Another process has the volume as its own.
    #[error("{what} is used by another process{owner}; stop it and retry", what = .what.display(), owner = owner(*.pid))]
    ForeignUse {
        /// The volume's file.
        what: PathBuf,
        /// The process, if the kernel tells it here.
        pid: Option<u32>,
    },

    /// The filesystem cannot be grown in the mode it is mounted.
    #[error("{what} is mounted read-only and cannot grow; grow it through a mount that may write", what = .what.display())]
    ReadOnly {
        /// The mount point.
        what: PathBuf,
    },

    /// The filesystem spans several devices.
    #[error("the filesystem at {what} spans {devices} devices; only filesystems on one device are grown", what = .what.display())]
    ManyDevices {
        /// The mount point.
        what: PathBuf,
        /// How many.
        devices: u64,
    },

    /// The device holds something that is not ours to overwrite.
    #[error("{device} holds {found} and is not overwritten; wipe it yourself if the content is not needed", device = .device.display())]
    NotEmpty {
        /// The device.
        device: PathBuf,
        /// What was found on it.
        found: Box<Content>,
    },

    /// The device once held a filesystem, and is empty.
    #[error(
        "{device} once held a filesystem ({kind}) and is empty now; what was on it is lost, and it is not formatted anew",
        device = .device.display()
    )]
    FilesystemGone {
        /// The device.
        device: PathBuf,
        /// The filesystem that it had.
        kind: FilesystemKind,
    },

    /// The device holds another filesystem than the one asked for.
    #[error("{device} holds {found}, not {asked}; ask for {found}, or use another volume", device = .device.display())]
    OtherFilesystem {
        /// The device.
        device: PathBuf,
        /// What is there.
        found: FilesystemKind,
        /// What was asked for.
        asked: FilesystemKind,
    },

    /// The place does not hold the expected filesystem.
    #[error("{what} does not hold a readable {kind} filesystem; check the device with the filesystem's own tools", what = .what.display())]
    NotThatFilesystem {
        /// The device, file or mount point.
        what: PathBuf,
        /// What was expected.
        kind: FilesystemKind,
    },

    /// The device is too small for the filesystem.
    #[error("{device} has {size}, but {kind} needs at least {minimum}; ask for more, or for another filesystem", device = .device.display())]
    TooSmall {
        /// The device.
        device: PathBuf,
        /// Its size.
        size: Bytes,
        /// The filesystem.
        kind: FilesystemKind,
        /// What it needs.
        minimum: Bytes,
    },

    /// A note about a filesystem that is being made cannot be understood.
    #[error("{path} is not a note about a filesystem in the making; if {device} holds nothing of value, remove the note",
        path = .path.display(), device = .device.display())]
    BadIntent {
        /// The note.
        path: PathBuf,
        /// The device that it is about.
        device: PathBuf,
    },

    /// Several filesystems answer to one identity.
    #[error("{device} was meant to hold the filesystem {wanted}, but {found} was read back; do not use it until it was checked",
        device = .device.display())]
    OtherIdentity {
        /// The device.
        device: PathBuf,
        /// What was to be made.
        wanted: Uuid,
        /// What was found.
        found: Uuid,
    },

    /// The path a consumer asked for cannot be used. Nothing was changed.
    #[error("the path {path} cannot be used: {reason}", path = .path.display())]
    UnusablePath {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        reason: PathProblem,
    },

    /// No device is on the file.
    #[error("no loop device carries {backing}; attach it first", backing = .backing.display())]
    NotAttached {
        /// The file.
        backing: PathBuf,
    },

    /// Nothing is mounted where a volume's filesystem should be.
    #[error("nothing is mounted at {staging}; stage the volume first", staging = .staging.display())]
    NotStaged {
        /// The place.
        staging: PathBuf,
    },

    /// A block device cannot be made read-only for one of its users.
    #[error("{device} can be written to, and a path to it cannot forbid that; attach it read-only", device = .device.display())]
    DeviceWritable {
        /// The device.
        device: PathBuf,
    },

    /// A program is not installed.
    #[error("the program {program} is not installed; install the package {package}")]
    ProgramMissing {
        /// The program.
        program: &'static str,
        /// The package that has it under the common distributions' names.
        package: &'static str,
    },

    /// A program ended with an error.
    #[error("{program} failed ({status}): {output}")]
    ProgramFailed {
        /// The program.
        program: &'static str,
        /// Its exit status in words.
        status: std::process::ExitStatus,
        /// The end of what it printed.
        output: String,
    },

    /// A program did not end in time and was killed.
    #[error(
        "{program} did not end within {limit:?} and was killed; look for a device that does not answer"
    )]
    ProgramTimedOut {
        /// The program.
        program: &'static str,
        /// How long it had.
        limit: Duration,
    },

    /// The kernel's iSCSI initiator could not do what was asked.
    #[error("the iSCSI target {target} at {portal}: {problem}")]
    Initiator {
        /// The target's name.
        target: String,
        /// Where it should answer.
        portal: SocketAddr,
        /// What is the matter.
        problem: iscsi::Problem,
    },

    /// The kernel speaks too old a form of the FUSE protocol.
    #[error("this kernel's FUSE is too old to serve a volume at {mount_point}; use Linux 4.20 or later",
        mount_point = .mount_point.display())]
    FuseTooOld {
        /// Where the volume was to be mounted.
        mount_point: PathBuf,
    },

    /// The kernel wrote something that does not follow its documented format.
    #[error("line {line} of {path} is not in the kernel's documented form", path = .path.display())]
    KernelText {
        /// The file.
        path: PathBuf,
        /// Which line, from one.
        line: usize,
    },
}

/// The command that repairs a filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The filesystem.
    pub kind: FilesystemKind,
    /// The device that it is on.
    pub device: PathBuf,
}

impl fmt::Display for Repair {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = match self.kind {
            FilesystemKind::Xfs => "xfs_repair",
            // Its repair mode can make things worse; what the check says comes first.
            FilesystemKind::Btrfs => "btrfs check",
            FilesystemKind::Ext4 | FilesystemKind::Ext3 => "e2fsck -f",
        };
        write!(out, "{program} {}", self.device.display())
    }
}

/// What makes a path unusable for publishing or staging.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathProblem {
    /// It is relative, or has no last component.
    #[error("it is not absolute with a plain last component; give a full path")]
    NotAbsolute,
    /// Something above it is not a directory.
    #[error("something above it is not a directory; choose another path")]
    ParentNotADirectory,
    /// The symbolic links above it lead in a circle.
    #[error("the symbolic links above it lead in a circle; give the real path")]
    LinkLoop,
    /// The kernel takes no path or name of that length.
    #[error("it is longer than the kernel allows; choose a shorter path")]
    TooLong,
    /// It is a symbolic link.
    #[error("it is a symbolic link; give the real path")]
    Symlink,
    /// A directory is needed and something else is there.
    #[error("it exists and is not a directory; remove it or choose another path")]
    NotADirectory,
    /// A plain file is needed and something else is there.
    #[error("it exists and is not an empty plain file; remove it or choose another path")]
    NotAnEmptyFile,
    /// The directory has entries that a mount would hide.
    #[error("the directory is not empty; empty it or choose another path")]
    NotEmpty,
    /// Something else is mounted there.
    #[error("{0} is already mounted there; unmount it or choose another path")]
    OtherMount(String),
}

impl PathProblem {
    /// The problem with a path that the kernel refuses to follow for its form, so that nothing can
    /// be there; `None` for every other refusal.
    pub(crate) fn of_refusal(errno: Errno) -> Option<PathProblem> {
        match errno {
            Errno::NOTDIR => Some(PathProblem::ParentNotADirectory),
            Errno::LOOP => Some(PathProblem::LinkLoop),
            Errno::NAMETOOLONG => Some(PathProblem::TooLong),
            _ => None,
        }
    }
}

/// The tail of a sentence about something that is in use: by whom, and what to do.
fn in_use(holders: &[Holder], covered_by: Option<&Mount>) -> String {
    match covered_by {
        Some(cover) => format!(
            "is covered by {}, which is mounted at {}; unmount that and retry",
            cover.describe(),
            cover.mount_point.display()
        ),
        None => format!(
            "is in use{}; stop the user and retry",
            holders::sentence(holders)
        ),
    }
}

fn owner(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" ({pid})")).unwrap_or_default()
}

/// Puts the action and the subject to a kernel error.
pub(crate) trait Context<T> {
    fn context(self, action: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, action: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|source| Error::Io {
            action,
            path: path.as_ref().to_owned(),
            source: source.into(),
        })
    }
}

impl Error {
    /// The kernel's error number, where the kernel gave one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::Io { source, .. } => Errno::from_io_error(source),
            _ => None,
        }
    }
}
