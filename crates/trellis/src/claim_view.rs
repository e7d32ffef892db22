//! Everything that is stored about a claim, loaded from the service, and what it means.

pub mod health;
pub mod ladder;
#[cfg(test)]
pub mod samples;

use std::sync::Arc;

use futures::TryFutureExt;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use trellis_api::kinds::{Attachment, Replica, Target, VOLUME_LABEL, Volume};
use trellis_api::{Bytes, Hold, HoldReason, Rung};
use trellis_control::claim::{provision, status};
use trellis_control::stored::StoredVolume;
use trellis_control::view::View;
use trellis_control::volume::redundancy::unasked;
use trellis_control::world::volume_name;

use self::health::{degraded, other_provisioner};
use crate::connect::Service;
use crate::exit::from_service;
use crate::output::Tone;

/// Loads one claim and all that belongs to it.
pub async fn load(service: &Service, name: &str) -> anyhow::Result<View> {
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
    let stock = Stock {
        persistent_volumes: persistent_volume.into_iter().collect(),
        classes: class.into_iter().collect(),
        volumes: volume.into_iter().collect(),
        targets: target.into_iter().collect(),
        replicas,
        attachments,
    };
    Ok(stock.view(claim))
}

/// Loads every claim of a namespace, or of all, that is ours or could become so. In the order of their
/// names.
pub async fn load_all(client: &Client, namespace: Option<&str>) -> anyhow::Result<Vec<View>> {
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
    let stock = Stock {
        persistent_volumes,
        classes,
        volumes,
        targets,
        replicas,
        attachments,
    };
    let views = claims.into_iter().map(|claim| stock.view(claim));
    let is_ours = |view: &View| other_provisioner(view).is_none();
    let mut views: Vec<View> = views.filter(is_ours).collect();
    views.sort_by_key(|view| {
        view.claim
            .as_ref()
            .map(|each| (each.namespace(), each.name_any()))
    });
    Ok(views)
}

/// What was loaded besides the claims.
struct Stock {
    persistent_volumes: Vec<PersistentVolume>,
    classes: Vec<StorageClass>,
    volumes: Vec<Volume>,
    targets: Vec<Target>,
    replicas: Vec<Replica>,
    attachments: Vec<Attachment>,
}

impl Stock {
    fn view(&self, claim: PersistentVolumeClaim) -> View {
        let key = volume_name(&claim).unwrap_or_default();
        let namespace = claim.namespace();
        let attached = |each: &&Attachment| {
            let names_it = each.spec.claim_name == Some(claim.name_any());
            let names_it = names_it && each.namespace() == namespace;
            each.volume().map_or(names_it, |volume| volume == key)
        };
        let replicas = self.replicas.iter().filter(|each| each.spec.volume == key);
        View {
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
            ..View::default()
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

/// The size that the claim should have once its request is met.
pub fn goal(view: &View) -> Bytes {
    let requested = requested(view).unwrap_or_default();
    provision::goal(requested).unwrap_or(requested)
}

/// The size that the claim asks for.
pub fn requested(view: &View) -> Option<Bytes> {
    view.claim.as_deref().and_then(status::requested)
}

/// The size that the claim asks for, as a person wrote it if it is beyond all sizes or no size at all.
pub fn asks_for(view: &View, show: impl Fn(Option<Bytes>) -> String) -> String {
    let text = view.claim.as_deref().and_then(status::requested_text);
    match requested(view).filter(|size| *size < Bytes::MAX) {
        Some(size) => show(Some(size)),
        None => text.map_or_else(|| show(None), str::to_owned),
    }
}

/// The size that the claim reports.
pub fn reported(view: &View) -> Option<Bytes> {
    view.claim.as_deref().and_then(status::reported)
}

/// Whether the claim asks for more than it has been measured to have.
pub fn growing(view: &View) -> bool {
    let Some(claim) = view.claim.as_deref() else {
        return false;
    };
    bound(claim)
        && (status::reported(claim).unwrap_or_default() < goal(view)
            || status::progress(claim).is_some())
}

/// Whether the claim has a volume.
pub fn bound(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) == Some("Bound")
}

fn phase(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.status.as_ref()?.phase.as_deref()
}

/// A claim's state in one word.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// It has no volume yet, and nothing is in the way.
    Pending,
    /// It has the size that it asks for.
    Bound,
    /// It is on its way to the size that it asks for.
    Growing,
    /// Something holds it.
    Held(Held),
    /// It has the size that it asks for, but fewer copies than it asks for.
    Degraded(Held),
    /// Another provisioner serves it.
    Foreign(String),
    /// It is being deleted.
    Terminating,
    /// It has lost its volume.
    Lost,
}

impl State {
    /// The state of a claim.
    pub fn of(view: &View) -> State {
        if let Some(provisioner) = other_provisioner(view) {
            return State::Foreign(provisioner);
        }
        if let Some(held) = held(view) {
            return State::Held(held);
        }
        let lacks = || degraded(view, Timestamp::now()).map(|hold| Held::new(None, hold));
        let claim = view.claim.as_deref();
        let deleted = claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_some());
        match claim.and_then(phase) {
            _ if deleted => State::Terminating,
            Some("Bound") if growing(view) => State::Growing,
            Some("Bound") => lacks().map_or(State::Bound, State::Degraded),
            Some("Lost") => State::Lost,
            _ => State::Pending,
        }
    }

