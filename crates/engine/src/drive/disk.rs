//! The disk of a replica: does what the member asks for, on the files of its directory.
//!
//! Bytes go through the page cache. Writes, zeros and reads that hit the cache are done at once by the caller: they
//! take microseconds, less than a handover to another thread. Slow operations have threads of their own: changes of
//! the meta data (one thread, so that they are done in order), syncs (one), and reads that miss the cache (a few).
//!
//! Operations on the same bytes are in order because the member asks for a write only when no read
//! of the same bytes is under way, and a write is over when [`FileDisk::submit`] returns.

use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use rustix::io::Errno;
use tokio::sync::mpsc as done;

use super::ReplicaSettings;
use super::buffers::Buffers;
use super::reader::Reader;
use super::room;
use super::sums::{Overwritten, SumKeeper, rotten_in_file};
use crate::member::{DiskOp, DiskResult};
use crate::proto::{Content, Epoch, Geometry, Key, Meta, MetaChange, Region, View};
use crate::replica::{BLOCK, MetaStore, NoteFile, Provisioning, Replica, SumFile, punch, zero};
use crate::sums::{Coverage, Ended};
use crate::wire::DataFile;
use crate::{Error, Result};

/// Threads for reads that the cache does not have.
const READERS: usize = 2;

/// What a member works on.
pub trait Disk: Send {
    /// Begins an operation. An immediate result is returned at once; any other comes from [`Disk::poll_done`], with
    /// the token.
    fn submit(&mut self, token: u64, op: DiskOp) -> Option<DiskResult>;

