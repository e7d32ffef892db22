//! A member and its disk, run by the server that owns them.

use std::collections::VecDeque;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::disk::{Disk, FileDisk, Found};
use super::{ReplicaSettings, in_full, room};
use crate::Result;
use crate::member::{DiskOp, Effect, Event, Member, SessionId};
use crate::proto::{Answer, Body, Envelope, Geometry, ReplicaId};
use crate::wire::DataFile;

/// After this many disk operations the member reports how far it is, even if there is more to do.
const OPERATIONS_PER_WORD: usize = 64;

/// How often the free space is checked: so many times per written reserve, and after this time. The time is
/// short, because others fill the same filesystem without asking.
const LOOKS_PER_KEPT: u64 = 8;
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How often, and how soon, opening is retried for a replica whose meta data could not be written.
const REOPENS_MAX: usize = 50;
const REOPEN_RETRY: Duration = Duration::from_millis(200);

/// What a replica wants from its connections.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all of them are messages")]
pub(super) enum Wish {
    /// Send a message.
    Send(SessionId, Envelope),
    /// Close a connection.
    Close(SessionId),
    /// Close all connections: the replica starts over.
    Restart,
}

/// A replica without its connections.
pub(super) struct ReplicaCore {
    settings: ReplicaSettings,
    member: Member,
    /// Nothing only while the replica is opened again.
    disk: Option<Box<dyn Disk>>,
    effects: VecDeque<Effect>,
    scratch: Vec<Effect>,
    space: Space,
}

/// What is known of the space that is left.
struct Space {
    is_low: bool,
    looked_at: Instant,
    /// So many bytes may be written before it is looked at again.
    written_max: u64,
    written: u64,
}

impl Space {
    /// Nothing is known: the next look is due.
    fn unknown() -> Space {
        Space {
            is_low: false,
            looked_at: Instant::now(),
            written_max: 0,
            written: 0,
        }
    }
}

impl ReplicaCore {
    /// Opens a replica. Nobody else can serve it until this is dropped.
    pub(super) fn open(settings: ReplicaSettings) -> Result<ReplicaCore> {
        let (disk, found) = FileDisk::open(&settings)?;
        let member = member_of(&settings, found);
        Ok(ReplicaCore {
            settings,
            member,
            disk: Some(Box::new(disk)),
            effects: VecDeque::new(),
            scratch: Vec::new(),
            space: Space::unknown(),
        })
    }

    /// Which replica it is.
    fn id(&self) -> ReplicaId {
        self.settings.identity.replica
    }

    /// Where its data file is.
    pub(super) fn data_file(&self) -> Option<DataFile> {
        self.disk.as_ref()?.data_file()
    }

    /// How many requests of a session wait, and how many bytes these have.
    pub(super) fn backlog(&self, session: SessionId) -> (usize, u64) {
        self.member.backlog(session)
    }

    /// Whether it obeys a session, or is about to.
    pub(super) fn obeys(&self, session: SessionId) -> bool {
        self.member.obeys(session)
    }

    /// Takes an event. [`ReplicaCore::run`] must follow.
    pub(super) fn take(&mut self, event: Event) {
        self.member.take(event, &mut self.scratch);
        self.effects.extend(self.scratch.drain(..));
    }

    /// Takes what the disk has done. The task is woken when it has done more.
    pub(super) fn poll_disk(&mut self, context: &mut Context<'_>) {
        while let Some(disk) = &mut self.disk
            && let Poll::Ready((token, result)) = disk.poll_done(context)
        {
            self.take(Event::Disk { token, result });
        }
    }

    /// Looks how much space is left, if it is time to.
    fn look_at_space(&mut self) {
        let space = &self.space;
        let late = space.looked_at.elapsed() >= LOOK_EVERY;
        if space.written < space.written_max && !late {
            return;
        }
        let found = self.disk.as_ref().and_then(|disk| disk.space());
        let (free, all) = found.unwrap_or((u64::MAX, u64::MAX));
        let kept = room::kept(all);
        // What is just enough would be too little again after the next write.
        let enough = if space.is_low { kept + kept / 4 } else { kept };
        let is_low = free < enough;
        if is_low != space.is_low {
            let replica = self.id();
            tracing::warn!(%replica, free, is_low, "the space that is left has changed");
        }
        self.space = Space {
            is_low,
            looked_at: Instant::now(),
            written_max: kept / LOOKS_PER_KEPT,
            written: 0,
        };
        self.take(Event::Space { is_low });
    }

    /// Does what can be done now. An error ends the replica: it could not be opened again.
    pub(super) fn run(&mut self, out: &mut Vec<Wish>) -> Result<()> {
        self.look_at_space();
        if let Some(disk) = &mut self.disk {
            disk.look();
        }
        let mut operations = 0;
        loop {
            self.member.pump(&mut self.scratch);
            if self.scratch.is_empty() && self.effects.is_empty()
                || operations >= OPERATIONS_PER_WORD
            {
                operations = 0;
                self.member.speak(&mut self.scratch);
            }
            self.effects.extend(self.scratch.drain(..));
            if self.effects.is_empty() {
                return Ok(());
            }
            while let Some(effect) = self.effects.pop_front() {
                match effect {
                    Effect::Send {
                        session,
                        mut envelope,
                    } => {
                        if let Body::Answer(Answer::Surveyed(surveyed)) = &mut envelope.body {
                            surveyed.written_at =
                                self.disk.as_ref().and_then(|disk| disk.written_at());
                        }
                        out.push(Wish::Send(session, envelope));
                    }
                    Effect::Close { session } => out.push(Wish::Close(session)),
                    Effect::Note { key } => {
                        if let Some(disk) = &mut self.disk {
                            disk.note(key);
                        }
                    }
                    Effect::Disk { token, op } => {
                        operations += 1;
                        if let DiskOp::Write { data, .. } = &op {
                            self.space.written += u64::try_from(data.len()).unwrap_or(0);
                        }
                        let result = self.disk.as_mut().and_then(|disk| disk.submit(token, op));
                        if let Some(result) = result {
                            self.take(Event::Disk { token, result });
                        }
                    }
                    Effect::Halt => {
                        self.reopen()?;
                        out.push(Wish::Restart);
                    }
                }
            }
        }
    }

    /// Only the disk knows what counts now.
    fn reopen(&mut self) -> Result<()> {
        tracing::warn!(replica = %self.id(), "the replica is opened again from its disk");
        self.effects.clear();
        self.space = Space::unknown();
        // First the old one: it holds the replica's lock, and may have something under way.
        self.disk = None;
        let mut tries = 0;
        loop {
            match FileDisk::open(&self.settings) {
                Ok((disk, found)) => {
                    self.member = member_of(&self.settings, found);
                    self.disk = Some(Box::new(disk));
                    return Ok(());
                }
                Err(error) if tries >= REOPENS_MAX => return Err(error),
                Err(error) => tracing::warn!("{}", in_full(&error)),
            }
            tries += 1;
            std::thread::sleep(REOPEN_RETRY);
        }
    }
}

fn member_of(settings: &ReplicaSettings, found: Found) -> Member {
    let identity = settings.identity;
    Member::open(
        identity.volume,
        identity.replica,
        Geometry::STANDARD,
        found.meta,
        found.note,
    )
    .suspecting(found.rotten)
}
