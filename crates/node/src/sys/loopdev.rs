//! Loop devices: a block device on a file.
//!
//! A device is matched to its file by the file's own identity (device and inode number), which the kernel reports for
//! every configured device. The path in sysfs is only a hint where to look first. It is wrong after a rename, in
//! another mount namespace, and for a file that was deleted and made again under the same name. The identity is all
//! that a restarted process needs to find its devices again.
//!
//! A device that was found once is tried first the next time: asking one device is one call, while asking all of them
//! grows with their number. Only the place to look is remembered; the kernel confirms it.
//!
//! Two choices are made here. The logical block is 512 bytes, so that a volume looks the same on a
//! loop device, over iSCSI and as a disk in a machine: a partition table counts in logical blocks and
//! is unreadable when the count changes. Autoclear is off, so that a device outlives the process
//! that made it and growth does not depend on who has it open.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::ioctl::{Getter, IntegerSetter, Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl};
use trellis_api::Bytes;

use super::block::{self, DeviceNumber};
use super::mountinfo::{self, Mount};
use crate::error::{Context, Error, Result};

const LOOP_CLR_FD: Opcode = 0x4C01;
const LOOP_SET_STATUS64: Opcode = 0x4C04;
const LOOP_GET_STATUS64: Opcode = 0x4C05;
const LOOP_SET_CAPACITY: Opcode = 0x4C07;
const LOOP_SET_DIRECT_IO: Opcode = 0x4C08;
const LOOP_CONFIGURE: Opcode = 0x4C0A;
const LOOP_CTL_GET_FREE: Opcode = 0x4C82;

const FLAG_READ_ONLY: u32 = 1;
const FLAG_AUTOCLEAR: u32 = 4;
const FLAG_DIRECT_IO: u32 = 16;

/// The logical block of every device made here; the module's text says why.
pub const LOGICAL_BLOCK: Bytes = Bytes::new(512);
/// The number of FUSE among filesystems (linux/magic.h).
const FUSE_MAGIC: i64 = 0x6573_5546;

const CONTROL: &str = "/dev/loop-control";
/// How often a free device may be lost to somebody else before that is an error.
const CLAIM_ATTEMPTS_MAX: u32 = 64;
/// The pause before the next attempt, so that a crowd does not spin.
const CLAIM_PAUSE: Duration = Duration::from_millis(2);

/// Held while a device is searched for and made: two threads that attach one file at the same moment must not end with
/// two devices on it, each with a cache of its own.
static ATTACHING: Mutex<()> = Mutex::new(());

/// A file's own identity: the device and the inode.
pub type FileIdentity = (DeviceNumber, u64);

/// Where a file's device was found last. Forgotten all at once when it becomes large.
static FOUND: Mutex<BTreeMap<FileIdentity, PathBuf>> = Mutex::new(BTreeMap::new());
const FOUND_MAX: usize = 4096;
/// How often all devices were asked.
static SEARCHES: AtomicU64 = AtomicU64::new(0);

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

impl LoopInfo {
    const EMPTY: LoopInfo = LoopInfo {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
}

/// What the kernel says about one configured loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    /// The device node.
    pub path: PathBuf,
    /// Its number.
    pub number: DeviceNumber,
    /// The filesystem that the backing file is on.
    pub backing_device: DeviceNumber,
    /// The backing file's inode there.
    pub backing_inode: u64,
    /// The backing file's path as sysfs shows it: a hint, see the module's text.
    pub backing_hint: PathBuf,
    /// Whether the backing file has been deleted.
    pub backing_deleted: bool,
    /// Where in the file the device begins.
    pub offset: Bytes,
    /// How much of the file the device may use at most, or zero for no limit.
    pub size_limit: Bytes,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Whether reads and writes go past the page cache of the backing filesystem.
    pub direct_io: bool,
    /// Whether it goes away by itself with its last user.
    pub autoclear: bool,
}

impl LoopDevice {
    /// The identity of the file that it carries.
    pub fn identity(&self) -> FileIdentity {
        (self.backing_device, self.backing_inode)
    }
}

/// A device on a file, and whether it had to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The device.
    pub device: LoopDevice,
    /// Whether it was already there.
    pub adopted: bool,
}

