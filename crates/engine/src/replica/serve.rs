//! Opening one replica by its directory, without its pool, in the process that serves it.
//!
//! A pool belongs to the agent, which holds the pool's lock. A served replica has a process of its own, so that
//! neither stops with the other. That process holds a lock on the replica's directory as long as it lives. The agent
//! can still make, remove, count and measure replicas, and is refused ([`Error::ReplicaServed`]) where it would change
//! what is served.

use std::path::Path;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::dir::Dir;
use super::name;
use super::pool::{REPLICAS, require_id};
use super::store::Owner;
use super::{Identity, Replica};
use crate::{Error, Result};

/// How long the lock of a replica is waited for: the agent holds it for the moment of a measurement
/// or a growth.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// How often the lock is tried meanwhile.
const LOCK_RETRY: Duration = Duration::from_millis(10);

impl Replica {
    /// Opens the replica in `path`, which is `POOL/replicas/NAME`, to serve it. It must hold the bytes
    /// of `identity`, and be on the pool with the id `pool` if one is given. Nobody else can change it
    /// until the last clone of the handle is gone.
    pub fn open_served(path: &Path, pool: Option<Uuid>, identity: Identity) -> Result<Replica> {
        let bad = || Error::ReplicaPathBad {
            path: path.to_owned(),
        };
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(bad)?;
        name::validate(name)?;
        let replicas = path.parent().ok_or_else(bad)?;
        if replicas.file_name().is_none_or(|name| name != REPLICAS) {
            return Err(bad());
        }
        let root = replicas.parent().ok_or_else(bad)?;
        let root = Dir::open(root)?.ok_or_else(|| Error::PoolNotDirectory {
            path: root.to_owned(),
        })?;
        if let Some(expected) = pool {
            require_id(&root, expected)?;
        }
        let absent = || Error::ReplicaAbsent {
            replica: name.to_owned(),
            pool: root.path().to_owned(),
        };
        let replicas = root.dir(REPLICAS)?.ok_or_else(absent)?;
        let dir = replicas.dir(name)?.ok_or_else(absent)?;
        lock(&dir)?;
        // Whoever published it may have died, or failed, before the name was durable.
        replicas.sync()?;
        let replica = Replica::recover(dir, name, Owner::Server)?;
        let found = replica.identity();
        if found != identity {
            return Err(Error::ReplicaForeign {
                replica: name.to_owned(),
                found,
                asked: identity,
            });
        }
        Ok(replica)
    }
}

fn lock(dir: &Dir) -> Result<()> {
    let end = Instant::now() + LOCK_WAIT;
    while !dir.try_lock()? {
        if Instant::now() >= end {
            return Err(Error::ReplicaServed {
                path: dir.path().to_owned(),
            });
        }
        std::thread::sleep(LOCK_RETRY);
    }
    Ok(())
}
