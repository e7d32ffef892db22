//! The objects that calls are translated into, and how a call waits for them.

use std::fmt::Debug;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client, Resource};
use serde_json::Value;
use tokio::time::Instant;
use tonic::{Code, Status};
use trellis_api::Hold;
use trellis_api::kinds::{
    Attachment, Pool, Replica, SYSTEM_NAMESPACE, Target, VOLUME_LABEL, Volume,
};

use crate::{codes, names};

/// How often a write is planned anew because the object was changed in between.
pub const CONFLICTS_MAX: usize = 8;

/// The objects behind the API.
#[derive(Clone)]
pub struct Objects(pub Client);

impl Objects {
    /// The volumes.
    pub fn volumes(&self) -> Api<Volume> {
        Api::all(self.0.clone())
    }

    /// The attachments that CSI makes.
    pub fn attachments(&self) -> Api<Attachment> {
        Api::namespaced(self.0.clone(), SYSTEM_NAMESPACE)
    }

    /// The targets.
    pub fn targets(&self) -> Api<Target> {
        Api::all(self.0.clone())
    }

    /// The nodes.
    pub fn nodes(&self) -> Api<Node> {
        Api::all(self.0.clone())
    }

    /// The volume with that id, if there is one.
    pub async fn find_volume(&self, id: &str) -> Result<Option<Volume>, Status> {
        if !names::can_be_object(id) {
            return Ok(None);
        }
        let found = self.volumes().get_opt(id).await;
        found.map_err(|error| codes::from_api(&error, &format!("volume {id}")))
    }

    /// The volume with that id, which has to exist.
    pub async fn volume(&self, id: &str) -> Result<Volume, Status> {
        let found = self.find_volume(id).await?;
        found.ok_or_else(|| codes::no_volume(id))
    }

    /// Changes a volume.
    pub async fn patch_volume(&self, id: &str, body: &Value) -> Result<Volume, kube::Error> {
        let how = PatchParams::default();
        self.volumes().patch(id, &how, &Patch::Merge(body)).await
    }

    /// Every volume.
    pub async fn all_volumes(&self) -> Result<Vec<Volume>, Status> {
        list(&self.volumes(), &ListParams::default()).await
    }

    /// Every use of every volume, whoever made it.
    pub async fn all_uses(&self) -> Result<Vec<Attachment>, Status> {
        list(&Api::all(self.0.clone()), &ListParams::default()).await
    }

    /// The uses of one volume.
    pub async fn uses(&self, volume: &str) -> Result<Vec<Attachment>, Status> {
        let mut uses = self.all_uses().await?;
        uses.retain(|each| each.volume() == Some(volume));
        Ok(uses)
    }

    /// Every pool.
    pub async fn pools(&self) -> Result<Vec<Pool>, Status> {
        list(&Api::all(self.0.clone()), &ListParams::default()).await
    }

    /// Every copy.
    pub async fn replicas(&self) -> Result<Vec<Replica>, Status> {
        list(&Api::all(self.0.clone()), &ListParams::default()).await
    }

    /// The copies of one volume.
    pub async fn copies(&self, volume: &str) -> Result<Vec<Replica>, Status> {
        let of_volume = ListParams::default().labels(&format!("{VOLUME_LABEL}={volume}"));
        list(&Api::all(self.0.clone()), &of_volume).await
    }

    /// Every node.
    pub async fn all_nodes(&self) -> Result<Vec<Node>, Status> {
        list(&self.nodes(), &ListParams::default()).await
    }
}

async fn list<K>(api: &Api<K>, which: &ListParams) -> Result<Vec<K>, Status>
where
    K: Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
{
    let listed = api.list(which).await;
    let listed = listed.map_err(|error| codes::from_api(&error, &K::plural(&())))?;
    Ok(listed.items)
}

/// Follows one object until `judge` answers, or until the time is over: then none. A watch that is interrupted goes on.
pub async fn follow<K, T>(
    api: Api<K>,
    name: &str,
    until: Instant,
    mut judge: impl FnMut(Option<K>) -> Option<T>,
) -> Option<T>
where
    K: Resource + Clone + Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let mut changes = watch_object(api, name).default_backoff().boxed();
    let waiting = async {
        while let Some(change) = changes.next().await {
            let Ok(seen) = change else { continue };
            if let Some(answer) = judge(seen) {
                return Some(answer);
            }
        }
        None
    };
    tokio::time::timeout_at(until, waiting).await.ok().flatten()
}

/// Waits until an Attachment that was deleted is gone. If the time is over first, the answer is what its node says that
/// holds it, or `otherwise`.
pub async fn wait_gone(
    api: Api<Attachment>,
    name: &str,
    until: Instant,
    otherwise: Hold,
) -> Result<(), Status> {
    let mut last = None;
    let gone = follow(api, name, until, |seen: Option<Attachment>| {
        let Some(seen) = seen else { return Some(()) };
        last = seen.status.and_then(|status| status.hold);
        None
    });
    if gone.await.is_some() {
        return Ok(());
    }
    Err(codes::refused_as(Code::Aborted, &last.unwrap_or(otherwise)))
}

/// Whether the API has refused a write because the object had changed.
pub fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// Whether the API does not have the object.
pub fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}
