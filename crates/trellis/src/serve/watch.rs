//! One thread that sleeps until a process ends or a target has something to tell, and says which volume to look at.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// What is told when something has happened: the volume, the name of what was watched, and whether it is over.
pub type Tell = Box<dyn Fn(&str, &str, bool) + Send + Sync>;

/// What is watched, and the thread that does.
pub struct Watch {
    shared: Arc<Shared>,
}

struct Shared {
    watched: Mutex<BTreeMap<(String, String), Source>>,
    /// Rung when there is something more to watch.
    bell: OwnedFd,
    tell: Tell,
}

enum Source {
    /// Readable when the process has ended.
    Process(OwnedFd),
    /// A byte for every change, the end when the target is gone.
    Changes(UnixStream),
}

impl Source {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Source::Process(pidfd) => pidfd.as_fd(),
            Source::Changes(stream) => stream.as_fd(),
        }
    }

    /// Takes what has been told. Answers whether there may be more to come.
    fn take(&self) -> bool {
        match self {
            Source::Process(_) => false,
            Source::Changes(stream) => {
                let mut bytes = [0; 64];
                let read = rustix::net::recv(stream, &mut bytes, rustix::net::RecvFlags::DONTWAIT);
                match read {
                    Ok((_, count)) => count > 0,
                    Err(errno) => errno == rustix::io::Errno::AGAIN,
                }
            }
        }
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
            .name("trellis-processes".to_owned())
            .spawn(move || watching.run())?;
        Ok(Watch { shared })
    }

    /// Whether that process of the volume is watched.
    pub fn has(&self, volume: &str, name: &str) -> bool {
        let key = (volume.to_owned(), name.to_owned());
        self.shared.watched().contains_key(&key)
    }

    /// Watches a process until it ends.
    pub fn process(&self, volume: &str, name: &str, pid: Pid) -> std::io::Result<()> {
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        self.add(volume, name, Source::Process(pidfd))
    }

    /// Watches what a target tells until it is gone.
    pub fn changes(&self, volume: &str, name: &str, stream: UnixStream) -> std::io::Result<()> {
        self.add(volume, name, Source::Changes(stream))
    }

    fn add(&self, volume: &str, name: &str, source: Source) -> std::io::Result<()> {
        let key = (volume.to_owned(), name.to_owned());
        self.shared.watched().insert(key, source);
        rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes())?;
        Ok(())
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, BTreeMap<(String, String), Source>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            for ((volume, name), ended) in self.round() {
                (self.tell)(&volume, &name, ended);
            }
        }
    }

    /// Sleeps until something happens, and answers to what, and whether it is over.
    fn round(&self) -> Vec<((String, String), bool)> {
        // Duplicates, so that others can add while this sleeps.
        let sources: Vec<((String, String), OwnedFd)> = self
            .watched()
            .iter()
            .filter_map(|(key, source)| {
                let fd = source.fd().try_clone_to_owned().ok()?;
                Some((key.clone(), fd))
            })
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
        for ((key, _), happened) in sources.into_iter().zip(happened) {
            if !happened {
                continue;
            }
            let ended = watched.get(&key).is_some_and(|source| !source.take());
            if ended {
                watched.remove(&key);
            }
            told.push((key, ended));
        }
        told
    }
}
