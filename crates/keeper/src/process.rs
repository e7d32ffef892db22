//! A process that outlives its parent: found by a lock, started with a log, ended by its pid.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, pidfd_open, pidfd_send_signal,
    waitid,
};

use crate::paths::ProcessPaths;

/// A log longer than this is started over at the next start.
const LOG_BYTES_MAX: u64 = 1 << 20;
/// How much of its end is told when a process does not start.
const LOG_TAIL_BYTES: u64 = 600;
/// How often it is looked whether a process has come up or gone.
pub const LOOK_EVERY: Duration = Duration::from_millis(5);
/// For how long a look at a lock may seem to be a process that holds it.
const LOOK_TIME_MAX: Duration = Duration::from_millis(100);
/// How long a process may take to go that was killed. One that waits in the kernel goes when it gets through.
const KILL_TIME_MAX: Duration = Duration::from_secs(10);

/// The lock that a process holds as long as it lives, whatever program it runs.
pub struct Life {
    lock: File,
}

impl Life {
    /// Takes the lock for this process; none if another one has it.
    pub fn begin(path: &Path) -> std::io::Result<Option<Life>> {
        let mut lock = open_lock(path)?;
        let deadline = Instant::now() + LOOK_TIME_MAX;
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                // Or somebody is just looking whether there is one.
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        }
        lock.set_len(0)?;
        lock.write_all(std::process::id().to_string().as_bytes())?;
        Ok(Some(Life { lock }))
    }

    /// The lock that the program before this one has taken for this process.
    pub fn go_on(lock: OwnedFd) -> std::io::Result<Life> {
        // Nothing to do if it is held, as it should be. If it is not, it is now, or another process has it.
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Life { lock: lock.into() })
    }
}

impl AsFd for Life {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }
}

fn open_lock(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600);
    options.open(path)
}

/// The pid of the process that holds the lock, if one does.
pub fn living(path: &Path) -> std::io::Result<Option<Pid>> {
    let mut lock = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(lock) => lock,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared) {
        // It is given back when the file is closed.
        Ok(()) => Ok(None),
        Err(Errno::WOULDBLOCK) => {
            let mut text = String::new();
            lock.rewind()?;
            lock.read_to_string(&mut text)?;
            let pid = text.trim().parse().ok().and_then(Pid::from_raw);
            // Between the lock and the number there is a moment.
            pid.map(Some)
                .ok_or_else(|| std::io::ErrorKind::WouldBlock.into())
        }
        Err(errno) => Err(errno.into()),
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// There was none.
    NotThere,
    /// It ended when it was asked to.
    Asked,
    /// It did not, and was killed.
    Killed,
}

/// Ends the process that holds the lock, and waits until it is gone. It has `grace` to end by itself.
pub fn end(lock: &Path, grace: Duration) -> std::io::Result<Ending> {
    let Some(pidfd) = held_by(lock)? else {
        return Ok(Ending::NotThere);
    };
    // It may just have ended, which is what is wanted.
    let _ = pidfd_send_signal(&pidfd, Signal::TERM);
    if has_ended(&pidfd, grace)? {
        return Ok(Ending::Asked);
    }
    let _ = pidfd_send_signal(&pidfd, Signal::KILL);
    if has_ended(&pidfd, KILL_TIME_MAX)? {
        Ok(Ending::Killed)
    } else {
        Err(std::io::ErrorKind::TimedOut.into())
    }
}

/// The process that holds the lock, so that no other one can be meant.
fn held_by(lock: &Path) -> std::io::Result<Option<OwnedFd>> {
    let deadline = Instant::now() + LOOK_TIME_MAX;
    let pid = loop {
        match living(lock) {
            // It has not written its number yet.
            Err(error)
                if error.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < deadline => {}
            other => break other?,
        }
        std::thread::sleep(LOOK_EVERY);
    };
    let Some(pid) = pid else {
        return Ok(None);
    };
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(None),
        other => other?,
    };
    // Otherwise it has ended between the two looks, and its number may be another's.
    Ok((living(lock)? == Some(pid)).then_some(pidfd))
}

/// Waits until the process has ended. Answers whether it has, within `limit`.
pub fn has_ended(pidfd: impl AsFd, limit: Duration) -> std::io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
        match poll(&mut polled, left.as_ref()) {
            Ok(ended) => return Ok(ended > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Lets go of a child that has ended, and says how it did. It is known by its descriptor alone, so that a program that
/// was not the one to start it can do this.
pub fn reap(pidfd: impl AsFd) -> std::io::Result<Option<WaitIdStatus>> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    Ok(waitid(WaitId::PidFd(pidfd.as_fd()), options)?)
}

/// How a child ended, in words.
pub fn told(status: &WaitIdStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "nobody knows how".to_owned(),
    }
}

/// This program under a hidden verb, with a log and away from the terminal.
pub fn command(paths: &ProcessPaths, arguments: &[impl AsRef<OsStr>]) -> std::io::Result<Command> {
    let too_long = |log: &Path| std::fs::metadata(log).is_ok_and(|log| log.len() > LOG_BYTES_MAX);
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    if too_long(&paths.log) {
        std::fs::remove_file(&paths.log)?;
    }
    let log = options.open(&paths.log)?;
    log.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("trellis")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    Ok(command)
}

/// Starts this program again with a hidden verb, detached from this process and its terminal.
pub fn start(paths: &ProcessPaths, arguments: &[impl AsRef<OsStr>]) -> std::io::Result<Child> {
    command(paths, arguments)?.process_group(0).spawn()
}

/// Waits until `ready` returns true. Returns false if the process ended first or the time is over.
pub fn comes_up(child: &mut Child, limit: Duration, ready: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if ready() {
            return true;
        }
        if !matches!(child.try_wait(), Ok(None)) || Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The end of a process's log, in one line.
pub fn last_words(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(std::io::SeekFrom::Start(
            length.saturating_sub(LOG_TAIL_BYTES),
        ))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.unwrap_or("it said nothing").trim().to_owned()
}
