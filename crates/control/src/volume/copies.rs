//! How many copies a replicated volume has. One is added if some are missing; one is removed if there are too many. A
//! copy that somebody deletes is replaced in the same way.
//!
//! This module only makes and deletes objects. The target decides which copies count, from what it sees of them
//! (`members`), and agrees that with the copies themselves. A copy keeps its bytes until it no longer counts, so there
//! are never too few.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{Resource, ResourceExt};
use serde_json::json;
use trellis_api::kinds::{CopiesWanted, Members, Placement, Replica, ReplicaState, Volume};
use trellis_api::{Hold, HoldReason};

use super::parts::{make_replica, replica_name, was_served};
use super::recovery::{self, is_given_up};
use super::rooms::{NewCopy, Rooms};
use super::surroundings::{Surroundings, left};
use crate::plan::{Plan, Promise, sooner};
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// How many copies can count at a time.
const COPIES_MAX: usize = 5;

/// The copies that are to stay: nobody has deleted them or given them up.
pub fn staying(view: &StoredVolume) -> impl Iterator<Item = &std::sync::Arc<Replica>> {
    view.replicas
        .iter()
        .filter(|each| each.metadata.deletion_timestamp.is_none() && !is_given_up(view, each))
}

/// The copies that are asked for. Until the volume has been served, these are all existing copies: it starts with the
/// copies that it was made with, even one that somebody has deleted meanwhile.
pub fn wanted(view: &StoredVolume, volume: &Volume) -> CopiesWanted {
    let all = || view.replicas.iter().map(|each| each.identity()).collect();
    let served = was_served(volume);
    let stay = || staying(view).map(|each| each.identity()).collect();
    let mut staying: Vec<String> = if served { stay() } else { all() };
    staying.sort_unstable();
    CopiesWanted {
        count: volume.spec.replicas,
        consistency_factor: volume.spec.consistency_factor,
        staying,
    }
}

/// Who counts to start with: the copies that counted when the target was last seen, or else all copies, with a factor
/// that they can reach. At most as many as can count at a time are named; the copies know the rest.
pub fn to_begin_with(view: &StoredVolume, wanted: &CopiesWanted) -> Members {
    let agreed = view.target.as_ref();
    let agreed = agreed.and_then(|target| target.status.as_ref()?.members.clone());
    let mut members = agreed.unwrap_or_else(|| {
        let count = u32::try_from(wanted.staying.len()).unwrap_or(u32::MAX);
        let asked = wanted.consistency_factor;
        Members {
            version: 1,
            consistency_factor: if asked <= count { asked } else { count / 2 + 1 },
            replicas: wanted.staying.clone(),
        }
    });
    members.replicas.truncate(COPIES_MAX);
    let count = u32::try_from(members.replicas.len()).unwrap_or(u32::MAX);
    members.consistency_factor = members.consistency_factor.clamp(1, count.max(1));
    members
}

/// Whether a volume has the copies that are asked for.
#[derive(Debug, PartialEq)]
pub enum Adjusted {
    /// It has. A copy whose node is lost is looked at again after the pause.
    Is {
        /// The pause.
        look_again: Option<Duration>,
    },
    /// The next step towards them.
    By(Plan),
}

impl Adjusted {
    const DONE: Adjusted = Adjusted::Is { look_again: None };
}

