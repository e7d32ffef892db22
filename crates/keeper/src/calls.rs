//! Checks whether targets answer. A frozen process does not end, so nothing else would replace it.

use std::time::{Duration, Instant};

use crate::handover::{CallsHanded, distance, moment};

/// How often a target is called.
const CALL_EVERY: Duration = Duration::from_secs(2);
/// How long an answer may take before the target is called silent. Together with [`CALL_EVERY`] that is less than five
/// seconds.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(2500);
/// If the keeper gets to its work this late, it was itself held up, and does not complain about others.
const LATE: Duration = Duration::from_secs(1);
/// How long a target may be silent before it is killed, unless the service says otherwise.
pub const SILENCE_TIME_MAX: Duration = Duration::from_secs(15);

/// The calls to one target.
#[derive(Debug)]
pub struct Calls {
    /// When it was last called, if it has not answered.
    called: Option<Instant>,
    /// When it is called next.
    next: Instant,
    silent: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Call it.
    Call,
    /// Say that it is silent.
    Silent,
    /// Kill it.
    Kill,
}

impl Calls {
    /// To a target that has just been heard.
    pub fn new(now: Instant) -> Calls {
        Calls {
            called: None,
            next: now + CALL_EVERY,
            silent: false,
        }
    }

    /// As they are told to the program that replaces this one.
    pub fn hand_over(&self, volume: &str, now: Instant) -> CallsHanded {
        CallsHanded {
            volume: volume.to_owned(),
            called: self.called.map(|at| distance(at, now)),
            next: distance(self.next, now),
            silent: self.silent,
        }
    }

    /// As the program before this one has told them.
    pub fn go_on(handed: &CallsHanded, now: Instant) -> Calls {
        Calls {
            called: handed.called.map(|away| moment(away, now)),
            next: moment(handed.next, now),
            silent: handed.silent,
        }
    }

    /// What is to be done now.
    pub fn due(&mut self, now: Instant, silence_max: Duration) -> Option<Due> {
        let Some(called) = self.called else {
            if now < self.next {
                return None;
            }
            self.called = Some(now);
            return Some(Due::Call);
        };
        let silent_for = now.saturating_duration_since(called);
        if !self.silent && silent_for >= ANSWER_TIME_MAX {
            self.silent = true;
            return Some(Due::Silent);
        }
        (self.silent && silent_for >= silence_max).then_some(Due::Kill)
    }

    /// When there is something to be done.
    pub fn deadline(&self, silence_max: Duration) -> Instant {
        match self.called {
            None => self.next,
            Some(called) if !self.silent => called + ANSWER_TIME_MAX,
            Some(called) => called + silence_max.max(ANSWER_TIME_MAX),
        }
    }

    /// It has answered. Answers whether it had been called silent.
    pub fn heard(&mut self, now: Instant) -> bool {
        self.called = None;
        self.next = now + CALL_EVERY;
        std::mem::take(&mut self.silent)
    }

    /// Has it said again that it is silent: there is somebody who has not heard of it.
    pub fn tell_again(&mut self) {
        self.silent = false;
    }

    /// Starts over if the keeper comes so late that its own time was lost.
    pub fn forgive(&mut self, now: Instant, late: Duration) {
        if late >= LATE
            && let Some(called) = &mut self.called
        {
            *called = now;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn after(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    // Fails if a target that does not answer is noticed later than after five seconds, is not killed, or one that
    // answers is.
    #[test]
    fn a_silent_target_is_noticed_and_killed() {
        let (start, max) = (Instant::now(), SILENCE_TIME_MAX);
        let mut calls = Calls::new(start);
        assert_eq!(calls.due(after(start, 1000), max), None);
        assert_eq!(calls.due(calls.deadline(max), max), Some(Due::Call));
        assert!(!calls.heard(after(start, 2100)));
        // Frozen from here on.
        let called = calls.deadline(max);
        assert_eq!(calls.due(called, max), Some(Due::Call));
        let noticed = calls.deadline(max);
        assert!(noticed - after(start, 2100) < Duration::from_secs(5));
        assert_eq!(calls.due(noticed, max), Some(Due::Silent));
        assert_eq!(calls.due(noticed, max), None);
        assert_eq!(calls.due(calls.deadline(max), max), Some(Due::Kill));
        assert_eq!(calls.deadline(max) - called, max);
        // It wakes before that.
        assert!(calls.heard(noticed));
        assert_eq!(calls.due(noticed, max), None);
    }

    // Fails if all targets are killed because the keeper itself was frozen for a while.
    #[test]
    fn a_keeper_that_was_frozen_does_not_blame_others() {
        let (start, max) = (Instant::now(), SILENCE_TIME_MAX);
        let mut calls = Calls::new(start);
        let called = calls.deadline(max);
        calls.due(called, max);
        let late = called + Duration::from_secs(60);
        calls.forgive(late, Duration::from_secs(57));
        assert_eq!(calls.due(late, max), None);
    }
}
