//! A QEMU of a test: started as a user without rights, ended with the test.

#![allow(dead_code, clippy::unwrap_used)]

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use trellis_api::Bytes;
use trellis_node::sys::loopdev;
use trellis_vm::graph::{Bus, DiskId, DiskLimits, DiskSpec, ImageFormat, OpenImage};
use trellis_vm::launch::{Accelerator, Boot, Launch, RunAs, Sockets, VmSpec, launch};

/// `nobody` and `nogroup`.
pub const NOBODY: RunAs = RunAs {
    uid: 65534,
    gid: 65534,
};
/// How long QEMU may take to listen.
const START_TIME_MAX: Duration = Duration::from_secs(60);
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running QEMU. It is killed when this goes, and when this process does.
pub struct Qemu {
    child: Child,
    pub dir: TempDir,
    pub sockets: Sockets,
}

pub fn spec(sockets: Sockets) -> VmSpec {
    VmSpec {
        name: "test".to_owned(),
        memory: Bytes::mib(512),
        processors: 2,
        accelerator: Accelerator::Tcg,
        boot: Boot::Disk { firmware: None },
        sockets,
        scsi_controllers: 1,
        spare_ports: 4,
        network: None,
        user: Some(NOBODY),
    }
}

impl Qemu {
    /// A machine without anything to boot.
    pub fn empty() -> Qemu {
        Qemu::start(|spec| spec)
    }

    pub fn start(change: impl FnOnce(VmSpec) -> VmSpec) -> Qemu {
        let dir = TempDir::with_prefix("trellis-vm-").unwrap();
        // QEMU makes its sockets in here.
        rustix::fs::chown(
            dir.path(),
            Some(rustix::fs::Uid::from_raw(NOBODY.uid)),
            Some(rustix::fs::Gid::from_raw(NOBODY.gid)),
        )
        .unwrap();
        let sockets = Sockets::below(dir.path());
        let launch = launch(&change(spec(sockets.clone()))).unwrap();
        let child = spawn(&launch, &dir.path().join("said"));
        let mut qemu = Qemu {
            child,
            dir,
            sockets,
        };
        let deadline = Instant::now() + START_TIME_MAX;
        while !qemu.sockets.qmp.exists() {
            let ended = qemu.child.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "QEMU did not start: {ended:?} {}",
                qemu.said()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        qemu
    }

    /// What QEMU itself complained of.
    pub fn said(&self) -> String {
        fs::read_to_string(self.dir.path().join("said")).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for QEMU's own end.
    pub fn ended(&mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "QEMU does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts QEMU so that it dies with the thread that is here.
fn spawn(launch: &Launch, said: &Path) -> Child {
    let user = launch.user.unwrap();
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "--clear-groups"])
        .arg(format!("--reuid={}", user.uid))
        .arg(format!("--regid={}", user.gid))
        .arg(launch.program)
        .args(&launch.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(said).unwrap())
        .spawn()
        .unwrap()
}

/// Where a test's disks are: a directory that QEMU's user cannot enter.
pub struct Shelf(pub TempDir);

impl Shelf {
    pub fn new() -> Shelf {
        let dir = TempDir::with_prefix("trellis-vm-disks-").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        Shelf(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A sparse file.
    pub fn file(&self, name: &str, size: Bytes) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size.get()).unwrap();
        path
    }

    pub fn qcow2(&self, name: &str, size: Bytes, backing: Option<&Path>) -> PathBuf {
        let path = self.path(name);
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2"]);
        if let Some(backing) = backing {
            command.args(["-F", "raw", "-b"]).arg(backing);
        }
        let made = command.arg(&path).arg(size.get().to_string()).output();
        let made = made.unwrap();
        assert!(made.status.success(), "{made:?}");
        path
    }

    /// A loop device on a new file. It goes with the last who has it open.
    pub fn device(&self, name: &str, size: Bytes) -> LoopDisk {
        let backing = self.file(name, size);
        let device = loopdev::attach_temporary(&backing).unwrap().unwrap();
        LoopDisk { backing, device }
    }
}

/// A block device that can grow.
pub struct LoopDisk {
    backing: PathBuf,
    device: loopdev::Temporary,
}

impl LoopDisk {
    pub fn path(&self) -> &Path {
        &self.device.device.path
    }

    pub fn grow(&self, size: Bytes) {
        extend(&self.backing, size);
        loopdev::refresh_size(File::open(self.path()).unwrap()).unwrap();
    }
}

pub fn extend(path: &Path, size: Bytes) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(size.get()).unwrap();
}

pub fn open(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).open(path).unwrap()
}

pub fn id(text: &str) -> DiskId {
    DiskId::new(text).unwrap()
}

/// A disk whose serial number is its identity.
pub fn disk(name: &str, bus: Bus, path: &Path, format: ImageFormat) -> DiskSpec {
    DiskSpec {
        id: id(name),
        serial: name.to_owned(),
        bus,
        source: OpenImage {
            file: open(path).into(),
            format,
        },
        backing: None,
        read_only: false,
        direct: false,
        boot_index: None,
        limits: DiskLimits::default(),
    }
}

/// Bytes that no other disk has.
pub fn pattern(seed: u8, length: usize) -> Vec<u8> {
    let mut value = u64::from(seed) * 2 + 1;
    (0..length)
        .map(|_| {
            value = value
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            value.to_be_bytes()[0]
        })
        .collect()
}

pub fn write_file(path: &Path, bytes: &[u8]) {
    File::create(path).unwrap().write_all(bytes).unwrap();
}

pub fn read_file(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}
