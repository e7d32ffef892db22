//! The pools of this node: opened, measured, reported.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::Hold;
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{Pool, PoolCapacity, PoolStatus, UNKNOWN_COPIES_MAX, UnknownCopy};

use super::reconcile::Agent;
use crate::claim::plan::Note;
use crate::queue::{Queue, Run};
use crate::view::now;
use crate::world::World;
use crate::write::{Object, Place, Write, Written, send};

/// Measures the pools that `queue` names, for ever.
pub async fn run(agent: Arc<Agent>, queue: Queue) {
    loop {
        let key = queue.next().await;
        let pool = agent
            .world
            .pools
            .get("", &key)
            .filter(|pool| pool.spec.node == agent.node.name);
        let run = match pool {
            Some(pool) => measure(&agent, pool).await,
            None => Run::Done,
        };
        queue.finish(&key, run);
    }
}

async fn measure(agent: &Arc<Agent>, pool: Arc<Pool>) -> Run {
    let (machine, path) = (agent.machine.clone(), pool.spec.path.clone());
    let id = pool.status.as_ref().and_then(|status| status.id.clone());
    let (world, name) = (agent.world.clone(), pool.name_any());
    let measure = move || {
        let path = Path::new(&path);
        let measured = machine.measure_pool(path, id.as_deref())?;
        let unknown = unknown(&world, &name, measured.copies.clone());
        let listed = unknown.iter().take(UNKNOWN_COPIES_MAX);
        let listed: Vec<UnknownCopy> = listed
            .map(|copy| machine.look_at_stranger(path, &measured.id, copy))
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
    let (capacity, says) = match &measured {
        Ok(sizes) => {
            let capacity = PoolCapacity {
                total: sizes.total,
                free: sizes.free,
                allocated: sizes.allocated,
                observed_at: now.clone(),
            };
            (
                Some(capacity),
                Says {
                    kind: "Ready",
                    is_true: true,
                    reason: "Measured",
                    message: "",
                },
            )
        }
        Err(hold) => {
            let says = Says {
                kind: "Ready",
                is_true: false,
                reason: hold.reason.code(),
                message: &hold.message,
            };
            (old.capacity.clone(), says)
        }
    };
    let id = measured
        .as_ref()
        .ok()
        .map(|sizes| sizes.id.clone())
        .or_else(|| old.id.clone());
    let (unknown, unknown_count) = match unknown {
        Some((listed, count)) => (listed, u32::try_from(count).unwrap_or(u32::MAX)),
        None => (old.unknown.clone(), old.unknown_count),
    };
    tell_unknown(agent, &pool, &unknown, unknown_count);
    let new = PoolStatus {
        id,
        capacity,
        unknown,
        unknown_count,
        conditions: renew(&old.conditions, &[says], &now),
    };
    let sizes = |status: &PoolStatus| {
        status
            .capacity
            .as_ref()
            .map(|each| (each.total, each.free, each.allocated))
    };
    let same = sizes(&old) == sizes(&new)
        && old.conditions == new.conditions
        && old.id == new.id
        && (&old.unknown, old.unknown_count) == (&new.unknown, new.unknown_count);
    if !same {
        let place = Place::named(Object::Pool, pool.name_any());
        let mut body = serde_json::json!({ "status": new });
        // A merge keeps what it is not told of.
        body["status"]["unknown"] = serde_json::json!(new.unknown);
        body["status"]["unknownCount"] = serde_json::json!(new.unknown_count);
        let write = Write::PatchStatus(place, body);
        if matches!(
            send(&agent.client, &[write]).await.as_slice(),
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
