//! A volume: the handle that clients use, and the coordination of its replicas behind it.
//!
//! [`Volume`] is a handle that is cheap to clone. Behind it one owner (`owner`) runs the coordinator, with the
//! connections to the replicas (`peers`) and the requests of clients (`requests`). `keep` puts the bytes of writes
//! where they can stay.
//!
//! # Who may start one
//!
//! Exactly one supervisor starts the volume, one instance at a time. A starting volume takes the generation after the
//! highest that a replica reports. From then on the replicas refuse the previous coordinator, and its handle ends
//! ([`Ended::Deposed`]). Two of one term that start at the same time would depose each other until one gives up. Whoever
//! moves a volume to another node gives it a later term ([`Term`]): then the previous one gives up at once, however often
//! it is started.
//!
//! A replica that was away when the volume started may have made its promise to a later coordinator that never served.
//! When it comes back, nobody can tell that from a real successor. So the volume ends and must be started again.

mod extents;
mod keep;
mod owner;
mod peers;
mod requests;
mod spin;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use super::{Address, Credentials, Trouble};
use crate::coordinator::{GrowthHeld, IoOp, Limits, Status, Takeover};
use crate::drive::lent::{Arena, Slot};
use crate::proto::{Config, Content, Geometry, Lineage, Promise, ReplicaId, Term};
use crate::replica::{BLOCK, SIZE_MAX};
use owner::Owner;
use requests::{Command, Reply};

/// Requests that are on their way to the owner.
const COMMANDS_MAX: usize = 256;

/// The most bytes of one request to the owner. A longer one is several.
const REQUEST_BYTES_MAX: u64 = 16 << 20;

/// The same for zeros, which weigh nothing on their way.
const ZERO_BYTES_MAX: u64 = 256 << 20;

/// Zeros to show where a volume has none of its own.
static ZEROS: LazyLock<Bytes> = LazyLock::new(|| {
    let region = usize::try_from(Geometry::STANDARD.region_bytes).unwrap_or(1 << 20);
    Bytes::from(vec![0; region])
});

/// What a volume is started with.
#[derive(Clone, Debug)]
pub struct VolumeSettings {
    /// Which volume.
    pub volume: Uuid,
    /// Who its replicas are, as far as it is known. The replicas may know better.
    pub config: Config,
    /// Where the replicas are reached.
    pub addresses: BTreeMap<ReplicaId, Address>,
    /// What this node proves itself with. Needed if a replica is on another node.
    pub credentials: Option<Credentials>,
    /// Bounds.
    pub limits: Limits,
    /// How often it was decided anew where the volume is served. A volume of an earlier term never takes over from one
    /// of a later term.
    pub term: Term,
    /// How long a request waits for a volume that cannot serve it.
    pub patience: Duration,
    /// What becomes of a write for which too many pools have no space.
    pub when_full: WhenFull,
    /// The history of the volume, as far as it is known. Replicas of earlier histories have no vote; replicas may
    /// report a later one.
    pub lineage: Lineage,
    /// Whose reports are needed to decide which bytes count. With [`Takeover::Survivors`] the replicas of `config` are
    /// all that is left, and `lineage` is a new one that begins with this start ([`Lineage::after`]). The caller has
    /// stored `lineage` before, and repeats this start until the volume has served once.
    pub takeover: Takeover,
}

impl VolumeSettings {
    /// A volume with the usual bounds.
    pub fn new(
        volume: Uuid,
        config: Config,
        addresses: BTreeMap<ReplicaId, Address>,
    ) -> VolumeSettings {
        VolumeSettings {
            volume,
            config,
            addresses,
            credentials: None,
            limits: Limits::default(),
            term: Term::default(),
            patience: Duration::from_secs(30),
            when_full: WhenFull::Wait,
            lineage: Lineage::Original,
            takeover: Takeover::Quorum,
        }
    }
}

/// What becomes of a write that needs space which too many pools do not have. All else goes on: reads, flushes, and
/// writes of what has its space already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits until there is space, for as long as any request waits ([`VolumeError::NoSpaceYet`]).
    #[default]
    Wait,
    /// It fails at once ([`VolumeError::NoSpace`]).
    Fail,
}

