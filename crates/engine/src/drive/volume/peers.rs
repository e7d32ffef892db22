//! The connections to the replicas of a volume: opened, lost, and opened again after a moment. Also the data files of
//! replicas on this machine, from which bytes in memory are read without asking the replica.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc;

use super::Address;
use crate::coordinator::SessionId;
use crate::drive::buffers::Buffers;
use crate::drive::dial::{Dialled, dial};
use crate::drive::lent::Arena;
use crate::drive::link::{Link, LinkError};
use crate::drive::reader::Reader;
use crate::drive::sums::{rotten, slots_of};
use crate::drive::{Credentials, Failure, Trouble};
use crate::proto::{Answer, Body, Content, Envelope, ReplicaId};
use crate::replica::NearSums;
use crate::wire::{Arrival, DataFile, KNOWS_ALL, KNOWS_CALLS, KNOWS_SUMS};

/// How long until a lost connection is opened again: at first, and at most. It doubles with every attempt that brings
/// no message, and a message resets it.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// How long a connection may take to be made, with all that is said before the first message.
const DIAL_MAX: Duration = Duration::from_secs(2);

/// What happened on the connections.
#[allow(clippy::large_enum_variant, reason = "nearly all of them are messages")]
pub(super) enum Happened {
    Opened(ReplicaId, SessionId),
    Closed(ReplicaId, SessionId),
    Received(ReplicaId, SessionId, Envelope),
    /// What the replica has applied can be read with [`Peers::peek`] from now on.
    Near(ReplicaId, SessionId),
    /// The replica compares blocks with their sums on demand.
    Verifies(ReplicaId, SessionId),
    /// The replica answers calls.
    TakesCalls(ReplicaId, SessionId),
    /// Nobody listens where the replica should be.
    Unreachable(ReplicaId),
}

struct Peer {
    address: Address,
    session: Option<SessionId>,
    link: Option<Link>,
    /// Its data file, if it is on this machine.
    file: Option<NearFile>,
    /// Whether a message came on this connection.
    has_spoken: bool,
    /// The last connection ended before a message came. The peer may be an older version, which knows neither payloads
    /// without a checksum nor kind 6.
    is_old: bool,
    is_dialling: bool,
    retry_at: Option<Instant>,
    tries: u32,
    /// Why the last connection was not made, or has ended.
    trouble: Option<Trouble>,
}

/// The end of an attempt to connect.
struct Attempt {
    replica: ReplicaId,
    address: Address,
    dialled: Result<Dialled, Failure>,
}

/// A data file on this machine.
struct NearFile {
    file: Arc<File>,
    reader: Reader,
    /// The sums of its blocks, if it has some.
    sums: Option<NearSums>,
}

/// A data file that was opened.
struct Found {
    replica: ReplicaId,
    session: SessionId,
    file: NearFile,
}

/// The connections to all replicas.
pub(super) struct Peers {
    peers: BTreeMap<ReplicaId, Peer>,
    /// For replicas on other nodes.
    credentials: Option<Credentials>,
    session_last: SessionId,
    attempts: mpsc::UnboundedReceiver<Attempt>,
    attempts_to: mpsc::UnboundedSender<Attempt>,
    found: mpsc::UnboundedReceiver<Found>,
    found_to: mpsc::UnboundedSender<Found>,
    buffers: Buffers,
    /// Where the bytes of writes are, for replicas on this machine.
    arena: Option<Arc<Arena>>,
    jitter: RandomState,
}

impl Peer {
    fn new(address: Address) -> Peer {
        Peer {
            address,
            session: None,
            link: None,
            file: None,
            has_spoken: false,
            is_old: false,
            is_dialling: false,
            retry_at: Some(Instant::now()),
            tries: 0,
            trouble: None,
        }
    }

    /// Notes why a connection failed. The same failure again is no news.
    fn fail(&mut self, failure: Failure) {
        if self.trouble.as_ref().map(|it| &it.failure) != Some(&failure) {
            self.trouble = Some(Trouble {
                failure,
                since: SystemTime::now(),
            });
        }
    }
}

