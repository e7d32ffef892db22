//! The driver's task.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use trellis_api::Bytes;
use trellis_node::filesystem::Outcome;

use super::policy::{End, Pause, RequestKind, Ruling, VmLoss, VmState, accept, state_of};
use super::{Reply, Request};
use crate::disks::{self, Inventory};
use crate::error::{Error, Result};
use crate::graph::{DiskId, DiskSpec};
use crate::grow;
use crate::plug::{self, Removal};
use crate::qmp::{Client, Event, Events, Notice};

/// How often a driver looks whether something has to be done, if nothing else wakes it.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);

/// A removal that waits for the guest.
struct PendingRemoval {
    deadline: Instant,
    limit: Duration,
    reply: Reply<()>,
}

pub(super) struct Driver {
    qmp: Client,
    events: Events,
    state: watch::Sender<VmState>,
    removals: BTreeMap<DiskId, PendingRemoval>,
    /// When QEMU is ended although the guest has not switched itself off.
    stop_deadline: Option<Instant>,
    /// QEMU ends, and because of whom.
    ending: Option<End>,
}

impl Driver {
    /// Finds out how things are, and finishes what was left half done.
    pub(super) async fn adopt(
        qmp: Client,
        events: Events,
        state: watch::Sender<VmState>,
    ) -> Result<Driver> {
        let mut driver = Driver {
            qmp,
            events,
            state,
            removals: BTreeMap::new(),
            stop_deadline: None,
            ending: None,
        };
        driver.observe().await?;
        driver.release_leftovers().await?;
        Ok(driver)
    }

    pub(super) async fn run(mut self, mut requests: mpsc::Receiver<Request>) {
        while !self.state().is_over() {
            let wake = self.next_deadline();
            tokio::select! {
                // In no order, so that a guest that causes one event after the other holds up no request.
                next = self.events.next() => self.happened(next).await,
                request = requests.recv() => match request {
                    Some(request) => self.requested(request).await,
                    None => return,
                },
                () = tokio::time::sleep_until(wake) => self.deadlines().await,
            }
        }
        let state = self.state();
        for (_, removal) in std::mem::take(&mut self.removals) {
            // The disk went with the machine.
            answer(removal.reply, Ok(()));
        }
        requests.close();
        while let Some(request) = requests.recv().await {
            refuse(request, state);
        }
    }

    fn state(&self) -> VmState {
        *self.state.borrow()
    }

    fn set_state(&self, state: VmState) {
        self.state.send_if_modified(|known| {
            let changed = *known != state;
            *known = state;
            changed
        });
    }

    fn next_deadline(&self) -> Instant {
        let removals = self.removals.values().map(|removal| removal.deadline);
        let idle = Instant::now() + IDLE_TIME_MAX;
        removals
            .chain(self.stop_deadline)
            .min()
            .map_or(idle, |first| first.min(idle))
    }

    /// Asks QEMU how the machine is.
    async fn observe(&mut self) -> Result<()> {
        const COMMAND: &str = "query-status";
        let answer = self.qmp.execute(COMMAND, Value::Null).await?;
        let run_state = answer["status"].as_str().ok_or(Error::Answer {
            command: COMMAND,
            what: "status",
        })?;
        let out_of_space = run_state == "io-error" && self.out_of_space().await?;
        self.set_state(state_of(
            run_state,
            out_of_space,
            self.stop_deadline.is_some(),
        ));
        Ok(())
    }

    async fn out_of_space(&self) -> Result<bool> {
        let inventory = Inventory::ask(&self.qmp).await?;
        Ok(inventory.disks.values().any(|disk| disk.out_of_space))
    }

    /// Removes the parts of disks that have no device.
    async fn release_leftovers(&self) -> Result<()> {
        for id in Inventory::ask(&self.qmp).await?.leftovers {
            tracing::info!(disk = %id, "what was left of a disk is released");
            plug::release(&self.qmp, &id).await?;
        }
        Ok(())
    }

    async fn happened(&mut self, next: Notice) {
        match next {
            Notice::Event(event) => self.event(event).await,
            Notice::Missed(count) => {
                tracing::warn!(count, "events of QEMU were missed; it is asked again");
                self.look_again().await;
            }
            Notice::Closed => {
                let gone = VmState::Failed(VmLoss::QemuGone);
                self.set_state(self.ending.map_or(gone, VmState::Stopped));
            }
        }
    }

