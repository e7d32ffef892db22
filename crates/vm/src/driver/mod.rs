//! The driver of a machine: one task, one bounded queue of requests, one connection to QEMU.
//!
//! ```text
//!            start                 STOP, no room
//!  Starting ───────▶ Running ───────────────────────▶ Paused
//!     │                │  ▲     resume, growth          │
//!     │                │  └─────────────────────────────┤
//!     │ stop           │ stop                           │ stop
//!     │                ▼                                │
//!     │             Stopping ◀──────────────────────────┘
//!     │                │ the guest switched itself off, or its time was over
//!     │                ▼
//!     └───────────▶ Stopped        QEMU said that it ends, and ended
//!
//!  any of them ───▶ Failed         QEMU ended without a word, or the guest's kernel panicked
//! ```
//!
//! Who owns what: QEMU owns the truth about disks and about whether the guest runs. The driver owns only what is under
//! way: removals that wait for the guest, and the deadline of a stop. A driver that is started on a running QEMU asks,
//! finishes what an earlier one left half done, and goes on. It learns of changes by QEMU's events. If it has missed
//! some, it asks again.
//!
//! A removal waits for the guest without holding up other requests. When QEMU's connection ends, so does the machine,
//! and everybody who waits is told.

pub mod policy;
mod run;

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use trellis_api::Bytes;
use trellis_node::filesystem::Outcome;

use crate::agent::GuestAgent;
use crate::agent::script::IfMounted;
use crate::disks::Inventory;
use crate::error::{Error, Result};
use crate::graph::{DiskId, DiskLimits, DiskSpec};
use crate::plug::Plugged;
use crate::qmp::Client;
use policy::{RequestKind, VmState};
use run::Driver;

/// How many requests may wait. Whoever has one more waits to get it in.
const REQUESTS_MAX: usize = 32;
/// How long a guest may take to release a disk, unless the caller says otherwise.
pub const UNPLUG_TIME_MAX: Duration = Duration::from_secs(30);

/// A machine that is driven. The driver ends when every clone of this is gone; QEMU goes on.
#[derive(Clone, Debug)]
pub struct Vm {
    requests: mpsc::Sender<Request>,
    state: watch::Receiver<VmState>,
}

/// Where the answer to a request goes.
type Reply<T> = oneshot::Sender<Result<T>>;

enum Request {
    Disks(Reply<Inventory>),
    Plug(Box<DiskSpec>, Reply<Plugged>),
    Unplug(DiskId, Duration, Reply<()>),
    Grow(DiskId, Bytes, Option<File>, Reply<Outcome>),
    Limit(DiskId, DiskLimits, Reply<()>),
    Start(Vec<DiskSpec>, Reply<()>),
    Pause(Reply<()>),
    Resume(Reply<()>),
    Stop(Duration, Reply<()>),
}

impl Request {
    fn kind(&self) -> RequestKind {
        match self {
            Request::Disks(..) => RequestKind::Disks,
            Request::Plug(..) => RequestKind::Plug,
            Request::Unplug(..) => RequestKind::Unplug,
            Request::Grow(..) => RequestKind::Grow,
            Request::Limit(..) => RequestKind::Limit,
            Request::Start(..) => RequestKind::Start,
            Request::Pause(..) => RequestKind::Pause,
            Request::Resume(..) => RequestKind::Resume,
            Request::Stop(..) => RequestKind::Stop,
        }
    }
}

impl Vm {
    /// Takes over the QEMU that listens there, whatever it is doing.
    pub async fn adopt(monitor: &Path) -> Result<Vm> {
        let (qmp, events) = Client::connect(monitor).await?;
        let (requests, taken) = mpsc::channel(REQUESTS_MAX);
        let (state, seen) = watch::channel(VmState::Starting);
        let driver = Driver::adopt(qmp, events, state).await?;
        tokio::spawn(driver.run(taken));
        Ok(Vm {
            requests,
            state: seen,
        })
    }

