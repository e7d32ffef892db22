//! Random histories: what users, machines, lagging watches and crashes do to planners and agents, on one, two and three
//! nodes, and the rules that must hold throughout.
//!
//! `law` names the rules. `rules` looks whether they hold, and so do the machines themselves (`fabric`, `targets`).
//! `flaws` shows that each of them can fail. `mended` has the histories in which one was broken.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use fabric::Flaw;
use histories::{ROUNDS_TO_BIND, histories};
use law::Breach;
use rules::Rules;
use simulation::{Cluster, Simulation, claim_place};
use step::Step;

mod agents;
mod fabric;
mod flaws;
mod histories;
mod law;
mod machine;
mod mended;
mod planners;
mod rules;
mod simulation;
mod step;
mod store;
mod targets;

/// The classes of claims.
const CLASSES: [&str; 6] = ["delete", "retain", "waits", "p0-only", "two", "three"];
/// Rounds over all volumes within which everything must be at rest.
const ROUNDS_MAX: usize = 40;
/// How long a node must be lost before its copies are made anew, and a bit more.
const LONG: Step = Step::Wait { seconds: 700 };

/// Takes the steps, lets everything come to rest, and returns the first rule that was broken.
fn run(cluster: Cluster, history: &[Step]) -> Result<(), Breach> {
    run_with(None, cluster, history)
}

fn run_with(flaw: Option<Flaw>, cluster: Cluster, history: &[Step]) -> Result<(), Breach> {
    let mut simulation = Simulation::new(cluster);
    if let Some(flaw) = flaw {
        simulation.fabric.plant(flaw);
    }
    let mut rules = Rules::default();
    for (index, step) in history.iter().enumerate() {
        let there = || format!("step {index}, {step:?}");
        simulation.step(step).map_err(|breach| breach.at(there()))?;
        rules
            .check(&simulation)
            .map_err(|breach| breach.at(there()))?;
    }
    come_to_rest(&mut simulation, &mut rules).map_err(|breach| breach.at("with what is lost"))?;
    simulation.step(&LONG)?;
    come_to_rest(&mut simulation, &mut rules).map_err(|breach| breach.at("after a long time"))?;
    // What is at rest without a pool or a node has a reason; what is at rest with all of them has arrived.
    simulation.heal_all();
    come_to_rest(&mut simulation, &mut rules).map_err(|breach| breach.at("with all back"))?;
    rules.check_at_rest(&simulation)
}

fn come_to_rest(simulation: &mut Simulation, rules: &mut Rules) -> Result<(), Breach> {
    simulation.settle(ROUNDS_MAX)?;
    rules.check(simulation)
}

/// A claim of a class.
fn create(claim: usize, class: &str) -> Step {
    Step::Create {
        claim,
        class: CLASSES.iter().position(|each| *each == class).unwrap(),
        mib: 64,
        block: false,
    }
}

fn random(cluster: Cluster, history: &[Step]) -> Result<(), TestCaseError> {
    run(cluster, history).map_err(|breach| TestCaseError::fail(breach.to_string()))
}

const TWO: Cluster = Cluster {
    nodes: 2,
    has_leaders: false,
};
const THREE: Cluster = Cluster {
    nodes: 3,
    has_leaders: false,
};
const LED: Cluster = Cluster {
    nodes: 3,
    has_leaders: true,
};

/// So many histories as `PROPTEST_CASES` says, or a part of them.
fn config(part: u32) -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig {
        failure_persistence: None,
        cases: usual.cases.div_ceil(part),
        ..usual
    }
}

proptest! {
    #![proptest_config(config(1))]

    // Fails if any history promises room twice, shows a size that was not measured, loops, or ends
    // without either the wanted size or a reason.
    #[test]
    fn every_history_keeps_the_rules(history in histories(Cluster::ONE)) {
        random(Cluster::ONE, &history)?;
    }
}

proptest! {
    #![proptest_config(config(2))]

    // Fails if two nodes acknowledge writes of a volume, or a copy is lost with a node.
    #[test]
    fn every_history_of_two_nodes_keeps_the_rules(history in histories(TWO)) {
        random(TWO, &history)?;
    }

    // Fails if a copy that is made anew costs one that is needed.
    #[test]
    fn every_history_of_three_nodes_keeps_the_rules(history in histories(THREE)) {
        random(THREE, &history)?;
    }

    // Fails if a planner that has lost the lease does harm with what it still sends.
    #[test]
    fn every_history_with_two_planners_keeps_the_rules(history in histories(LED)) {
        random(LED, &history)?;
    }
}

// Fails if the histories come to rest because nothing in them ever moves.
#[test]
fn a_plain_history_arrives_where_it_should() {
    let mut simulation = Simulation::new(Cluster::ONE);
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
        node: 0,
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
            node: 0,
            read_only: true,
        },
        Step::Ask { claim: 0, mib: 158 },
        Step::Ask { claim: 1, mib: 243 },
        Step::CatchUp,
        Step::Replace { claim: 0, which: 0 },
    ]);
    assert_eq!(run(Cluster::ONE, &history), Ok(()));
}
