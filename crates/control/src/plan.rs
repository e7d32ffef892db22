//! What a room wants done next, as plain values: writes, promises on pools, and events.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use trellis_api::kinds::ClaimRef;
use trellis_api::step::Step;
use trellis_api::{Bytes, Hold};

use crate::write::{Object, Place, Write};

/// What to do now.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// Objects to write, all at once.
    pub writes: Vec<Write>,
    /// How many of the writes, from the first on, come from the volume room; the others come from the claim room.
    pub from_volumes: usize,
    /// Promises on pools that the writes rely on.
    pub promises: Vec<Promise>,
    /// What to tell the claim's owner.
    pub notes: Vec<Note>,
    /// The named step that is taken when all writes are stored.
    pub step: Option<Step>,
    /// The volume waits for room, and is to be looked at again when some appears.
    pub waits_for_room: bool,
    /// There is something to report, but only if it is still true after this pause.
    pub look_again_after: Option<Duration>,
}

/// The shorter of two pauses.
pub fn sooner(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    one.into_iter().chain(other).min()
}

/// Room on a pool that a replica should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The replica.
    pub replica: String,
    /// The pool.
    pub pool: String,
    /// The total size that it will have.
    pub size: Bytes,
}

/// An event on an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The object.
    pub about: Place,
    /// Its uid, by which `kubectl describe` finds the event.
    pub uid: Option<String>,
    /// Whether it is a warning.
    pub warning: bool,
    /// Kubernetes' word for it.
    pub reason: &'static str,
    /// The sentence.
    pub message: String,
}

impl Note {
    /// Something that went as it should, about a claim.
    pub fn normal(claim: &PersistentVolumeClaim, reason: &'static str, message: String) -> Note {
        Note {
            about: claim_place(claim),
            uid: claim.uid(),
            warning: false,
            reason,
            message,
        }
    }

    /// Something that a person should look at, about a claim: the case, its code, and what to do.
    pub fn held(claim: &PersistentVolumeClaim, reason: &'static str, hold: &Hold) -> Note {
        let message = format!(
            "{} [{}] {}",
            hold.message,
            hold.reason,
            hold.reason.action()
        );
        Note {
            about: claim_place(claim),
            uid: claim.uid(),
            warning: true,
            reason,
            message,
        }
    }

    /// Something that the owner of a volume's claim should look at, told by somebody who knows only the volume.
    pub fn warning(claim: &ClaimRef, reason: &'static str, message: String) -> Note {
        Note {
            about: Place::within(Object::Claim, &claim.namespace, &claim.name),
            uid: Some(claim.uid.clone()),
            warning: true,
            reason,
            message,
        }
    }

    /// The same, told to a pod that uses the claim.
    pub fn to_pod(&self, pod: &Pod) -> Note {
        Note {
            about: Place::within(
                Object::Pod,
                pod.namespace().unwrap_or_default(),
                pod.name_any(),
            ),
            uid: pod.uid(),
            ..self.clone()
        }
    }
}

/// The place of a claim.
pub fn claim_place(claim: &PersistentVolumeClaim) -> Place {
    Place::within(
        Object::Claim,
        claim.namespace().unwrap_or_default(),
        claim.name_any(),
    )
}