/// The next step towards the copies that are asked for. A hold says why they cannot be had.
pub fn adjust(
    view: &StoredVolume,
    volume: &Volume,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> Result<Adjusted, Hold> {
    let rooms = around.rooms;
    if !volume.spec.is_behind_target() {
        return single(volume);
    }
    if !was_served(volume) {
        // It starts with the copies that it was made with; one that was removed would be made again.
        return Ok(Adjusted::DONE);
    }
    if let Some(plan) = recovery::give_up(view) {
        return Ok(Adjusted::By(plan));
    }
    let wanted = usize::try_from(volume.spec.replicas).unwrap_or(usize::MAX);
    let there = staying(view).count();
    if there < wanted {
        return add(view, volume, rooms, None).map(Adjusted::By);
    }
    if there > wanted {
        let step = dispensable(view).map(let_go);
        return Ok(step.map_or(Adjusted::DONE, Adjusted::By));
    }
    let (going, look_again) = to_replace(view, around, now);
    if let Some(replica) = going {
        // Without a place for its successor there is nothing to begin.
        add(view, volume, rooms, Some(replica))?;
        return Ok(Adjusted::By(let_go(replica)));
    }
    Ok(Adjusted::Is { look_again })
}

/// A copy that should be replaced: its pool is to be emptied, or its node has been lost for long enough. Otherwise how
/// long it is until one has.
fn to_replace<'a>(
    view: &'a StoredVolume,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> (Option<&'a Replica>, Option<Duration>) {
    let mut look_again = None;
    for replica in staying(view) {
        if around.rooms.is_drained(&replica.spec.pool) {
            return (Some(replica), None);
        }
        let Some(since) = around.nodes.lost_since(&replica.spec.node) else {
            continue;
        };
        match left(since.0, around.waits.copy_lost, now) {
            Some(left) => look_again = sooner(look_again, Some(left)),
            None => return (Some(replica), None),
        }
    }
    (None, look_again)
}

/// Tells the target which copies are asked for, if that has changed.
pub(super) fn tell_target(view: &StoredVolume, volume: &Volume) -> Option<Plan> {
    let target = view.target.as_ref()?;
    let wanted = wanted(view, volume);
    let place = Place::named(Object::Target, target.name_any());
    let body = json!({ "spec": { "copies": wanted } });
    (target.spec.copies != wanted).then(|| Plan {
        writes: vec![Write::Patch(place, body)],
        ..Plan::default()
    })
}

/// A copy goes as soon as it can be spared.
fn let_go(replica: &Replica) -> Plan {
    let place = Place::named(Object::Replica, replica.name_any());
    Plan {
        writes: vec![Write::Delete(place)],
        ..Plan::default()
    }
}

fn single(volume: &Volume) -> Result<Adjusted, Hold> {
    if volume.spec.replicas == 1 {
        return Ok(Adjusted::DONE);
    }
    let message = format!(
        "Volume {} was made with a single copy, which is used where it lies; it cannot have {}. A claim of a class \
         with several replicas can.",
        volume.name_any(),
        volume.spec.replicas
    );
    Err(Hold::new(HoldReason::ClassInvalid, message))
}

/// One more copy; `going` is about to go and leaves its disk to it.
fn add(
    view: &StoredVolume,
    volume: &Volume,
    rooms: &dyn Rooms,
    going: Option<&Replica>,
) -> Result<Plan, Hold> {
    let owner = volume.controller_owner_ref(&());
    let name = (0..)
        .map(|index| replica_name(&view.key, index))
        .find(|name| view.replicas.iter().all(|each| each.name_any() != *name));
    let (Some(owner), Some(name)) = (owner, name) else {
        return Ok(Plan::default());
    };
    let place = |replica: &std::sync::Arc<Replica>| Placement {
        pool: replica.spec.pool.clone(),
        node: replica.spec.node.clone(),
    };
    let goes =
        |replica: &Replica| going.is_some_and(|going| going.name_any() == replica.name_any());
    let beside: Vec<Placement> = view.replicas.iter().map(place).collect();
    let staying = staying(view).filter(|each| !goes(each));
    let apart_from: Vec<Placement> = staying.map(place).collect();
    let size = volume.spec.capacity;
    let copy = NewCopy {
        replica: &name,
        size,
        thick: volume.spec.thick,
        allow_shared_disk: volume.spec.allow_shared_disk,
        beside: &beside,
        apart_from: &apart_from,
        planned: &[],
    };
    let place = rooms.place(&volume.spec.pools, copy)?;
    let promise = Promise {
        replica: name.clone(),
        pool: place.pool.clone(),
        size,
    };
    Ok(Plan {
        writes: vec![make_replica(view, volume, &owner, name, &place)],
        promises: vec![promise],
        ..Plan::default()
    })
}

