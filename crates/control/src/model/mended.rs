//! Histories in which a rule was broken once.

use trellis_api::kinds::Target;

use super::simulation::{Cluster, Simulation, claim_place, read};
use super::step::Step;
use super::{ROUNDS_MAX, THREE, TWO, create, run};
use crate::world::volume_name;
use crate::write::Object;

/// Histories in which a rule was broken once.
fn with_one_node() -> Vec<Vec<Step>> {
    let rounds = |count| vec![Step::CatchUp; count];
    let attach = Step::Attach {
        claim: 1,
        which: 0,
        node: 0,
        read_only: false,
    };
    let lose = |pool| Step::LosePool { pool: Some(pool) };
    let scale = |copies| Step::Scale { claim: 0, copies };
    let replace = Step::Replace { claim: 0, which: 0 };
    let delete = |claim| Step::DeleteClaim { claim };
    vec![
        // Copies that were removed before the volume was known to be served were made again, for ever.
        [vec![create(0, "three")], rounds(1), vec![scale(1)]].concat(),
        // With fewer copies asked for, the volume began without one that counted.
        [vec![lose(0), create(0, "two")], rounds(1), vec![scale(1)]].concat(),
        // With more copies asked for, it waited for one that nobody made.
        [vec![create(0, "two")], rounds(1), vec![scale(3)]].concat(),
        // The room of a copy that would be made again was given away.
        [vec![create(0, "two")], rounds(2), vec![delete(0), replace]].concat(),
        // The room of a copy that was added was given away before the copy was seen.
        [
            vec![create(0, "delete"), create(1, "three")],
            rounds(6),
            vec![
                Step::Ask { claim: 1, mib: 163 },
                Step::Ask { claim: 0, mib: 146 },
                Step::PoolSize { pool: 0, mib: 50 },
                Step::CatchUp,
                Step::PoolSize { pool: 2, mib: 50 },
                Step::Overcommit {
                    pool: 3,
                    percent: 50,
                },
                Step::Replace { claim: 1, which: 0 },
                Step::Create {
                    claim: 2,
                    class: 0,
                    mib: 81,
                    block: false,
                },
                Step::PoolSize { pool: 1, mib: 163 },
            ],
            rounds(2),
            vec![
                Step::Plan { volume: 2 },
                Step::Write { volume: 0, lost: 0 },
                Step::Plan { volume: 0 },
            ],
        ]
        .concat(),
        // Planner and agent reported two different growths of the same claim, in turns.
        [
            vec![create(0, "three"), create(1, "delete")],
            rounds(6),
            vec![
                lose(1),
                Step::Ask { claim: 0, mib: 65 },
                Step::CatchUp,
                Step::Ask { claim: 0, mib: 201 },
                Step::Overcommit {
                    pool: 0,
                    percent: 50,
                },
                Step::Attach {
                    claim: 0,
                    which: 0,
                    node: 0,
                    read_only: false,
                },
            ],
            rounds(2),
            vec![lose(0)],
        ]
        .concat(),
        // A request was lowered below what was already served, because the copies had not been measured again yet.
        [
            vec![create(0, "two"), create(1, "p0-only")],
            rounds(6),
            vec![
                Step::Ask { claim: 0, mib: 143 },
                Step::Deliver {
                    seat: 0,
                    kind: 0,
                    count: 1,
                },
                Step::PoolSize { pool: 0, mib: 50 },
                Step::Plan { volume: 2 },
                Step::Ask { claim: 0, mib: 65 },
                Step::Deliver {
                    seat: 0,
                    kind: 0,
                    count: 1,
                },
            ],
        ]
        .concat(),
        // Two volumes had different reasons why the same use had to wait.
        [
            vec![create(0, "delete"), create(1, "delete")],
            rounds(6),
            vec![delete(1), Step::CatchUp, attach, create(1, "two")],
            rounds(2),
            vec![lose(2)],
        ]
        .concat(),
    ]
}

