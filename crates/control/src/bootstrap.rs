//! The objects that a machine without a cluster needs before anything else: its node, a pool, a class. Each is made if
//! it is absent, and never changed if it exists. The pool is made only at the very first start.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use trellis_api::kinds::{FSTYPE_PARAMETER, POOL_FINALIZER, PROVISIONER, Pool, SYSTEM_NAMESPACE};

use crate::lease::{self, LeaseSettings, VOLUMES_LEASE};

/// What is made.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// Name of this node.
    pub node: String,
    /// Directory of the pool `default`.
    pub pool: String,
    /// The kernel's release.
    pub kernel: String,
    /// The machine's architecture, in the kernel's word.
    pub architecture: String,
}

/// Makes what is absent.
pub async fn bootstrap(client: &Client, defaults: &Defaults) -> Result<(), kube::Error> {
    let namespace = json!({ "metadata": { "name": "default" } });
    ensure::<Namespace>(client, namespace).await?;
    // Only at the very first start, before there is a node: a pool that was removed later stays removed.
    let nodes = Api::<Node>::all(client.clone());
    if nodes.get_opt(&defaults.node).await?.is_none() {
        ensure::<Pool>(client, pool_object("default", defaults)).await?;
    }
    ensure::<Node>(client, node_object(&defaults.node)).await?;
    report_node(client, defaults).await?;
    let namespace = json!({ "metadata": { "name": SYSTEM_NAMESPACE } });
    ensure::<Namespace>(client, namespace).await?;
    let settings = LeaseSettings {
        namespace: SYSTEM_NAMESPACE.to_owned(),
        name: VOLUMES_LEASE.to_owned(),
        identity: format!("trellis-up-{}", defaults.node),
        lasts: Duration::ZERO,
    };
    lease::take_for_good(client, &settings).await?;
    let class = json!({
        "metadata": {
            "name": "trellis",
            "annotations": { "storageclass.kubernetes.io/is-default-class": "true" },
        },
        "provisioner": PROVISIONER,
        "parameters": { FSTYPE_PARAMETER: "xfs" },
        "allowVolumeExpansion": true,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    });
    ensure::<StorageClass>(client, class).await
}

/// Makes what a further node needs in a home that is there already: its Node, and at its first start a pool of its own.
pub async fn join(client: &Client, defaults: &Defaults) -> Result<(), kube::Error> {
    let node = &defaults.node;
    // The Node may have been made with its token; the pool is made before the node first says that it is there.
    let nodes = Api::<Node>::all(client.clone());
    let known = nodes.get_opt(node).await?;
    let was_here = known.is_some_and(|node| {
        let info = node.status.and_then(|status| status.node_info);
        info.is_some_and(|info| !info.kubelet_version.is_empty())
    });
    ensure::<Node>(client, node_object(node)).await?;
    if !was_here {
        let pool = pool_object(&format!("default-{node}"), defaults);
        ensure::<Pool>(client, pool).await?;
    }
    report_node(client, defaults).await
}

fn node_object(name: &str) -> Value {
    json!({ "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } } })
}

fn pool_object(name: &str, defaults: &Defaults) -> Value {
    json!({
        "apiVersion": "trellis.dev/v1alpha1",
        "kind": "Pool",
        "metadata": { "name": name, "finalizers": [POOL_FINALIZER] },
        "spec": { "node": defaults.node, "path": defaults.pool, "overcommitPercent": 100 },
    })
}

/// The node says that it is ready, and what it runs.
async fn report_node(client: &Client, defaults: &Defaults) -> Result<(), kube::Error> {
    let ready = json!({ "status": {
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "AgentReady", "message": "the node agent runs",
        }],
        "nodeInfo": {
            "kernelVersion": defaults.kernel, "architecture": defaults.architecture, "operatingSystem": "linux",
            "osImage": "", "bootID": "", "machineID": "", "systemUUID": "", "containerRuntimeVersion": "",
            "kubeProxyVersion": "", "kubeletVersion": concat!("trellis-", env!("CARGO_PKG_VERSION")),
        },
    }});
    let nodes = Api::<Node>::all(client.clone());
    nodes
        .patch_status(
            &defaults.node,
            &PatchParams::default(),
            &Patch::Merge(ready),
        )
        .await
        .map(drop)
}

async fn ensure<K>(client: &Client, object: Value) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + std::fmt::Debug,
{
    let object: K = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    match Api::<K>::all(client.clone())
        .create(&PostParams::default(), &object)
        .await
    {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(error),
    }
}
