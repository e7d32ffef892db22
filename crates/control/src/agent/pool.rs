//! The pools of this node: opened, measured, reported.

use std::path::Path;
use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{Pool, PoolCapacity, PoolStatus};

use super::reconcile::Agent;
use crate::queue::{Queue, Run};
use crate::view::now;
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
    let measure = move || machine.measure_pool(Path::new(&path), id.as_deref());
    let measured = tokio::task::spawn_blocking(measure).await;
    let Ok(measured) = measured else {
        return Run::Failed;
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
    let new = PoolStatus {
        id,
        capacity,
        conditions: renew(&old.conditions, &[says], &now),
    };
    let sizes = |status: &PoolStatus| {
        status
            .capacity
            .as_ref()
            .map(|each| (each.total, each.free, each.allocated))
    };
    if sizes(&old) != sizes(&new) || old.conditions != new.conditions || old.id != new.id {
        let place = Place::named(Object::Pool, pool.name_any());
        let write = Write::PatchStatus(place, serde_json::json!({ "status": new }));
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
