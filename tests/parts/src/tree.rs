//! The files of a guest: programs with their libraries, and a busybox for the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::NamedTempFile;

use crate::cpio::Archive;
use crate::error::{Context, Error, Result};
use crate::package::succeeded;

/// Where a package has libraries.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// What goes into the archive, by its path in the guest.
#[derive(Default)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

enum Entry {
    File(PathBuf),
    Bytes(Vec<u8>),
}

impl Tree {
    /// Adds a file of this machine.
    pub fn file(&mut self, path: &Path, at: &str) {
        self.entries
            .insert(at.to_owned(), Entry::File(path.to_owned()));
    }

    /// Adds a file with that text.
    pub fn text(&mut self, at: &str, text: String) {
        self.entries
            .insert(at.to_owned(), Entry::Bytes(text.into_bytes()));
    }

    /// A program of ours without its symbols, which are most of it.
    pub fn stripped(&mut self, program: &Path, at: &str) -> Result<()> {
        let small = NamedTempFile::new().context("make a file in", &std::env::temp_dir())?;
        let arguments = [Path::new("-o"), small.path(), program];
        succeeded("strip", Command::new("strip").args(arguments).output())?;
        let bytes = fs::read(small.path()).context("read", small.path())?;
        self.entries.insert(at.to_owned(), Entry::Bytes(bytes));
        Ok(())
    }

    /// The shared libraries of a program, and what loads them. Those of packages that were unpacked at `root` are
    /// where they would be if these were installed.
    pub fn with_libraries(&mut self, program: &Path, root: Option<&Path>) -> Result<()> {
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

    /// Packs everything, with busybox under all of its names, and these empty directories.
    pub fn write(&self, to: &File, directories: &[&str]) -> Result<()> {
        let busybox = busybox()?;
        self.pack(to, &busybox, directories)
            .context("write", Path::new("a guest's archive"))
    }

    fn pack(&self, to: &File, busybox: &Busybox, empty: &[&str]) -> std::io::Result<()> {
        let mut archive = Archive::new(BufWriter::new(to));
        let mut made = BTreeSet::new();
        for name in empty {
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

/// The program of that name on this machine.
pub fn find_tool(name: &str) -> Result<PathBuf> {
    tool_in(name, Path::new("/"))
}

/// The program of that name in a tree of directories.
pub fn tool_in(name: &str, root: &Path) -> Result<PathBuf> {
    let places = ["usr/sbin", "usr/bin", "sbin", "bin"];
    let mut found = places.iter().map(|place| root.join(place).join(name));
    found
        .find(|path| path.is_file())
        .ok_or_else(|| Error::Incomplete {
            path: root.to_owned(),
            what: format!("{name}; `scripts/setup` installs what the machine must have"),
        })
}
