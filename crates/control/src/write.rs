//! What a plan wants done to the stored objects, as plain values.
//!
//! The writes of one plan do not depend on each other and are sent at the same time, so that they share one flush of
//! the store.

use futures::future::join_all;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Secret};
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, ValidationDirective,
};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

/// Who writes. Each role has a name of its own in `managedFields`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manager {
    /// The claim room.
    Claims,
    /// The volume room.
    Volumes,
    /// The node room.
    Node,
}

impl Manager {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Manager::Claims => "trellis-claims",
            Manager::Volumes => "trellis-volumes",
            Manager::Node => "trellis-node",
        }
    }
}

/// A kind that plans write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// `PersistentVolumeClaim`.
    Claim,
    /// `PersistentVolume`.
    PersistentVolume,
    /// `Volume`.
    Volume,
    /// `Target`.
    Target,
    /// `Replica`.
    Replica,
    /// `Attachment`.
    Attachment,
    /// `Pool`.
    Pool,
    /// `Pod`; only its conditions are written.
    Pod,
    /// `Secret`; only the node that may read it is written.
    Secret,
}

impl Object {
    fn resource(self) -> ApiResource {
        match self {
            Object::Claim => ApiResource::erase::<PersistentVolumeClaim>(&()),
            Object::PersistentVolume => ApiResource::erase::<PersistentVolume>(&()),
            Object::Volume => ApiResource::erase::<Volume>(&()),
            Object::Target => ApiResource::erase::<Target>(&()),
            Object::Replica => ApiResource::erase::<Replica>(&()),
            Object::Attachment => ApiResource::erase::<Attachment>(&()),
            Object::Pool => ApiResource::erase::<Pool>(&()),
            Object::Pod => ApiResource::erase::<Pod>(&()),
            Object::Secret => ApiResource::erase::<Secret>(&()),
        }
    }
}

impl Object {
    /// Whether it is one of Kubernetes' own kinds, which know how to merge lists.
    pub fn is_core(self) -> bool {
        matches!(
            self,
            Object::Claim | Object::PersistentVolume | Object::Pod | Object::Secret
        )
    }
}

/// One object of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its kind.
    pub object: Object,
    /// Its namespace; empty for kinds without one.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Place {
    /// An object without a namespace.
    pub fn named(object: Object, name: impl Into<String>) -> Self {
        Place {
            object,
            namespace: String::new(),
            name: name.into(),
        }
    }

    /// An object in a namespace.
    pub fn within(object: Object, namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Place {
            object,
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    fn api(&self, client: &Client) -> Api<DynamicObject> {
        let resource = self.object.resource();
        if self.namespace.is_empty() {
            Api::all_with(client.clone(), &resource)
        } else {
            Api::namespaced_with(client.clone(), &self.namespace, &resource)
        }
    }
}

/// One change of one stored object.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Stores a new object; one that exists already is left alone.
    Create(Place, Value),
    /// Merges into the object itself.
    Patch(Place, Value),
    /// Merges into its status. The conditions of Kubernetes' own kinds are merged one by one, so that those of others
    /// stay as they are.
    PatchStatus(Place, Value),
    /// Removes it, with all that it owns.
    Delete(Place),
}

impl Write {
    /// The object that is written.
    pub fn place(&self) -> &Place {
        match self {
            Write::Create(place, _)
            | Write::Patch(place, _)
            | Write::PatchStatus(place, _)
            | Write::Delete(place) => place,
        }
    }
}

/// What became of one write.
#[derive(Debug)]
pub enum Written {
    /// It is stored.
    Stored,
    /// The object is not what the plan thought it was. A fresh look at it is on its way.
    Outdated,
    /// It failed for another reason.
    Failed(kube::Error),
}

/// Sends all writes at once and waits for all answers, in the order of the writes.
pub async fn send(client: &Client, by: Manager, writes: &[Write]) -> Vec<Written> {
    let answers = send_with_versions(client, by, writes).await;
    answers.into_iter().map(|(written, _)| written).collect()
}

/// The same, with the version that each stored object has got.
pub async fn send_with_versions(
    client: &Client,
    by: Manager,
    writes: &[Write],
) -> Vec<(Written, Option<u64>)> {
    join_all(writes.iter().map(|write| send_one(client, by, write))).await
}

/// The version of an object as a number. Of two versions of one object the later one is larger.
pub fn version_of(object: &impl ResourceExt) -> Option<u64> {
    object.resource_version()?.parse().ok()
}

async fn send_one(client: &Client, by: Manager, write: &Write) -> (Written, Option<u64>) {
    tracing::trace!(by = by.name(), ?write, "write");
    let params = PatchParams {
        field_manager: Some(by.name().to_owned()),
        // The compiler has checked what we send; the server need not look for unknown fields.
        field_validation: Some(ValidationDirective::Ignore),
        ..PatchParams::default()
    };
    let answer = match write {
        Write::Create(place, body) => match serde_json::from_value::<DynamicObject>(body.clone()) {
            Ok(object) => {
                let params = PostParams {
                    field_manager: Some(by.name().to_owned()),
                    ..PostParams::default()
                };
                let answer = place.api(client).create(&params, &object).await;
                answer.map(|object| version_of(&object))
            }
            Err(error) => Err(kube::Error::SerdeError(error)),
        },
        Write::Patch(place, body) => place
            .api(client)
            .patch(&place.name, &params, &Patch::Merge(body))
            .await
            .map(|object| version_of(&object)),
        Write::PatchStatus(place, body) => {
            let patch = if place.object.is_core() {
                Patch::Strategic(body)
            } else {
                Patch::Merge(body)
            };
            let api = place.api(client);
            let answer = api.patch_status(&place.name, &params, &patch).await;
            answer.map(|object| version_of(&object))
        }
        Write::Delete(place) => place
            .api(client)
            .delete(&place.name, &DeleteParams::background())
            .await
            .map(|_| None),
    };
    match answer {
        Ok(version) => (Written::Stored, version),
        // Gone, already there, or changed meanwhile: the watch brings the truth.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
            (Written::Outdated, None)
        }
        Err(error) => (Written::Failed(error), None),
    }
}

/// What a strategic merge makes of a list of conditions, for models of the store.
#[cfg(test)]
pub(crate) fn merge_conditions(list: &mut Value, patch: &Value) {
    let mut merged = list.as_array().cloned().unwrap_or_default();
    for each in patch.as_array().into_iter().flatten() {
        let place = merged.iter().position(|old| old["type"] == each["type"]);
        let goes = each["$patch"] == "delete";
        match (place, goes) {
            (Some(place), true) => drop(merged.remove(place)),
            (Some(place), false) => merged[place] = each.clone(),
            (None, false) => merged.push(each.clone()),
            (None, true) => {}
        }
    }
    *list = Value::Array(merged);
}
