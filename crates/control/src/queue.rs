//! A work queue of keys: each key waits at most once, and runs at most once at a time.
//!
//! A key that is pushed while it runs is run once more afterwards, so that no change is lost and none is worked on
//! twice. The queue is bounded by the number of keys, which is the number of volumes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use trellis_api::HoldReason;

/// First pause after a failure.
const BACKOFF_FIRST: Duration = Duration::from_millis(500);
/// Longest pause between two tries.
const BACKOFF_MAX: Duration = Duration::from_secs(120);

/// What became of one run of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Nothing is left to do until something changes.
    Done,
    /// It failed and is to be tried again, after a pause that doubles from one failure to the next.
    Failed,
    /// Something holds it; it is tried again as after a failure. A new reason starts again with the first pause.
    Held(HoldReason),
}

/// The queue. Clones share it.
#[derive(Clone, Default)]
pub struct Queue {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    ready: VecDeque<String>,
    waiting: HashSet<String>,
    /// Keys that run now; true when they were pushed again meanwhile.
    running: HashMap<String, bool>,
    /// How often each key has failed in a row, and by what.
    failures: HashMap<String, (u32, Run)>,
    /// The retry that each failed key waits for. A key has only one, because a later failure replaces the earlier
    /// timer. Otherwise every event on a key that keeps failing would add a chain of retries for ever.
    retries: HashMap<String, u64>,
    retries_made: u64,
    /// When a timer will push a key. There may be later timers for it, which do nothing.
    later: HashMap<String, Instant>,
}

impl Queue {
    /// Asks for a run of `key`, because something about it has changed. Pauses start over.
    pub fn push(&self, key: &str) {
        self.state().failures.remove(key);
        self.push_again(key);
    }

    fn push_again(&self, key: &str) {
        let mut state = self.state();
        if let Some(again) = state.running.get_mut(key) {
            *again = true;
            return;
        }
        if state.waiting.insert(key.to_owned()) {
            state.ready.push_back(key.to_owned());
            drop(state);
            self.shared.wake.notify_one();
        }
    }

