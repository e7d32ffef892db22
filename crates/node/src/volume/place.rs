//! A path for a mount, held through its parent directory.
//!
//! The parent is opened once and everything is done relative to it, so a later rename or symbolic link cannot lead a
//! mount elsewhere. Links in the directories above are followed, because many systems have them; the last component
//! must not be one.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, Stat, XattrFlags};
use rustix::io::Errno;

use crate::error::{Context, Error, PathProblem, Result};
use crate::filesystem;
use crate::holders;
use crate::sys::block::DeviceNumber;
use crate::sys::mount;
use crate::sys::mountinfo::{self, Mount};

/// Marks a directory or file that was made here, so that it is removed again, even by a later process.
const MARK: &str = "trusted.trellis.made";
/// Others have no business below a volume's mount point before it is mounted.
const DIRECTORY_MODE: u32 = 0o750;
const FILE_MODE: u32 = 0o640;

/// A mount may be in use for a moment by a scan, or by a program that another thread is just starting
/// and that has copies of our open files until it runs.
const UNMOUNT_ATTEMPTS_MAX: u32 = 20;
const UNMOUNT_PAUSE: Duration = Duration::from_millis(10);

/// What a place has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// A directory, for a filesystem.
    Directory,
    /// A file, for a device node.
    File,
}

/// A path with its parent held open.
pub(super) struct MountPlace {
    parent: File,
    name: OsString,
    /// The path with all links above resolved, as mountinfo shows it.
    pub(super) path: PathBuf,
}

impl MountPlace {
    /// Opens the parent; `None` if the parent does not exist, or if the path has a form that the kernel
    /// does not follow, so that nothing can be there.
    pub(super) fn find(path: &Path) -> Result<Option<MountPlace>> {
        match Self::open(path) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(Error::UnusablePath {
                reason:
                    PathProblem::ParentNotADirectory | PathProblem::LinkLoop | PathProblem::TooLong,
                ..
            }) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Opens the parent, which has to exist.
    pub(super) fn open(path: &Path) -> Result<MountPlace> {
        let unusable = || Error::UnusablePath {
            path: path.to_owned(),
            reason: PathProblem::NotAbsolute,
        };
        let plain =
            path.is_absolute() && path.components().all(|part| part != Component::ParentDir);
        let (Some(parent), Some(name), true) = (path.parent(), path.file_name(), plain) else {
            return Err(unusable());
        };
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(parent, directory, Mode::empty())
            .or_else(|errno| refused(path, "open", parent, errno))?;
        let resolved = mount::real_path(&opened).or_else(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            refused(path, "resolve", parent, errno)
        })?;
        Ok(MountPlace {
            path: resolved.join(name),
            parent: File::from(opened),
            name: name.to_owned(),
        })
    }

    /// What is at the path: its descriptor and status, or `None` if nothing is.
    pub(super) fn look(&self) -> Result<Option<(OwnedFd, Stat)>> {
        let Some(place) = self.open_there()? else {
            return Ok(None);
        };
        match rustix::fs::fstat(&place) {
            Ok(stat) => Ok(Some((place, stat))),
            Err(errno) if filesystem::is_down(errno) => Err(Error::FilesystemDown {
                what: self.path.clone(),
                source: errno.into(),
            }),
            Err(errno) => Err(errno).context("look at", &self.path),
        }
    }

    /// A descriptor for what is at the path, without asking its filesystem anything.
    fn open_there(&self) -> Result<Option<OwnedFd>> {
        match mount::open_place(&self.parent, &self.name) {
            Ok(place) => Ok(Some(place)),
            // A name that is too long for the kernel is nobody's.
            Err(Errno::NOENT | Errno::NAMETOOLONG) => Ok(None),
            Err(errno) => Err(errno).context("open", &self.path),
        }
    }

    /// The mount that is visible here, if this is a mount point.
    pub(super) fn mounted(&self) -> Result<Option<Mount>> {
        let Some(id) = self.mounted_id()? else {
            return Ok(None);
        };
        Ok(mountinfo::read()?.into_iter().find(|mount| mount.id == id))
    }

    /// The number of the mount that is visible here, if this is a mount point. This works for a
    /// filesystem that has stopped as well: it has to be found to be taken away.
    pub(super) fn mounted_id(&self) -> Result<Option<u64>> {
        let Some(place) = self.open_there()? else {
            return Ok(None);
        };
        mount::root_mount_id(&self.parent, &place).context("look at", &self.path)
    }

    /// A descriptor to mount on: the existing place if it fits, or a new one that is marked. Nothing that exists is
    /// changed.
    pub(super) fn prepare(&self, wanted: Wanted) -> Result<OwnedFd> {
        let problem = |reason| {
            Err(Error::UnusablePath {
                path: self.path.clone(),
                reason,
            })
        };
        let Some((place, stat)) = self.look()? else {
            return self.make(wanted);
        };
        match (FileType::from_raw_mode(stat.st_mode), wanted) {
            (FileType::Symlink, _) => problem(PathProblem::Symlink),
            (FileType::Directory, Wanted::Directory) if self.is_empty_directory(&place)? => {
                Ok(place)
            }
            (FileType::Directory, Wanted::Directory) => problem(PathProblem::NotEmpty),
            (_, Wanted::Directory) => problem(PathProblem::NotADirectory),
            (FileType::RegularFile, Wanted::File) if stat.st_size == 0 => Ok(place),
            (_, Wanted::File) => problem(PathProblem::NotAnEmptyFile),
        }
    }

