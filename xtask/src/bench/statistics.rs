//! Medians and tails of times.

use std::time::Duration;

/// A set of times.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Adds one.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The time that so many of a thousand do not exceed.
    pub fn permille(&self, permille: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let index = (sorted.len() * permille).div_ceil(1000).saturating_sub(1);
        sorted.get(index).copied().unwrap_or_default()
    }

    /// The one in the middle.
    pub fn median(&self) -> Duration {
        self.permille(500)
    }
}

/// A time in milliseconds.
pub fn millis(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
