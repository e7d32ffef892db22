//! Random histories: what users, machines, lagging watches and crashes do to planner and agent, and the rules that must
//! hold throughout.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use trellis_api::Rung;

use rules::Rules;
use simulation::{CLASSES, POOLS, Simulation, Step, claim_place};

mod machine;
mod rules;
mod simulation;
mod store;
mod targets;

/// How many claims a history has at a time.
const CLAIMS: usize = 3;
/// How long a history is at most.
const STEPS_MAX: usize = 150;
/// Rounds over all volumes in which a claim is bound.
const ROUNDS_TO_BIND: usize = 6;
/// Rounds over all volumes within which everything must be at rest.
const ROUNDS_MAX: usize = 40;

fn user_steps() -> impl Strategy<Value = Step> {
    let claim = 0..CLAIMS;
    prop_oneof![
        4 => (claim.clone(), 0..CLASSES.len(), 1..200u64, any::<bool>())
            .prop_map(|(claim, class, mib, block)| Step::Create { claim, class, mib, block }),
        8 => (claim.clone(), 1..300u64).prop_map(|(claim, mib)| Step::Ask { claim, mib }),
        4 => (claim.clone(), 0..2usize, any::<bool>())
            .prop_map(|(claim, which, read_only)| Step::Attach { claim, which, read_only }),
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

fn controller_steps() -> impl Strategy<Value = Step> {
    let volume = 0..8usize;
    let lost = prop_oneof![8 => Just(0u8), 1 => any::<u8>()];
    prop_oneof![
        6 => (0..7usize, 1..4usize).prop_map(|(kind, count)| Step::Deliver { kind, count }),
        3 => volume.clone().prop_map(|volume| Step::Plan { volume }),
        3 => (volume.clone(), lost).prop_map(|(volume, lost)| Step::Write { volume, lost }),
        2 => volume.clone().prop_map(|volume| Step::Look { volume }),
        2 => volume.prop_map(|volume| Step::Work { volume }),
        3 => Just(Step::CatchUp),
    ]
}

fn histories() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![2 => user_steps(), 1 => machine_steps(), 8 => controller_steps()];
    let steps = prop::collection::vec(step, 1..STEPS_MAX);
    // Most of the histories begin with two bound claims, or they would spend themselves on getting there.
    let warm = prop_oneof![
        Just(None),
        (0..CLASSES.len(), 0..CLASSES.len()).prop_map(Some)
    ];
    (warm, steps).prop_map(|(warm, steps)| {
        let claim = |claim, class| Step::Create {
            claim,
            class,
            mib: 64,
            block: false,
        };
        let mut history = Vec::new();
        if let Some((first, second)) = warm {
            history.extend([claim(0, first), claim(1, second)]);
            history.extend(vec![Step::CatchUp; ROUNDS_TO_BIND]);
        }
        history.extend(steps);
        history
    })
}

/// Takes the steps, lets everything come to rest, and returns the first rule that was broken.
fn run(history: &[Step]) -> Result<(), String> {
    let mut simulation = Simulation::new();
    let mut rules = Rules::default();
    for (index, step) in history.iter().enumerate() {
        let broken = |rule| format!("step {index}, {step:?}: {rule}");
        simulation.step(step).map_err(broken)?;
        rules.check(&simulation).map_err(broken)?;
    }
    simulation.settle(ROUNDS_MAX)?;
    rules.check(&simulation)?;
    // What is at rest without a pool has a reason; what is at rest with all of them has arrived.
    simulation.step(&Step::LosePool { pool: None })?;
    simulation.settle(ROUNDS_MAX)?;
    rules.check(&simulation)?;
    rules.check_at_rest(&simulation)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    // Fails if any history promises room twice, shows a size that was not measured, loops, or ends
    // without either the wanted size or a reason.
    #[test]
    fn every_history_keeps_the_rules(history in histories()) {
        if let Err(broken) = run(&history) {
            return Err(TestCaseError::fail(broken));
        }
    }
}

fn create(claim: usize, class: &str) -> Step {
    Step::Create {
        claim,
        class: CLASSES.iter().position(|each| *each == class).unwrap(),
        mib: 64,
        block: false,
    }
}

/// Histories in which a rule was broken once.
fn broken_once() -> Vec<Vec<Step>> {
    let rounds = |count| vec![Step::CatchUp; count];
    let attach = Step::Attach {
        claim: 1,
        which: 0,
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
                Step::Deliver { kind: 0, count: 1 },
                Step::PoolSize { pool: 0, mib: 50 },
                Step::Plan { volume: 2 },
                Step::Ask { claim: 0, mib: 65 },
                Step::Deliver { kind: 0, count: 1 },
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

// Fails if one of these comes back.
#[test]
fn what_was_mended_stays_mended() {
    for history in broken_once() {
        assert_eq!(run(&history), Ok(()), "{history:?}");
    }
}

// Fails if the histories come to rest because nothing in them ever moves.
#[test]
fn a_plain_history_arrives_where_it_should() {
    let mut simulation = Simulation::new();
    let rounds = |simulation: &mut Simulation| simulation.settle(ROUNDS_MAX).unwrap();
    let reported = |simulation: &Simulation| {
        let claim = simulation.store.get(&claim_place(0));
        claim.map(|claim| claim["status"]["capacity"]["storage"].clone())
    };
    let create = Step::Create {
        claim: 0,
        class: 0,
        mib: 64,
        block: false,
    };
    simulation.step(&create).unwrap();
    rounds(&mut simulation);
    assert_eq!(reported(&simulation), Some("64Mi".into()));
    let attach = Step::Attach {
        claim: 0,
        which: 0,
        read_only: false,
    };
    simulation.step(&attach).unwrap();
    simulation.step(&Step::Ask { claim: 0, mib: 100 }).unwrap();
    rounds(&mut simulation);
    assert_eq!(reported(&simulation), Some("100Mi".into()));
    let detach = Step::Detach { claim: 0, which: 0 };
    simulation.step(&detach).unwrap();
    simulation.step(&Step::DeleteClaim { claim: 0 }).unwrap();
    rounds(&mut simulation);
    assert_eq!(reported(&simulation), None);
    assert!(simulation.stored_reservations().is_empty());
}

// Fails if planner and agent write the conditions of a claim in turns without an end: one says why a copy has no place,
// the other why the filesystem does not grow.
#[test]
fn two_reasons_on_one_claim_come_to_rest() {
    let mut history = vec![create(0, "three"), create(1, "delete")];
    history.extend(vec![Step::CatchUp; ROUNDS_TO_BIND]);
    history.extend([
        Step::Attach {
            claim: 0,
            which: 0,
            read_only: true,
        },
        Step::Ask { claim: 0, mib: 158 },
        Step::Ask { claim: 1, mib: 243 },
        Step::CatchUp,
        Step::Replace { claim: 0, which: 0 },
    ]);
    assert_eq!(run(&history), Ok(()));
}
