//! The objects: durable in one file, served from memory, changed by one thread.
//!
//! Writers queue. The writer thread takes everything that is queued, lets each write see the result of the one before,
//! and makes the whole batch durable with one flush. Only then does it show the batch: first to readers, then to
//! watches, then to the callers. Writers that arrive during a flush share the next one, and so do those that were sent
//! together ([`arrivals`]). If a flush fails, every caller of its batch is told. The file is then opened again, and
//! memory follows its contents ([`doubt`]). So a full disk stops writes only for as long as it is full.
//!
//! ```text
//! callers --queue--> writer thread: run each in order --> one commit --> memory --> watches --> answers
//! ```

pub(crate) mod arrivals;
mod doubt;
pub(crate) mod file;
pub(crate) mod memory;
mod overlay;
mod txn;
mod writer;

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, mpsc};
use std::thread::JoinHandle;

use tokio::sync::{oneshot, watch};

use crate::backup::Backup;
use crate::error::Error;
use crate::kind::Kind;
use crate::status::Status;
use arrivals::{Arrivals, Arriving};
use memory::{Id, State, Stored};
pub(crate) use txn::Txn;
use writer::{QueuedWrite, Writer};

/// Writes that may wait for the writer thread; beyond that, callers are told to retry.
const QUEUE_MAX: usize = 4096;

/// How many of the last flushes are remembered for measurements.
const FLUSHES_REMEMBERED: usize = 64;

/// The revision that is signalled when the store closes.
pub(crate) const CLOSED: u64 = u64::MAX;

/// What readers share with the writer thread.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) kinds: &'static [Kind],
    state: RwLock<State>,
    /// For each kind, the revision of its newest event.
    signals: Vec<watch::Sender<u64>>,
    counters: Counters,
    arrivals: Arc<Arrivals>,
}

#[derive(Debug, Default)]
struct Counters {
    flushes: AtomicU64,
    writes: AtomicU64,
    flush_ns: AtomicU64,
    recent: Mutex<VecDeque<Flush>>,
}

/// One durable commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Flush {
    /// How many there were before it.
    pub number: u64,
    /// The last revision that it made durable.
    pub revision: u64,
}

impl Counters {
    fn count(&self, took_ns: u64, writes: u64, revision: u64) {
        self.flush_ns.fetch_add(took_ns, Ordering::Relaxed);
        self.writes.fetch_add(writes, Ordering::Relaxed);
        let number = self.flushes.fetch_add(1, Ordering::Relaxed);
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.len() == FLUSHES_REMEMBERED {
            recent.pop_front();
        }
        recent.push_back(Flush { number, revision });
    }
}

/// How much the store has written since it was opened.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// Durable commits; each is one wait for the disk.
    pub flushes: u64,
    /// Object versions written or removed.
    pub writes: u64,
    /// Time spent in commits, summed, in nanoseconds.
    pub flush_ns: u64,
    /// The last of the commits, oldest first.
    pub recent: Vec<Flush>,
}

impl Shared {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn kind_index(&self, plural: &str) -> Option<usize> {
        self.kinds.iter().position(|kind| kind.plural == plural)
    }

    /// Wakes when a kind has a new event.
    pub(crate) fn subscribe(&self, kind: usize) -> watch::Receiver<u64> {
        self.signals[kind].subscribe()
    }
}

/// The store; dropping it waits for the writer thread and closes the file.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) shared: Arc<Shared>,
    queue: Option<mpsc::SyncSender<QueuedWrite>>,
    writer: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens the file and runs `first` on it before anybody else can write.
    pub(crate) fn open(
        path: &Path,
        kinds: &'static [Kind],
        first: impl FnOnce(&mut Txn<'_>) -> Result<(), Status> + Send + 'static,
    ) -> Result<Store, Error> {
        let (file, loaded) = file::StoreFile::open(path, kinds)?;
        let mut state = State::new(kinds, loaded.revision);
        for (id, json) in loaded.objects {
            let key = id.to_key(kinds);
            let stored = Stored::from_json(json.into()).ok_or_else(|| Error::Damaged {
                path: path.to_path_buf(),
                damage: crate::error::Damage::Entry { key },
            })?;
            state.set(&id, Some(Arc::new(stored)));
        }
        let shared = Arc::new(Shared {
            kinds,
            signals: kinds
                .iter()
                .map(|_| watch::channel(loaded.revision).0)
                .collect(),
            state: RwLock::new(state),
            counters: Counters::default(),
            arrivals: Arc::default(),
        });
        let (queue, queued) = mpsc::sync_channel(QUEUE_MAX);
        let mut thread = Writer::new(file, Arc::clone(&shared), queued);
        thread.first(first).map_err(|status| Error::Unwritable {
            path: path.to_path_buf(),
            source: io::Error::other(status.message),
        })?;
        let writer = std::thread::Builder::new()
            .name("trellis-store".to_owned())
            .spawn(move || thread.run())
            .map_err(|source| Error::NoThread { source })?;
        Ok(Store {
            shared,
            queue: Some(queue),
            writer: Some(writer),
        })
    }

    /// Runs `change` on the writer thread and returns once its batch is durable.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Txn<'_>) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let (write, answer) = writer::queued(change);
        self.submit(write)?;
        answer
            .await
            .unwrap_or_else(|oneshot::error::RecvError { .. }| Err(Status::store_closed()))
    }

    fn submit(&self, write: QueuedWrite) -> Result<(), Status> {
        let queue = self.queue.as_ref().ok_or_else(Status::store_closed)?;
        queue.try_send(write).map_err(|error| match error {
            mpsc::TrySendError::Full(_) => Status::too_many_requests(),
            mpsc::TrySendError::Disconnected(_) => Status::store_closed(),
        })?;
        arrivals::arrived();
        Ok(())
    }

    /// A request says that it will write.
    pub(crate) fn arriving(&self) -> Arriving {
        Arriving::new(&self.shared.arrivals)
    }

    /// Everything, as readers see it now: one durable state.
    pub(crate) fn backup(&self) -> Backup {
        let state = self.shared.read();
        let of = |id: Id| Some((id.to_key(self.shared.kinds), Arc::clone(state.get(&id)?)));
        let objects: Vec<(String, Arc<Stored>)> = state.ids().filter_map(of).collect();
        let revision = state.revision;
        // Writers wait no longer than it takes to note which versions there are.
        drop(state);
        let objects = objects
            .into_iter()
            .map(|(key, stored)| (key, stored.value()));
        Backup::of(revision, objects.collect())
    }

    pub(crate) fn stats(&self) -> Stats {
        let counters = &self.shared.counters;
        Stats {
            flushes: counters.flushes.load(Ordering::Relaxed),
            writes: counters.writes.load(Ordering::Relaxed),
            flush_ns: counters.flush_ns.load(Ordering::Relaxed),
            recent: {
                let recent = counters.recent.lock();
                let recent = recent.unwrap_or_else(PoisonError::into_inner);
                recent.iter().copied().collect()
            },
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.queue.take();
        for signal in &self.shared.signals {
            signal.send_replace(CLOSED);
        }
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the thread that writes the store panicked");
        }
    }
}
