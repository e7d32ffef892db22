//! A connection as messages. Frames are read into memory that their payload keeps alive, and written from where their
//! payload is, without a copy.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::lent::{Arena, Borrowed, Loans};
use super::tls::TlsStream;
use crate::proto::{Body, Envelope, Request};
use crate::wire::{
    self, Arrival, DataFile, HEADER_BYTES, Lend, Objection, Payload, Sum, WireError,
};

/// How much room a read has at least. A frame that needs more gets more.
const READ_BYTES: usize = 256 << 10;

/// A frame at least this long is read only to its end. Bytes behind it would have to be moved to where their own frame
/// is assembled.
const LONG_BYTES: usize = 128 << 10;

/// When less room than this is left, a read gets new memory.
const READ_BYTES_MIN: usize = 16 << 10;

/// How many used read buffers are kept until they are free, to be used again: the kernel has to clear new memory.
const SPARES_MAX: usize = 4;

/// How much is read from a connection before others have their turn.
const TURN_BYTES_MAX: usize = 4 << 20;

/// Pieces that one call writes.
const SLICES_MAX: usize = 64;

/// How much may wait to be written. A peer that lets more pile up is gone.
const UNSENT_BYTES_MAX: usize = 256 << 20;

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
    /// TLS says so.
    #[error("{0}")]
    Tls(#[from] rustls::Error),
    /// The other side has said why it hangs up.
    #[error("the other side hung up: {0:?}")]
    Objected(Objection),
    /// The other side lacks what is needed here.
    #[error("the other side lacks features {missing:#x}")]
    Lacks {
        /// What is missing, as bits of kind 6.
        missing: u32,
    },
}

/// A socket of either kind.
pub(super) enum Stream {
    Unix(UnixStream),
    Tls(Box<TlsStream>),
}

