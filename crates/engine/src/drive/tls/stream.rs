//! TLS over a socket that never blocks: rustls makes and opens records, this moves bytes.
//!
//! rustls' own buffers would grow with what a peer sends, and read from the socket in pieces of 4 KiB. So its form
//! without buffers is used, with two of fixed size here: what came from the socket and is not opened yet, and what is
//! sealed and not sent yet. Both are small until the peer has shown who it is.
//!
//! Long payloads are sealed from where they are. Short pieces are gathered first, because every record costs 22 bytes
//! and a call.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use rustls::client::{ClientConnectionData, Resumption, UnbufferedClientConnection};
use rustls::pki_types::ServerName;
use rustls::server::{NoServerSessionStorage, ServerConnectionData, UnbufferedServerConnection};
use rustls::sign::SingleCertAndKey;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

use super::PROVIDER;
use super::credentials::Keys;
use super::verify::Verifier;
use crate::drive::link::LinkError;

/// The most bytes that a record carries, and what it has beside them: a header, a type and a tag.
const RECORD_BYTES: usize = 16 << 10;
const RECORD_EXTRA_BYTES: usize = 5 + 1 + 16;

/// What a peer may send at once before it has shown who it is. A chain of several certificates fits.
const STRANGER_BYTES_MAX: usize = 32 << 10;

/// How much is read, and sealed, before it goes on its way.
const WINDOW_BYTES: usize = 128 << 10;

/// How long, and how much, is read from a peer that was refused, so that it can read why.
const LINGER_MAX: Duration = Duration::from_secs(1);
const LINGER_BYTES_MAX: u64 = 1 << 20;

/// When and how often the kernel probes a silent peer.
const KEEPALIVE_IDLE_S: u64 = 5;
const KEEPALIVE_EVERY_S: u64 = 1;
const KEEPALIVE_TRIES: u32 = 5;

/// Bytes that come in at one end and go out at the other.
struct Window {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Window {
    fn new(length: usize) -> Window {
        Window {
            bytes: vec![0; length],
            start: 0,
            end: 0,
        }
    }

    fn widen(&mut self, length: usize) {
        if self.bytes.len() < length {
            self.bytes.resize(length, 0);
        }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn filled(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.end]
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Room for at least so many bytes, if there is as much at all.
    fn room(&mut self, wanted: usize) -> &mut [u8] {
        if self.bytes.len() - self.end < wanted {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }
}

/// Both kinds of connection, as one.
trait Records {
    type Data;

    fn records<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;

    /// Whether it has something to say.
    fn has_words(&self) -> bool;
}

impl Records for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn records<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, ClientConnectionData> {
        self.process_tls_records(incoming)
    }

    fn has_words(&self) -> bool {
        self.wants_write()
    }
}

impl Records for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn records<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, ServerConnectionData> {
        self.process_tls_records(incoming)
    }

    fn has_words(&self) -> bool {
        self.wants_write()
    }
}

enum Session {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// Where a session stands.
enum Step {
    /// Bytes for us were opened. There may be more.
    Opened,
    /// All that came was opened. Bytes can be sealed; so many were.
    Ready { sealed: usize },
    /// All that came was opened, and the handshake needs more.
    Waits,
    /// The peer says that nothing more comes.
    Ended,
}

/// A TLS connection.
pub(in crate::drive) struct TlsStream {
    socket: TcpStream,
    session: Session,
    incoming: Window,
    outgoing: Window,
    /// Opened while something was being sealed, and not read yet.
    opened: BytesMut,
    /// Where short pieces are gathered.
    gathered: Vec<u8>,
}

impl TlsStream {
    /// The end that dials.
    pub(super) fn client(
        socket: TcpStream,
        keys: &Keys,
        verifier: Arc<Verifier>,
    ) -> Result<TlsStream, LinkError> {
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(Arc::new(resolver(keys)));
        config.resumption = Resumption::disabled();
        // The verifier knows whom it expects. This name goes nowhere.
        config.enable_sni = false;
        let name = ServerName::from(socket.peer_addr()?.ip());
        let session = UnbufferedClientConnection::new(Arc::new(config), name)?;
        TlsStream::new(socket, Session::Client(session))
    }

