//! The answer to one request for data, given by the backing when it is ready.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use rustix::io::Errno;

use super::connection::{Connection, Taken};
use super::journal::Done;
use super::{BackingError, Chunks};

/// A request to a backing, kept until it is answered so that it can be asked again.
#[derive(Clone, Debug)]
pub(super) enum BackingRequest {
    Read {
        offset: u64,
        len: u32,
    },
    Write {
        offset: u64,
        data: Bytes,
        fua: bool,
    },
    Zero {
        offset: u64,
        len: u64,
        deallocate: bool,
    },
    Flush,
}

/// A request that was taken and not answered yet.
pub(super) struct Pending {
    pub(super) connection: Arc<Connection>,
    pub(super) taken: Taken,
    pub(super) request: BackingRequest,
    /// When it was asked for.
    pub(super) asked_at: Instant,
}

impl Pending {
    /// Asks the backing.
    pub(super) fn ask(self) {
        let connection = Arc::clone(&self.connection);
        let backing = &connection.backing;
        match self.request.clone() {
            BackingRequest::Read { offset, len } => backing.read(offset, len, Reply::new(self)),
            BackingRequest::Write { offset, data, fua } => {
                backing.write(offset, data, fua, Reply::new(self))
            }
            BackingRequest::Zero {
                offset,
                len,
                deallocate,
            } => backing.zero(offset, len, deallocate, Reply::new(self)),
            BackingRequest::Flush => backing.flush(Reply::new(self)),
        }
    }

    fn fail(self, error: BackingError) {
        match error {
            BackingError::NotReady => {
                let connection = Arc::clone(&self.connection);
                connection.ask_again_later(self);
            }
            BackingError::NoSpaceYet => {
                let connection = Arc::clone(&self.connection);
                connection.waiting.put(self);
            }
            BackingError::Medium => self.refuse(Errno::IO),
            BackingError::NoSpace => self.refuse(Errno::NOSPC),
            BackingError::ReadOnly => self.refuse(Errno::ROFS),
            BackingError::OutOfRange => self.refuse(Errno::NXIO),
        }
    }

    pub(super) fn refuse(self, errno: Errno) {
        self.note(Done::Refused(errno));
        self.connection.refuse(self.taken, errno);
        self.connection.answered_one();
    }

    fn answer(self, parts: &[Bytes]) {
        self.connection.answer(self.taken, parts);
        self.connection.answered_one();
    }

    /// Records the result of a change before anybody can hear of it. A read is simply done again.
    fn note(&self, done: Done) {
        if !matches!(self.request, BackingRequest::Read { .. }) {
            self.connection.journal.answering(self.taken.entry, done);
        }
    }

    fn answer_made(self) {
        let written = match &self.request {
            BackingRequest::Write { data, .. } => {
                Some(u32::try_from(data.len()).unwrap_or(u32::MAX))
            }
            _ => None,
        };
        self.note(Done::Made(written));
        self.connection.answer_made(self.taken, written);
        self.connection.answered_one();
    }
}

/// The one answer to a request. Dropping it unanswered fails the request, so the kernel never waits for something that
/// nobody has any more.
pub struct Reply<T> {
    pending: Option<Pending>,
    answer: PhantomData<fn(T)>,
}

impl<T> Reply<T> {
    pub(super) fn new(pending: Pending) -> Self {
        Reply {
            pending: Some(pending),
            answer: PhantomData,
        }
    }
}

impl Reply<Chunks> {
    /// Answers a read: all of the bytes that were asked for, or why there are none.
    pub fn send(mut self, result: Result<Chunks, BackingError>) {
        let Some(pending) = self.pending.take() else {
            return;
        };
        let chunks = match result {
            Ok(chunks) => chunks,
            Err(error) => return pending.fail(error),
        };
        let have: usize = chunks.iter().map(Bytes::len).sum();
        let wanted = match pending.request {
            BackingRequest::Read { len, .. } => usize::try_from(len).ok(),
            _ => None,
        };
        if wanted == Some(have) {
            pending.answer(&chunks);
        } else {
            // A short answer would be taken for the end of the file.
            tracing::error!(?wanted, have, "a read was answered with another length");
            pending.refuse(Errno::IO);
        }
    }
}

impl Reply<()> {
    /// Answers that it was done, or why not.
    pub fn send(mut self, result: Result<(), BackingError>) {
        let Some(pending) = self.pending.take() else {
            return;
        };
        match result {
            Ok(()) => pending.answer_made(),
            Err(error) => pending.fail(error),
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            tracing::error!(request = ?pending.request, "a request was dropped unanswered");
            pending.refuse(Errno::IO);
        }
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unique = self.pending.as_ref().map(|pending| pending.taken.unique);
        out.debug_struct("Reply").field("unique", &unique).finish()
    }
}
