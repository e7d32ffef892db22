//! What is to be written next for one volume, from our own kinds alone. Pure: computed from what is stored.
//!
//! A plan holds only writes that do not depend on each other. When they are stored, their events bring the volume here
//! again, and the next plan continues from what is stored then. Nothing is remembered between two plans.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use serde_json::json;
use trellis_api::Hold;
use trellis_api::kinds::{Placement, Volume, VolumeSpec, VolumeStatus};
use trellis_api::step::Step;

use super::copies::Adjusted;
use super::goals::{Grant, grant};
use super::parts::{make_parts, name_identities, replica_name};
use super::rooms::{NewCopy, Rooms};
use super::serving::{self, Rest};
use super::surroundings::Surroundings;
use super::{copies, recovery, removal, status};
use crate::plan::{Plan, Promise, sooner};
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// What a volume needs, and how it stands once that is written.
#[derive(Debug, Default, PartialEq)]
pub struct Planned {
    /// The writes.
    pub plan: Plan,
    /// The volume's status as it follows from what is stored now; none if nothing can be said yet.
    pub status: Option<VolumeStatus>,
}

impl From<Plan> for Planned {
    fn from(plan: Plan) -> Self {
        Planned { plan, status: None }
    }
}

/// The next writes for a volume.
pub fn plan(
    stored: &StoredVolume,
    volume: &Volume,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> Planned {
    if volume.metadata.deletion_timestamp.is_some() && volume.spec.discard {
        return removal::remove(stored, volume).into();
    }
    if volume.spec.placement.is_empty() {
        return decide_places(stored, volume, around.rooms, now).into();
    }
    if let Some(plan) = make_parts(stored, volume) {
        return plan.into();
    }
    if let Some(plan) = serving::assign(stored, volume, around, now) {
        return plan.into();
    }
    let Some(served) = stored.served() else {
        return Planned::default();
    };
    if let Some(plan) = recovery::record(stored, volume, now) {
        return plan.into();
    }
    let (copies_hold, mut look_again) = match copies::adjust(stored, volume, around, now) {
        Ok(Adjusted::By(plan)) => return plan.into(),
        Ok(Adjusted::Is { look_again }) => (None, look_again),
        Err(hold) => (Some(hold), None),
    };
    let granted = grant(stored, volume, around.rooms);
    let withheld = status::Withheld {
        refused: match &granted {
            Grant::Refused(hold) => Some(hold.clone()),
            Grant::Given | Grant::Now { .. } => None,
        },
        copies_hold,
        lost: serving::lost(stored, around.nodes),
    };
    let is_idle = serving::is_idle(stored, volume, around.nodes, now);
    let measured = status::measure(stored, volume, served, &withheld, is_idle, now);
    let mut plan = match granted {
        // The goals go first; what follows from them is told when it is measured.
        Grant::Now { writes, promises } => Plan {
            writes,
            promises,
            step: Some(Step::GoalsRaised),
            ..Plan::default()
        },
        // Who it is is stored before anything is said of it: its name outdates the version that a report is for.
        _ if volume.spec.volume_id.is_empty() => Plan::default(),
        Grant::Given | Grant::Refused(_) => status::report(volume, &measured, now),
    };
    plan.waits_for_room = withheld.waits_for_room();
    match serving::rest(stored, volume, around, now) {
        Rest::NotNow => {}
        Rest::LookAfter(pause) => look_again = sooner(look_again, Some(pause)),
        Rest::Now(write) => plan.writes.push(write),
    }
    plan.look_again_after = sooner(plan.look_again_after, look_again);
    plan.writes.extend(name_identities(stored));
    Planned {
        plan,
        status: Some(measured),
    }
}

/// A place for every first copy of a volume that will have that name, or for none.
pub fn place_copies(
    volume: &str,
    spec: &VolumeSpec,
    rooms: &dyn Rooms,
) -> Result<Vec<Placement>, Hold> {
    let (mut places, mut planned) = (Vec::new(), Vec::new());
    for index in 0..spec.replicas {
        let name = replica_name(volume, index);
        let copy = NewCopy {
            replica: &name,
            size: spec.capacity,
            thick: spec.thick,
            allow_shared_disk: spec.allow_shared_disk,
            beside: &places,
            apart_from: &places,
            planned: &planned,
        };
        let place = rooms.place(&spec.pools, copy)?;
        planned.push(Promise {
            pool: place.pool.clone(),
            size: spec.capacity,
            replica: name,
        });
        places.push(place);
    }
    Ok(places)
}

/// What the first copies of a volume are promised at their places.
pub fn first_promises(volume: &str, spec: &VolumeSpec, places: &[Placement]) -> Vec<Promise> {
    let promise = |(place, index): (&Placement, u32)| Promise {
        replica: replica_name(volume, index),
        pool: place.pool.clone(),
        size: spec.capacity,
    };
    places.iter().zip(0..).map(promise).collect()
}

/// A volume that was made without places for its copies gets them.
fn decide_places(
    stored: &StoredVolume,
    volume: &Volume,
    rooms: &dyn Rooms,
    now: &MicroTime,
) -> Plan {
    match place_copies(&stored.key, &volume.spec, rooms) {
        Ok(places) => Plan {
            promises: first_promises(&stored.key, &volume.spec, &places),
            writes: vec![Write::Patch(
                Place::named(Object::Volume, &stored.key),
                json!({
                    "metadata": { "resourceVersion": volume.resource_version() },
                    "spec": { "placement": places },
                }),
            )],
            ..Plan::default()
        },
        Err(hold) => Plan {
            waits_for_room: true,
            ..status::unplaced(volume, hold, now)
        },
    }
}
