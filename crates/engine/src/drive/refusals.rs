//! The connections that were refused lately, for a person who wonders why a node gets nowhere.
//!
//! Strangers decide how many there are, so the list is short, the same refusal is counted instead of kept again, and
//! the log gets at most one line a second.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime};

use super::tls::{Refusal, Side};

/// How many are kept.
const KEPT_MAX: usize = 32;

/// How often the log gets a line.
const LOGGED_EVERY: Duration = Duration::from_secs(1);

/// A connection that was refused, or several in a row for the same reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Where it came from; nothing, if from this machine.
    pub from: Option<IpAddr>,
    /// Who refused it.
    pub by: Side,
    /// Why.
    pub why: Refusal,
    /// When it was refused for the last time.
    pub at: SystemTime,
    /// How often it was refused.
    pub times: u64,
}

/// The last refusals, the latest at the end.
#[derive(Default)]
pub(super) struct Refusals {
    kept: VecDeque<Refused>,
    logged_at: Option<Instant>,
    unlogged: u64,
}

impl Refusals {
    pub(super) fn add(&mut self, from: Option<IpAddr>, by: Side, why: Refusal) {
        self.log(from, by, &why);
        let is_same = |it: &Refused| it.from == from && it.by == by && it.why == why;
        let known = self.kept.iter().position(is_same);
        let before = known.and_then(|at| self.kept.remove(at));
        if self.kept.len() >= KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(Refused {
            from,
            by,
            why,
            at: SystemTime::now(),
            times: before.map_or(0, |it| it.times) + 1,
        });
    }

    pub(super) fn list(&self) -> Vec<Refused> {
        self.kept.iter().cloned().collect()
    }

    fn log(&mut self, from: Option<IpAddr>, by: Side, why: &Refusal) {
        let now = Instant::now();
        let is_early = |at: Instant| now.duration_since(at) < LOGGED_EVERY;
        if self.logged_at.is_some_and(is_early) {
            self.unlogged += 1;
            return;
        }
        self.logged_at = Some(now);
        let unlogged = std::mem::take(&mut self.unlogged);
        let from = from.map_or("this machine".to_owned(), |ip| ip.to_string());
        match by {
            Side::Here => {
                tracing::warn!(unlogged, "a connection from {from} was refused: {why}");
            }
            Side::There => tracing::warn!(unlogged, "{from} ended its connection: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_refusals_are_a_short_list() {
        // Fails if a stranger can make the list grow, or push out everything else by trying often.
        let mut refusals = Refusals::default();
        let from = |last: u8| Some(IpAddr::from([10, 0, 0, last]));
        refusals.add(from(0), Side::Here, Refusal::Expired);
        for _ in 0..1000 {
            refusals.add(from(1), Side::Here, Refusal::Left);
        }
        let list = refusals.list();
        assert_eq!(list.len(), 2);
        assert_eq!((list[0].times, list[1].times), (1, 1000));
        for last in 0..=255 {
            refusals.add(from(last), Side::There, Refusal::OtherHome);
        }
        assert_eq!(refusals.list().len(), KEPT_MAX);
        assert_eq!(refusals.list()[KEPT_MAX - 1].from, from(255));
    }
}