    fn make(&self, wanted: Wanted) -> Result<OwnedFd> {
        match wanted {
            Wanted::Directory => {
                rustix::fs::mkdirat(
                    &self.parent,
                    &self.name,
                    Mode::from_raw_mode(DIRECTORY_MODE),
                )
                .or_else(|errno| refused(&self.path, "make the directory", &self.path, errno))?;
            }
            Wanted::File => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                rustix::fs::openat(
                    &self.parent,
                    &self.name,
                    flags,
                    Mode::from_raw_mode(FILE_MODE),
                )
                .or_else(|errno| refused(&self.path, "make the file", &self.path, errno))?;
            }
        }
        let place = mount::open_place(&self.parent, &self.name).context("open", &self.path)?;
        // A filesystem without such attributes costs only that the empty place stays behind.
        let _ = rustix::fs::setxattr(through(&place), MARK, b"1", XattrFlags::empty());
        Ok(place)
    }

    fn is_empty_directory(&self, place: &OwnedFd) -> Result<bool> {
        let mut entries = fs::read_dir(through(place)).context("list", &self.path)?;
        Ok(entries.next().is_none())
    }

    /// Whether what is mounted here could not be unmounted now. Nothing is changed.
    pub(super) fn is_in_use(&self) -> Result<bool> {
        if self.mounted_id()?.is_none() {
            return Ok(false);
        }
        mount::is_in_use(&self.parent, &self.name).context("look at", &self.path)
    }

    /// Unmounts what is visible here; [`Error::Busy`] names who uses it.
    pub(super) fn unmount(&self) -> Result<()> {
        let mut attempts_left = UNMOUNT_ATTEMPTS_MAX;
        loop {
            attempts_left -= 1;
            match mount::unmount(&self.parent, &self.name) {
                Ok(()) => return Ok(()),
                Err(Errno::BUSY) if attempts_left > 0 => thread::sleep(UNMOUNT_PAUSE),
                Err(Errno::BUSY) => {
                    let holders = holders::of_mount(&self.path);
                    return Err(Error::Busy {
                        what: self.path.clone(),
                        holders,
                        covered_by: None,
                    });
                }
                Err(errno) => return Err(errno).context("unmount", &self.path),
            }
        }
    }

    /// Removes the place if it was made here and is empty. Returns whether it did.
    ///
    /// Removing a directory makes the kernel drop the mounts that copies of this mount namespace have
    /// on it, so that a container that was started meanwhile does not pin the volume for life; one
    /// that has files of it open keeps them, and the device stays busy.
    pub(super) fn remove_if_made_here(&self) -> Result<bool> {
        let Some((place, stat)) = self.look()? else {
            return Ok(false);
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        let fits =
            kind == FileType::Directory || (kind == FileType::RegularFile && stat.st_size == 0);
        let mut mark = [0; 8];
        if !fits || rustix::fs::getxattr(through(&place), MARK, &mut mark).is_err() {
            return Ok(false);
        }
        let flags = match kind {
            FileType::Directory => rustix::fs::AtFlags::REMOVEDIR,
            _ => rustix::fs::AtFlags::empty(),
        };
        match rustix::fs::unlinkat(&self.parent, &self.name, flags) {
            Ok(()) => Ok(true),
            // Somebody has put something into it since; it is theirs now.
            Err(Errno::NOTEMPTY | Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno).context("remove", &self.path),
        }
    }

    /// The error for a place where something else is mounted.
    pub(super) fn taken_by(&self, mount: &Mount) -> Error {
        Error::UnusablePath {
            path: self.path.clone(),
            reason: PathProblem::OtherMount(mount.describe()),
        }
    }
}

/// The error for a call that the kernel refused: about the consumer's path if its form is the reason.
fn refused<T>(path: &Path, action: &'static str, subject: &Path, errno: Errno) -> Result<T> {
    match PathProblem::of_refusal(errno) {
        Some(reason) => Err(Error::UnusablePath {
            path: path.to_owned(),
            reason,
        }),
        None => Err(errno).context(action, subject),
    }
}

/// Answers the staging mount, which has to be of that device.
pub(super) fn require_staged(staging: &Path, device: &Path) -> Result<Mount> {
    let missing = || Error::NotStaged {
        staging: staging.to_owned(),
    };
    let place = MountPlace::find(staging)?.ok_or_else(missing)?;
    let mount = place.mounted()?.ok_or_else(missing)?;
    let number = number_of(device)?;
    if mount.is_of(number) {
        Ok(mount)
    } else {
        Err(place.taken_by(&mount))
    }
}

/// The number of the block device at `device`.
pub(super) fn number_of(device: &Path) -> Result<DeviceNumber> {
    DeviceNumber::of_block_device(device)
        .and_then(|number| number.ok_or_else(|| Errno::NOTBLK.into()))
        .context("use as a block device", device)
}

/// A path to exactly the open file. Descriptors opened for their place alone take no other call.
fn through(place: impl AsFd) -> PathBuf {
    let number = place.as_fd().as_raw_fd();
    Path::new(OsStr::new("/proc/self/fd")).join(number.to_string())
}
