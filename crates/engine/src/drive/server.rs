//! Serves one replica to the coordinator of its volume.
//!
//! One thread owns the member, its disk and all connections. A turn takes what has arrived on every connection and
//! what the disk has finished, lets the member run, and writes its answers.
//!
//! What a peer can make it hold is bounded: connections by their number, requests by the member, and bytes because it
//! stops reading while too many wait. A peer that sends nonsense, or is not a coordinator of this volume within some
//! seconds, is disconnected. Connections from other nodes come through the [`gate`](super::gate).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, Interval};

use super::core::{ReplicaCore, Wish};
use super::gate::{Allowed, Gate, SharedRefusals};
use super::link::{Link, LinkError, Stream};
use super::{Address, Credentials, NodeName, Refusal, Refused, ReplicaSettings, Side, in_full};
use crate::member::{Event, SessionId};
use crate::proto::Envelope;
use crate::wire::{Arrival, KNOWS_ALL, Objection, WireError};
use crate::{Error, Result};

/// The most connections at the same time. There is one coordinator, and its successors.
const CONNECTIONS_MAX: usize = 32;

/// How long a connection may be without one that the replica obeys.
const STRANGER_MAX: Duration = Duration::from_secs(5);

/// How often connections are looked at, and the space that is left.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Reading from a connection stops while this many of its requests, or bytes of these, wait, or this many bytes are
/// unsent. A coordinator keeps below all three.
const BACKLOG_REQUESTS_MAX: usize = 3072;
const BACKLOG_BYTES_MAX: u64 = 48 << 20;
const UNSENT_BYTES_MAX: usize = 96 << 20;

/// A replica that is being served. It ends when this is dropped.
pub struct ReplicaServer {
    address: Address,
    links: ReplicaLinks,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    ended: oneshot::Receiver<Option<Error>>,
}

impl ReplicaServer {
    /// Opens a replica and serves it at that address, on this machine. Blocks while the replica is opened.
    pub fn start(settings: ReplicaSettings, listen: &Address) -> Result<ReplicaServer> {
        ReplicaServer::start_with(settings, listen, None, BTreeSet::new())
    }

    /// The same at an address that other nodes can reach. `credentials` are those of the node that the address names,
    /// and `allowed` are the nodes that may serve the volume.
    pub fn start_tls(
        settings: ReplicaSettings,
        listen: &Address,
        credentials: &Credentials,
        allowed: BTreeSet<NodeName>,
    ) -> Result<ReplicaServer> {
        ReplicaServer::start_with(settings, listen, Some(credentials), allowed)
    }

