//! The one thread that writes: group commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::Shared;
use super::doubt::{self, Held};
use super::file::StoreFile;
use super::memory::Id;
use super::txn::{Staged, Txn};
use crate::cascade;
use crate::error::CommitError;
use crate::events;
use crate::status::Status;

/// Writes that share one flush at most, so that the first of them does not wait without end.
const BATCH_MAX: usize = 512;

/// How long a batch waits for announced writes: less than the flush that it may save them.
const GATHER_MAX: Duration = Duration::from_micros(200);

/// How often events are looked through for old ones; nothing else wakes an idle store.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// One queued write: run it on the transaction, then, once its fate is known, answer the caller.
pub(super) struct QueuedWrite(Box<dyn FnOnce(&mut Txn<'_>) -> Finish + Send>);

/// What remains to be done for a write once its batch is durable (`None`) or has failed (`Some`).
struct Finish {
    refused: bool,
    answer: Box<dyn FnOnce(Option<Status>) + Send>,
}

/// A write to be queued, and where its answer arrives.
pub(super) fn queued<T: Send + 'static>(
    change: impl FnOnce(&mut Txn<'_>) -> Result<T, Status> + Send + 'static,
) -> (QueuedWrite, oneshot::Receiver<Result<T, Status>>) {
    let (sender, receiver) = oneshot::channel();
    let run = move |txn: &mut Txn<'_>| {
        // A panic is our own bug; it must not take the other writers' thread with it.
        let result = catch_unwind(AssertUnwindSafe(|| change(txn))).unwrap_or_else(|_| {
            Err(Status::internal(
                "a write stumbled over a bug; the log has the place",
            ))
        });
        let refused = result.is_err();
        let answer = move |failed: Option<Status>| {
            let result = match failed {
                Some(status) if !refused => Err(status),
                _ => result,
            };
            // A caller that has gone away does not need its answer.
            let _ = sender.send(result);
        };
        Finish {
            refused,
            answer: Box::new(answer),
        }
    };
    (QueuedWrite(Box::new(run)), receiver)
}

/// A write of the store's own, whose answer nobody waits for.
fn internal(change: impl FnOnce(&mut Txn<'_>) + Send + 'static) -> QueuedWrite {
    let (write, _) = queued(move |txn| {
        change(txn);
        Ok(())
    });
    write
}

pub(super) struct Writer {
    file: StoreFile,
    shared: Arc<Shared>,
    queue: mpsc::Receiver<QueuedWrite>,
    /// A batch whose commit failed, until the file tells what became of it.
    doubtful: Option<Staged>,
}

/// What became of a batch.
struct Written {
    durable: bool,
    /// Objects whose owners have to be looked at now.
    suspects: Vec<Id>,
}

impl Writer {
    pub(super) fn new(
        file: StoreFile,
        shared: Arc<Shared>,
        queue: mpsc::Receiver<QueuedWrite>,
    ) -> Writer {
        Writer {
            file,
            shared,
            queue,
            doubtful: None,
        }
    }

    /// Runs until every handle of the store is gone.
    pub(super) fn run(mut self) {
        let mut suspects: Vec<Id> = Vec::new();
        let mut failing = false;
        let mut expire_at = Instant::now() + EXPIRY_INTERVAL;
        loop {
            let mut batch: Vec<QueuedWrite> = Vec::new();
            if !suspects.is_empty() {
                let suspects = suspects.clone();
                batch.push(internal(move |txn| cascade::examine(txn, &suspects)));
            }
            // After a failure the store's own work waits for the next write, so as not to spin on a full disk.
            if batch.is_empty() || failing {
                match self
                    .queue
                    .recv_timeout(expire_at.saturating_duration_since(Instant::now()))
                {
                    Ok(write) => batch.push(write),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
            }
            self.gather(&mut batch);
            if Instant::now() >= expire_at {
                expire_at = Instant::now() + EXPIRY_INTERVAL;
                batch.push(internal(|txn| events::expire(txn, jiff::Timestamp::now())));
            }
            let mut written = self.write(batch);
            failing = !written.durable;
            if !failing {
                // They have been looked at.
                suspects.clear();
            }
            suspects.append(&mut written.suspects);
        }
    }

    /// Takes what is queued, and what will be in a moment.
    fn gather(&self, batch: &mut Vec<QueuedWrite>) {
        let deadline = Instant::now() + GATHER_MAX;
        while batch.len() < BATCH_MAX {
            let next = match self.queue.try_recv() {
                Ok(write) => Some(write),
                Err(_) if self.shared.arrivals.any() => {
                    let pause = deadline.saturating_duration_since(Instant::now());
                    self.queue.recv_timeout(pause).ok()
                }
                Err(_) => None,
            };
            let Some(write) = next else { break };
            batch.push(write);
        }
    }

    /// Runs one write before the thread starts.
    pub(super) fn first(
        &mut self,
        change: impl FnOnce(&mut Txn<'_>) -> Result<(), Status> + Send + 'static,
    ) -> Result<(), Status> {
        let (write, mut answer) = queued(change);
        self.write(vec![write]);
        answer
            .try_recv()
            .unwrap_or_else(|_| Err(Status::store_closed()))
    }

    /// Runs a batch and answers its callers.
    fn write(&mut self, batch: Vec<QueuedWrite>) -> Written {
        let mut suspects = Vec::new();
        let settled = self.settle(&mut suspects);
        let (mut staged, finishes) = self.stage(batch);
        let durable = match settled {
            settled if staged.events.is_empty() => {
                suspects.append(&mut staged.suspects);
                answer(finishes, None);
                settled.is_ok()
            }
            Err(error) => {
                tracing::error!(%error, "the store's file cannot be written yet");
                let status = Status::not_durable(self.file.path(), &error, true);
                answer(finishes, Some(&status));
                false
            }
            Ok(_) => match self.commit(&staged) {
                Ok(()) => {
                    suspects.append(&mut staged.suspects);
                    self.publish(&mut staged);
                    answer(finishes, None);
                    true
                }
                Err(error) => {
                    tracing::error!(%error, "a batch of writes could not be made durable");
                    self.doubtful = Some(staged);
                    let fate = self.settle(&mut suspects);
                    // A batch that is found in the file is shown, but not confirmed: the disk has not confirmed it.
                    let undone = matches!(fate, Ok(Held::Nothing));
                    let status = Status::not_durable(self.file.path(), &error, undone);
                    answer(finishes, Some(&status));
                    false
                }
            },
        };
        Written { durable, suspects }
    }

    /// Opens the file again if a commit has failed, and makes memory agree with it: once per batch, so that a disk
    /// that stays full is not retried without end.
    fn settle(&mut self, suspects: &mut Vec<Id>) -> Result<Held, CommitError> {
        let Some(mut batch) = self.doubtful.take() else {
            return Ok(Held::Nothing);
        };
        let fate = self
            .file
            .reopen(self.shared.kinds)
            .map(|loaded| doubt::held(&loaded, &self.shared.read(), &batch))
            .map_err(CommitError::Closed);
        match fate {
            Ok(Held::Nothing) => fate,
            Ok(Held::Batch) => {
                suspects.append(&mut batch.suspects);
                self.publish(&mut batch);
                fate
            }
            Ok(Held::Other) => {
                self.file.close();
                self.doubtful = Some(batch);
                Err(CommitError::Overtaken)
            }
            Err(error) => {
                self.doubtful = Some(batch);
                Err(error)
            }
        }
    }

    fn commit(&self, staged: &Staged) -> Result<(), CommitError> {
        let started = Instant::now();
        let changes = staged
            .objects
            .iter()
            .map(|(id, stored)| (id, stored.as_ref().map(|stored| &stored.json[..])));
        self.file
            .commit(self.shared.kinds, staged.revision, changes)?;
        let spent = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let written = u64::try_from(staged.events.len()).unwrap_or(u64::MAX);
        self.shared.counters.count(spent, written, staged.revision);
        Ok(())
    }

    fn stage(&self, batch: Vec<QueuedWrite>) -> (Staged, Vec<Finish>) {
        // Only this thread changes the state, so it may read it for as long as it likes.
        let state = self.shared.read();
        let mut staged = Staged::at(state.revision);
        let mut finishes = Vec::with_capacity(batch.len());
        for QueuedWrite(run) in batch {
            let mut txn = Txn::new(self.shared.kinds, &state, &staged);
            let finish = run(&mut txn);
            let own = txn.into_staged();
            if !finish.refused {
                staged.absorb(own);
            }
            finishes.push(finish);
        }
        (staged, finishes)
    }

    fn publish(&self, staged: &mut Staged) {
        let mut newest: Vec<Option<u64>> = vec![None; self.shared.kinds.len()];
        {
            let mut state = self
                .shared
                .state
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            for (id, stored) in std::mem::take(&mut staged.objects) {
                state.set(&id, stored);
            }
            for (kind, event) in staged.events.drain(..) {
                newest[kind] = Some(event.revision);
                state.record(kind, event);
            }
            state.revision = staged.revision;
        }
        for (kind, revision) in newest.into_iter().enumerate() {
            if let Some(revision) = revision {
                self.shared.signals[kind].send_replace(revision);
            }
        }
    }
}

fn answer(finishes: Vec<Finish>, failed: Option<&Status>) {
    for finish in finishes {
        (finish.answer)(failed.cloned());
    }
}
