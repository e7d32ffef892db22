//! Measures what may be short below a claim: its filesystem, and the pools of its copies that are on this machine.

use kube::api::ListParams;
use kube::{Api, ResourceExt};
use trellis_api::kinds::Pool;
use trellis_control::stored::StoredClaim;
use trellis_control::view::{ClaimNow, PoolNow};

use super::measured;
use crate::connect::{Service, own_node};
use crate::load::list;

/// What was measured just now.
#[derive(Default)]
pub struct Space {
    /// Of the claim.
    pub claim: ClaimNow,
    /// Of the pools of its copies.
    pub pools: Vec<(Pool, PoolNow)>,
}

/// Measures the claim's filesystem and the pools of its copies, those that are on this machine.
pub async fn measure(service: &Service, look: &StoredClaim) -> Space {
    let timely = measured::timely();
    let claim = measured::claim(&timely, look).await;
    let pools = Api::<Pool>::all(service.client.clone());
    let pools = list(pools, &ListParams::default())
        .await
        .unwrap_or_default();
    let node = own_node(service).await.unwrap_or_default();
    let mut found = Vec::new();
    for replica in &look.stored.replicas {
        let name = &replica.spec.pool;
        let pool = pools.iter().find(|pool| pool.name_any() == *name);
        if let Some(pool) = pool.filter(|pool| pool.spec.node == node) {
            let now = measured::pool(&timely, name, pool).await;
            found.push((pool.clone(), now));
        }
    }
    Space {
        claim,
        pools: found,
    }
}
