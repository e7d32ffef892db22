//! A pool: one directory that holds replicas and has one owner.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use trellis_api::Bytes;
use trellis_api::step::{self, Step};
use uuid::Uuid;

use super::dir::{Dir, facts, failed};
use super::id;
use super::name::{self, Entry};
use super::pair::committed;
use super::store::{DATA, Owner, Replica, Shared};
use super::survey::{Surveyed, look, read_about, write_about, write_first_about};
use super::{Identity, Provisioning, Purpose, REPLICAS_MAX, validate_size};
use crate::{Error, Result};

const LOCK: &str = "lock";
pub(super) const REPLICAS: &str = "replicas";

/// An open pool. Its directory is locked until the pool and all replicas that came from it are gone.
#[derive(Debug)]
pub struct Pool {
    id: Uuid,
    root: Dir,
    replicas: Dir,
    lock: Arc<File>,
    open: Mutex<BTreeMap<String, Arc<NameLock>>>,
}

/// Serializes creation, opening and removal of one name, and finds the state that its handles share.
type NameLock = Mutex<OpenReplica>;

#[derive(Debug, Default)]
struct OpenReplica {
    shared: Weak<Shared>,
}

/// How much there is on a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolCapacity {
    /// The size of the filesystem below the pool.
    pub total: Bytes,
    /// What is free in it.
    pub free: Bytes,
    /// What the data of the pool's replicas takes, by allocated blocks.
    pub used_by_replicas: Bytes,
}

impl Pool {
    /// Takes possession of whatever pool is in `dir` and cleans up what a crash has left there. A
    /// directory that is no pool yet becomes one.
    pub fn open(dir: &Path) -> Result<Pool> {
        Self::open_known(dir, None)
    }

    /// As [`Pool::open`], but only of the pool with the `expected` id: a directory with another id or
    /// with none is [`Error::PoolUnknown`], and nothing is made in it.
    pub fn open_known(dir: &Path, expected: Option<Uuid>) -> Result<Pool> {
        let root = Dir::open(dir)?.ok_or_else(|| Error::PoolNotDirectory {
            path: dir.to_owned(),
        })?;
        if let Some(expected) = expected {
            // Before the lock, because locking makes a file.
            require_id(&root, expected)?;
        }
        let lock = lock(&root)?;
        let id = match expected {
            Some(expected) => expected,
            None => id::read_or_make(&root)?,
        };
        let replicas = match root.dir(REPLICAS)? {
            Some(replicas) => replicas,
            None => root.make_dir(REPLICAS)?,
        };
        // Also when it existed: whoever made it may have died before it was durable.
        root.sync()?;
        let pool = Pool {
            id,
            root,
            replicas,
            lock: Arc::new(lock),
            open: Mutex::default(),
        };
        pool.clean()?;
        Ok(pool)
    }

    /// Removes what unfinished creations and removals have left. One that resists is reported and
    /// does not keep the pool from its work.
    fn clean(&self) -> Result<()> {
        for entry in self.replicas.entries()? {
            if !matches!(Entry::of(&entry), Entry::Making(_) | Entry::Removing(_)) {
                continue;
            }
            let path = self.replicas.join(&entry);
            match self.replicas.remove_dir(&entry) {
                Ok(()) => tracing::info!(path = %path.display(), "cleaned up a leftover"),
                Err(error) => {
                    tracing::warn!("leftover {} could not be removed: {error}", path.display());
                }
            }
        }
        self.replicas.sync()
    }

    /// The id of the pool, which it keeps for life.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// Whether the pool's path still leads to the directory that was opened. It does not if something
    /// was mounted over it, or if it was renamed or unmounted.
    pub fn is_current(&self) -> bool {
        self.root.is_at_its_path()
    }

