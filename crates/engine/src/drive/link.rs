//! A connection as messages: frames are read into memory that their payload keeps, and written from
//! where their payload is.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpStream, UnixStream};

use super::Address;
use crate::proto::Envelope;
use crate::wire::{self, Arrival, HEADER_BYTES, Place, Sum, WireError};

/// How much room a read has at least. A frame that needs more gets more.
const READ_BYTES: usize = 256 << 10;

/// Of a frame that is so long, no more is read than its end: what follows it would have to be moved to where
/// its own frame is put together.
const LONG_BYTES: usize = 128 << 10;

/// When less room than this is left, a read gets new memory.
const READ_BYTES_MIN: usize = 16 << 10;

/// Memory that was read into and is kept until nobody has it any more, to be used again: new memory has to be
/// cleared by the kernel.
const SPARES_MAX: usize = 4;

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
        bytes_max: usize,
    ) -> Poll<io::Result<usize>> {
        let mut buffer = buffer.limit(bytes_max);
        match self {
            Stream::Unix(stream) => pin!(stream.read_buf(&mut buffer)).poll(context),
            Stream::Tcp(stream) => pin!(stream.read_buf(&mut buffer)).poll(context),
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
    /// What the checksums of the frames cover that are sent.
    sum: Sum,
    /// What those of frames that arrive must cover at least.
    least: Sum,
    incoming: BytesMut,
    spares: Vec<BytesMut>,
    /// How long the frame is whose start has arrived, and how many bytes of it are missing.
    whole: usize,
    missing: usize,
    /// How long the last long frame was: the next one may be as long.
    room: usize,
    /// Heads of frames that are not in the queue yet.
    heads: BytesMut,
    unsent: VecDeque<Bytes>,
    unsent_bytes: usize,
}

impl Link {
    /// A connection on which payloads are summed up, until the peer sends one that is not: an older one does
    /// not know that.
    pub(super) fn new(stream: Stream) -> Link {
        let least = match stream {
            // What the kernel carries from one process to another does not change on the way.
            Stream::Unix(_) => Sum::Head,
            Stream::Tcp(_) => Sum::Whole,
        };
        Link {
            stream,
            sum: Sum::Whole,
            least,
            incoming: BytesMut::new(),
            spares: Vec::new(),
            whole: 0,
            missing: 0,
            room: READ_BYTES,
            heads: BytesMut::new(),
            unsent: VecDeque::new(),
            unsent_bytes: 0,
        }
    }

    /// How many bytes wait to be written.
    pub(super) fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Stops summing payloads up, if the peer is on this machine.
    pub(super) fn trust(&mut self) {
        self.sum = self.least;
    }

    /// Whether the peer is on this machine.
    pub(super) fn is_near(&self) -> bool {
        self.least == Sum::Head
    }

    /// Whether payloads are not summed up.
    pub(super) fn trusts(&self) -> bool {
        self.sum == Sum::Head
    }

    /// Hands everything that has arrived to `sink`. Pending: all that was there has been read, and
    /// the task is woken when there is more. Ready: there is an end, or others should have their turn
    /// first, and it is to be called again.
    pub(super) fn poll_receive(
        &mut self,
        context: &mut Context<'_>,
        mut sink: impl FnMut(Arrival),
    ) -> Poll<Result<(), LinkError>> {
        let mut read_bytes = 0;
        loop {
            let free = self.incoming.capacity() - self.incoming.len();
            if free < READ_BYTES_MIN.max(self.missing) {
                self.make_room();
            }
            let bytes_max = if self.missing > 0 && self.whole >= LONG_BYTES {
                self.missing
            } else if self.room > READ_BYTES {
                self.room
            } else {
                usize::MAX
            };
            let polled = self
                .stream
                .poll_read(context, &mut self.incoming, bytes_max);
            match ready!(polled) {
                Ok(0) => return Poll::Ready(Err(LinkError::Closed)),
                Ok(read) => {
                    while let Some(arrival) = self.next_frame()? {
                        sink(arrival);
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

    /// Gives the next read other memory, with what has arrived of a frame.
    fn make_room(&mut self) {
        let room = self.incoming.len() + self.room.max(self.missing);
        let usable = self.spares.iter_mut().position(|it| it.try_reclaim(room));
        let mut next = match usable {
            Some(at) => self.spares.swap_remove(at),
            None => BytesMut::with_capacity(room),
        };
        next.extend_from_slice(&self.incoming);
        let mut last = std::mem::replace(&mut self.incoming, next);
        last.clear();
        if self.spares.len() >= SPARES_MAX {
            self.spares.remove(0);
        }
        self.spares.push(last);
    }

    /// The next frame of which all bytes are there.
    fn next_frame(&mut self) -> Result<Option<Arrival>, WireError> {
        self.missing = 0;
        let Some(header) = self.incoming.first_chunk::<HEADER_BYTES>().copied() else {
            return Ok(None);
        };
        let body = wire::body_length(&header)?;
        let whole = HEADER_BYTES + body;
        self.whole = whole;
        self.missing = whole.saturating_sub(self.incoming.len());
        if self.missing > 0 {
            return Ok(None);
        }
        self.room = whole.max(READ_BYTES);
        self.incoming.advance(HEADER_BYTES);
        let body = self.incoming.split_to(body).freeze();
        let arrival = wire::decode_any(&header, &body, self.least)?;
        if wire::is_unsummed(&header) {
            self.trust();
        }
        Ok(Some(arrival))
    }

    /// Queues the place of a data file.
    pub(super) fn send_place(&mut self, place: &Place) -> Result<(), LinkError> {
        let before = self.heads.len();
        wire::encode_place(place, &mut self.heads)?;
        self.unsent_bytes += self.heads.len() - before;
        Ok(())
    }

    /// Queues a message. [`Link::poll_flush`] writes it.
    pub(super) fn send(&mut self, envelope: &Envelope) -> Result<(), LinkError> {
        let before = self.heads.len();
        let payload = wire::encode_into(envelope, self.sum, &mut self.heads)?;
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
