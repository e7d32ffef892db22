//! `trellis node rm`: a node goes, and its token no longer counts.
//!
//! A node's pools go with it: they get no new copies from the first moment on, and nobody waits for the node to release
//! them. What is in their directories stays there.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use trellis_api::kinds::{POOL_FINALIZER, Pool};
use trellis_apiserver::users::NODE_LEASES_NAMESPACE;

use super::{Contents, Line};
use crate::cli::Global;
use crate::connect::connect;
use crate::exit::{Ended, from_service, refuse};
use crate::output;

/// How many objects are named in a sentence.
const NAMED_MAX: usize = 10;

/// Removes a node.
pub async fn remove(global: &Global, name: &str, force: bool) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let client = &service.client;
    let contents = Contents::read(client).await?;
    let line = contents.line(name);
    if !line.is_known {
        return Err(Ended::NotFound(format!("node {name} does not exist")).into());
    }
    if !force {
        require_removable(&line)?;
    }
    let kept = let_go_of_pools(client, &contents, name, force).await?;
    let leases = Api::<Lease>::namespaced(client.clone(), NODE_LEASES_NAMESPACE);
    gone(leases.delete(name, &DeleteParams::default()).await, name)?;
    let nodes = Api::<Node>::all(client.clone());
    gone(nodes.delete(name, &DeleteParams::default()).await, name)?;
    let mut text = format!("node {name} is removed, and its token no longer counts\n");
    if !kept.is_empty() {
        text.push_str(&format!(
            "copies are still on {}: those of volumes with several copies are replaced on other nodes as far as there are \
             pools; if the machine comes back, `trellis node add {name}` lets it in again\n",
            named(&kept)
        ));
    }
    output::print(&text)
}

/// Refuses to remove a node that carries something.
fn require_removable(line: &Line) -> anyhow::Result<()> {
    let name = &line.name;
    let carries = [
        ("copies", &line.copies),
        ("uses", &line.uses),
        ("targets", &line.targets),
    ];
    let carries: Vec<String> = carries
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("{} {what} ({})", names.len(), named(names)))
        .collect();
    if !carries.is_empty() {
        return refuse(format!(
            "node {name} carries {}\n  what to do: unmount what is used there, and move its copies with `trellis pool rm POOL \
             --drain` ({}); if the machine is lost for good, `trellis node rm {name} --force`",
            carries.join(", "),
            named(&line.pools)
        ));
    }
    if line.has_token == Some(false) {
        return refuse(format!(
            "node {name} has no token: it is the one that the service runs on, or it was never added; --force removes it all \
             the same"
        ));
    }
    Ok(())
}

/// Removes the pools of the node that have no copies, and lets no new copies come to the others. Returns those others.
async fn let_go_of_pools(
    client: &Client,
    contents: &Contents,
    name: &str,
    force: bool,
) -> anyhow::Result<Vec<String>> {
    let pools = Api::<Pool>::all(client.clone());
    let drain = json!({ "spec": { "drain": true } });
    let of_node = contents.line(name).pools;
    for pool in &of_node {
        gone(
            pools
                .patch(pool, &PatchParams::default(), &Patch::Merge(&drain))
                .await,
            pool,
        )?;
    }
    // A copy may have come since the first look; none comes from here on.
    let now = Contents::read(client).await?;
    if !force {
        require_removable(&now.line(name))?;
    }
    let mut kept = Vec::new();
    for pool in of_node {
        if now.replicas.iter().any(|copy| copy.spec.pool == pool) {
            kept.push(pool);
            continue;
        }
        gone(pools.delete(&pool, &DeleteParams::default()).await, &pool)?;
        release(&pools, &pool).await?;
    }
    Ok(kept)
}

/// Lifts the finalizer that waits for the node to release the directory.
async fn release(pools: &Api<Pool>, name: &str) -> anyhow::Result<()> {
    let there = pools.get_opt(name).await;
    let Some(there) = there.map_err(|error| from_service(error, &format!("pool {name}")))? else {
        return Ok(());
    };
    let mut finalizers = there.metadata.finalizers.unwrap_or_default();
    finalizers.retain(|each| each != POOL_FINALIZER);
    let body = json!({ "metadata": {
        "finalizers": finalizers, "resourceVersion": there.metadata.resource_version,
    }});
    gone(
        pools
            .patch(name, &PatchParams::default(), &Patch::Merge(&body))
            .await,
        name,
    )
}

/// What is gone already needs no removal.
fn gone<T>(answer: Result<T, kube::Error>, what: &str) -> anyhow::Result<()> {
    match answer {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(from_service(error, what)),
    }
}

fn named(names: &[String]) -> String {
    let mut some: Vec<&str> = names.iter().take(NAMED_MAX).map(String::as_str).collect();
    if names.len() > NAMED_MAX {
        some.push("and more");
    }
    some.join(", ")
}
