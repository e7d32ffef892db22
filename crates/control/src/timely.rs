//! Measurements that may hang.
//!
//! Looking at a filesystem whose disk does not answer can take for ever, and nothing can end it. So each measurement
//! runs on a thread of its own and is given up after a while. It is not started again while it hangs, so a filesystem
//! that is down costs one thread in all, not one for each look.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How many measurements may hang at one time. Each holds a thread.
const UNDER_WAY_MAX: usize = 128;

/// Measures with a time limit.
#[derive(Debug)]
pub struct Timely {
    limit: Duration,
    under_way: Arc<Mutex<HashSet<String>>>,
}

impl Timely {
    /// Every measurement may take this long.
    pub fn new(limit: Duration) -> Self {
        Timely {
            limit,
            under_way: Arc::default(),
        }
    }

    /// What `measure` returns; none if it takes too long, or if an earlier measurement of `key` is still under way.
    pub async fn measure<T: Send + 'static>(
        &self,
        key: &str,
        measure: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let ticket = self.ticket(key)?;
        let work = tokio::task::spawn_blocking(move || {
            let answer = measure();
            drop(ticket);
            answer
        });
        tokio::time::timeout(self.limit, work).await.ok()?.ok()
    }

    fn ticket(&self, key: &str) -> Option<Ticket> {
        let mut under_way = self
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if under_way.len() >= UNDER_WAY_MAX || !under_way.insert(key.to_owned()) {
            return None;
        }
        Some(Ticket {
            key: key.to_owned(),
            under_way: self.under_way.clone(),
        })
    }
}

/// The right to measure one thing, given back when it is dropped, even by a panic.
struct Ticket {
    key: String,
    under_way: Arc<Mutex<HashSet<String>>>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut under_way = self
            .under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        under_way.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    // Fails (or never ends) if a measurement that hangs is waited for, is begun a second time, keeps others
    // from being made, or can never be made again.
    #[tokio::test]
    async fn what_hangs_is_given_up_and_not_begun_again() {
        let timely = Timely::new(Duration::from_millis(20));
        let (release, hang) = mpsc::channel::<()>();
        let (ended, end) = tokio::sync::oneshot::channel();
        let hangs = move || {
            let _ = hang.recv();
            let _ = ended.send(());
        };
        assert_eq!(timely.measure("down", hangs).await, None);
        let again = || panic!("it is still under way");
        assert_eq!(timely.measure::<()>("down", again).await, None);
        let patient = Timely {
            limit: Duration::from_secs(60),
            under_way: timely.under_way.clone(),
        };
        assert_eq!(patient.measure("up", || 1).await, Some(1));
        drop(release);
        end.await.expect("it ends when it can");
        let mut answer = None;
        while answer.is_none() {
            // The ticket goes a moment after the answer.
            tokio::task::yield_now().await;
            answer = patient.measure("down", || 2).await;
        }
        assert_eq!(answer, Some(2));
    }

    // Fails if a measurement that panics can never be made again.
    #[tokio::test]
    async fn a_panic_gives_the_ticket_back() {
        let timely = Timely::new(Duration::from_secs(60));
        let broken = timely.measure::<()>("it", || panic!("as it should")).await;
        assert_eq!(broken, None);
        assert_eq!(timely.measure("it", || 1).await, Some(1));
    }

    // Fails if things that hang could take every thread that there is.
    #[tokio::test]
    async fn only_so_many_may_hang() {
        let timely = Timely::new(Duration::from_secs(60));
        let tickets: Vec<Ticket> = (0..UNDER_WAY_MAX)
            .filter_map(|index| timely.ticket(&index.to_string()))
            .collect();
        assert_eq!(tickets.len(), UNDER_WAY_MAX);
        assert_eq!(timely.measure("one more", || 1).await, None);
        drop(tickets);
        assert_eq!(timely.measure("one more", || 1).await, Some(1));
    }
}
