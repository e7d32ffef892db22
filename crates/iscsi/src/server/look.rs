//! When to look for the next command instead of sleeping.
//!
//! An initiator that has one command under way at a time sends the next one as soon as it has the answer. To be put
//! to sleep and woken again costs many times what the command itself costs, most of all in a virtual machine. So a
//! connection with nothing to do looks at its socket for a moment, if the initiator's last pauses were short. Whoever
//! pauses for longer costs one such moment, and then it takes twice as many short pauses before there is another:
//! a connection that is idle, or busy in a way that looking does not help, uses no processor time for this.

use std::time::Instant;

use crate::limits::{LOOK_MAX, PAUSE_MAX, SHORT_PAUSES_MAX, SHORT_PAUSES_MIN};

/// What a connection knows of the initiator's pauses.
#[derive(Debug)]
pub(super) struct Look {
    /// Since when nothing has come.
    since: Option<Instant>,
    /// Short pauses in a row, as far as they count.
    short: u32,
    /// How many there have to be.
    wanted: u32,
}

impl Default for Look {
    fn default() -> Self {
        Look {
            since: None,
            short: 0,
            wanted: SHORT_PAUSES_MIN,
        }
    }
}

impl Look {
    /// The connection waits for the initiator alone. Answers whether to look again soon, rather than to sleep.
    pub(super) fn waits(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        if self.short < self.wanted {
            return false;
        }
        if now.duration_since(since) < LOOK_MAX {
            return true;
        }
        self.short = 0;
        self.wanted = (self.wanted * 2).min(SHORT_PAUSES_MAX);
        false
    }

    /// Whether it is looking now.
    pub(super) fn looks(&self) -> bool {
        self.since.is_some() && self.short >= self.wanted
    }

    /// Something has come.
    pub(super) fn heard(&mut self, now: Instant) {
        let Some(since) = self.since.take() else {
            return;
        };
        let pause = now.duration_since(since);
        if pause > PAUSE_MAX {
            self.short = 0;
        } else if self.short < self.wanted {
            self.short += 1;
        } else {
            // It was found by looking.
            self.wanted = SHORT_PAUSES_MIN;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// One pause of the initiator, looked at every five microseconds; answers how long it was looked for.
    fn pause(look: &mut Look, now: &mut Instant, length: Duration) -> Duration {
        let step = Duration::from_micros(5);
        let (start, mut looked) = (*now, Duration::ZERO);
        let mut awake = look.waits(*now);
        while awake && now.duration_since(start) < length {
            *now += step;
            looked += step;
            awake = look.waits(*now);
        }
        *now = start + length;
        look.heard(*now);
        looked
    }

    #[test]
    fn an_initiator_that_comes_back_at_once_is_looked_for() {
        // Fails if short pauses do not lead to looking, or if it ends while they go on.
        let (mut look, mut now) = (Look::default(), Instant::now());
        for _ in 0..SHORT_PAUSES_MIN {
            let looked = pause(&mut look, &mut now, PAUSE_MAX);
            assert_eq!(looked, Duration::ZERO);
        }
        for _ in 0..1000 {
            let looked = pause(&mut look, &mut now, Duration::from_micros(40));
            assert_eq!(looked, Duration::from_micros(40));
        }
    }

    #[test]
    fn looking_in_vain_gets_rare() {
        // Fails if an initiator whose pauses are a little too long, or that is idle, keeps a processor busy.
        let (mut look, mut now) = (Look::default(), Instant::now());
        let begin = now;
        let mut looked = Duration::ZERO;
        for _ in 0..100_000 {
            looked += pause(&mut look, &mut now, LOOK_MAX + Duration::from_micros(50));
        }
        assert!(looked * 1000 < now.duration_since(begin), "{looked:?}");
        let mut looked = Duration::ZERO;
        for _ in 0..1000 {
            looked += pause(&mut look, &mut now, Duration::from_secs(1));
        }
        assert!(looked <= LOOK_MAX, "{looked:?}");
    }
}
