//! The door to the filesystem: directories by descriptor, plain files, and syncs.
//!
//! Everything below a pool is reached from an open directory and never through a symbolic link, so
//! that neither a mount over the pool's path nor a planted link can lead a write elsewhere.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use trellis_api::Bytes;

use super::REPLICAS_MAX;
use crate::{Error, Result};

/// `st_blocks` counts in this unit, whatever the filesystem's own block is.
const STAT_BLOCK_BYTES: u64 = 512;

/// How often a call that a signal interrupts is begun again.
const INTERRUPTIONS_MAX: usize = 64;

/// The most entries that are looked at in one directory: every replica with both kinds of leftover,
/// and as much again for what is not ours.
const ENTRIES_MAX: usize = 6 * REPLICAS_MAX;

/// An open directory.
#[derive(Debug)]
pub(super) struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    /// Opens a directory that a person named; links in its path are followed.
    pub(super) fn open(path: &Path) -> Result<Option<Dir>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Dir {
                fd,
                path: path.to_owned(),
            })),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(failed("open", path)(errno)),
        }
    }

    /// Opens the directory of that name in this one, if there is one.
    pub(super) fn dir(&self, name: &str) -> Result<Option<Dir>> {
        let path = self.path.join(name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Dir { fd, path })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed("open", &path)(errno)),
        }
    }

    /// Makes the directory of that name, which must not exist, and opens it.
    pub(super) fn make_dir(&self, name: &str) -> Result<Dir> {
        let path = self.path.join(name);
        rustix::fs::mkdirat(&self.fd, name, Mode::RWXU).map_err(failed("make", &path))?;
        self.dir(name)?
            .ok_or(Errno::NOENT)
            .map_err(failed("open", &path))
    }

    /// Makes an empty file of that name, which must not exist, for reading and writing.
    pub(super) fn make_file(&self, name: &str) -> Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(failed("make", &self.path.join(name)))?;
        Ok(File::from(fd))
    }

    /// Makes the file of that name with these bytes, durably, in the place of whatever was there. A crash leaves the old
    /// file or the new one. The caller syncs the directory.
    pub(super) fn replace_file(&self, name: &str, bytes: &[u8]) -> Result<File> {
        let making = format!("{name}.making");
        self.remove_file(&making)?;
        let file = self.make_file(&making)?;
        let path = self.path.join(&making);
        std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).map_err(|source| Error::Io {
            doing: "write",
            path: path.clone(),
            source,
        })?;
        sync_data(&file, &path)?;
        self.rename(&making, name)?;
        Ok(file)
    }

    /// Opens the plain file of that name for reading and writing, if there is one.
    pub(super) fn file(&self, name: &str) -> Result<Option<File>> {
        self.open_file(name, OFlags::RDWR)
    }

    /// Opens the plain file of that name for reading, if there is one.
    pub(super) fn file_read_only(&self, name: &str) -> Result<Option<File>> {
        self.open_file(name, OFlags::RDONLY)
    }

    fn open_file(&self, name: &str, access: OFlags) -> Result<Option<File>> {
        let path = self.path.join(name);
        // Without NONBLOCK a planted pipe would hold us up for ever; on a plain file it means nothing.
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Err(Error::NotAFile { path }),
            Err(errno) => return Err(failed("open", &path)(errno)),
        };
        let stat = rustix::fs::fstat(&fd).map_err(failed("look at", &path))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Error::NotAFile { path });
        }
        Ok(Some(File::from(fd)))
    }

    /// Gives an entry of this directory another name. Durable after [`Dir::sync`].
    pub(super) fn rename(&self, from: &str, to: &str) -> Result<()> {
        rustix::fs::renameat(&self.fd, from, &self.fd, to)
            .map_err(failed("rename", &self.path.join(from)))
    }

    /// Removes the file of that name. Absence is fine.
    pub(super) fn remove_file(&self, name: &str) -> Result<()> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed("remove", &self.path.join(name))(errno)),
        }
    }

    /// Removes the directory of that name and the files in it. Absence is fine.
    pub(super) fn remove_dir(&self, name: &str) -> Result<()> {
        let Some(dir) = self.dir(name)? else {
            return Ok(());
        };
        for entry in dir.entries()? {
            rustix::fs::unlinkat(&dir.fd, &entry, AtFlags::empty())
                .map_err(failed("remove", &dir.path.join(&entry)))?;
        }
        rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR)
            .map_err(failed("remove", &dir.path))
    }

    /// The names in this directory, sorted. A name that is not UTF-8 is shown with replacement
    /// characters; it is nobody of ours, and is only ever reported.
    pub(super) fn entries(&self) -> Result<Vec<String>> {
        let fail = || failed("list", &self.path);
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd).map_err(fail())? {
            let entry = entry.map_err(fail())?;
            let name = entry.file_name().to_string_lossy();
            if name == "." || name == ".." {
                continue;
            }
            if names.len() == ENTRIES_MAX {
                return Err(Error::PoolCrowded {
                    path: self.path.clone(),
                });
            }
            names.push(name.into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// Locks the directory against every other opening of it, in this process or another. Nothing if
    /// somebody else has it. The lock ends with [`Dir::unlock`] or when the directory is closed.
    pub(super) fn try_lock(&self) -> Result<bool> {
        match rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(failed("lock", &self.path)(errno)),
        }
    }

    pub(super) fn unlock(&self) {
        // A lock that stays is noticed by whoever wants it next; it ends with the directory.
        if let Err(errno) = rustix::fs::flock(&self.fd, FlockOperation::Unlock) {
            tracing::warn!("could not unlock {}: {errno}", self.path.display());
        }
    }

    /// Makes the names in this directory durable.
    pub(super) fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.fd).map_err(failed("sync", &self.path))
    }

    /// The filesystem's total, free, and free-to-root space.
    pub(super) fn space(&self) -> Result<Space> {
        let stat =
            rustix::fs::fstatvfs(&self.fd).map_err(failed("ask for the space of", &self.path))?;
        let bytes = |blocks: u64| Bytes::new(blocks.saturating_mul(stat.f_frsize));
        Ok(Space {
            total: bytes(stat.f_blocks),
            available: bytes(stat.f_bavail),
            free: bytes(stat.f_bfree),
        })
    }

    /// Whether the path by which this directory was opened leads to it still.
    pub(super) fn is_at_its_path(&self) -> bool {
        match (rustix::fs::stat(&self.path), rustix::fs::fstat(&self.fd)) {
            (Ok(there), Ok(here)) => (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino),
            _ => false,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// What a filesystem says about its space.
#[derive(Clone, Copy, Debug)]
pub(super) struct Space {
    pub(super) total: Bytes,
    /// What anybody can still use.
    pub(super) available: Bytes,
    /// What root can still use, which is never less.
    pub(super) free: Bytes,
}

/// What `fstat` says about a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileFacts {
    pub(super) length: Bytes,
    pub(super) allocated: Bytes,
    /// Whether the file still has a name.
    pub(super) linked: bool,
}

pub(super) fn facts(file: &File, path: &Path) -> Result<FileFacts> {
    let stat = rustix::fs::fstat(file).map_err(failed("look at", path))?;
    // The kernel never answers with negative numbers here; zero would only make us cautious.
    Ok(FileFacts {
        length: Bytes::new(u64::try_from(stat.st_size).unwrap_or(0)),
        allocated: Bytes::new(
            u64::try_from(stat.st_blocks)
                .unwrap_or(0)
                .saturating_mul(STAT_BLOCK_BYTES),
        ),
        linked: stat.st_nlink > 0,
    })
}

/// Extends a file to `length` with zeros that take no space.
pub(super) fn extend(file: &File, path: &Path, length: Bytes) -> Result<()> {
    match uninterrupted(|| rustix::fs::ftruncate(file, length.get())) {
        Ok(()) => Ok(()),
        Err(Errno::FBIG) => Err(Error::FileTooLong {
            path: path.to_owned(),
            size: length,
        }),
        Err(errno) => Err(failed("extend", path)(errno)),
    }
}

/// Allocates `from..to` of a file and leaves its length alone. The answer is the kernel's own,
/// because what it means depends on who asks.
pub(super) fn allocate(file: &File, from: Bytes, to: Bytes) -> std::result::Result<(), Errno> {
    let length = to.saturating_sub(from).get();
    uninterrupted(|| rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, from.get(), length))
}

