//! The driver: sockets, timers, and the futures of volumes.
//!
//! One task serves a connection. Each time it is woken it takes the answers that are ready, reads what has come,
//! starts what can start, and writes everything that is ready in one call, until nothing moves any more. Nothing is
//! spawned for a command.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{BufMut, BytesMut};
use futures::stream::{FuturesUnordered, Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep, sleep_until, timeout};

use crate::error::Disconnect;
use crate::limits::{
    ACCEPT_PAUSE, DATA_IN_BYTES_MAX, LAST_WORDS, LISTEN_BACKLOG, LOGIN_SEGMENT_BYTES_MAX,
    LOGOUT_GRACE, READ_CHUNK_BYTES, ROUNDS_BEFORE_YIELD,
};
use crate::login::Chap;
use crate::pool::Memory;
use crate::portal::{Portal, lock};
use crate::session::{Connection, Times, Work};
use crate::socket;

/// How a portal is served.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Sessions, discovery among them.
    pub sessions_max: usize,
    /// Connections that have not logged in; one more pushes out the oldest.
    pub half_open_max: usize,
    /// How long things may take.
    pub times: Times,
    /// The proof that discovery asks for.
    pub discovery_chap: Option<Chap>,
    /// Where the volumes want the data of long writes, if they care.
    pub memory: Option<Arc<dyn Memory>>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            sessions_max: 256,
            half_open_max: 512,
            times: Times::default(),
            discovery_chap: None,
            memory: None,
        }
    }
}

/// What the server tells a connection.
enum Signal {
    /// Others need the place of a connection that does not log in.
    MakeRoom,
    /// Ask the initiator to log out.
    Farewell,
    /// End now.
    End,
}

#[derive(Default)]
struct Connections {
    last_id: u64,
    all: BTreeMap<u64, mpsc::Sender<Signal>>,
    /// In the order in which they came.
    half_open: BTreeMap<u64, mpsc::Sender<Signal>>,
}

impl Connections {
    /// A connection has come. Makes room if there are too many that have not logged in.
    fn add(&mut self, half_open_max: usize) -> (u64, mpsc::Receiver<Signal>) {
        while self.half_open.len() >= half_open_max.max(1) {
            if let Some((_, oldest)) = self.half_open.pop_first() {
                let _full = oldest.try_send(Signal::MakeRoom);
            }
        }
        self.last_id += 1;
        let (sender, receiver) = mpsc::channel(4);
        self.all.insert(self.last_id, sender.clone());
        self.half_open.insert(self.last_id, sender);
        (self.last_id, receiver)
    }

    fn tell_all(&self, signal: impl Fn() -> Signal) {
        for sender in self.all.values() {
            let _full = sender.try_send(signal());
        }
    }
}

/// A listening portal.
pub struct Server {
    portal: Arc<Portal>,
    local: SocketAddr,
    connections: Arc<Mutex<Connections>>,
    accepting: JoinHandle<()>,
    /// Ends when the last connection has gone.
    gone: mpsc::Receiver<Infallible>,
}

impl Server {
    /// Listen on an address and serve the targets that are added to [`Server::portal`].
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub fn bind(address: SocketAddr, config: ServerConfig) -> io::Result<Server> {
        let listener = listen(address)?;
        let local = listener.local_addr()?;
        let portal = Portal::with_memory(
            config.sessions_max,
            config.discovery_chap.clone(),
            config.memory.clone(),
        );
        let connections: Arc<Mutex<Connections>> = Arc::default();
        let (hold, gone) = mpsc::channel(1);
        let acceptor = Acceptor {
            listener,
            portal: Arc::clone(&portal),
            connections: Arc::clone(&connections),
            config,
            hold,
        };
        let accepting = tokio::spawn(acceptor.run());
        Ok(Server {
            portal,
            local,
            connections,
            accepting,
            gone,
        })
    }

    /// The targets and sessions.
    pub fn portal(&self) -> &Arc<Portal> {
        &self.portal
    }

    /// The address that is listened on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Connections that have not logged in.
    pub fn half_open(&self) -> usize {
        lock(&self.connections).half_open.len()
    }

