//! What a network leaves on the machine, and how it is removed.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::{Context, Error, Result};
use crate::ip::ip;

/// How the names of all namespaces and directories begin.
pub const PREFIX: &str = "trellis-nodes";
/// Where `ip` keeps the names of network namespaces.
pub(crate) const NAMESPACES: &str = "/run/netns";
/// How long processes that were killed may take to be gone: they may be waiting in the kernel.
const DEATH_TIME_MAX: Duration = Duration::from_secs(30);
/// How often unmounting and detaching is tried. One may wait for the other.
const ROUNDS_MAX: usize = 400;

/// What begins the names of what this process makes.
pub(crate) fn own_prefix(count: u32) -> String {
    let pid = std::process::id();
    let began = began(pid).unwrap_or_default();
    format!("{PREFIX}-{pid}-{began}-{count}")
}

/// Where the directories of a network are.
pub(crate) fn directory(prefix: &str) -> PathBuf {
    std::env::temp_dir().join(prefix)
}

/// Held while namespaces are made or removed: `ip` prepares its directory at the first use, and nobody may remove what
/// another is making.
pub(crate) fn lock() -> Result<File> {
    // The directory itself is locked, so that no file for it stays.
    let path = std::env::temp_dir();
    let directory = File::open(&path).context("open", &path)?;
    directory.lock().context("lock", &path)?;
    Ok(directory)
}

/// Removes everything whose maker is gone. Returns what was found.
pub fn sweep() -> Result<Vec<String>> {
    let _held = lock()?;
    let mut prefixes = Vec::new();
    for directory in [Path::new(NAMESPACES), &std::env::temp_dir()] {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let prefix = name.split('.').next().unwrap_or_default();
            if is_abandoned(prefix) && !prefixes.iter().any(|have| have == prefix) {
                prefixes.push(prefix.to_owned());
            }
        }
    }
    for prefix in &prefixes {
        remove(prefix)?;
    }
    Ok(prefixes)
}

/// Whether the name is of a process that is gone.
fn is_abandoned(prefix: &str) -> bool {
    let rest = prefix
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_prefix('-'));
    let mut parts = rest.into_iter().flat_map(|rest| rest.split('-'));
    let (Some(pid), Some(then)) = (parts.next(), parts.next()) else {
        return false;
    };
    let pid = pid.parse::<u32>();
    pid.is_ok_and(|pid| began(pid).is_none_or(|began| began.to_string() != then))
}

/// When a process began, in the kernel's ticks; `None` if there is none. A number alone may be another process by now.
fn began(pid: u32) -> Option<u64> {
    const BEGAN: usize = 19;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit(") ").next()?;
    after_name.split(' ').nth(BEGAN)?.parse().ok()
}

/// Removes a network: processes, mounts, loop devices, namespaces, files. Whoever calls holds the lock.
pub(crate) fn remove(prefix: &str) -> Result<()> {
    let names = namespaces(prefix);
    clear(&directory(prefix), &names)?;
    for name in &names {
        ip(&format!("netns del {name}"))?;
    }
    release_namespaces();
    Ok(())
}

/// Takes away what `ip` mounts over its own directory with the first namespace. With a namespace in it, it stays: the
/// directory is in use then. `ip` mounts it again when it needs it.
fn release_namespaces() {
    let is_empty = std::fs::read_dir(NAMESPACES).is_ok_and(|mut names| names.next().is_none());
    if is_empty && mounts_below(Path::new(NAMESPACES)).len() == 1 {
        quietly(Command::new("umount").arg(NAMESPACES));
    }
}

/// The namespaces of a network that are there.
pub(crate) fn namespaces(prefix: &str) -> Vec<String> {
    let entries = std::fs::read_dir(NAMESPACES)
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let of_network = |name: &String| name.split('.').next() == Some(prefix);
    let mut names: Vec<String> = names.filter(of_network).collect();
    names.sort();
    names
}

/// The processes in a network namespace.
pub(crate) fn processes(namespace: &str) -> Vec<Pid> {
    let identity = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        Some((found.dev(), found.ino()))
    };
    let Some(wanted) = identity(&Path::new(NAMESPACES).join(namespace)) else {
        return Vec::new();
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let within = |pid: &i32| {
        let link = PathBuf::from(format!("/proc/{pid}/ns/net"));
        identity(&link) == Some(wanted)
    };
    numbers.filter(within).filter_map(Pid::from_raw).collect()
}

/// Kills every process in a namespace, and waits until they are gone. A keeper may start others while it is being
/// killed, so this looks again until there is none.
pub(crate) fn kill(namespace: &str) -> Result<()> {
    let deadline = Instant::now() + DEATH_TIME_MAX;
    loop {
        let pids = processes(namespace);
        if pids.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Error::Stubborn {
                node: namespace.to_owned(),
                pids: pids
                    .into_iter()
                    .map(Pid::as_raw_nonzero)
                    .map(i32::from)
                    .collect(),
                state: "running",
            });
        }
        for pid in pids {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills what runs in these namespaces, unmounts and detaches everything below a directory, and removes it. A program
/// that was just started may enter its namespace only later, so every round looks for processes again.
fn clear(directory: &Path, namespaces: &[String]) -> Result<()> {
    for _ in 0..ROUNDS_MAX {
        for namespace in namespaces {
            kill(namespace)?;
        }
        let (mounts, loops) = (mounts_below(directory), loops_below(directory));
        if mounts.is_empty() && loops.is_empty() {
            break;
        }
        for mount in mounts.iter().rev() {
            quietly(Command::new("umount").arg(mount));
        }
        for device in loops {
            quietly(Command::new("losetup").arg("-d").arg(device));
        }
        if !mounts_below(directory).is_empty() || !loops_below(directory).is_empty() {
            // Something that was killed has not let go of it yet, which takes a while on a busy machine.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    let mut left = mounts_below(directory);
    left.extend(loops_below(directory));
    if let Some(first) = left.first() {
        return Err(Error::Left {
            what: first.display().to_string(),
        });
    }
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context("remove", directory)
        }
        _ => Ok(()),
    }
}

/// Runs a program whose success is looked at afterwards.
fn quietly(command: &mut Command) {
    let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

fn mounts_below(directory: &Path) -> Vec<PathBuf> {
    let mounts = trellis_node::sys::mountinfo::read().unwrap_or_default();
    let points = mounts.into_iter().map(|mount| mount.mount_point);
    points
        .filter(|point| point.starts_with(directory))
        .collect()
}

/// Loop devices on files below the directory, as sysfs tells: a device whose file is gone cannot be asked.
fn loops_below(directory: &Path) -> Vec<PathBuf> {
    let devices = std::fs::read_dir("/sys/block")
        .into_iter()
        .flatten()
        .flatten();
    let on_file = |device: std::fs::DirEntry| {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        let is_below = Path::new(file.trim_end()).starts_with(directory);
        is_below.then(|| Path::new("/dev").join(device.file_name()))
    };
    devices.filter_map(on_file).collect()
}