/// Puts a loop device on `backing`, or adopts the one that is already on it.
///
/// It requests direct I/O. If the backing filesystem refuses, the device is buffered, as [`LoopDevice::direct_io`]
/// shows.
pub fn attach(backing: &Path, read_only: bool) -> Result<Attached> {
    let file = OpenOptions::new()
        .read(true)
        .write(!read_only)
        .open(backing)
        .context("open", backing)?;
    let _one_at_a_time = ATTACHING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = find_by_file(&file, backing)? {
        return adopt(found, backing, read_only);
    }
    let flags = if read_only { FLAG_READ_ONLY } else { 0 };
    let (device, _) = make(&file, backing, flags)?;
    Ok(Attached {
        device,
        adopted: false,
    })
}

/// A device that vanishes when this handle and every other opening of it is closed, and so also when this process
/// dies.
#[derive(Debug)]
pub struct Temporary {
    /// The device.
    pub device: LoopDevice,
    /// What keeps it.
    node: File,
}

impl Temporary {
    /// Lets go of the device.
    pub fn release(self) -> LoopDevice {
        drop(self.node);
        self.device
    }
}

/// Puts a device that vanishes with its last user on `backing`, or returns the one that is already on it.
pub fn attach_temporary(backing: &Path) -> Result<std::result::Result<Temporary, LoopDevice>> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(backing)
        .context("open", backing)?;
    let _one_at_a_time = ATTACHING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = find_by_file(&file, backing)? {
        return Ok(Err(found));
    }
    let (device, node) = make(&file, backing, FLAG_AUTOCLEAR)?;
    Ok(Ok(Temporary { device, node }))
}

/// Configures a free device, and answers it with the descriptor that was used.
fn make(file: &File, backing: &Path, flags: u32) -> Result<(LoopDevice, File)> {
    let control = File::open(CONTROL).context("open", CONTROL)?;
    for _ in 0..CLAIM_ATTEMPTS_MAX {
        // SAFETY: LOOP_CTL_GET_FREE takes no argument and answers by its return value.
        let index =
            unsafe { ioctl(&control, GetFree) }.context("ask for a free device at", CONTROL)?;
        let path = PathBuf::from(format!("/dev/loop{index}"));
        match configure(&path, file, backing, flags) {
            Ok(node) => {
                let device = status_of(&path)?
                    .ok_or(Errno::NXIO)
                    .context("read back", &path)?;
                remember(&device);
                return Ok((device, node));
            }
            // Taken by somebody else since, or its node is not made yet.
            Err(Errno::BUSY | Errno::NOENT | Errno::NXIO) => thread::sleep(CLAIM_PAUSE),
            Err(errno) => return Err(errno).context("configure", &path),
        }
    }
    Err(Error::LoopDevicesContended {
        backing: backing.to_owned(),
        attempts: CLAIM_ATTEMPTS_MAX,
    })
}

/// The device that carries the file at `backing`, if there is one.
pub fn find(backing: &Path) -> Result<Option<LoopDevice>> {
    let meta = fs::metadata(backing).context("look at", backing)?;
    find_by_identity(DeviceNumber::from_stat(meta.dev()), meta.ino(), backing)
}

/// Every configured loop device of this machine.
pub fn list() -> Result<Vec<LoopDevice>> {
    let mut devices = Vec::new();
    for (path, _) in configured()? {
        devices.extend(status_of(&path)?);
    }
    Ok(devices)
}

/// What the kernel says about the loop device at `path`, or `None` if no file is on it.
pub fn status_of(path: &Path) -> Result<Option<LoopDevice>> {
    let device = match block::open(path) {
        Ok(device) => device,
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::NXIO | Errno::NOENT)
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error).context("open", path),
    };
    let info = match get_status(&device) {
        Ok(info) => info,
        Err(Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(errno).context("read the loop status of", path),
    };
    let number = DeviceNumber::from_stat(device.metadata().context("look at", path)?.rdev());
    let text = fs::read(number.sysfs().join("loop/backing_file")).unwrap_or_default();
    let (backing_hint, backing_deleted) = parse_hint(&text);
    Ok(Some(LoopDevice {
        path: path.to_owned(),
        number,
        backing_device: decode(info.device),
        backing_inode: info.inode,
        backing_hint,
        backing_deleted,
        offset: Bytes::new(info.offset),
        size_limit: Bytes::new(info.size_limit),
        read_only: info.flags & FLAG_READ_ONLY != 0,
        direct_io: info.flags & FLAG_DIRECT_IO != 0,
        autoclear: info.flags & FLAG_AUTOCLEAR != 0,
    }))
}

/// A configured device as sysfs shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configured {
    /// The device node.
    pub path: PathBuf,
    /// Its number.
    pub number: DeviceNumber,
    /// The path of the file on it, as the kernel tells it now.
    pub backing_hint: PathBuf,
}

