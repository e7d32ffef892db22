//! Everything that is stored about one claim and its volume, gathered for a plan or for a view.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use trellis_api::kinds::{Attachment, Volume};

use super::StoredVolume;
use crate::claim::by_hand::best_fit;
use crate::world::{World, orphan_key};

/// One claim, its volume, and all that belongs to them.
#[derive(Clone, Default)]
pub struct StoredClaim {
    /// The claim.
    pub claim: Option<Arc<PersistentVolumeClaim>>,
    /// The persistent volume.
    pub persistent_volume: Option<Arc<PersistentVolume>>,
    /// The claim's class.
    pub class: Option<Arc<StorageClass>>,
    /// The volume and its parts.
    pub stored: StoredVolume,
    /// Uses that name the claim and have no volume yet.
    pub waiting: Vec<Arc<Attachment>>,
    /// Whether anything wants to use the claim: a pod or an attachment.
    pub wanted: bool,
    /// A persistent volume made by hand that the claim could have.
    pub offered: Option<Arc<PersistentVolume>>,
    /// The node whose agent finishes claims that are used there alone: that of the embedded home.
    pub home: Option<String>,
}

impl StoredClaim {
    /// Gathers what the caches know of the volume `key` and of its claim.
    pub fn gather(world: &World, key: &str) -> StoredClaim {
        let stored = StoredVolume::gather(world, key);
        let volume = stored.volume.as_deref();
        let persistent_volume = world.persistent_volumes.get("", key);
        let claim = claim_of(world, key, volume)
            .or_else(|| claim_kept_for(world, persistent_volume.as_deref()?));
        let class = claim
            .as_deref()
            .and_then(class_name)
            .and_then(|name| world.classes.get("", &name));
        let waiting = claim.as_deref().map_or_else(Vec::new, |claim| {
            let namespace = claim.namespace().unwrap_or_default();
            let key = orphan_key(&namespace, &claim.name_any());
            world.attachments.group(&key)
        });
        let wanted = !stored.attachments.is_empty()
            || !waiting.is_empty()
            || claim.as_ref().is_some_and(|claim| {
                let waits = claim
                    .spec
                    .as_ref()
                    .is_none_or(|spec| spec.volume_name.is_none());
                waits
                    && world.used_by_pod(&claim.namespace().unwrap_or_default(), &claim.name_any())
            });
        let waits = |class: &StorageClass| {
            class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
        };
        let may_bind = volume.is_none() && (wanted || !class.as_deref().is_some_and(waits));
        let offered = claim
            .as_deref()
            .filter(|claim| may_bind && is_unbound(claim))
            .and_then(|claim| best_fit(claim, world.persistent_volumes.all()));
        StoredClaim {
            claim,
            persistent_volume,
            class,
            offered,
            stored,
            waiting,
            wanted,
            home: world.home.get().cloned(),
        }
    }

    /// The uses of the claim: those of its volume, and those that wait for one.
    pub fn uses(&self) -> impl Iterator<Item = &Arc<Attachment>> {
        self.stored.attachments.iter().chain(&self.waiting)
    }
}

/// The claim that the volume belongs to. A claim of the same name that was made later is another one.
fn claim_of(
    world: &World,
    key: &str,
    volume: Option<&Volume>,
) -> Option<Arc<PersistentVolumeClaim>> {
    let claims = world.claims.group(key);
    let owner = volume.and_then(|volume| Some(volume.spec.claim.as_ref()?.uid.clone()));
    let owned = claims
        .iter()
        .find(|claim| owner.is_some() && claim.uid() == owner)
        .cloned();
    owned.or_else(|| claims.into_iter().next())
}

/// The claim that a persistent volume is bound to, which may not say so itself yet.
fn claim_kept_for(world: &World, volume: &PersistentVolume) -> Option<Arc<PersistentVolumeClaim>> {
    let reference = volume.spec.as_ref()?.claim_ref.as_ref()?;
    let claim = world
        .claims
        .get(reference.namespace.as_deref()?, reference.name.as_deref()?)?;
    (claim.uid() == reference.uid && is_unbound(&claim)).then_some(claim)
}

fn is_unbound(claim: &PersistentVolumeClaim) -> bool {
    let phase = claim
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    phase != Some("Bound") && claim.metadata.deletion_timestamp.is_none()
}

fn class_name(claim: &PersistentVolumeClaim) -> Option<String> {
    claim
        .spec
        .as_ref()?
        .storage_class_name
        .clone()
        .filter(|name| !name.is_empty())
}