    /// The next operation that was begun and is done.
    fn poll_done(&mut self, context: &mut Context<'_>) -> Poll<(u64, DiskResult)>;

    /// Remembers how far the bytes are, beyond this process.
    fn note(&mut self, key: Key);

    /// Free bytes and all bytes of the filesystem, if a write may need some of them.
    fn space(&self) -> Option<(u64, u64)>;

    /// When the bytes were last written, in seconds since 1970, if that is known.
    fn written_at(&self) -> Option<u64>;

    /// Where others on this machine can read the bytes that have been written, if they can.
    fn data_file(&self) -> Option<DataFile>;

    /// Does what is to be done now and then, whether there are operations or not.
    fn look(&mut self);
}

/// What a replica has on its disk when it is opened.
pub struct Found {
    /// The meta data.
    pub meta: Meta,
    /// The key that the last process left, if the machine has not lost its memory since.
    pub note: Option<Key>,
    /// Regions that were written last and in which blocks have rotted.
    pub rotten: Vec<Region>,
}

/// What a thread does, because it may wait for the disk.
enum BlockingOp {
    Persist(Box<MetaChange>),
    Reserve { size: u64 },
    Sync { sums: bool },
    Read { offset: u64, length: u64 },
}

type Queue = Sender<(u64, BlockingOp)>;

/// The files of a replica's directory.
pub struct FileDisk {
    replica: Replica,
    reader: Arc<Reader>,
    provisioning: Provisioning,
    note: NoteFile,
    note_failed: bool,
    /// The sums of its blocks, if it has some.
    sums: Option<SumKeeper>,
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
            checksums,
        } = settings;
        let replica = Replica::open_served(path, *pool, *identity)?;
        // A replica that never took part knows nothing that anybody else does not know better.
        let nobody = View::blank(identity.replica);
        let store = MetaStore::open(&replica, Geometry::STANDARD, nobody)?;
        let mut store = store.provisioned(*provisioning);
        let found_meta = store.meta().clone();
        let (note, key) = NoteFile::open(&replica)?;
        let (sums, rotten) = open_sums(&replica, &found_meta, key, *provisioning, *checksums)?;
        let (done_to, done) = done::unbounded_channel();
        let mut threads = Vec::new();
        let mut start = |name: &str, work: Box<dyn FnMut(BlockingOp) -> DiskResult + Send>| {
            let (queue, ops) = channel();
            let ops = Arc::new(Mutex::new(ops));
            threads.push(worker(name, &ops, &done_to, work)?);
            Ok::<Queue, Error>(queue)
        };
        let (of_meta, of_sync) = (replica.clone(), replica.clone());
        let provisioning = *provisioning;
        let meta = start(
            "replica-meta",
            Box::new(move |op| work_on_meta(&mut store, &of_meta, provisioning, &op)),
        )?;
        let sum_file = sums.as_ref().map(|sums| Arc::clone(sums.file()));
        let synced_sums = sum_file.clone();
        let sync = start(
            "replica-sync",
            Box::new(move |op| sync_files(&of_sync, synced_sums.as_deref(), &op)),
        )?;
        let (read, ops) = channel();
        let ops = Arc::new(Mutex::new(ops));
        let reader = Arc::new(Reader::new(replica.data(), Buffers::default()));
        for _ in 0..READERS {
            let (replica, reader) = (replica.clone(), Arc::clone(&reader));
            let sums = sum_file.clone();
            threads.push(worker(
                "replica-read",
                &ops,
                &done_to,
                move |op| match op {
                    BlockingOp::Read { offset, length } => {
                        let read = reader.read(replica.data(), offset, length);
                        was_read(&replica, offset, read, |content| match &sums {
                            Some(sums) => rotten_in_file(sums, offset, content),
                            None => Ok(Vec::new()),
                        })
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
            sums,
            meta: Some(meta),
            sync: Some(sync),
            read: Some(read),
            done,
            threads,
        };
        let found = Found {
            meta: found_meta,
            note: key,
            rotten,
        };
        Ok((disk, found))
    }

    fn write(&mut self, offset: u64, data: Bytes) -> DiskResult {
        let content = Content::Data(data);
        let before = match self.sums_before(offset, &content) {
            Ok(before) => before,
            Err(result) => return result,
        };
        let Content::Data(data) = &content else {
            return DiskResult::Failed;
        };
        let written = self.replica.data().write_all_at(data, offset);
        self.written("write", written, before.as_ref())
    }

    /// Zeros a range. With sums it is done region by region, as they are stored.
    fn zero(&mut self, mut offset: u64, length: u64) -> DiskResult {
        if self.sums.is_none() {
            return self.zero_piece(offset, length);
        }
        let region = u64::from(Geometry::STANDARD.region_bytes);
        let end = offset.saturating_add(length);
        while offset < end {
            let stop = ((offset / region + 1) * region).min(end);
            let result = self.zero_piece(offset, stop - offset);
            if result != DiskResult::Done {
                return result;
            }
            offset = stop;
        }
        DiskResult::Done
    }

    fn zero_piece(&mut self, offset: u64, length: u64) -> DiskResult {
        let before = match self.sums_before(offset, &Content::Zeros(length)) {
            Ok(before) => before,
            Err(result) => return result,
        };
        let data = self.replica.data();
        let made = match self.provisioning {
            Provisioning::Thin => punch(data, offset, length),
            Provisioning::Thick => zero(data, offset, length),
        };
        let (doing, made) = match made {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                ("write zeros to", room::write_zeros(data, offset, length))
            }
            other => ("zero", other.map_err(io::Error::from)),
        };
        self.written(doing, made, before.as_ref())
    }

    /// Stores the sums of what is about to be written.
    fn sums_before(
        &mut self,
        offset: u64,
        content: &Content,
    ) -> std::result::Result<Option<Overwritten>, DiskResult> {
        let Some(sums) = &mut self.sums else {
            return Ok(None);
        };
        match sums.before_write(self.replica.data(), offset, content) {
            Ok(before) => Ok(Some(before)),
            Err(error) => Err(self.answer("store the sums of", Err(error))),
        }
    }

    fn written(
        &mut self,
        doing: &str,
        result: io::Result<()>,
        before: Option<&Overwritten>,
    ) -> DiskResult {
        if let (Err(_), Some(sums), Some(before)) = (&result, &mut self.sums, before) {
            sums.write_failed(self.replica.data(), before);
        }
        self.answer(doing, result)
    }

    /// Zeros what has a place, and leaves holes as they are.
    fn clear(&mut self, offset: u64, length: u64) -> DiskResult {
        let before = match self.sums_before(offset, &Content::Zeros(length)) {
            Ok(before) => before,
            Err(result) => return result,
        };
        let data = self.replica.data();
        let found = room::allocated(data, offset, length);
        let cleared = found.and_then(|pieces| {
            let zero = |(offset, length)| room::write_zeros(data, offset, length);
            pieces.into_iter().try_for_each(zero)
        });
        self.written("write zeros to", cleared, before.as_ref())
    }

    /// Whether a write of that range, and of its sums, would find space. Lack of space is a normal answer here, not a
    /// reason to warn.
    fn allocate(&self, offset: u64, length: u64) -> DiskResult {
        let data = || room::allocate(self.replica.data(), offset, length);
        let sums = || {
            let sums = self.sums.as_ref();
            sums.map_or(Ok(()), |sums| sums.allocate(offset, length))
        };
        match data().and_then(|()| sums()) {
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

    fn hand_over(queue: Option<&Queue>, token: u64, op: BlockingOp) -> Option<DiskResult> {
        let sent = queue.is_some_and(|queue| queue.send((token, op)).is_ok());
        (!sent).then_some(DiskResult::Failed)
    }
}

impl Disk for FileDisk {
    fn submit(&mut self, token: u64, op: DiskOp) -> Option<DiskResult> {
        match op {
            DiskOp::Write { offset, data } => Some(self.write(offset, data)),
            DiskOp::Zero { offset, length } => Some(self.zero(offset, length)),
            DiskOp::Clear { offset, length } => Some(self.clear(offset, length)),
            DiskOp::Allocate { offset, length } => Some(self.allocate(offset, length)),
            DiskOp::Read { offset, length } => {
                let at_once = self.reader.at_once(self.replica.data(), offset, length);
                match at_once {
                    Some(result) => {
                        let sums = &mut self.sums;
                        let rotten = |content: &Content| match sums {
                            Some(sums) => sums.rotten(offset, content),
                            None => Ok(Vec::new()),
                        };
                        Some(was_read(&self.replica, offset, result, rotten))
                    }
                    None => {
                        let op = BlockingOp::Read { offset, length };
                        Self::hand_over(self.read.as_ref(), token, op)
                    }
                }
            }
            DiskOp::Sync { sums } => {
                Self::hand_over(self.sync.as_ref(), token, BlockingOp::Sync { sums })
            }
            DiskOp::Persist(change) => {
                if let Some(sums) = &mut self.sums {
                    sums.changes(&change);
                }
                Self::hand_over(self.meta.as_ref(), token, BlockingOp::Persist(change))
            }
            DiskOp::Reserve { size } => {
                Self::hand_over(self.meta.as_ref(), token, BlockingOp::Reserve { size })
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

    fn data_file(&self) -> Option<DataFile> {
        let path = std::path::absolute(self.replica.data_path()).ok()?;
        let stat = self.replica.data().metadata().ok()?;
        Some(DataFile {
            path,
            device: stat.dev(),
            inode: stat.ino(),
        })
    }

    fn look(&mut self) {
        if let Some(sums) = &mut self.sums {
            sums.look(Instant::now());
        }
    }
}

impl Drop for FileDisk {
    /// Waits for operations in flight: the next process that opens the replica must not meet them.
    fn drop(&mut self) {
        (self.meta, self.sync, self.read) = (None, None, None);
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
        // Last of all, when nothing is written any more.
        self.sums = None;
    }
}

fn worker(
    name: &str,
    ops: &Arc<Mutex<Receiver<(u64, BlockingOp)>>>,
    done: &done::UnboundedSender<(u64, DiskResult)>,
    mut work: impl FnMut(BlockingOp) -> DiskResult + Send + 'static,
) -> Result<JoinHandle<()>> {
    let (ops, done) = (Arc::clone(ops), done.clone());
    let run = move || {
        loop {
            let op = ops.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((token, op)) = op else { return };
            if done.send((token, work(op))).is_err() {
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
    op: &BlockingOp,
) -> DiskResult {
    let result = match op {
        BlockingOp::Persist(change) => store.persist(change),
        BlockingOp::Reserve { size } => {
            replica.reserve(trellis_api::Bytes::new(*size), provisioning)
        }
        BlockingOp::Sync { .. } | BlockingOp::Read { .. } => return DiskResult::Failed,
    };
    match result {
        Ok(()) => DiskResult::Done,
        Err(error) => {
            tracing::warn!("{}", super::in_full(&error));
            match &error {
                Error::NoSpace { .. } | Error::FileTooLong { .. } => DiskResult::NoSpace,
                Error::Io { source, .. }
                    if is_full(source) && matches!(op, BlockingOp::Reserve { .. }) =>
                {
                    DiskResult::NoSpace
                }
                _ => DiskResult::Failed,
            }
        }
    }
}

/// Makes the bytes durable, and their sums if those are needed at once.
fn sync_files(replica: &Replica, sums: Option<&SumFile>, op: &BlockingOp) -> DiskResult {
    if let Err(error) = replica.sync() {
        let path = replica.data_path();
        tracing::warn!(
            "could not sync {}: {}",
            path.display(),
            super::in_full(&error)
        );
        return DiskResult::Failed;
    }
    if let (BlockingOp::Sync { sums: true }, Some(sums)) = (op, sums)
        && let Err(error) = sums.sync()
    {
        tracing::warn!("{}", super::in_full(&error));
        return DiskResult::Failed;
    }
    DiskResult::Done
}

/// The sums of a replica: those that it has, or new ones if it should have some.
fn open_sums(
    replica: &Replica,
    meta: &Meta,
    note: Option<Key>,
    provisioning: Provisioning,
    wanted: bool,
) -> Result<(Option<SumKeeper>, Vec<Region>)> {
    let file = match SumFile::open(replica)? {
        Some(file) => file,
        None if !wanted => return Ok((None, Vec::new())),
        None => {
            let never_written = meta.durable == Key::FRESH
                && meta.stamps.iter().all(|stamp| *stamp == Epoch::NEVER)
                && (provisioning == Provisioning::Thick || replica.takes_no_space()?);
            let coverage = if never_written {
                Coverage::Whole
            } else {
                Coverage::Partial
            };
            SumFile::make(replica, coverage)?
        }
    };
    let ended = if note.is_some() {
        Ended::ProcessDied
    } else {
        Ended::PowerLost
    };
    let applied = note.map_or(meta.durable, |note| note.max(meta.durable));
    let (sums, rotten) = SumKeeper::start(replica, file, meta, applied.epoch, ended)?;
    Ok((Some(sums), rotten))
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOSPC | Errno::DQUOT)
    )
}

/// What a read has found, once its blocks were compared with their sums.
fn was_read(
    replica: &Replica,
    offset: u64,
    result: io::Result<Content>,
    rotten: impl FnOnce(&Content) -> io::Result<Vec<u32>>,
) -> DiskResult {
    let found = result.and_then(|content| Ok((rotten(&content)?, content)));
    let path = replica.data_path();
    match found {
        Ok((bad, content)) if bad.is_empty() => DiskResult::Read(content),
        Ok((bad, content)) => {
            let first = offset + u64::from(bad[0]) * BLOCK.get();
            tracing::warn!(
                "{} of the blocks read at {offset} of {} do not match their sums, the first at {first}",
                bad.len(),
                path.display()
            );
            DiskResult::Rotten { content, bad }
        }
        Err(error) => {
            tracing::warn!("could not read {}: {error}", path.display());
            DiskResult::Failed
        }
    }
}
