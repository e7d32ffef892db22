//! The objects that a machine without a cluster needs before anything else: its node, a pool, a class. Each is made if
//! it is absent, and never changed if it exists. The pool is made only at the very first start.

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use trellis_api::kinds::{FSTYPE_PARAMETER, POOL_FINALIZER, PROVISIONER, Pool};

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
        let pool = json!({
            "apiVersion": "trellis.dev/v1alpha1",
            "kind": "Pool",
            "metadata": { "name": "default", "finalizers": [POOL_FINALIZER] },
            "spec": { "node": defaults.node, "path": defaults.pool, "overcommitPercent": 100 },
        });
        ensure::<Pool>(client, pool).await?;
    }
    let node = json!({
        "metadata": { "name": defaults.node, "labels": { "kubernetes.io/hostname": defaults.node } },
    });
    ensure::<Node>(client, node).await?;
    report_node(client, defaults).await?;
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

async fn ensure<K>(client: &Client, object: serde_json::Value) -> Result<(), kube::Error>
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
