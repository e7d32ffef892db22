//! One connection to the kernel: takes requests, answers what it can, and asks the backing for the rest.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::abi::{self, InvalInodeOut, OutHeader, StoreOut, WriteOut};
use super::buffer::RequestBuffer;
use super::journal::{Done, Entry, Journal, Left};
use super::reply::{BackingRequest, Pending};
use super::request::{self, Ask, Node};
use super::tree::{self, Shown};
use super::wait::Waiting;
use super::{Backing, Negotiated, REQUEST_BYTES_MAX};
use crate::sys::fuse as device;

/// The kernel's unit of `max_pages`, and what a write's data is aligned to in memory.
pub(super) const PAGE_BYTES: usize = 4096;
/// How many requests of data the kernel may have under way. A loop device has 128.
const BACKGROUND_MAX: u16 = 512;
/// The most pieces of one answer, below the kernel's limit of 1024 per call; more are merged.
const PIECES_MAX: usize = 1000;
/// What is told at mount and forgotten by the kernel where it does not know it.
const WANTED: u64 = abi::init::ASYNC_READ
    | abi::init::BIG_WRITES
    | abi::init::ASYNC_DIO
    | abi::init::PARALLEL_DIROPS
    | abi::init::MAX_PAGES
    | abi::init::EXT;

/// A request that was taken: the kernel's number for it, and where it is recorded until it is answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) unique: u64,
    pub(super) entry: Entry,
}

pub(super) struct Connection {
    pub(super) device: OwnedFd,
    pub(super) journal: Arc<Journal>,
    pub(super) backing: Arc<dyn Backing>,
    patience: Option<Duration>,
    pub(super) waiting: Waiting,
    /// Requests of data that were taken and not answered.
    under_way: AtomicUsize,
    /// Set when everything was done that a predecessor had left.
    caught_up: AtomicBool,
    /// Set when the kernel said that nothing will come any more.
    ended: AtomicBool,
}