/// Why a request of a client failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// Too few replicas are there, for too long. Whether a write was done is unknown.
    #[error("too few replicas are there; see the volume's status")]
    NotReady,
    /// Too many pools are full. Parts of a write may have been done, or may still be done when there is space.
    #[error("the pools of too many replicas are full; free some space there")]
    NoSpace,
    /// Too many pools were full for as long as a request waits. A caller that can wait longer asks again. Parts of a
    /// write may have been done.
    #[error("the pools of too many replicas are still full; free some space there")]
    NoSpaceYet,
    /// The range is not whole blocks.
    #[error("the range is not whole blocks of {BLOCK}")]
    Unaligned,
    /// The range is not inside the volume.
    #[error("the range is not inside the volume")]
    OutOfRange,
    /// No replica that holds the bytes can read them.
    #[error("no replica can read these bytes")]
    Medium,
    /// Another process now coordinates the volume. Whether a write was done is unknown.
    #[error("the volume is coordinated by another process now")]
    Deposed,
    /// The volume was stopped. Whether a write was done is unknown.
    #[error("the volume was stopped")]
    Stopped,
    /// A size that a volume cannot have.
    #[error("a volume cannot have that size: it is a multiple of {BLOCK} up to {SIZE_MAX}")]
    SizeBad,
    /// The growth does not go on for now. It is tried again by itself.
    #[error("the growth is held: {}", held(*.0))]
    GrowthHeld(GrowthHeld),
    /// A later, smaller wish has replaced this one.
    #[error("a later wish has replaced this growth")]
    GrowthReplaced,
    /// Replicas that a volume cannot have.
    #[error("a volume has 1 to 5 replicas, a consistency factor among these, and addresses of all")]
    ConfigBad,
}

fn held(reason: GrowthHeld) -> &'static str {
    match reason {
        GrowthHeld::NoSpace => "too many pools have no space for it",
        GrowthHeld::TooFewReplicas => "too few replicas are there",
    }
}

/// How a volume ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A later coordinator has taken over.
    Deposed {
        /// Its promise.
        by: Promise,
    },
    /// It was stopped, or all its handles are gone.
    Stopped,
}

/// What a compare-and-write found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// The bytes were as expected, and the new ones are written.
    Written,
    /// They were not; nothing was written.
    Differs {
        /// The first byte that differs, from the start of the range.
        at: u64,
    },
}

/// A volume in use. Clones share it; it ends when the last of them is gone.
#[derive(Clone)]
pub struct Volume {
    commands: mpsc::Sender<Command>,
    /// Where the bytes of writes are put, for replicas on this machine.
    arena: Option<Arc<Arena>>,
    size: Arc<AtomicU64>,
    status: watch::Receiver<Status>,
    troubles: watch::Receiver<Troubles>,
    ended: watch::Receiver<Option<Ended>>,
}

/// Why replicas are not reached.
type Troubles = BTreeMap<ReplicaId, Trouble>;

type Answer<T> = std::result::Result<T, VolumeError>;

impl Volume {
    /// Starts a volume, whose replicas are served elsewhere. Call it inside a tokio runtime, on which it runs.
    pub fn start(settings: VolumeSettings) -> Volume {
        let (commands_to, commands) = mpsc::channel(COMMANDS_MAX);
        let size = Arc::new(AtomicU64::new(0));
        let arena = Arena::new()
            .inspect_err(|error| {
                tracing::debug!("no memory to share with replicas: {error}");
            })
            .ok();
        let (owner, status, troubles, ended) =
            Owner::new(settings, commands, Arc::clone(&size), arena.clone());
        tokio::spawn(owner.run());
        Volume {
            commands: commands_to,
            arena,
            size,
            status,
            troubles,
            ended,
        }
    }

    /// The size that is served; zero until it is known. It never goes down.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// How the volume is.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// Why the last connection to a replica was not made, or has ended, for every replica with which no messages have
    /// been exchanged since.
    pub fn troubles(&self) -> BTreeMap<ReplicaId, Trouble> {
        self.troubles.borrow().clone()
    }

