//! Faults that are planted, each of which one rule finds, and histories that keep every rule without them.

use serde_json::json;
use trellis_api::Rung;

use super::fabric::Flaw;
use super::histories::ROUNDS_TO_BIND;
use super::law::Law;
use super::rules::Rules;
use super::simulation::{Cluster, Simulation, claim_place};
use super::step::Step;
use super::{LED, ROUNDS_MAX, THREE, TWO, create, run, run_with};
use crate::world::volume_name;
use crate::write::{Object, Place, Write};

fn rounds(count: usize) -> Vec<Step> {
    vec![Step::CatchUp; count]
}

/// A bound claim of a class.
fn bound(class: &str) -> Vec<Step> {
    [vec![create(0, class)], rounds(ROUNDS_TO_BIND)].concat()
}

fn attach(which: usize, node: usize) -> Step {
    Step::Attach {
        claim: 0,
        which,
        node,
        read_only: false,
    }
}

/// The node of a volume's user is cut off from the API alone, and somebody else wants the volume.
fn taken_over() -> Vec<Step> {
    let cut = Step::Cut {
        node: 1,
        data: false,
    };
    let lost = vec![cut, Step::Wait { seconds: 45 }, attach(1, 2)];
    let user = [vec![attach(0, 1)], rounds(3)].concat();
    [bound("three"), user, lost, rounds(4)].concat()
}

/// The copy of node 2 falls behind while the volume grows. Then its node takes over, as soon as the others are lost.
fn taken_over_by_the_last(lost: &[usize]) -> Vec<Step> {
    let grow = vec![
        attach(0, 1),
        Step::CatchUp,
        Step::LosePool { pool: Some(2) },
        Step::Ask { claim: 0, mib: 100 },
    ];
    let mut history = [bound("three"), grow, rounds(3)].concat();
    history.extend(lost.iter().map(|node| Step::Die { node: *node }));
    history.extend([
        Step::LosePool { pool: None },
        Step::Wait { seconds: 45 },
        attach(1, 2),
    ]);
    history.extend(rounds(3));
    history
}

/// The rule that finds the flaw in this history, which keeps all rules without it.
fn found(flaw: Flaw, cluster: Cluster, history: &[Step]) -> Option<Law> {
    assert_eq!(run(cluster, history), Ok(()));
    run_with(Some(flaw), cluster, history)
        .err()
        .map(|breach| breach.law)
}

// Fails if nobody notices that two targets acknowledge.
#[test]
fn copies_that_do_not_fence_are_found() {
    let law = found(Flaw::NoFence, THREE, &taken_over());
    assert_eq!(law, Some(Law::OneAcknowledges));
}

// Fails if nobody notices that a target that was outbid takes its volume back.
#[test]
fn a_target_that_ignores_its_term_is_found() {
    let law = found(Flaw::NoTerm, THREE, &taken_over());
    assert_eq!(law, Some(Law::TermsRise));
}

// Fails if nobody notices that acknowledged writes are forgotten.
#[test]
fn a_target_that_trusts_too_few_copies_is_found() {
    let law = found(Flaw::TrustsOne, LED, &taken_over_by_the_last(&[0, 1]));
    assert_eq!(law, Some(Law::AcknowledgedStays));
}

// Fails if nobody notices that a volume has become smaller.
#[test]
fn a_target_that_takes_the_smallest_size_is_found() {
    let law = found(Flaw::TakesSmallest, LED, &taken_over_by_the_last(&[1]));
    assert_eq!(law, Some(Law::NothingShrinks));
}

// Fails if nobody notices that a copy is let go before another one holds everything.
#[test]
fn a_copy_that_is_let_go_early_is_found() {
    let replace = vec![Step::Replace { claim: 0, which: 0 }];
    let history = [bound("two"), replace, rounds(2)].concat();
    let law = found(Flaw::LetsGoEarly, TWO, &history);
    assert_eq!(law, Some(Law::CopiesStay));
}