    fn start_with(
        settings: ReplicaSettings,
        listen: &Address,
        credentials: Option<&Credentials>,
        allowed: BTreeSet<NodeName>,
    ) -> Result<ReplicaServer> {
        let name = settings.path.file_name().unwrap_or_default().to_owned();
        let replica = ReplicaCore::open(settings)?;
        let (bound, address) = Bound::bind(listen, credentials)?;
        let (doors, opened) = mpsc::unbounded_channel();
        let (allowed, allowed_now) = watch::channel(Arc::new(allowed));
        let refusals = SharedRefusals::default();
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| Error::Thread { source })?;
        let at = address.clone();
        let noted = refusals.clone();
        let doorway = Doorway {
            opened,
            allowed: allowed_now,
            refusals: noted,
        };
        let run = move || {
            let result = runtime.block_on(serve(replica, bound, doorway, stopped));
            if let Err(error) = &result {
                tracing::error!("the replica at {at} ended: {}", in_full(error));
            }
            // Nobody may wait for it.
            let _ = end.send(result.err());
        };
        let thread = std::thread::Builder::new()
            .name(format!("replica-{}", name.to_string_lossy()))
            .spawn(run)
            .map_err(|source| Error::Thread { source })?;
        Ok(ReplicaServer {
            address,
            links: ReplicaLinks {
                refusals,
                allowed: Arc::new(allowed),
                doors,
            },
            stop: Some(stop),
            thread: Some(thread),
            ended,
        })
    }

    /// Where it listens: with the port that the kernel chose, if it was asked to.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Its links to other nodes, to be changed while it is served.
    pub fn links(&self) -> &ReplicaLinks {
        &self.links
    }

    /// Sets the nodes that may serve the volume ([`ReplicaLinks::allow`]).
    pub fn allow(&self, nodes: BTreeSet<NodeName>) {
        self.links.allow(nodes);
    }

    /// The connections that were refused lately ([`ReplicaLinks::refusals`]).
    pub fn refusals(&self) -> Vec<Refused> {
        self.links.refusals()
    }

    /// Waits until the replica is not served any more, and says why, unless it was stopped.
    pub async fn ended(&mut self) -> Option<Error> {
        (&mut self.ended).await.unwrap_or(None)
    }

    /// Stops serving. What is at the disk is finished first.
    pub fn stop(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        if let Some(stop) = self.stop.take() {
            // It may have ended by itself.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
            if let Address::Unix(path) = &self.address {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// The links of a replica to other nodes. Clones are the same links.
#[derive(Clone)]
pub struct ReplicaLinks {
    refusals: SharedRefusals,
    allowed: Arc<watch::Sender<Allowed>>,
    doors: mpsc::UnboundedSender<Option<Bound>>,
}

impl ReplicaLinks {
    /// Listens at that address as well, for other nodes, from now on. What was opened like this before is closed, and
    /// the connections of other nodes end with it. Answers the address with the port that the kernel chose, if it was
    /// asked to.
    pub fn open(&self, listen: &Address, credentials: &Credentials) -> Result<Address> {
        let (bound, address) = Bound::bind(listen, Some(credentials))?;
        // If the replica has ended, `ended` says so.
        let _ = self.doors.send(Some(bound));
        Ok(address)
    }

    /// Listens no longer where it was opened for other nodes, and ends their connections.
    pub fn close(&self) {
        let _ = self.doors.send(None);
    }

    /// Sets the nodes that may serve the volume. New connections of others are refused from now on; those that there
    /// are end within a second.
    pub fn allow(&self, nodes: BTreeSet<NodeName>) {
        self.allowed.send_replace(Arc::new(nodes));
    }

    /// The connections that were refused lately, the latest at the end.
    pub fn refusals(&self) -> Vec<Refused> {
        self.refusals.lock().list()
    }
}

impl Drop for ReplicaServer {
    fn drop(&mut self) {
        self.finish();
    }
}

/// A socket that is listened on, before it belongs to a runtime.
enum Bound {
    Unix(std::os::unix::net::UnixListener),
    Tls(std::net::TcpListener, Credentials),
}

impl Bound {
    fn bind(address: &Address, credentials: Option<&Credentials>) -> Result<(Bound, Address)> {
        let fail = |source| Error::Address {
            doing: "listen at",
            address: address.clone(),
            source,
        };
        match address {
            Address::Unix(path) => {
                // A process that was killed leaves its socket. We have the replica's lock, so that
                // nobody listens there for this replica.
                let is_socket = std::fs::symlink_metadata(path)
                    .is_ok_and(|found| found.file_type().is_socket());
                if is_socket {
                    std::fs::remove_file(path).map_err(fail)?;
                }
                let listener = std::os::unix::net::UnixListener::bind(path).map_err(fail)?;
                listener.set_nonblocking(true).map_err(fail)?;
                Ok((Bound::Unix(listener), address.clone()))
            }
            Address::Tls { node, at } => {
                let Some(credentials) = credentials else {
                    let address = address.clone();
                    return Err(Error::CredentialsAbsent { address });
                };
                if credentials.node() != node {
                    return Err(Error::CredentialsForeign {
                        address: address.clone(),
                        found: credentials.node().clone(),
                    });
                }
                let listener = std::net::TcpListener::bind(at).map_err(fail)?;
                listener.set_nonblocking(true).map_err(fail)?;
                let address = Address::Tls {
                    node: node.clone(),
                    at: listener.local_addr().map_err(fail)?,
                };
                Ok((Bound::Tls(listener, credentials.clone()), address))
            }
        }
    }
}

/// What the doors of a server share, and those that are opened later.
struct Doorway {
    opened: mpsc::UnboundedReceiver<Option<Bound>>,
    allowed: watch::Receiver<Allowed>,
    refusals: SharedRefusals,
}

/// Where connections come in: on this machine, and from other nodes.
#[derive(Default)]
struct Doors {
    near: Option<UnixListener>,
    far: Option<Box<Gate>>,
}

impl Doors {
    fn open(&mut self, bound: Bound, doorway: &Doorway) -> std::io::Result<()> {
        match bound {
            Bound::Unix(listener) => self.near = Some(UnixListener::from_std(listener)?),
            Bound::Tls(listener, credentials) => {
                let listener = TcpListener::from_std(listener)?;
                let (allowed, refusals) = (doorway.allowed.clone(), doorway.refusals.clone());
                self.far = Some(Box::new(Gate::new(
                    listener,
                    credentials,
                    allowed,
                    refusals,
                )));
            }
        }
        Ok(())
    }
}

struct Connection {
    link: Link,
    /// The node at the other end, if it is not this machine.
    node: Option<NodeName>,
    since: Instant,
    /// It was told where the data file is.
    knows_file: bool,
    /// Nothing was read from it because too much waits.
    paused: bool,
}

struct Server {
    replica: ReplicaCore,
    doors: Doors,
    doorway: Doorway,
    connections: BTreeMap<SessionId, Connection>,
    session_last: SessionId,
    look: Interval,
    received: Vec<(SessionId, Envelope)>,
    wishes: Vec<Wish>,
}

async fn serve(
    replica: ReplicaCore,
    bound: Bound,
    doorway: Doorway,
    stopped: oneshot::Receiver<()>,
) -> Result<()> {
    let mut doors = Doors::default();
    doors
        .open(bound, &doorway)
        .map_err(|source| Error::Thread { source })?;
    let mut server = Server {
        replica,
        doors,
        doorway,
        connections: BTreeMap::new(),
        session_last: 0,
        look: tokio::time::interval(LOOK_EVERY),
        received: Vec::new(),
        wishes: Vec::new(),
    };
    let turns = std::future::poll_fn(|context| server.turn(context));
    tokio::select! {
        end = turns => end,
        // Also when the handle is gone.
        _ = stopped => Ok(()),
    }
}

impl Server {
    fn turn(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.open_doors(context);
        let mut again = self.accept(context);
        again |= self.receive(context);
        for (session, envelope) in self.received.drain(..) {
            self.replica.take(Event::Received { session, envelope });
        }
        self.replica.poll_disk(context);
        if let Err(error) = self.replica.run(&mut self.wishes) {
            return Poll::Ready(Err(error));
        }
        self.grant(context);
        self.flush(context);
        while self.look.poll_tick(context).is_ready() {
            self.drop_strangers();
            if self.drop_revoked() {
                again = true;
            }
        }
        again |= self
            .connections
            .iter()
            .any(|(session, it)| it.paused && !is_busy(&self.replica, *session, &it.link));
        if again {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Opens and closes the door for other nodes as it was asked for.
    fn open_doors(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Some(bound)) = self.doorway.opened.poll_recv(context) {
            self.doors.far = None;
            let is_far = |_: &SessionId, it: &mut Connection| it.node.is_some();
            for (session, _) in self.connections.extract_if(.., is_far).collect::<Vec<_>>() {
                self.forget(session);
            }
            if let Some(bound) = bound
                && let Err(error) = self.doors.open(bound, &self.doorway)
            {
                tracing::error!("other nodes cannot be listened to: {error}");
            }
        }
    }

    /// Takes new connections. Says whether there may be more.
    fn accept(&mut self, context: &mut Context<'_>) -> bool {
        let mut accepted = Vec::new();
        if let Some(listener) = &self.doors.near {
            while let Poll::Ready(next) = listener.poll_accept(context) {
                match next {
                    Ok((stream, _)) => accepted.push((Stream::Unix(stream), None)),
                    Err(error) => {
                        // Out of descriptors, or a connection that broke at once. The next look
                        // tries again.
                        tracing::warn!("could not accept a connection: {error}");
                        break;
                    }
                }
            }
        }
        let mut again = false;
        if let Some(gate) = &mut self.doors.far {
            again = gate.poll_knocks(context);
            while let Poll::Ready(entered) = gate.poll_entered(context) {
                let stream = Stream::Tls(Box::new(entered.stream));
                accepted.push((stream, Some(entered.node)));
            }
        }
        for (stream, node) in accepted {
            self.connect(context, stream, node);
        }
        again
    }

    fn connect(&mut self, context: &mut Context<'_>, stream: Stream, node: Option<NodeName>) {
        let mut link = Link::new(stream);
        if self.connections.len() >= CONNECTIONS_MAX {
            link.object(context, Objection::Crowded);
            self.note(&link, Side::Here, Refusal::Crowded);
            link.part(context);
            return;
        }
        self.session_last += 1;
        let connection = Connection {
            link,
            node,
            knows_file: false,
            since: Instant::now(),
            paused: false,
        };
        self.connections.insert(self.session_last, connection);
    }

    fn note(&self, link: &Link, by: Side, why: Refusal) {
        let mut refusals = self.doorway.refusals.lock();
        refusals.add(link.peer_ip(), by, why);
    }

    /// Reads what has arrived. Says whether there may be more.
    fn receive(&mut self, context: &mut Context<'_>) -> bool {
        let mut again = false;
        let mut ended = Vec::new();
        for (session, connection) in &mut self.connections {
            connection.paused = is_busy(&self.replica, *session, &connection.link);
            if connection.paused {
                continue;
            }
            let received = &mut self.received;
            let (mut strange, mut lend, mut knows) = (false, None, false);
            let sink = |arrival| match arrival {
                Arrival::Message(envelope) => received.push((*session, envelope)),
                Arrival::Lend(offered) => lend = Some(offered),
                Arrival::Knows(_) => knows = true,
                Arrival::DataFile(_) | Arrival::Borrows | Arrival::Objects(_) => strange = true,
            };
            let polled = connection.link.poll_receive(context, sink);
            if knows && let Err(error) = connection.link.send_knows(KNOWS_ALL) {
                tracing::debug!(session, "{error}");
            }
            if let Some(lend) = lend
                && let Err(error) = connection.link.borrow(&lend)
            {
                // Then the bytes come by the connection.
                tracing::debug!(session, "the volume's memory is not seen here: {error}");
            }
            if strange {
                ended.push((*session, WireError::Nonsense.into()));
                continue;
            }
            if connection.link.is_near() && !connection.knows_file {
                connection.knows_file = true;
                if let Some(file) = self.replica.data_file()
                    && let Err(error) = connection.link.send_data_file(&file)
                {
                    // Then it is read by messages.
                    tracing::debug!("{error}");
                }
            }
            match polled {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => again = true,
                Poll::Ready(Err(error)) => ended.push((*session, error)),
            }
        }
        for (session, error) in ended {
            self.end(session, &error);
        }
        again
    }

    fn end(&mut self, session: SessionId, error: &LinkError) {
        if let Some(connection) = self.connections.remove(&session) {
            let gate = self
                .doors
                .far
                .as_ref()
                .filter(|_| connection.node.is_some());
            let own = gate.map(|gate| gate.node());
            match Refusal::behind(error, own, None) {
                Some((by, why)) => self.note(&connection.link, by, why),
                None if matches!(error, LinkError::Choked) => {
                    tracing::warn!(session, "a connection was closed: {error}");
                }
                None => tracing::debug!(session, "{error}"),
            }
        }
        self.forget(session);
    }

    /// Forgets a connection that is gone.
    fn forget(&mut self, session: SessionId) {
        // What it sent before is not worked on: nobody would hear of it.
        self.received.retain(|(of, _)| *of != session);
        self.replica.take(Event::Closed { session });
    }

    /// Ends the connections of nodes that may not serve the volume any more. Says whether there were some.
    fn drop_revoked(&mut self) -> bool {
        let Some(gate) = &self.doors.far else {
            return false;
        };
        let revoked: Vec<_> = self
            .connections
            .extract_if(.., |_, it| {
                it.node.as_ref().is_some_and(|node| !gate.allows(node))
            })
            .collect();
        let is_some = !revoked.is_empty();
        for (session, connection) in revoked {
            if let Some(found) = connection.node {
                let why = Refusal::OtherNode { found };
                self.note(&connection.link, Side::Here, why);
            }
            self.forget(session);
        }
        is_some
    }

    /// Does what the replica wants of its connections.
    fn grant(&mut self, context: &mut Context<'_>) {
        let mut ended = Vec::new();
        for wish in std::mem::take(&mut self.wishes) {
            match wish {
                Wish::Send(session, envelope) => {
                    if let Some(connection) = self.connections.get_mut(&session)
                        && let Err(error) = connection.link.send(&envelope)
                    {
                        ended.push((session, error));
                    }
                }
                Wish::Close(session) => {
                    if let Some(connection) = self.connections.remove(&session) {
                        connection.link.part(context);
                    }
                }
                Wish::Restart => self.connections.clear(),
            }
        }
        for (session, error) in ended {
            self.end(session, &error);
            context.waker().wake_by_ref();
        }
    }

    fn flush(&mut self, context: &mut Context<'_>) {
        let mut ended = Vec::new();
        for (session, connection) in &mut self.connections {
            if let Err(error) = connection.link.poll_flush(context) {
                ended.push((*session, error));
            }
        }
        for (session, error) in ended {
            self.end(session, &error);
            // The member has something to do about it.
            context.waker().wake_by_ref();
        }
    }

    fn drop_strangers(&mut self) {
        let now = Instant::now();
        let replica = &self.replica;
        self.connections.retain(|session, connection| {
            let stays =
                replica.obeys(*session) || now.duration_since(connection.since) < STRANGER_MAX;
            if !stays {
                tracing::warn!(
                    session,
                    "a connection was closed: it is not the coordinator's"
                );
            }
            stays
        });
    }
}

fn is_busy(replica: &ReplicaCore, session: SessionId, link: &Link) -> bool {
    let (requests, bytes) = replica.backlog(session);
    requests >= BACKLOG_REQUESTS_MAX
        || bytes >= BACKLOG_BYTES_MAX
        || link.unsent_bytes() >= UNSENT_BYTES_MAX
}