    /// The state as it was seen last.
    pub fn state(&self) -> VmState {
        *self.state.borrow()
    }

    /// Waits until the state is one that is wished for. A machine that is over stays so, and is answered too.
    pub async fn wait_for(&self, wish: impl Fn(VmState) -> bool) -> VmState {
        let mut state = self.state.clone();
        let found = state
            .wait_for(|state| wish(*state) || state.is_over())
            .await;
        match found {
            Ok(state) => *state,
            // The driver ends only with the machine, which it said before, or with every handle to it.
            Err(_) => self.state(),
        }
    }

    /// What disks QEMU says that it has.
    pub async fn disks(&self) -> Result<Inventory> {
        self.ask(Request::Disks).await
    }

    /// Plugs a disk. It is there when this is answered; the guest sees it a moment later. A disk whose removal the guest
    /// has not acknowledged is still there, and goes when it does.
    pub async fn plug(&self, disk: DiskSpec) -> Result<Plugged> {
        self.ask(|reply| Request::Plug(Box::new(disk), reply)).await
    }

    /// Unplugs a disk, and answers when QEMU has let go of its bytes. While the guest is paused, QEMU keeps the
    /// descriptor open without using it, and closes it when the guest goes on. On the scsi bus QEMU does not wait for the guest: use
    /// [`Vm::unplug_with`] unless the guest is known not to use the disk.
    pub async fn unplug(&self, id: &DiskId, limit: Duration) -> Result<()> {
        let id = id.clone();
        self.ask(|reply| Request::Unplug(id, limit, reply)).await
    }

    /// Unplugs a disk after the guest's agent has written it back and found nobody who uses it.
    pub async fn unplug_with(
        &self,
        agent: &mut GuestAgent,
        id: &DiskId,
        serial: &str,
        if_mounted: IfMounted,
        limit: Duration,
    ) -> Result<()> {
        let disks = self.disks().await?;
        if let Ok(disk) = disks.disk(id) {
            let serial = disk.bus.serial(serial);
            let uses = agent.release_disk(&serial, if_mounted).await?;
            if !uses.is_empty() {
                return Err(Error::GuestUses {
                    id: id.clone(),
                    uses,
                });
            }
        }
        self.unplug(id, limit).await
    }

    /// Grows a disk to `want` at least. A raw file has to be handed over open, because only it knows its size. A guest
    /// that waits for room goes on afterwards.
    pub async fn grow(&self, id: &DiskId, want: Bytes, file: Option<File>) -> Result<Outcome> {
        let id = id.clone();
        self.ask(|reply| Request::Grow(id, want, file, reply)).await
    }

    /// Sets new limits on a disk's use.
    pub async fn limit(&self, id: &DiskId, limits: DiskLimits) -> Result<()> {
        let id = id.clone();
        self.ask(|reply| Request::Limit(id, limits, reply)).await
    }

    /// Plugs the first disks and lets the guest run. Disks that are there already are left as they are, so a start that
    /// was interrupted can be asked for again.
    pub async fn start(&self, disks: Vec<DiskSpec>) -> Result<()> {
        self.ask(|reply| Request::Start(disks, reply)).await
    }

    /// Stops the guest for a while.
    pub async fn pause(&self) -> Result<()> {
        self.ask(Request::Pause).await
    }

    /// Lets the guest go on.
    pub async fn resume(&self) -> Result<()> {
        self.ask(Request::Resume).await
    }

    /// Asks the guest to switch itself off, and ends QEMU if it has not by then. Answers when the guest was asked;
    /// [`Vm::wait_for`] tells the end.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        self.ask(|reply| Request::Stop(grace, reply)).await
    }

    async fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let sent = self.requests.send(request(reply)).await;
        sent.map_err(|_| Error::DriverGone)?;
        answer.await.map_err(|_| Error::DriverGone)?
    }
}