/// Histories of two nodes.
fn with_two_nodes() -> Vec<Vec<Step>> {
    let rounds = |count| vec![Step::CatchUp; count];
    let attach = |which, node| Step::Attach {
        claim: 0,
        which,
        node,
        read_only: false,
    };
    vec![
        // A rung was compared with that of a lost node, which had another size, and was reported as new at every look.
        [
            vec![create(0, "three")],
            rounds(6),
            vec![attach(0, 1)],
            rounds(2),
            vec![Step::Freeze { node: 1 }, attach(1, 0)],
            vec![Step::Ask { claim: 0, mib: 65 }],
        ]
        .concat(),
    ]
}

/// Histories of three nodes.
fn with_three_nodes() -> Vec<Vec<Step>> {
    let rounds = |count| vec![Step::CatchUp; count];
    let attach = |which, node| Step::Attach {
        claim: 0,
        which,
        node,
        read_only: false,
    };
    let lost = vec![Step::Freeze { node: 1 }, Step::Wait { seconds: 45 }];
    vec![
        // A node was frozen while another one used its volume. When it got the volume back, its mount went on with what
        // it had in memory.
        [
            vec![create(0, "three")],
            rounds(6),
            vec![attach(0, 1)],
            rounds(3),
            lost,
            vec![attach(1, 2)],
            rounds(4),
            vec![Step::Detach { claim: 0, which: 1 }],
            rounds(3),
            vec![Step::Wake { node: 1 }],
            rounds(3),
        ]
        .concat(),
    ]
}

// Fails if one of these comes back.
#[test]
fn what_was_mended_stays_mended() {
    for history in with_one_node() {
        assert_eq!(run(Cluster::ONE, &history), Ok(()), "{history:?}");
    }
    for history in with_two_nodes() {
        assert_eq!(run(TWO, &history), Ok(()), "{history:?}");
    }
    for history in with_three_nodes() {
        assert_eq!(run(THREE, &history), Ok(()), "{history:?}");
    }
}

// Fails if an outdated report of the home's own node, which the API takes, gives the next target another term. The users
// of that target would be thrown out.
#[test]
fn a_target_that_was_moved_away_does_not_outbid_its_successor() {
    let mut simulation = Simulation::new(TWO);
    let attach = |which, node| Step::Attach {
        claim: 0,
        which,
        node,
        read_only: false,
    };
    let rounds = |count| vec![Step::CatchUp; count];
    let ended = vec![Step::Detach { claim: 0, which: 0 }];
    let before = [
        vec![create(0, "two")],
        rounds(6),
        vec![attach(0, 0)],
        rounds(3),
        ended,
    ];
    for step in before.concat() {
        simulation.step(&step).unwrap();
    }
    let claim = simulation.store.get(&claim_place(0)).unwrap();
    let key = volume_name(&read(claim)).unwrap();
    simulation.deliver_all();
    simulation.look(0, &key);
    simulation.work(0, &key);
    simulation.deliver_all();
    // The home looks while the target is still its own, and works when it is not.
    simulation.look(0, &key);
    simulation.step(&attach(1, 1)).unwrap();
    for _ in 0..ROUNDS_MAX {
        simulation.deliver_all();
        for key in simulation.leading().keys() {
            simulation.plan(&key).unwrap();
            simulation.write(&key, 0);
        }
        simulation.deliver_all();
        simulation.look(1, &key);
        simulation.work(1, &key);
    }
    let target = |simulation: &Simulation| {
        let all = simulation.store.all(Object::Target);
        read::<Target>(all[0])
    };
    assert_eq!(target(&simulation).spec.node, "n1");
    assert_eq!(
        simulation.fabric.acknowledging().into_values().next(),
        Some(vec![1])
    );
    let term = target(&simulation).spec.term;
    simulation.work(0, &key);
    simulation.settle(ROUNDS_MAX).unwrap();
    assert_eq!(target(&simulation).spec.term, term);
}
