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

/// How often, as kubelets do.
const BEAT_EVERY: Duration = Duration::from_secs(10);
/// How long a node may be silent before it counts as lost, in seconds, as for kubelets.
const LASTS_SECONDS: i32 = 40;

/// Renews the lease of a node, for ever.
pub async fn run(client: Client, node: String) {
    let mut complained = false;
    loop {
        match beat(&client, &node).await {
            Ok(()) => complained = false,
            Err(error) if !complained => {
                complained = true;
                tracing::warn!(%error, "this node cannot say that it is there; it is tried again");
            }
            Err(_) => {}
        }
        tokio::time::sleep(BEAT_EVERY).await;
    }
}

async fn beat(client: &Client, node: &str) -> Result<(), kube::Error> {
    let leases = Api::<Lease>::namespaced(client.clone(), NODE_LEASES_NAMESPACE);
    let spec = json!({
        "holderIdentity": node, "leaseDurationSeconds": LASTS_SECONDS, "renewTime": now(),
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
