//! This machine, as the agent needs it: joins the replica store and the kernel behind one trait, and turns their errors
//! into the holds that a user reads.

mod about;
mod hold;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use trellis_api::about::About;
use trellis_api::kinds::{Content, EMPTY_CONTENT, FilesystemKind, UnknownCopy, Via};
use trellis_api::step::{self, Step};
use trellis_api::{Bytes, Hold, HoldReason, MountOptions, Rung};
use trellis_control::agent::machine::{
    CopyFound, Machine, PoolMeasured, Provided, ReplicaFound, ReplicaPlace, RungFound, Stage,
    StageFound, TargetFound, TargetPlace, Use,
};
use trellis_control::usage::{Fill, Gauge};
use trellis_control::view::now;
use trellis_engine::replica::{Identity, Pool, Provisioning, Purpose, Replica};
use trellis_node::ground::{self, OtherPool};
use trellis_node::sys::block::DeviceNumber;
use trellis_node::sys::{loopdev, mountinfo};
use trellis_node::volume::{Carrier, Fault};
use trellis_node::{fuse, probe, volume};
use uuid::Uuid;

use self::about::text_of;
use self::hold::{carrier_hold, fault_hold, gone, node_hold, sentence, store_hold};
use crate::incarnation;
use crate::serve::{Supervisor, TargetStatus, Wake};

/// How many replicas are kept open: each takes a few file descriptors.
const OPEN_REPLICAS_MAX: usize = 128;

/// This machine. Private mounts and notes about filesystems in the making live in its data directory.
pub struct ThisMachine {
    /// Its own directory.
    data: PathBuf,
    mounts: PathBuf,
    notes: PathBuf,
    pools: Mutex<HashMap<PathBuf, Arc<Pool>>>,
    /// The processes of volumes with several copies.
    processes: Arc<Supervisor>,
    /// What copies on this machine say about themselves, as it was last read or written.
    descriptions: Mutex<HashMap<(PathBuf, String), About>>,
    /// Replicas that are open. Opening one checks and syncs it; measuring an open one only reads.
    replicas: Mutex<HashMap<(PathBuf, String), Replica>>,
}

impl ThisMachine {
    /// The machine with `data` as its own directory.
    pub fn new(data: &Path, target_silence_max: Duration) -> std::io::Result<Self> {
        let (mounts, notes) = (data.join("mounts"), data.join("formatting"));
        trellis_files::make_directory(&mounts)?;
        trellis_files::make_directory(&notes)?;
        Ok(ThisMachine {
            data: data.to_owned(),
            mounts,
            notes,
            pools: Mutex::default(),
            processes: Arc::new(Supervisor::new(data.join("run"), target_silence_max)),
            descriptions: Mutex::default(),
            replicas: Mutex::default(),
        })
    }

    /// Opens a pool once and keeps it open, and with it the lock that keeps other processes away. If its path now leads
    /// elsewhere, because a disk was mounted or unmounted there, the pool is opened again.
    fn with_pool<T>(
        &self,
        path: &Path,
        id: Option<&str>,
        act: impl FnOnce(&Pool) -> Result<T, Hold>,
    ) -> Result<T, Hold> {
        let expected = id.and_then(|id| id.parse::<Uuid>().ok());
        let fits = |pool: &Arc<Pool>| {
            pool.is_current() && expected.is_none_or(|expected| pool.id() == expected)
        };
        // Whether the path still leads there is checked without the lock: the disk of one pool may hang.
        let known = self.open_pools().get(path).cloned();
        let pool = match known.as_ref().filter(|pool| fits(pool)) {
            Some(pool) => pool.clone(),
            None => self.reopen_pool(path, expected, known.as_ref(), &fits)?,
        };
        act(&pool)
    }

