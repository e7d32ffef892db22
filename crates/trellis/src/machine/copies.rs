//! Copies: files of the replica store. Those of several are served by processes of their own, and so are targets.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};

use trellis_api::step::{self, Step};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::node::machine::{
    Copies, CopyFound, ReplicaFound, ReplicaPlace, TargetFound, TargetPlace,
};
use trellis_engine::replica::{Identity, Provisioning, Purpose, Replica};

use super::ThisMachine;
use super::about::text_of;
use super::hold::{node_hold, store_hold};

/// How many replicas are kept open: each takes a few file descriptors.
const OPEN_REPLICAS_MAX: usize = 128;

impl Copies for ThisMachine {
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
        if !place.served {
            // It is looked at again at once. One that a process serves is that process's to open.
            self.keep_open(place, &made);
        }
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
        let reached = self.processes.serve_copy(place, &place.volume)?;
        step::reached(Step::CopyServed);
        let found = found(&self.replica(place)?)?;
        Ok(CopyFound {
            size: found.size,
            data: found.data,
            address: reached.address,
            link: reached.links.link,
            link_hold: reached.links.hold,
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

    fn has_target(&self, volume: &str) -> bool {
        self.processes.has_target(volume)
    }

    fn given_term(&self, volume: &str) -> Option<u32> {
        self.processes.given_term(volume)
    }

    fn abandon_target(&self, volume: &str) -> Result<(), Hold> {
        self.processes.abandon_target(volume)
    }

    fn outbid(&self, volume: &str) -> Option<u32> {
        self.processes.outbid(volume)
    }

    fn retire_target(&self, volume: &str) -> Result<(), Hold> {
        // A session that nobody knows of any more, because its use and its volume are gone.
        let session = self.processes.by_iscsi(volume);
        session.detach().map_err(node_hold)?;
        self.processes.retire_target(volume)?;
        step::reached(Step::TargetRetired);
        Ok(())
    }

    fn earlier_secret(&self, volume: &str) -> Option<String> {
        self.processes.earlier_secret(volume)
    }

    fn target_backing(&self, volume: &str) -> PathBuf {
        self.processes.backing(volume)
    }
}

impl ThisMachine {
    pub(super) fn replica(&self, place: &ReplicaPlace) -> Result<Replica, Hold> {
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
        self.keep_open(place, &replica);
        Ok(replica)
    }

    fn keep_open(&self, place: &ReplicaPlace, replica: &Replica) {
        let mut open = self.open_replicas();
        if open.len() >= OPEN_REPLICAS_MAX {
            open.clear();
        }
        let key = (place.pool.clone(), place.name.clone());
        open.insert(key, replica.clone());
    }

    pub(super) fn open_replicas(&self) -> MutexGuard<'_, HashMap<(PathBuf, String), Replica>> {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

pub(super) fn identity(place: &ReplicaPlace) -> Result<Identity, Hold> {
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
