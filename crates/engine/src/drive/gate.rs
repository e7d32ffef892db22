//! Where other nodes knock: accepts their connections, and lets those in that have shown who they are.
//!
//! A stranger can connect as often as it likes. What it gets is bounded: so many connections that have not shown who
//! they are, some seconds for each, two small buffers for each, and a few new ones a turn, between which the copy does
//! its work. When there are too many, the address with the most of them loses its oldest. So who holds connections open
//! without a word keeps no other node out.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use super::refusals::Refusals;
use super::tls::{Credentials, Entered, NodeName, Refusal, Side, enter};

/// How many connections may be half-open.
const HALF_OPEN_MAX: usize = 32;

/// How long a connection may be half-open.
const HALF_OPEN_TIME_MAX: Duration = Duration::from_secs(5);

/// How many connections are accepted before others have their turn.
const ACCEPTED_PER_TURN: usize = 4;

/// The nodes that may serve a volume.
pub(super) type Allowed = Arc<BTreeSet<NodeName>>;

/// The refusals of a copy, which its handle shows.
#[derive(Clone, Default)]
pub(super) struct SharedRefusals(Arc<Mutex<Refusals>>);

impl SharedRefusals {
    pub(super) fn lock(&self) -> MutexGuard<'_, Refusals> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection that has not shown who it is.
struct HalfOpen {
    from: IpAddr,
    task: AbortHandle,
}

pub(super) struct Gate {
    listener: TcpListener,
    credentials: Credentials,
    allowed: watch::Receiver<Allowed>,
    refusals: SharedRefusals,
    /// The oldest first.
    half_open: VecDeque<HalfOpen>,
    entering: JoinSet<Option<Entered>>,
}

impl Gate {
    pub(super) fn new(
        listener: TcpListener,
        credentials: Credentials,
        allowed: watch::Receiver<Allowed>,
        refusals: SharedRefusals,
    ) -> Gate {
        Gate {
            listener,
            credentials,
            allowed,
            refusals,
            half_open: VecDeque::new(),
            entering: JoinSet::new(),
        }
    }

    /// The node that listens.
    pub(super) fn node(&self) -> &NodeName {
        self.credentials.node()
    }

    /// Whether a node may serve the volume, as of now.
    pub(super) fn allows(&self, node: &NodeName) -> bool {
        self.allowed.borrow().contains(node)
    }

    /// Takes new connections. Says whether there may be more.
    pub(super) fn poll_knocks(&mut self, context: &mut Context<'_>) -> bool {
        for _ in 0..ACCEPTED_PER_TURN {
            match self.listener.poll_accept(context) {
                Poll::Pending => return false,
                Poll::Ready(Ok((socket, from))) => self.knocked(socket, from),
                Poll::Ready(Err(error)) => {
                    // Out of descriptors, or a connection that broke at once. The next look tries again.
                    tracing::debug!("could not accept a connection: {error}");
                    return false;
                }
            }
        }
        true
    }

    /// The next node that has shown who it is.
    pub(super) fn poll_entered(&mut self, context: &mut Context<'_>) -> Poll<Entered> {
        while let Poll::Ready(Some(done)) = self.entering.poll_join_next(context) {
            // One that was given up, or refused, has been noted.
            if let Ok(Some(entered)) = done
                // It may have been taken out of the set while it showed who it is.
                && self.allows(&entered.node)
            {
                return Poll::Ready(entered);
            }
        }
        Poll::Pending
    }

    fn knocked(&mut self, socket: TcpStream, from: SocketAddr) {
        let from = from.ip().to_canonical();
        self.half_open.retain(|it| !it.task.is_finished());
        if self.half_open.len() >= HALF_OPEN_MAX {
            self.make_room();
        }
        let allowed = Arc::clone(&self.allowed.borrow());
        let (credentials, refusals) = (self.credentials.clone(), self.refusals.clone());
        let task = self
            .entering
            .spawn(knock(socket, from, credentials, allowed, refusals));
        self.half_open.push_back(HalfOpen { from, task });
    }

    /// Gives up the oldest connection of the address that has the most.
    fn make_room(&mut self) {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for it in &self.half_open {
            *counts.entry(it.from).or_default() += 1;
        }
        let most = counts.values().max().copied();
        let oldest = |it: &HalfOpen| counts.get(&it.from).copied() == most;
        let oldest = self.half_open.iter().position(oldest);
        if let Some(it) = oldest.and_then(|at| self.half_open.remove(at)) {
            it.task.abort();
            self.refusals
                .lock()
                .add(Some(it.from), Side::Here, Refusal::Crowded);
        }
    }
}

async fn knock(
    socket: TcpStream,
    from: IpAddr,
    credentials: Credentials,
    allowed: Allowed,
    refusals: SharedRefusals,
) -> Option<Entered> {
    let mut is_noted = false;
    let note = |by, why| {
        is_noted = true;
        refusals.lock().add(Some(from), by, why);
    };
    let entering = enter(socket, &credentials, allowed, note);
    let entered = tokio::time::timeout(HALF_OPEN_TIME_MAX, entering).await;
    match entered {
        Ok(entered) => entered,
        Err(_) => {
            if !is_noted {
                refusals.lock().add(Some(from), Side::Here, Refusal::Late);
            }
            None
        }
    }
}