    /// The directory of the pool.
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// The names of the replicas on this pool, sorted.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names = self.replicas.entries()?;
        names.retain(|entry| matches!(Entry::of(entry), Entry::Published(_)));
        if names.len() > REPLICAS_MAX {
            return Err(Error::PoolCrowded {
                path: self.path().to_owned(),
            });
        }
        Ok(names)
    }

    /// How much there is, how much is free, and how much the replicas take. What has the name of a
    /// replica and cannot be one is left out.
    pub fn capacity(&self) -> Result<PoolCapacity> {
        let mut used_by_replicas = Bytes::ZERO;
        for name in self.names()? {
            let allocated = match self.allocated(&name) {
                Err(error) if is_stray(&error) => {
                    let path = self.replicas.join(&name);
                    tracing::warn!(
                        "{} does not count, it is no replica: {error}",
                        path.display()
                    );
                    continue;
                }
                other => other?,
            };
            used_by_replicas = [used_by_replicas, allocated].into_iter().sum();
        }
        let space = self.replicas.space()?;
        Ok(PoolCapacity {
            total: space.total,
            free: space.available,
            used_by_replicas,
        })
    }

    /// What the data of one replica takes. A replica that is being removed meanwhile takes nothing.
    fn allocated(&self, name: &str) -> Result<Bytes> {
        let Some(dir) = self.replicas.dir(name)? else {
            return Ok(Bytes::ZERO);
        };
        let Some(data) = dir.file_read_only(DATA)? else {
            return Ok(Bytes::ZERO);
        };
        Ok(facts(&data, &dir.join(DATA))?.allocated)
    }

    /// Makes a replica, or finds it made: afterwards it exists durably with at least that size.
    ///
    /// An existing replica of the same identity is opened, and raised if it is smaller. One of
    /// another identity is left alone and is an error.
    pub fn create(
        &self,
        name: &str,
        identity: Identity,
        size: Bytes,
        provisioning: Provisioning,
    ) -> Result<Replica> {
        self.create_for(name, identity, size, provisioning, Purpose::InPlace, None)
    }

    /// As [`Pool::create`], and says how it will be used; a replica that is made also says this about itself from its
    /// first moment on. One that is found made is left as it is: what a served one lacks is made by its first start.
    pub fn create_for(
        &self,
        name: &str,
        identity: Identity,
        size: Bytes,
        provisioning: Provisioning,
        purpose: Purpose,
        about: Option<&[u8]>,
    ) -> Result<Replica> {
        name::validate(name)?;
        validate_size(size)?;
        let turn = self.turn(name);
        let mut open = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(replica) = self.find(name, &mut open)? {
            let found = replica.identity();
            if found != identity {
                return Err(Error::ReplicaForeign {
                    replica: name.to_owned(),
                    found,
                    asked: identity,
                });
            }
            if replica.size() < size {
                replica.grow(size, provisioning)?;
            }
            return Ok(replica);
        }
        if self.names()?.len() >= REPLICAS_MAX {
            return Err(Error::PoolCrowded {
                path: self.path().to_owned(),
            });
        }
        let making = name::making(name);
        self.replicas.remove_dir(&making)?;
        let built = self.build(name, &making, |dir| {
            if let Some(about) = about {
                write_first_about(dir, about)?;
            }
            Replica::build(dir, name, identity, size, provisioning, purpose)
        });
        if let Err(error) = built {
            // What was begun takes space. If this fails too, the next creation or opening cleans up.
            let _ = self.replicas.remove_dir(&making);
            return Err(error);
        }
        // Its name is durable: it was just published.
        let made = self.opened(name, &mut open)?;
        made.ok_or_else(|| self.absent(name))
    }

    /// Builds the replica under its temporary name and publishes it.
    fn build(
        &self,
        name: &str,
        making: &str,
        build: impl FnOnce(&Dir) -> Result<()>,
    ) -> Result<()> {
        // The temporary name needs no sync: whether a crash leaves it or not, it is removed.
        let dir = self.replicas.make_dir(making)?;
        step::reached(Step::ReplicaDirectoryMade);
        build(&dir)?;
        self.replicas.rename(making, name)?;
        self.replicas.sync()?;
        step::reached(Step::ReplicaPublished);
        Ok(())
    }

    /// What a replica says about itself, if it says anything. It must hold the bytes of `identity`.
    pub fn about(&self, name: &str, identity: Identity) -> Result<Option<Vec<u8>>> {
        read_about(&self.proven(name, identity)?)
    }

    /// Lets a replica say something else about itself, durably. It must hold the bytes of `identity`; another process
    /// may serve it meanwhile.
    pub fn describe(&self, name: &str, identity: Identity, about: &[u8]) -> Result<()> {
        write_about(&self.proven(name, identity)?, about)
    }

    /// Looks at one replica and changes nothing; none if there is no such replica.
    pub fn look(&self, name: &str) -> Result<Option<Surveyed>> {
        name::validate(name)?;
        look(&self.replicas, name)
    }

    /// The directory of a replica that holds the bytes of `identity`.
    fn proven(&self, name: &str, identity: Identity) -> Result<Dir> {
        name::validate(name)?;
        let dir = self.replicas.dir(name)?.ok_or_else(|| self.absent(name))?;
        let found = committed(&dir, name)?.identity;
        if found != identity {
            return Err(Error::ReplicaForeign {
                replica: name.to_owned(),
                found,
                asked: identity,
            });
        }
        Ok(dir)
    }

    /// Opens a replica, and heals what can be healed.
    pub fn open_replica(&self, name: &str) -> Result<Replica> {
        name::validate(name)?;
        let turn = self.turn(name);
        let mut open = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.find(name, &mut open)?.ok_or_else(|| self.absent(name))
    }

    /// Removes the replica of that identity and its bytes for good. Handles on it answer
    /// [`Error::ReplicaRemoved`] from then on; who still has its data file open keeps the bytes until he
    /// closes it.
    ///
    /// A replica that is not there is removed already. What has its name and is another's
    /// ([`Error::ReplicaForeign`]), or cannot prove whose it is, stays.
    pub fn remove(&self, name: &str, identity: Identity) -> Result<()> {
        name::validate(name)?;
        let turn = self.turn(name);
        let open = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (making, removing) = (name::making(name), name::removing(name));
        // An earlier removal that failed half way would be in the way of this one's rename.
        self.replicas.remove_dir(&removing)?;
        self.replicas.remove_dir(&making)?;
        if let Some(dir) = self.replicas.dir(name)? {
            let found = committed(&dir, name)
                .map_err(|source| Error::ReplicaUnproven {
                    path: self.replicas.join(name),
                    source: Box::new(source),
                })?
                .identity;
            if found != identity {
                return Err(Error::ReplicaForeign {
                    replica: name.to_owned(),
                    found,
                    asked: identity,
                });
            }
            let unpublish = || self.replicas.rename(name, &removing);
            match open.shared.upgrade() {
                Some(shared) => shared.retire(unpublish)?,
                None => unpublish()?,
            }
            self.replicas.sync()?;
            step::reached(Step::ReplicaUnpublished);
            self.replicas.remove_dir(&removing)?;
        }
        self.replicas.sync()?;
        step::reached(Step::ReplicaRemoved);
        Ok(())
    }

    /// The replica of that name, if there is one: from a handle that is alive, or else from the disk.
    fn find(&self, name: &str, open: &mut OpenReplica) -> Result<Option<Replica>> {
        if let Some(shared) = open.shared.upgrade().filter(|shared| !shared.is_removed()) {
            return Ok(Some(Replica { shared }));
        }
        if self.replicas.dir(name)?.is_none() {
            return Ok(None);
        }
        // Whoever published it may have died, or failed, before the name was durable.
        self.replicas.sync()?;
        self.opened(name, open)
    }

    /// Opens the replica of that name, if there is one. Its name is known to be durable.
    fn opened(&self, name: &str, open: &mut OpenReplica) -> Result<Option<Replica>> {
        let Some(dir) = self.replicas.dir(name)? else {
            return Ok(None);
        };
        let replica = Replica::recover(dir, name, Owner::Pool(Arc::clone(&self.lock)))?;
        open.shared = Arc::downgrade(&replica.shared);
        Ok(Some(replica))
    }

    /// The lock of one name. Names that nobody uses are forgotten on the way.
    fn turn(&self, name: &str) -> Arc<NameLock> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, turn| {
            let in_use = Arc::strong_count(turn) > 1;
            in_use
                || turn
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .shared
                    .strong_count()
                    > 0
        });
        Arc::clone(open.entry(name.to_owned()).or_default())
    }

    fn absent(&self, name: &str) -> Error {
        Error::ReplicaAbsent {
            replica: name.to_owned(),
            pool: self.path().to_owned(),
        }
    }
}

/// Refuses a directory that is not the expected pool.
pub(super) fn require_id(root: &Dir, expected: Uuid) -> Result<()> {
    let found = id::read(root)?;
    if found == Some(expected) {
        return Ok(());
    }
    Err(Error::PoolUnknown {
        path: root.path().to_owned(),
        expected,
        found,
    })
}

/// Whether something was not a directory where a replica should be, or not a file where its data
/// should be.
fn is_stray(error: &Error) -> bool {
    match error {
        Error::NotAFile { .. } => true,
        Error::Io { source, .. } => source.kind() == io::ErrorKind::NotADirectory,
        _ => false,
    }
}

/// Locks the pool against every other owner, until the file is closed.
fn lock(root: &Dir) -> Result<File> {
    let file = match root.file(LOCK)? {
        Some(file) => file,
        None => match root.make_file(LOCK) {
            Ok(file) => file,
            // Another process was faster. It has the lock or not; the file is the same.
            Err(error) => root.file(LOCK)?.ok_or(error)?,
        },
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(Error::PoolOwned {
            path: root.path().to_owned(),
        }),
        Err(errno) => Err(failed("lock", &root.join(LOCK))(errno)),
    }
}
