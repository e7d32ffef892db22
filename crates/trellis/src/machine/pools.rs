//! Pools: directories that the replica store opens, on filesystems that the kernel shows.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};

use trellis_api::about::About;
use trellis_api::kinds::UnknownCopy;
use trellis_api::{Hold, HoldReason};
use trellis_control::node::machine::{PoolMeasured, Pools};
use trellis_engine::replica::Pool;
use trellis_node::ground::{self, OtherPool};
use uuid::Uuid;

use super::ThisMachine;
use super::hold::{node_hold, store_hold};

impl Pools for ThisMachine {
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
}

impl ThisMachine {
    /// Opens a pool once and keeps it open, and with it the lock that keeps other processes away. If its path now leads
    /// elsewhere, because a disk was mounted or unmounted there, the pool is opened again.
    pub(super) fn with_pool<T>(
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

    pub(super) fn open_pools(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<Pool>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
