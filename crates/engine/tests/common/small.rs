//! Small filesystems that a test may fill up or pull the plug of. Mounting them needs root.

#![allow(dead_code, reason = "every test binary uses its own part of this")]

use std::ffi::CString;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Tests with filesystems start programs, and a program inherits the lock of every pool that is
/// open, from its fork until its exec. So they take turns.
static TURN: Mutex<()> = Mutex::new(());

/// A mounted filesystem that is unmounted when this goes away, also by a panic.
pub(crate) struct Small {
    home: tempfile::TempDir,
    turn: Option<MutexGuard<'static, ()>>,
}

impl Small {
    /// A tmpfs of 4 MiB.
    pub(crate) fn tmpfs() -> Small {
        Small::unmounted().with_tmpfs("size=4m,mode=0700")
    }

    /// An ext4 of 16 MiB, which allocates piecemeal where tmpfs does it all at once.
    pub(crate) fn ext4() -> Small {
        Small::unmounted().formatted(
            16 << 20,
            &["mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0"],
        )
    }

    /// An xfs of the least size that it has.
    pub(crate) fn xfs() -> Small {
        Small::unmounted().formatted(320 << 20, &["mkfs.xfs", "-q"])
    }

    fn unmounted() -> Small {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut small = Small::beside_others();
        small.turn = Some(turn);
        small
    }

    /// One for replicas that are processes of their own, so that nobody here holds their locks.
    fn beside_others() -> Small {
        let small = Small {
            home: tempfile::tempdir().unwrap(),
            turn: None,
        };
        fs::create_dir(small.path()).unwrap();
        small
    }

    /// Two pools of this kind.
    pub(crate) fn two(kind: fn(Small) -> Small) -> [Small; 2] {
        [(); 2].map(|()| kind(Small::beside_others()))
    }

    pub(crate) fn tmpfs_pool(self) -> Small {
        self.with_tmpfs("size=24m,mode=0700")
    }

    pub(crate) fn ext4_pool(self) -> Small {
        self.formatted(
            48 << 20,
            &["mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0"],
        )
    }

    pub(crate) fn xfs_pool(self) -> Small {
        self.formatted(320 << 20, &["mkfs.xfs", "-q"])
    }

    fn with_tmpfs(self, options: &str) -> Small {
        let options = CString::new(options).unwrap();
        mount(
            "tmpfs",
            self.path(),
            "tmpfs",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .expect("this test mounts a tmpfs, so it must run as root");
        self
    }

    fn formatted(self, length: u64, mkfs: &[&str]) -> Small {
        File::create(self.image()).unwrap().set_len(length).unwrap();
        run(Command::new(mkfs[0]).args(&mkfs[1..]).arg(self.image()));
        self.mount_image();
        self
    }

    fn mount_image(&self) {
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(self.image())
            .arg(self.path()));
    }

    /// Loses everything that was not synced, as a power loss does, and starts again. Nothing in the
    /// filesystem may be open.
    pub(crate) fn lose_power(&self) {
        run(Command::new("xfs_io")
            .args(["-x", "-c", "shutdown"])
            .arg(self.path()));
        unmount(self.path(), UnmountFlags::empty()).expect("something is still open");
        self.mount_image();
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.home.path().join("pool")
    }

    fn image(&self) -> PathBuf {
        self.home.path().join("image")
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily, because a panic may unwind past open handles.
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}

fn run(command: &mut Command) {
    let status = command
        .status()
        .expect("this test needs e2fsprogs, xfsprogs and mount");
    assert!(
        status.success(),
        "{command:?} failed; this test must run as root"
    );
}
