//! What is foretold, and that it is what the planner decides.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::watcher::Event;
use proptest::prelude::*;
use serde_json::json;
use trellis_api::kinds::{AtPath, Consumer, Placement, ReplicaState};

use super::*;
use crate::cache::{Cache, Changed};
use crate::embedded;
use crate::plan::Plan;
use crate::stored::now;
use crate::view::scenario::{self, Scenario};
use crate::world::World;
use crate::write::{Object, Write};

/// The stock of a claim alone on pool `default`, which can hold so much.
fn stock(look: &StoredClaim, pool: Bytes) -> Stock {
    Stock {
        pools: vec![Arc::new(scenario::pool(pool, 100))],
        replicas: look.stored.replicas.clone(),
        volumes: look.stored.volume.iter().cloned().collect(),
    }
}

fn judged(look: &StoredClaim, pool: Bytes, to: u64) -> Forecast {
    Forecast::of(look, &stock(look, pool), Bytes::gib(to), &now())
}

/// Layers as a person would note them: name, node, fate.
fn noted(forecast: &Forecast) -> Vec<String> {
    let note = |layer: &Layer| {
        let node = layer.node.as_deref().unwrap_or("-");
        format!("{} {node} {:?}", layer.layer, layer.would)
    };
    forecast.layers.iter().map(note).collect()
}

fn reason(forecast: &Forecast) -> Option<HoldReason> {
    forecast.hold.as_ref().map(|hold| hold.reason)
}

// Fails if a growth that would be done is foretold to be held, or a layer is left out.
#[test]
fn a_mounted_claim_with_room_would_rise() {
    let forecast = judged(&Scenario::OneUse.stored(), Bytes::gib(10), 4);
    let layers = [
        "replica on pool default - Rise",
        "volume - Rise",
        "device n1 Rise",
        "filesystem n1 Rise",
        "claim - Rise",
    ];
    assert_eq!(noted(&forecast), layers);
    assert_eq!(forecast.hold, None);
}

// Fails if a growth that the controller would refuse for want of room is foretold to be done.
#[test]
fn a_growth_beyond_the_pool_would_be_held() {
    let forecast = judged(&Scenario::OneUse.stored(), Bytes::gib(3), 4);
    assert_eq!(reason(&forecast), Some(HoldReason::NoSpaceInPool));
    assert_eq!(forecast.layers[0].would, Would::BeHeld);
    assert!(
        forecast.layers[1..]
            .iter()
            .all(|it| it.would == Would::Wait)
    );
}

// Fails if a use that would be held makes one on another node wait.
#[test]
fn a_use_that_would_be_held_holds_no_other_use() {
    let forecast = judged(&Scenario::TwoUsesOneHeld.stored(), Bytes::gib(10), 4);
    let layers = [
        "replica on pool default - Rise",
        "volume - Rise",
        "device n1 Rise",
        "filesystem n1 Rise",
        "device n2 Rise",
        "filesystem n2 BeHeld",
        "claim - Wait",
    ];
    assert_eq!(noted(&forecast), layers);
    assert_eq!(reason(&forecast), Some(HoldReason::ReadOnly));
}

// Fails if an idle filesystem is foretold to wait for a mount.
#[test]
fn an_idle_filesystem_would_grow_where_it_lies() {
    let forecast = judged(&Scenario::UnusedBehind.stored(), Bytes::gib(10), 4);
    assert_eq!(forecast.hold, None);
    let note = forecast.layers[2].note.as_deref().unwrap_or_default();
    assert!(note.contains("although it is not mounted"), "{note}");
}

// Fails if a read-only mount is foretold to grow.
#[test]
fn a_read_only_mount_would_be_held() {
    let mut look = Scenario::OneUse.stored();
    for attachment in &mut look.stored.attachments {
        Arc::make_mut(attachment).spec.consumer = Consumer::Mount(AtPath {
            path: "/mnt/data".to_owned(),
            read_only: true,
        });
    }
    let forecast = judged(&look, Bytes::gib(10), 4);
    assert_eq!(reason(&forecast), Some(HoldReason::ReadOnly));
}

