//! The pools of this node: opened, measured, reported, and released when they are to be removed and have no copies
//! left.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{
    MEASURE_ANNOTATION, POOL_FINALIZER, Pool, PoolCapacity, PoolStatus, UNKNOWN_COPIES_MAX,
    UnknownCopy,
};
use trellis_api::{Bytes, Hold, HoldReason};

use super::reconcile::Agent;
use crate::plan::Note;
use crate::queue::{Queue, Run};
use crate::stored::now;
use crate::world::World;
use crate::write::{Manager, Object, Place, Write, Written, send};

/// Measures the pools that `queue` names, for ever.
pub async fn run(agent: Arc<Agent>, queue: Queue) {
    loop {
        let key = queue.next().await;
        let pool = agent.world.pools.get("", &key);
        let run = match pool {
            Some(pool) if pool.spec.node == agent.node.name => look_after(&agent, pool).await,
            Some(_) => Run::Done,
            None => {
                keep_others(&agent, &key).await;
                Run::Done
            }
        };
        queue.finish(&key, run);
    }
}

/// Measures a pool, and releases one that is to be removed and that nobody needs.
async fn look_after(agent: &Arc<Agent>, pool: Arc<Pool>) -> Run {
    let leaves = pool.metadata.deletion_timestamp.is_some();
    let kept = pool.finalizers().iter().any(|each| each == POOL_FINALIZER);
    if !kept && !leaves {
        // This comes before the pool is ready for a copy: from the first copy on it must not vanish.
        let mut finalizers = pool.finalizers().to_vec();
        finalizers.push(POOL_FINALIZER.to_owned());
        if !set_finalizers(agent, &pool, &finalizers).await {
            return Run::Failed;
        }
    }
    // Whoever promises room from now on has seen that the pool goes, so nothing will be added to what is found here.
    let needed_by = needed_by(&agent.world, &pool.name_any());
    if leaves && kept && needed_by.is_empty() {
        keep_others(agent, &pool.name_any()).await;
        let mut finalizers = pool.finalizers().to_vec();
        finalizers.retain(|each| each != POOL_FINALIZER);
        let stored = set_finalizers(agent, &pool, &finalizers).await;
        return if stored { Run::Done } else { Run::Failed };
    }
    if leaves {
        tell_in_use(agent, &pool, &needed_by);
    }
    measure(agent, pool, &needed_by).await
}

async fn set_finalizers(agent: &Agent, pool: &Pool, finalizers: &[String]) -> bool {
    let place = Place::named(Object::Pool, pool.name_any());
    let body = serde_json::json!({ "metadata": {
        "finalizers": finalizers,
        "uid": pool.uid(),
        "resourceVersion": pool.resource_version(),
    }});
    let write = Write::Patch(place, body);
    let written = send(&agent.client, Manager::Node, &[write]).await;
    matches!(written.as_slice(), [Written::Stored])
}

/// Releases the directories of all pools of this node that are not stored, and that of `gone`.
async fn keep_others(agent: &Agent, gone: &str) {
    let pools = agent.world.pools.all();
    let kept = pools
        .iter()
        .filter(|pool| pool.spec.node == agent.node.name && pool.name_any() != gone);
    let paths: Vec<PathBuf> = kept.map(|pool| PathBuf::from(&pool.spec.path)).collect();
    let machine = agent.machine.clone();
    // On a thread of its own: closing a file may wait for its disk. A panic is logged where it happens.
    let _ = tokio::task::spawn_blocking(move || machine.pools.keep_pools(&paths)).await;
}

/// Who needs a pool: the copies on it, and those that were promised room there.
fn needed_by(world: &World, pool: &str) -> Vec<String> {
    let replicas = world.replicas.all();
    let mut there: Vec<String> = replicas
        .iter()
        .filter(|each| each.spec.pool == pool)
        .map(|each| {
            let volume = world.volumes.get("", &each.spec.volume);
            let claim = volume.and_then(|volume| volume.spec.claim.clone());
            let claim = claim.map(|claim| format!(" (claim {}/{})", claim.namespace, claim.name));
            format!("{}{}", each.name_any(), claim.unwrap_or_default())
        })
        .collect();
    there.sort_unstable();
    if there.is_empty() && world.ledger.open().reserved_beside(pool, "") > Bytes::ZERO {
        there.push("a copy that is being made".to_owned());
    }
    there
}

