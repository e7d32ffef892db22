//! Makes the objects of a volume whose copies were found. The claim comes last: nobody works on the volume before it
//! exists.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use trellis_api::kinds::{
    DATA_FINALIZER, FSTYPE_PARAMETER, PROVISIONER, Placement, Replica, VOLUME_FINALIZER,
    VOLUME_LABEL, Volume,
};

use super::plan::{Found, Lost};
use crate::exit::from_service;

/// Makes what is absent.
pub async fn make(client: &Client, lost: &Lost, classes: &[StorageClass]) -> anyhow::Result<()> {
    let volume = match &lost.stored {
        Some(volume) => volume.clone(),
        None => {
            make_class(client, lost, classes).await?;
            make_volume(client, lost).await?
        }
    };
    for found in &lost.copies {
        make_replica(client, lost, &volume, found).await?;
    }
    if lost.stored.is_none() {
        make_claim(client, lost).await?;
    }
    Ok(())
}

/// The class as far as the copies describe it. It retains the volumes of deleted claims, because nobody knows whether
/// the old class deleted them.
async fn make_class(client: &Client, lost: &Lost, classes: &[StorageClass]) -> anyhow::Result<()> {
    let about = &lost.about;
    let exists = classes.iter().any(|each| each.name_any() == about.class);
    if exists || about.class.is_empty() {
        return Ok(());
    }
    let mut parameters = json!({
        "replicas": about.replicas.to_string(),
        "consistencyFactor": about.consistency_factor.to_string(),
        "thick": about.thick.to_string(),
        "onlineGrowth": about.online_growth.to_string(),
        "allowSharedDisk": about.allow_shared_disk.to_string(),
    });
    if let Some(kind) = &about.filesystem {
        parameters[FSTYPE_PARAMETER] = json!(kind);
    }
    let said = [
        ("via", about.via.clone()),
        ("whenBelowQuorum", about.when_below_quorum.clone()),
        ("whenFull", about.when_full.clone()),
        (
            "patience",
            about.patience_seconds.map(|it| format!("{it}s")),
        ),
        ("checksums", about.checksums.map(|it| it.to_string())),
        (
            "scrubInterval",
            about.scrub_interval_seconds.and_then(hours),
        ),
    ];
    for (parameter, value) in said {
        if let Some(value) = value {
            parameters[parameter] = json!(value);
        }
    }
    for (parameter, value) in about.iscsi.parameters() {
        parameters[parameter] = json!(value);
    }
    let mut class = json!({
        "metadata": { "name": about.class },
        "provisioner": PROVISIONER,
        "parameters": parameters,
        "allowVolumeExpansion": true,
        "reclaimPolicy": "Retain",
    });
    if !about.mount_options.is_empty() {
        class["mountOptions"] = json!(about.mount_options);
    }
    ensure(
        &Api::<StorageClass>::all(client.clone()),
        class,
        &about.class,
    )
    .await
}

/// A time as the classes have it, in whole hours.
fn hours(seconds: u64) -> Option<String> {
    match seconds {
        0 => Some("0".to_owned()),
        _ => seconds
            .is_multiple_of(3600)
            .then(|| format!("{}h", seconds / 3600)),
    }
}

