//! A directory for one test that leaves nothing behind: no mount, no device, no file, also on panic.

#![allow(dead_code, reason = "every test binary uses another part")]

use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::SeekFrom;
use rustix::mount::UnmountFlags;
use tempfile::TempDir;
use trellis_api::Bytes;
use trellis_node::filesystem::{FilesystemKind, Outcome};
use trellis_node::sys::capability::{self, Capability};
use trellis_node::sys::{loopdev, mountinfo};
use trellis_node::volume::{self, AttachedDevice};

pub struct Bench {
    dir: TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        Bench {
            dir: TempDir::with_prefix("trellis-node-").unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap();
        path
    }

    /// A sparse file of that size.
    pub fn file(&self, name: &str, size: Bytes) -> PathBuf {
        let path = self.path(name);
        set_size(&path, size);
        path
    }

    /// A volume with a staged filesystem.
    pub fn volume(&self, name: &str, kind: FilesystemKind, size: Bytes) -> Volume {
        let backing = self.file(name, size);
        let note = self.path(&format!("{name}.mkfs"));
        let staging = self.path(&format!("{name}.mount"));
        let device = volume::attach(&backing, false).unwrap();
        volume::ensure_filesystem(&device.path, kind, &note).unwrap();
        volume::stage(&device.path, kind, &staging, false).unwrap();
        Volume {
            backing,
            staging,
            device,
            kind,
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let root = self.dir.path();
        for mount in mountinfo::read().unwrap_or_default().iter().rev() {
            if mount.mount_point.starts_with(root) {
                let _ = rustix::mount::unmount(&mount.mount_point, UnmountFlags::DETACH);
            }
        }
        for device in loopdev::list().unwrap_or_default() {
            if device.backing_hint.starts_with(root)
                && let Ok(node) = File::open(&device.path)
            {
                let _ = loopdev::clear(&node);
            }
        }
    }
}

pub struct Volume {
    pub backing: PathBuf,
    pub staging: PathBuf,
    pub device: AttachedDevice,
    pub kind: FilesystemKind,
}

impl Volume {
    /// Raises file, device and filesystem.
    pub fn grow(&self, to: Bytes) -> (Outcome, Outcome) {
        set_size(&self.backing, to);
        let device = volume::grow_device(&self.backing, to).unwrap();
        let filesystem =
            volume::grow_filesystem(self.kind, &self.staging, &self.device.path).unwrap();
        (device, filesystem)
    }

    pub fn take_down(&self) {
        volume::unstage(&self.staging, Some(self.device.number)).unwrap();
        assert!(volume::detach(&self.backing).unwrap());
    }
}

pub fn set_size(path: &Path, size: Bytes) {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    file.set_len(size.get()).unwrap();
}

/// Runs a program that has to succeed.
pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
}

pub fn installed(program: &str) -> bool {
    ["/usr/sbin", "/sbin", "/usr/bin", "/bin"]
        .iter()
        .any(|dir| Path::new(dir).join(program).exists())
}

/// Checks the idle filesystem with its own program, changing nothing.
pub fn check(kind: FilesystemKind, device: &Path) {
    let device = device.to_str().unwrap();
    match kind {
        FilesystemKind::Xfs => run("xfs_repair", &["-n", device]),
        FilesystemKind::Btrfs => run("btrfs", &["check", "--readonly", device]),
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => run("e2fsck", &["-fn", device]),
    }
}

/// Writes blocks of a pseudo-random stream until the filesystem is full or `limit` is reached, and
/// answers how much was written.
pub fn fill(path: &Path, seed: u64, limit: u64) -> u64 {
    let mut file = match File::create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return 0,
        other => other.unwrap(),
    };
    let mut written = 0;
    let mut stream = Stream(seed);
    let mut block = [0; 65_536];
    while written < limit {
        stream.fill(&mut block);
        match file.write(&block) {
            Ok(count) if count == block.len() => written += 65_536,
            Ok(count) => {
                written += u64::try_from(count).unwrap();
                break;
            }
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => break,
            Err(error) => panic!("{error}"),
        }
    }
    match file.sync_all() {
        Err(error) if error.kind() != std::io::ErrorKind::StorageFull => panic!("{error}"),
        _ => written,
    }
}

/// Whether the file still has the stream of that seed.
pub fn verify(path: &Path, seed: u64, length: u64) {
    let mut file = File::open(path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), length);
    let mut stream = Stream(seed);
    let (mut wanted, mut found) = ([0; 65_536], Vec::new());
    let mut checked = 0;
    while checked < length {
        stream.fill(&mut wanted);
        found.clear();
        Read::by_ref(&mut file)
            .take(65_536)
            .read_to_end(&mut found)
            .unwrap();
        assert!(found == wanted[..found.len()], "changed at {checked}");
        assert!(!found.is_empty());
        checked += u64::try_from(found.len()).unwrap();
    }
}

struct Stream(u64);

impl Stream {
    fn fill(&mut self, block: &mut [u8]) {
        for chunk in block.chunks_mut(8) {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            chunk.copy_from_slice(&self.0.to_le_bytes());
        }
    }
}

/// Whether this kernel lets this process grow a mounted ext4 or ext3. Says so where it does not.
pub fn can_grow_ext() -> bool {
    let can = capability::is_effective(Capability::SysResource);
    if !can {
        println!("no CAP_SYS_RESOURCE here: the growth of ext is only seen to be refused by name");
    }
    can
}

/// Makes the filesystem mounted there stop, as it does by itself when its disk fails.
pub fn shut_down(mount_point: &Path) {
    let place = mount_point.to_str().unwrap();
    run("xfs_io", &["-x", "-c", "shutdown -f", place]);
}

/// How long something that the kernel does by itself may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `happened` says so.
pub fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !happened() {
        assert!(Instant::now() < deadline, "gave up: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that is killed and waited for when the test is over, however it ends.
pub struct Process(pub Child);

impl Process {
    /// This test program once more, for the one test `name`, which sees the variables.
    pub fn of_this_test(name: &str, variables: &[(&str, &str)]) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .envs(variables.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Process(command.spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How many loop devices are on the file.
pub fn devices_on(backing: &Path) -> usize {
    let devices = loopdev::list().unwrap();
    devices
        .iter()
        .filter(|device| device.backing_hint == backing)
        .count()
}

/// Every block of the file that is not zero, with its offset; holes are passed over unread.
pub fn blocks(path: &Path, mut each: impl FnMut(u64, &[u8])) {
    let file = File::open(path).unwrap();
    let mut buffer = vec![0; 65_536];
    let mut offset = 0;
    while let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(offset)) {
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(data)).unwrap();
        offset = data;
        while offset < hole {
            let count = file.read_at(&mut buffer, offset).unwrap();
            assert!(count > 0);
            if buffer[..count].iter().any(|byte| *byte != 0) {
                each(offset, &buffer[..count]);
            }
            offset += u64::try_from(count).unwrap();
        }
    }
}

/// A number that changes with any byte of the file.
pub fn fingerprint(path: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    blocks(path, |offset, bytes| (offset, bytes).hash(&mut hasher));
    hasher.finish()
}

/// Copies the file as it is now, without its holes.
pub fn copy(from: &Path, to: &Path) {
    set_size(to, Bytes::new(fs::metadata(from).unwrap().len()));
    let file = OpenOptions::new().write(true).open(to).unwrap();
    blocks(from, |offset, bytes| {
        file.write_all_at(bytes, offset).unwrap()
    });
}
