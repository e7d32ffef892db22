//! What this machine can measure now, instead of what its node last reported: how full claims are, how much space their
//! copies take, and how much room pools have.
//!
//! A path alone does not prove that a claim or a pool is on this machine: the device must carry the claim's volume, and
//! the directory must have the pool's identity. Each measurement may take a second, so a disk that does not answer
//! costs only its own line.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use trellis_api::Bytes;
use trellis_api::kinds::{Pool, PoolCapacity, Usage};
use trellis_control::stored::{StoredClaim, now};
use trellis_control::timely::Timely;
use trellis_control::usage::MEASURE_TIME_MAX;
use trellis_control::view::{ClaimNow, PoolNow};
use trellis_node::iscsi::sessions;
use trellis_node::sys::block::DeviceNumber;
use trellis_node::sys::mountinfo;

use crate::machine::fill;

/// The unit in which the kernel counts what a file takes.
const SECTOR: u64 = 512;

/// Measures with a time limit.
pub fn timely() -> Timely {
    Timely::new(MEASURE_TIME_MAX)
}

/// Measures a claim.
pub async fn claim(timely: &Timely, look: &StoredClaim) -> ClaimNow {
    let seen = Seen::of(look);
    let key = format!("copies of {}", look.stored.key);
    let allocated = timely.measure(&key, {
        let copies = seen.copies.clone();
        move || allocated(&copies)
    });
    let usage = async {
        // A block volume has no filesystem to measure at its path.
        look.stored.volume.as_ref()?.spec.filesystem?;
        let measured = timely.measure(&look.stored.key, move || seen.usage());
        measured.await.flatten()
    };
    let (allocated, usage) = tokio::join!(allocated, usage);
    ClaimNow {
        usage,
        allocated: allocated.flatten(),
    }
}

/// What the objects say about where a claim is.
struct Seen {
    volume: String,
    /// Paths where it appears, with their devices.
    uses: Vec<(PathBuf, PathBuf)>,
    /// The data files of its copies.
    copies: Vec<PathBuf>,
}

impl Seen {
    fn of(look: &StoredClaim) -> Seen {
        let uses = look.stored.attachments.iter().filter_map(|each| {
            let device = each.status.as_ref()?.device.as_ref()?;
            Some((
                PathBuf::from(each.spec.consumer.path()),
                PathBuf::from(device),
            ))
        });
        let copies = look.stored.replicas.iter();
        let copies = copies.filter_map(|each| each.status.as_ref()?.path.clone());
        Seen {
            volume: look.stored.key.clone(),
            uses: uses.collect(),
            copies: copies.map(PathBuf::from).collect(),
        }
    }

    fn usage(&self) -> Option<Usage> {
        let mounts = mountinfo::read().ok()?;
        self.uses.iter().find_map(|(path, device)| {
            let path = resolved(path)?;
            let number = DeviceNumber::of_block_device(device).ok()??;
            let mount = mountinfo::at(&mounts, &path)?;
            if !mount.is_of(number) || !self.is_carried_by(device) {
                return None;
            }
            let usage = trellis_node::volume::usage(&path).ok()?;
            Some(fill(&usage).status(now()))
        })
    }

    /// Whether the device carries the volume: a loop device on a copy or on the file of the volume's target, or a disk
    /// of a session with the target.
    fn is_carried_by(&self, device: &Path) -> bool {
        let Some(name) = device.file_name() else {
            return false;
        };
        let backing = Path::new("/sys/block").join(name).join("loop/backing_file");
        if let Ok(backing) = std::fs::read_to_string(backing) {
            let backing = Path::new(backing.trim_end());
            let of_target = Path::new("run").join(&self.volume).join("file/volume");
            return backing.ends_with(of_target) || self.copies.iter().any(|copy| copy == backing);
        }
        let ends = format!(":{}", self.volume);
        let sessions = sessions().unwrap_or_default();
        let mut ours = sessions.iter().filter(|each| each.target.ends_with(&ends));
        ours.any(|session| {
            let devices = session.devices().unwrap_or_default();
            devices.iter().any(|each| each == device)
        })
    }
}

/// The path as the kernel lists it: links above are followed, the last name is not.
pub fn resolved(path: &Path) -> Option<PathBuf> {
    let parent = path.parent()?.canonicalize().ok()?;
    Some(parent.join(path.file_name()?))
}

/// The space that files take on their disks; none if one of them is not here.
fn allocated(files: &[PathBuf]) -> Option<Bytes> {
    let taken = |file: &PathBuf| {
        let meta = std::fs::metadata(file).ok()?;
        Some(Bytes::new(meta.blocks().saturating_mul(SECTOR)))
    };
    let all: Option<Vec<Bytes>> = files.iter().map(taken).collect();
    all.filter(|all| !all.is_empty())
        .map(|all| all.into_iter().sum())
}

/// Measures a pool of this machine.
pub async fn pool(timely: &Timely, name: &str, pool: &Pool) -> PoolNow {
    let path = PathBuf::from(&pool.spec.path);
    let id = pool.status.as_ref().and_then(|status| status.id.clone());
    // A pool without an identity has not been opened by its node yet.
    let Some(id) = id else {
        return PoolNow::Unknown;
    };
    let measured = timely.measure(name, move || look(&path, &id));
    measured.await.unwrap_or(PoolNow::Unknown)
}

fn look(path: &Path, id: &str) -> PoolNow {
    match std::fs::read_to_string(path.join("pool-id")) {
        Ok(found) if found.trim().eq_ignore_ascii_case(id) => {}
        Ok(_) => return PoolNow::Gone,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return PoolNow::Gone;
        }
        Err(_) => return PoolNow::Unknown,
    }
    let replicas = path.join("replicas");
    let Ok(usage) = trellis_node::volume::usage(&replicas) else {
        return PoolNow::Unknown;
    };
    let copies = std::fs::read_dir(&replicas).into_iter().flatten().flatten();
    // A copy that is being removed takes nothing.
    let taken = copies.filter_map(|copy| allocated(&[copy.path().join("data")]));
    PoolNow::Measured(PoolCapacity {
        total: usage.bytes_total,
        free: usage.bytes_available,
        allocated: taken.sum(),
        observed_at: now(),
    })
}