impl Connection {
    pub(super) fn new(
        device: OwnedFd,
        journal: Journal,
        backing: Arc<dyn Backing>,
        patience: Option<Duration>,
    ) -> Self {
        Connection {
            device,
            journal: Arc::new(journal),
            backing,
            patience,
            waiting: Waiting::default(),
            under_way: AtomicUsize::new(0),
            caught_up: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    /// Does what is asked in `buffer`, which holds one request.
    pub(super) fn handle(self: &Arc<Self>, buffer: &mut RequestBuffer) {
        let Some(request) = request::parse(buffer.request()) else {
            let len = buffer.request().len();
            tracing::error!(len, "a request without a header");
            return;
        };
        let Some((taken, bytes)) = buffer.take(request.unique) else {
            return;
        };
        match request.ask {
            Ok(ask) => self.obey(taken, ask, bytes),
            Err(errno) => self.refuse(taken, errno),
        }
    }

    /// Serves the requests that a predecessor left undone, and answers those that it may have left unanswered.
    pub(super) fn catch_up(self: &Arc<Self>, left: Vec<Left>) {
        let (mut taken, mut answered) = (0, 0);
        for left in left {
            match left {
                Left::Taken(entry, bytes) => match request::parse(&bytes) {
                    Some(request) => {
                        let unique = request.unique;
                        let asked = Taken { unique, entry };
                        taken += 1;
                        match request.ask {
                            Ok(ask) => self.obey(asked, ask, Some(bytes)),
                            Err(errno) => self.refuse(asked, errno),
                        }
                    }
                    None => self.journal.free(entry),
                },
                Left::Answering(entry, unique, done) => {
                    let asked = Taken { unique, entry };
                    answered += 1;
                    match done {
                        Done::Made(written) => self.answer_made(asked, written),
                        Done::Refused(errno) => self.refuse(asked, errno),
                    }
                }
            }
        }
        tracing::info!(taken, answered, "requests that a predecessor left");
    }

    /// Whether everything that a predecessor left is done. Only then is anything new taken: leftovers must not come
    /// after later requests.
    pub(super) fn caught_up(&self) -> bool {
        if self.idle() {
            self.caught_up.store(true, Ordering::Release);
        }
        self.caught_up.load(Ordering::Acquire)
    }

    fn obey(self: &Arc<Self>, taken: Taken, ask: Ask, bytes: Option<Bytes>) {
        match ask {
            Ask::Read { offset, len } => {
                let len = u32::try_from(self.within(offset, u64::from(len))).unwrap_or(len);
                if len == 0 {
                    return self.answer(taken, &[]);
                }
                self.ask_backing(taken, BackingRequest::Read { offset, len });
            }
            Ask::Write {
                offset,
                data,
                durable,
            } => {
                match bytes.filter(|bytes| data.end <= bytes.len()) {
                    Some(bytes) => self.ask_to_write(taken, offset, bytes.slice(data), durable),
                    // Only a write of no bytes at all stands elsewhere.
                    None => self.ask_to_write(taken, offset, Bytes::new(), durable),
                }
            }
            Ask::Zero {
                offset,
                len,
                deallocate,
                keep_size,
            } => {
                let inside = self.within(offset, len);
                if self.backing.read_only() {
                    self.refuse(taken, Errno::ROFS);
                } else if inside < len && !keep_size {
                    self.refuse(taken, Errno::NOSPC);
                } else if inside == 0 {
                    self.answer(taken, &[]);
                } else {
                    let request = BackingRequest::Zero {
                        offset,
                        len: inside,
                        deallocate,
                    };
                    self.ask_backing(taken, request);
                }
            }
            Ask::Sync => self.ask_backing(taken, BackingRequest::Flush),
            Ask::Unanswered => self.journal.free(taken.entry),
            at_once => self.answer_at_once(taken, at_once),
        }
    }

    fn ask_to_write(self: &Arc<Self>, taken: Taken, offset: u64, mut data: Bytes, fua: bool) {
        if self.backing.read_only() {
            return self.refuse(taken, Errno::ROFS);
        }
        let asked = u64::try_from(data.len()).unwrap_or(u64::MAX);
        let inside = usize::try_from(self.within(offset, asked)).unwrap_or(data.len());
        // As at the end of a block device: what fits is written, and nothing fits behind the end.
        data.truncate(inside);
        if data.is_empty() && asked > 0 {
            return self.refuse(taken, Errno::NOSPC);
        }
        self.ask_backing(taken, BackingRequest::Write { offset, data, fua });
    }

    /// What can be answered without the backing's data.
    fn answer_at_once(&self, taken: Taken, ask: Ask) {
        let shown = self.shown();
        match ask {
            Ask::Init {
                major,
                minor,
                flags,
            } => match negotiate(major, minor, flags) {
                Ok(agreed) => self.answer_init(taken, agreed),
                Err(errno) => self.refuse(taken, errno),
            },
            Ask::Lookup { found: Some(_) } => self.answer_with(taken, shown.entry().as_bytes()),
            Ask::Lookup { found: None } => self.refuse(taken, Errno::NOENT),
            Ask::GetAttr(node) => self.answer_with(taken, shown.attributes(node).as_bytes()),
            Ask::SetAttr {
                node,
                size,
                identity,
            } => {
                // To be cut off, or to be stretched by others than its owner, is not for this file. Times
                // are not kept, and setting them is harmless.
                let same_size = size.is_none_or(|size| node == Node::Volume && size == shown.size);
                if same_size && !identity {
                    self.answer_with(taken, shown.attributes(node).as_bytes());
                } else {
                    self.refuse(taken, Errno::PERM);
                }
            }
            Ask::Open { for_writing: true } if shown.read_only => self.refuse(taken, Errno::ROFS),
            Ask::Open { .. } => self.answer_with(taken, tree::opened().as_bytes()),
            Ask::OpenDir => self.answer_with(taken, abi::OpenOut::default().as_bytes()),
            Ask::ReadDir { offset, len } => {
                self.answer_with(taken, &tree::entries(offset, len));
            }
            Ask::StatFs => self.answer_with(taken, shown.statistics().as_bytes()),
            Ask::Nothing => self.answer_with(taken, &[]),
            Ask::Read { .. } | Ask::Write { .. } | Ask::Zero { .. } | Ask::Sync => {
                self.refuse(taken, Errno::IO);
            }
            Ask::Unanswered => self.journal.free(taken.entry),
        }
    }

    pub(super) fn answer_init(&self, taken: Taken, agreed: Negotiated) {
        let flags = agreed.flags & WANTED;
        let pages = usize::try_from(REQUEST_BYTES_MAX).map_or(1, |bytes| bytes / PAGE_BYTES);
        let answer = abi::InitOut {
            major: abi::MAJOR,
            minor: agreed.minor,
            flags: u32::try_from(flags & u64::from(u32::MAX)).unwrap_or_default(),
            flags2: u32::try_from(flags >> 32).unwrap_or_default(),
            max_background: BACKGROUND_MAX,
            congestion_threshold: BACKGROUND_MAX / 4 * 3,
            max_write: REQUEST_BYTES_MAX,
            time_gran: 1,
            max_pages: u16::try_from(pages).unwrap_or(1),
            ..abi::InitOut::default()
        };
        self.answer_with(taken, answer.as_bytes());
    }

    fn ask_backing(self: &Arc<Self>, taken: Taken, request: BackingRequest) {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        Pending {
            connection: Arc::clone(self),
            taken,
            request,
            asked_at: Instant::now(),
        }
        .ask();
    }

    /// Keeps a request whose volume is not ready, or gives it up when it has waited long enough.
    pub(super) fn ask_again_later(&self, pending: Pending) {
        let waited = pending.asked_at.elapsed();
        if self.patience.is_none_or(|patience| waited < patience) {
            self.waiting.put(pending);
        } else {
            tracing::warn!(?waited, "a request was given up, its volume was not ready");
            pending.refuse(Errno::TIMEDOUT);
        }
    }

    pub(super) fn answered_one(&self) {
        self.under_way.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn idle(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
    }

    pub(super) fn ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    pub(super) fn set_ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    fn shown(&self) -> Shown {
        Shown {
            size: self.backing.size(),
            read_only: self.backing.read_only(),
        }
    }

    /// How much of a range is inside of the volume.
    fn within(&self, offset: u64, len: u64) -> u64 {
        len.min(self.backing.size().saturating_sub(offset))
    }

    pub(super) fn refuse(&self, taken: Taken, errno: Errno) {
        let header = header(taken.unique, -errno.raw_os_error(), 0);
        self.send(taken, &[IoSlice::new(header.as_bytes())]);
    }

    /// Answers with one piece.
    pub(super) fn answer_with(&self, taken: Taken, body: &[u8]) {
        let header = header(taken.unique, 0, body.len());
        self.send(
            taken,
            &[IoSlice::new(header.as_bytes()), IoSlice::new(body)],
        );
    }

    /// Answers that a change was made; a write tells how much was written.
    pub(super) fn answer_made(&self, taken: Taken, written: Option<u32>) {
        match written {
            Some(size) => {
                let written = WriteOut { size, padding: 0 };
                self.answer_with(taken, written.as_bytes());
            }
            None => self.answer_with(taken, &[]),
        }
    }

    /// Answers with data.
    pub(super) fn answer(&self, taken: Taken, pieces: &[Bytes]) {
        match pieces {
            [] => self.answer_with(taken, &[]),
            [one] => self.answer_with(taken, one),
            many if many.len() <= PIECES_MAX => {
                let header = header(taken.unique, 0, many.iter().map(Bytes::len).sum());
                let mut slices = Vec::with_capacity(many.len() + 1);
                slices.push(IoSlice::new(header.as_bytes()));
                slices.extend(many.iter().map(|piece| IoSlice::new(piece)));
                self.send(taken, &slices);
            }
            many => self.answer_with(taken, &many.concat()),
        }
    }

    /// Gives the one answer to a request, which is over then.
    fn send(&self, taken: Taken, message: &[IoSlice<'_>]) {
        self.tell(message);
        self.journal.free(taken.entry);
    }

    fn tell(&self, message: &[IoSlice<'_>]) {
        match self.write(message) {
            // The request is gone: its process was killed, or a predecessor has answered it.
            Ok(()) | Err(Errno::NOENT) => {}
            // There is nobody left to be told.
            Err(Errno::NODEV | Errno::NOTCONN | Errno::PERM) => {}
            Err(errno) => tracing::error!(%errno, "the kernel did not take an answer"),
        }
    }

    /// A message is one call, and is taken whole or not at all.
    fn write(&self, message: &[IoSlice<'_>]) -> rustix::io::Result<()> {
        rustix::io::retry_on_intr(|| rustix::io::writev(&self.device, message)).map(drop)
    }

    /// Sends the kernel a notification. A file that it does not (or no longer) know needs none.
    fn notify(&self, code: i32, body: &[u8], data: &[u8]) -> rustix::io::Result<()> {
        let header = header(0, code, body.len() + data.len());
        let message = [header.as_bytes(), body, data].map(IoSlice::new);
        match self.write(&message) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }

    /// Tells the kernel the current size. Storing a byte at the end raises the kernel's idea of the size, whatever
    /// else goes on; the byte itself is then discarded.
    pub(super) fn tell_size(&self) -> rustix::io::Result<()> {
        let Some(last) = self.backing.size().checked_sub(1) else {
            return Ok(());
        };
        let store = StoreOut {
            nodeid: abi::VOLUME,
            offset: last,
            size: 1,
            padding: 0,
        };
        self.notify(abi::notify::STORE, store.as_bytes(), &[0])?;
        let forget = InvalInodeOut {
            ino: abi::VOLUME,
            offset: i64::try_from(last).map_err(|_| Errno::FBIG)?,
            len: 1,
        };
        self.notify(abi::notify::INVAL_INODE, forget.as_bytes(), &[])
    }

    /// Waits for the first request, which says what the kernel can, and answers it.
    pub(super) fn first_request(&self, limit: Duration) -> rustix::io::Result<Negotiated> {
        let mut buffer = RequestBuffer::new(&self.journal)?;
        if !device::readable(self.device.as_fd(), limit)? {
            return Err(Errno::TIMEDOUT);
        }
        buffer.read(&self.device)?;
        let request = request::parse(buffer.request()).ok_or(Errno::PROTO)?;
        let (taken, _) = buffer.take(request.unique).ok_or(Errno::PROTO)?;
        let Ask::Init {
            major,
            minor,
            flags,
        } = request.ask?
        else {
            return Err(Errno::PROTO);
        };
        match negotiate(major, minor, flags) {
            Ok(agreed) => {
                self.answer_init(taken, agreed);
                Ok(agreed)
            }
            Err(errno) => {
                self.refuse(taken, errno);
                Err(errno)
            }
        }
    }
}

/// The header of an answer or notification of so many bytes. None has more than [`REQUEST_BYTES_MAX`].
fn header(unique: u64, error: i32, body_bytes: usize) -> OutHeader {
    let len = size_of::<OutHeader>() + body_bytes;
    OutHeader {
        len: u32::try_from(len).unwrap_or(u32::MAX),
        error,
        unique,
    }
}

fn negotiate(major: u32, minor: u32, flags: u64) -> Result<Negotiated, Errno> {
    if major != abi::MAJOR || minor < abi::MINOR_MIN {
        return Err(Errno::PROTO);
    }
    Ok(Negotiated {
        minor: minor.min(abi::MINOR),
        flags: flags & WANTED,
    })
}
