//! One process at a time works on a volume.
//!
//! Devices and mounts outlive the process that made them, and any process can adopt them. If two agents adopted one
//! device, each would grow, mount and detach what the other believes to be its own. So a process that changes anything
//! about a volume holds a lock on the volume's file, on a descriptor of its own. The lock ends with the process,
//! however that ends, and a restarted process takes it again.
//!
//! The lock is `flock`: QEMU and the filesystems' tools do not use it on files, udev uses it on devices,
//! and on a network filesystem it reaches the other machines.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::error::{Context, Error, Result};
use crate::sys::block::DeviceNumber;
use crate::sys::loopdev::FileIdentity;

/// A program that another process is just starting has copies of its descriptors until it runs.
const ATTEMPTS_MAX: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);
const LOCKS: &str = "/proc/locks";

static OWNED: Mutex<BTreeMap<FileIdentity, File>> = Mutex::new(BTreeMap::new());

fn owned() -> MutexGuard<'static, BTreeMap<FileIdentity, File>> {
    OWNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes this process the owner of the volume, or refuses with [`Error::ForeignUse`]. Returns whether it has become
/// the owner now. A file that is gone has no owner: nobody else can begin to use it.
pub(super) fn own(backing: &Path) -> Result<bool> {
    let file = match File::open(backing) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.context("open", backing)?,
    };
    let identity = identity_of(&file.metadata().context("look at", backing)?);
    let mut owned = owned();
    if owned.contains_key(&identity) {
        return Ok(false);
    }
    let mut attempts_left = ATTEMPTS_MAX;
    loop {
        attempts_left -= 1;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::WOULDBLOCK) if attempts_left > 0 => thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => {
                return Err(Error::ForeignUse {
                    what: backing.to_owned(),
                    pid: holder(identity),
                });
            }
            Err(errno) => return Err(errno).context("lock", backing),
        }
    }
    owned.insert(identity, file);
    Ok(true)
}

/// Gives the volume free.
pub(crate) fn disown(backing: &Path) {
    let known = fs::metadata(backing).map(|meta| identity_of(&meta));
    let mut owned = owned();
    match known {
        Ok(identity) => drop(owned.remove(&identity)),
        // The file is gone, and with it its name; what was deleted is let go of.
        Err(_) => owned.retain(|_, file| file.metadata().is_ok_and(|meta| meta.nlink() > 0)),
    }
}

/// The process that owns the volume, if that is another one than this.
pub(super) fn other_owner(backing: &Path) -> Option<Option<u32>> {
    let file = File::open(backing).ok()?;
    let identity = identity_of(&file.metadata().ok()?);
    if owned().contains_key(&identity) {
        return None;
    }
    // Nobody sees this lock: it is gone before anything is done under it, and who wants the lock tries
    // for longer than this takes.
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => Some(holder(identity)),
        _ => None,
    }
}

/// The process that has a lock (`flock`) on the file, where the kernel shows it.
pub fn lock_holder(path: &Path) -> Option<u32> {
    holder(identity_of(&fs::metadata(path).ok()?))
}

fn identity_of(meta: &fs::Metadata) -> FileIdentity {
    (DeviceNumber::from_stat(meta.dev()), meta.ino())
}

/// The process that has the lock, where the kernel shows it.
fn holder(identity: FileIdentity) -> Option<u32> {
    let text = fs::read_to_string(LOCKS).ok()?;
    text.lines().find_map(|line| parse_holder(line, identity))
}

/// Parses a line: number, kind, mode, access, process, and the file with its device in hexadecimal.
fn parse_holder(line: &str, (device, inode): FileIdentity) -> Option<u32> {
    let mut fields = line.split_whitespace().skip(1);
    if fields.next()? != "FLOCK" {
        return None;
    }
    let pid = fields.nth(2)?.parse().ok().filter(|pid| *pid > 0)?;
    let file = format!("{:02x}:{:02x}:{inode}", device.major, device.minor);
    (fields.next()? == file).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_read_from_the_kernels_list() {
        // Fails if the device is not read as hexadecimal, or if another kind of lock counts.
        let device = DeviceNumber {
            major: 254,
            minor: 16,
        };
        let line = "12: FLOCK  ADVISORY  WRITE 4711 fe:10:9233 0 EOF";
        assert_eq!(parse_holder(line, (device, 9233)), Some(4711));
        assert_eq!(parse_holder(line, (device, 9234)), None);
        let other = line.replace("FLOCK", "POSIX");
        assert_eq!(parse_holder(&other, (device, 9233)), None);
    }
}
