//! This machine, as the agent needs it: the replica store and the kernel joined behind one trait, and
//! their errors told as the holds that a user reads.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use trellis_api::kinds::{Content, Usage};
use trellis_api::{Bytes, Hold, HoldReason, Rung};
use trellis_control::agent::machine::{
    Machine, PoolMeasured, ReplicaFound, ReplicaPlace, RungFound, Stage, StageFound, Use,
};
use trellis_engine::replica::{Identity, Pool, Provisioning, Replica};
use trellis_node::{probe, volume};

/// This machine. Private mounts and notes about filesystems in the making live in its data directory.
pub struct ThisMachine {
    mounts: PathBuf,
    notes: PathBuf,
    pools: Mutex<HashMap<PathBuf, Arc<Pool>>>,
}

impl ThisMachine {
    /// The machine with `data` as its own directory.
    pub fn new(data: &Path) -> std::io::Result<Self> {
        let (mounts, notes) = (data.join("mounts"), data.join("formatting"));
        std::fs::create_dir_all(&mounts)?;
        std::fs::create_dir_all(&notes)?;
        Ok(ThisMachine {
            mounts,
            notes,
            pools: Mutex::default(),
        })
    }

    /// Opens a pool once and keeps it, and with it the lock that keeps other processes away.
    fn with_pool<T>(
        &self,
        path: &Path,
        act: impl FnOnce(&Pool) -> Result<T, Hold>,
    ) -> Result<T, Hold> {
        let pool = {
            let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
            match pools.get(path) {
                Some(pool) => pool.clone(),
                None => {
                    let pool = Arc::new(Pool::open(path).map_err(store_hold)?);
                    pools.insert(path.to_owned(), pool.clone());
                    pool
                }
            }
        };
        act(&pool)
    }

    fn replica(&self, place: &ReplicaPlace) -> Result<Replica, Hold> {
        let replica = self.with_pool(&place.pool, |pool| {
            pool.open_replica(&place.name).map_err(store_hold)
        })?;
        let (found, asked) = (replica.identity(), identity(place)?);
        if found != asked {
            let message = format!("Replica {} holds {found}, not {asked}.", place.name);
            return Err(Hold::new(HoldReason::ReplicaDamaged, message));
        }
        Ok(replica)
    }

    fn mount_of(&self, stage: &Stage) -> PathBuf {
        self.mounts.join(&stage.volume)
    }

