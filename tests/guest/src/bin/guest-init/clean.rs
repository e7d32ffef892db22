//! Finds and removes what a scenario leaves behind: processes, mounts, loop devices. An iSCSI session is only named.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, WaitOptions};
use trellis_node::sys::{loopdev, mountinfo};

/// How long killed processes may take to end. One that is stuck in the kernel takes longer.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// How long processes may take to end after the one that was waited for.
const SETTLE_LIMIT: Duration = Duration::from_millis(300);
/// How often mounts and loop devices are gone through: what is stacked comes off layer by layer.
const ROUNDS_MAX: u32 = 4;
/// The kernel's own threads are children of this one.
const KERNEL_THREADS: i32 = 2;

/// What was there before the first scenario.
pub struct Baseline {
    mounts: BTreeSet<PathBuf>,
}

impl Baseline {
    /// Looks at what is there.
    pub fn take() -> io::Result<Baseline> {
        let mounts = mountinfo::read().map_err(io::Error::other)?;
        Ok(Baseline {
            mounts: mounts.into_iter().map(|mount| mount.mount_point).collect(),
        })
    }

    /// Takes away what has come since, names it in `left`, and answers whether all of it is gone.
    pub fn restore(&self, left: &mut Vec<String>) -> bool {
        let dead = self.kill_all();
        for round in 0..ROUNDS_MAX {
            let (mounts, devices) = (self.mounts(), loop_devices());
            if mounts.is_empty() && devices.is_empty() {
                break;
            }
            if round == 0 {
                left.extend(
                    mounts
                        .iter()
                        .map(|path| format!("mount {}", path.display())),
                );
                left.extend(devices.iter().map(|path| path.display().to_string()));
            }
            for path in mounts.iter().rev() {
                if rustix::mount::unmount(path, UnmountFlags::empty()).is_err() {
                    let _ = rustix::mount::unmount(path, UnmountFlags::DETACH);
                }
            }
            for path in devices {
                if let Ok(device) = File::open(path) {
                    let _ = loopdev::clear(&device);
                }
            }
        }
        // Nobody is left who could log out: such a guest is given up.
        let sessions = trellis_node::iscsi::sessions().unwrap_or_default();
        let named = sessions
            .iter()
            .map(|each| format!("iSCSI session {}", each.id));
        left.extend(named);
        dead && self.mounts().is_empty() && loop_devices().is_empty() && sessions.is_empty()
    }

    fn mounts(&self) -> Vec<PathBuf> {
        let mounts = mountinfo::read().unwrap_or_default();
        mounts
            .into_iter()
            .map(|mount| mount.mount_point)
            .filter(|path| !self.mounts.contains(path))
            .collect()
    }

    /// Names the processes that are still there when those have gone that are about to.
    pub fn name_running(&self, left: &mut Vec<String>) {
        let deadline = Instant::now() + SETTLE_LIMIT;
        while !processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(crate::POLL);
        }
        for (pid, name) in processes() {
            left.push(format!("process {name} ({})", pid.as_raw_nonzero()));
        }
    }

    /// Kills every process but this one, and answers whether all of them have ended.
    pub fn kill_all(&self) -> bool {
        let deadline = Instant::now() + KILL_LIMIT;
        loop {
            let there = processes();
            if there.is_empty() {
                return true;
            }
            for (pid, _) in there {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(crate::POLL);
        }
    }
}

/// Every living process but this one and the kernel's threads.
fn processes() -> Vec<(Pid, String)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(entry.path().join("stat")).ok()?;
            let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
            let mut fields = rest.split_whitespace();
            let (state, parent) = (fields.next()?, fields.next()?.parse::<i32>().ok()?);
            let of_kernel = pid == KERNEL_THREADS || parent == KERNEL_THREADS;
            if pid == 1 || of_kernel || state == "Z" {
                return None;
            }
            Some((Pid::from_raw(pid)?, name.to_owned()))
        })
        .collect()
}

fn loop_devices() -> Vec<PathBuf> {
    let devices = loopdev::list().unwrap_or_default();
    let paths = devices.into_iter().map(|device| device.path);
    paths.filter(|path| Path::new(path).exists()).collect()
}
