//! Everything that is stored about one volume, gathered for a plan.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::{Timestamp, Unit};
use kube::ResourceExt;
use trellis_api::kinds::{
    Attachment, Content, EMPTY_CONTENT, FilesystemKind, Replica, RungStatus, Target, Via, Volume,
};
use trellis_api::{Bytes, Hold, HoldReason};

use crate::claim::by_hand::best_fit;
use crate::world::{World, claim_group, orphan_claim};

/// One volume and all that belongs to it.
#[derive(Clone, Default)]
pub struct View {
    /// The volume's name, also where there is no volume yet.
    pub key: String,
    /// The claim.
    pub claim: Option<Arc<PersistentVolumeClaim>>,
    /// The persistent volume.
    pub persistent_volume: Option<Arc<PersistentVolume>>,
    /// The claim's class.
    pub class: Option<Arc<StorageClass>>,
    /// The volume.
    pub volume: Option<Arc<Volume>>,
    /// Its target.
    pub target: Option<Arc<Target>>,
    /// Its copies.
    pub replicas: Vec<Arc<Replica>>,
    /// Its uses.
    pub attachments: Vec<Arc<Attachment>>,
    /// Whether anything wants to use the claim: a pod or an attachment.
    pub wanted: bool,
    /// A persistent volume made by hand that the claim could have.
    pub offered: Option<Arc<PersistentVolume>>,
}

impl View {
    /// Gathers what the caches know of the volume `key`.
    pub fn gather(world: &World, key: &str) -> View {
        let volume = world.volumes.get("", key);
        let persistent_volume = world.persistent_volumes.get("", key);
        let claim = claim_of(world, key, volume.as_deref())
            .or_else(|| claim_kept_for(world, persistent_volume.as_deref()?));
        let class = claim
            .as_deref()
            .and_then(class_name)
            .and_then(|name| world.classes.get("", &name));
        let attachments = attachments_of(world, key, claim.as_deref(), volume.as_deref());
        let wanted = !attachments.is_empty()
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
        View {
            key: key.to_owned(),
            claim,
            persistent_volume,
            class,
            offered,
            volume,
            target: world.targets.group(key).into_iter().next(),
            replicas: world.replicas.group(key),
            attachments,
            wanted,
        }
    }

    /// Whether the volume has several copies behind a target. If the volume is gone, its copies still tell.
    pub fn is_replicated(&self) -> bool {
        let copy = |each: &Arc<Replica>| each.is_of_several();
        let volume = self
            .volume
            .as_ref()
            .map(|volume| volume.spec.is_behind_target());
        volume.unwrap_or_else(|| self.replicas.iter().any(copy))
    }

    /// Whether the volume is known to have carried a filesystem that somebody could use.
    pub fn is_formatted(&self) -> bool {
        let volume = self.volume.as_ref();
        let wanted = volume.and_then(|volume| volume.spec.filesystem);
        let told = volume.and_then(|volume| volume.status.as_ref());
        let used = self.attachments.iter().any(|each| {
            let status = each.status.as_ref();
            status.is_some_and(|status| status.filesystem.is_some())
        });
        let found = || {
            let contents = self.contents().into_iter().flatten();
            let mut contents = contents.map(|content| content.kind.as_str());
            contents.any(|kind| wanted.is_some_and(|wanted| wanted.name() == kind))
        };
        wanted.is_some() && (told.is_some_and(|status| status.formatted) || used || found())
    }

    /// How its bytes get to a node. If the volume is gone, its uses still tell.
    pub fn way(&self) -> Via {
        let used = self.attachments.iter();
        let used = || used.clone().find_map(|each| each.status.as_ref()?.via);
        let volume = self.volume.as_ref().map(|volume| volume.spec.way());
        volume.or_else(used).unwrap_or(if self.is_replicated() {
            Via::Fuse
        } else {
            Via::Local
        })
    }

