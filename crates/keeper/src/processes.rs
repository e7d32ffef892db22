//! The processes that must run: started, watched, restarted with pauses, and ended.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::handover::{Passed, ProcessHanded, distance, moment};
use crate::message::{Event, Wanted};
use crate::paths::{ProcessPaths, RunDir};
use crate::process::{self, living, reap};
use crate::wanted::WantedFile;

/// A process that ends sooner than this after its start is restarted after a pause.
const YOUNG: Duration = Duration::from_secs(1);
/// The pause before such a restart. It doubles each time.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long a process has to end by itself before it is killed.
const END_TIME_MAX: Duration = Duration::from_secs(5);

type Key = (String, String);

/// The processes of all volumes.
pub struct Processes {
    run: PathBuf,
    file: WantedFile,
    entries: BTreeMap<Key, Entry>,
}

struct Entry {
    /// What shall run; none if it shall end, or has just been found.
    wanted: Option<Wanted>,
    paths: ProcessPaths,
    running: Option<Running>,
    /// When it was last started from here.
    started: Option<Instant>,
    pause: Duration,
    /// When it is to be started.
    due: Option<Instant>,
    /// When it is killed if it has not ended.
    kill_at: Option<Instant>,
}

struct Running {
    /// Readable when the process has ended.
    pidfd: OwnedFd,
    /// It is a child of this process, and must be reaped when it has ended.
    is_child: bool,
}

impl Entry {
    fn new(paths: ProcessPaths) -> Entry {
        Entry {
            wanted: None,
            paths,
            running: None,
            started: None,
            pause: PAUSE_MIN,
            due: None,
            kill_at: None,
        }
    }

    /// Adopts a process that is already running. Returns whether there is one.
    fn adopt(&mut self) -> io::Result<bool> {
        let Some(pid) = living(&self.paths.lock)? else {
            return Ok(false);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        };
        // Otherwise it has ended between the two looks, and its number may be another's.
        if living(&self.paths.lock)? != Some(pid) {
            return Ok(false);
        }
        let is_child = false;
        self.running = Some(Running { pidfd, is_child });
        Ok(true)
    }

    fn start(&mut self, now: Instant) -> io::Result<()> {
        let Some(wanted) = self.wanted.as_ref().filter(|_| self.running.is_none()) else {
            return Ok(());
        };
        let arguments = wanted.arguments.clone();
        if self.adopt()? {
            return Ok(());
        }
        self.started = Some(now);
        let _ = std::fs::remove_file(&self.paths.socket);
        let child = process::start(&self.paths, &arguments)?;
        let pid = rustix::process::Pid::from_child(&child);
        // It is a child: until it is waited for, its number is its own.
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let is_child = true;
        self.running = Some(Running { pidfd, is_child });
        Ok(())
    }

    /// Tries again later, with a pause that doubles if the last start is not long ago.
    fn try_later(&mut self, now: Instant) {
        let lived = self.started.map(|at| now.duration_since(at));
        if lived.is_some_and(|lived| lived < YOUNG) {
            self.due = Some(now + self.pause);
            self.pause = (2 * self.pause).min(PAUSE_MAX);
        } else {
            self.due = Some(now);
            self.pause = PAUSE_MIN;
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(running) = &self.running {
            // It may just have ended, which is what is wanted.
            let _ = pidfd_send_signal(&running.pidfd, signal);
        }
    }
}

impl Processes {
    /// The processes whose files are below `run`, as the last keeper left them.
    pub fn open(run: PathBuf, file: WantedFile, now: Instant) -> Processes {
        let mut processes = Processes {
            run,
            file,
            entries: BTreeMap::new(),
        };
        for wanted in processes.file.load() {
            let entry = processes.entry(&wanted.volume, &wanted.name);
            entry.wanted = Some(wanted);
            entry.due = Some(now);
        }
        processes
    }

    /// The processes as the program before this one has told them. `take` finds a descriptor by its number.
    pub fn go_on(
        run: PathBuf,
        file: WantedFile,
        handed: Vec<ProcessHanded>,
        take: &mut impl FnMut(RawFd) -> io::Result<OwnedFd>,
        now: Instant,
    ) -> io::Result<Processes> {
        let mut processes = Processes {
            run,
            file,
            entries: BTreeMap::new(),
        };
        for each in handed {
            let pidfd = each.pidfd.map(&mut *take).transpose()?;
            let is_child = each.is_child;
            let entry = processes.entry(&each.volume, &each.name);
            entry.running = pidfd.map(|pidfd| Running { pidfd, is_child });
            entry.wanted = each.wanted;
            entry.started = each.started.map(|away| moment(away, now));
            entry.pause = Duration::from_millis(each.pause_ms).clamp(PAUSE_MIN, PAUSE_MAX);
            entry.due = each.due.map(|away| moment(away, now));
            entry.kill_at = each.kill_at.map(|away| moment(away, now));
        }
        Ok(processes)
    }

