//! The guest's first and only root filesystem: our programs, the filesystems' tools, the libraries of both, a busybox
//! for the rest, and kernel modules.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use trellis_guest_parts::error::Context;
use trellis_guest_parts::kernel::{Kernel, kernel};
use trellis_guest_parts::modules::Modules;
use trellis_guest_parts::package::unpacked;
use trellis_guest_parts::tree::{Tree, find_tool, tool_in};

use crate::artifacts::Artifacts;
use crate::error::Result;

/// Modules that are loaded at boot, in this order.
const ALWAYS: [&str; 7] = [
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "virtio_rng",
    "loop",
    "xfs",
    "fuse",
];
/// Modules that are there for scenarios that ask for them. btrfs measures checksum algorithms when it is
/// loaded, which takes a second in here.
const ON_REQUEST: [&str; 4] = ["btrfs", "iscsi_tcp", "sd_mod", "dm_mod"];
/// Tools. They are found where a shell finds them and are put in
/// `/usr/sbin`.
const TOOLS: [&str; 21] = [
    "mkfs.ext3",
    "mkfs.ext4",
    "mke2fs",
    "e2fsck",
    "resize2fs",
    "dumpe2fs",
    "tune2fs",
    "debugfs",
    "mkfs.xfs",
    "xfs_repair",
    "xfs_io",
    "xfs_growfs",
    "mkfs.btrfs",
    "btrfs",
    "mkswap",
    "sfdisk",
    "losetup",
    "mount",
    "umount",
    "blkid",
    "blkdiscard",
];
/// Linux's initiator in user space, with the libraries that nothing else brings. Installed on the machine itself it
/// would begin to run there.
const INITIATOR: [&str; 6] = [
    "open-iscsi",
    "libopeniscsiusr",
    "libisns0",
    "libkmod2",
    "libmount1",
    "libssl3",
];
const INITIATOR_TOOLS: [&str; 2] = ["iscsid", "iscsiadm"];
/// Files that are taken over as they are.
const FILES: [&str; 1] = ["/etc/mke2fs.conf"];
const DIRECTORIES: [&str; 6] = ["proc", "sys", "dev", "tmp", "run", "scratch"];

/// Where init finds the list of modules to load at boot.
pub const MODULE_LIST: &str = "/etc/guest/modules";
/// Where the modules are.
pub const MODULE_DIR: &str = "/lib/guest";

/// A packed guest.
pub struct Image {
    /// What it runs on.
    pub kernel: Kernel,
    /// The archive. The file has no name, so that nothing can be left of it.
    archive: File,
    modules: Modules,
}

impl Image {
    /// Packs a guest with all that cargo has built.
    pub fn pack(artifacts: &Artifacts) -> Result<Image> {
        let kernel = kernel()?;
        let modules = Modules::find(&kernel.modules)?;
        let archive = tempfile::tempfile().context("make a file in", &std::env::temp_dir())?;
        let mut content = Tree::default();
        content.stripped(artifacts.program("guest-init")?, "/init")?;
        for program in artifacts.for_guest() {
            content.stripped(program, &program.to_string_lossy())?;
            content.with_libraries(program, None)?;
        }
        content.with_libraries(artifacts.program("guest-init")?, None)?;
        for tool in TOOLS {
            let path = find_tool(tool)?;
            content.file(&path, &format!("/usr/sbin/{tool}"));
            content.with_libraries(&path, None)?;
        }
        let names = || Ok(INITIATOR.map(str::to_owned).to_vec());
        let initiator = unpacked("initiator", names)?;
        for tool in INITIATOR_TOOLS {
            let path = tool_in(tool, &initiator)?;
            content.file(&path, &format!("/usr/sbin/{tool}"));
            content.with_libraries(&path, Some(&initiator))?;
        }
        for file in FILES {
            content.file(Path::new(file), file);
        }
        let all: Vec<&str> = ALWAYS.iter().chain(&ON_REQUEST).copied().collect();
        for (name, path) in modules.with_needed(&all)? {
            content.file(&path, &format!("{MODULE_DIR}/{name}.ko"));
        }
        let image = Image {
            kernel,
            archive,
            modules,
        };
        content.text(MODULE_LIST, image.module_files(&ALWAYS)?.join("\n"));
        content.text("/etc/passwd", "root:x:0:0:root:/:/bin/sh\n".to_owned());
        content.text("/etc/group", "root:x:0:\n".to_owned());
        content.text("/etc/hosts", "127.0.0.1 localhost guest\n".to_owned());
        content.write(&image.archive, &DIRECTORIES)?;
        Ok(image)
    }

    /// Where another process finds the archive while this one lives.
    pub fn path(&self) -> PathBuf {
        let (pid, fd) = (std::process::id(), self.archive.as_raw_fd());
        PathBuf::from(format!("/proc/{pid}/fd/{fd}"))
    }

    /// The files in the guest of the named modules and of all that they need, in the order in which they
    /// are to be loaded.
    pub fn module_files(&self, names: &[&str]) -> Result<Vec<String>> {
        let needed = self.modules.with_needed(names)?;
        Ok(needed
            .into_iter()
            .map(|(name, _)| format!("{MODULE_DIR}/{name}.ko"))
            .collect())
    }
}
