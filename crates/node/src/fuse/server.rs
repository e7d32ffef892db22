//! A mounted volume and the threads that serve it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::buffer::RequestBuffer;
use super::connection::Connection;
use super::dismantle;
use super::journal::Journal;
use super::{Backing, Kept, Negotiated, Options, REQUEST_BYTES_MAX, VOLUME_NAME};
use crate::error::{Context, Error, PathProblem, Result};
use crate::sys::fuse as device;
use crate::sys::resident::MemoryFile;

/// How long the kernel may take for its first request, which it makes during the mount.
const FIRST_REQUEST_TIME_MAX: Duration = Duration::from_secs(10);
/// The pause between two looks whether everything is answered.
const IDLE_PAUSE: Duration = Duration::from_millis(1);
/// The pause before memory is asked for again that was not there.
const MEMORY_PAUSE: Duration = Duration::from_millis(100);

/// After this time without a request, the memory that many of them needed is given back.
const QUIET_TIME: Duration = Duration::from_secs(1);

/// A volume that is mounted as a file, and served. Dropping it unmounts it, if nobody uses it. To leave the mount to a
/// successor, call [`Server::leave`].
pub struct Server {
    connection: Arc<Connection>,
    negotiated: Negotiated,
    mount_point: PathBuf,
    stop: Arc<Stop>,
    readers: Vec<JoinHandle<()>>,
    /// The thread that asks again what was not ready.
    again: Option<JoinHandle<()>>,
    /// Whether the mount is gone, or to stay when this is dropped.
    settled: bool,
}

/// What ends the readers, also the ones that wait for the kernel.
struct Stop {
    asked: AtomicBool,
    bell: OwnedFd,
}

impl Server {
    /// Mounts the volume at `mount_point`, an empty directory, and serves it. The file is
    /// [`Server::file`].
    pub fn mount(
        mount_point: &Path,
        backing: Arc<dyn Backing>,
        options: Options,
    ) -> Result<Server> {
        let mount_point = empty_directory(mount_point)?;
        let fuse = device::open().context("open", device::DEVICE)?;
        device::mount(fuse.as_fd(), &mount_point, REQUEST_BYTES_MAX)
            .context("mount a volume at", &mount_point)?;
        let journal = Journal::new().context("note the requests of", &mount_point)?;
        let connection = Connection::new(fuse, journal, backing, options.patience);
        let connection = Arc::new(connection);
        let negotiated = match connection.first_request(FIRST_REQUEST_TIME_MAX) {
            Ok(negotiated) => negotiated,
            Err(errno) => {
                let _ = device::unmount(&mount_point);
                return match errno {
                    Errno::PROTO => Err(Error::FuseTooOld { mount_point }),
                    errno => Err(errno).context("begin to serve", &mount_point),
                };
            }
        };
        Server::start(connection, negotiated, mount_point, options)
    }

    /// Serves a mount whose server is gone, through duplicates of its [`Server::fd`] and its [`Server::requests`].
    /// Requests that the other had taken and not answered are served first. The other must have ended, or left; two
    /// servers on one mount would each get a part of the requests. A mount that is gone cannot be served any more.
    pub fn resume(
        kept: Kept,
        mount_point: &Path,
        backing: Arc<dyn Backing>,
        options: Options,
    ) -> Result<Server> {
        device::check(kept.fuse.as_fd()).context("go on with", mount_point)?;
        if !device::is_connected(kept.fuse.as_fd()).context("go on with", mount_point)? {
            return Err(Errno::NOTCONN).context("go on with", mount_point);
        }
        let requests = MemoryFile::of(kept.requests);
        let (journal, left) = Journal::resume(requests).context("go on with", mount_point)?;
        let connection = Connection::new(kept.fuse, journal, backing, options.patience);
        let connection = Arc::new(connection);
        connection.catch_up(left);
        let place = mount_point.to_owned();
        let server = Server::start(connection, kept.negotiated, place, options)?;
        // The volume may have grown while nobody could tell.
        server.grown()?;
        Ok(server)
    }

    fn start(
        connection: Arc<Connection>,
        negotiated: Negotiated,
        mount_point: PathBuf,
        options: Options,
    ) -> Result<Server> {
        let stop = Arc::new(Stop {
            asked: AtomicBool::new(false),
            bell: device::bell().context("make a bell for", &mount_point)?,
        });
        let mut server = Server {
            connection,
            negotiated,
            mount_point,
            stop,
            readers: Vec::new(),
            again: None,
            settled: false,
        };
        for _ in 0..options.readers.max(1) {
            let (connection, stop) = (Arc::clone(&server.connection), Arc::clone(&server.stop));
            let reader = server.spawn("fuse-reader", move || serve(&connection, &stop))?;
            server.readers.push(reader);
        }
        let connection = Arc::clone(&server.connection);
        server.again = Some(server.spawn("fuse-again", move || {
            while let Some(pending) = connection.waiting.next() {
                pending.ask();
            }
        })?);
        Ok(server)
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
        let builder = thread::Builder::new().name(name.to_owned());
        let thread = builder.spawn(work);
        thread.context("start a thread for", &self.mount_point)
    }