impl Peers {
    pub(super) fn new(
        addresses: BTreeMap<ReplicaId, Address>,
        credentials: Option<Credentials>,
        arena: Option<Arc<Arena>>,
    ) -> Peers {
        let (attempts_to, attempts) = mpsc::unbounded_channel();
        let (found_to, found) = mpsc::unbounded_channel();
        let peers = addresses.into_iter();
        Peers {
            peers: peers
                .map(|(id, address)| (id, Peer::new(address)))
                .collect(),
            credentials,
            session_last: 0,
            attempts,
            attempts_to,
            found,
            found_to,
            buffers: Buffers::default(),
            arena,
            jitter: RandomState::new(),
        }
    }

    pub(super) fn knows(&self, replica: ReplicaId) -> bool {
        self.peers.contains_key(&replica)
    }

    pub(super) fn ids(&self) -> Vec<ReplicaId> {
        self.peers.keys().copied().collect()
    }

    /// Why replicas are not reached.
    pub(super) fn troubles(&self) -> BTreeMap<ReplicaId, Trouble> {
        let trouble = |(id, peer): (&ReplicaId, &Peer)| Some((*id, peer.trouble.clone()?));
        self.peers.iter().filter_map(trouble).collect()
    }

    /// Whether a connection is to be made, so that the clock should be looked at soon.
    pub(super) fn is_restless(&self) -> bool {
        self.peers.values().any(|peer| peer.retry_at.is_some())
    }

    /// Takes addresses over. One that has changed is used from now on.
    pub(super) fn learn(&mut self, addresses: &BTreeMap<ReplicaId, Address>) {
        for (id, address) in addresses {
            match self.peers.get_mut(id) {
                // A connection that there is goes on as long as it lasts.
                Some(peer) => peer.address.clone_from(address),
                None => {
                    self.peers.insert(*id, Peer::new(address.clone()));
                }
            }
        }
    }

    /// A replica is not wanted any more.
    pub(super) fn forget(&mut self, replica: ReplicaId) {
        if let Some(link) = self.peers.remove(&replica).and_then(|peer| peer.link) {
            link.close();
        }
    }

    /// Ends all connections: the volume has ended.
    pub(super) fn end(&mut self) {
        for link in self.peers.values_mut().filter_map(|peer| peer.link.take()) {
            link.close();
        }
    }

    /// Sends a message, if the session is still there.
    pub(super) fn send(
        &mut self,
        replica: ReplicaId,
        session: SessionId,
        envelope: Envelope,
    ) -> Option<Happened> {
        let peer = self.peers.get_mut(&replica)?;
        if peer.session != Some(session) {
            return None;
        }
        let sent = peer.link.as_mut()?.send(&envelope);
        sent.err().map(|error| self.lost(replica, session, &error))
    }

    fn lost(&mut self, replica: ReplicaId, session: SessionId, error: &LinkError) -> Happened {
        tracing::info!(%replica, "{error}");
        let own = self.credentials.as_ref().map(Credentials::node);
        let failure = Failure::of(error, own, None);
        if let Some(peer) = self.peers.get_mut(&replica) {
            peer.fail(failure);
        }
        self.close(replica, session);
        Happened::Closed(replica, session)
    }

    /// Closes a session, and makes another one after a moment.
    pub(super) fn close(&mut self, replica: ReplicaId, session: SessionId) {
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        if peer.session != Some(session) {
            return;
        }
        peer.session = None;
        if let Some(link) = peer.link.take() {
            link.close();
        }
        peer.file = None;
        self.retry(replica);
    }

    /// Closes all sessions, to make others at once: the coordinator is another one now.
    pub(super) fn restart(&mut self) {
        for replica in self.ids() {
            if let Some(session) = self.peers.get(&replica).and_then(|peer| peer.session) {
                self.close(replica, session);
            }
            if let Some(peer) = self.peers.get_mut(&replica) {
                peer.tries = 0;
                peer.retry_at = Some(Instant::now());
            }
        }
    }

    fn retry(&mut self, replica: ReplicaId) {
        let jitter = self.jitter.hash_one((replica, Instant::now()));
        if let Some(peer) = self.peers.get_mut(&replica) {
            let wait = RETRY_FIRST
                .saturating_mul(1 << peer.tries.min(8))
                .min(RETRY_MAX);
            // Between a half and the whole of it.
            let part = u32::try_from(jitter % 512).unwrap_or(0) + 512;
            peer.retry_at = Some(Instant::now() + wait * part / 1024);
            peer.tries += 1;
        }
    }

