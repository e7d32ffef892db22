//! The guest, and everything that runs in it.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::{Duration, Instant};

use trellis_guest_tests::artifacts::Artifacts;
use trellis_guest_tests::image::Image;
use trellis_guest_tests::protocol::{How, Order};
use trellis_guest_tests::run::{Outcome, Progress, run};
use trellis_guest_tests::scenario;

/// One for each of the processors that even a small machine has.
const GUESTS: usize = 2;

fn indented(text: &str) -> String {
    let lines = text.lines().map(|line| format!("     {line}\n"));
    lines.collect()
}

#[test]
fn every_scenario_passes_in_the_guest() {
    // Fails if a scenario fails, does not end, leaves something behind, or costs the guest its life.
    let started = Instant::now();
    let artifacts = Artifacts::build().unwrap();
    let image = Image::pack(&artifacts).unwrap();
    let orders: Vec<_> = scenario::ALL
        .iter()
        .filter(|each| each.always)
        .map(|each| each.order(&artifacts, &image).unwrap())
        .collect();
    let outcomes = run(&image, &orders, GUESTS, &mut |progress| match progress {
        Progress::Booted { kernel, took } => println!("guest with {kernel} up in {took:.1?}"),
        Progress::Ended(outcome) => println!("{outcome}\n{}", indented(&outcome.log)),
        Progress::Said(_) => {}
    })
    .unwrap();
    println!("all in {:.1?}", started.elapsed());
    let failed: Vec<&Outcome> = outcomes.iter().filter(|each| !each.passed()).collect();
    for outcome in &failed {
        println!("--- {outcome}\n{}", outcome.console);
    }
    assert!(failed.is_empty(), "{} scenarios failed", failed.len());
}

/// A scenario that is a shell script.
fn script(name: &str, text: &str, limit: Duration) -> Order {
    Order {
        name: name.to_owned(),
        program: "/bin/sh".into(),
        arguments: vec!["-c".to_owned(), text.to_owned()],
        environment: Vec::new(),
        modules: Vec::new(),
        limit,
    }
}

#[test]
fn one_scenario_cannot_spoil_another() {
    // Fails if a scenario that hangs, leaves things behind, fails or kills the kernel is not told as just
    // that, or if what runs after it notices.
    const LONG: Duration = Duration::from_secs(60);
    let leave = "mkdir /run/m; mount -t tmpfs t /run/m; truncate -s 64M f; losetup /dev/loop0 f; sleep 1000 & echo left";
    let untouched = "! grep /run/m /proc/mounts && ! losetup /dev/loop0 && [ -z \"$(pidof sleep)\" ] && ! [ -e ../leaves ]";
    let orders = [
        script(
            "hangs",
            "echo begun; trap '' TERM; sleep 1000 & sleep 1000",
            Duration::from_secs(2),
        ),
        script("leaves", leave, LONG),
        script("finds-all-as-it-was", untouched, LONG),
        script("fails", "echo why >&2; exit 3", LONG),
        script("panics", "echo c >/proc/sysrq-trigger; sleep 1000", LONG),
        script("runs-in-the-next-guest", untouched, LONG),
    ];
    let image = Image::pack(&Artifacts::build().unwrap()).unwrap();
    let mut boots = 0;
    let outcomes = run(&image, &orders, 1, &mut |progress| {
        if let Progress::Booted { .. } = progress {
            boots += 1;
        }
    })
    .unwrap();
    let [hangs, leaves, finds, fails, panics, next] = outcomes.as_slice() else {
        panic!("{outcomes:?}")
    };
    assert_eq!(
        (&hangs.how, hangs.log.as_str()),
        (&How::TimedOut, "begun\n"),
        "{hangs:?}"
    );
    assert_eq!(leaves.how, How::Exited(0), "{leaves:?}");
    assert!(!leaves.passed());
    for what in ["process sleep", "mount /run/m", "/dev/loop0"] {
        assert!(
            leaves.left.iter().any(|left| left.contains(what)),
            "{leaves:?}"
        );
    }
    assert!(finds.passed(), "{finds:?}");
    assert_eq!(
        (&fails.how, fails.log.as_str()),
        (&How::Exited(3), "why\n"),
        "{fails:?}"
    );
    assert_eq!(panics.how, How::GuestDied, "{panics:?}");
    assert!(panics.console.contains("Kernel panic"), "{panics:?}");
    assert!(next.passed(), "{next:?}");
    assert_eq!(boots, 2, "a dead guest is replaced, and only a dead one");
}