// Fails if a size that no volume can have is foretold as if it were one.
#[test]
fn a_size_that_no_volume_can_have_would_be_held() {
    let forecast = judged(&Scenario::OneUse.stored(), Bytes::MAX, 1 << 30);
    assert_eq!(reason(&forecast), Some(HoldReason::SizeTooLarge));
}

/// A volume that was given a place, and whose copy is not stored yet.
fn new_volume(like: &StoredClaim, pool: &str, size: u64) -> Arc<Volume> {
    let mut volume = Arc::unwrap_or_clone(like.stored.volume.clone().expect("a volume"));
    volume.metadata.name = Some(format!("pvc-new-{pool}-{size}"));
    volume.spec.capacity = Bytes::gib(size);
    volume.spec.placement = vec![Placement {
        pool: pool.to_owned(),
        node: "n1".to_owned(),
    }];
    volume.status = None;
    Arc::new(volume)
}

// Fails if the room of a volume whose copies are not stored yet is foretold to be free.
#[test]
fn room_that_a_new_volume_was_given_is_not_free() {
    let look = Scenario::OneUse.stored();
    let mut stock = stock(&look, Bytes::gib(10));
    assert_eq!(
        Forecast::of(&look, &stock, Bytes::gib(4), &now()).hold,
        None
    );
    stock.volumes.push(new_volume(&look, "default", 7));
    let forecast = Forecast::of(&look, &stock, Bytes::gib(4), &now());
    assert_eq!(reason(&forecast), Some(HoldReason::NoSpaceInPool));
}

/// A claim of two gibibytes with one whole copy on each of these pools, behind a target if there are several.
fn spread(copies: &[usize], thick: bool) -> StoredClaim {
    let mut look = match copies.len() {
        1 => Scenario::OneUse.stored(),
        _ => Scenario::OneCopySilent.stored(),
    };
    let mut replicas = look.stored.replicas.clone();
    replicas.truncate(copies.len());
    for (replica, pool) in replicas.iter_mut().zip(copies) {
        let replica = Arc::make_mut(replica);
        replica.spec.pool = pool_name(*pool);
        replica.spec.node = "n1".to_owned();
        replica.spec.thick = thick;
    }
    let placement = replicas.iter().map(|each| Placement {
        pool: each.spec.pool.clone(),
        node: each.spec.node.clone(),
    });
    if let Some(volume) = &mut look.stored.volume {
        let spec = &mut Arc::make_mut(volume).spec;
        spec.placement = placement.collect();
        spec.thick = thick;
        spec.replicas = u32::try_from(copies.len()).expect("a few");
    }
    if let Some(target) = &mut look.stored.target
        && let Some(status) = &mut Arc::make_mut(target).status
    {
        status.replicas.truncate(copies.len());
        for seen in &mut status.replicas {
            (seen.state, seen.heard_at) = (ReplicaState::InSync, None);
        }
        let ids = status.replicas.iter().map(|seen| seen.id.clone());
        if let Some(members) = &mut status.members {
            members.replicas = ids.collect();
        }
    }
    look.stored.replicas = replicas;
    look
}

fn pool_name(index: usize) -> String {
    format!("pool-{index}")
}

/// What the planner does if the claim asks for `to`, in a process that has just listed everything.
fn planned(look: &StoredClaim, stock: &Stock, to: Bytes) -> Plan {
    fn put<K: ResourceExt + Clone>(cache: &Cache<K>, object: &Arc<K>) -> Vec<Changed<K>> {
        cache.apply(Event::Apply(K::clone(object)))
    }
    let world = World::new();
    let node = json!({ "metadata": { "name": "n1" } });
    let node: Node = serde_json::from_value(node).expect("a node");
    put(&world.nodes, &Arc::new(node));
    for pool in &stock.pools {
        put(&world.pools, pool);
    }
    for replica in &stock.replicas {
        for change in put(&world.replicas, replica) {
            world.note_replica(&change);
        }
    }
    for volume in &stock.volumes {
        for change in put(&world.volumes, volume) {
            world.note_volume(&change);
        }
    }
    if let Some(target) = &look.stored.target {
        put(&world.targets, target);
    }
    for attachment in &look.stored.attachments {
        put(&world.attachments, attachment);
    }
    if let Some(persistent_volume) = &look.persistent_volume {
        put(&world.persistent_volumes, persistent_volume);
    }
    let claim = look.claim.as_deref().expect("a claim");
    put(&world.claims, &Arc::new(asking(claim, to)));
    let gathered = StoredClaim::gather(&world, &look.stored.key);
    embedded::decide(&world, &gathered).plan
}

