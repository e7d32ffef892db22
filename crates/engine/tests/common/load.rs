//! A load that knows what every block may hold.
//!
//! Every block has one writer, which waits for its answer; so a block holds the last version that was
//! acknowledged or, while a write is under way or after its process was killed, that or the next one.
#![allow(dead_code, reason = "an example uses a part of this")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use trellis_engine::drive::Volume;

pub(crate) const BLOCK: u64 = 4096;

/// What is known of a block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    pub(crate) acked: u64,
    pub(crate) begun: u64,
}

/// What every block may hold.
#[derive(Default)]
pub(crate) struct Model {
    blocks: Mutex<BTreeMap<u64, Known>>,
    /// Versions begin above this one.
    floor: u64,
    writes: AtomicU64,
    longest_us: AtomicU64,
    stopped: AtomicBool,
}

/// Bytes that only this version of this block has.
pub(crate) fn content(block: u64, version: u64) -> Bytes {
    if version == 0 {
        return Bytes::from(vec![0; 4096]);
    }
    let mut state =
        block.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ version.wrapping_mul(0xD1B5_4A32_D192_ED03);
    let mut bytes = Vec::with_capacity(4096);
    bytes.extend_from_slice(&version.to_le_bytes());
    while bytes.len() < 4096 {
        state = mix(state);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    Bytes::from(bytes)
}

fn mix(state: u64) -> u64 {
    let mut next = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    next = (next ^ (next >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    next ^ (next >> 27)
}

/// Which version of a block these bytes are.
pub(crate) fn version_of(block: u64, bytes: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(*bytes.first_chunk()?);
    (content(block, version) == bytes).then_some(version)
}

/// The bytes that a read brought, in one piece.
pub(crate) fn joined(pieces: &[Bytes]) -> Vec<u8> {
    pieces.concat()
}

impl Model {
    fn blocks(&self) -> MutexGuard<'_, BTreeMap<u64, Known>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A model that goes on where others have written versions up to this one.
    pub(crate) fn above(floor: u64) -> Model {
        Model {
            floor,
            ..Model::default()
        }
    }

    pub(crate) fn begin(&self, block: u64) -> u64 {
        let mut blocks = self.blocks();
        let known = blocks.entry(block).or_default();
        known.begun = known.begun.max(self.floor) + 1;
        known.begun
    }

    /// Somebody else has begun or acknowledged a version.
    pub(crate) fn heard(&self, block: u64, version: u64, is_acked: bool) {
        let mut blocks = self.blocks();
        let known = blocks.entry(block).or_default();
        known.begun = known.begun.max(version);
        if is_acked {
            known.acked = known.acked.max(version);
        }
    }

    pub(crate) fn acked(&self, block: u64, version: u64, took: Duration) {
        self.blocks().entry(block).or_default().acked = version;
        self.writes.fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.longest_us.fetch_max(us, Ordering::Relaxed);
    }

    pub(crate) fn check(&self, block: u64, bytes: &[u8]) {
        let others = Known {
            acked: 0,
            begun: self.floor,
        };
        let known = self.blocks().get(&block).copied().unwrap_or(others);
        let found = version_of(block, bytes);
        assert!(
            found.is_some_and(|found| (known.acked..=known.begun).contains(&found)),
            "block {block} holds {found:?}, and should hold {known:?}"
        );
    }

    /// The latest version that any block may have.
    pub(crate) fn last_version(&self) -> u64 {
        self.blocks()
            .values()
            .map(|known| known.begun)
            .max()
            .unwrap_or(0)
    }

    /// Blocks that were written.
    pub(crate) fn written(&self) -> Vec<u64> {
        self.blocks().keys().copied().collect()
    }

    pub(crate) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// The longest time that a write took since this was last asked.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.swap(0, Ordering::Relaxed))
    }

    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// What a writer says of its work.
pub(crate) type Witness = Arc<dyn Fn(u64, u64, bool) + Send + Sync>;

/// Writes, reads back, flushes, until the model is stopped. An I/O error is a panic.
pub(crate) async fn work(
    volume: Volume,
    model: Arc<Model>,
    worker: u64,
    workers: u64,
    witness: Option<Witness>,
) {
    let mut random = mix(worker + 1);
    while !model.stopped.load(Ordering::Relaxed) {
        random = mix(random);
        let own = (volume.size() / BLOCK)
            .saturating_sub(worker)
            .div_ceil(workers);
        if own == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        let block = (random >> 8) % own * workers + worker;
        match random % 16 {
            0..12 => {
                let version = model.begin(block);
                if let Some(witness) = &witness {
                    witness(block, version, false);
                }
                let began = Instant::now();
                let data = vec![content(block, version)];
                let written = volume
                    .write(block * BLOCK, data, random.is_multiple_of(64))
                    .await;
                written.expect("a write failed");
                model.acked(block, version, began.elapsed());
                if let Some(witness) = &witness {
                    witness(block, version, true);
                }
            }
            12..15 => {
                let bytes = volume.read(block * BLOCK, BLOCK).await;
                model.check(block, &joined(&bytes.expect("a read failed")));
            }
            _ => volume.flush().await.expect("a flush failed"),
        }
    }
}

/// Starts so many writers.
pub(crate) fn start(
    volume: &Volume,
    model: &Arc<Model>,
    workers: u64,
    witness: Option<&Witness>,
) -> tokio::task::JoinSet<()> {
    let mut set = tokio::task::JoinSet::new();
    for worker in 0..workers {
        let (volume, model) = (volume.clone(), Arc::clone(model));
        set.spawn(work(volume, model, worker, workers, witness.cloned()));
    }
    set
}

/// Reads every block that was ever written.
pub(crate) async fn check_all(volume: &Volume, model: &Model) {
    for block in model.written() {
        let bytes = volume
            .read(block * BLOCK, BLOCK)
            .await
            .expect("a read failed");
        model.check(block, &joined(&bytes));
    }
}

/// Stops the writers, and lets what went wrong with one of them be seen.
pub(crate) async fn finish(model: &Model, load: &mut tokio::task::JoinSet<()>) {
    model.stop();
    while let Some(done) = load.join_next().await {
        if let Err(failure) = done {
            std::panic::resume_unwind(failure.into_panic());
        }
    }
}
