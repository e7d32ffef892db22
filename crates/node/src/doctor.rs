//! Facts about this machine that decide what Trellis can do on it.
//!
//! Each finding says what was seen, what does not work without it, and how to get it. Looking changes nothing.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use crate::exec::Program;
use crate::filesystem::{FilesystemKind, maker};
use crate::sys::capability::{self, Capability};
use crate::sys::mountinfo;

/// A program's version is asked for, and a program that hangs on that is as good as absent.
const VERSION_TIME_MAX: Duration = Duration::from_secs(5);

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked for.
    pub name: &'static str,
    /// Whether it is there.
    pub state: FindingState,
    /// What was seen.
    pub detail: String,
    /// What does not work without it.
    pub costs: &'static str,
    /// How to get it.
    pub remedy: &'static str,
}

/// Whether something is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingState {
    /// It is there.
    Present,
    /// It is not there.
    Absent,
    /// It could not be found out.
    Unknown,
}

impl From<bool> for FindingState {
    fn from(present: bool) -> Self {
        if present {
            FindingState::Present
        } else {
            FindingState::Absent
        }
    }
}

/// Looks at the machine.
pub fn examine() -> Vec<Finding> {
    let mut findings = vec![kernel(), loop_driver(), direct_io()];
    findings.extend(filesystems());
    findings.extend(capabilities());
    findings.extend(PROGRAMS.iter().map(program));
    findings.extend([propagation(), fuse(), initiator()]);
    findings
}

fn kernel() -> Finding {
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    // LOOP_CONFIGURE, and mounting by file descriptors, came with 5.8 and 5.2.
    let numbers: Vec<u32> = release
        .split(['.', '-'])
        .map_while(|part| part.parse().ok())
        .take(2)
        .collect();
    let state = match numbers[..] {
        [major, minor] => FindingState::from((major, minor) >= (5, 8)),
        _ => FindingState::Unknown,
    };
    Finding {
        name: "kernel",
        state,
        detail: release,
        costs: "attaching volumes on this node",
        remedy: "run Linux 5.8 or newer",
    }
}

fn loop_driver() -> Finding {
    let present = Path::new("/dev/loop-control").exists();
    Finding {
        name: "loop devices",
        state: present.into(),
        detail: if present {
            "/dev/loop-control"
        } else {
            "no /dev/loop-control"
        }
        .into(),
        costs: "volumes as filesystems and block devices on this node",
        remedy: "modprobe loop, and show /dev to the container",
    }
}

/// The kernel shows the setting of each loop device in sysfs if it has the feature.
fn direct_io() -> Finding {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let mut settings = devices
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("loop"))
        .filter_map(|entry| fs::read_to_string(entry.path().join("loop/dio")).ok())
        .map(|text| text.trim() == "1")
        .collect::<Vec<_>>();
    settings.sort_unstable();
    let on = settings.iter().filter(|on| **on).count();
    let state = match (settings.is_empty(), on) {
        // Only a configured device tells.
        (true, _) => FindingState::Unknown,
        (false, on) => (on > 0).into(),
    };
    Finding {
        name: "direct I/O on loop devices",
        state,
        detail: format!("{on} of {} configured devices use it", settings.len()),
        costs: "every byte is cached twice, and a sync takes longer",
        remedy: "keep the pool on a filesystem with direct I/O (xfs, ext4, btrfs) on a disk of 512-byte blocks",
    }
}

fn filesystems() -> Vec<Finding> {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let knows = |name: &str| {
        known
            .lines()
            .any(|line| line.split_whitespace().next_back() == Some(name))
    };
    let table = [
        (
            "xfs in the kernel",
            "xfs",
            "claims with xfs, the default",
            "modprobe xfs",
        ),
        (
            "btrfs in the kernel",
            "btrfs",
            "claims with btrfs",
            "modprobe btrfs",
        ),
        (
            "ext4 in the kernel",
            "ext4",
            "claims with ext4 and ext3",
            "modprobe ext4",
        ),
    ];
    table
        .into_iter()
        .map(|(name, fs_type, costs, remedy)| {
            let present = knows(fs_type);
            let detail = if present {
                "in /proc/filesystems"
            } else {
                "not in /proc/filesystems (yet)"
            };
            Finding {
                name,
                state: present.into(),
                detail: detail.into(),
                costs,
                remedy,
            }
        })
        .collect()
}

