//! Mounting and unmounting, by open file descriptors where a path could change under us.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags,
};
use trellis_api::MountFlag;

/// Mounts the filesystem of `device` at `target`. Device nodes in it have no effect: a volume that
/// was filled elsewhere must not open this machine's devices.
pub fn mount(
    device: &Path,
    target: impl AsFd,
    fs_type: &str,
    read_only: bool,
    options: &str,
    asked: &[MountFlag],
) -> rustix::io::Result<()> {
    let mut flags = MountFlags::NODEV | bits(asked);
    flags.set(MountFlags::RDONLY, read_only);
    let options = std::ffi::CString::new(options).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(
        device,
        proc_path(target),
        fs_type,
        flags,
        Some(options.as_c_str()),
    )
}

fn bits(flags: &[MountFlag]) -> MountFlags {
    let bit = |flag: &MountFlag| match flag {
        MountFlag::NoAtime => MountFlags::NOATIME,
        MountFlag::NoDirAtime => MountFlags::NODIRATIME,
        MountFlag::StrictAtime => MountFlags::STRICTATIME,
        MountFlag::LazyTime => MountFlags::LAZYTIME,
        MountFlag::NoSuid => MountFlags::NOSUID,
        MountFlag::NoExec => MountFlags::NOEXEC,
        MountFlag::Sync => MountFlags::SYNCHRONOUS,
        MountFlag::DirSync => MountFlags::DIRSYNC,
    };
    flags.iter().map(bit).collect()
}

/// Mounts the filesystem of `device` where no path leads, and returns its root. The mount is in no namespace, so
/// nobody can copy or find it. It ends when the returned root is closed, also by the death of this process. EBUSY if
/// the filesystem is already mounted anywhere, as far as the kernel can tell.
pub fn mount_detached(device: &Path, fs_type: &str, options: &str) -> rustix::io::Result<Detached> {
    let context = rustix::mount::fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "source", device)?;
    for option in options.split(',').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some((key, value)) => rustix::mount::fsconfig_set_string(&context, key, value)?,
            None => rustix::mount::fsconfig_set_flag(&context, option)?,
        }
    }
    match rustix::mount::fsconfig_create_exclusive(&context) {
        // Before Linux 6.6 an existing mount is joined, as mount(2) does.
        Err(Errno::OPNOTSUPP) => rustix::mount::fsconfig_create(&context)?,
        other => other?,
    }
    let attributes = MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mount = rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(&mount, ".", flags, Mode::empty())?;
    Ok(Detached {
        root: File::from(root),
        mount,
    })
}

/// A mount without a place.
#[derive(Debug)]
pub struct Detached {
    /// The root directory.
    pub root: File,
    /// What keeps it mounted.
    pub mount: OwnedFd,
}

/// Shows what is at `source` also at `target`, alone and without the mounts below it.
///
/// A read-only bind takes two calls, so for a moment the mount is writable. Nobody has been told of it at that moment.
/// If a crash falls in between, the next call of the operation, which compares the mode too, repairs it.
pub fn bind(source: &Path, target: impl AsFd, read_only: bool) -> rustix::io::Result<()> {
    let tree = rustix::mount::open_tree(
        CWD,
        source,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )?;
    rustix::mount::move_mount(
        &tree,
        "",
        target,
        "",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )?;
    if read_only {
        set_read_only(&tree)
    } else {
        Ok(())
    }
}

/// Makes the one mount at which `place` was opened read-only, whatever else shows the filesystem.
pub fn set_read_only(place: impl AsFd) -> rustix::io::Result<()> {
    // The call replaces the mount's other flags, so those that `mount` sets are given again. Those about times stay.
    let mut flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NODEV;
    let now = rustix::fs::fstatvfs(&place)?.f_flag;
    flags.set(MountFlags::NOSUID, now.contains(StatVfsMountFlags::NOSUID));
    flags.set(MountFlags::NOEXEC, now.contains(StatVfsMountFlags::NOEXEC));
    rustix::mount::mount_remount(proc_path(&place), flags, "")
}

/// Makes the filesystem mounted at `path` writable, through this mount and through every bind that is not read-only
/// itself.
///
/// The call replaces the mount's other flags, so those that it was made with are given again.
pub fn make_writable(path: &Path, asked: &[MountFlag]) -> rustix::io::Result<()> {
    rustix::mount::mount_remount(path, MountFlags::NODEV | bits(asked), "")
}

/// Unmounts the top mount at `name` in the directory `parent`. Never lazily: a mount that is in use
/// stays, and EBUSY says so.
pub fn unmount(parent: impl AsFd, name: &std::ffi::OsStr) -> rustix::io::Result<()> {
    rustix::mount::unmount(proc_path(parent).join(name), UnmountFlags::NOFOLLOW)
}

/// Whether the top mount at `name` in the directory `parent` could not be unmounted now, because somebody has a file
/// or a mount on it. Nothing is changed.
pub fn is_in_use(parent: impl AsFd, name: &std::ffi::OsStr) -> rustix::io::Result<bool> {
    let path = proc_path(&parent).join(name);
    // The first call with this flag only says whether it could, and marks the mount; a second one would unmount it.
    match rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW | UnmountFlags::EXPIRE) {
        Err(Errno::BUSY) => Ok(true),
        // Opening and closing the place takes the mark away, and asks a filesystem that has stopped nothing.
        Err(Errno::AGAIN) => open_place(&parent, name).map(|_| false),
        // Somebody else had marked it.
        Ok(()) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Opens the directory or file `name` in `parent` as a place to mount on, without following a link
/// and without reading it.
pub fn open_place(parent: impl AsFd, name: &std::ffi::OsStr) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(
        parent,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// The number, as in mountinfo, of the mount that `place` was opened through. No filesystem is asked,
/// so this also answers for one that has stopped or hangs.
pub fn mount_id(place: impl AsFd) -> io::Result<u64> {
    let number = place.as_fd().as_raw_fd();
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The number, as in mountinfo, of the mount whose root `place` is; `None` if it is not a root. `place`
/// was opened by its name in `parent`, so it is in another mount than `parent` only as a root.
///
/// This asks the kernel about the very place that was opened. Comparing paths with mountinfo would
/// also find a mount that another one hides.
pub fn root_mount_id(parent: impl AsFd, place: impl AsFd) -> io::Result<Option<u64>> {
    let id = mount_id(place)?;
    Ok((id != mount_id(parent)?).then_some(id))
}

/// The path of an open descriptor's file as the kernel names it now.
pub fn real_path(place: impl AsFd) -> io::Result<PathBuf> {
    std::fs::read_link(proc_path(place))
}

/// A path that leads to exactly the open file, whatever happens to its name.
pub(super) fn proc_path(place: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", place.as_fd().as_raw_fd()))
}
