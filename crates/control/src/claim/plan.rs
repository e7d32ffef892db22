//! What is to be written next for one volume. Pure: computed from a view of the stored objects.
//!
//! A plan holds only writes that do not depend on each other. When they are stored, their events bring the volume here
//! again, and the next plan continues from what is stored then. Nothing is remembered between two plans.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use trellis_api::kinds::Volume;
use trellis_api::step::Step;
use trellis_api::{Bytes, Hold};

use super::{copies, grow, provision, reclaim, recovery, space, status};
use crate::view::View;
use crate::write::{Object, Place, Write};

/// What to do now.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// Objects to write, all at once.
    pub writes: Vec<Write>,
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
}

impl Note {
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

/// Where a copy lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceOfCopy {
    /// The pool.
    pub pool: String,
    /// The pool's node.
    pub node: String,
}

/// A copy that needs a place.
#[derive(Clone, Copy, Debug)]
pub struct NewCopy<'a> {
    /// The name that its replica will have.
    pub replica: &'a str,
    /// Its size.
    pub size: Bytes,
    /// Whether every byte is allocated at once.
    pub thick: bool,
    /// Whether it may be on a filesystem that has another copy of the volume.
    pub allow_shared_disk: bool,
    /// Where the other copies are: no pool has two.
    pub beside: &'a [PlaceOfCopy],
    /// Where the copies that stay are: no filesystem has two, unless that is allowed.
    pub apart_from: &'a [PlaceOfCopy],
    /// What the same plan promises to other copies, which the ledger does not know yet.
    pub planned: &'a [Promise],
}

/// A copy that should grow where it is.
#[derive(Clone, Copy, Debug)]
pub struct LargerCopy<'a> {
    /// Its replica.
    pub replica: &'a str,
    /// Its pool.
    pub pool: &'a str,
    /// The size that it has.
    pub from: Bytes,
    /// The total size that it should have.
    pub to: Bytes,
    /// Whether every byte is allocated at once.
    pub thick: bool,
    /// What the same plan promises to other copies, which the ledger does not know yet.
    pub planned: &'a [Promise],
}

/// Where there is room. Implemented by the pools under the ledger's lock, and by tests.
pub trait Rooms {
    /// A pool among `names` (any, if empty) with room for a new copy, and its node. A replica that was already promised
    /// room keeps its pool. A pool with another copy of the volume is never taken, and one on a filesystem with another
    /// copy only if that is allowed. Pools on nodes without a copy are preferred.
    fn place(&self, names: &[String], copy: NewCopy<'_>) -> Result<PlaceOfCopy, Hold>;
    /// Whether copies on this pool are to move away.
    fn is_drained(&self, pool: &str) -> bool;
    /// Whether a copy can have its new size on its pool.
    fn room(&self, copy: LargerCopy<'_>) -> Result<(), Hold>;
}

/// The next writes for the volume in `view`.
pub fn plan(view: &View, rooms: &dyn Rooms, now: &MicroTime) -> Plan {
    match (&view.claim, &view.volume) {
        (Some(claim), _) if claim.metadata.deletion_timestamp.is_some() => {
            reclaim::release_claim(view, claim)
        }
        (Some(claim), None) => provision::begin(view, claim, rooms, now),
        (Some(claim), Some(volume)) => match provision::complete(view, claim, volume)
            .or_else(|| recovery::record(view, claim, volume, now))
        {
            Some(plan) => plan,
            None => match copies::adjust(view, volume, rooms) {
                Ok(Some(plan)) => plan,
                Ok(None) => {
                    let plan = grow::advance(view, claim, volume, rooms, None, now);
                    tell_of_copies(view, claim, volume, None, plan, now)
                }
                Err(hold) => {
                    let plan = grow::advance(view, claim, volume, rooms, Some(hold.clone()), now);
                    tell_of_copies(view, claim, volume, Some(&hold), plan, now)
                }
            },
        },
        (None, _) => reclaim::reclaim(view),
    }
}

/// Makes the claim say what holds its copies, and whose pools are full. Other writes to the claim come first: they
/// outdate what was seen.
fn tell_of_copies(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    hold: Option<&Hold>,
    mut plan: Plan,
    now: &MicroTime,
) -> Plan {
    let place = claim_place(claim);
    let is_of_claim = |write: &Write| matches!(write, Write::PatchStatus(of, _) if *of == place);
    if plan.writes.iter().any(is_of_claim) {
        return plan;
    }
    let full = space::full_pools(view, volume);
    let said = [(status::COPIES, hold), (status::POOL_FULL, full.as_ref())];
    if let Some(body) = status::of_copies(claim, &said, now) {
        plan.writes
            .push(Write::PatchStatus(place, status::pinned(claim, body)));
        let new = said
            .into_iter()
            .filter_map(|(kind, hold)| Some((kind, hold?)))
            .filter(|(kind, hold)| !status::says(claim, kind, hold));
        plan.notes
            .extend(new.map(|(kind, hold)| Note::held(claim, kind, hold)));
    }
    plan
}

/// The place of a claim.
pub fn claim_place(claim: &PersistentVolumeClaim) -> Place {
    Place::within(
        Object::Claim,
        claim.namespace().unwrap_or_default(),
        claim.name_any(),
    )
}
