//! Climbing the ladder: observe, ask the planner, raise one rung, observe again.

use std::time::Instant;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use trellis_api::kinds::{Raised, RungStatus};
use trellis_api::{Bytes, Hold, HoldReason, Next, Observed, Rung, next_step};

use crate::stored::now;

/// A raise that does not reach its size is tried again at the next look, not at once.
const RAISES_A_RUNG: usize = 1;

/// One rung as it was just measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Which rung.
    pub rung: Rung,
    /// Its size.
    pub size: Bytes,
    /// It covers all that it can cover of the rung below.
    pub full: bool,
    /// What else is worth knowing of it.
    pub note: Option<String>,
}

/// Something with rungs that can be measured and raised.
pub trait Climbable {
    /// Measures every rung, lowest first.
    fn measure(&self) -> Result<Vec<Measured>, Hold>;
    /// Measures the rungs that a raise of `raised` can have changed: itself and its neighbours above.
    fn measure_again(&self, raised: Rung) -> Result<Vec<Measured>, Hold>;
    /// Raises one rung.
    fn raise(&self, rung: Rung, to: Bytes) -> Result<(), Hold>;
    /// Called with the ladder after every raise.
    fn climbed(&self, ladder: &[RungStatus]);
}

/// Climbs as far as possible, and returns the ladder as last measured. `before` is the previous report: a rung that did
/// not change keeps its times.
pub fn climb(
    subject: &dyn Climbable,
    goal: Bytes,
    before: &[RungStatus],
) -> Result<Vec<RungStatus>, Hold> {
    let mut ladder = statuses(&subject.measure()?, before, &now());
    let raises_max = ladder.len() * RAISES_A_RUNG;
    for _ in 0..=raises_max {
        let observed: Vec<Observed> = ladder.iter().map(Observed::from).collect();
        let Next::Raise { rung, to } = next_step(&observed, goal) else {
            break;
        };
        raise(subject, &mut ladder, rung, to);
        subject.climbed(&ladder);
    }
    Ok(ladder)
}

/// Raises one rung and measures again; whatever keeps it below its goal becomes its hold.
fn raise(subject: &dyn Climbable, ladder: &mut [RungStatus], rung: Rung, to: Bytes) {
    let started = Instant::now();
    let outcome = subject.raise(rung, to);
    let took_micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    let at = now();
    let from = ladder
        .iter()
        .find(|each| each.rung == rung)
        .map(|each| each.size)
        .unwrap_or_default();
    match subject.measure_again(rung) {
        Ok(measured) => {
            for status in statuses(&measured, ladder, &at) {
                if let Some(old) = ladder.iter_mut().find(|each| each.rung == status.rung) {
                    *old = status;
                }
            }
        }
        Err(hold) => return put_hold(ladder, rung, hold),
    }
    let Some(status) = ladder.iter_mut().find(|each| each.rung == rung) else {
        return;
    };
    if status.size > from {
        status.raised = Some(Raised {
            from,
            to: status.size,
            at,
            took_micros,
        });
    }
    match outcome {
        Err(hold) => status.hold = Some(hold),
        Ok(()) if status.size < to && !status.full => {
            let message = format!(
                "The {rung} was raised to {to} and has {} when measured.",
                status.size
            );
            status.hold = Some(Hold::new(HoldReason::KernelRefused, message));
        }
        Ok(()) => {}
    }
}

fn put_hold(ladder: &mut [RungStatus], rung: Rung, hold: Hold) {
    if let Some(status) = ladder.iter_mut().find(|each| each.rung == rung) {
        status.hold = Some(hold);
    }
}

/// The rungs as they stand in a status. Holds are not carried over: each look finds its own.
fn statuses(measured: &[Measured], before: &[RungStatus], at: &MicroTime) -> Vec<RungStatus> {
    let status = |each: &Measured| {
        let old = before.iter().find(|old| old.rung == each.rung);
        let same = old.filter(|old| old.size == each.size);
        RungStatus {
            rung: each.rung,
            size: each.size,
            observed_at: same.map_or_else(|| at.clone(), |old| old.observed_at.clone()),
            full: each.full,
            raised: old.and_then(|old| old.raised.clone()),
            hold: None,
            note: each.note.clone(),
        }
    };
    measured.iter().map(status).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A machine of two rungs whose upper one may be broken.
    struct Model {
        sizes: RefCell<Vec<(Rung, u64)>>,
        broken: Option<Rung>,
        lazy: Option<Rung>,
    }

    impl Climbable for Model {
        fn measure(&self) -> Result<Vec<Measured>, Hold> {
            let sizes = self.sizes.borrow();
            let rung = |(rung, size): &(Rung, u64)| Measured {
                rung: *rung,
                size: Bytes::gib(*size),
                full: false,
                note: None,
            };
            Ok(sizes.iter().map(rung).collect())
        }

        fn measure_again(&self, _: Rung) -> Result<Vec<Measured>, Hold> {
            self.measure()
        }

        fn raise(&self, rung: Rung, to: Bytes) -> Result<(), Hold> {
            if self.broken == Some(rung) {
                return Err(Hold::new(HoldReason::KernelRefused, "no"));
            }
            if self.lazy != Some(rung) {
                let mut sizes = self.sizes.borrow_mut();
                let found = sizes
                    .iter_mut()
                    .find(|(each, _)| *each == rung)
                    .expect("a known rung");
                found.1 = to.get() >> 30;
            }
            Ok(())
        }

        fn climbed(&self, _: &[RungStatus]) {}
    }

    fn model(broken: Option<Rung>, lazy: Option<Rung>) -> Model {
        Model {
            sizes: RefCell::new(vec![(Rung::Device, 1), (Rung::Filesystem, 1)]),
            broken,
            lazy,
        }
    }

    // Fails if a rung that could rise is left behind, or a raise is not recorded with both sizes.
    #[test]
    fn every_rung_is_raised_and_recorded() {
        let ladder = climb(&model(None, None), Bytes::gib(3), &[]).expect("it can be measured");
        for status in ladder {
            assert_eq!(status.size, Bytes::gib(3));
            let raised = status.raised.expect("it was raised");
            assert_eq!((raised.from, raised.to), (Bytes::gib(1), Bytes::gib(3)));
            assert_eq!(status.hold, None);
        }
    }

    // Fails if success is reported from intent: a raise that says yes and does nothing must be held.
    #[test]
    fn a_raise_that_does_nothing_is_held_with_what_was_measured() {
        let ladder =
            climb(&model(None, Some(Rung::Filesystem)), Bytes::gib(2), &[]).expect("measurable");
        assert_eq!(ladder[0].size, Bytes::gib(2));
        assert_eq!(ladder[1].size, Bytes::gib(1));
        let hold = ladder[1].hold.clone().expect("held");
        assert!(hold.message.contains("1Gi"), "{}", hold.message);
    }

    // Fails if a rung above a held one is raised.
    #[test]
    fn nothing_rises_above_a_held_rung() {
        let ladder =
            climb(&model(Some(Rung::Device), None), Bytes::gib(2), &[]).expect("measurable");
        assert_eq!(
            ladder[0].hold.as_ref().map(|hold| hold.reason),
            Some(HoldReason::KernelRefused)
        );
        assert_eq!(ladder[1].size, Bytes::gib(1));
        assert_eq!(ladder[1].raised, None);
    }
}