    /// Begins connections whose time has come.
    pub(super) fn dial(&mut self, now: Instant) {
        for (replica, peer) in &mut self.peers {
            let due = peer.retry_at.is_some_and(|at| at <= now);
            if !due || peer.session.is_some() || peer.is_dialling {
                continue;
            }
            peer.retry_at = None;
            peer.is_dialling = true;
            let (replica, address) = (*replica, peer.address.clone());
            let to = self.attempts_to.clone();
            let credentials = self.credentials.clone();
            tokio::spawn(async move {
                let dial = dial(&address, credentials.as_ref());
                let dialled = tokio::time::timeout(DIAL_MAX, dial).await;
                // The volume may have ended meanwhile.
                let _ = to.send(Attempt {
                    replica,
                    address,
                    dialled: dialled.unwrap_or(Err(Failure::Late)),
                });
            });
        }
    }

    /// Takes what has happened on all connections. Says whether there may be more.
    pub(super) fn poll(&mut self, context: &mut Context<'_>, happened: &mut Vec<Happened>) -> bool {
        while let Poll::Ready(Some(attempt)) = self.attempts.poll_recv(context) {
            self.attempted(attempt, happened);
        }
        while let Poll::Ready(Some(found)) = self.found.poll_recv(context) {
            if let Some(peer) = self.peers.get_mut(&found.replica)
                && peer.session == Some(found.session)
            {
                peer.file = Some(found.file);
                happened.push(Happened::Near(found.replica, found.session));
            }
        }
        let mut again = false;
        let mut lost = Vec::new();
        let mut files = Vec::new();
        for (replica, peer) in &mut self.peers {
            let (Some(session), Some(link)) = (peer.session, &mut peer.link) else {
                continue;
            };
            let (mut has_spoken, mut is_near, mut borrows) = (false, false, false);
            let mut knows = 0;
            let mut applied = 0;
            let sink = |arrival| match arrival {
                Arrival::Message(envelope) => {
                    has_spoken = true;
                    if let Body::Answer(Answer::Done { seq }) = envelope.body {
                        applied = seq;
                    }
                    happened.push(Happened::Received(*replica, session, envelope));
                }
                Arrival::DataFile(file) => {
                    is_near = true;
                    files.push((*replica, session, file));
                }
                Arrival::Borrows => borrows = true,
                Arrival::Knows(bits) => knows = bits,
                // Nobody lends to a volume; what is said of it means nothing. An objection ends the connection.
                Arrival::Lend(_) | Arrival::Objects(_) => {}
            };
            let polled = link.poll_receive(context, sink);
            link.given_back(applied);
            said(*replica, session, knows, happened);
            if let Some(arena) = &self.arena {
                if is_near && let Err(error) = link.offer(arena) {
                    // Then the bytes go by the connection.
                    tracing::debug!(%replica, "{error}");
                }
                if borrows {
                    arena.borrowed();
                    link.lends(Arc::clone(arena));
                }
            }
            if has_spoken {
                peer.tries = 0;
                peer.has_spoken = true;
                peer.trouble = None;
            }
            match polled {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => again = true,
                Poll::Ready(Err(error)) => {
                    // If it said nothing, the other way is tried.
                    peer.is_old = !peer.has_spoken && !peer.is_old;
                    lost.push((*replica, session, error));
                }
            }
        }
        for (replica, session, file) in files {
            self.look_at(replica, session, file);
        }
        for (replica, session, error) in lost {
            happened.push(self.lost(replica, session, &error));
        }
        again
    }