    fn observe(&self, stage: &Stage) -> Result<volume::Observation, Hold> {
        volume::observe(&stage.backing, &self.mount_of(stage)).map_err(node_hold)
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

fn provisioning(place: &ReplicaPlace) -> Provisioning {
    if place.thick {
        Provisioning::Thick
    } else {
        Provisioning::Thin
    }
}

fn found(replica: &Replica) -> Result<ReplicaFound, Hold> {
    let measure = replica.measure().map_err(store_hold)?;
    // A volume that is used where it lies serves what its data file holds.
    Ok(ReplicaFound {
        size: measure.size(),
        served: measure.data.min(measure.superblock),
        data: replica.data_path(),
    })
}

impl Machine for ThisMachine {
    fn measure_pool(&self, path: &Path) -> Result<PoolMeasured, Hold> {
        self.with_pool(path, |pool| {
            let capacity = pool.capacity().map_err(store_hold)?;
            Ok(PoolMeasured {
                total: capacity.total,
                free: capacity.free,
                allocated: capacity.used_by_replicas,
            })
        })
    }

    fn make_replica(&self, place: &ReplicaPlace, size: Bytes) -> Result<ReplicaFound, Hold> {
        let identity = identity(place)?;
        let made = self.with_pool(&place.pool, |pool| {
            pool.create(&place.name, identity, size, provisioning(place))
                .map_err(store_hold)
        })?;
        found(&made)
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
        self.with_pool(&place.pool, |pool| {
            pool.remove(&place.name).map_err(store_hold)
        })
    }

    fn content(&self, backing: &Path, size: Bytes) -> Option<Content> {
        match probe::probe(backing) {
            Ok(probe::Content::Empty) => Some(Content {
                kind: "empty".to_owned(),
                size: None,
                full: true,
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
            }),
            Ok(foreign) => Some(Content {
                kind: foreign.to_string(),
                size: None,
                full: true,
            }),
            Err(error) => {
                tracing::warn!(%error, backing = %backing.display(), "the content of a volume cannot be read");
                None
            }
        }
    }

    fn stage(&self, stage: &Stage) -> Result<StageFound, Hold> {
        // The device of a filesystem can always be written to: a read-only mount may have to replay its
        // journal. The device of a block volume is what its user gets.
        let device_read_only = stage.read_only && stage.filesystem.is_none();
        let device = volume::attach(&stage.backing, device_read_only).map_err(node_hold)?;
        if let Some(kind) = stage.filesystem {
            let staging = self.mount_of(stage);
            if !self.observe(stage)?.staged {
                let note = self.notes.join(&stage.volume);
                volume::ensure_filesystem(&device.path, kind, &note).map_err(node_hold)?;
            }
            volume::stage(&device.path, kind, &staging, stage.read_only).map_err(node_hold)?;
        }
        self.find_stage(stage)
    }

    fn find_stage(&self, stage: &Stage) -> Result<StageFound, Hold> {
        let observation = self.observe(stage)?;
        let Some(device) = observation.device else {
            let message = format!(
                "No block device carries {} any more.",
                stage.backing.display()
            );
            return Err(Hold::new(HoldReason::DeviceGone, message));
        };
        let mut rungs = vec![RungFound {
            rung: Rung::Device,
            size: device.size,
            full: false,
        }];
        if stage.filesystem.is_some() {
            let Some(filesystem) = observation.filesystem else {
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
            });
        }
        let usage = observation
            .staged
            .then(|| volume::usage(&self.mount_of(stage)).ok())
            .flatten();
        let usage = usage.map(|usage| Usage {
            used: usage.bytes_used,
            available: usage.bytes_available,
            inodes_used: usage.inodes_used,
            inodes_free: usage.inodes_available,
        });
        Ok(StageFound {
            device: device.path.display().to_string(),
            rungs,
            usage,
        })
    }

    fn raise_stage(&self, stage: &Stage, rung: Rung, to: Bytes) -> Result<(), Hold> {
        match (rung, stage.filesystem) {
            (Rung::Device, _) => volume::grow_device(&stage.backing, to)
                .map(drop)
                .map_err(node_hold),
            (Rung::Filesystem, Some(kind)) => {
                let device = self.observe(stage)?.device.ok_or_else(|| {
                    Hold::new(
                        HoldReason::DeviceGone,
                        format!("No block device carries {}.", stage.backing.display()),
                    )
                })?;
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

    fn publish(&self, stage: &Stage, usage: &Use) -> Result<(), Hold> {
        let staging = self.mount_of(stage);
        if stage.filesystem.is_some() {
            let source = volume::Source::Filesystem { staging: &staging };
            return volume::publish(source, &usage.path, usage.read_only)
                .map(drop)
                .map_err(node_hold);
        }
        let device = self.observe(stage)?.device.ok_or_else(|| {
            Hold::new(
                HoldReason::DeviceGone,
                format!("No block device carries {}.", stage.backing.display()),
            )
        })?;
        let source = volume::Source::Block {
            device: &device.path,
        };
        volume::publish(source, &usage.path, usage.read_only)
            .map(drop)
            .map_err(node_hold)
    }

    fn unpublish(&self, stage: &Stage, usage: &Use) -> Result<(), Hold> {
        let device = self.observe(stage)?.device.map(|device| device.number);
        match volume::unpublish(&usage.path, device) {
            Ok(_) => Ok(()),
            // Somebody else's mount is there: ours is gone, and theirs is not ours to touch.
            Err(trellis_node::Error::UnusablePath { .. }) => Ok(()),
            Err(error) => Err(node_hold(error)),
        }
    }

    fn unstage(&self, stage: &Stage) -> Result<(), Hold> {
        let device = self.observe(stage)?.device.map(|device| device.number);
        volume::unstage(&self.mount_of(stage), device).map_err(node_hold)?;
        volume::detach(&stage.backing).map(drop).map_err(node_hold)
    }
}

/// An error with all its causes as one sentence.
fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}

fn store_hold(error: trellis_engine::Error) -> Hold {
    use trellis_engine::Error;
    let reason = match &error {
        Error::PoolNotDirectory { .. } | Error::PoolOwned { .. } | Error::PoolCrowded { .. } => {
            HoldReason::PoolNotReady
        }
        Error::NoSpace { .. } => HoldReason::NoSpaceInPool,
        Error::SizeTooLarge { .. } | Error::FileTooLong { .. } => HoldReason::SizeTooLarge,
        Error::ReplicaAbsent { .. } | Error::ReplicaForeign { .. } => HoldReason::ReplicaDamaged,
        error if is_no_space(error) => HoldReason::NoSpaceInPool,
        _ => HoldReason::ReplicaDamaged,
    };
    Hold::new(reason, sentence(&error))
}

fn is_no_space(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(next) = cause {
        if next
            .downcast_ref::<std::io::Error>()
            .is_some_and(|io| io.kind() == std::io::ErrorKind::StorageFull)
        {
            return true;
        }
        cause = next.source();
    }
    false
}

fn node_hold(error: trellis_node::Error) -> Hold {
    use trellis_node::Error;
    let reason = match &error {
        Error::Busy { .. } => HoldReason::StillInUse,
        Error::MissingCapability { .. } => HoldReason::MissingCapability,
        Error::FilesystemErrors { .. } => HoldReason::FilesystemErrors,
        Error::ReadOnly { .. } => HoldReason::ReadOnly,
        Error::ManyDevices { .. } | Error::NotThatFilesystem { .. } => {
            HoldReason::FilesystemUnsupported
        }
        Error::NotEmpty { .. }
        | Error::OtherFilesystem { .. }
        | Error::BadIntent { .. }
        | Error::OtherIdentity { .. } => HoldReason::ForeignData,
        Error::ProgramMissing { .. } => HoldReason::MissingProgram,
        Error::UnusablePath { reason, .. } => match reason {
            trellis_node::error::PathProblem::NotAbsolute
            | trellis_node::error::PathProblem::Symlink => HoldReason::PathInvalid,
            _ => HoldReason::PathBusy,
        },
        Error::NotAttached { .. } => HoldReason::DeviceGone,
        _ => HoldReason::KernelRefused,
    };
    Hold::new(reason, sentence(&error))
}