/// The devices that were put on a file of this path, with their numbers. Their files are not asked, so this also works
/// for one whose server is dead; it relies on the hint alone (see the module header).
pub fn on_path(backing: &Path) -> Result<Vec<(PathBuf, DeviceNumber)>> {
    let devices = on_paths(|hint| hint == backing)?.into_iter();
    Ok(devices.map(|each| (each.path, each.number)).collect())
}

/// The same for every path that is wanted.
pub fn on_paths(is_wanted: impl Fn(&Path) -> bool) -> Result<Vec<Configured>> {
    let mut devices = Vec::new();
    for (path, backing_hint) in configured()? {
        if !is_wanted(&backing_hint) {
            continue;
        }
        let number = DeviceNumber::of_block_device(&path).context("look at", &path)?;
        devices.extend(number.map(|number| Configured {
            path,
            number,
            backing_hint,
        }));
    }
    Ok(devices)
}

/// The device that carries a file that was deleted from this path, if there is one.
pub fn on_deleted(backing: &Path) -> Result<Option<LoopDevice>> {
    for (path, hint) in configured()? {
        if hint != backing {
            continue;
        }
        let found = status_of(&path)?;
        if let Some(device) = found.filter(|device| device.backing_deleted) {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// Tells the device to look at its file's size again.
pub fn refresh_size(device: impl AsFd) -> rustix::io::Result<()> {
    // SAFETY: LOOP_SET_CAPACITY takes no argument and touches no memory of this process.
    unsafe { ioctl(device, NoArg::<LOOP_SET_CAPACITY>::new()) }
}

/// Turns direct I/O on or off; EINVAL if the backing filesystem cannot.
pub fn set_direct_io(device: impl AsFd, on: bool) -> rustix::io::Result<()> {
    // SAFETY: LOOP_SET_DIRECT_IO takes a plain number as its argument, not a pointer.
    unsafe {
        ioctl(
            device,
            IntegerSetter::<LOOP_SET_DIRECT_IO>::new_usize(usize::from(on)),
        )
    }
}

/// Takes the file off the device. The kernel defers this while others have the device open.
pub fn clear(device: impl AsFd) -> rustix::io::Result<()> {
    // SAFETY: LOOP_CLR_FD takes no argument and touches no memory of this process.
    unsafe { ioctl(device, NoArg::<LOOP_CLR_FD>::new()) }
}

/// Makes a device that was found usable as if it had been made here.
fn adopt(mut found: LoopDevice, backing: &Path, read_only: bool) -> Result<Attached> {
    if found.offset != Bytes::ZERO || found.size_limit != Bytes::ZERO {
        return Err(Error::AttachedInPart {
            device: found.path,
            backing: backing.to_owned(),
        });
    }
    if found.read_only != read_only {
        return Err(Error::AttachedInOtherMode {
            device: found.path,
            backing: backing.to_owned(),
            found_read_only: found.read_only,
        });
    }
    // An interrupted detach leaves autoclear on; with it the device would vanish under us.
    if found.autoclear {
        let device = block::open(&found.path).context("open", &found.path)?;
        let mut info = get_status(&device).context("read the loop status of", &found.path)?;
        info.flags &= !FLAG_AUTOCLEAR;
        set_status(device.as_fd(), info).context("keep", &found.path)?;
        found.autoclear = false;
    }
    if !found.direct_io {
        let device = block::open(&found.path).context("open", &found.path)?;
        // A refusal leaves it buffered, as for a new device.
        found.direct_io = set_direct_io(&device, true).is_ok();
    }
    Ok(Attached {
        device: found,
        adopted: true,
    })
}

fn configure(path: &Path, file: &File, backing: &Path, flags: u32) -> rustix::io::Result<File> {
    let device = OpenOptions::new()
        .read(true)
        .write(flags & FLAG_READ_ONLY == 0)
        .open(path)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    match set_config(&device, file, backing, FLAG_DIRECT_IO | flags) {
        // Kernels differ in whether a refused direct I/O fails the call or falls back by itself.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => set_config(&device, file, backing, flags),
        other => other,
    }?;
    Ok(device)
}

/// The logical block of a device on that file. A FUSE file takes whole blocks of 4 KiB: smaller writes would have to
/// read first.
fn logical_block(file: &File) -> rustix::io::Result<Bytes> {
    let filesystem = rustix::fs::fstatfs(file)?.f_type;
    Ok(if filesystem == FUSE_MAGIC {
        Bytes::new(4096)
    } else {
        LOGICAL_BLOCK
    })
}

fn set_config(device: &File, file: &File, backing: &Path, flags: u32) -> rustix::io::Result<()> {
    let mut info = LoopInfo {
        flags,
        ..LoopInfo::EMPTY
    };
    // The name is for people who run losetup; the last byte stays zero.
    let room = info.file_name.len() - 1;
    for (to, from) in info
        .file_name
        .iter_mut()
        .take(room)
        .zip(backing.as_os_str().as_bytes())
    {
        *to = *from;
    }
    let fd = u32::try_from(file.as_raw_fd()).map_err(|_| Errno::BADF)?;
    let block_size = u32::try_from(logical_block(file)?.get()).map_err(|_| Errno::INVAL)?;
    let config = LoopConfig {
        fd,
        block_size,
        info,
        reserved: [0; 8],
    };
    // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`, which LoopConfig lays out field by
    // field; the file descriptor in it is open for the duration of the call.
    unsafe { ioctl(device, Setter::<LOOP_CONFIGURE, LoopConfig>::new(config)) }
}

fn get_status(device: &File) -> rustix::io::Result<LoopInfo> {
    // SAFETY: LOOP_GET_STATUS64 fills one `struct loop_info64`, which LoopInfo lays out field by
    // field and for which every bit pattern is valid.
    unsafe { ioctl(device, Getter::<LOOP_GET_STATUS64, LoopInfo>::new()) }
}

fn set_status(device: BorrowedFd<'_>, info: LoopInfo) -> rustix::io::Result<()> {
    // SAFETY: LOOP_SET_STATUS64 reads one `struct loop_info64`, which LoopInfo lays out.
    unsafe { ioctl(device, Setter::<LOOP_SET_STATUS64, LoopInfo>::new(info)) }
}

fn find_by_file(file: &File, backing: &Path) -> Result<Option<LoopDevice>> {
    let meta = file.metadata().context("look at", backing)?;
    find_by_identity(DeviceNumber::from_stat(meta.dev()), meta.ino(), backing)
}

fn find_by_identity(device: DeviceNumber, inode: u64, hint: &Path) -> Result<Option<LoopDevice>> {
    let known = found().get(&(device, inode)).cloned();
    // The device may be somebody else's by now, on a file that nobody serves any more: then it is looked for anew.
    if let Some(path) = known.filter(|path| may_carry(path, hint, device))
        && let Ok(Some(still)) = status_of(&path)
        && still.identity() == (device, inode)
    {
        return Ok(Some(still));
    }
    let searched = search(device, inode, hint)?;
    match &searched {
        Some(device) => remember(device),
        None => drop(found().remove(&(device, inode))),
    }
    Ok(searched)
}

fn found() -> MutexGuard<'static, BTreeMap<FileIdentity, PathBuf>> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember(device: &LoopDevice) {
    let mut found = found();
    if found.len() >= FOUND_MAX {
        found.clear();
    }
    found.insert(device.identity(), device.path.clone());
}

/// How often this process had to ask all loop devices for the one of a file.
pub fn searches() -> u64 {
    SEARCHES.load(Ordering::Relaxed)
}

fn search(device: DeviceNumber, inode: u64, hint: &Path) -> Result<Option<LoopDevice>> {
    SEARCHES.fetch_add(1, Ordering::Relaxed);
    let mut candidates = configured()?;
    let mounts = mountinfo::read().unwrap_or_default();
    let mounts = MountsByPlace::of(&mounts);
    candidates.retain(|(_, backing)| backing == hint || !mounts.is_elsewhere(backing, device));
    candidates.sort_by_key(|(_, backing)| backing != hint);
    for (path, backing) in candidates {
        let found = match status_of(&path) {
            Ok(Some(found)) => found,
            Ok(None) => continue,
            // The kernel asks the backing filesystem for the file's identity. A dead server behind
            // somebody else's device is no reason to fail here.
            Err(error) if backing != hint => {
                tracing::debug!(device = %path.display(), %error, "passed over");
                continue;
            }
            Err(error) => return Err(error),
        };
        if found.identity() == (device, inode) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Filesystems whose files are kept by a process or another machine. To ask for a file there may wait for ever.
const KEPT_ELSEWHERE: [&str; 7] = ["fuse", "nfs", "cifs", "smb3", "9p", "ceph", "virtiofs"];

/// The mounts of this namespace by their places. The later one of two at the same place covers the earlier one.
struct MountsByPlace<'a>(HashMap<&'a Path, &'a Mount>);

impl<'a> MountsByPlace<'a> {
    fn of(mounts: &'a [Mount]) -> MountsByPlace<'a> {
        let by_place = |mount: &'a Mount| (mount.mount_point.as_path(), mount);
        MountsByPlace(mounts.iter().map(by_place).collect())
    }

    /// Whether a file lies on a filesystem that somebody else keeps, and not on the one with that number. The kernel
    /// asks the filesystem for the file's identity, and waits for one whose server is frozen: somebody else's dead
    /// device would hold up all volumes. What the mounts say is read without touching any of them.
    ///
    /// A search asks this of every device of the machine, so it looks only at the directories above the file.
    fn is_elsewhere(&self, file: &Path, device: DeviceNumber) -> bool {
        let nearest = file.ancestors().find_map(|place| self.0.get(place));
        nearest.is_some_and(|mount| {
            let kind = mount.fs_type.as_str();
            let is_kept = KEPT_ELSEWHERE.iter().any(|name| kind.starts_with(name));
            is_kept && kind != "fuseblk" && mount.device != device
        })
    }
}

/// Whether a loop device can carry that file, as far as it can be told without asking for its own.
fn may_carry(path: &Path, file: &Path, device: DeviceNumber) -> bool {
    let Some(backing) = backing_hint(path) else {
        return false;
    };
    backing == file || {
        let mounts = mountinfo::read().unwrap_or_default();
        !MountsByPlace::of(&mounts).is_elsewhere(&backing, device)
    }
}

/// The file of a loop device as sysfs shows it (see the module's text), without asking for the file itself; none if it
/// is no loop device or has no file.
pub fn backing_hint(device: &Path) -> Option<PathBuf> {
    let of_device = Path::new("/sys/block").join(device.file_name()?);
    let text = fs::read(of_device.join("loop/backing_file")).ok()?;
    Some(parse_hint(&text).0)
}

/// The nodes of all loop devices that have a file, with sysfs's hint of which.
fn configured() -> Result<Vec<(PathBuf, PathBuf)>> {
    const SYSFS: &str = "/sys/block";
    let mut devices = Vec::new();
    for entry in fs::read_dir(SYSFS).context("list", SYSFS)? {
        let entry = entry.context("list", SYSFS)?;
        if !entry.file_name().as_bytes().starts_with(b"loop") {
            continue;
        }
        // The file is absent while no backing file is on the device.
        if let Ok(text) = fs::read(entry.path().join("loop/backing_file")) {
            devices.push((
                Path::new("/dev").join(entry.file_name()),
                parse_hint(&text).0,
            ));
        }
    }
    Ok(devices)
}

/// Parses sysfs's `backing_file`: the path, a mark if it was deleted, a newline.
fn parse_hint(text: &[u8]) -> (PathBuf, bool) {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let (path, deleted) = match text.strip_suffix(b" (deleted)") {
        Some(path) => (path, true),
        None => (text, false),
    };
    (PathBuf::from(std::ffi::OsStr::from_bytes(path)), deleted)
}

/// Decodes the kernel's own packing of a device number (`new_encode_dev`), which differs from that of `stat`.
fn decode(packed: u64) -> DeviceNumber {
    let narrow = |bits: u64| u32::try_from(bits).unwrap_or(u32::MAX);
    DeviceNumber {
        major: narrow((packed >> 8) & 0xfff),
        minor: narrow((packed & 0xff) | ((packed >> 12) & 0xfff00)),
    }
}

/// `LOOP_CTL_GET_FREE`: the answer is the call's return value.
struct GetFree;

// SAFETY: the call takes no argument, reads and writes no memory of the process, and its output is
// the plain return value; the opcode is the driver's.
unsafe impl Ioctl for GetFree {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    // SAFETY: the pointer is not used.
    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<IoctlOutput> {
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_device_number_keeps_large_minors() {
        // Fails if the number is taken apart as `stat` packs it: minors above 255 would be lost.
        assert_eq!(
            decode(0x0000_fd00),
            DeviceNumber {
                major: 253,
                minor: 0
            }
        );
        assert_eq!(
            decode(0x1230_fe45),
            DeviceNumber {
                major: 254,
                minor: 0x12345
            }
        );
    }

    #[test]
    fn a_deleted_backing_file_is_recognised() {
        // Fails if the mark of deletion stays in the path.
        assert_eq!(
            parse_hint(b"/a/b (deleted)\n"),
            (PathBuf::from("/a/b"), true)
        );
        assert_eq!(parse_hint(b"/a/b\n"), (PathBuf::from("/a/b"), false));
    }
}
