//! The keeper's only thread: it waits for a request, the end of a process or a due time, and acts on it.

mod replacing;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use trellis_node::sys::descriptors;

use crate::calls::{Calls, Due, SILENCE_TIME_MAX};
use crate::error::Error;
use crate::message::{Answer, Event, Request, receive, send};
use crate::paths::{ProcessPaths, RunDir};
use crate::process::Life;
use crate::processes::Processes;
use crate::trial::Trial;
use crate::wanted::WantedFile;

pub use replacing::{can_read, go_on};

/// How many connections there may be: the service has two, and every target one.
const PEERS_MAX: usize = 16 << 10;
/// How many may wait to be let in.
const BACKLOG: i32 = 256;
/// How long a keeper stays that has nothing to keep and nobody to talk to.
const IDLE_TIME_MAX: Duration = Duration::from_secs(10);
/// The pause when not even a connection can be accepted.
const TROUBLE_PAUSE: Duration = Duration::from_millis(100);
/// The name of the process that serves a volume.
const TARGET: &str = "target";
/// The most descriptors of one connection: `/dev/fuse`, and the memory of its requests.
const DESCRIPTORS_MAX: usize = 2;

/// What a keeper is told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its own directory.
    pub directory: PathBuf,
    /// Where the volumes have their run directories.
    pub run: PathBuf,
    /// The arguments with which another program goes on as this keeper ([`go_on`]).
    pub to_go_on: Vec<OsString>,
    /// The arguments with which it says whether it can ([`can_read`]).
    pub to_try: Vec<OsString>,
}

/// What is held of a volume.
struct Held {
    descriptors: Vec<OwnedFd>,
    note: String,
}

/// Somebody who has connected.
struct Peer {
    socket: OwnedFd,
    /// It wants to be told of events.
    watches: bool,
    /// The volume whose target it is.
    serves: Option<(String, Calls)>,
}

struct Keeper {
    settings: Settings,
    /// Held as long as the process lives.
    life: Life,
    listener: OwnedFd,
    peers: BTreeMap<u64, Peer>,
    peers_ever: u64,
    held: BTreeMap<String, Held>,
    processes: Processes,
    /// How long a target may be silent.
    silence_max: Duration,
    /// Since when there is nothing to do at all.
    idle_since: Option<Instant>,
    /// The program that this keeper is asked to become.
    trial: Option<Trial>,
    /// Why it did not become the last one.
    not_replaced: Option<String>,
}

/// What has happened.
enum Happened {
    Somebody,
    Peer(u64),
    Ended((String, String)),
    Tried,
}

/// Keeps until there is nothing to keep and nobody asks any more.
pub fn run(settings: Settings) -> Result<(), Error> {
    // So that no terminal and no service manager of whoever started this takes it for its own.
    if let Err(errno) = rustix::process::setsid() {
        tracing::debug!(%errno, "the keeper has no session of its own");
    }
    keep_from_children();
    Keeper::begin(settings)?.keep()
}

/// Passes nothing on that whoever started this has left open: the keeper's children outlive them by far.
fn keep_from_children() {
    if let Err(error) = descriptors::keep_from_children() {
        tracing::warn!(%error, "open descriptors may be passed on to the processes of volumes");
    }
}

/// Listens before the socket gets its name, so a client that sees the socket can connect.
fn listen(paths: &ProcessPaths) -> io::Result<OwnedFd> {
    match std::fs::remove_file(&paths.deaf_socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&listener, &SocketAddrUnix::new(&paths.deaf_socket)?)?;
    rustix::net::listen(&listener, BACKLOG)?;
    std::fs::rename(&paths.deaf_socket, &paths.socket)?;
    Ok(listener)
}

impl Keeper {
    /// A keeper that knows what shall run, and holds nothing yet.
    fn begin(settings: Settings) -> Result<Keeper, Error> {
        let paths = RunDir::at(settings.directory.clone()).process("keeper");
        let used = |path: &PathBuf| {
            let path = path.clone();
            move |source: io::Error| Error::Path { path, source }
        };
        let life = Life::begin(&paths.lock).map_err(used(&paths.lock))?;
        let Some(life) = life else {
            let directory = settings.directory.clone();
            return Err(Error::AlreadyRuns { directory });
        };
        let file = WantedFile::of(&settings.directory);
        let processes = Processes::open(settings.run.clone(), file, Instant::now());
        let listener = listen(&paths).map_err(used(&paths.socket))?;
        Ok(Keeper::new(settings, life, listener, processes))
    }