/// The size that the plan gives every copy as its goal.
fn goals(plan: &Plan) -> Vec<String> {
    let goal = |write: &Write| match write {
        Write::Patch(place, body) if place.object == Object::Replica => {
            Some(body["spec"]["capacity"].as_str()?.to_owned())
        }
        _ => None,
    };
    plan.writes.iter().filter_map(goal).collect()
}

/// What the plan tells the claim's owner that the growth failed with.
fn refusal(plan: &Plan) -> Option<String> {
    let failed = |note: &&crate::plan::Note| note.reason == "VolumeResizeFailed";
    plan.notes
        .iter()
        .find(failed)
        .map(|note| note.message.clone())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    // Fails if a growth is foretold that the planner refuses, one is foretold to be held that it grants, or another
    // size or another reason is foretold than the planner's.
    #[test]
    fn a_forecast_is_what_the_planner_decides(
        copies in prop::sample::select(vec![vec![0], vec![0, 1], vec![0, 1, 2], vec![0, 0, 1]]),
        pools in prop::collection::vec((0u64..12, prop::sample::select(vec![50u32, 100, 150])), 3),
        others in prop::collection::vec((0usize..3, 1u64..6), 0..3),
        new in prop::collection::vec((0usize..3, 1u64..4), 0..2),
        is_lost in prop::bool::weighted(0.1),
        thick: bool,
        to in prop::sample::select(vec![2u64, 3, 4, 6, 9, 1 << 30]),
    ) {
        let look = spread(&copies, thick);
        let mut stock = Stock {
            volumes: look.stored.volume.iter().cloned().collect(),
            replicas: look.stored.replicas.clone(),
            pools: Vec::new(),
        };
        for (index, (usable, overcommit)) in pools.iter().enumerate().skip(usize::from(is_lost)) {
            let mut pool = scenario::pool(Bytes::gib(*usable), *overcommit);
            pool.metadata.name = Some(pool_name(index));
            pool.spec.path = format!("/{}", pool_name(index));
            stock.pools.push(Arc::new(pool));
        }
        for (index, (pool, size)) in others.iter().enumerate() {
            let mut other = scenario::replica(*size, Some(*size));
            other.metadata.name = Some(format!("other-{index}"));
            other.spec.volume = "pvc-other".to_owned();
            other.spec.pool = pool_name(*pool);
            stock.replicas.push(Arc::new(other));
        }
        for (pool, size) in &new {
            stock.volumes.push(new_volume(&look, &pool_name(*pool), *size));
        }
        let to = Bytes::gib(to);
        let forecast = Forecast::of(&look, &stock, to, &now());
        let plan = planned(&look, &stock, to);
        match &forecast.hold {
            None if to == Bytes::gib(2) => {
                prop_assert_eq!(goals(&plan).len(), 0);
                prop_assert_eq!(refusal(&plan), None);
            }
            None => {
                let all = vec![forecast.to.to_quantity(); copies.len()];
                prop_assert_eq!(goals(&plan), all);
                let promised: Bytes = plan.promises.iter().map(|each| each.size).max().unwrap_or_default();
                prop_assert_eq!(promised, forecast.to);
            }
            Some(hold) => {
                prop_assert_eq!(goals(&plan).len(), 0);
                let said = refusal(&plan).unwrap_or_default();
                prop_assert!(said.contains(hold.reason.code()), "{} / {:?}", said, hold);
                prop_assert!(said.contains(&hold.message), "{} / {:?}", said, hold);
            }
        }
    }
}