/// The copy to remove: one that does not hold everything rather than one that does, and the latest of these.
fn dispensable(view: &StoredVolume) -> Option<&Replica> {
    let seen = view
        .target
        .as_ref()
        .and_then(|target| target.status.as_ref())
        .map(|status| status.replicas.as_slice())
        .unwrap_or_default();
    let is_whole = |replica: &Replica| {
        let id = replica.identity();
        let found = seen.iter().find(|each| each.id == id);
        found.is_some_and(|each| each.state == ReplicaState::InSync)
    };
    staying(view)
        .map(std::sync::Arc::as_ref)
        .max_by_key(|each| (!is_whole(each), each.creation_timestamp(), each.name_any()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::nodes::Nodes;
    use crate::volume::rooms::LargerCopy;
    use crate::volume::surroundings::Waits;
    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;
    use std::sync::Arc;

    struct Anywhere;

    /// The pool that is to be emptied.
    const DRAINED: &str = "drained";

    impl Rooms for Anywhere {
        fn place(&self, _: &[String], copy: NewCopy<'_>) -> Result<Placement, Hold> {
            Ok(Placement {
                pool: format!("p{}", copy.beside.len()),
                node: "n".to_owned(),
            })
        }

        fn is_drained(&self, pool: &str) -> bool {
            pool == DRAINED
        }

        fn room(&self, _: LargerCopy<'_>) -> Result<(), Hold> {
            Ok(())
        }
    }

    /// The next step with every node there; none if there is none.
    fn adjusted(view: &StoredVolume, volume: &Volume) -> Result<Option<Plan>, Hold> {
        adjusted_among(view, volume, &Nodes::there(&["n"]), 0)
    }

    fn adjusted_among(
        view: &StoredVolume,
        volume: &Volume,
        nodes: &Nodes,
        second: i64,
    ) -> Result<Option<Plan>, Hold> {
        let around = Surroundings {
            rooms: &Anywhere,
            nodes,
            waits: Waits::USUAL,
        };
        let now = MicroTime(Timestamp::from_second(second).expect("a time"));
        adjust(view, volume, around, &now).map(|adjusted| match adjusted {
            Adjusted::Is { .. } => None,
            Adjusted::By(plan) => Some(plan),
        })
    }

    fn volume(replicas: u32, factor: u32) -> Volume {
        serde_json::from_value(json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume",
            "metadata": { "name": "v", "uid": "u" },
            "spec": {
                "capacity": "1Gi", "class": "c", "replicas": replicas, "consistencyFactor": factor,
                "via": "fuse", "claim": { "namespace": "d", "name": "c", "uid": "x" },
            },
            "status": { "capacity": "1Gi" },
        }))
        .expect("a volume")
    }

    fn view(states: &[&str]) -> StoredVolume {
        let replica = |index: usize| {
            let replica = json!({
                "apiVersion": "trellis.dev/v1alpha1", "kind": "Replica",
                "metadata": {
                    "name": format!("v-{index}"), "uid": format!("u{index}"),
                    "creationTimestamp": format!("2024-01-01T00:00:0{index}Z"),
                },
                "spec": {
                    "volume": "v", "volumeId": "u", "pool": format!("p{index}"), "node": "n",
                    "capacity": "1Gi",
                },
            });
            Arc::new(serde_json::from_value(replica).expect("a replica"))
        };
        let seen: Vec<_> = states
            .iter()
            .enumerate()
            .map(|(index, state)| json!({ "id": format!("u{index}"), "state": state }))
            .collect();
        let target = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Target",
            "metadata": { "name": "v" },
            "spec": { "volume": "v", "node": "n", "capacity": "1Gi" },
            "status": { "replicas": seen },
        });
        StoredVolume {
            key: "v".to_owned(),
            target: Some(Arc::new(serde_json::from_value(target).expect("a target"))),
            replicas: (0..states.len()).map(replica).collect(),
            ..StoredVolume::default()
        }
    }

    // Fails if a missing copy is not made, gets the name of another, or more than one is made at a time.
    #[test]
    fn a_missing_copy_is_added_under_a_free_name() {
        let mut view = view(&["InSync", "InSync", "InSync"]);
        view.replicas.remove(1);
        let plan = adjusted(&view, &volume(3, 2)).expect("possible");
        let plan = plan.expect("something to do");
        let [Write::Create(place, _)] = plan.writes.as_slice() else {
            panic!("one object is made: {plan:?}");
        };
        assert_eq!(place.name, "v-1");
        assert_eq!(plan.promises.len(), 1);
    }

    // Fails if the copy that goes is one that is needed more than another.
    #[test]
    fn the_copy_that_goes_is_the_one_that_is_worth_least() {
        for (states, gone) in [
            (["InSync", "InSync", "InSync"], "v-2"),
            (["InSync", "Repairing", "InSync"], "v-1"),
            (["Away", "InSync", "InSync"], "v-0"),
        ] {
            let plan = adjusted(&view(&states), &volume(2, 2)).expect("possible");
            let plan = plan.expect("something to do");
            let [Write::Delete(place)] = plan.writes.as_slice() else {
                panic!("one object goes: {plan:?}");
            };
            assert_eq!(place.name, gone);
        }
    }

    // Fails if a pool that shall be empty keeps a copy, or another copy goes.
    #[test]
    fn a_copy_moves_away_from_a_pool_that_is_drained() {
        let mut view = view(&["InSync", "InSync"]);
        let replica = Arc::make_mut(&mut view.replicas[0]);
        replica.spec.pool = DRAINED.to_owned();
        let plan = adjusted(&view, &volume(2, 2)).expect("possible");
        let plan = plan.expect("something to do");
        let [Write::Delete(place)] = plan.writes.as_slice() else {
            panic!("one object goes: {plan:?}");
        };
        assert_eq!(place.name, "v-0");
        assert_eq!(plan.promises, []);
    }

    // Fails if the copy of a lost node is given up at once, or never.
    #[test]
    fn a_copy_is_replaced_when_its_node_has_been_lost_for_long() {
        let view = view(&["InSync", "InSync"]);
        let since = Timestamp::from_second(100).expect("a time");
        let lost = Nodes::there(&[]).without("n", since);
        let wait = i64::try_from(Waits::USUAL.copy_lost.as_secs()).expect("a time");
        let step = |second| adjusted_among(&view, &volume(2, 2), &lost, second);
        assert_eq!(step(100 + wait - 1), Ok(None));
        let plan = step(100 + wait)
            .expect("possible")
            .expect("something to do");
        assert!(matches!(plan.writes.as_slice(), [Write::Delete(_)]));
    }

    // Fails if a volume that has not been served yet loses one of its first copies, which would be made again.
    #[test]
    fn a_volume_begins_with_its_first_copies() {
        let three = view(&["InSync", "InSync", "InSync"]);
        let mut volume = volume(1, 1);
        volume.status = None;
        assert_eq!(adjusted(&three, &volume), Ok(None));
    }

    // Fails if the copies could not reach the factor, or one is kept that nobody asked for.
    #[test]
    fn the_factor_is_one_that_the_copies_can_reach() {
        let three = view(&["InSync", "InSync", "InSync"]);
        let begins = |view: &StoredVolume, volume: &Volume| {
            to_begin_with(view, &wanted(view, volume)).consistency_factor
        };
        assert_eq!(begins(&three, &volume(3, 3)), 3);
        let two = view(&["InSync", "InSync"]);
        assert_eq!(begins(&two, &volume(2, 3)), 2);
        assert_eq!(begins(&two, &volume(2, 1)), 1);
        assert_eq!(adjusted(&two, &volume(2, 1)), Ok(None));
    }
}
