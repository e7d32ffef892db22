//! What a system has before anything runs on it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::MountFlags;
use trellis_guest_tests::image::MODULE_LIST;
use trellis_guest_tests::qemu::SCRATCH;

/// The environment of everything that runs here.
pub const ENVIRONMENT: [(&str, &str); 3] = [
    ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
    ("HOME", "/"),
    ("LC_ALL", "C"),
];
/// Where scenarios keep their files.
pub const SCRATCH_DIR: &str = "/scratch";

const DISK_LIMIT: Duration = Duration::from_secs(30);

/// Mounts, modules, the network's loopback, and the disk for files.
pub fn set_up() -> io::Result<()> {
    let none = MountFlags::empty();
    for (kind, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/run"),
    ] {
        rustix::mount::mount(kind, target, kind, none, None)?;
    }
    for dir in ["/dev/shm", "/dev/pts"] {
        fs::create_dir_all(dir)?;
    }
    rustix::mount::mount("devpts", "/dev/pts", "devpts", none, None)?;
    rustix::system::sethostname(b"guest")?;
    for module in fs::read_to_string(MODULE_LIST)?.lines() {
        load(Path::new(module))?;
    }
    let status = Command::new("/bin/busybox")
        .args(["ip", "link", "set", "lo", "up"])
        .status()?;
    if !status.success() {
        return Err(io::Error::other(
            "the loopback interface cannot be brought up",
        ));
    }
    let disk = find_disk()?;
    rustix::mount::mount(&disk, SCRATCH_DIR, "xfs", none, None)?;
    Ok(())
}

/// Loads a module, unless it is loaded already.
pub fn load(module: &Path) -> io::Result<()> {
    match rustix::system::finit_module(File::open(module)?, c"", 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => {
            let text = format!("{}: {error}", module.display());
            Err(io::Error::new(io::Error::from(error).kind(), text))
        }
    }
}

/// The disk for files, by its serial number.
fn find_disk() -> io::Result<PathBuf> {
    let deadline = Instant::now() + DISK_LIMIT;
    while Instant::now() < deadline {
        for entry in fs::read_dir("/sys/block")?.flatten() {
            let serial = fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
            let node = Path::new("/dev").join(entry.file_name());
            if serial.trim() == SCRATCH && node.exists() {
                return Ok(node);
            }
        }
        std::thread::sleep(crate::POLL);
    }
    Err(io::Error::other("the disk for files does not appear"))
}
