//! Random histories: what users, machines, lagging watches and crashes do.

use proptest::prelude::*;
use trellis_api::Rung;

use super::simulation::{Cluster, POOLS};
use super::step::Step;
use super::{CLASSES, create};

/// How many claims a history has at a time.
const CLAIMS: usize = 3;
/// How long a history is at most.
const STEPS_MAX: usize = 150;
/// Rounds over all volumes in which a claim is bound.
pub const ROUNDS_TO_BIND: usize = 6;

fn user_steps(nodes: usize) -> impl Strategy<Value = Step> {
    let claim = 0..CLAIMS;
    prop_oneof![
        4 => (claim.clone(), 0..CLASSES.len(), 1..200u64, any::<bool>())
            .prop_map(|(claim, class, mib, block)| Step::Create { claim, class, mib, block }),
        8 => (claim.clone(), 1..300u64).prop_map(|(claim, mib)| Step::Ask { claim, mib }),
        4 => (claim.clone(), 0..2usize, 0..nodes, any::<bool>()).prop_map(
            |(claim, which, node, read_only)| Step::Attach { claim, which, node, read_only }
        ),
        3 => (claim.clone(), 0..2usize).prop_map(|(claim, which)| Step::Detach { claim, which }),
        2 => claim.clone().prop_map(|claim| Step::DeleteClaim { claim }),
        1 => (claim.clone(), any::<bool>())
            .prop_map(|(claim, retain)| Step::Policy { claim, retain }),
        1 => (claim.clone(), 1..4u32).prop_map(|(claim, copies)| Step::Scale { claim, copies }),
        1 => (claim, 0..3usize).prop_map(|(claim, which)| Step::Replace { claim, which }),
    ]
}

fn machine_steps() -> impl Strategy<Value = Step> {
    let rungs = prop::sample::select(vec![
        None,
        None,
        Some(Rung::Replica),
        Some(Rung::Device),
        Some(Rung::Filesystem),
    ]);
    prop_oneof![
        3 => (0..POOLS.len(), 50..600u64).prop_map(|(pool, mib)| Step::PoolSize { pool, mib }),
        2 => (0..POOLS.len(), prop::sample::select(vec![50, 100, 150]))
            .prop_map(|(pool, percent)| Step::Overcommit { pool, percent }),
        2 => rungs.prop_map(|rung| Step::Break { rung }),
        2 => prop::option::of(0..POOLS.len()).prop_map(|pool| Step::LosePool { pool }),
        1 => Just(Step::Restart),
    ]
}

fn process_steps(cluster: Cluster) -> impl Strategy<Value = Step> {
    let volume = 0..8usize;
    let lost = prop_oneof![8 => Just(0u8), 1 => any::<u8>()];
    let nodes = 0..cluster.nodes;
    let seats = 0..cluster.nodes + if cluster.has_leaders { 2 } else { 1 };
    let several = u32::from(cluster.nodes > 1);
    prop_oneof![
        6 + 3 * several => (seats, 0..8usize, 1..4usize)
            .prop_map(|(seat, kind, count)| Step::Deliver { seat, kind, count }),
        3 => volume.clone().prop_map(|volume| Step::Plan { volume }),
        3 => (volume.clone(), lost).prop_map(|(volume, lost)| Step::Write { volume, lost }),
        2 + several => (nodes.clone(), volume.clone())
            .prop_map(|(node, volume)| Step::Look { node, volume }),
        2 + several => (nodes, volume).prop_map(|(node, volume)| Step::Work { node, volume }),
        3 => Just(Step::CatchUp),
    ]
}

/// What happens to nodes. One that is lost is lost for a while, or the history would never see what follows.
fn node_steps(cluster: Cluster) -> impl Strategy<Value = Step> {
    let node = 0..cluster.nodes;
    let leaders = u32::from(cluster.has_leaders);
    prop_oneof![
        2 => node.clone().prop_map(|node| Step::Die { node }),
        2 => node.clone().prop_map(|node| Step::Start { node }),
        2 => node.clone().prop_map(|node| Step::Freeze { node }),
        2 => node.clone().prop_map(|node| Step::Wake { node }),
        2 => (node.clone(), any::<bool>()).prop_map(|(node, data)| Step::Cut { node, data }),
        2 => node.clone().prop_map(|node| Step::Heal { node }),
        1 => node.prop_map(|node| Step::RestartNode { node }),
        3 => prop::sample::select(vec![5, 45, 45, 700]).prop_map(|seconds| Step::Wait { seconds }),
        2 * leaders => Just(Step::ChangeLeader),
        2 * leaders => (0..4usize).prop_map(|volume| Step::WriteLate { volume }),
    ]
}

/// Histories of a cluster.
pub fn histories(cluster: Cluster) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => user_steps(cluster.nodes),
        2 => machine_steps(),
        3 => node_steps(cluster),
        18 => process_steps(cluster)
    ];
    let steps = prop::collection::vec(step, 1..STEPS_MAX);
    // Most of the histories begin with two bound claims, or they would spend themselves on getting there.
    let classes = 0..CLASSES.len();
    let warm = prop_oneof![Just(None), (classes.clone(), classes).prop_map(Some)];
    (warm, steps).prop_map(|(warm, steps)| {
        let mut history = Vec::new();
        if let Some((first, second)) = warm {
            history.extend([create(0, CLASSES[first]), create(1, CLASSES[second])]);
            history.extend(vec![Step::CatchUp; ROUNDS_TO_BIND]);
        }
        history.extend(steps);
        history
    })
}