/// How many copies are named in a sentence.
const NAMED_MAX: usize = 5;

fn in_use(needed_by: &[String]) -> String {
    let mut named: Vec<&str> = needed_by
        .iter()
        .take(NAMED_MAX)
        .map(String::as_str)
        .collect();
    if needed_by.len() > NAMED_MAX {
        named.push("and more");
    }
    format!(
        "The pool goes when no copy is on it; {} are: {}.",
        needed_by.len(),
        named.join(", ")
    )
}

/// Says why a pool that was deleted is still there.
fn tell_in_use(agent: &Agent, pool: &Pool, needed_by: &[String]) {
    let reason = HoldReason::PoolInUse;
    agent.recorder.note(Note {
        about: Place::named(Object::Pool, pool.name_any()),
        uid: pool.uid(),
        warning: true,
        reason: reason.code(),
        message: format!("{} {}", in_use(needed_by), reason.action()),
    });
}

/// The other pools of this node that a new one must be apart from: all that were ever accepted, and those that were
/// named before it.
fn others(world: &World, pool: &Pool) -> Vec<(String, PathBuf)> {
    let age = |pool: &Pool| (pool.creation_timestamp(), pool.name_any());
    let was_taken = |pool: &Pool| pool.status.as_ref().is_some_and(|it| it.id.is_some());
    let pools = world.pools.all();
    let others = pools.iter().filter(|other| {
        other.spec.node == pool.spec.node
            && other.name_any() != pool.name_any()
            && (was_taken(other) || age(other) < age(pool))
    });
    others
        .map(|other| (other.name_any(), PathBuf::from(&other.spec.path)))
        .collect()
}

/// Whether somebody has asked for a measurement since the last one.
fn is_asked(pool: &Pool) -> bool {
    let asked = pool.annotations().get(MEASURE_ANNOTATION);
    let asked = asked.and_then(|at| at.parse::<Timestamp>().ok());
    let status = pool.status.as_ref();
    let last = status.and_then(|status| Some(status.capacity.as_ref()?.observed_at.0));
    asked.is_some_and(|asked| last.is_none_or(|last| last < asked))
}