    /// The processes as they are told to the program that replaces this one.
    pub fn hand_over<'a>(&'a self, passed: &mut Passed<'a>, now: Instant) -> Vec<ProcessHanded> {
        let away = |at: Option<Instant>| at.map(|at| distance(at, now));
        let mut handed = Vec::new();
        for ((volume, name), entry) in &self.entries {
            let running = entry.running.as_ref();
            handed.push(ProcessHanded {
                volume: volume.clone(),
                name: name.clone(),
                wanted: entry.wanted.clone(),
                pidfd: running.map(|running| passed.add(running.pidfd.as_fd())),
                is_child: running.is_some_and(|running| running.is_child),
                started: away(entry.started),
                pause_ms: u64::try_from(entry.pause.as_millis()).unwrap_or(u64::MAX),
                due: away(entry.due),
                kill_at: away(entry.kill_at),
            });
        }
        handed
    }

    fn entry(&mut self, volume: &str, name: &str) -> &mut Entry {
        let paths = RunDir::of(&self.run, volume).process(name);
        let key = (volume.to_owned(), name.to_owned());
        self.entries.entry(key).or_insert_with(|| Entry::new(paths))
    }

    /// Whether there is nothing to look after.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Makes a process run. One that waits for its next start is started now, unless it was started just before.
    pub fn want(&mut self, wanted: Wanted, now: Instant) -> io::Result<()> {
        let entry = self.entry(&wanted.volume, &wanted.name);
        if entry.running.is_none() {
            let earliest = entry.started.map_or(now, |at| at + YOUNG);
            entry.due = Some(entry.due.unwrap_or(now).min(earliest).max(now));
        }
        entry.kill_at = None;
        let is_new = entry.wanted.as_ref() != Some(&wanted);
        entry.wanted = Some(wanted);
        if is_new { self.store() } else { Ok(()) }
    }

    /// Lets a process run, and does not start it again when it ends.
    pub fn forget(&mut self, volume: &str, name: &str) -> io::Result<()> {
        let entry = self.entry(volume, name);
        let was_wanted = entry.wanted.take().is_some();
        entry.due = None;
        if entry.running.is_none() {
            self.entries.remove(&(volume.to_owned(), name.to_owned()));
        }
        if was_wanted { self.store() } else { Ok(()) }
    }

    /// Has a process end.
    pub fn end(&mut self, volume: &str, name: &str, now: Instant) -> io::Result<()> {
        let entry = self.entry(volume, name);
        let was_wanted = entry.wanted.take().is_some();
        entry.due = None;
        if entry.running.is_some() || entry.adopt()? {
            entry.signal(Signal::TERM);
            entry.kill_at = Some(now + END_TIME_MAX);
        } else {
            self.entries.remove(&(volume.to_owned(), name.to_owned()));
        }
        if was_wanted { self.store() } else { Ok(()) }
    }

    /// Kills a process. If it shall run, it is started again.
    pub fn kill(&self, volume: &str, name: &str) {
        if let Some(entry) = self.entries.get(&(volume.to_owned(), name.to_owned())) {
            entry.signal(Signal::KILL);
        }
    }

    fn store(&self) -> io::Result<()> {
        let wanted = self
            .entries
            .values()
            .filter_map(|each| each.wanted.as_ref());
        self.file.store(wanted)
    }

    /// Starts what is due, and kills what has not ended in time. Returns the events to report.
    pub fn attend(&mut self, now: Instant) -> Vec<Event> {
        let mut events = Vec::new();
        for ((volume, name), entry) in &mut self.entries {
            if entry.kill_at.is_some_and(|at| at <= now) {
                tracing::warn!(volume, name, "a process did not end in time and is killed");
                entry.signal(Signal::KILL);
                entry.kill_at = None;
            }
            if entry.due.is_none_or(|at| at > now) {
                continue;
            }
            entry.due = None;
            match entry.start(now) {
                Ok(()) => events.push(Event::Started {
                    volume: volume.clone(),
                    name: name.clone(),
                }),
                Err(error) => {
                    tracing::warn!(%error, volume, name, "a process cannot be started");
                    entry.try_later(now);
                    // At once again would be a loop.
                    entry.due = entry.due.max(Some(now + PAUSE_MIN));
                }
            }
        }
        events
    }

    /// When there is something to attend to.
    pub fn next_deadline(&self) -> Option<Instant> {
        let entries = self.entries.values();
        entries
            .filter_map(|each| each.due.into_iter().chain(each.kill_at).min())
            .min()
    }

    /// What tells of the end of a process, with the process.
    pub fn watched(&self) -> impl Iterator<Item = (&Key, BorrowedFd<'_>)> {
        self.entries.iter().filter_map(|(key, entry)| {
            let running = entry.running.as_ref()?;
            Some((key, running.pidfd.as_fd()))
        })
    }

    /// A process has ended.
    pub fn ended(&mut self, key: &Key, now: Instant) -> Option<Event> {
        let entry = self.entries.get_mut(key)?;
        let running = entry.running.take()?;
        if running.is_child {
            match reap(&running.pidfd) {
                Ok(status) => {
                    let how = status.as_ref().map(process::told).unwrap_or_default();
                    tracing::info!(volume = key.0, name = key.1, how, "a process has ended")
                }
                Err(error) => {
                    tracing::warn!(%error, "a process that has ended cannot be let go of")
                }
            }
        }
        if entry.wanted.is_some() {
            entry.try_later(now);
        } else {
            self.entries.remove(key);
        }
        let (volume, name) = key.clone();
        Some(Event::Ended { volume, name })
    }
}
