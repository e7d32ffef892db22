//! The disk of a replica: what the member asks for, done on the files of its directory.
//!
//! Bytes go through the page cache. A write, zeros and a read of what is in the cache are done at once,
//! by whoever asks: they take microseconds, less than handing them to another thread would. What may
//! take long has threads of its own: changes of the meta data (one thread, so that they are done in
//! order), syncs (one), and reads that the cache does not have (a few).
//!
//! Operations on the same bytes are in order because the member asks for a write only when no read
//! of the same bytes is under way, and a write is over when [`FileDisk::submit`] returns.

use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;

use rustix::io::Errno;
use tokio::sync::mpsc as done;

use super::ReplicaSettings;
use super::buffers::Buffers;
use super::reader::Reader;
use super::room;
use crate::member::{DiskOp, DiskResult};
use crate::proto::{Content, Geometry, Key, Meta, MetaChange, View};
use crate::replica::{MetaStore, NoteFile, Provisioning, Replica, punch, zero};
use crate::wire::Place;
use crate::{Error, Result};

/// Threads for reads that the cache does not have.
const READERS: usize = 2;

/// What a member works on.
pub trait Disk: Send {
    /// Begins an operation. What can be done at once is answered at once; the rest is answered by
    /// [`Disk::poll_done`], with the token.
    fn submit(&mut self, token: u64, op: DiskOp) -> Option<DiskResult>;

    /// The next operation that was begun and is done.
    fn poll_done(&mut self, context: &mut Context<'_>) -> Poll<(u64, DiskResult)>;

    /// Remembers how far the bytes are, beyond this process.
    fn note(&mut self, key: Key);

    /// How many bytes are free and how many there are in all, if a write may need some of them.
    fn space(&self) -> Option<(u64, u64)>;

    /// When the bytes were last written, in seconds since 1970, if that is known.
    fn written_at(&self) -> Option<u64>;

    /// Where others on this machine can read the bytes that have been written, if they can.
    fn place(&self) -> Option<Place>;
}

/// What a replica has on its disk when it is opened.
pub struct Found {
    /// The meta data.
    pub meta: Meta,
    /// The key that the last process left, if the machine has not lost its memory since.
    pub note: Option<Key>,
}

enum Job {
    Persist(Box<MetaChange>),
    Reserve { size: u64 },
    Sync,
    Read { offset: u64, length: u64 },
}

type Queue = Sender<(u64, Job)>;

/// The files of a replica's directory.
pub struct FileDisk {
    replica: Replica,
    reader: Arc<Reader>,
    provisioning: Provisioning,
    note: NoteFile,
    note_failed: bool,
    /// Queues of the threads: meta data, syncs, reads. They end when these are dropped.
    meta: Option<Queue>,
    sync: Option<Queue>,
    read: Option<Queue>,
    done: done::UnboundedReceiver<(u64, DiskResult)>,
    threads: Vec<JoinHandle<()>>,
}

impl FileDisk {
    /// Opens the replica and starts the threads of its disk.
    pub fn open(settings: &ReplicaSettings) -> Result<(FileDisk, Found)> {
        let ReplicaSettings {
            path,
            pool,
            identity,
            provisioning,
        } = settings;
        let replica = Replica::open_served(path, *pool, *identity)?;
        // A replica that never took part knows nothing that anybody else does not know better.
        let nobody = View::blank(identity.replica);
        let store = MetaStore::open(&replica, Geometry::STANDARD, nobody)?;
        let mut store = store.provisioned(*provisioning);
        let found_meta = store.meta().clone();
        let (note, key) = NoteFile::open(&replica)?;
        let (done_to, done) = done::unbounded_channel();
        let mut threads = Vec::new();
        let mut start = |name: &str, work: Box<dyn FnMut(Job) -> DiskResult + Send>| {
            let (queue, jobs) = channel();
            let jobs = Arc::new(Mutex::new(jobs));
            threads.push(worker(name, &jobs, &done_to, work)?);
            Ok::<Queue, Error>(queue)
        };
        let (of_meta, of_sync) = (replica.clone(), replica.clone());
        let provisioning = *provisioning;
        let meta = start(
            "replica-meta",
            Box::new(move |job| work_on_meta(&mut store, &of_meta, provisioning, &job)),
        )?;
        let sync = start("replica-sync", Box::new(move |_| sync_data(&of_sync)))?;
        let (read, jobs) = channel();
        let jobs = Arc::new(Mutex::new(jobs));
        let reader = Arc::new(Reader::new(replica.data(), Buffers::default()));
        for _ in 0..READERS {
            let (replica, reader) = (replica.clone(), Arc::clone(&reader));
            threads.push(worker(
                "replica-read",
                &jobs,
                &done_to,
                move |job| match job {
                    Job::Read { offset, length } => {
                        was_read(&replica, reader.read(replica.data(), offset, length))
                    }
                    _ => DiskResult::Failed,
                },
            )?);
        }
        let disk = FileDisk {
            replica,
            reader,
            provisioning,
            note,
            note_failed: false,
            meta: Some(meta),
            sync: Some(sync),
            read: Some(read),
            done,
            threads,
        };
        let found = Found {
            meta: found_meta,
            note: key,
        };
        Ok((disk, found))
    }

