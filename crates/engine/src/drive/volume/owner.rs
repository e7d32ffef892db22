//! The owner of a volume's coordinator.
//!
//! In one turn it takes everything that has come in from clients and replicas, lets the coordinator run, carries out
//! its effects, and writes to the sockets. So a turn costs one call of the coordinator and one write per socket,
//! however many requests it has taken.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::Sleep;
use uuid::Uuid;

use super::extents;
use super::peers::{Happened, Peers};
use super::requests::{Command, Reply, Requests};
use super::spin::Spin;
use super::{Ended, Troubles, VolumeError, VolumeSettings, WhenFull};
use crate::coordinator::{Coordinator, Effect, Event, IoOp, Settings, Status, Takeover};
use crate::drive::Address;
use crate::drive::lent::Arena;
use crate::proto::{Config, Geometry, Promise, ReplicaId, Term, View};

/// How often the coordinator is told the time: while requests wait, and otherwise.
const TICK_BUSY: Duration = Duration::from_millis(20);
const TICK_IDLE: Duration = Duration::from_millis(200);

/// How long the status may be behind.
const STATUS_EVERY: Duration = Duration::from_millis(100);

/// Commands that are taken in one turn.
const COMMANDS_PER_TURN: usize = 256;

/// How often the coordinator goes on in one turn with what it has peeked at.
const ROUNDS_PER_TURN: usize = 64;

/// How many generations are tried at the start, each above the highest that a replica reported.
const GENERATIONS_TRIED_MAX: u32 = 16;

/// How long a growth is waited for that is neither done nor held.
const GROWTH_PATIENCE: Duration = Duration::from_secs(60);

/// A caller that waits for a growth.
struct Grower {
    to: u64,
    since: Instant,
    reply: Reply<u64>,
}

pub(super) struct Owner {
    settings: VolumeSettings,
    coordinator: Coordinator,
    promise: Promise,
    generations_tried: u32,
    /// The replicas, as far as we know: a successor of the coordinator begins with them.
    view: View,
    has_served: bool,
    began: Instant,
    commands: mpsc::Receiver<Command>,
    taken: Vec<Command>,
    commands_taken: usize,
    /// Clients were let go first before what they asked for was looked at.
    has_yielded: bool,
    requests: Requests,
    peers: Peers,
    happened: Vec<Happened>,
    effects: Vec<Effect>,
    /// Wishes that outlive a coordinator.
    growth: Option<u64>,
    config: Option<Config>,
    growers: Vec<Grower>,
    tick: Pin<Box<Sleep>>,
    tick_at: Instant,
    spin: Spin,
    status_at: Instant,
    status_due: bool,
    size: Arc<AtomicU64>,
    status: watch::Sender<Status>,
    troubles: watch::Sender<Troubles>,
    ended: watch::Sender<Option<Ended>>,
    end: Option<Ended>,
}

fn coordinator_of(settings: &VolumeSettings, promise: Promise, view: View) -> Coordinator {
    Coordinator::new(Settings {
        volume: settings.volume,
        geometry: Geometry::STANDARD,
        promise,
        view,
        takeover: settings.takeover,
        limits: settings.limits,
        #[cfg(feature = "flaws")]
        flaws: crate::coordinator::Flaws::default(),
    })
}

/// Two coordinators of one generation must not be taken for one.
fn some_owner() -> u64 {
    Uuid::new_v4().as_u64_pair().1
}

impl Owner {
    pub(super) fn new(
        mut settings: VolumeSettings,
        commands: mpsc::Receiver<Command>,
        size: Arc<AtomicU64>,
        arena: Option<Arc<Arena>>,
    ) -> (
        Owner,
        watch::Receiver<Status>,
        watch::Receiver<Troubles>,
        watch::Receiver<Option<Ended>>,
    ) {
        let promise = Promise {
            generation: settings.term.generation_min(settings.lineage),
            owner: some_owner(),
        };
        let view = match settings.takeover {
            Takeover::Quorum => View::assumed(settings.lineage, settings.config.clone()),
            Takeover::Survivors => View::recovered(settings.lineage, settings.config.clone()),
        };
        let coordinator = coordinator_of(&settings, promise, view.clone());
        let addresses = std::mem::take(&mut settings.addresses);
        let credentials = settings.credentials.clone();
        let peers = Peers::new(addresses, credentials, arena);
        let (status, status_seen) = watch::channel(coordinator.status());
        let (troubles, troubles_seen) = watch::channel(Troubles::new());
        let (ended, ended_seen) = watch::channel(None);
        let when_full = settings.when_full;
        let now = Instant::now();
        let owner = Owner {
            settings,
            coordinator,
            promise,
            generations_tried: 0,
            view,
            has_served: false,
            began: now,
            commands,
            taken: Vec::new(),
            commands_taken: 0,
            has_yielded: false,
            requests: Requests::new(when_full),
            peers,
            happened: Vec::new(),
            effects: Vec::new(),
            growth: None,
            config: None,
            growers: Vec::new(),
            tick: Box::pin(tokio::time::sleep(Duration::ZERO)),
            tick_at: now,
            spin: Spin::default(),
            status_at: now,
            status_due: true,
            size,
            status,
            troubles,
            ended,
            end: None,
        };
        (owner, status_seen, troubles_seen, ended_seen)
    }

