//! A node says that it is there, by renewing a lease of its name, as kubelets do.
//!
//! In the embedded home the node of the service itself has no need to: whoever could ask, asks the service.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use trellis_api::kinds::NODE_LEASES_NAMESPACE;

use crate::stored::now;
use crate::write::Manager;

/// How long a node may be silent before it counts as lost, unless it says otherwise; as for kubelets.
pub const LOST_AFTER: Duration = Duration::from_secs(40);
/// How often the lease is renewed in the time that it lasts, as kubelets do.
const BEATS_PER_LEASE: u32 = 4;

/// Renews the lease of a node, for ever. The lease says how long the node may be silent.
pub async fn run(client: Client, node: String, lost_after: Duration) {
    let mut complained = false;
    loop {
        match beat(&client, &node, lost_after).await {
            Ok(()) => complained = false,
            Err(error) if !complained => {
                complained = true;
                tracing::warn!(%error, "this node cannot say that it is there; it is tried again");
            }
            Err(_) => {}
        }
        tokio::time::sleep(lost_after / BEATS_PER_LEASE).await;
    }
}

async fn beat(client: &Client, node: &str, lost_after: Duration) -> Result<(), kube::Error> {
    let seconds = i32::try_from(lost_after.as_secs()).unwrap_or(i32::MAX);
    let leases = Api::<Lease>::namespaced(client.clone(), NODE_LEASES_NAMESPACE);
    let spec = json!({
        "holderIdentity": node, "leaseDurationSeconds": seconds, "renewTime": now(),
    });
    let params = PatchParams {
        field_manager: Some(Manager::Node.name().to_owned()),
        ..PatchParams::default()
    };
    let patch = json!({ "spec": spec });
    match leases.patch(node, &params, &Patch::Merge(&patch)).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        other => return other.map(drop),
    }
    let lease = json!({ "metadata": { "name": node }, "spec": spec });
    let lease: Lease = serde_json::from_value(lease).map_err(kube::Error::SerdeError)?;
    leases
        .create(&PostParams::default(), &lease)
        .await
        .map(drop)
}