    fn write(&self, offset: u64, data: &[u8]) -> DiskResult {
        let written = self.replica.data().write_all_at(data, offset);
        self.answer("write", written)
    }

    fn zero(&self, offset: u64, length: u64) -> DiskResult {
        let data = self.replica.data();
        let made = match self.provisioning {
            Provisioning::Thin => punch(data, offset, length),
            Provisioning::Thick => zero(data, offset, length),
        };
        match made {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                self.answer("write zeros to", room::write_zeros(data, offset, length))
            }
            other => self.answer("zero", other.map_err(io::Error::from)),
        }
    }

    /// Zeros what has a place, and leaves holes as they are.
    fn clear(&self, offset: u64, length: u64) -> DiskResult {
        let data = self.replica.data();
        let found = room::allocated(data, offset, length);
        let cleared = found.and_then(|pieces| {
            let zero = |(offset, length)| room::write_zeros(data, offset, length);
            pieces.into_iter().try_for_each(zero)
        });
        self.answer("write zeros to", cleared)
    }

    /// Whether a write of that range would find its space. No space is an answer here, and nothing to warn of.
    fn allocate(&self, offset: u64, length: u64) -> DiskResult {
        match room::allocate(self.replica.data(), offset, length) {
            Err(error) if is_full(&error) => DiskResult::NoSpace,
            other => self.answer("allocate", other),
        }
    }

    fn answer(&self, doing: &str, result: io::Result<()>) -> DiskResult {
        let Err(error) = result else {
            return DiskResult::Done;
        };
        let path = self.replica.data_path();
        tracing::warn!("could not {doing} {}: {error}", path.display());
        if is_full(&error) {
            DiskResult::NoSpace
        } else {
            DiskResult::Failed
        }
    }

    fn hand_over(queue: Option<&Queue>, token: u64, job: Job) -> Option<DiskResult> {
        let sent = queue.is_some_and(|queue| queue.send((token, job)).is_ok());
        (!sent).then_some(DiskResult::Failed)
    }
}

impl Disk for FileDisk {
    fn submit(&mut self, token: u64, op: DiskOp) -> Option<DiskResult> {
        match op {
            DiskOp::Write { offset, data } => Some(self.write(offset, &data)),
            DiskOp::Zero { offset, length } => Some(self.zero(offset, length)),
            DiskOp::Clear { offset, length } => Some(self.clear(offset, length)),
            DiskOp::Allocate { offset, length } => Some(self.allocate(offset, length)),
            DiskOp::Read { offset, length } => {
                let at_once = self.reader.at_once(self.replica.data(), offset, length);
                match at_once {
                    Some(result) => Some(was_read(&self.replica, result)),
                    None => {
                        let job = Job::Read { offset, length };
                        Self::hand_over(self.read.as_ref(), token, job)
                    }
                }
            }
            DiskOp::Sync => Self::hand_over(self.sync.as_ref(), token, Job::Sync),
            DiskOp::Persist(change) => {
                Self::hand_over(self.meta.as_ref(), token, Job::Persist(change))
            }
            DiskOp::Reserve { size } => {
                Self::hand_over(self.meta.as_ref(), token, Job::Reserve { size })
            }
        }
    }

