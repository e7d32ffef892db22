//! The guest's first and only root filesystem: our programs, the filesystems' tools, the libraries of both, a busybox
//! for the rest, and kernel modules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::BufWriter;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::NamedTempFile;

use crate::artifacts::Artifacts;
use crate::cpio::Archive;
use crate::error::{Context, Error, Result};
use crate::kernel::{Kernel, kernel};
use crate::modules::Modules;
use crate::package::{succeeded, unpacked};

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
/// Where a package has libraries.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
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
        let mut content = Content::default();
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
        content
            .write(&image.archive, &busybox()?)
            .context("write", &image.path())?;
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

/// What goes into the archive, by its path in the guest.
#[derive(Default)]
struct Content {
    entries: BTreeMap<String, Entry>,
}

enum Entry {
    File(PathBuf),
    Bytes(Vec<u8>),
}

impl Content {
    fn file(&mut self, path: &Path, at: &str) {
        self.entries
            .insert(at.to_owned(), Entry::File(path.to_owned()));
    }

    fn text(&mut self, at: &str, text: String) {
        self.entries
            .insert(at.to_owned(), Entry::Bytes(text.into_bytes()));
    }

    /// A program of ours without its symbols, which are most of it.
    fn stripped(&mut self, program: &Path, at: &str) -> Result<()> {
        let small = NamedTempFile::new().context("make a file in", &std::env::temp_dir())?;
        let arguments = [Path::new("-o"), small.path(), program];
        succeeded("strip", Command::new("strip").args(arguments).output())?;
        let bytes = fs::read(small.path()).context("read", small.path())?;
        self.entries.insert(at.to_owned(), Entry::Bytes(bytes));
        Ok(())
    }

    /// The shared libraries of a program, and what loads them. Those of packages that were unpacked at `root` are
    /// where they would be if these were installed.
    fn with_libraries(&mut self, program: &Path, root: Option<&Path>) -> Result<()> {
        let mut ldd = Command::new("ldd");
        if let Some(root) = root {
            let places = LIBRARIES.map(|place| root.join(place).display().to_string());
            ldd.env("LD_LIBRARY_PATH", places.join(":"));
        }
        // ldd fails for a program that needs no library at all.
        let Ok(said) = succeeded("ldd", ldd.arg(program).output()) else {
            return Ok(());
        };
        if let Some(missing) = said.lines().find(|line| line.contains("not found")) {
            return Err(Error::Incomplete {
                path: program.to_owned(),
                what: missing.trim().to_owned(),
            });
        }
        for line in said.lines() {
            let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) else {
                continue;
            };
            let path = Path::new(path);
            let inside = root.and_then(|root| path.strip_prefix(root).ok());
            let at = inside.map_or(path.to_owned(), |inside| Path::new("/").join(inside));
            self.file(path, &at.to_string_lossy());
        }
        Ok(())
    }

    fn write(&self, to: &File, busybox: &Busybox) -> std::io::Result<()> {
        let mut archive = Archive::new(BufWriter::new(to));
        let mut made = BTreeSet::new();
        for name in DIRECTORIES {
            directories(&mut archive, &mut made, name)?;
        }
        archive.device("dev/console", 5, 1)?;
        archive.device("dev/null", 1, 3)?;
        directories(&mut archive, &mut made, "bin")?;
        archive.file("bin/busybox", &busybox.program)?;
        for applet in &busybox.applets {
            archive.link(&format!("bin/{applet}"), "busybox")?;
        }
        for (at, entry) in &self.entries {
            let at = at.trim_start_matches('/');
            if let Some((above, _)) = at.rsplit_once('/') {
                directories(&mut archive, &mut made, above)?;
            }
            match entry {
                Entry::File(path) => archive.file(at, &fs::read(path)?)?,
                Entry::Bytes(bytes) => archive.file(at, bytes)?,
            }
        }
        archive.finish().map(drop)
    }
}

/// Adds a directory and those above it, as far as they are not there.
fn directories(
    archive: &mut Archive<BufWriter<&File>>,
    made: &mut BTreeSet<String>,
    name: &str,
) -> std::io::Result<()> {
    let ends = name.match_indices('/').map(|(at, _)| at);
    for end in ends.chain([name.len()]) {
        if made.insert(name[..end].to_owned()) {
            archive.directory(&name[..end])?;
        }
    }
    Ok(())
}

struct Busybox {
    program: Vec<u8>,
    applets: Vec<String>,
}

fn busybox() -> Result<Busybox> {
    let path = find_tool("busybox")?;
    let applets = succeeded("busybox", Command::new(&path).arg("--list").output())?;
    Ok(Busybox {
        program: fs::read(&path).context("read", &path)?,
        applets: applets
            .lines()
            .filter(|name| *name != "busybox")
            .map(str::to_owned)
            .collect(),
    })
}

fn find_tool(name: &str) -> Result<PathBuf> {
    tool_in(name, Path::new("/"))
}

/// The program of that name in a tree of directories.
fn tool_in(name: &str, root: &Path) -> Result<PathBuf> {
    let places = ["usr/sbin", "usr/bin", "sbin", "bin"];
    let mut found = places.iter().map(|place| root.join(place).join(name));
    found
        .find(|path| path.is_file())
        .ok_or_else(|| Error::Incomplete {
            path: root.to_owned(),
            what: format!("{name}; `scripts/setup` installs what the machine must have"),
        })
}