    /// Opens a pool in the place of `outdated`, unless somebody else has just done so.
    fn reopen_pool(
        &self,
        path: &Path,
        expected: Option<Uuid>,
        outdated: Option<&Arc<Pool>>,
        fits: &dyn Fn(&Arc<Pool>) -> bool,
    ) -> Result<Arc<Pool>, Hold> {
        let mut pools = self.open_pools();
        let newer = pools
            .get(path)
            .filter(|pool| outdated.is_none_or(|outdated| !Arc::ptr_eq(outdated, pool)));
        if let Some(newer) = newer.filter(|pool| fits(pool)) {
            return Ok(newer.clone());
        }
        pools.remove(path);
        self.open_replicas().retain(|(of, _), _| of != path);
        self.descriptions().retain(|(of, _), _| of != path);
        let pool = Arc::new(Pool::open_known(path, expected).map_err(store_hold)?);
        pools.insert(path.to_owned(), pool.clone());
        Ok(pool)
    }

    fn open_pools(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<Pool>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replica(&self, place: &ReplicaPlace) -> Result<Replica, Hold> {
        let key = (place.pool.clone(), place.name.clone());
        let open = self.open_replicas().get(&key).cloned();
        let replica = match open {
            Some(replica) => replica,
            None => self.with_pool(&place.pool, place.pool_id.as_deref(), |pool| {
                pool.open_replica(&place.name).map_err(store_hold)
            })?,
        };
        let (found, asked) = (replica.identity(), identity(place)?);
        if found != asked {
            let message = format!("Replica {} holds {found}, not {asked}.", place.name);
            return Err(Hold::new(HoldReason::ReplicaDamaged, message));
        }
        let mut open = self.open_replicas();
        if open.len() >= OPEN_REPLICAS_MAX {
            open.clear();
        }
        open.insert(key, replica.clone());
        Ok(replica)
    }

    fn open_replicas(&self) -> MutexGuard<'_, HashMap<(PathBuf, String), Replica>> {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on reports which volume to look at when something happens to its processes.
    pub fn listen_to_processes(&self, wake: Wake) -> std::io::Result<()> {
        self.processes.listen(wake)
    }

    /// What the target of a volume says; none if it does not run or does not answer. This may take a few seconds.
    pub fn target_status(&self, volume: &str) -> Option<TargetStatus> {
        self.processes.target_status(volume)
    }

    /// Where private mounts are; each bears the name of its volume.
    pub fn mounts(&self) -> &Path {
        &self.mounts
    }

    fn mount_of(&self, stage: &Stage) -> PathBuf {
        self.mounts.join(&stage.volume)
    }

    /// Device, filesystem if there is none yet, private mount. Returns the device.
    fn bring_into_use(&self, stage: &Stage, is_staged: bool) -> Result<PathBuf, Hold> {
        // The device of a filesystem is always writable: a read-only mount may have to replay its journal. The device
        // of a block volume is what its user gets.
        let device_read_only = stage.read_only && stage.filesystem.is_none();
        let device = self
            .carrier(stage)
            .attach(device_read_only)
            .map_err(|error| carrier_hold(stage, error))?
            .path;
        if let Some(kind) = stage.filesystem {
            // This comes before anything is made: a request that cannot be met must not look as if it were.
            let options = MountOptions::read(kind, &stage.mount_options).map_err(|refused| {
                let message = format!("PersistentVolume {}: {refused}.", stage.volume);
                Hold::new(HoldReason::MountOptionRefused, message)
            })?;
            if !is_staged {
                let note = self.notes.join(&stage.volume);
                let past = self.past(stage);
                volume::ensure_filesystem_with_past(&device, kind, &note, past)
                    .map_err(node_hold)?;
                self.note_formatted(stage)?;
            }
            let staging = self.mount_of(stage);
            volume::stage_with(&device, kind, &staging, stage.read_only, &options)
                .map_err(node_hold)?;
        }
        Ok(device)
    }

    fn found_stage(&self, stage: &Stage, seen: &volume::Observation) -> Result<StageFound, Hold> {
        let device = seen.device.as_ref().ok_or_else(|| gone(stage))?;
        let mut rungs = vec![RungFound {
            rung: Rung::Device,
            size: device.size,
            full: false,
            note: None,
        }];
        if stage.filesystem.is_some() {
            let Some(filesystem) = seen.filesystem else {
                if let Some(fault) = seen.faults.first() {
                    return Err(fault_hold(stage, fault));
                }
                let message = format!(
                    "{} carries no filesystem that can be read.",
                    device.path.display()
                );
                return Err(Hold::new(HoldReason::FilesystemUnsupported, message));
            };
            let size = filesystem.geometry.size();
            rungs.push(RungFound {
                rung: Rung::Filesystem,
                size,
                full: size >= filesystem.largest_fit,
                note: filesystem.geometry.outgrown().map(|how| how.to_string()),
            });
        }
        let usage = seen
            .staged
            .then(|| volume::usage(&self.mount_of(stage)).ok())
            .flatten();
        let usage = usage.map(|usage| fill(&usage).status(now()));
        Ok(StageFound {
            device: device.path.display().to_string(),
            rungs,
            usage,
        })
    }

    /// What carries the volume's bytes.
    fn carrier(&self, stage: &Stage) -> Carrier {
        match stage.via {
            Via::Local | Via::Fuse => Carrier::File(stage.backing.clone()),
            Via::Iscsi => self.processes.by_iscsi(&stage.volume),
        }
    }

    /// The number of the volume's device. A device on a file that nobody serves any more is recognized by the file's
    /// path.
    fn device_of(&self, stage: &Stage) -> Result<Option<DeviceNumber>, Hold> {
        if stage.via == Via::Iscsi || !volume::is_unreachable(&stage.backing) {
            return Ok(self.observe(stage)?.device.map(|device| device.number));
        }
        let devices = loopdev::on_path(&stage.backing).map_err(node_hold)?;
        Ok(devices.into_iter().next().map(|(_, number)| number))
    }

    fn observe(&self, stage: &Stage) -> Result<volume::Observation, Hold> {
        self.carrier(stage)
            .observe(&self.mount_of(stage))
            .map_err(node_hold)
    }
}

fn identity(place: &ReplicaPlace) -> Result<Identity, Hold> {
    let parse = |text: &str| {
        text.parse().map_err(|_| {
            let message = format!(
                "Replica {} has the identity {text:?}, which is none.",
                place.name
            );
            Hold::new(HoldReason::ReplicaDamaged, message)
        })
    };
    Ok(Identity {
        volume: parse(&place.volume_id)?,
        replica: parse(&place.replica_id)?,
    })
}

/// The paths from which somebody has taken the volume away. If what they are built on is gone or broken, that holds the
/// whole volume, and nothing is put in its place: what is gone was taken by somebody, and mounting over what is broken
/// does not repair it.
fn taken_away(
    seen: &volume::Observation,
    stage: &Stage,
    uses: &[Use],
) -> Result<Vec<PathBuf>, Hold> {
    if let Some(fault) = seen.faults.iter().find(|fault| fault.breaks_use()) {
        return Err(fault_hold(stage, fault));
    }
    let established = uses.iter().filter(|each| each.established);
    let established: Vec<PathBuf> = established.map(|each| each.path.clone()).collect();
    if established.is_empty() {
        return Ok(Vec::new());
    }
    let mut paths = Vec::new();
    for fault in seen.missing(stage.filesystem.is_some(), &established) {
        match fault {
            Fault::PathGone { path } => paths.push(path),
            fault => return Err(fault_hold(stage, &fault)),
        }
    }
    Ok(paths)
}

/// Whether the volume is in use just as it should be, at every path.
fn is_provided(seen: &volume::Observation, stage: &Stage, uses: &[Use]) -> bool {
    let is_block = stage.filesystem.is_none();
    let writable = seen
        .device
        .as_ref()
        .is_some_and(|device| !device.read_only || (is_block && stage.read_only));
    let staged = is_block || (seen.staged && (stage.read_only || !seen.staged_read_only));
    let published = |usage: &Use| {
        seen.publications.iter().any(|each| {
            each.path == usage.path && each.block == is_block && each.read_only == usage.read_only
        })
    };
    writable && staged && uses.iter().all(published)
}

fn provisioning(place: &ReplicaPlace) -> Provisioning {
    if place.thick {
        Provisioning::Thick
    } else {
        Provisioning::Thin
    }
}

fn found(replica: &Replica) -> Result<ReplicaFound, Hold> {
    let measure = replica.measure().map_err(store_hold)?;
    // A volume that is used in place serves what its data file holds.
    Ok(ReplicaFound {
        size: measure.size(),
        served: measure.data.min(measure.superblock),
        data: replica.data_path(),
    })
}

impl Machine for ThisMachine {
    fn measure_pool(&self, path: &Path, id: Option<&str>) -> Result<PoolMeasured, Hold> {
        self.with_pool(path, id, |pool| {
            let capacity = pool.capacity().map_err(store_hold)?;
            Ok(PoolMeasured {
                filesystem: ground::filesystem_of(pool.path()).map_err(node_hold)?,
                id: pool.id().to_string(),
                total: capacity.total,
                free: capacity.free,
                allocated: capacity.used_by_replicas,
                copies: pool.names().map_err(store_hold)?,
            })
        })
    }