    /// The volume's file.
    pub fn file(&self) -> PathBuf {
        self.mount_point.join(VOLUME_NAME)
    }

    /// The connection. A process that has a duplicate of it keeps the mount alive, and needs to do nothing
    /// else with it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.connection.device.as_fd()
    }

    /// The memory of the requests that were taken, to be kept with [`Server::fd`].
    pub fn requests(&self) -> BorrowedFd<'_> {
        self.connection.journal.file().as_fd()
    }

    /// What a successor has to be told besides [`Server::fd`].
    pub fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// Whether the mount is gone: unmounted by somebody else, or ended by force. Nothing will be asked any
    /// more.
    pub fn ended(&self) -> bool {
        self.connection.ended()
    }

    /// Tells the kernel that the volume has grown. When this has returned, everybody sees the size that
    /// [`Backing::size`] returns. Call it at any time, from any thread except one that is answering.
    pub fn grown(&self) -> Result<()> {
        match self.connection.tell_size() {
            // Nobody is left who could want to know.
            Err(Errno::NODEV | Errno::NOTCONN) => Ok(()),
            other => other.context("tell the new size of", self.file()),
        }
    }

    /// Unmounts it. If somebody uses it, this is [`Error::Busy`], and it is served as before.
    pub fn unmount(&mut self) -> Result<()> {
        if !self.settled && !self.ended() {
            dismantle::unmount(&self.mount_point)?;
        }
        self.settled = true;
        Ok(())
    }

    /// Stops serving and leaves the mount to a successor: takes no more requests, and waits until those taken are
    /// answered. Requests that are not answered in time (the volume is not ready) are given up; the successor will
    /// serve them. Returns whether there were none. Without this wait, a write in flight could undo what the successor
    /// is asked to write.
    pub fn leave(mut self, limit: Duration) -> bool {
        self.settled = true;
        self.stop_readers();
        let deadline = Instant::now() + limit;
        while !self.connection.idle() && Instant::now() < deadline {
            thread::sleep(IDLE_PAUSE);
        }
        self.connection.idle()
    }

    fn stop_readers(&mut self) {
        self.stop.asked.store(true, Ordering::Release);
        device::ring(&self.stop.bell);
        for reader in self.readers.drain(..) {
            // One that died has said so; the others are through with their last request.
            let _ = reader.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            tracing::warn!(%error, "a volume stays mounted without its server");
        }
        self.stop_readers();
        self.connection.waiting.close();
        if let Some(again) = self.again.take() {
            let _ = again.join();
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Server")
            .field("mount_point", &self.mount_point)
            .field("negotiated", &self.negotiated)
            .finish_non_exhaustive()
    }
}

/// Takes requests until it is told to stop, or until there are no more.
fn serve(connection: &Arc<Connection>, stop: &Stop) {
    device::flush_io();
    let waiter = match device::Waiter::new(&connection.device, &stop.bell) {
        Ok(waiter) => waiter,
        Err(errno) => return tracing::error!(%errno, "a reader cannot wait for requests"),
    };
    let mut buffer = loop {
        match RequestBuffer::new(&connection.journal) {
            Ok(buffer) => break buffer,
            Err(_) if stop.asked.load(Ordering::Acquire) => return,
            Err(errno) => wait_for_memory(errno),
        }
    };
    while !connection.caught_up() {
        if stop.asked.load(Ordering::Acquire) {
            return;
        }
        thread::sleep(IDLE_PAUSE);
    }
    while !stop.asked.load(Ordering::Acquire) {
        match buffer.read(&connection.device) {
            Ok(()) => connection.handle(&mut buffer),
            Err(Errno::AGAIN) => {
                let limit = connection.journal.keeps_rooms().then_some(QUIET_TIME);
                match waiter.wait(limit) {
                    Ok(true) => {}
                    Ok(false) => connection.journal.give_back(),
                    Err(errno) => {
                        return tracing::error!(%errno, "a reader cannot wait for requests");
                    }
                }
            }
            // The request was taken back while it was being read.
            Err(Errno::INTR | Errno::NOENT) => {}
            Err(Errno::NODEV) => return connection.set_ended(),
            Err(errno @ Errno::NOMEM) => wait_for_memory(errno),
            Err(errno) => return tracing::error!(%errno, "a reader cannot read requests"),
        }
    }
}

/// Requests would wait for ever if a reader gave up.
fn wait_for_memory(errno: Errno) {
    tracing::warn!(%errno, "a reader waits for memory");
    thread::sleep(MEMORY_PAUSE);
}

/// The directory at `path`, by its real path: what is mounted over it can hide nothing.
fn empty_directory(path: &Path) -> Result<PathBuf> {
    let unusable = |reason| Error::UnusablePath {
        path: path.to_owned(),
        reason,
    };
    let real = path.canonicalize().context("look at", path)?;
    let mut entries = match std::fs::read_dir(&real) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(unusable(PathProblem::NotADirectory));
        }
        other => other.context("list", path)?,
    };
    match entries.next() {
        None => Ok(real),
        Some(_) => Err(unusable(PathProblem::NotEmpty)),
    }
}