impl Stream {
    fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        buffer: &mut BytesMut,
        bytes_max: usize,
    ) -> Poll<Result<usize, LinkError>> {
        match self {
            Stream::Unix(stream) => {
                let mut buffer = buffer.limit(bytes_max);
                loop {
                    match ready!(pin!(stream.read_buf(&mut buffer)).poll(context)) {
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        read => return Poll::Ready(Ok(read?)),
                    }
                }
            }
            Stream::Tls(stream) => stream.poll_read(context, buffer, bytes_max),
        }
    }

    /// Says that nothing more comes, and waits until the other side has closed its end.
    async fn end(self) {
        let mut rest = [0; 4096];
        match self {
            Stream::Unix(mut stream) => {
                // If it is closed already, that is what is waited for.
                let _ = stream.shutdown().await;
                while !matches!(stream.read(&mut rest).await, Ok(0) | Err(_)) {}
            }
            Stream::Tls(_) => {}
        }
    }

    /// Takes over what there is room for. The task is woken when there is room again.
    fn poll_write(
        &mut self,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize, LinkError>> {
        let stream = match self {
            Stream::Unix(stream) => stream,
            Stream::Tls(stream) => return stream.poll_write(context, slices),
        };
        loop {
            match stream.try_write_vectored(slices) {
                Ok(written) => return Poll::Ready(Ok(written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(stream.poll_write_ready(context))?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Sends what was taken over. The task is woken when more of it can be sent.
    fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        match self {
            Stream::Unix(_) => Poll::Ready(Ok(())),
            Stream::Tls(stream) => stream.poll_flush(context),
        }
    }
}

/// A connection that carries messages.
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
    /// Memory that the peer has borrowed from us, and what of it the peer may still look at.
    arena: Option<Arc<Arena>>,
    loans: Loans,
    /// Memory that we have borrowed from the peer.
    borrowed: Option<Arc<Borrowed>>,
}

impl Link {
    /// A connection. On one machine it has checksums over payloads, until the peer sends a frame without: an older
    /// peer does not know such frames.
    pub(super) fn new(stream: Stream) -> Link {
        let (sum, least) = match stream {
            // What the kernel carries from one process to another does not change on the way.
            Stream::Unix(_) => (Sum::Whole, Sum::Head),
            // What changes on the way is not opened. A peer on another node is never one that knows only whole sums.
            Stream::Tls(_) => (Sum::Head, Sum::Head),
        };
        Link {
            stream,
            sum,
            least,
            incoming: BytesMut::new(),
            spares: Vec::new(),
            whole: 0,
            missing: 0,
            room: READ_BYTES,
            heads: BytesMut::new(),
            unsent: VecDeque::new(),
            unsent_bytes: 0,
            arena: None,
            loans: Loans::default(),
            borrowed: None,
        }
    }

    /// Queues the place of memory that the peer may borrow.
    pub(super) fn offer(&mut self, arena: &Arena) -> Result<(), LinkError> {
        let before = self.heads.len();
        wire::encode_lend(&arena.lend()?, &mut self.heads)?;
        self.unsent_bytes += self.heads.len() - before;
        Ok(())
    }

    /// The peer has borrowed what it was offered.
    pub(super) fn lends(&mut self, arena: Arc<Arena>) {
        self.arena = Some(arena);
    }

    /// Borrows the memory of the peer, and queues the word of it.
    pub(super) fn borrow(&mut self, lend: &Lend) -> Result<(), LinkError> {
        let Stream::Unix(stream) = &self.stream else {
            return Err(WireError::Nonsense.into());
        };
        self.borrowed = Some(Borrowed::open(stream, lend)?);
        let before = self.heads.len();
        wire::encode_borrows(&mut self.heads)?;
        self.unsent_bytes += self.heads.len() - before;
        Ok(())
    }

    /// The peer has applied all entries up to this one, and no longer looks at their payloads.
    pub(super) fn given_back(&mut self, seq: u64) {
        self.loans.end(seq);
    }

    /// Ends the connection. Memory that the peer may still look at is kept until it has closed its end.
    pub(super) fn close(mut self) {
        if !self.loans.is_empty() {
            tokio::spawn(async move {
                self.stream.end().await;
                self.loans.end(u64::MAX);
            });
        }
    }

    /// Ends the connection, and lets the peer read what was said last, if the socket takes that at once.
    pub(super) fn part(mut self, context: &mut Context<'_>) {
        // The connection ends, whether this arrives or not.
        let _ = self.poll_flush(context);
        match self.stream {
            Stream::Unix(_) => {}
            Stream::Tls(stream) => drop(tokio::spawn(stream.linger())),
        }
    }

    /// How many bytes wait to be written.
    pub(super) fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Stops summing payloads up, if something else sees to them.
    pub(super) fn trust(&mut self) {
        self.sum = self.least;
    }

    /// Whether the peer is on this machine, and no older version.
    pub(super) fn is_near(&self) -> bool {
        matches!(self.stream, Stream::Unix(_)) && self.sum == Sum::Head
    }

    /// Where the peer is, if it is on another machine.
    pub(super) fn peer_ip(&self) -> Option<IpAddr> {
        match &self.stream {
            Stream::Unix(_) => None,
            Stream::Tls(stream) => stream.peer_address().ok().map(|at| at.ip()),
        }
    }

    /// Says why the connection ends, as far as the socket takes it at once.
    pub(super) fn object(&mut self, context: &mut Context<'_>, objection: Objection) {
        let before = self.heads.len();
        if wire::encode_objects(objection, &mut self.heads).is_ok() {
            self.unsent_bytes += self.heads.len() - before;
            // The connection ends, whether this arrives or not.
            let _ = self.poll_flush(context);
        }
    }

    /// Hands everything that has arrived to `sink`. Pending: everything was read, and the task is woken when there is
    /// more. Ready: the connection has ended, or others should have their turn first; call it again.
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
                    while let Some(arrival) = self.next(context)? {
                        sink(arrival);
                    }
                    read_bytes += read;
                    if read_bytes >= TURN_BYTES_MAX {
                        return Poll::Ready(Ok(()));
                    }
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// The next frame, if it is one that this peer may send. A peer of another version is told so.
    fn next(&mut self, context: &mut Context<'_>) -> Result<Option<Arrival>, LinkError> {
        match self.next_frame() {
            Ok(Some(Arrival::Objects(objection))) => Err(LinkError::Objected(objection)),
            // Files and memory of this machine are nothing that a peer on another one can speak of.
            Ok(Some(Arrival::DataFile(_) | Arrival::Lend(_) | Arrival::Borrows))
                if matches!(self.stream, Stream::Tls(_)) =>
            {
                Err(WireError::Nonsense.into())
            }
            Ok(arrival) => Ok(arrival),
            Err(error) => {
                if let WireError::Version { theirs, .. } = error {
                    self.object(context, Objection::Version { shown: theirs });
                }
                Err(error.into())
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
        let borrowed = |at, length| self.borrowed.as_ref()?.bytes(at, length);
        let arrival = wire::decode_any(&header, &body, self.least, &borrowed)?;
        if wire::is_unsummed(&header) {
            self.trust();
        }
        Ok(Some(arrival))
    }

    /// Queues what is known here.
    pub(super) fn send_knows(&mut self, bits: u32) -> Result<(), LinkError> {
        let before = self.heads.len();
        wire::encode_knows(bits, &mut self.heads)?;
        self.unsent_bytes += self.heads.len() - before;
        Ok(())
    }

    /// Queues where a data file is.
    pub(super) fn send_data_file(&mut self, file: &DataFile) -> Result<(), LinkError> {
        let before = self.heads.len();
        wire::encode_data_file(file, &mut self.heads)?;
        self.unsent_bytes += self.heads.len() - before;
        Ok(())
    }

    /// Queues a message. [`Link::poll_flush`] writes it.
    pub(super) fn send(&mut self, envelope: &Envelope) -> Result<(), LinkError> {
        let before = self.heads.len();
        // Only entries are answered in a way that says that the peer has no more use for the payload.
        let (arena, entry) = match &envelope.body {
            Body::Request(Request::Entry(entry)) => (self.arena.as_ref(), entry.key.seq),
            _ => (None, 0),
        };
        let place_of = |payload: &Bytes| arena?.place_of(payload);
        let payload = wire::encode_into(envelope, self.sum, &place_of, &mut self.heads)?;
        self.unsent_bytes += self.heads.len() - before;
        match payload {
            Payload::Follows(payload) if payload.is_empty() => {}
            Payload::Follows(payload) => {
                self.unsent_bytes += payload.len();
                self.unsent.push_back(self.heads.split().freeze());
                self.unsent.push_back(payload);
            }
            Payload::Lent(payload) => self.loans.add(entry, payload),
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
            match self.stream.poll_write(context, &slices[..count]) {
                Poll::Ready(written) => self.written(written?),
                Poll::Pending => return Ok(()),
            }
        }
        match self.stream.poll_flush(context) {
            Poll::Ready(flushed) => flushed,
            Poll::Pending => Ok(()),
        }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::future::poll_fn;

    use uuid::Uuid;

    use super::*;
    use crate::proto::{Entry, EntryOp, Key, Promise};

    fn entry(seq: u64, data: Bytes) -> Envelope {
        let key = Key { seq, ..Key::FRESH };
        let op = EntryOp::Write { offset: 0, data };
        Envelope {
            volume: Uuid::nil(),
            replica: Uuid::nil(),
            promise: Promise::default(),
            size_version: 1,
            index: seq,
            body: Body::Request(Request::Entry(Entry { key, op })),
        }
    }

    fn lent(arena: &Arc<Arena>, value: u8) -> Bytes {
        let mut slot = arena.take(4096).unwrap();
        slot.room().fill(value);
        slot.freeze()
    }

    async fn flush(link: &mut Link) {
        poll_fn(|context| Poll::Ready(link.poll_flush(context)))
            .await
            .unwrap();
    }

    /// Waits for the next frames, as many as arrive together.
    async fn arrivals(link: &mut Link) -> Vec<Arrival> {
        let mut arrived = Vec::new();
        poll_fn(|context| {
            let _ = link.poll_receive(context, |arrival| arrived.push(arrival));
            if arrived.is_empty() {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
        .await;
        arrived
    }

    /// Two ends of a connection, the second of which has borrowed from the first.
    async fn borrowed_pair(arena: &Arc<Arena>) -> (Link, Link) {
        let (volume, replica) = UnixStream::pair().unwrap();
        let (mut volume, mut replica) = (
            Link::new(Stream::Unix(volume)),
            Link::new(Stream::Unix(replica)),
        );
        volume.offer(arena).unwrap();
        flush(&mut volume).await;
        let Some(Arrival::Lend(lend)) = arrivals(&mut replica).await.pop() else {
            panic!("nothing was offered");
        };
        replica.borrow(&lend).unwrap();
        flush(&mut replica).await;
        assert_eq!(arrivals(&mut volume).await, [Arrival::Borrows]);
        volume.lends(Arc::clone(arena));
        (volume, replica)
    }

    #[tokio::test]
    async fn a_payload_that_is_lent_is_not_sent_and_is_kept_until_it_is_given_back() {
        // Fails if lent bytes travel by the socket, or their memory is used again while the replica may look.
        let arena = Arena::new().unwrap();
        let (mut volume, mut replica) = borrowed_pair(&arena).await;
        let mut places = Vec::new();
        for (seq, value) in [(1, 1), (2, 2)] {
            let data = lent(&arena, value);
            places.push(arena.place_of(&data));
            volume.send(&entry(seq, data)).unwrap();
        }
        assert!(volume.unsent_bytes() < 1000);
        flush(&mut volume).await;
        let arrived = arrivals(&mut replica).await;
        let wanted = |seq, value| Arrival::Message(entry(seq, vec![value; 4096].into()));
        assert_eq!(arrived, [wanted(1, 1), wanted(2, 2)]);
        volume.given_back(1);
        assert_eq!(arena.place_of(&lent(&arena, 3)), places[0]);
        let (third, fourth) = (lent(&arena, 3), lent(&arena, 4));
        let now = [&third, &fourth].map(|data| arena.place_of(data));
        assert!(!now.contains(&places[1]), "what is lent was used again");
        assert_eq!(arrived[1], wanted(2, 2));
    }

    #[tokio::test]
    async fn a_loan_outlives_the_connection_until_the_replica_has_done_with_it() {
        // Fails if a replica that was frozen, and given up, finds other bytes when it goes on.
        let arena = Arena::new().unwrap();
        let (mut volume, mut replica) = borrowed_pair(&arena).await;
        let data = lent(&arena, 1);
        let place = arena.place_of(&data);
        volume.send(&entry(1, data)).unwrap();
        flush(&mut volume).await;
        let arrived = arrivals(&mut replica).await;
        volume.close();
        drop(replica);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_ne!(arena.place_of(&lent(&arena, 2)), place);
        assert_eq!(arrived, [Arrival::Message(entry(1, vec![1; 4096].into()))]);
        drop(arrived);
        for _ in 0..1000 {
            if arena.place_of(&lent(&arena, 2)) == place {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        panic!("the memory was never used again");
    }

    #[tokio::test]
    async fn what_was_lent_on_a_connection_that_just_vanishes_is_never_used_again() {
        // Fails if a volume that ends in a hurry can overwrite what a replica still looks at.
        let arena = Arena::new().unwrap();
        let (mut volume, _replica) = borrowed_pair(&arena).await;
        let data = lent(&arena, 1);
        let place = arena.place_of(&data);
        volume.send(&entry(1, data)).unwrap();
        drop(volume);
        let slots: Vec<Bytes> = (0..10).map(|_| lent(&arena, 2)).collect();
        assert!(slots.iter().all(|slot| arena.place_of(slot) != place));
    }
}
