//! Which claim it is, whose, and what it asks for: the head of everything that is shown of it.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use serde::Serialize;
use trellis_api::Bytes;
use trellis_api::kinds::PROVISIONER;

use crate::claim::class::Class;
use crate::claim::{provision, status};
use crate::stored::StoredClaim;

/// The annotation that names who made a persistent volume.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// A claim and its sizes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimHead {
    /// The claim.
    pub claim: String,
    /// Its namespace.
    pub namespace: String,
    /// The size that it asks for.
    pub requested: Option<Bytes>,
    /// The size that it reports.
    pub capacity: Option<Bytes>,
    /// What it asks for as it was written, if that is beyond all sizes or no size at all.
    #[serde(skip)]
    pub requested_text: Option<String>,
    /// The size that every layer should have once the request is met.
    #[serde(skip)]
    pub goal: Bytes,
    /// Whose it is.
    #[serde(skip)]
    pub origin: Origin,
}

/// Whose a claim is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// Ours, or ours to provision.
    #[default]
    Ours,
    /// Another provisioner serves it.
    Other(String),
    /// It has a persistent volume of this name that somebody made by hand.
    ByHand(String),
}

impl ClaimHead {
    /// The head of a claim.
    pub fn of(look: &StoredClaim) -> ClaimHead {
        let claim = look.claim.as_deref();
        let text = claim.and_then(status::requested_text);
        let is_size = requested(look).is_some_and(|size| size < Bytes::MAX);
        let namespace = claim.and_then(|claim| claim.namespace());
        ClaimHead {
            claim: claim.map(|claim| claim.name_any()).unwrap_or_default(),
            namespace: namespace.unwrap_or_default(),
            requested: requested(look),
            capacity: reported(look),
            requested_text: text.filter(|_| !is_size).map(str::to_owned),
            goal: goal(look),
            origin: Origin::of(look),
        }
    }
}

impl Origin {
    /// Whose the claim is.
    pub fn of(look: &StoredClaim) -> Origin {
        if look.stored.volume.is_some() {
            return Origin::Ours;
        }
        let class = look.class.as_deref();
        let of_class = class.filter(|class| !Class::is_ours(class));
        let of_class = of_class.map(|class| class.provisioner.clone());
        let volume = look.persistent_volume.as_deref();
        let of_volume = volume.and_then(|volume| volume.annotations().get(PROVISIONED_BY));
        let other = of_class.or_else(|| of_volume.filter(|name| *name != PROVISIONER).cloned());
        match (other, volume) {
            (Some(other), _) => Origin::Other(other),
            (None, Some(volume)) => Origin::ByHand(volume.name_any()),
            (None, None) => Origin::Ours,
        }
    }
}

/// The size that the claim should have once its request is met.
pub fn goal(look: &StoredClaim) -> Bytes {
    let requested = requested(look).unwrap_or_default();
    provision::goal(requested).unwrap_or(requested)
}

/// The size that the claim asks for.
pub fn requested(look: &StoredClaim) -> Option<Bytes> {
    look.claim.as_deref().and_then(status::requested)
}

/// The size that the claim reports.
pub fn reported(look: &StoredClaim) -> Option<Bytes> {
    look.claim.as_deref().and_then(status::reported)
}

/// Whether the claim asks for more than it has been measured to have.
pub fn is_growing(look: &StoredClaim) -> bool {
    let Some(claim) = look.claim.as_deref() else {
        return false;
    };
    let is_behind = status::reported(claim).unwrap_or_default() < goal(look);
    is_bound(claim) && (is_behind || status::progress(claim).is_some())
}

/// Whether the claim has a volume.
pub fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) == Some("Bound")
}

/// Kubernetes' word for where a claim stands.
pub(super) fn phase(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.status.as_ref()?.phase.as_deref()
}
