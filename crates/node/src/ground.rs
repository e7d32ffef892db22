//! Which filesystem a directory is on, and whether a pool can be there.
//!
//! A filesystem is identified by an id that outlives a restart, if it has one: the uuid of xfs and btrfs (whose
//! subvolumes have device numbers of their own and share all space), or the id that ext derives from its uuid. Any
//! other is identified by the device number of its superblock, which is valid for one run of the kernel. An overlay
//! counts as a filesystem of its own even if another pool is on the filesystem below it: the kernel does not say.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::sys::block::DeviceNumber;
use crate::sys::mountinfo::{self, Mount};
use crate::sys::{fsctl, loopdev, mount};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where the kernel shows itself as files, whatever carries them. A mount below one of them, such as `/dev/shm`, is
/// judged by what it is.
const OF_THE_SYSTEM: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Filesystems that hold no data of anybody.
const WITHOUT_DATA: [&str; 19] = [
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "rpc_pipefs",
    "securityfs",
    "sysfs",
];

/// Why a directory cannot be a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The root directory.
    #[error("/ is the root of the whole system; make a directory for the pool")]
    Root,
    /// A directory that the kernel makes up.
    #[error("{path} shows the kernel's own data ({fs_type}) and keeps no bytes; use a directory on a disk", path = .path.display())]
    System {
        /// The directory.
        path: PathBuf,
        /// Its filesystem.
        fs_type: String,
    },
    /// The data directory of the service, or a part of it, or something around it.
    #[error(
        "{path} and the service's own data directory {data} are one inside the other; use a directory apart from it",
        path = .path.display(), data = .data.display()
    )]
    DataDirectory {
        /// The directory.
        path: PathBuf,
        /// The data directory.
        data: PathBuf,
    },
    /// A volume.
    #[error(
        "{path} is on a Trellis volume ({volume}), and a pool there would stand on itself; use a directory on a disk",
        path = .path.display()
    )]
    OnVolume {
        /// The directory.
        path: PathBuf,
        /// The volume, or the file that carries it.
        volume: String,
    },
    /// The directory of another pool.
    #[error("{path} is the directory of pool {pool:?} already", path = .path.display())]
    SamePool {
        /// The directory.
        path: PathBuf,
        /// The pool.
        pool: String,
    },
    /// A directory inside that of another pool, or around it.
    #[error(
        "{path} and {other}, the directory of pool {pool:?}, are one inside the other; use a directory apart from it",
        path = .path.display(), other = .other.display()
    )]
    Nested {
        /// The directory.
        path: PathBuf,
        /// The pool.
        pool: String,
        /// The pool's directory.
        other: PathBuf,
    },
}

/// A pool that is there already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherPool {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
}

/// The filesystem that a directory is on, as a word that no other filesystem of this machine has.
pub fn filesystem_of(directory: &Path) -> Result<String> {
    let place = File::open(directory).context("open", directory)?;
    let metadata = place.metadata().context("look at", directory)?;
    let mounts = mountinfo::read()?;
    let below = mount_below(&mounts, &place, directory)?;
    let fs_type = below.map_or("unknown", |mount| mount.fs_type.as_str());
    let own = match fs_type {
        "xfs" => fsctl::xfs_geometry(&place)
            .ok()
            .map(|xfs| xfs.uuid.to_string()),
        "btrfs" => fsctl::btrfs_info(&place)
            .ok()
            .map(|btrfs| btrfs.uuid.to_string()),
        "ext2" | "ext3" | "ext4" => rustix::fs::fstatvfs(&place)
            .ok()
            .filter(|space| space.f_fsid != 0)
            .map(|space| format!("{:016x}", space.f_fsid)),
        _ => None,
    };
    if let Some(own) = own {
        return Ok(format!("{fs_type} {own}"));
    }
    let device = below.map_or(DeviceNumber::from_stat(metadata.dev()), |mount| {
        mount.device
    });
    let boot = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
    Ok(format!("{fs_type} {device} in run {}", boot.trim()))
}

/// Whether a directory can be a pool of the service with this data directory, beside these others.
pub fn require_fit(
    directory: &Path,
    data: &Path,
    others: &[OtherPool],
) -> Result<std::result::Result<(), Unfit>> {
    let path = directory.canonicalize().context("find", directory)?;
    let place = File::open(&path).context("open", &path)?;
    let mounts = mountinfo::read()?;
    let below = mount_below(&mounts, &place, &path)?;
    Ok(judge(&path, &real(data), below, &mounts, others))
}