/// Makes a hole in a file and leaves its length alone.
pub(crate) fn punch(file: &File, offset: u64, length: u64) -> std::result::Result<(), Errno> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    uninterrupted(|| rustix::fs::fallocate(file, flags, offset, length))
}

/// Zeros a range of a file and keeps its space.
pub(crate) fn zero(file: &File, offset: u64, length: u64) -> std::result::Result<(), Errno> {
    let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    uninterrupted(|| rustix::fs::fallocate(file, flags, offset, length))
}

/// Whether something was ever written to a file. Space that was only set aside is no data.
pub(super) fn has_data(file: &File, path: &Path) -> Result<bool> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)) {
        Ok(_) => Ok(true),
        Err(Errno::NXIO) => Ok(false),
        Err(errno) => Err(failed("look for data in", path)(errno)),
    }
}

/// Makes a file's bytes, and as much of its metadata as is needed to read them, durable.
pub(super) fn sync_data(file: &File, path: &Path) -> Result<()> {
    rustix::fs::fdatasync(file).map_err(failed("sync", path))
}

/// Turns what the kernel said into an error that says what was being done to what.
pub(super) fn failed(doing: &'static str, path: &Path) -> impl FnOnce(Errno) -> Error {
    let path = path.to_owned();
    move |errno| Error::Io {
        doing,
        path,
        source: io::Error::from(errno),
    }
}

fn uninterrupted(mut call: impl FnMut() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    for _ in 0..INTERRUPTIONS_MAX {
        match call() {
            Err(Errno::INTR) => {}
            answer => return answer,
        }
    }
    Err(Errno::INTR)
}
