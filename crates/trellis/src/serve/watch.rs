//! One thread that sleeps until a target or a copy has news, and says which volume to look at.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// A volume, and the name of one of its processes.
pub type Source = (String, String);

/// Called with the volume when something has happened.
pub type Tell = Box<dyn Fn(&str) + Send + Sync>;

/// What is watched, and the thread that does.
pub struct Watch {
    shared: Arc<Shared>,
}

struct Shared {
    /// A byte for every change of a volume, the end when its target or copy is gone.
    watched: Mutex<BTreeMap<Source, UnixStream>>,
    /// Rung when there is something more to watch.
    bell: OwnedFd,
    tell: Tell,
}

/// Reads what was sent. Returns whether there may be more to come.
fn take(stream: &UnixStream) -> bool {
    let mut bytes = [0; 64];
    match recv(stream, &mut bytes, RecvFlags::DONTWAIT) {
        Ok((_, count)) => count > 0,
        Err(errno) => errno == Errno::AGAIN,
    }
}

impl Watch {
    /// Starts the thread.
    pub fn start(tell: Tell) -> std::io::Result<Watch> {
        let shared = Arc::new(Shared {
            watched: Mutex::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            tell,
        });
        let watching = shared.clone();
        std::thread::Builder::new()
            .name("trellis-targets".to_owned())
            .spawn(move || watching.run())?;
        Ok(Watch { shared })
    }

    /// Whether that process is watched.
    pub fn has(&self, source: &Source) -> bool {
        self.shared.watched().contains_key(source)
    }

    /// Watches what a process reports until it is gone.
    pub fn add(&self, source: Source, stream: UnixStream) -> std::io::Result<()> {
        self.shared.watched().insert(source, stream);
        rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes())?;
        Ok(())
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, BTreeMap<Source, UnixStream>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            for volume in self.round() {
                (self.tell)(&volume);
            }
        }
    }

    /// Sleeps until something happens, and returns to which volumes.
    fn round(&self) -> Vec<String> {
        // Duplicates, so that others can add while this sleeps.
        let sources: Vec<(Source, UnixStream)> = self
            .watched()
            .iter()
            .filter_map(|(source, stream)| Some((source.clone(), stream.try_clone().ok()?)))
            .collect();
        let mut fds: Vec<PollFd<'_>> = sources
            .iter()
            .map(|(_, fd)| PollFd::new(fd, PollFlags::IN))
            .collect();
        fds.push(PollFd::new(&self.bell, PollFlags::IN));
        if poll(&mut fds, None).is_err() {
            return Vec::new();
        }
        let happened: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.bell, &mut count);
        let mut told = Vec::new();
        let mut watched = self.watched();
        for ((source, _), happened) in sources.into_iter().zip(happened) {
            if !happened {
                continue;
            }
            if watched.get(&source).is_some_and(|stream| !take(stream)) {
                watched.remove(&source);
            }
            told.push(source.0);
        }
        told
    }
}