fn capabilities() -> Vec<Finding> {
    let effective = capability::effective_text();
    let has = |wanted| {
        let set = effective
            .as_deref()
            .and_then(|text| capability::in_text(text, wanted));
        set.map_or(FindingState::Unknown, FindingState::from)
    };
    let detail = format!("CapEff {}", effective.as_deref().unwrap_or("unreadable"));
    vec![
        Finding {
            name: Capability::SysAdmin.name(),
            state: has(Capability::SysAdmin),
            detail: detail.clone(),
            costs: "attaching, mounting and growing volumes on this node",
            remedy: "run as root with CAP_SYS_ADMIN (a privileged container)",
        },
        Finding {
            name: Capability::SysResource.name(),
            state: has(Capability::SysResource),
            detail,
            costs: "growing a mounted ext4 or ext3; xfs and btrfs grow without it",
            remedy: "grant CAP_SYS_RESOURCE, or use xfs",
        },
    ]
}

/// A program, how it tells its version, and what needs it.
struct Needed {
    name: &'static str,
    program: Program,
    version: &'static str,
    costs: &'static str,
    remedy: &'static str,
}

const PROGRAMS: [Needed; 3] = [
    Needed {
        name: "mkfs.xfs",
        program: maker(FilesystemKind::Xfs),
        version: "-V",
        costs: "new claims with xfs, the default",
        remedy: "install xfsprogs",
    },
    Needed {
        name: "mkfs.btrfs",
        program: maker(FilesystemKind::Btrfs),
        version: "-V",
        costs: "new claims with btrfs",
        remedy: "install btrfs-progs",
    },
    Needed {
        name: "mke2fs",
        program: maker(FilesystemKind::Ext4),
        version: "-V",
        costs: "new claims with ext4 and ext3",
        remedy: "install e2fsprogs",
    },
];

fn program(needed: &Needed) -> Finding {
    let found = needed.program.find();
    let detail = match &found {
        None => "not installed".to_owned(),
        Some(path) => {
            let version = needed
                .program
                .run(&[needed.version.to_owned()], VERSION_TIME_MAX);
            let text = version
                .map(|output| output.stdout + &output.stderr)
                .unwrap_or_default();
            format!(
                "{}, {}",
                path.display(),
                text.lines().next().unwrap_or("version unknown").trim()
            )
        }
    };
    Finding {
        name: needed.name,
        state: found.is_some().into(),
        detail,
        costs: needed.costs,
        remedy: needed.remedy,
    }
}

fn propagation() -> Finding {
    let mounts = mountinfo::read();
    let root = mounts
        .as_deref()
        .ok()
        .and_then(|mounts| mountinfo::at(mounts, Path::new("/")));
    let (state, detail) = match root {
        None => (
            FindingState::Unknown,
            "/proc/self/mountinfo could not be read",
        ),
        Some(mount) if mount.shared => (FindingState::Present, "/ is shared"),
        Some(_) => (FindingState::Absent, "/ is private"),
    };
    Finding {
        name: "shared mount propagation",
        state,
        detail: detail.into(),
        costs: "mounts are not seen by other mount namespaces, and copies there keep volumes in use",
        remedy: "mount --make-rshared /",
    }
}

fn fuse() -> Finding {
    let present = Path::new("/dev/fuse").exists();
    Finding {
        name: "FUSE",
        state: present.into(),
        detail: if present { "/dev/fuse" } else { "no /dev/fuse" }.into(),
        costs: "volumes of other nodes, where the kernel has no iSCSI initiator",
        remedy: "modprobe fuse",
    }
}

fn initiator() -> Finding {
    let present = Path::new("/sys/class/iscsi_transport/tcp").exists();
    let detail = if present {
        "iscsi_tcp is loaded"
    } else {
        "no iSCSI transport in /sys/class"
    };
    Finding {
        name: "kernel iSCSI initiator",
        state: present.into(),
        detail: detail.into(),
        costs: "volumes of other nodes are attached through FUSE, which is slower",
        remedy: "modprobe iscsi_tcp",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_finding_says_what_it_costs_and_how_to_get_it() {
        // Fails if a finding is left without a name, a detail, a cost or a remedy, or is named twice.
        let findings = examine();
        for finding in &findings {
            let texts = [finding.name, &finding.detail, finding.costs, finding.remedy];
            assert!(texts.iter().all(|text| !text.is_empty()), "{finding:?}");
            assert_eq!(
                findings
                    .iter()
                    .filter(|other| other.name == finding.name)
                    .count(),
                1
            );
        }
    }

    #[test]
    fn capabilities_are_those_of_this_process() {
        // Fails if a wrong bit is looked at: the tests need CAP_SYS_ADMIN, so it has to be seen.
        let findings = capabilities();
        let admin = findings
            .iter()
            .find(|finding| finding.name == "CAP_SYS_ADMIN")
            .unwrap();
        assert_eq!(admin.state, FindingState::Present);
    }
}