    /// Asks for a run of `key` after a pause. Of several pauses the one that ends first counts: that run looks what is
    /// still to be waited for.
    pub fn push_later(&self, key: &str, pause: Duration) {
        let due = Instant::now() + pause;
        let mut state = self.state();
        if state.later.get(key).is_some_and(|other| *other <= due) {
            return;
        }
        state.later.insert(key.to_owned(), due);
        drop(state);
        let (queue, key) = (self.clone(), key.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep_until(due).await;
            let mut state = queue.state();
            if state.later.get(&key) != Some(&due) {
                return;
            }
            state.later.remove(&key);
            drop(state);
            queue.push_again(&key);
        });
    }

    /// The next key, which then counts as running until [`Queue::finish`].
    pub async fn next(&self) -> String {
        loop {
            let woken = self.shared.wake.notified();
            if let Some(key) = self.take() {
                return key;
            }
            woken.await;
        }
    }

    /// Ends the run of `key`.
    pub fn finish(&self, key: &str, run: Run) {
        let mut state = self.state();
        let again = state.running.remove(key).unwrap_or(false);
        let retry = match run {
            Run::Done => {
                state.failures.remove(key);
                state.retries.remove(key);
                None
            }
            Run::Failed | Run::Held(_) => {
                let failures = state.failures.entry(key.to_owned()).or_insert((0, run));
                if failures.1 != run {
                    *failures = (0, run);
                }
                failures.0 = failures.0.saturating_add(1);
                let pause = jittered(backoff(failures.0));
                state.retries_made += 1;
                let number = state.retries_made;
                state.retries.insert(key.to_owned(), number);
                Some((pause, number))
            }
        };
        drop(state);
        if again {
            self.push_again(key);
        }
        if let Some((pause, number)) = retry {
            let (queue, key) = (self.clone(), key.to_owned());
            tokio::spawn(async move {
                tokio::time::sleep(pause).await;
                queue.retry(&key, number);
            });
        }
    }

    /// Runs a failed key again, unless it has been run since.
    fn retry(&self, key: &str, number: u64) {
        let waits = self.state().retries.get(key) == Some(&number);
        if waits {
            self.push_again(key);
        }
    }

    fn take(&self) -> Option<String> {
        let mut state = self.state();
        let key = state.ready.pop_front()?;
        state.waiting.remove(&key);
        state.running.insert(key.clone(), false);
        if !state.ready.is_empty() {
            self.shared.wake.notify_one();
        }
        Some(key)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pause after so many failures in a row.
fn backoff(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    BACKOFF_FIRST
        .saturating_mul(1 << doublings)
        .min(BACKOFF_MAX)
}

/// The pause, longer by up to an eighth, so that keys that failed together are not retried together.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 128;
    let eighth = pause / 8;
    pause + eighth.mul_f64(f64::from(u32::try_from(random).unwrap_or(0)) / 128.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a long pause swallows a shorter one, or if both bring a run.
    #[tokio::test(start_paused = true)]
    async fn the_pause_that_ends_first_counts() {
        let queue = Queue::default();
        queue.push_later("a", Duration::from_secs(1000));
        queue.push_later("a", Duration::from_secs(1));
        queue.push_later("a", Duration::from_secs(2));
        assert_eq!(queue.next().await, "a");
        queue.finish("a", Run::Done);
        let next = tokio::time::timeout(Duration::from_secs(2000), queue.next());
        assert!(next.await.is_err());
    }

    // Fails if a key that is pushed many times before it runs would run many times.
    #[tokio::test]
    async fn a_key_waits_only_once() {
        let queue = Queue::default();
        for _ in 0..5 {
            queue.push("a");
        }
        queue.push("b");
        assert_eq!(queue.next().await, "a");
        assert_eq!(queue.next().await, "b");
        assert_eq!(queue.take(), None);
    }

    // Fails if a change that arrives during a run is forgotten, or runs beside it.
    #[tokio::test]
    async fn a_key_pushed_while_it_runs_runs_again_afterwards() {
        let queue = Queue::default();
        queue.push("a");
        let key = queue.next().await;
        queue.push("a");
        assert_eq!(queue.take(), None);
        queue.finish(&key, Run::Done);
        assert_eq!(queue.next().await, "a");
    }

    // Fails if a failing key is tried without a pause, or never again.
    #[tokio::test(start_paused = true)]
    async fn a_failed_key_comes_back_after_a_pause() {
        let queue = Queue::default();
        queue.push("a");
        let key = queue.next().await;
        queue.finish(&key, Run::Failed);
        assert_eq!(queue.take(), None);
        assert_eq!(queue.next().await, "a");
    }

    // Fails if every failure leaves a timer of its own behind, so that a key that keeps failing is tried more
    // and more often.
    #[tokio::test(start_paused = true)]
    async fn a_failing_key_has_one_retry_at_a_time() {
        let queue = Queue::default();
        for _ in 0..5 {
            queue.push("a");
            let key = queue.next().await;
            queue.finish(&key, Run::Failed);
        }
        let mut runs = 0;
        let deadline = tokio::time::Instant::now() + BACKOFF_FIRST * 40;
        while let Ok(key) = tokio::time::timeout_at(deadline, queue.next()).await {
            runs += 1;
            queue.finish(&key, Run::Done);
        }
        assert_eq!(runs, 1);
    }

    // Fails if a key that was put off is forgotten, or comes as often as it was put off.
    #[tokio::test(start_paused = true)]
    async fn a_key_put_off_comes_once() {
        let queue = Queue::default();
        for _ in 0..5 {
            queue.push_later("a", BACKOFF_FIRST);
        }
        assert_eq!(queue.take(), None);
        assert_eq!(queue.next().await, "a");
        queue.finish("a", Run::Done);
        tokio::time::sleep(BACKOFF_FIRST * 2).await;
        assert_eq!(queue.take(), None);
    }

    async fn pause_after(queue: &Queue, run: Run) -> Duration {
        let key = queue.next().await;
        let before = tokio::time::Instant::now();
        queue.finish(&key, run);
        while queue.state().ready.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        before.elapsed()
    }

    // Fails if a cause that persists is tried as often as at first, or if a new cause or a change has to wait
    // out the pauses of the old one.
    #[tokio::test(start_paused = true)]
    async fn pauses_begin_anew_when_the_cause_or_the_input_changes() {
        let queue = Queue::default();
        let most = BACKOFF_FIRST * 9 / 8 + Duration::from_millis(20);
        queue.push("a");
        let busy = Run::Held(HoldReason::PathBusy);
        assert!(pause_after(&queue, busy).await <= most);
        assert!(pause_after(&queue, busy).await >= BACKOFF_FIRST * 2);
        assert!(pause_after(&queue, Run::Held(HoldReason::ReadOnly)).await <= most);
        assert!(pause_after(&queue, Run::Held(HoldReason::ReadOnly)).await >= BACKOFF_FIRST * 2);
        queue.push("a");
        assert!(pause_after(&queue, Run::Held(HoldReason::ReadOnly)).await <= most);
    }

    // Fails if the pauses do not grow, or grow without a limit.
    #[test]
    fn pauses_double_up_to_a_limit() {
        assert_eq!(backoff(1), BACKOFF_FIRST);
        assert_eq!(backoff(2), BACKOFF_FIRST * 2);
        assert_eq!(backoff(u32::MAX), BACKOFF_MAX);
    }
}