    async fn event(&mut self, event: Event) {
        match event.name.as_str() {
            "DEVICE_DELETED" => {
                // A virtio disk has a second event for its inner part, without a name.
                if let Some(device) = event.text("device") {
                    self.deleted(device).await;
                }
            }
            "DEVICE_UNPLUG_GUEST_ERROR" => {
                if let Some(id) = event.text("device").and_then(|name| self.removal_of(name))
                    && let Some(removal) = self.removals.remove(&id)
                {
                    answer(removal.reply, Err(Error::UnplugRefused { id }));
                }
            }
            "SHUTDOWN" => {
                let by_guest = event.data["guest"].as_bool() == Some(true);
                self.ending = Some(if by_guest { End::Guest } else { End::Host });
            }
            "RESUME" => {
                self.observe_now().await;
                // QEMU closes no descriptor while the guest is stopped, so removals of that time end now.
                if let Err(error) = self.release_leftovers().await {
                    tracing::warn!(%error, "what was left of a disk is not released yet");
                }
            }
            // A disk without room stops the guest, and that event counts: the guest can cause the other without end.
            "STOP" | "RESET" | "GUEST_PANICKED" | "SUSPEND" | "WAKEUP" => self.observe_now().await,
            _ => {}
        }
    }

    /// Observes, if QEMU answers. If it does not, the end of its connection tells the rest.
    async fn observe_now(&mut self) {
        if let Err(error) = self.observe().await {
            tracing::warn!(%error, "QEMU did not say how the machine is");
        }
    }

    async fn look_again(&mut self) {
        self.observe_now().await;
        let waiting: Vec<DiskId> = self.removals.keys().cloned().collect();
        for id in waiting {
            if matches!(plug::has_device(&self.qmp, &id).await, Ok(false)) {
                self.finish_removal(&id).await;
            }
        }
    }

    fn removal_of(&self, device: &str) -> Option<DiskId> {
        let mut ids = self.removals.keys();
        ids.find(|id| id.device() == device).cloned()
    }

    /// A device is gone: somebody waits for it, or the guest was slower than whoever asked.
    async fn deleted(&mut self, device: &str) {
        if let Some(id) = self.removal_of(device) {
            self.finish_removal(&id).await;
            return;
        }
        let known = disks::disk_ids(&self.qmp).await.unwrap_or_default();
        if let Some(id) = known.into_iter().find(|id| id.device() == device)
            && let Err(error) = plug::release(&self.qmp, &id).await
        {
            tracing::warn!(disk = %id, %error, "a disk without a device is left; the next plug or driver removes it");
        }
    }

    async fn finish_removal(&mut self, id: &DiskId) {
        if let Some(removal) = self.removals.remove(id) {
            let released = plug::release(&self.qmp, id).await;
            answer(removal.reply, released);
        }
    }

    async fn deadlines(&mut self) {
        let now = Instant::now();
        if self.stop_deadline.is_some_and(|deadline| deadline <= now) {
            // Once: if QEMU does not end of this, whoever keeps its process has to end it.
            self.stop_deadline = None;
            if let Err(error) = self.quit().await {
                tracing::warn!(%error, "QEMU did not take the order to end");
            }
        }
        let late: Vec<DiskId> = self
            .removals
            .iter()
            .filter(|(_, removal)| removal.deadline <= now)
            .map(|(id, _)| id.clone())
            .collect();
        for id in late {
            // The event may be on its way.
            if matches!(plug::has_device(&self.qmp, &id).await, Ok(false)) {
                self.finish_removal(&id).await;
            } else if let Some(removal) = self.removals.remove(&id) {
                let limit = removal.limit;
                answer(removal.reply, Err(Error::UnplugTimedOut { id, limit }));
            }
        }
    }

    async fn requested(&mut self, request: Request) {
        match accept(self.state(), request.kind()) {
            Ok(Ruling::Do) => self.carry_out(request).await,
            Ok(Ruling::Already) => match request {
                Request::Start(_, reply)
                | Request::Pause(reply)
                | Request::Resume(reply)
                | Request::Stop(_, reply) => answer(reply, Ok(())),
                other => refuse(other, self.state()),
            },
            Err(_) => refuse(request, self.state()),
        }
    }