    fn judge_pool(&self, path: &Path, others: &[(String, PathBuf)]) -> Result<(), Hold> {
        let others = others.iter().map(|(name, path)| OtherPool {
            name: name.clone(),
            path: path.clone(),
        });
        let others: Vec<OtherPool> = others.collect();
        ground::require_fit(path, &self.data, &others)
            .map_err(|error| {
                let hold = node_hold(error);
                Hold::new(HoldReason::PoolNotReady, hold.message)
            })?
            .map_err(|unfit| Hold::new(HoldReason::PoolUnfit, format!("{unfit}.")))
    }

    fn keep_pools(&self, paths: &[PathBuf]) {
        let is_kept = |path: &Path| paths.iter().any(|kept| kept == path);
        self.open_pools().retain(|path, _| is_kept(path));
        self.open_replicas().retain(|(pool, _), _| is_kept(pool));
        self.descriptions().retain(|(pool, _), _| is_kept(pool));
    }

    fn look_at_stranger(&self, path: &Path, id: &str, name: &str) -> UnknownCopy {
        let look = |pool: &Pool| pool.look(name).map_err(store_hold);
        let found = self.with_pool(path, Some(id), look).ok().flatten();
        let about = found.as_ref().and_then(|copy| copy.about.as_deref());
        let about: Option<About> = about.and_then(|text| serde_json::from_slice(text).ok());
        UnknownCopy {
            name: name.to_owned(),
            claim: about.map(|about| format!("{}/{}", about.namespace, about.claim)),
            size: found.map(|copy| copy.size),
        }
    }

