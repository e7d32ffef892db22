//! Places for connections: a few for clients that have not shown a token yet, more for those that have.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::users::User;

/// How many places there are.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// For all who have not shown a token.
    pub(super) unproven: usize,
    pub(super) of_admin: usize,
    pub(super) of_each_node: usize,
}

/// The room. Clones are the same one.
#[derive(Clone)]
pub(super) struct WaitingRoom {
    shared: Arc<Shared>,
}

struct Shared {
    places: Places,
    guests: Mutex<Guests>,
}

#[derive(Default)]
struct Guests {
    next: u64,
    /// Those without proof, the one who came first in front.
    unproven: VecDeque<(u64, Arc<Notify>)>,
    /// How many connections each user has.
    proven: HashMap<User, usize>,
}

/// The place of one connection, until it is dropped.
pub(super) struct Seat {
    shared: Arc<Shared>,
    number: u64,
    /// Whose it is, once that is proven.
    user: Mutex<Option<User>>,
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
    pub(super) fn new(places: Places) -> WaitingRoom {
        let shared = Shared {
            places,
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
        if guests.unproven.len() > self.shared.places.unproven
            && let Some((_, oldest)) = guests.unproven.pop_front()
        {
            oldest.notify_one();
        }
        drop(guests);
        let seat = Seat {
            shared: self.shared.clone(),
            number,
            user: Mutex::new(None),
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
    /// The connection has shown a token of the user. It keeps its place, unless all places of that user are taken. One
    /// connection belongs to one user: the first.
    pub(super) fn prove(&self, user: &User) {
        let mut proven = self.user();
        if proven.is_some() {
            return;
        }
        let most = match user {
            User::Admin => self.shared.places.of_admin,
            User::Node(_) => self.shared.places.of_each_node,
            User::Anybody => return,
        };
        let mut guests = self.shared.guests();
        guests.unproven.retain(|(number, _)| *number != self.number);
        let count = guests.proven.entry(user.clone()).or_default();
        if *count >= most {
            tracing::warn!(
                most,
                user = user.name(),
                "too many connections; one is closed"
            );
            self.leave.notify_one();
            return;
        }
        *count += 1;
        *proven = Some(user.clone());
    }

    fn user(&self) -> MutexGuard<'_, Option<User>> {
        self.user.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let user = self.user().take();
        let mut guests = self.shared.guests();
        let Some(user) = user else {
            guests.unproven.retain(|(number, _)| *number != self.number);
            return;
        };
        if let Some(count) = guests.proven.get_mut(&user) {
            *count -= 1;
            if *count == 0 {
                guests.proven.remove(&user);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_user_with_many_connections_takes_no_place_of_another() {
        // Fails if one node's connections can keep out another node or the administrator, or if a place that became
        // free is not given again.
        let room = WaitingRoom::new(Places {
            unproven: 4,
            of_admin: 2,
            of_each_node: 1,
        });
        let (a, b) = (User::Node("a".into()), User::Node("b".into()));
        let proven = |user: &User| {
            let (seat, shown_out) = room.enter();
            seat.prove(user);
            let stays = shown_out.wait().now_or_never().is_none();
            (seat, stays)
        };
        let first = proven(&b);
        assert!(first.1);
        assert!(!proven(&b).1);
        let others = [proven(&a), proven(&User::Admin), proven(&User::Admin)];
        assert!(others.iter().all(|(_, stays)| *stays));
        assert!(!proven(&User::Admin).1);
        drop(first);
        assert!(proven(&b).1);
        drop(others);
        assert!(room.shared.guests().proven.is_empty());
    }
}
