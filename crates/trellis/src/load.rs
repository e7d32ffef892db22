//! Loads from the service what is stored about a claim.

use std::sync::Arc;

use futures::TryFutureExt;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use trellis_api::kinds::{Attachment, Replica, Target, VOLUME_LABEL, Volume};
use trellis_control::stored::{StoredClaim, StoredVolume};
use trellis_control::view::Origin;
use trellis_control::world::volume_name;

use crate::connect::Service;
use crate::exit::from_service;

/// Loads one claim and all that belongs to it.
pub async fn load(service: &Service, name: &str) -> anyhow::Result<StoredClaim> {
    let client = &service.client;
    let what = format!("claim {}/{name}", service.namespace);
    let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), &service.namespace);
    let found = claims.get(name).await;
    let claim = found.map_err(|error| from_service(error, &what))?;
    let key = volume_name(&claim).unwrap_or_default();
    let class_name = class_of(&claim).unwrap_or_default();
    let all = ListParams::default();
    let of_volume = ListParams::default().labels(&format!("{VOLUME_LABEL}={key}"));
    let attachments = Api::<Attachment>::namespaced(client.clone(), &service.namespace);
    let (persistent_volume, class, volume, target, replicas, attachments) = tokio::try_join!(
        find::<PersistentVolume>(client, &key),
        find::<StorageClass>(client, class_name),
        find::<Volume>(client, &key),
        find::<Target>(client, &key),
        list(Api::<Replica>::all(client.clone()), &of_volume),
        list(attachments, &all),
    )?;
    let loaded = Loaded {
        persistent_volumes: persistent_volume.into_iter().collect(),
        classes: class.into_iter().collect(),
        volumes: volume.into_iter().collect(),
        targets: target.into_iter().collect(),
        replicas,
        attachments,
    };
    Ok(loaded.of(claim))
}

/// Loads every claim of a namespace, or of all, that is ours or could become so. In the order of their
/// names.
pub async fn load_all(
    client: &Client,
    namespace: Option<&str>,
) -> anyhow::Result<Vec<StoredClaim>> {
    let all = ListParams::default();
    let (claims, attachments) = match namespace {
        Some(namespace) => (
            Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace),
            Api::<Attachment>::namespaced(client.clone(), namespace),
        ),
        None => (Api::all(client.clone()), Api::all(client.clone())),
    };
    let (claims, persistent_volumes, classes, volumes, targets, replicas, attachments) = tokio::try_join!(
        list(claims, &all),
        list(Api::<PersistentVolume>::all(client.clone()), &all),
        list(Api::<StorageClass>::all(client.clone()), &all),
        list(Api::<Volume>::all(client.clone()), &all),
        list(Api::<Target>::all(client.clone()), &all),
        list(Api::<Replica>::all(client.clone()), &all),
        list(attachments, &all),
    )?;
    let loaded = Loaded {
        persistent_volumes,
        classes,
        volumes,
        targets,
        replicas,
        attachments,
    };
    let looks = claims.into_iter().map(|claim| loaded.of(claim));
    let is_ours = |look: &StoredClaim| !matches!(Origin::of(look), Origin::Other(_));
    let mut looks: Vec<StoredClaim> = looks.filter(is_ours).collect();
    looks.sort_by_key(|look| {
        look.claim
            .as_ref()
            .map(|each| (each.namespace(), each.name_any()))
    });
    Ok(looks)
}

/// What was loaded besides the claims.
struct Loaded {
    persistent_volumes: Vec<PersistentVolume>,
    classes: Vec<StorageClass>,
    volumes: Vec<Volume>,
    targets: Vec<Target>,
    replicas: Vec<Replica>,
    attachments: Vec<Attachment>,
}

impl Loaded {
    fn of(&self, claim: PersistentVolumeClaim) -> StoredClaim {
        let key = volume_name(&claim).unwrap_or_default();
        let namespace = claim.namespace();
        let attached = |each: &&Attachment| {
            let names_it = each.spec.claim_name == Some(claim.name_any());
            let names_it = names_it && each.namespace() == namespace;
            each.volume().map_or(names_it, |volume| volume == key)
        };
        let replicas = self.replicas.iter().filter(|each| each.spec.volume == key);
        StoredClaim {
            persistent_volume: named(&self.persistent_volumes, &key),
            class: class_of(&claim).and_then(|name| named(&self.classes, name)),
            stored: StoredVolume {
                volume: named(&self.volumes, &key),
                target: named(&self.targets, &key),
                replicas: replicas.cloned().map(Arc::new).collect(),
                attachments: self
                    .attachments
                    .iter()
                    .filter(attached)
                    .cloned()
                    .map(Arc::new)
                    .collect(),
                key,
            },
            claim: Some(Arc::new(claim)),
            ..StoredClaim::default()
        }
    }
}

fn named<K: ResourceExt + Clone>(objects: &[K], name: &str) -> Option<Arc<K>> {
    let found = objects
        .iter()
        .find(|each| each.meta().name.as_deref() == Some(name));
    found.cloned().map(Arc::new)
}

fn class_of(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref()?.storage_class_name.as_deref();
    name.filter(|name| !name.is_empty())
}

async fn find<K>(client: &Client, name: &str) -> anyhow::Result<Option<K>>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::ClusterResourceScope>,
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    if name.is_empty() {
        return Ok(None);
    }
    let api = Api::<K>::all(client.clone());
    let what = format!("{} {name}", K::kind(&()));
    api.get_opt(name)
        .await
        .map_err(|error| from_service(error, &what))
}

/// Every object that `which` selects.
pub async fn list<K>(api: Api<K>, which: &ListParams) -> anyhow::Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let what = format!("the kind {}", K::plural(&()));
    let found = api
        .list(which)
        .map_err(|error| from_service(error, &what))
        .await?;
    Ok(found.items)
}