fn judge(
    path: &Path,
    data: &Path,
    below: Option<&Mount>,
    mounts: &[Mount],
    others: &[OtherPool],
) -> std::result::Result<(), Unfit> {
    let owned = path.to_owned();
    if path == Path::new("/") {
        return Err(Unfit::Root);
    }
    let fs_type = below.map_or("unknown", |mount| mount.fs_type.as_str());
    let of_system = OF_THE_SYSTEM.iter().map(Path::new).any(|system| {
        let is_below =
            |mount: &Mount| mount.mount_point != system && mount.mount_point.starts_with(system);
        path.starts_with(system) && !below.is_some_and(is_below)
    });
    if of_system || WITHOUT_DATA.contains(&fs_type) {
        let fs_type = fs_type.to_owned();
        return Err(Unfit::System {
            path: owned,
            fs_type,
        });
    }
    if let Some(volume) = below.and_then(|mount| volume_below(mount, data, mounts)) {
        return Err(Unfit::OnVolume {
            path: owned,
            volume,
        });
    }
    let pools = data.join("pools");
    let is_own_pool = path != pools && path.starts_with(&pools);
    if data.starts_with(path) || (path.starts_with(data) && !is_own_pool) {
        let data = data.to_owned();
        return Err(Unfit::DataDirectory { path: owned, data });
    }
    for other in others {
        let pool = other.name.clone();
        let there = real(&other.path);
        if there == path || is_same_file(&there, path) {
            return Err(Unfit::SamePool { path: owned, pool });
        }
        if there.starts_with(path) || path.starts_with(&there) {
            return Err(Unfit::Nested {
                path: owned,
                pool,
                other: there,
            });
        }
    }
    Ok(())
}

/// The volume that a mount shows. One of this service is mounted in its data directory as well; one of another service,
/// or a block volume that somebody mounted, is known by the file below its loop device.
fn volume_below(mount: &Mount, data: &Path, mounts: &[Mount]) -> Option<String> {
    let private = data.join("mounts");
    let ours = mounts
        .iter()
        .filter(|each| each.device == mount.device)
        .find_map(|each| each.mount_point.strip_prefix(&private).ok());
    if let Some(name) = ours {
        return Some(name.display().to_string());
    }
    let carrier = loopdev::status_of(&mount.source).ok().flatten()?;
    let file = carrier.backing_hint;
    let parents: Vec<&Path> = file.ancestors().collect();
    let is_copy = file.file_name().is_some_and(|name| name == "data")
        && parents
            .get(2)
            .and_then(|replicas| replicas.file_name())
            .is_some_and(|name| name == "replicas");
    (is_copy || file.starts_with(data)).then(|| file.display().to_string())
}

fn mount_below<'a>(mounts: &'a [Mount], place: &File, path: &Path) -> Result<Option<&'a Mount>> {
    let id = mount::mount_id(place).context("find the mount of", path)?;
    Ok(mounts.iter().find(|mount| mount.id == id))
}

/// The path without links. One that does not lead anywhere now is taken as it stands.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Whether both lead to one directory, as a bind mount does.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let facts = |path: &Path| path.metadata().ok().map(|it| (it.dev(), it.ino()));
    let found = facts(one);
    found.is_some() && found == facts(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(path: &str, others: &[(&str, &str)]) -> std::result::Result<(), String> {
        let others: Vec<OtherPool> = others
            .iter()
            .map(|(name, path)| OtherPool {
                name: (*name).to_owned(),
                path: PathBuf::from(path),
            })
            .collect();
        judge(Path::new(path), Path::new("/data"), None, &[], &others)
            .map_err(|unfit| unfit.to_string())
    }

    // Fails if a directory is taken for a pool that would destroy or hide something, or a fit one is refused.
    #[test]
    fn a_pool_is_apart_from_everything_else() {
        let others = [("a", "/disk/a")];
        for (path, why) in [
            ("/", "root of the whole system"),
            ("/proc/1", "kernel's own data"),
            ("/data", "data directory"),
            ("/data/pools", "data directory"),
            ("/data/run/x", "data directory"),
            ("/disk/a", "directory of pool \"a\" already"),
            ("/disk/a/b", "one inside the other"),
            ("/disk", "one inside the other"),
        ] {
            let said = judged(path, &others).expect_err(path);
            assert!(said.contains(why), "{path}: {said}");
        }
        for path in ["/disk/ab", "/disk/b", "/data/pools/default", "/database"] {
            assert_eq!(judged(path, &others), Ok(()), "{path}");
        }
    }
}
