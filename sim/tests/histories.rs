//! A fixed set of histories holds every rule, and histories of a broken engine do not.

use trellis_engine::{coordinator, member};
use trellis_sim::{Failure, Flaws, Options, run};

/// How many histories the fixed set has.
const FIXED: u64 = 1500;

/// How many of them a planted fault may take to be found.
const PLANTED: u64 = 200;

#[test]
fn every_rule_holds_in_every_fixed_history() {
    // Fails if an acknowledged write is lost, a size is wrong, or a volume does not come to rest.
    let mut failures = Vec::new();
    let (mut events, mut peeks) = (0, 0);
    for seed in 0..FIXED {
        let (stats, result) = run(seed, Options::default());
        events += stats.events;
        peeks += stats.peeks;
        if let Err(found) = result {
            failures.push(format!("seed {seed}: {found}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    // A simulator in which nothing happens proves nothing.
    assert!(events > FIXED * 10_000, "only {events} events");
    assert!(peeks > FIXED * 100, "only {peeks} looks at disks");
}

#[test]
fn one_seed_is_one_history() {
    // Fails if something depends on a clock, an address or the order of a hash table.
    for seed in [1, 7, 23] {
        let (first, result) = run(seed, Options::default());
        let (second, again) = run(seed, Options::default());
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
        assert_eq!(result, again);
    }
}

/// Whether one of the fixed histories finds the fault in the way that is expected.
fn is_found(flaws: Flaws, expected: impl Fn(&Failure) -> bool) -> bool {
    let options = Options {
        flaws,
        ..Options::default()
    };
    (0..PLANTED)
        .filter_map(|seed| run(seed, options).1.err())
        .any(|found| expected(&found.failure))
}

#[test]
fn an_acknowledgement_below_the_consistency_factor_is_found() {
    // Fails if a write that one replica has is as good as one that a quorum has.
    let flaws = Flaws {
        coordinator: coordinator::Flaws {
            ack_below_cf: true,
            ..coordinator::Flaws::default()
        },
        ..Flaws::default()
    };
    assert!(is_found(flaws, |it| matches!(it, Failure::Read(_))));
}

#[test]
fn a_replica_without_a_fence_is_found() {
    // Fails if a superseded coordinator can write and nobody sees it.
    let flaws = Flaws {
        member: member::Flaws { skip_fence: true },
        ..Flaws::default()
    };
    assert!(is_found(flaws, |it| matches!(
        it,
        Failure::Read(_) | Failure::SplitBrain
    )));
}

#[test]
fn a_volume_that_is_raised_before_its_replicas_is_found() {
    // Fails if a size may be served that CF replicas do not have.
    let flaws = Flaws {
        coordinator: coordinator::Flaws {
            raise_early: true,
            ..coordinator::Flaws::default()
        },
        ..Flaws::default()
    };
    assert!(is_found(flaws, |it| matches!(
        it,
        Failure::RaisedEarly { .. }
    )));
}

#[test]
fn a_look_at_a_replica_that_owes_an_answer_is_found() {
    // Fails if what a replica has not applied yet may be missing in a read of its disk.
    let flaws = Flaws {
        coordinator: coordinator::Flaws {
            peek_early: true,
            ..coordinator::Flaws::default()
        },
        ..Flaws::default()
    };
    assert!(is_found(flaws, |it| matches!(it, Failure::Read(_))));
}

#[test]
fn the_word_of_a_replica_that_was_given_up_is_found() {
    // Fails if replicas that were given up, or have lost their memory, can bring back what they hold.
    let flaws = Flaws {
        coordinator: coordinator::Flaws {
            skip_lineage: true,
            ..coordinator::Flaws::default()
        },
        ..Flaws::default()
    };
    assert!(is_found(flaws, |it| matches!(it, Failure::Read(_))));
}

#[test]
fn a_change_that_costs_a_full_copy_is_found() {
    // Fails if a replica that holds everything may go for one that does not yet.
    let flaws = Flaws {
        coordinator: coordinator::Flaws {
            change_early: true,
            ..coordinator::Flaws::default()
        },
        ..Flaws::default()
    };
    assert!(is_found(flaws, |it| matches!(
        it,
        Failure::FullCopyLost { .. }
    )));
}