    pub(super) async fn run(mut self) {
        let end = std::future::poll_fn(|context| self.turn(context)).await;
        self.peers.end();
        let error = match end {
            Ended::Deposed { by } => {
                tracing::warn!(
                    volume = %self.settings.volume,
                    "another coordinator has taken over, with generation {}", by.generation
                );
                VolumeError::Deposed
            }
            Ended::Stopped => VolumeError::Stopped,
        };
        // First the reason, so that whoever is answered can ask for it.
        self.ended.send_replace(Some(end));
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            refuse(command, error);
        }
        self.requests.end(error);
        for grower in self.growers {
            grower.reply.give(Err(error));
        }
        self.status.send_replace(self.coordinator.status());
    }

    fn turn(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        if self.take_commands(context).is_ready() {
            return Poll::Ready(Ended::Stopped);
        }
        if self.commands_taken > 0 && !self.has_yielded && self.requests.is_concurrent() {
            // Others who were answered together with this one are about to ask for more. What they ask
            // for is sent and answered together, if we let them go first.
            self.has_yielded = true;
            self.commands_taken = 0;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.has_yielded = false;
        self.commands_taken = 0;
        let mut again = self.peers.poll(context, &mut self.happened);
        self.clock(context);
        for round in 0..ROUNDS_PER_TURN {
            let has_peeked = self.go_on();
            if let Some(end) = self.end {
                return Poll::Ready(end);
            }
            // What was peeked at may be answered already, or has to be asked for.
            if self.happened.is_empty() && !has_peeked {
                break;
            }
            again |= round + 1 == ROUNDS_PER_TURN;
        }
        self.peers.flush(context, &mut self.happened);
        again |= !self.happened.is_empty();
        self.tell();
        if again {
            context.waker().wake_by_ref();
        } else if self.requests.is_idle() || self.requests.is_concurrent() {
            self.spin.answered();
        } else if self.spin.looks(Instant::now()) {
            // Wakes us when everybody else had a turn and the sockets were looked at.
            let _ = std::pin::pin!(tokio::task::yield_now()).poll(context);
        }
        Poll::Pending
    }

    /// Takes requests of clients, as long as there is room. Ready: no clients are left.
    fn take_commands(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while self.requests.has_room() {
            let mut taken = std::mem::take(&mut self.taken);
            let polled = self
                .commands
                .poll_recv_many(context, &mut taken, COMMANDS_PER_TURN);
            self.commands_taken += taken.len();
            let over = taken.drain(..).any(|command| self.command(command));
            self.taken = taken;
            match polled {
                Poll::Ready(0) => return Poll::Ready(()),
                _ if over => return Poll::Ready(()),
                Poll::Ready(_) => {}
                Poll::Pending => break,
            }
        }
        Poll::Pending
    }

    /// Takes one command. Says whether it is the end.
    fn command(&mut self, command: Command) -> bool {
        match command {
            Command::Io { op, reply } => self.requests.add(op, reply),
            Command::Compare {
                offset,
                expected,
                data,
                fua,
                reply,
            } => {
                let write = IoOp::Write { offset, data, fua };
                self.requests.compare(write, expected, reply);
            }
            Command::Grow { to, reply } => self.want_growth(to, reply),
            Command::Reach { addresses, reply } => {
                self.reach(&addresses);
                reply.give(Ok(()));
            }
            Command::Reconfigure {
                from,
                config,
                addresses,
                reply,
            } => {
                self.reach(&addresses);
                reply.give(self.reconfigure(from, config));
            }
            Command::Pieces { range, reply } => {
                let file_of = |range| self.peers.file_of(self.coordinator.shows(range)?);
                let size = self.size.load(Ordering::Relaxed);
                reply.give(Ok(extents::pieces(range, size, file_of)));
            }
            Command::Scrub => self.take(Event::Scrub),
            Command::Stop => return true,
        }
        false
    }

    /// Takes addresses over. Who has none any more and does not count is not waited for.
    fn reach(&mut self, addresses: &BTreeMap<ReplicaId, Address>) {
        self.peers.learn(addresses);
        for replica in self.peers.ids() {
            let of_goal = self.config.as_ref();
            let of_goal = of_goal.is_some_and(|config| config.members.contains(&replica));
            let is_known = addresses.contains_key(&replica) || self.view.contains(replica);
            if !is_known && !of_goal {
                self.peers.forget(replica);
                self.take(Event::Forget { replica });
            }
        }
    }

    fn reconfigure(&mut self, from: Option<u64>, config: Config) -> Result<(), VolumeError> {
        if from.is_some_and(|version| version != self.view.version) {
            return Ok(());
        }
        let is_known = |id: &ReplicaId| self.peers.knows(*id) || self.view.contains(*id);
        if !config.members.iter().all(is_known) {
            return Err(VolumeError::ConfigBad);
        }
        self.config = Some(config.clone());
        self.take(Event::Reconfigure { config });
        Ok(())
    }

    fn take(&mut self, event: Event) {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.coordinator.take(now_ms, event, &mut self.effects);
    }

    fn want_growth(&mut self, to: u64, reply: Reply<u64>) {
        let size = self.size.load(Ordering::Relaxed);
        if self.has_served && to <= size {
            return reply.give(Ok(size));
        }
        for replaced in self.growers.extract_if(.., |grower| grower.to > to) {
            replaced.reply.give(Err(VolumeError::GrowthReplaced));
        }
        let since = Instant::now();
        self.growers.push(Grower { to, since, reply });
        self.growth = Some(to);
        self.take(Event::Grow { to });
    }

    /// Tells the coordinator the time, if it is due, and begins connections.
    fn clock(&mut self, context: &mut Context<'_>) {
        let now = Instant::now();
        let busy = !self.requests.is_idle()
            || self.requests.has_resting()
            || !self.growers.is_empty()
            || !self.coordinator.is_serving()
            || self.peers.is_restless();
        if now >= self.tick_at {
            self.take(Event::Tick);
            self.give_up(now);
            self.tick_in(now, if busy { TICK_BUSY } else { TICK_IDLE });
        } else if busy && self.tick_at > now + TICK_BUSY {
            self.tick_in(now, TICK_BUSY);
        }
        self.peers.dial(now);
        // One that is over already must be set again, or it would not wake us.
        if self.tick.as_mut().poll(context).is_ready() {
            self.tick_in(now, Duration::ZERO);
            context.waker().wake_by_ref();
        }
    }

    fn tick_in(&mut self, now: Instant, wait: Duration) {
        self.tick_at = now + wait;
        self.tick.as_mut().reset(self.tick_at.into());
    }

    fn give_up(&mut self, now: Instant) {
        let error = match self.settings.when_full {
            _ if !self.coordinator.lacks_space() => VolumeError::NotReady,
            WhenFull::Wait => VolumeError::NoSpaceYet,
            WhenFull::Fail => VolumeError::NoSpace,
        };
        for id in self.requests.give_up(self.settings.patience, error) {
            self.take(Event::Cancel { id });
        }
        let late = |grower: &mut Grower| now.duration_since(grower.since) > GROWTH_PATIENCE;
        for grower in self.growers.extract_if(.., late) {
            grower.reply.give(Err(VolumeError::NotReady));
        }
        if let Some(held) = self.coordinator.growth_held() {
            for grower in self.growers.drain(..) {
                grower.reply.give(Err(VolumeError::GrowthHeld(held)));
            }
        }
    }

    /// Takes what has happened, lets the coordinator run, and carries out its effects. Returns whether it has peeked
    /// at something, so that it can go on.
    fn go_on(&mut self) -> bool {
        for happened in std::mem::take(&mut self.happened) {
            match happened {
                Happened::Opened(replica, session) => {
                    self.status_due = true;
                    self.take(Event::Opened { replica, session });
                }
                Happened::Near(replica, session) => self.take(Event::Near { replica, session }),
                Happened::Verifies(replica, session) => {
                    self.take(Event::Verifies { replica, session });
                }
                Happened::TakesCalls(replica, session) => {
                    self.take(Event::TakesCalls { replica, session })
                }
                Happened::Unreachable(replica) => self.take(Event::Unreachable { replica }),
                Happened::Closed(replica, session) => {
                    self.status_due = true;
                    self.take(Event::Closed { replica, session });
                }
                Happened::Received(replica, session, envelope) => self.take(Event::Received {
                    replica,
                    session,
                    envelope,
                }),
            }
        }
        while let Some((id, op)) = self.requests.next(|| self.coordinator.accepts()) {
            self.take(Event::Io { id, op });
        }
        self.coordinator.advance(&mut self.effects);
        let effects = std::mem::take(&mut self.effects);
        let (mut retake, mut has_peeked) = (false, false);
        for effect in effects {
            retake |= matches!(effect, Effect::Retake);
            has_peeked |= matches!(effect, Effect::Peek { .. });
            self.effect(effect, retake);
        }
        if retake && self.end.is_none() {
            tracing::warn!(
                volume = %self.settings.volume,
                "a region has no holder left; it is decided again which bytes count"
            );
            self.retake();
        }
        has_peeked
    }

    fn effect(&mut self, effect: Effect, retake: bool) {
        match effect {
            Effect::Send {
                replica,
                session,
                envelope,
            } => {
                let lost = self.peers.send(replica, session, envelope);
                self.happened.extend(lost);
            }
            Effect::Peek {
                replica,
                session,
                tag,
                offset,
                length,
            } => {
                let content = self.peers.peek(replica, session, offset, length);
                self.take(Event::Peeked { tag, content });
            }
            Effect::Close { replica, session } => {
                self.status_due = true;
                self.peers.close(replica, session);
            }
            // They are asked again, or answered with the end.
            Effect::Reply { .. } if retake || self.coordinator.is_over() => {}
            Effect::Reply { id, result } => self.requests.answered(id, result),
            Effect::Serving { size } => {
                self.has_served = true;
                // What was given up is given up. From now on a quorum decides again.
                self.settings.takeover = Takeover::Quorum;
                self.sized(size);
            }
            Effect::Resized { size } => self.sized(size),
            Effect::ViewChanged { view } => self.viewed(view),
            Effect::Deposed { by } => self.deposed(by),
            Effect::Retake => {}
        }
    }

    fn sized(&mut self, size: u64) {
        self.status_due = true;
        self.size.fetch_max(size, Ordering::AcqRel);
        // The status says it before whoever waits for the growth can ask.
        self.tell();
        for grower in self.growers.extract_if(.., |grower| grower.to <= size) {
            grower.reply.give(Ok(size));
        }
    }

    fn viewed(&mut self, view: View) {
        self.status_due = true;
        if view.next.is_none() && self.config.as_ref() == Some(&view.current) {
            self.config = None;
            // Others that are not in the view are on their way to be.
            for replica in self.view.members() {
                if !view.contains(replica) {
                    self.peers.forget(replica);
                    self.take(Event::Forget { replica });
                }
            }
        }
        self.view = view;
    }

    /// A later coordinator has a promise. Before we have served, that is one that is gone and whose generation we did
    /// not know; afterwards it is a successor. One of a later term is a successor in any case.
    fn deposed(&mut self, by: Promise) {
        self.generations_tried += 1;
        let next = self.settings.term.above(by.generation);
        let is_outbid = Term::of_generation(next) > self.settings.term;
        if self.has_served || is_outbid || self.generations_tried >= GENERATIONS_TRIED_MAX {
            self.end = Some(Ended::Deposed { by });
        } else {
            self.succeed(next);
        }
    }

    /// Decides again which bytes count. If the term has no generation left for that, it ends: whoever starts the volume
    /// again gives it another term.
    fn retake(&mut self) {
        let next = self.promise.generation + 1;
        if Term::of_generation(next) > self.settings.term {
            self.end = Some(Ended::Deposed { by: self.promise });
        } else {
            self.succeed(next);
        }
    }

    /// Starts over with a coordinator of that generation.
    fn succeed(&mut self, generation: u64) {
        self.promise = Promise {
            generation,
            owner: some_owner(),
        };
        self.coordinator = coordinator_of(&self.settings, self.promise, self.view.clone());
        self.effects.clear();
        self.requests.ask_again();
        self.happened.clear();
        self.peers.restart();
        self.status_due = true;
        if let Some(to) = self.growth {
            self.take(Event::Grow { to });
        }
        if let Some(config) = self.config.clone() {
            self.take(Event::Reconfigure { config });
        }
        // The connections are made by the next turn of the clock.
        self.tick_in(Instant::now(), Duration::ZERO);
    }

    /// Publishes the status, if it has changed and the last time is long enough ago.
    fn tell(&mut self) {
        let now = Instant::now();
        if !self.status_due && now.duration_since(self.status_at) < STATUS_EVERY {
            return;
        }
        self.status_at = now;
        self.status_due = false;
        // First the troubles, so that who is told of a replica that is away finds out why.
        change(&self.troubles, self.peers.troubles());
        change(&self.status, self.coordinator.status());
    }
}

/// Tells what has changed, if it has.
fn change<T: PartialEq>(to: &watch::Sender<T>, new: T) {
    to.send_if_modified(|told| {
        let changed = *told != new;
        if changed {
            *told = new;
        }
        changed
    });
}

fn refuse(command: Command, error: VolumeError) {
    match command {
        Command::Io { reply, .. } => reply.give(Err(error)),
        Command::Compare { reply, .. } => reply.give(Err(error)),
        Command::Grow { reply, .. } => reply.give(Err(error)),
        Command::Reach { reply, .. } => reply.give(Err(error)),
        Command::Reconfigure { reply, .. } => reply.give(Err(error)),
        Command::Pieces { reply, .. } => reply.give(Err(error)),
        Command::Scrub | Command::Stop => {}
    }
}