    fn new(settings: Settings, life: Life, listener: OwnedFd, processes: Processes) -> Keeper {
        Keeper {
            settings,
            life,
            listener,
            peers: BTreeMap::new(),
            peers_ever: 0,
            held: BTreeMap::new(),
            processes,
            silence_max: SILENCE_TIME_MAX,
            idle_since: None,
            trial: None,
            not_replaced: None,
        }
    }

    fn keep(mut self) -> Result<(), Error> {
        // The name of the file would be a number after a replacement.
        let _ = rustix::thread::set_name(c"trellis-keeper");
        while self.has_work(Instant::now()) {
            self.turn().map_err(Error::Wait)?;
        }
        let paths = RunDir::at(self.settings.directory.clone()).process("keeper");
        let _ = std::fs::remove_file(&paths.socket);
        Ok(())
    }

    /// Whether the keeper should go on. An idle keeper stays for a moment, because the service may be about to come
    /// back.
    fn has_work(&mut self, now: Instant) -> bool {
        let idle = self.peers.is_empty() && self.held.is_empty() && self.processes.is_empty();
        if !idle {
            self.idle_since = None;
            return true;
        }
        let since = *self.idle_since.get_or_insert(now);
        now.duration_since(since) < IDLE_TIME_MAX
    }

    /// Sleeps until something happens, and does what is to be done then.
    fn turn(&mut self) -> io::Result<()> {
        let events = self.processes.attend(Instant::now());
        self.tell(&events);
        self.call_targets(Instant::now());
        self.limit_trial(Instant::now());
        let (before, limit) = (Instant::now(), self.time_to_sleep(Instant::now()));
        let happened = self.wait(limit)?;
        let late = limit.map_or(Duration::ZERO, |limit| {
            before.elapsed().saturating_sub(limit)
        });
        for peer in self.peers.values_mut() {
            if let Some((_, calls)) = &mut peer.serves {
                calls.forgive(Instant::now(), late);
            }
        }
        for happened in happened {
            match happened {
                Happened::Somebody => self.accept(),
                Happened::Peer(peer) => self.listen_to(peer),
                Happened::Ended(process) => {
                    let event = self.processes.ended(&process, Instant::now());
                    self.tell(event.as_slice());
                }
                Happened::Tried => self.tried(),
            }
        }
        Ok(())
    }

    /// Calls the targets that are to be called, and does what silence asks for.
    fn call_targets(&mut self, now: Instant) {
        let mut silent = Vec::new();
        for peer in self.peers.values_mut() {
            let Some((volume, calls)) = &mut peer.serves else {
                continue;
            };
            match calls.due(now, self.silence_max) {
                // One that does not even take the call is silent too.
                Some(Due::Call) => drop(send(&peer.socket, &Event::Call, &[])),
                Some(Due::Silent) => {
                    let volume = volume.clone();
                    tracing::warn!(volume, "the target does not answer");
                    silent.push(Event::Silent { volume });
                }
                Some(Due::Kill) => {
                    tracing::warn!(
                        volume,
                        "the target has not answered for too long and is killed"
                    );
                    self.processes.kill(volume, TARGET);
                    peer.serves = None;
                }
                None => {}
            }
        }
        self.tell(&silent);
    }

    fn wait(&self, limit: Option<Duration>) -> io::Result<Vec<Happened>> {
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        let mut what = vec![Happened::Somebody];
        for (number, peer) in &self.peers {
            polled.push(PollFd::new(&peer.socket, PollFlags::IN));
            what.push(Happened::Peer(*number));
        }
        let watched: Vec<(&(String, String), BorrowedFd<'_>)> = self.processes.watched().collect();
        for (key, pidfd) in &watched {
            polled.push(PollFd::new(pidfd, PollFlags::IN));
            what.push(Happened::Ended((*key).clone()));
        }
        if let Some(trial) = &self.trial {
            polled.push(PollFd::new(trial, PollFlags::IN));
            what.push(Happened::Tried);
        }
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut polled, limit.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(errno) => return Err(errno.into()),
        }
        let happened = polled.iter().map(|each| !each.revents().is_empty());
        Ok(what
            .into_iter()
            .zip(happened)
            .filter_map(|(what, happened)| happened.then_some(what))
            .collect())
    }