async fn measure(agent: &Arc<Agent>, pool: Arc<Pool>, needed_by: &[String]) -> Run {
    let (machine, path) = (agent.machine.clone(), pool.spec.path.clone());
    let id = pool.status.as_ref().and_then(|status| status.id.clone());
    let (world, name) = (agent.world.clone(), pool.name_any());
    let others = others(&world, &pool);
    let measure = move || {
        let path = Path::new(&path);
        if id.is_none() {
            // A pool that was once accepted stays, because copies may be on it.
            machine.pools.judge_pool(path, &others)?;
        }
        let measured = machine.pools.measure_pool(path, id.as_deref())?;
        let unknown = unknown(&world, &name, measured.copies.clone());
        let listed = unknown.iter().take(UNKNOWN_COPIES_MAX);
        let listed: Vec<UnknownCopy> = listed
            .map(|copy| machine.pools.look_at_stranger(path, &measured.id, copy))
            .collect();
        Ok::<_, Hold>((measured, listed, unknown.len()))
    };
    let measured = tokio::task::spawn_blocking(measure).await;
    let Ok(measured) = measured else {
        return Run::Failed;
    };
    let (measured, unknown) = match measured {
        Ok((measured, listed, count)) => (Ok(measured), Some((listed, count))),
        Err(hold) => (Err(hold), None),
    };
    let now = now();
    let old = pool.status.clone().unwrap_or_default();
    let ready = Says {
        began: None,
        kind: "Ready",
        is_true: measured.is_ok(),
        reason: measured
            .as_ref()
            .map_or_else(|hold| hold.reason.code(), |_| "Measured"),
        message: measured
            .as_ref()
            .map_or_else(|hold| hold.message.as_str(), |_| ""),
    };
    let in_use = in_use(needed_by);
    let mut says = vec![ready];
    if pool.metadata.deletion_timestamp.is_some() {
        says.push(Says {
            began: None,
            kind: "Removable",
            is_true: false,
            reason: HoldReason::PoolInUse.code(),
            message: &in_use,
        });
    }
    let found = measured.as_ref().ok();
    let (unknown, unknown_count) = match unknown {
        Some((listed, count)) => (listed, u32::try_from(count).unwrap_or(u32::MAX)),
        None => (old.unknown.clone(), old.unknown_count),
    };
    tell_unknown(agent, &pool, &unknown, unknown_count);
    let capacity = found.map(|sizes| PoolCapacity {
        total: sizes.total,
        free: sizes.free,
        allocated: sizes.allocated,
        observed_at: now.clone(),
    });
    let new = PoolStatus {
        id: found
            .map(|sizes| sizes.id.clone())
            .or_else(|| old.id.clone()),
        filesystem: found
            .map(|sizes| sizes.filesystem.clone())
            .or_else(|| old.filesystem.clone()),
        capacity: capacity.or_else(|| old.capacity.clone()),
        unknown,
        unknown_count,
        conditions: renew(&old.conditions, &says, &now),
    };
    let sizes = |status: &PoolStatus| {
        status
            .capacity
            .as_ref()
            .map(|each| (each.total, each.free, each.allocated))
    };
    let same = sizes(&old) == sizes(&new)
        && old.conditions == new.conditions
        && (&old.id, &old.filesystem) == (&new.id, &new.filesystem)
        && (&old.unknown, old.unknown_count) == (&new.unknown, new.unknown_count);
    if !same || is_asked(&pool) {
        let place = Place::named(Object::Pool, pool.name_any());
        let mut body = serde_json::json!({ "status": new });
        // A merge keeps fields that it does not mention.
        body["status"]["unknown"] = serde_json::json!(new.unknown);
        body["status"]["unknownCount"] = serde_json::json!(new.unknown_count);
        let write = Write::PatchStatus(place, body);
        if matches!(
            send(&agent.client, Manager::Node, &[write])
                .await
                .as_slice(),
            [Written::Failed(_)]
        ) {
            return Run::Failed;
        }
    }
    if measured.is_err() {
        Run::Failed
    } else {
        Run::Done
    }
}

/// The copies on a pool that no object names. An object is stored before its copy is made, and goes after it.
fn unknown(world: &World, pool: &str, mut copies: Vec<String>) -> Vec<String> {
    let replicas = world.replicas.all();
    let known: HashSet<String> = replicas
        .iter()
        .filter(|each| each.spec.pool == pool)
        .map(|each| each.name_any())
        .collect();
    copies.retain(|copy| !known.contains(copy));
    copies
}

/// Says once, for all to see, that there are copies that nobody knows.
fn tell_unknown(agent: &Agent, pool: &Pool, unknown: &[UnknownCopy], count: u32) {
    if count == 0 {
        return;
    }
    let mut named: Vec<String> = unknown.iter().map(describe).collect();
    let listed = u32::try_from(named.len()).unwrap_or(u32::MAX);
    if listed < count {
        named.push("and more".to_owned());
    }
    let message = format!(
        "{count} copies on pool {} belong to no volume that is stored here; they are kept: {}. \
         `trellis recover --from-pools` takes them in.",
        pool.name_any(),
        named.join(", ")
    );
    if pool.status.as_ref().map(|status| status.unknown_count) != Some(count) {
        tracing::error!("{message}");
    }
    agent.recorder.note(Note {
        about: Place::named(Object::Pool, pool.name_any()),
        uid: pool.uid(),
        warning: true,
        reason: "UnknownCopies",
        message,
    });
}

fn describe(copy: &UnknownCopy) -> String {
    match &copy.claim {
        Some(claim) => format!("{} (claim {claim})", copy.name),
        None => copy.name.clone(),
    }
}
