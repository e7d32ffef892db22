//! What a plan wants done to the stored objects, as plain values.
//!
//! The writes of one plan do not depend on each other and are sent at the same time, so that they share one flush of
//! the store.

use futures::future::join_all;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, ValidationDirective,
};
use kube::{Api, Client};
use serde_json::Value;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

/// The name under which our writes stand in `managedFields`.
pub const FIELD_MANAGER: &str = "trellis";

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
        }
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
    /// Merges into its status.
    PatchStatus(Place, Value),
    /// Removes it, with all that it owns.
    Delete(Place),
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
pub async fn send(client: &Client, writes: &[Write]) -> Vec<Written> {
    join_all(writes.iter().map(|write| send_one(client, write))).await
}

async fn send_one(client: &Client, write: &Write) -> Written {
    let params = PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        // The compiler has checked what we send; the server need not look for unknown fields.
        field_validation: Some(ValidationDirective::Ignore),
        ..PatchParams::default()
    };
    let answer = match write {
        Write::Create(place, body) => match serde_json::from_value::<DynamicObject>(body.clone()) {
            Ok(object) => {
                let params = PostParams {
                    field_manager: Some(FIELD_MANAGER.to_owned()),
                    ..PostParams::default()
                };
                place.api(client).create(&params, &object).await.map(drop)
            }
            Err(error) => Err(kube::Error::SerdeError(error)),
        },
        Write::Patch(place, body) => place
            .api(client)
            .patch(&place.name, &params, &Patch::Merge(body))
            .await
            .map(drop),
        Write::PatchStatus(place, body) => place
            .api(client)
            .patch_status(&place.name, &params, &Patch::Merge(body))
            .await
            .map(drop),
        Write::Delete(place) => place
            .api(client)
            .delete(&place.name, &DeleteParams::background())
            .await
            .map(drop),
    };
    match answer {
        Ok(()) => Written::Stored,
        // Gone, already there, or changed meanwhile: the watch brings the truth.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Written::Outdated,
        Err(error) => Written::Failed(error),
    }
}