    /// Stop: accept no new connections, ask initiators to log out, then end the rest. Waits for operations that
    /// volumes have begun.
    pub async fn stop(mut self) {
        self.accepting.abort();
        let _aborted = (&mut self.accepting).await;
        lock(&self.connections).tell_all(|| Signal::Farewell);
        if timeout(LOGOUT_GRACE, self.gone.recv()).await.is_err() {
            lock(&self.connections).tell_all(|| Signal::End);
            while self.gone.recv().await.is_some() {}
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
        lock(&self.connections).tell_all(|| Signal::End);
    }
}

/// A long queue, so that a flood of connections does not make the system drop those of others.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(LISTEN_BACKLOG)
}

struct Acceptor {
    listener: TcpListener,
    portal: Arc<Portal>,
    connections: Arc<Mutex<Connections>>,
    config: ServerConfig,
    hold: mpsc::Sender<Infallible>,
}

impl Acceptor {
    async fn run(self) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => self.admit(stream, peer),
                Err(error) => {
                    // Out of file descriptors or memory: connections that end will give some back.
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream, peer: SocketAddr) {
        let Ok(local) = stream.local_addr() else {
            return;
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, %peer, "cannot switch off delays");
        }
        let (id, signals) = lock(&self.connections).add(self.config.half_open_max);
        let membership = Membership {
            id,
            connections: Arc::clone(&self.connections),
        };
        let conn = Connection::new(
            Arc::clone(&self.portal),
            local,
            self.config.times,
            Instant::now(),
        );
        let hold = self.hold.clone();
        tokio::spawn(async move {
            let mut driver = Driver::new(stream, conn, signals, membership);
            let reason = driver.run().await;
            tracing::debug!(%peer, %reason, "connection ends");
            driver.end(&reason).await;
            drop(hold);
        });
    }
}

/// A connection's place in the list; given up when dropped.
struct Membership {
    id: u64,
    connections: Arc<Mutex<Connections>>,
}

impl Membership {
    fn logged_in(&self) {
        lock(&self.connections).half_open.remove(&self.id);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut connections = lock(&self.connections);
        connections.all.remove(&self.id);
        connections.half_open.remove(&self.id);
    }
}

/// Serves one connection.
struct Driver {
    stream: TcpStream,
    conn: Connection,
    input: BytesMut,
    work: FuturesUnordered<Work>,
    timer: Pin<Box<Sleep>>,
    signals: mpsc::Receiver<Signal>,
    membership: Membership,
    half_open: bool,
}

impl Driver {
    fn new(
        stream: TcpStream,
        conn: Connection,
        signals: mpsc::Receiver<Signal>,
        membership: Membership,
    ) -> Self {
        let timer = Box::pin(sleep_until(conn.deadline().into()));
        Driver {
            stream,
            conn,
            input: BytesMut::new(),
            work: FuturesUnordered::new(),
            timer,
            signals,
            membership,
            half_open: true,
        }
    }

    async fn run(&mut self) -> Disconnect {
        poll_fn(|cx| self.poll(cx)).await
    }

