//! A connection as messages: frames are read into memory that their payload keeps, and written from
//! where their payload is.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpStream, UnixStream};

use super::Address;
use crate::proto::Envelope;
use crate::wire::{self, HEADER_BYTES, WireError};

/// How much room a read has at least. A frame that needs more gets more.
const READ_BYTES: usize = 256 << 10;

/// When less room than this is left, a read gets new memory.
const READ_BYTES_MIN: usize = 16 << 10;

/// How much is read from a connection before others have their turn.
const TURN_BYTES_MAX: usize = 4 << 20;

/// Pieces that one call writes.
const SLICES_MAX: usize = 64;

/// How much may wait to be written. A peer that lets more pile up is gone.
const UNSENT_BYTES_MAX: usize = 256 << 20;

/// After how long without a sign of life the kernel asks a TCP peer for one, and how often.
const KEEPALIVE_IDLE_S: u64 = 5;
const KEEPALIVE_EVERY_S: u64 = 1;
const KEEPALIVE_TRIES: u32 = 5;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// The other side has closed it.
    #[error("the other side closed the connection")]
    Closed,
    /// The kernel said so.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The other side speaks nonsense.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// The other side does not take what it asked for.
    #[error("the other side does not read what is sent to it")]
    Choked,
}

/// A socket of either kind.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub(super) async fn connect(address: &Address) -> io::Result<Stream> {
        match address {
            Address::Unix(path) => UnixStream::connect(path).await.map(Stream::Unix),
            Address::Tcp(address) => TcpStream::connect(address).await.and_then(Stream::tcp),
        }
    }

    /// A TCP connection that does not wait for more to send, and notices that its peer is gone.
    pub(super) fn tcp(stream: TcpStream) -> io::Result<Stream> {
        use rustix::net::sockopt;
        use std::time::Duration;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(KEEPALIVE_IDLE_S))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(KEEPALIVE_EVERY_S))?;
        sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_TRIES)?;
        Ok(Stream::Tcp(stream))
    }

    fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<io::Result<usize>> {
        match self {
            Stream::Unix(stream) => pin!(stream.read_buf(buffer)).poll(context),
            Stream::Tcp(stream) => pin!(stream.read_buf(buffer)).poll(context),
        }
    }

    fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.try_write_vectored(slices),
            Stream::Tcp(stream) => stream.try_write_vectored(slices),
        }
    }

    fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Stream::Unix(stream) => stream.poll_write_ready(context),
            Stream::Tcp(stream) => stream.poll_write_ready(context),
        }
    }
}

/// A connection that carries messages.
#[derive(Debug)]
pub(super) struct Link {
    stream: Stream,
    incoming: BytesMut,
    /// Heads of frames that are not in the queue yet.
    heads: BytesMut,
    unsent: VecDeque<Bytes>,
    unsent_bytes: usize,
}

impl Link {
    pub(super) fn new(stream: Stream) -> Link {
        Link {
            stream,
            incoming: BytesMut::new(),
            heads: BytesMut::new(),
            unsent: VecDeque::new(),
            unsent_bytes: 0,
        }
    }

    /// How many bytes wait to be written.
    pub(super) fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Hands every message that has arrived to `sink`. Pending: all that was there has been read, and
    /// the task is woken when there is more. Ready: there is an end, or others should have their turn
    /// first, and it is to be called again.
    pub(super) fn poll_receive(
        &mut self,
        context: &mut Context<'_>,
        mut sink: impl FnMut(Envelope),
    ) -> Poll<Result<(), LinkError>> {
        let mut read_bytes = 0;
        loop {
            if self.incoming.capacity() - self.incoming.len() < READ_BYTES_MIN {
                self.incoming.reserve(READ_BYTES);
            }
            match ready!(self.stream.poll_read(context, &mut self.incoming)) {
                Ok(0) => return Poll::Ready(Err(LinkError::Closed)),
                Ok(read) => {
                    while let Some(envelope) = self.next_frame()? {
                        sink(envelope);
                    }
                    read_bytes += read;
                    if read_bytes >= TURN_BYTES_MAX {
                        return Poll::Ready(Ok(()));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// The next message of which all bytes are there.
    fn next_frame(&mut self) -> Result<Option<Envelope>, WireError> {
        let Some(header) = self.incoming.first_chunk::<HEADER_BYTES>().copied() else {
            return Ok(None);
        };
        let body = wire::body_length(&header)?;
        let missing = (HEADER_BYTES + body).saturating_sub(self.incoming.len());
        if missing > 0 {
            self.incoming.reserve(missing);
            return Ok(None);
        }
        self.incoming.advance(HEADER_BYTES);
        let body = self.incoming.split_to(body).freeze();
        wire::decode(&header, &body).map(Some)
    }

    /// Queues a message. [`Link::poll_flush`] writes it.
    pub(super) fn send(&mut self, envelope: &Envelope) -> Result<(), LinkError> {
        let before = self.heads.len();
        let payload = wire::encode_into(envelope, &mut self.heads)?;
        self.unsent_bytes += self.heads.len() - before + payload.len();
        if !payload.is_empty() {
            self.unsent.push_back(self.heads.split().freeze());
            self.unsent.push_back(payload);
        }
        if self.unsent_bytes > UNSENT_BYTES_MAX {
            return Err(LinkError::Choked);
        }
        Ok(())
    }

    /// Writes what the socket takes. The task is woken when it takes more.
    pub(super) fn poll_flush(&mut self, context: &mut Context<'_>) -> Result<(), LinkError> {
        if !self.heads.is_empty() {
            self.unsent.push_back(self.heads.split().freeze());
        }
        while !self.unsent.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let count = self.unsent.len().min(SLICES_MAX);
            for (slice, piece) in slices.iter_mut().zip(&self.unsent) {
                *slice = IoSlice::new(piece);
            }
            match self.stream.try_write(&slices[..count]) {
                Ok(written) => self.written(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    match self.stream.poll_write_ready(context) {
                        Poll::Pending => return Ok(()),
                        Poll::Ready(ready) => ready?,
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn written(&mut self, mut written: usize) {
        self.unsent_bytes -= written;
        while let Some(piece) = self.unsent.front_mut() {
            if written < piece.len() {
                piece.advance(written);
                return;
            }
            written -= piece.len();
            self.unsent.pop_front();
        }
    }
}