    /// The tone of the word.
    pub fn tone(&self) -> Tone {
        match self {
            State::Bound => Tone::Good,
            State::Pending | State::Growing | State::Terminating | State::Foreign(_) => {
                Tone::Moving
            }
            State::Held(_) | State::Degraded(_) | State::Lost => Tone::Bad,
        }
    }

    /// The state without its code.
    pub fn word(&self) -> &'static str {
        match self {
            State::Pending => "Pending",
            State::Bound => "Bound",
            State::Growing => "Growing",
            State::Held(_) => "Held",
            State::Degraded(_) => "Degraded",
            State::Foreign(_) => "Foreign",
            State::Terminating => "Terminating",
            State::Lost => "Lost",
        }
    }

    /// What is wrong, if something is.
    pub fn fault(&self) -> Option<&Held> {
        match self {
            State::Held(held) | State::Degraded(held) => Some(held),
            _ => None,
        }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.fault() {
            Some(held) => write!(out, "{} {}", self.word(), held.hold.reason),
            None => out.pad(self.word()),
        }
    }
}

/// What holds a claim, and where.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Held {
    /// The rung that cannot rise; none if what is held is not a rung.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rung: Option<Rung>,
    /// The reason and this case of it.
    #[serde(flatten)]
    pub hold: Hold,
    /// What to do.
    pub action: &'static str,
}

impl Held {
    fn new(rung: Option<Rung>, hold: Hold) -> Held {
        let action = hold.reason.action();
        Held { rung, hold, action }
    }
}

/// What keeps a claim from what is asked of it, the lowest rung first; none if nothing does.
pub fn held(view: &View) -> Option<Held> {
    let claim = view.claim.as_deref()?;
    let user = view.stored.attachments.first();
    if let Some(user) = user.filter(|_| claim.metadata.deletion_timestamp.is_some()) {
        let message = format!(
            "It is still in use at {} of node {}.",
            user.spec.consumer.path(),
            user.spec.node
        );
        return Some(Held::new(None, Hold::new(HoldReason::InUse, message)));
    }
    let lost = || {
        let hold = view.stored.volume.as_ref()?.status.as_ref()?.hold.clone();
        let hold = hold.filter(|hold| hold.reason == HoldReason::NodeLost)?;
        Some(Held::new(None, hold))
    };
    let unprovisioned = || condition(claim, status::HELD).map(|hold| Held::new(None, hold));
    let on_rung = || {
        let rungs = ladder::rungs(view);
        let kept = rungs.into_iter().find(|rung| rung.state.kept())?;
        Some(Held::new(Some(kept.rung), kept.hold?))
    };
    let in_use = || {
        let mut holds = view
            .stored
            .attachments
            .iter()
            .filter_map(|each| each.status.as_ref()?.hold.clone());
        holds.next().map(|hold| Held::new(None, hold))
    };
    let copies = || {
        let kinds = [status::POOL_FULL, status::COPIES];
        let found = kinds.into_iter().find_map(|kind| condition(claim, kind));
        found.map(|hold| Held::new(None, hold))
    };
    // If the target cannot be asked, what it said before is no news of the volume.
    let target = || {
        let status = view.stored.target.as_ref()?.status.as_ref()?;
        unasked(status)?;
        Some(Held::new(Some(Rung::Volume), status.hold.clone()?))
    };
    let inside = || {
        let hold = view.stored.foreign_content()?;
        Some(Held::new(Some(Rung::Filesystem), hold))
    };
    unprovisioned()
        .or_else(lost)
        .or_else(inside)
        .or_else(target)
        .or_else(on_rung)
        .or_else(in_use)
        .or_else(copies)
}

/// The hold that a condition of the claim reports.
pub fn condition(claim: &PersistentVolumeClaim, kind: &str) -> Option<Hold> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    let found = conditions
        .iter()
        .find(|each| each.type_ == kind && each.status == "True")?;
    let code = found.reason.as_deref()?;
    let reason = HoldReason::ALL
        .iter()
        .find(|reason| reason.code() == code)?;
    Some(Hold::new(
        *reason,
        found.message.clone().unwrap_or_default(),
    ))
}
