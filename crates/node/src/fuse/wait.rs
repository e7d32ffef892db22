//! Requests whose volume was not ready: kept for a moment, then asked again.
//!
//! The kernel bounds their number, because it limits how many requests may be in flight.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::reply::Pending;

/// How long a request rests before it is asked again.
const PAUSE: Duration = Duration::from_millis(100);

/// The requests that rest. All rest equally long, so the first that came is the first that is due.
#[derive(Default)]
pub(super) struct Waiting {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    resting: VecDeque<(Instant, Pending)>,
    closed: bool,
}

impl Waiting {
    /// Lets a request rest. What comes after the end is forgotten, not answered: a successor gets it.
    pub(super) fn put(&self, pending: Pending) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        state.resting.push_back((Instant::now() + PAUSE, pending));
        self.changed.notify_one();
    }

    /// The next request that has rested enough; `None` when it is over.
    pub(super) fn next(&self) -> Option<Pending> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let now = Instant::now();
            let due = state.resting.front().map(|(due, _)| *due);
            state = match due {
                Some(due) if due <= now => return state.resting.pop_front().map(|(_, it)| it),
                Some(due) => {
                    let waited = self.changed.wait_timeout(state, due - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let waited = self.changed.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    /// Ends it, and forgets what rests.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let forgotten = std::mem::take(&mut state.resting);
        drop(state);
        drop(forgotten);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