    fn poll_done(&mut self, context: &mut Context<'_>) -> Poll<(u64, DiskResult)> {
        match self.done.poll_recv(context) {
            Poll::Ready(Some(done)) => Poll::Ready(done),
            // The threads end after us.
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    fn note(&mut self, key: Key) {
        let written = self.note.write(key);
        let failed = written.is_err();
        if let Err(error) = written
            && !self.note_failed
        {
            // The durable key counts then, after the death of this process: other replicas have more.
            tracing::warn!("{error}");
        }
        self.note_failed = failed;
    }

    fn space(&self) -> Option<(u64, u64)> {
        if self.provisioning == Provisioning::Thick {
            return None;
        }
        room::space(self.replica.data())
    }

    fn written_at(&self) -> Option<u64> {
        let stat = self.replica.data().metadata().ok()?;
        u64::try_from(stat.mtime()).ok()
    }

    fn place(&self) -> Option<Place> {
        let path = std::path::absolute(self.replica.data_path()).ok()?;
        let stat = self.replica.data().metadata().ok()?;
        Some(Place {
            path,
            device: stat.dev(),
            inode: stat.ino(),
        })
    }
}

impl Drop for FileDisk {
    /// Waits for what is under way: whoever opens the replica next must not meet it.
    fn drop(&mut self) {
        (self.meta, self.sync, self.read) = (None, None, None);
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

fn worker(
    name: &str,
    jobs: &Arc<Mutex<Receiver<(u64, Job)>>>,
    done: &done::UnboundedSender<(u64, DiskResult)>,
    mut work: impl FnMut(Job) -> DiskResult + Send + 'static,
) -> Result<JoinHandle<()>> {
    let (jobs, done) = (Arc::clone(jobs), done.clone());
    let run = move || {
        loop {
            let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((token, job)) = job else { return };
            if done.send((token, work(job))).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    thread.map_err(|source| Error::Thread { source })
}

fn work_on_meta(
    store: &mut MetaStore,
    replica: &Replica,
    provisioning: Provisioning,
    job: &Job,
) -> DiskResult {
    let result = match job {
        Job::Persist(change) => store.persist(change),
        Job::Reserve { size } => replica.reserve(trellis_api::Bytes::new(*size), provisioning),
        Job::Sync | Job::Read { .. } => return DiskResult::Failed,
    };
    match result {
        Ok(()) => DiskResult::Done,
        Err(error) => {
            tracing::warn!("{}", super::in_full(&error));
            match &error {
                Error::NoSpace { .. } | Error::FileTooLong { .. } => DiskResult::NoSpace,
                Error::Io { source, .. }
                    if is_full(source) && matches!(job, Job::Reserve { .. }) =>
                {
                    DiskResult::NoSpace
                }
                _ => DiskResult::Failed,
            }
        }
    }
}

fn sync_data(replica: &Replica) -> DiskResult {
    match replica.data().sync_data() {
        Ok(()) => DiskResult::Done,
        Err(error) => {
            let path = replica.data_path();
            tracing::warn!("could not sync {}: {error}", path.display());
            DiskResult::Failed
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOSPC | Errno::DQUOT)
    )
}

fn was_read(replica: &Replica, result: io::Result<Content>) -> DiskResult {
    match result {
        Ok(content) => DiskResult::Read(content),
        Err(error) => {
            let path = replica.data_path();
            tracing::warn!("could not read {}: {error}", path.display());
            DiskResult::Failed
        }
    }
}
