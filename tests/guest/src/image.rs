//! The guest's first and only root filesystem: our programs, the filesystems' tools, the libraries of both,
//! a busybox for the rest, and kernel modules.

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
use crate::kernel::{Kernel, kernel, succeeded};
use crate::modules::Modules;

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
const TOOLS: [&str; 23] = [
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
    "iscsid",
    "iscsiadm",
];
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
            content.with_libraries(program)?;
        }
        content.with_libraries(artifacts.program("guest-init")?)?;
        for tool in TOOLS {
            let path = find_tool(tool)?;
            content.file(&path, &format!("/usr/sbin/{tool}"));
            content.with_libraries(&path)?;
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

    /// The shared libraries of a program, and what loads them.
    fn with_libraries(&mut self, program: &Path) -> Result<()> {
        let said = Command::new("ldd").arg(program).output();
        // ldd fails for a program that needs no library at all.
        let Ok(said) = succeeded("ldd", said) else {
            return Ok(());
        };
        for line in said.lines() {
            let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) else {
                continue;
            };
            self.file(Path::new(path), path);
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
    let places = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(Path::new);
    let found = places.iter().map(|place| place.join(name));
    let found = found.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| Error::Incomplete {
        path: PathBuf::from("/usr"),
        what: format!("{name}; `scripts/setup` installs it"),
    })
}