    /// The end that accepts.
    pub(super) fn server(
        socket: TcpStream,
        keys: &Keys,
        verifier: Arc<Verifier>,
    ) -> Result<TlsStream, LinkError> {
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(resolver(keys)));
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        let session = UnbufferedServerConnection::new(Arc::new(config))?;
        TlsStream::new(socket, Session::Server(session))
    }

    fn new(socket: TcpStream, session: Session) -> Result<TlsStream, LinkError> {
        tune(&socket)?;
        Ok(TlsStream {
            socket,
            session,
            incoming: Window::new(STRANGER_BYTES_MAX),
            outgoing: Window::new(STRANGER_BYTES_MAX),
            opened: BytesMut::new(),
            gathered: Vec::new(),
        })
    }

    /// The other end's address.
    pub(in crate::drive) fn peer_address(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// Goes on until the peer has shown who it is, as far as this side can know. A client knows only afterwards
    /// whether it was accepted itself.
    pub(super) async fn shake_hands(&mut self) -> Result<(), LinkError> {
        std::future::poll_fn(|context| self.poll_shake_hands(context)).await?;
        Ok(())
    }

    fn poll_shake_hands(&mut self, context: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        loop {
            let step = self.step(context, None, &[])?;
            let sent = self.poll_flush(context)?;
            match step {
                Step::Ready { .. } => return sent.map(Ok),
                Step::Opened => continue,
                Step::Ended => return Poll::Ready(Err(LinkError::Closed)),
                Step::Waits => {}
            }
            if ready!(self.poll_fill(context))? == 0 {
                return Poll::Ready(Err(LinkError::Closed));
            }
        }
    }

    /// The peer is one of us: it may fill larger buffers.
    pub(super) fn welcome(&mut self) {
        self.incoming.widen(WINDOW_BYTES);
        self.outgoing.widen(WINDOW_BYTES);
    }

    /// Puts bytes that have arrived behind those in `buffer`, hardly more than `bytes_max`. None: the peer says that
    /// nothing more comes.
    pub(in crate::drive) fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut BytesMut,
        bytes_max: usize,
    ) -> Poll<Result<usize, LinkError>> {
        buffer.reserve(RECORD_BYTES);
        let before = buffer.len();
        if !self.opened.is_empty() {
            let room = buffer.capacity() - before;
            let count = self.opened.len().min(room);
            buffer.extend_from_slice(&self.opened[..count]);
            self.opened.advance(count);
            return Poll::Ready(Ok(count));
        }
        loop {
            let mut has_ended = false;
            while buffer.len() - before < bytes_max
                && buffer.capacity() - buffer.len() >= RECORD_BYTES
            {
                match self.step(context, Some(&mut *buffer), &[])? {
                    Step::Opened => {}
                    Step::Ready { .. } | Step::Waits => break,
                    Step::Ended => {
                        has_ended = true;
                        break;
                    }
                }
            }
            // What TLS itself has to say. If the socket does not take it now, the task is woken when it does.
            let _ = self.poll_flush(context)?;
            if buffer.len() > before || has_ended {
                return Poll::Ready(Ok(buffer.len() - before));
            }
            if ready!(self.poll_fill(context))? == 0 {
                return Poll::Ready(Ok(0));
            }
        }
    }

