//! A small Linux guest: a kernel, busybox, the filesystems' tools and the guest agent.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use trellis_guest_parts::kernel::kernel;
use trellis_guest_parts::modules::Modules;
use trellis_guest_parts::package::unpacked;
use trellis_guest_parts::tree::{Tree, find_tool, tool_in};
use trellis_vm::agent::GuestAgent;
use trellis_vm::agent::exec::GuestOutput;
use trellis_vm::launch::Boot;

use super::PATIENCE;

/// Modules that are loaded at boot. `button` and `evdev` are for the power button.
const MODULES: [&str; 9] = [
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "virtio_scsi",
    "sd_mod",
    "ext4",
    "xfs",
    "button",
    "evdev",
];
/// A module that is slow to load, for those who ask.
const SLOW_MODULE: &str = "btrfs";
const TOOLS: [&str; 8] = [
    "mkfs.ext4",
    "resize2fs",
    "mkfs.xfs",
    "xfs_growfs",
    "mkfs.btrfs",
    "btrfs",
    "sfdisk",
    "partx",
];
/// The agent, with the libraries that nothing else brings.
const AGENT: [&str; 6] = [
    "qemu-guest-agent",
    "libglib2.0-0",
    "libnuma1",
    "libudev1",
    "liburing2",
    "libpcre2-8-0",
];
const INIT: &str = include_str!("init.sh");
const DISKS: &str = include_str!("disks.sh");

/// What a guest boots: copies of kernel and archive where QEMU's user can read them.
pub struct Linux {
    dir: TempDir,
}

impl Linux {
    pub fn pack() -> Linux {
        let kernel = kernel().unwrap();
        let modules = Modules::find(&kernel.modules).unwrap();
        let mut tree = Tree::default();
        for (list, names) in [
            ("/etc/modules", MODULES.as_slice()),
            ("/etc/modules.slow", &[SLOW_MODULE]),
        ] {
            let mut lines = Vec::new();
            for (name, path) in modules.with_needed(names).unwrap() {
                let at = format!("/lib/modules/{name}.ko");
                tree.file(&path, &at);
                lines.push(at);
            }
            tree.text(list, lines.join("\n") + "\n");
        }
        for tool in TOOLS {
            let path = find_tool(tool).unwrap();
            tree.file(&path, &format!("/usr/sbin/{tool}"));
            tree.with_libraries(&path, None).unwrap();
        }
        let agent = unpacked("agent", || Ok(AGENT.map(str::to_owned).to_vec())).unwrap();
        let path = tool_in("qemu-ga", &agent).unwrap();
        tree.file(&path, "/usr/sbin/qemu-ga");
        tree.with_libraries(&path, Some(&agent)).unwrap();
        tree.file(std::path::Path::new("/etc/mke2fs.conf"), "/etc/mke2fs.conf");
        tree.text("/init", INIT.to_owned());
        tree.text("/bin/disks", DISKS.to_owned());
        tree.text("/etc/passwd", "root:x:0:0:root:/:/bin/sh\n".to_owned());

        let dir = TempDir::with_prefix("trellis-vm-guest-").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let archive = File::create(dir.path().join("initrd")).unwrap();
        let empty = ["proc", "sys", "dev", "run", "tmp", "mnt"];
        tree.write(&archive, &empty).unwrap();
        fs::copy(&kernel.image, dir.path().join("kernel")).unwrap();
        for name in ["initrd", "kernel"] {
            let readable = fs::Permissions::from_mode(0o644);
            fs::set_permissions(dir.path().join(name), readable).unwrap();
        }
        Linux { dir }
    }

    pub fn boot(&self) -> Boot {
        Boot::Kernel {
            kernel: self.dir.path().join("kernel"),
            initrd: Some(self.dir.path().join("initrd")),
            command_line: "console=ttyS0 quiet loglevel=4 panic=-1".to_owned(),
        }
    }
}

/// The guest as its agent shows it.
pub struct Inside(pub GuestAgent);

impl Inside {
    /// Runs a shell's text that must succeed, and answers what it printed.
    pub async fn sh(&mut self, text: &str) -> String {
        let output = self.try_sh(text).await;
        assert_eq!(output.status, 0, "{text}: {output:?}");
        output.stdout
    }

    pub async fn try_sh(&mut self, text: &str) -> GuestOutput {
        let arguments = ["-c", text];
        self.0.run("/bin/sh", &arguments, PATIENCE).await.unwrap()
    }

    /// The size that the guest's kernel sees, or none if it sees no such disk.
    pub async fn size(&mut self, serial: &str) -> Option<u64> {
        let said = self.sh(&format!("disks size {serial}")).await;
        said.trim().parse().ok()
    }

    /// Waits until the guest's kernel sees this.
    pub async fn sees(&mut self, serial: &str, size: Option<u64>) -> Duration {
        let began = Instant::now();
        loop {
            let seen = self.size(serial).await;
            if seen == size {
                return began.elapsed();
            }
            assert!(
                began.elapsed() < PATIENCE,
                "the guest sees {seen:?} instead of {size:?} on {serial}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the guest's kernel sees these disks with these sizes, and no others.
    pub async fn sees_all(&mut self, disks: &BTreeMap<String, u64>) {
        let began = Instant::now();
        loop {
            let said = self.sh("disks list").await;
            let seen: BTreeMap<String, u64> = said
                .lines()
                .filter_map(|line| line.split_once(' '))
                .map(|(serial, size)| (serial.to_owned(), size.parse().unwrap()))
                .collect();
            if seen == *disks {
                return;
            }
            assert!(
                began.elapsed() < PATIENCE,
                "the guest sees {seen:?} instead of {disks:?}"
            );
        }
    }

    /// Writes a known pattern of so many KiB there, past every cache, and answers its checksum.
    pub async fn write(&mut self, serial: &str, at_kib: u64, kib: u64, word: &str) -> String {
        let said = self
            .sh(&format!("disks write {serial} {at_kib} {kib} {word}"))
            .await;
        said.trim().to_owned()
    }

    /// The checksum of so many KiB from there, read from the disk itself.
    pub async fn sum(&mut self, serial: &str, at_kib: u64, kib: u64) -> String {
        let said = self.sh(&format!("disks sum {serial} {at_kib} {kib}")).await;
        said.trim().to_owned()
    }

    /// How many disks the guest sees.
    pub async fn count(&mut self) -> usize {
        let said = self.sh("ls -d /sys/block/sd* /sys/block/vd* 2>/dev/null | wc -l");
        said.await.trim().parse().unwrap()
    }
}