async fn make_volume(client: &Client, lost: &Lost) -> anyhow::Result<Volume> {
    let (about, size) = (&lost.about, lost.size());
    let placement: Vec<Placement> = lost
        .copies
        .iter()
        .map(|each| Placement {
            pool: each.pool.clone(),
            node: each.node.clone(),
        })
        .collect();
    let mut body = json!({
        "apiVersion": "trellis.dev/v1alpha1",
        "kind": "Volume",
        "metadata": {
            "name": lost.name,
            "finalizers": [VOLUME_FINALIZER],
        },
        "spec": {
            "capacity": size,
            "claim": { "namespace": about.namespace, "name": lost.claim, "uid": "" },
            "volumeId": about.volume_id,
            "class": about.class,
            "replicas": about.replicas.max(1),
            "consistencyFactor": about.consistency_factor.max(1),
            "placement": placement,
            "pools": about.pools,
            "accessModes": about.access_modes,
            "mountOptions": about.mount_options,
            "via": about.way(),
            "thick": about.thick,
            "filesystem": about.filesystem,
            "onlineGrowth": about.online_growth,
            "allowSharedDisk": about.allow_shared_disk,
            "iscsi": about.iscsi,
        },
    });
    let said = [
        (
            "whenBelowQuorum",
            about.when_below_quorum.as_ref().map(|it| json!(it)),
        ),
        ("whenFull", about.when_full.as_ref().map(|it| json!(it))),
        (
            "patienceSeconds",
            about.patience_seconds.map(|it| json!(it)),
        ),
        ("checksums", about.checksums.map(|it| json!(it))),
        (
            "scrubIntervalSeconds",
            about.scrub_interval_seconds.map(|it| json!(it)),
        ),
    ];
    for (field, value) in said {
        if let Some(value) = value {
            body["spec"][field] = value;
        }
    }
    let volumes = Api::<Volume>::all(client.clone());
    let what = format!("volume {:?}", lost.name);
    let volume: Volume = serde_json::from_value(body)?;
    let made = volumes.create(&PostParams::default(), &volume).await;
    made.map_err(|error| from_service(error, &what))?;
    // It was served before, by the copies that are there: none is to be made in their place.
    let status = json!({ "status": { "capacity": size, "formatted": about.formatted } });
    let params = PatchParams::default();
    let patched = volumes
        .patch_status(&lost.name, &params, &Patch::Merge(status))
        .await;
    patched.map_err(|error| from_service(error, &what))
}

async fn make_replica(
    client: &Client,
    lost: &Lost,
    volume: &Volume,
    found: &Found,
) -> anyhow::Result<()> {
    let name = &found.copy.name;
    let body = json!({
        "apiVersion": "trellis.dev/v1alpha1",
        "kind": "Replica",
        "metadata": {
            "name": name,
            "labels": { VOLUME_LABEL: volume.name_any() },
            "ownerReferences": [volume.controller_owner_ref(&())],
            "finalizers": [DATA_FINALIZER],
        },
        "spec": {
            "volume": volume.name_any(),
            "volumeId": found.copy.identity.volume,
            "replicaId": found.copy.identity.replica,
            "pool": found.pool,
            "node": found.node,
            "capacity": lost.size().max(volume.spec.capacity),
            "thick": lost.about.thick,
        },
    });
    ensure(&Api::<Replica>::all(client.clone()), body, name).await
}

async fn make_claim(client: &Client, lost: &Lost) -> anyhow::Result<()> {
    let about = &lost.about;
    let namespace = json!({ "metadata": { "name": about.namespace } });
    let namespaces = Api::<Namespace>::all(client.clone());
    ensure(&namespaces, namespace, &about.namespace).await?;
    let modes = if about.access_modes.is_empty() {
        vec!["ReadWriteOnce".to_owned()]
    } else {
        about.access_modes.clone()
    };
    let mode = match about.filesystem {
        Some(_) => "Filesystem",
        None => "Block",
    };
    let body = json!({
        "metadata": { "name": lost.claim, "namespace": about.namespace },
        "spec": {
            "accessModes": modes,
            "storageClassName": about.class,
            "volumeMode": mode,
            "volumeName": lost.name,
            "resources": { "requests": { "storage": lost.size() } },
        },
    });
    let claims: Api<PersistentVolumeClaim> = namespaced(client, &about.namespace);
    ensure(&claims, body, &lost.claim).await
}

fn namespaced<K>(client: &Client, namespace: &str) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(client.clone(), namespace)
}

/// Makes an object unless there is one of its name.
async fn ensure<K>(api: &Api<K>, body: Value, name: &str) -> anyhow::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug,
{
    let object: K = serde_json::from_value(body)?;
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => {
            let kind = K::kind(&());
            Err(from_service(error, &format!("{kind} {name:?}")))
        }
    }
}