    fn time_to_sleep(&self, now: Instant) -> Option<Duration> {
        let ends = self.idle_since.map(|since| since + IDLE_TIME_MAX);
        let serving = self.peers.values().filter_map(|peer| peer.serves.as_ref());
        let calls = serving.map(|(_, calls)| calls.deadline(self.silence_max));
        let processes = self.processes.next_deadline();
        let trial = self.trial.as_ref().and_then(Trial::deadline);
        let known = ends.into_iter().chain(processes).chain(trial);
        let next = known.chain(calls).min();
        next.map(|at| at.saturating_duration_since(now))
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.listener, flags) {
            Ok(_) if self.peers.len() >= PEERS_MAX => {}
            Ok(socket) => {
                self.peers_ever += 1;
                let peer = Peer {
                    socket,
                    watches: false,
                    serves: None,
                };
                self.peers.insert(self.peers_ever, peer);
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => {
                tracing::warn!(%errno, "a connection cannot be accepted");
                std::thread::sleep(TROUBLE_PAUSE);
            }
        }
    }

    /// Answers one request of a peer, or lets go of it when it has gone.
    fn listen_to(&mut self, number: u64) {
        let Some(peer) = self.peers.get(&number) else {
            return;
        };
        let received = match receive::<Request>(&peer.socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            other => other,
        };
        let Ok(Some((request, descriptors))) = received else {
            self.peers.remove(&number);
            return;
        };
        let answered = self.answer(number, request, descriptors);
        if let Err(error) = answered {
            tracing::debug!(%error, "an answer could not be given");
            self.peers.remove(&number);
        }
    }

    fn answer(
        &mut self,
        number: u64,
        request: Request,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let now = Instant::now();
        let mut sent: Vec<BorrowedFd<'_>> = Vec::new();
        let answer = match request {
            Request::Run(wanted) => {
                let wanted = self.processes.want(wanted, now);
                let events = self.processes.attend(now);
                self.tell(&events);
                done(wanted)
            }
            Request::Forget { volume, name } => done(self.processes.forget(&volume, &name)),
            Request::End { volume, name } => done(self.processes.end(&volume, &name, now)),
            Request::Deposit { .. } if !(1..=DESCRIPTORS_MAX).contains(&descriptors.len()) => {
                Answer::Refused {
                    message: "A connection comes with one or two descriptors.".to_owned(),
                }
            }
            Request::Deposit { volume, note } => {
                if let Some(peer) = self.peers.get_mut(&number) {
                    peer.serves = Some((volume.clone(), Calls::new(now)));
                }
                self.held.insert(volume, Held { descriptors, note });
                Answer::Done
            }
            Request::Take { volume } => match self.held.get(&volume) {
                Some(held) => {
                    sent = held.descriptors.iter().map(AsFd::as_fd).collect();
                    let note = held.note.clone();
                    Answer::Held { note }
                }
                None => Answer::Nothing,
            },
            Request::Release { volume } => {
                self.held.remove(&volume);
                Answer::Done
            }
            Request::Here => {
                self.heard(number, now);
                return Ok(());
            }
            Request::Build => self.runs(),
            Request::Replace { program } => {
                self.try_program(number, program, descriptors, now);
                return Ok(());
            }
            Request::Watch { silence_ms_max } => {
                self.silence_max = Duration::from_millis(silence_ms_max);
                let serving = self
                    .peers
                    .values_mut()
                    .filter_map(|peer| peer.serves.as_mut());
                serving.for_each(|(_, calls)| calls.tell_again());
                if let Some(peer) = self.peers.get_mut(&number) {
                    peer.watches = true;
                }
                Answer::Done
            }
        };
        match self.peers.get(&number) {
            Some(peer) => send(&peer.socket, &answer, &sent),
            None => Ok(()),
        }
    }

    /// A target has answered.
    fn heard(&mut self, number: u64, now: Instant) {
        let peer = self.peers.get_mut(&number);
        let Some((volume, calls)) = peer.and_then(|peer| peer.serves.as_mut()) else {
            return;
        };
        let volume = volume.clone();
        if calls.heard(now) {
            tracing::warn!(volume, "the target answers again");
            self.tell(&[Event::Heard { volume }]);
        }
    }

    /// Sends an event to all subscribers. One that does not read is dropped, and subscribes again when it sees that.
    fn tell(&mut self, events: &[Event]) {
        for event in events {
            self.peers
                .retain(|_, peer| !peer.watches || send(&peer.socket, event, &[]).is_ok());
        }
    }
}

fn done(result: io::Result<()>) -> Answer {
    match result {
        Ok(()) => Answer::Done,
        Err(error) => Answer::Refused {
            message: format!("What shall run cannot be kept: {error}."),
        },
    }
}