    /// What is known about the bytes: of every copy that is used in place, or of what the target shows.
    pub fn contents(&self) -> Vec<Option<&Content>> {
        if self.is_replicated() {
            let target = self.target.as_ref();
            let content = target.and_then(|target| target.status.as_ref()?.content.as_ref());
            return vec![content];
        }
        let replicas = self.replicas.iter();
        replicas
            .map(|replica| replica.status.as_ref()?.content.as_ref())
            .collect()
    }

    /// What is wrong with the bytes of an idle volume: they are not the filesystem that it should have.
    pub fn foreign_content(&self) -> Option<Hold> {
        let wanted = self.volume.as_ref()?.spec.filesystem?;
        let contents = self.contents().into_iter().flatten();
        let mut kinds = contents.map(|content| content.kind.as_str());
        let found = kinds.find(|kind| *kind != wanted.name() && *kind != EMPTY_CONTENT)?;
        let (reason, message) = match found.parse::<FilesystemKind>() {
            Ok(found) => (
                HoldReason::FilesystemMismatch,
                format!(
                    "Volume {} carries {found}, and {wanted} is asked for.",
                    self.key
                ),
            ),
            Err(_) => (
                HoldReason::ForeignData,
                format!(
                    "Volume {} carries {found}, and {wanted} is asked for.",
                    self.key
                ),
            ),
        };
        Some(Hold::new(reason, message))
    }

    /// The size that the target was measured to serve; with a single copy that is used in place, not more than that
    /// copy has. None before it exists.
    pub fn served(&self) -> Option<Bytes> {
        let target = self.target.as_ref()?.status.as_ref()?.capacity?;
        if self.is_replicated() {
            return Some(target);
        }
        let mut least = target;
        for replica in &self.replicas {
            least = least.min(replica.status.as_ref()?.capacity?);
        }
        (!self.replicas.is_empty()).then_some(least)
    }
}

impl View {
    /// Every rung of the volume as it was last reported, the lower ones first.
    pub fn rungs(&self) -> impl Iterator<Item = &RungStatus> {
        let replicas = self
            .replicas
            .iter()
            .filter_map(|each| each.status.as_ref()?.rung.as_ref());
        let target = self
            .target
            .iter()
            .filter_map(|each| each.status.as_ref()?.rung.as_ref());
        let attached = self
            .attachments
            .iter()
            .filter_map(|each| each.status.as_ref());
        replicas
            .chain(target)
            .chain(attached.flat_map(|status| &status.rungs))
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

fn attachments_of(
    world: &World,
    key: &str,
    claim: Option<&PersistentVolumeClaim>,
    volume: Option<&Volume>,
) -> Vec<Arc<Attachment>> {
    if let Some((namespace, name)) = orphan_claim(key) {
        let waiting = world.attachments.group(&claim_group(namespace, name));
        return if world.claims.get(namespace, name).is_some() {
            Vec::new()
        } else {
            waiting
        };
    }
    let group = match (claim, volume) {
        (Some(claim), _) => claim_group(&claim.namespace().unwrap_or_default(), &claim.name_any()),
        (None, volume) => match volume.and_then(|volume| volume.spec.claim.as_ref()) {
            Some(claim) => claim_group(&claim.namespace, &claim.name),
            None => return Vec::new(),
        },
    };
    let belongs = |attachment: &Arc<Attachment>| {
        let attached = attachment
            .status
            .as_ref()
            .and_then(|status| status.volume.as_deref());
        // A use that waits is for whatever claim has that name, and the claim of this volume is gone.
        attached.map_or(claim.is_some(), |volume| volume == key)
    };
    world
        .attachments
        .group(&group)
        .into_iter()
        .filter(belongs)
        .collect()
}

/// Now, to the microsecond that objects can hold.
pub fn now() -> MicroTime {
    let now = Timestamp::now();
    MicroTime(now.round(Unit::Microsecond).unwrap_or(now))
}