// Fails if nobody notices that bytes are gone whose object is there.
#[test]
fn a_copy_that_nobody_deleted_is_missed() {
    let others = [vec![create(1, "two")], rounds(ROUNDS_TO_BIND)].concat();
    let replace = vec![Step::Replace { claim: 0, which: 0 }];
    let history = [bound("two"), others, replace, rounds(4)].concat();
    let law = found(Flaw::RemovesRetired, TWO, &history);
    assert_eq!(law, Some(Law::RemovedWasDeleted));
}

// Fails if nobody notices that a claim is finished before a use on another node has its size.
#[test]
fn a_claim_that_is_finished_early_is_found() {
    let grow = vec![
        attach(0, 1),
        Step::CatchUp,
        Step::Ask { claim: 0, mib: 128 },
    ];
    let history = [bound("two"), grow, rounds(3)].concat();
    let law = found(Flaw::DeviceLies, TWO, &history);
    assert_eq!(law, Some(Law::MeasuredFirst));
}

// Fails if nobody notices that reports go on for ever.
#[test]
fn a_target_that_wavers_is_found() {
    let history = [bound("two"), vec![attach(0, 1)]].concat();
    let law = found(Flaw::Wavers, TWO, &history);
    assert_eq!(law, Some(Law::ComesToRest));
}

/// A volume that is used on node 1 and whose filesystem cannot grow, at rest.
fn stuck() -> Simulation {
    let mut simulation = Simulation::new(TWO);
    let grow = vec![
        attach(0, 1),
        Step::Break {
            rung: Some(Rung::Filesystem),
        },
        Step::CatchUp,
        Step::Ask { claim: 0, mib: 128 },
    ];
    for step in [bound("two"), grow].concat() {
        simulation.step(&step).expect("no rule is broken");
    }
    simulation.settle(ROUNDS_MAX).expect("it comes to rest");
    simulation
}

/// What the rules say of a simulation at rest.
fn at_rest(simulation: &Simulation) -> Option<Law> {
    let broken = Rules::default().check_at_rest(simulation).err();
    broken.map(|breach| breach.law)
}

// Fails if nobody notices that a claim that does not grow has lost its reason.
#[test]
fn a_silent_claim_is_found() {
    let mut simulation = stuck();
    assert_eq!(at_rest(&simulation), None);
    let claim = simulation.store.get(&claim_place(0)).expect("a claim");
    let volume = volume_name(&super::simulation::read(claim)).expect("a volume");
    let kinds = [
        "Held",
        "ControllerResizeError",
        "FileSystemResizePending",
        "NodeResizeError",
    ];
    let gone = kinds.map(|kind| json!({ "type": kind, "$patch": "delete" }));
    let silenced = [
        (claim_place(0), json!({ "status": { "conditions": gone } })),
        (
            Place::named(Object::Volume, volume),
            json!({ "status": { "hold": null } }),
        ),
    ];
    for (place, body) in silenced {
        simulation.store.apply(&Write::PatchStatus(place, body));
    }
    assert_eq!(at_rest(&simulation), Some(Law::StuckSaysWhy));
}

// Fails if nobody notices that a use that does not exist has lost its reason.
#[test]
fn a_silent_use_is_found() {
    let mut simulation = stuck();
    let place = super::simulation::attachment_place(0, 0);
    let body = json!({ "status": { "phase": "Pending", "hold": null } });
    simulation.store.apply(&Write::PatchStatus(place, body));
    assert_eq!(at_rest(&simulation), Some(Law::StuckSaysWhy));
}

// Fails if nobody notices that a use has vanished.
#[test]
fn a_use_that_vanishes_is_missed() {
    let mut simulation = stuck();
    simulation.fabric.state().hosts[1].stages.clear();
    simulation.settle(ROUNDS_MAX).expect("it comes to rest");
    assert_eq!(at_rest(&simulation), Some(Law::UsersKeepTheirs));
}