    /// Move until nothing moves. Ready when the connection has to end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Disconnect> {
        for _ in 0..ROUNDS_BEFORE_YIELD {
            match self.round(cx) {
                Ok(true) => {}
                Ok(false) => return Poll::Pending,
                Err(reason) => return Poll::Ready(reason),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// One look at everything; answers whether something moved.
    fn round(&mut self, cx: &mut Context<'_>) -> Result<bool, Disconnect> {
        let mut moved = self.poll_signals(cx)?;
        moved |= self.poll_work(cx)?;
        moved |= self.poll_read(cx)?;
        self.conn.pump();
        moved |= self.poll_write(cx)?;
        while let Some(work) = self.conn.take_running() {
            self.work.push(work);
            moved = true;
        }
        moved |= self.poll_timer(cx)?;
        Ok(moved)
    }

    fn poll_signals(&mut self, cx: &mut Context<'_>) -> Result<bool, Disconnect> {
        let mut moved = false;
        while let Poll::Ready(Some(signal)) = self.signals.poll_recv(cx) {
            moved = true;
            match signal {
                Signal::MakeRoom if self.half_open => return Err(Disconnect::LoginTimeout),
                Signal::MakeRoom => {}
                Signal::Farewell if self.half_open => return Err(Disconnect::Stopped),
                Signal::Farewell => self.conn.request_logout(LOGOUT_GRACE),
                Signal::End => return Err(Disconnect::Stopped),
            }
        }
        while let Poll::Ready(control) = self.conn.poll_control(cx) {
            moved = true;
            self.conn.control(&control?);
        }
        Ok(moved)
    }

    fn poll_work(&mut self, cx: &mut Context<'_>) -> Result<bool, Disconnect> {
        let mut moved = false;
        while let Poll::Ready(Some(done)) = Pin::new(&mut self.work).poll_next(cx) {
            moved = true;
            self.conn.complete(done)?;
        }
        Ok(moved)
    }

    /// Read what has come; answers how much, and nothing when the peer is gone.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        if let Some(room) = self.conn.room() {
            let mut room = ReadBuf::new(room);
            let read = ready!(Pin::new(&mut self.stream).poll_read(cx, &mut room));
            let len = read.map_or(0, |()| room.filled().len());
            self.conn.filled(len);
            return Poll::Ready(len);
        }
        let most = if self.half_open {
            usize::try_from(LOGIN_SEGMENT_BYTES_MAX).unwrap_or(READ_CHUNK_BYTES)
        } else {
            self.conn.read_bytes()
        };
        if self.input.capacity() - self.input.len() < most.min(READ_CHUNK_BYTES / 16) {
            self.input.reserve(most);
        }
        let mut input = (&mut self.input).limit(most);
        let read = pin!(self.stream.read_buf(&mut input));
        read.poll(cx).map(|read| read.unwrap_or(0))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Result<bool, Disconnect> {
        // A peer that does not take its answers is not listened to.
        if self.conn.outbox().bytes() >= DATA_IN_BYTES_MAX {
            return Ok(false);
        }
        match self.poll_fill(cx) {
            Poll::Pending => return Ok(false),
            Poll::Ready(0) => return Err(Disconnect::PeerGone),
            Poll::Ready(_) => {}
        }
        self.conn.heard(Instant::now());
        while let Some(pdu) = self.conn.decode(&mut self.input)? {
            self.conn.receive(pdu)?;
        }
        self.notice_login();
        Ok(true)
    }

    fn notice_login(&mut self) {
        if self.half_open && self.conn.logged_in() {
            self.half_open = false;
            self.membership.logged_in();
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Result<bool, Disconnect> {
        let mut moved = false;
        while !self.conn.outbox().is_empty() {
            match self.stream.poll_write_ready(cx) {
                Poll::Pending => break,
                Poll::Ready(Err(_)) => return Err(Disconnect::PeerGone),
                Poll::Ready(Ok(())) => {}
            }
            let (stream, out) = (&self.stream, self.conn.outbox());
            match stream.try_io(Interest::WRITABLE, || socket::write(out, stream)) {
                Ok(written) => {
                    moved = true;
                    out.advance(written);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(Disconnect::Unreadable);
                }
                Err(_) => return Err(Disconnect::PeerGone),
            }
        }
        self.notice_login();
        Ok(moved)
    }

    /// The timer is set again only when it has expired, so hearing from the peer costs no timer.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Result<bool, Disconnect> {
        let mut moved = false;
        while self.timer.as_mut().poll(cx).is_ready() {
            moved = true;
            self.conn.tick(Instant::now())?;
            self.timer.as_mut().reset(self.conn.deadline().into());
        }
        Ok(moved)
    }

    /// Write the last words, and wait for operations that volumes have begun: only then may another session take over.
    async fn end(&mut self, reason: &Disconnect) {
        if !matches!(
            reason,
            Disconnect::PeerGone | Disconnect::Silent | Disconnect::Unreadable
        ) {
            let words = self.conn.outbox().take();
            let said = timeout(LAST_WORDS, async {
                self.stream.write_all(&words).await?;
                self.stream.shutdown().await
            });
            let _best_effort = said.await;
        }
        while self.work.next().await.is_some() {}
    }
}
