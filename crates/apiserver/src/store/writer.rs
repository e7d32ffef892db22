//! The one thread that writes: group commit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::Shared;
use super::file::StoreFile;
use super::txn::{Staged, Txn};
use crate::cascade;
use crate::events;
use crate::status::Status;

/// Writes that share one flush at most, so that the first of them does not wait without end.
const BATCH_MAX: usize = 512;

/// How often events are looked through for old ones; nothing else wakes an idle store.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// One queued write: run it on the transaction, then, once its fate is known, answer the caller.
pub(super) struct Job(Box<dyn FnOnce(&mut Txn<'_>) -> Finish + Send>);

/// What is left to do for a job once its batch is durable (`None`) or is not (`Some`).
struct Finish {
    refused: bool,
    answer: Box<dyn FnOnce(Option<Status>) + Send>,
}

/// A job, and where its answer arrives.
pub(super) fn job<T: Send + 'static>(
    change: impl FnOnce(&mut Txn<'_>) -> Result<T, Status> + Send + 'static,
) -> (Job, oneshot::Receiver<Result<T, Status>>) {
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
    (Job(Box::new(run)), receiver)
}

/// A job of the store's own, whose answer nobody waits for.
fn internal(change: impl FnOnce(&mut Txn<'_>) + Send + 'static) -> Job {
    let (job, _) = job(move |txn| {
        change(txn);
        Ok(())
    });
    job
}

pub(super) struct Writer {
    pub(super) file: StoreFile,
    pub(super) shared: Arc<Shared>,
    pub(super) jobs: mpsc::Receiver<Job>,
}

impl Writer {
    /// Runs until every handle of the store is gone.
    pub(super) fn run(self) {
        let mut follow_up: Option<Job> = None;
        let mut expire_at = Instant::now() + EXPIRY_INTERVAL;
        loop {
            let mut batch: Vec<Job> = follow_up.take().into_iter().collect();
            if batch.is_empty() {
                match self
                    .jobs
                    .recv_timeout(expire_at.saturating_duration_since(Instant::now()))
                {
                    Ok(job) => batch.push(job),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
            }
            while batch.len() < BATCH_MAX {
                match self.jobs.try_recv() {
                    Ok(job) => batch.push(job),
                    Err(_) => break,
                }
            }
            if Instant::now() >= expire_at {
                expire_at = Instant::now() + EXPIRY_INTERVAL;
                batch.push(internal(|txn| events::expire(txn, jiff::Timestamp::now())));
            }
            let suspects = self.write(batch).suspects;
            if !suspects.is_empty() {
                follow_up = Some(internal(move |txn| cascade::examine(txn, &suspects)));
            }
        }
    }

    /// Runs one write before the thread starts.
    pub(super) fn first(
        &self,
        change: impl FnOnce(&mut Txn<'_>) -> Result<(), Status> + Send + 'static,
    ) -> Result<(), Status> {
        let (job, mut answer) = job(change);
        self.write(vec![job]);
        answer
            .try_recv()
            .unwrap_or_else(|_| Err(Status::store_closed()))
    }

    /// Runs a batch; what it returns has been shown to the world.
    fn write(&self, batch: Vec<Job>) -> Staged {
        let (mut staged, finishes) = self.stage(batch);
        if staged.events.is_empty() {
            answer(finishes, None);
            return staged;
        }
        let started = Instant::now();
        let changes = staged
            .objects
            .iter()
            .map(|(id, stored)| (id, stored.as_ref().map(|stored| &stored.json[..])));
        if let Err(error) = self
            .file
            .commit(self.shared.kinds, staged.revision, changes)
        {
            tracing::error!(%error, "a batch of writes could not be made durable");
            answer(finishes, Some(&error.to_string()));
            return Staged::default();
        }
        let counters = &self.shared.counters;
        let spent = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        counters.flush_ns.fetch_add(spent, Ordering::Relaxed);
        counters.flushes.fetch_add(1, Ordering::Relaxed);
        let written = u64::try_from(staged.events.len()).unwrap_or(u64::MAX);
        counters.writes.fetch_add(written, Ordering::Relaxed);
        self.publish(&mut staged);
        answer(finishes, None);
        staged
    }

    fn stage(&self, batch: Vec<Job>) -> (Staged, Vec<Finish>) {
        // Only this thread changes the state, so it may read it for as long as it likes.
        let state = self.shared.read();
        let mut staged = Staged::at(state.revision);
        let mut finishes = Vec::with_capacity(batch.len());
        for Job(run) in batch {
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

fn answer(finishes: Vec<Finish>, failed: Option<&str>) {
    for finish in finishes {
        (finish.answer)(failed.map(Status::not_durable));
    }
}