    /// Opens a data file, unless it is another one that has this path here.
    fn look_at(&self, replica: ReplicaId, session: SessionId, told: DataFile) {
        let (to, buffers) = (self.found_to.clone(), self.buffers.clone());
        tokio::task::spawn_blocking(move || {
            let opened = File::open(&told.path).and_then(|file| {
                let stat = file.metadata()?;
                let same = (stat.dev(), stat.ino()) == (told.device, told.inode);
                Ok(same.then_some(file))
            });
            match opened {
                Ok(Some(file)) => {
                    let reader = Reader::new(&file, buffers);
                    let sums = NearSums::beside(&told.path);
                    let file = Arc::new(file);
                    // The volume may have ended meanwhile.
                    let _ = to.send(Found {
                        replica,
                        session,
                        file: NearFile { file, reader, sums },
                    });
                }
                // It is read by messages then.
                Ok(None) => {
                    tracing::debug!("{} is another file here", told.path.display());
                }
                Err(error) => tracing::debug!("could not open {}: {error}", told.path.display()),
            }
        });
    }

    /// Reads a range of a replica's data file, if the file is on this machine and the read does not block.
    pub(super) fn peek(
        &self,
        replica: ReplicaId,
        session: SessionId,
        offset: u64,
        length: u64,
    ) -> Option<Content> {
        let peer = self.peers.get(&replica)?;
        if peer.session != Some(session) {
            return None;
        }
        let NearFile { file, reader, sums } = peer.file.as_ref()?;
        // A disk that fails, and a block that is not what was written there, is its replica's to tell of.
        let content = reader.at_once(file, offset, length)?.ok()?;
        if let Some(sums) = sums {
            let (first, mut slots) = slots_of(offset, length);
            sums.load(first, &mut slots, reader.never_waits())?;
            if !rotten(&content, &slots, sums.coverage()).is_empty() {
                return None;
            }
        }
        Some(content)
    }

    /// The data file of a replica on this machine.
    pub(super) fn file_of(&self, (replica, session): (ReplicaId, SessionId)) -> Option<Arc<File>> {
        let peer = self.peers.get(&replica)?;
        let near = peer
            .file
            .as_ref()
            .filter(|_| peer.session == Some(session))?;
        Some(Arc::clone(&near.file))
    }

    fn attempted(&mut self, attempt: Attempt, happened: &mut Vec<Happened>) {
        let replica = attempt.replica;
        let Some(peer) = self.peers.get_mut(&replica) else {
            return;
        };
        peer.is_dialling = false;
        let current = peer.address == attempt.address;
        match attempt.dialled {
            Ok(dialled) if current && peer.session.is_none() => {
                self.session_last += 1;
                peer.session = Some(self.session_last);
                let mut link = Link::new(dialled.stream);
                if dialled.knows.is_none() && !peer.is_old {
                    link.trust();
                    if let Err(error) = link.send_knows(KNOWS_ALL) {
                        tracing::debug!(%replica, "{error}");
                    }
                }
                peer.link = Some(link);
                peer.has_spoken = false;
                peer.retry_at = None;
                happened.push(Happened::Opened(replica, self.session_last));
                let knows = dialled.knows.unwrap_or(0);
                said(replica, self.session_last, knows, happened);
            }
            Ok(_) => self.retry(replica),
            Err(failure) => {
                tracing::debug!(%replica, "{}: {failure}", attempt.address);
                // A frozen process still listens; who takes no more connections is not gone.
                let gone = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
                if matches!(&failure, Failure::Connect(kind) if gone.contains(kind)) {
                    happened.push(Happened::Unreachable(replica));
                }
                peer.fail(failure);
                self.retry(replica);
            }
        }
    }

    /// Writes what is to be sent, as far as the sockets take it.
    pub(super) fn flush(&mut self, context: &mut Context<'_>, happened: &mut Vec<Happened>) {
        let mut lost = Vec::new();
        for (replica, peer) in &mut self.peers {
            if let (Some(session), Some(link)) = (peer.session, &mut peer.link)
                && let Err(error) = link.poll_flush(context)
            {
                lost.push((*replica, session, error));
            }
        }
        for (replica, session, error) in lost {
            happened.push(self.lost(replica, session, &error));
        }
    }
}

/// A replica has said what it knows.
fn said(replica: ReplicaId, session: SessionId, knows: u32, happened: &mut Vec<Happened>) {
    if knows & KNOWS_SUMS != 0 {
        happened.push(Happened::Verifies(replica, session));
    }
    if knows & KNOWS_CALLS != 0 {
        happened.push(Happened::TakesCalls(replica, session));
    }
}