    async fn carry_out(&mut self, request: Request) {
        match request {
            Request::Disks(reply) => answer(reply, Inventory::ask(&self.qmp).await),
            Request::Plug(disk, reply) => {
                let done = match self.removals.contains_key(&disk.id) {
                    true => Err(Error::UnplugUnderWay { id: disk.id }),
                    false => plug::plug(&self.qmp, &disk).await,
                };
                answer(reply, done);
            }
            Request::Unplug(id, limit, reply) => self.unplug(id, limit, reply).await,
            Request::Grow(id, want, file, reply) => {
                let done = self.grow(&id, want, file).await;
                answer(reply, done);
            }
            Request::Limit(id, limits, reply) => {
                answer(reply, plug::limit(&self.qmp, &id, limits).await);
            }
            Request::Start(disks, reply) => answer(reply, self.start(&disks).await),
            Request::Pause(reply) => answer(reply, self.order("stop").await),
            Request::Resume(reply) => answer(reply, self.order("cont").await),
            Request::Stop(grace, reply) => answer(reply, self.stop(grace).await),
        }
    }

    async fn unplug(&mut self, id: DiskId, limit: Duration, reply: Reply<()>) {
        if self.removals.contains_key(&id) {
            answer(reply, Err(Error::UnplugUnderWay { id }));
            return;
        }
        match plug::request_removal(&self.qmp, &id).await {
            Ok(Removal::Asked) => {
                let deadline = Instant::now() + limit;
                self.removals.insert(
                    id,
                    PendingRemoval {
                        deadline,
                        limit,
                        reply,
                    },
                );
            }
            Ok(Removal::Gone) => answer(reply, plug::release(&self.qmp, &id).await),
            Err(error) => answer(reply, Err(error)),
        }
    }

    async fn grow(
        &mut self,
        id: &DiskId,
        want: Bytes,
        file: Option<std::fs::File>,
    ) -> Result<Outcome> {
        let outcome = grow::grow(&self.qmp, id, want, file.as_ref()).await?;
        // There may be room now, below the disk if not in it. If there is not, the guest stops again at once.
        if self.state() == VmState::Paused(Pause::NoSpace) {
            self.order("cont").await?;
        }
        Ok(outcome)
    }

    async fn start(&mut self, disks: &[DiskSpec]) -> Result<()> {
        for disk in disks {
            plug::plug(&self.qmp, disk).await?;
        }
        if disks.iter().any(|disk| disk.boot_index.is_some()) {
            // The firmware is told the order of devices at a reset, and these came after the first one.
            self.qmp.execute("system_reset", Value::Null).await?;
        }
        self.order("cont").await
    }

    async fn stop(&mut self, grace: Duration) -> Result<()> {
        match self.state() {
            VmState::Running | VmState::Paused(_) => {
                self.qmp.execute("system_powerdown", Value::Null).await?;
                if let VmState::Paused(_) = self.state() {
                    // A guest that does not run cannot switch itself off.
                    self.qmp.execute("cont", Value::Null).await?;
                }
                self.stop_deadline = Some(Instant::now() + grace);
                self.observe().await
            }
            // There is no guest that could be asked.
            _ => self.quit().await,
        }
    }

    async fn quit(&mut self) -> Result<()> {
        match self.qmp.execute("quit", Value::Null).await {
            // It may end before its answer is out.
            Ok(_) | Err(Error::Connection { .. }) => {
                self.ending = Some(End::Host);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn order(&mut self, command: &'static str) -> Result<()> {
        self.qmp.execute(command, json!({})).await?;
        self.observe().await
    }
}

/// Answers a request. Whoever gave up does not want to know.
fn answer<T>(reply: Reply<T>, with: Result<T>) {
    let _ = reply.send(with);
}

fn refuse(request: Request, state: VmState) {
    let request_kind: RequestKind = request.kind();
    let refusal = super::policy::NotNow {
        request: request_kind,
        state,
    };
    match request {
        Request::Disks(reply) => answer(reply, Err(refusal.into())),
        Request::Plug(_, reply) => answer(reply, Err(refusal.into())),
        Request::Grow(.., reply) => answer(reply, Err(refusal.into())),
        Request::Stop(_, reply) => answer(reply, Ok(())),
        Request::Unplug(.., reply)
        | Request::Limit(.., reply)
        | Request::Start(_, reply)
        | Request::Pause(reply)
        | Request::Resume(reply) => answer(reply, Err(refusal.into())),
    }
}