    /// Seals bytes, and sends what the socket takes. Says how many were sealed; pending, if none.
    pub(in crate::drive) fn poll_write(
        &mut self,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LinkError>> {
        if slices.iter().all(|slice| slice.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        loop {
            let sealed = match self.step(context, None, slices)? {
                Step::Ready { sealed } => sealed,
                Step::Opened => continue,
                Step::Waits | Step::Ended => return Poll::Ready(Err(LinkError::Closed)),
            };
            let sent = self.poll_flush(context)?;
            if sealed > 0 {
                return Poll::Ready(Ok(sealed));
            }
            ready!(sent);
        }
    }

    /// Sends all that is sealed.
    pub(in crate::drive) fn poll_flush(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), LinkError>> {
        while !self.outgoing.is_empty() {
            let socket = Pin::new(&mut self.socket);
            let sent = ready!(socket.poll_write(context, self.outgoing.filled()))?;
            if sent == 0 {
                return Poll::Ready(Err(LinkError::Closed));
            }
            self.outgoing.consume(sent);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads what the socket has. Zero is the end.
    fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<Result<usize, LinkError>> {
        let room = self.incoming.room(RECORD_BYTES);
        if room.is_empty() {
            // Only in a handshake: afterwards a record always fits.
            let error = rustls::Error::PeerSentOversizedRecord;
            return Poll::Ready(Err(error.into()));
        }
        let mut read = ReadBuf::new(room);
        ready!(Pin::new(&mut self.socket).poll_read(context, &mut read))?;
        let count = read.filled().len();
        self.incoming.end += count;
        Poll::Ready(Ok(count))
    }

    /// Opens one record, or seals what fits. An error leaves an alert to be sent, which is tried at once.
    fn step(
        &mut self,
        context: &mut Context<'_>,
        into: Option<&mut BytesMut>,
        slices: &[IoSlice<'_>],
    ) -> Result<Step, LinkError> {
        let into = into.unwrap_or(&mut self.opened);
        let (incoming, outgoing) = (&mut self.incoming, &mut self.outgoing);
        let gathered = &mut self.gathered;
        let step = match &mut self.session {
            Session::Client(session) => step(session, incoming, outgoing, into, slices, gathered),
            Session::Server(session) => step(session, incoming, outgoing, into, slices, gathered),
        };
        let error = match step {
            Ok(step) => return Ok(step),
            Err(error) => error,
        };
        match &mut self.session {
            Session::Client(session) => last_words(session, incoming, outgoing),
            Session::Server(session) => last_words(session, incoming, outgoing),
        }
        // The connection ends, whether this arrives or not.
        let _ = self.poll_flush(context);
        Err(error.into())
    }

    /// Lets the peer read why it was refused: closing a socket with unread bytes in it discards what was sent.
    pub(in crate::drive) async fn linger(mut self) {
        let drained = async {
            std::future::poll_fn(|context| self.poll_flush(context)).await?;
            self.socket.shutdown().await?;
            let mut rest = (&mut self.socket).take(LINGER_BYTES_MAX);
            tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
            Ok::<(), LinkError>(())
        };
        // It has gone already, or does not go: both is an end.
        let _ = tokio::time::timeout(LINGER_MAX, drained).await;
    }
}

fn resolver(keys: &Keys) -> SingleCertAndKey {
    SingleCertAndKey::from(Arc::clone(keys.certified()))
}

/// Sends without delay, and notices when the peer is gone.
fn tune(socket: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(KEEPALIVE_IDLE_S))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(KEEPALIVE_EVERY_S))?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_TRIES)?;
    Ok(())
}

/// Lets the session go on until it has opened something, or has nothing more to do. Then seals what fits.
///
/// It gets all that is not opened yet, also for sealing: of a message that came in parts, rustls remembers places in it.
fn step<R: Records>(
    session: &mut R,
    incoming: &mut Window,
    outgoing: &mut Window,
    into: &mut BytesMut,
    slices: &[IoSlice<'_>],
    gathered: &mut Vec<u8>,
) -> Result<Step, rustls::Error> {
    loop {
        let UnbufferedStatus {
            mut discard, state, ..
        } = session.records(incoming.filled());
        let step = match state {
            Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                while let Some(record) = traffic.next_record() {
                    let record = record?;
                    discard += record.discard;
                    into.extend_from_slice(record.payload);
                }
                Some(Step::Opened)
            }
            Ok(ConnectionState::EncodeTlsData(mut data)) => {
                put(outgoing, |room| data.encode(room))?;
                None
            }
            Ok(ConnectionState::TransmitTlsData(data)) => {
                // It will be: it is in order with everything else.
                data.done();
                None
            }
            Ok(ConnectionState::BlockedHandshake) => Some(Step::Waits),
            Ok(ConnectionState::WriteTraffic(mut traffic)) => {
                let seal = |bytes: &[u8], room: &mut [u8]| traffic.encrypt(bytes, room);
                let sealed = seal_all(slices, outgoing, gathered, seal)?;
                Some(Step::Ready { sealed })
            }
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Some(Step::Ended),
            Ok(_) => return Err(rustls::Error::HandshakeNotComplete),
            Err(error) => {
                incoming.consume(discard);
                return Err(error);
            }
        };
        incoming.consume(discard);
        if let Some(step) = step {
            return Ok(step);
        }
    }
}

/// Puts a message of TLS itself behind what is to be sent.
fn put(
    outgoing: &mut Window,
    mut encode: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
) -> Result<(), rustls::Error> {
    let mut encoded = encode(outgoing.room(RECORD_BYTES));
    if let Err(EncodeError::InsufficientSize(size)) = &encoded {
        // A few of these are all that a session ever has to say.
        let needed = outgoing.end + size.required_size;
        outgoing.widen(needed);
        encoded = encode(outgoing.room(0));
    }
    outgoing.end += encoded.map_err(|_| rustls::Error::EncryptError)?;
    Ok(())
}

/// Seals as much as there is room for.
fn seal_all(
    slices: &[IoSlice<'_>],
    outgoing: &mut Window,
    gathered: &mut Vec<u8>,
    mut seal: impl FnMut(&[u8], &mut [u8]) -> Result<usize, EncryptError>,
) -> Result<usize, rustls::Error> {
    let mut sealed = 0;
    let mut slices = slices.iter().map(|slice| &**slice);
    let mut rest: &[u8] = &[];
    loop {
        let room = outgoing.room(RECORD_BYTES + RECORD_EXTRA_BYTES);
        if room.len() < RECORD_BYTES + RECORD_EXTRA_BYTES {
            return Ok(sealed);
        }
        gathered.clear();
        let record = loop {
            if rest.is_empty() {
                match slices.next() {
                    Some(next) => rest = next,
                    None => break gathered.as_slice(),
                }
            }
            let wanted = RECORD_BYTES - gathered.len();
            let (head, tail) = rest.split_at(rest.len().min(wanted));
            if head.len() == RECORD_BYTES {
                rest = tail;
                break head;
            }
            gathered.extend_from_slice(head);
            rest = tail;
            if gathered.len() == RECORD_BYTES {
                break gathered.as_slice();
            }
        };
        if record.is_empty() {
            return Ok(sealed);
        }
        match seal(record, room) {
            Ok(length) => {
                sealed += record.len();
                outgoing.end += length;
            }
            // A change of keys needs room as well.
            Err(EncryptError::InsufficientSize(_)) => return Ok(sealed),
            Err(EncryptError::EncryptExhausted) => return Err(rustls::Error::EncryptError),
        }
    }
}

/// Takes the alert that a failed session has to send, and looks at nothing more that has come.
fn last_words<R: Records>(session: &mut R, incoming: &mut Window, outgoing: &mut Window) {
    while session.has_words() {
        let status = session.records(incoming.filled());
        let Ok(ConnectionState::EncodeTlsData(mut data)) = status.state else {
            return;
        };
        if put(outgoing, |room| data.encode(room)).is_err() {
            return;
        }
    }
}
