//! From a larger wish to larger goals.
//!
//! The volume says what is wanted. Target and copies get it as their goal as soon as there is room for it on every
//! pool, all at once: a goal is only a wish, and the ladder on the node decides, from what it has observed, which layer
//! may rise when.

use std::sync::Arc;

use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::{Replica, Volume};
use trellis_api::{Bytes, Hold, HoldReason};

use super::rooms::{LargerCopy, Rooms};
use crate::plan::Promise;
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// What becomes of the size that a volume wants.
#[derive(Debug, PartialEq)]
pub enum Grant {
    /// Every layer has it as its goal.
    Given,
    /// It can be given now, by these writes, which rely on these promises.
    Now {
        /// The goals of target and copies.
        writes: Vec<Write>,
        /// Room on the pools.
        promises: Vec<Promise>,
    },
    /// It cannot be given now. Nothing below the volume changes, and I/O goes on.
    Refused(Hold),
}

/// The goal of a volume: what it wants, and never less than any copy already has, which can only be kept.
pub fn goal(stored: &StoredVolume, volume: &Volume) -> Bytes {
    volume.spec.capacity.max(stored.committed())
}

/// Gives every layer the volume's goal, if there is room for it.
pub fn grant(stored: &StoredVolume, volume: &Volume, rooms: &dyn Rooms) -> Grant {
    let goal = goal(stored, volume);
    let replicas = &stored.replicas;
    let is_given = stored
        .target
        .as_ref()
        .is_none_or(|target| target.spec.capacity == goal)
        && replicas.iter().all(|replica| replica.spec.capacity == goal);
    if is_given {
        return Grant::Given;
    }
    if goal > Bytes::VOLUME_MAX {
        let message = format!(
            "{goal} is asked for; the largest volume is {}.",
            Bytes::VOLUME_MAX
        );
        return Grant::Refused(Hold::new(HoldReason::SizeTooLarge, message));
    }
    match make_room(stored, goal, volume.spec.thick, rooms) {
        Ok(promises) => Grant::Now {
            writes: set_goals(stored, goal),
            promises,
        },
        Err(hold) => Grant::Refused(hold),
    }
}

/// Room on the pool of every copy, or none at all.
fn make_room(
    stored: &StoredVolume,
    goal: Bytes,
    thick: bool,
    rooms: &dyn Rooms,
) -> Result<Vec<Promise>, Hold> {
    let copies = copies_at(stored, goal, thick, rooms).into_iter();
    copies
        .map(|(promise, room)| room.map(|()| promise))
        .collect()
}

/// What each copy would be promised if the volume's goal were `goal`, and whether there is room for that. A copy leaves
/// to those before it what they would be promised.
pub fn copies_at(
    stored: &StoredVolume,
    goal: Bytes,
    thick: bool,
    rooms: &dyn Rooms,
) -> Vec<(Promise, Result<(), Hold>)> {
    let mut planned: Vec<Promise> = Vec::new();
    let copy = |replica: &Arc<Replica>| {
        let (name, pool) = (replica.name_any(), &replica.spec.pool);
        let has = replica.status.as_ref().and_then(|status| status.capacity);
        let has = replica.spec.capacity.max(has.unwrap_or_default());
        let larger = LargerCopy {
            replica: &name,
            pool,
            from: has,
            to: goal,
            thick,
            planned: &planned,
        };
        // What a copy already has is not asked for again, however full its pool is now.
        let room = if goal > has {
            rooms.room(larger)
        } else {
            Ok(())
        };
        let promise = Promise {
            pool: pool.clone(),
            size: goal,
            replica: name,
        };
        planned.push(promise.clone());
        (promise, room)
    };
    stored.replicas.iter().map(copy).collect()
}

fn set_goals(stored: &StoredVolume, goal: Bytes) -> Vec<Write> {
    let body = || json!({ "spec": { "capacity": goal } });
    let target = stored.target.iter();
    let target = target.map(|each| Place::named(Object::Target, each.name_any()));
    let replicas = stored.replicas.iter();
    let replicas = replicas.map(|each| Place::named(Object::Replica, each.name_any()));
    let places = target.chain(replicas);
    places.map(|place| Write::Patch(place, body())).collect()
}
