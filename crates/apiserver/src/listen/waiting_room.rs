//! Places for connections: a few for clients that have not shown the token yet, many for those that have.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The places. Clones are the same room.
#[derive(Clone)]
pub(super) struct WaitingRoom {
    shared: Arc<Shared>,
}

struct Shared {
    unproven_max: usize,
    proven_max: usize,
    guests: Mutex<Guests>,
}

#[derive(Default)]
struct Guests {
    next: u64,
    /// Those without proof, the one who came first in front.
    unproven: VecDeque<(u64, Arc<Notify>)>,
    proven: usize,
}

/// The place of one connection, until it is dropped.
pub(super) struct Seat {
    shared: Arc<Shared>,
    number: u64,
    is_proven: Mutex<bool>,
    leave: Arc<Notify>,
}

/// Tells a connection that it has to go.
pub(super) struct ShownOut(Arc<Notify>);

impl ShownOut {
    /// Waits until the connection has to go.
    pub(super) async fn wait(self) {
        self.0.notified().await;
    }
}

impl WaitingRoom {
    pub(super) fn new(unproven_max: usize, proven_max: usize) -> WaitingRoom {
        let shared = Shared {
            unproven_max,
            proven_max,
            guests: Mutex::default(),
        };
        WaitingRoom {
            shared: Arc::new(shared),
        }
    }

    /// Admits a new connection. If there is no place, the connection that has been without a token for longest is
    /// closed.
    pub(super) fn enter(&self) -> (Seat, ShownOut) {
        let leave = Arc::new(Notify::new());
        let mut guests = self.shared.guests();
        guests.next += 1;
        let number = guests.next;
        guests.unproven.push_back((number, leave.clone()));
        if guests.unproven.len() > self.shared.unproven_max
            && let Some((_, oldest)) = guests.unproven.pop_front()
        {
            oldest.notify_one();
        }
        drop(guests);
        let seat = Seat {
            shared: self.shared.clone(),
            number,
            is_proven: Mutex::new(false),
            leave: leave.clone(),
        };
        (seat, ShownOut(leave))
    }
}

impl Shared {
    fn guests(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// The connection has shown the token. It keeps its place, unless all places for connections with the token are
    /// taken.
    pub(super) fn prove(&self) {
        let mut is_proven = self.is_proven();
        if *is_proven {
            return;
        }
        let mut guests = self.shared.guests();
        guests.unproven.retain(|(number, _)| *number != self.number);
        if guests.proven >= self.shared.proven_max {
            tracing::warn!(
                most = self.shared.proven_max,
                "too many connections; one is closed"
            );
            self.leave.notify_one();
            return;
        }
        guests.proven += 1;
        *is_proven = true;
    }

    fn is_proven(&self) -> MutexGuard<'_, bool> {
        self.is_proven
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let is_proven = *self.is_proven();
        let mut guests = self.shared.guests();
        if is_proven {
            guests.proven -= 1;
        } else {
            guests.unproven.retain(|(number, _)| *number != self.number);
        }
    }
}
