//! Replicas of which nothing is heard.
#![allow(clippy::unwrap_used)]

#[path = "common/puppet.rs"]
mod puppet;

use puppet::{Stage, replica};
use trellis_engine::coordinator::{Effect, Event, ReplicaState};
use trellis_engine::proto::{Answer, Request};

/// A volume of three whose replicas answer calls.
fn hearing() -> Stage {
    let mut stage = Stage::serving(3, 4 << 20);
    for number in 0..3 {
        let session = u64::try_from(number).unwrap() + 1;
        stage.tell(Event::TakesCalls {
            replica: replica(number),
            session,
        });
    }
    stage
}

fn state(stage: &Stage, number: u128) -> ReplicaState {
    stage.coordinator.status().replicas[&replica(number)].state
}

fn heard_ms(stage: &Stage, number: u128) -> Option<u64> {
    stage.coordinator.status().replicas[&replica(number)].heard_ms
}

/// Lets time pass in steps, in which the others answer what they are asked. What the silent one is asked is kept.
fn pass(stage: &mut Stage, ms: u64, silent: u128) {
    for _ in 0..ms / 100 {
        stage.wait(100);
        for number in (0..3).filter(|number| *number != silent) {
            for request in stage.take(number) {
                assert_eq!(request, Request::Call);
                stage.answer(number, Answer::Heard);
            }
        }
    }
}

#[test]
fn whoever_says_nothing_while_nothing_is_asked_is_called_and_then_silent() {
    // Fails if a frozen replica passes for one that is well because nobody writes; or if its redundancy counts.
    let mut stage = hearing();
    let began = stage.now;
    pass(&mut stage, 900, 1);
    assert!(stage.take(1).is_empty(), "it is called too early");
    pass(&mut stage, 1000, 1);
    assert_eq!(stage.take(1), [Request::Call], "once");
    assert_eq!(state(&stage, 1), ReplicaState::InSync);
    assert!(stage.coordinator.status().redundancy_met);
    pass(&mut stage, 600, 1);
    assert_eq!(state(&stage, 1), ReplicaState::Silent);
    assert_eq!(heard_ms(&stage, 1), Some(began));
    assert_eq!(state(&stage, 0), ReplicaState::InSync);
    assert!(!stage.coordinator.status().redundancy_met);
    // Its answer, however late, makes it well again.
    stage.answer(1, Answer::Heard);
    assert_eq!(state(&stage, 1), ReplicaState::InSync);
    assert_eq!(heard_ms(&stage, 1), None);
    assert!(stage.coordinator.status().redundancy_met);
}

#[test]
fn whoever_stays_silent_is_given_up_and_stays_silent_until_it_speaks_or_is_gone() {
    // Fails if what is shown of a frozen replica changes again and again while it is greeted anew, or if one whose
    // process is gone is said to be frozen.
    let mut stage = hearing();
    let began = stage.now;
    pass(&mut stage, 8000, 1);
    let closed =
        |effect: &Effect| matches!(effect, Effect::Close { replica: of, .. } if *of == replica(1));
    assert!(stage.others.iter().any(closed), "it is never given up");
    let told = stage.coordinator.status().replicas[&replica(1)];
    assert_eq!(
        (told.state, told.heard_ms),
        (ReplicaState::Silent, Some(began))
    );
    let (replica, session) = (replica(1), 9);
    stage.tell(Event::Opened { replica, session });
    for _ in 0..20 {
        pass(&mut stage, 100, 1);
        assert_eq!(stage.coordinator.status().replicas[&replica], told);
    }
    stage.tell(Event::Closed { replica, session });
    assert_eq!(state(&stage, 1), ReplicaState::Away);
    assert_eq!(
        heard_ms(&stage, 1),
        Some(began),
        "it is said when it was last heard of"
    );
}
