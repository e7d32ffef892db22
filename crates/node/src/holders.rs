//! Which processes keep a mount or a device in use: a bounded look through /proc, for a helpful error.
//!
//! The answer may miss holders (a process that has just ended, or one beyond the bounds). It is never used to decide
//! anything.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::sys::block::DeviceNumber;
use crate::sys::mountinfo;

/// How many processes are looked at.
const PROCESSES_MAX: usize = 4096;
/// How many open files are looked at, over all processes.
const FILES_MAX: usize = 65_536;
/// How many holders are named.
const HOLDERS_MAX: usize = 8;

/// A process that keeps something in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process id.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// How it holds on.
    pub how: Hold,
}

/// How a process keeps something in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// An open file, a working directory or a root directory, at this path.
    File(PathBuf),
    /// A mount in the process's own mount namespace, at this path.
    Mount(PathBuf),
}

impl fmt::Display for Holder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Holder { pid, name, how } = self;
        match how {
            Hold::File(path) => write!(out, "process {pid} ({name}) has {} open", path.display()),
            Hold::Mount(path) => write!(
                out,
                "process {pid} ({name}) has it mounted at {} in its own mount namespace",
                path.display()
            ),
        }
    }
}

/// The tail of an error sentence that names the holders, or nothing if none was found.
pub(crate) fn sentence(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return String::new();
    }
    let names: Vec<String> = holders.iter().map(Holder::to_string).collect();
    format!(": {}", names.join(", "))
}

/// Processes with something open below `mount_point`, or other mounts below it.
pub(crate) fn of_mount(mount_point: &Path) -> Vec<Holder> {
    search(|path| path.starts_with(mount_point), None)
}

/// Processes that have the device or a file on it open, or have its filesystem mounted in a namespace
/// of their own.
pub(crate) fn of_device(node: &Path, device: DeviceNumber) -> Vec<Holder> {
    search(|path| path == node, Some(device))
}

fn search(is_held: impl Fn(&Path) -> bool, device: Option<DeviceNumber>) -> Vec<Holder> {
    let mut holders = Vec::new();
    let mut files_left = FILES_MAX;
    // One process of a namespace stands for all of them.
    let mut namespaces: HashSet<PathBuf> = fs::read_link("/proc/self/ns/mnt").into_iter().collect();
    let Ok(processes) = fs::read_dir("/proc") else {
        return holders;
    };
    let pids = processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .take(PROCESSES_MAX);
    for pid in pids {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let held = held_file(&process, &is_held, device, &mut files_left)
            .map(Hold::File)
            .or_else(|| {
                let namespace = fs::read_link(process.join("ns/mnt")).ok()?;
                let first_seen = namespaces.insert(namespace);
                first_seen
                    .then(|| held_mount(&process, device?))
                    .flatten()
                    .map(Hold::Mount)
            });
        if let Some(how) = held {
            let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
            holders.push(Holder {
                pid,
                name: name.trim().to_owned(),
                how,
            });
        }
        if holders.len() >= HOLDERS_MAX || files_left == 0 {
            break;
        }
    }
    holders
}

fn held_file(
    process: &Path,
    is_held: &impl Fn(&Path) -> bool,
    device: Option<DeviceNumber>,
    files_left: &mut usize,
) -> Option<PathBuf> {
    let places = ["cwd", "root"].map(|name| process.join(name));
    let open_files = fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    for link in places.into_iter().chain(open_files) {
        *files_left = files_left.checked_sub(1)?;
        match fs::read_link(&link) {
            Ok(path) if is_held(&path) => return Some(path),
            Ok(path) if device.is_some() && file_device(&link) == device => return Some(path),
            _ => {}
        }
    }
    None
}

/// The device that an open file is on, from what the kernel knows already: a file on a dead server
/// must not hang the search.
fn file_device(link: &Path) -> Option<DeviceNumber> {
    let known = rustix::fs::statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).ok()?;
    Some(DeviceNumber {
        major: known.stx_dev_major,
        minor: known.stx_dev_minor,
    })
}

fn held_mount(process: &Path, device: DeviceNumber) -> Option<PathBuf> {
    let mounts = mountinfo::read_file(&process.join("mountinfo")).ok()?;
    mountinfo::of(&mounts, device)
        .next()
        .map(|mount| mount.mount_point.clone())
}