    fn make_replica(&self, place: &ReplicaPlace, size: Bytes) -> Result<ReplicaFound, Hold> {
        let identity = identity(place)?;
        let about = place.about.as_ref().map(text_of);
        let made = self.with_pool(&place.pool, place.pool_id.as_deref(), |pool| {
            let purpose = if place.served {
                Purpose::Served
            } else {
                Purpose::InPlace
            };
            let (name, how) = (&place.name, provisioning(place));
            pool.create_for(name, identity, size, how, purpose, about.as_deref())
                .map_err(store_hold)
        })?;
        found(&made)
    }

    fn describe_replica(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        let Some(wanted) = &place.about else {
            return Ok(());
        };
        let key = (place.pool.clone(), place.name.clone());
        let known = self.descriptions().get(&key).cloned();
        if known.is_some_and(|known| known.is_but_for_size(&known.renewed(wanted))) {
            return Ok(());
        }
        self.describe(place, wanted).map(drop)
    }

    fn find_replica(&self, place: &ReplicaPlace) -> Result<ReplicaFound, Hold> {
        found(&self.replica(place)?)
    }

    fn raise_replica(&self, place: &ReplicaPlace, to: Bytes) -> Result<(), Hold> {
        self.replica(place)?
            .grow(to, provisioning(place))
            .map(drop)
            .map_err(store_hold)
    }