    /// The same, to be told of its changes.
    pub fn watch_troubles(&self) -> watch::Receiver<BTreeMap<ReplicaId, Trouble>> {
        self.troubles.clone()
    }

    /// The status, to be told of its changes. They are told within a fraction of a second.
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Waits until the volume serves, and says its size. An end is an error.
    pub async fn ready(&self) -> Answer<u64> {
        let mut status = self.status.clone();
        match status.wait_for(|status| status.available).await {
            Ok(status) => Ok(status.size),
            Err(_) => Err(self.why_ended()),
        }
    }

    /// Waits for the end of the volume.
    pub async fn ended(&self) -> Ended {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(ended) => ended.unwrap_or(Ended::Stopped),
            Err(_) => Ended::Stopped,
        }
    }

    /// Ends the volume, however many handles there are. Acknowledged writes stay; nothing is flushed by this.
    pub async fn stop(&self) -> Ended {
        // If it has ended already, that is what was wanted.
        let _ = self.commands.send(Command::Stop).await;
        self.ended().await
    }

    fn why_ended(&self) -> VolumeError {
        match *self.ended.borrow() {
            Some(Ended::Deposed { .. }) => VolumeError::Deposed,
            Some(Ended::Stopped) | None => VolumeError::Stopped,
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Answer<T> {
        let (reply, answer) = Reply::pair();
        if self.commands.send(command(reply)).await.is_err() {
            return Err(self.why_ended());
        }
        answer.await.unwrap_or_else(|_| Err(self.why_ended()))
    }

    async fn io(&self, op: IoOp) -> Answer<Vec<Content>> {
        self.ask(|reply| Command::Io { op, reply }).await
    }

    /// Memory for the bytes of a coming write, where replicas on this machine will see them without another copy. None
    /// if that would be of no use, if the bytes are too many, or if there is no room.
    pub fn room(&self, length: usize) -> Option<Slot> {
        self.shared_memory()?.take(length)
    }

    /// The same bytes in memory that the volume may keep for a while.
    fn keep(&self, data: &[Bytes]) -> Vec<Bytes> {
        keep::keep(self.shared_memory(), data)
    }

    /// The memory that replicas on this machine see, if there are such.
    fn shared_memory(&self) -> Option<&Arc<Arena>> {
        self.arena.as_ref().filter(|arena| arena.is_wanted())
    }

    /// Reads whole blocks.
    pub async fn read(&self, offset: u64, length: u64) -> Answer<Vec<Bytes>> {
        let mut pieces = Vec::new();
        for (offset, length) in requests_of(offset, length, REQUEST_BYTES_MAX)? {
            for content in self.io(IoOp::Read { offset, length }).await? {
                show(content, &mut pieces);
            }
        }
        Ok(pieces)
    }

    /// Writes whole blocks. Acknowledged when as many replicas as the consistency factor says have
    /// them; with `fua`, durably. The bytes are copied, unless they are in memory of [`Volume::room`].
    pub async fn write(&self, offset: u64, data: Vec<Bytes>, fua: bool) -> Answer<()> {
        let length: usize = data.iter().map(Bytes::len).sum();
        let mut data = self.keep(&data).into();
        for (offset, length) in requests_of(offset, count(length), REQUEST_BYTES_MAX)? {
            let data = keep::take(&mut data, length);
            self.io(IoOp::Write { offset, data, fua }).await?;
        }
        Ok(())
    }

    /// Writes zeros to whole blocks, and gives their space back where it can be given back.
    pub async fn zero(&self, offset: u64, length: u64) -> Answer<()> {
        for (offset, length) in requests_of(offset, length, ZERO_BYTES_MAX)? {
            self.io(IoOp::Zero { offset, length }).await?;
        }
        Ok(())
    }

    /// Makes durable everything that was acknowledged before.
    pub async fn flush(&self) -> Answer<()> {
        self.io(IoOp::Flush).await.map(drop)
    }

    /// Writes `data` if the bytes there are `expected`. Both have the same length, at most 16 MiB. No write of the
    /// same bytes comes in between.
    pub async fn compare_and_write(
        &self,
        offset: u64,
        expected: Vec<Bytes>,
        data: Vec<Bytes>,
        fua: bool,
    ) -> Answer<Compared> {
        let length = |pieces: &[Bytes]| count(pieces.iter().map(Bytes::len).sum());
        let (of_expected, of_data) = (length(&expected), length(&data));
        if of_expected != of_data || of_data > REQUEST_BYTES_MAX {
            return Err(VolumeError::OutOfRange);
        }
        // Checked here, because nothing cuts it.
        let _ = requests_of(offset, of_data, REQUEST_BYTES_MAX)?;
        let data = self.keep(&data);
        self.ask(|reply| Command::Compare {
            offset,
            expected,
            data,
            fua,
            reply,
        })
        .await
    }

    /// Raises the volume to `to`, and waits until it is raised or held. A held growth is retried automatically; the
    /// status shows it. A later call replaces this goal.
    pub async fn grow(&self, to: u64) -> Answer<u64> {
        if to == 0 || !to.is_multiple_of(BLOCK.get()) || to > SIZE_MAX.get() {
            return Err(VolumeError::SizeBad);
        }
        self.ask(|reply| Command::Grow { to, reply }).await
    }

    /// Changes the replicas. Returns as soon as the change has begun; the status shows when the new view is in force.
    /// `addresses` has those of all replicas of `config`, and of others that are to be kept in sync without being
    /// counted. A replica that is not listed and does not count is forgotten.
    pub async fn reconfigure(
        &self,
        config: Config,
        addresses: BTreeMap<ReplicaId, Address>,
    ) -> Answer<()> {
        self.reconfigure_from(None, config, addresses).await
    }

    /// The same, if the view still has the version that it had when this was decided. If the view is later, which the
    /// status shows, nothing is begun.
    pub async fn reconfigure_from(
        &self,
        from: Option<u64>,
        config: Config,
        addresses: BTreeMap<ReplicaId, Address>,
    ) -> Answer<()> {
        if !config.is_sound() {
            return Err(VolumeError::ConfigBad);
        }
        self.ask(|reply| Command::Reconfigure {
            from,
            config,
            addresses,
            reply,
        })
        .await
    }

    /// Sets the addresses of all replicas from now on. Which replicas count stays the same.
    pub async fn reach(&self, addresses: BTreeMap<ReplicaId, Address>) -> Answer<()> {
        self.ask(|reply| Command::Reach { addresses, reply }).await
    }

    /// Starts to compare all copies with their sums and with each other, unless that is already running. The status
    /// shows its progress and findings.
    pub async fn scrub(&self) {
        // A volume that has ended compares nothing.
        let _ = self.commands.send(Command::Scrub).await;
    }

    /// Waits until the status is as wanted, or the volume has ended.
    pub fn until(
        &self,
        wanted: impl FnMut(&Status) -> bool,
    ) -> impl Future<Output = Answer<Status>> {
        let mut status = self.status.clone();
        let ended = self.ended.clone();
        async move {
            match status.wait_for(wanted).await {
                Ok(status) => Ok(status.clone()),
                Err(_) => match *ended.borrow() {
                    Some(Ended::Deposed { .. }) => Err(VolumeError::Deposed),
                    _ => Err(VolumeError::Stopped),
                },
            }
        }
    }
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

/// The requests that a range is cut into, if it is whole blocks.
fn requests_of(
    offset: u64,
    length: u64,
    each_max: u64,
) -> Answer<impl Iterator<Item = (u64, u64)>> {
    let block = BLOCK.get();
    if !offset.is_multiple_of(block) || !length.is_multiple_of(block) {
        return Err(VolumeError::Unaligned);
    }
    let end = offset.checked_add(length).ok_or(VolumeError::OutOfRange)?;
    let mut at = offset;
    Ok(std::iter::from_fn(move || {
        let piece = (end - at).min(each_max);
        let range = (at, piece);
        at += piece;
        (piece > 0).then_some(range)
    }))
}

/// Bytes as a client sees them.
fn show(content: Content, pieces: &mut Vec<Bytes>) {
    match content {
        Content::Data(data) => pieces.push(data),
        Content::Zeros(mut left) => {
            while left > 0 {
                let piece = ZEROS.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                pieces.push(ZEROS.slice(..piece));
                left -= count(piece);
            }
        }
    }
}