    fn remove_replica(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        let key = (place.pool.clone(), place.name.clone());
        self.open_replicas().remove(&key);
        self.descriptions().remove(&key);
        let identity = identity(place)?;
        self.with_pool(&place.pool, place.pool_id.as_deref(), |pool| {
            match pool.remove(&place.name, identity) {
                // The copy that was to go is not there, and what has its name belongs to another.
                Err(error @ trellis_engine::Error::ReplicaForeign { .. }) => {
                    tracing::warn!(replica = place.name, %error, "kept");
                    Ok(())
                }
                removed => removed.map_err(store_hold),
            }
        })
    }

    fn serve_copy(&self, place: &ReplicaPlace) -> Result<CopyFound, Hold> {
        let address = self.processes.serve_copy(place, &place.volume)?;
        step::reached(Step::CopyServed);
        let found = found(&self.replica(place)?)?;
        Ok(CopyFound {
            size: found.size,
            data: found.data,
            address,
        })
    }

    fn is_there(&self, path: &Path) -> bool {
        path.exists()
    }

    fn serve_again(&self, volume: &str) {
        self.processes.serve_again(volume);
    }

    fn retire_copy(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        self.processes.retire_copy(place, &place.volume)?;
        step::reached(Step::CopyRetired);
        Ok(())
    }

    fn serve_target(&self, target: &TargetPlace) -> Result<TargetFound, Hold> {
        let found = self.processes.serve_target(target)?;
        step::reached(Step::TargetServed);
        Ok(found)
    }

    fn raise_target(&self, target: &TargetPlace, to: Bytes) -> Result<(), Hold> {
        self.processes.raise_target(&target.volume, to)?;
        step::reached(Step::TargetRaised);
        Ok(())
    }

    fn retire_target(&self, volume: &str) -> Result<(), Hold> {
        // A session that nobody knows of any more, because its use and its volume are gone.
        let session = self.processes.by_iscsi(volume);
        session.detach().map_err(node_hold)?;
        self.processes.retire_target(volume)?;
        step::reached(Step::TargetRetired);
        Ok(())
    }

    fn target_backing(&self, volume: &str) -> PathBuf {
        self.processes.backing(volume)
    }

    fn content(&self, backing: &Path, size: Bytes) -> Option<Content> {
        match probe::probe(backing) {
            Ok(probe::Content::Empty) => Some(Content {
                kind: EMPTY_CONTENT.to_owned(),
                size: None,
                full: true,
                of: size,
                hold: None,
            }),
            Ok(probe::Content::Filesystem {
                kind,
                size: own,
                geometry,
                ..
            }) => Some(Content {
                kind: kind.name().to_owned(),
                size: Some(own),
                full: own >= geometry.largest_fit(size),
                of: size,
                hold: None,
            }),
            Ok(foreign) => Some(Content {
                kind: foreign.to_string(),
                size: None,
                full: true,
                of: size,
                hold: None,
            }),
            Err(error) => {
                tracing::warn!(
                    why = sentence(&error),
                    "the content of a volume cannot be read"
                );
                None
            }
        }
    }

    fn grow_idle(&self, backing: &Path, kind: FilesystemKind) -> Result<(), Hold> {
        volume::grow_idle(backing, kind)
            .map(drop)
            .map_err(node_hold)
    }

    fn boot_id(&self) -> String {
        incarnation::present(&self.data)
    }

    fn provide(&self, stage: &Stage, uses: &[Use]) -> Result<Provided, Hold> {
        let seen = self.observe(stage)?;
        let taken_away = taken_away(&seen, stage, uses)?;
        let there = is_provided(&seen, stage, uses);
        if there && let Ok(found) = self.found_stage(stage, &seen) {
            return Ok(Provided {
                found,
                refused: vec![None; uses.len()],
            });
        }
        let device = self.bring_into_use(stage, seen.staged)?;
        let staging = self.mount_of(stage);
        let source = match stage.filesystem {
            Some(_) => volume::Source::Filesystem { staging: &staging },
            None => volume::Source::Block { device: &device },
        };
        let publish = |usage: &Use| {
            if taken_away.contains(&usage.path) {
                let gone = Fault::PathGone {
                    path: usage.path.clone(),
                };
                return Some(fault_hold(stage, &gone));
            }
            volume::publish(source, &usage.path, usage.read_only)
                .err()
                .map(node_hold)
        };
        let refused = uses.iter().map(publish).collect();
        Ok(Provided {
            found: self.find_stage(stage)?,
            refused,
        })
    }

    fn find_stage(&self, stage: &Stage) -> Result<StageFound, Hold> {
        self.found_stage(stage, &self.observe(stage)?)
    }

    fn raise_stage(&self, stage: &Stage, rung: Rung, to: Bytes) -> Result<(), Hold> {
        match (rung, stage.filesystem) {
            (Rung::Device, _) => self
                .carrier(stage)
                .grow_device(to)
                .map(drop)
                .map_err(node_hold),
            (Rung::Filesystem, Some(kind)) => {
                let device = self
                    .carrier(stage)
                    .device()
                    .map_err(node_hold)?
                    .ok_or_else(|| gone(stage))?;
                volume::grow_filesystem(kind, &self.mount_of(stage), &device.path)
                    .map(drop)
                    .map_err(node_hold)
            }
            (rung, _) => {
                let message = format!(
                    "This machine has no {rung} rung for volume {}.",
                    stage.volume
                );
                Err(Hold::new(HoldReason::KernelRefused, message))
            }
        }
    }

    fn unpublish(&self, stage: &Stage, usage: &Use) -> Result<(), Hold> {
        let device = self.device_of(stage)?;
        match volume::unpublish(&usage.path, device) {
            Ok(_) => Ok(()),
            // Somebody else's mount is there: ours is gone, and theirs is not ours to touch.
            Err(trellis_node::Error::UnusablePath { .. }) => Ok(()),
            Err(error) => Err(node_hold(error)),
        }
    }

    fn unstage(&self, stage: &Stage) -> Result<(), Hold> {
        let device = self.device_of(stage)?;
        volume::unstage(&self.mount_of(stage), device).map_err(node_hold)?;
        if stage.via == Via::Iscsi {
            return self.carrier(stage).detach().map(drop).map_err(node_hold);
        }
        if volume::is_unreachable(&stage.backing) {
            // The mount itself is its target's to remove: the next one may have replaced it since we looked.
            let place = stage.backing.parent().unwrap_or(&stage.backing);
            return fuse::detach_dead(place).map_err(node_hold);
        }
        volume::detach(&stage.backing).map(drop).map_err(node_hold)
    }
}

impl Gauge for ThisMachine {
    fn mounted(&self) -> HashSet<String> {
        let mounts = mountinfo::read().unwrap_or_default();
        let private = |mount: &mountinfo::Mount| {
            let name = mount.mount_point.strip_prefix(&self.mounts).ok()?;
            name.to_str().map(str::to_owned)
        };
        mounts.iter().filter_map(private).collect()
    }

    fn fill(&self, volume: &str) -> Option<Fill> {
        let usage = volume::usage(&self.mounts.join(volume)).ok()?;
        Some(fill(&usage))
    }
}

/// How full a filesystem is: from the node's measurement to the reported form.
pub fn fill(usage: &volume::Usage) -> Fill {
    Fill {
        capacity: usage.bytes_total,
        used: usage.bytes_used,
        available: usage.bytes_available,
        inodes: usage.inodes_total,
        inodes_used: usage.inodes_used,
        inodes_free: usage.inodes_available,
    }
}
