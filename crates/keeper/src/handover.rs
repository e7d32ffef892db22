//! What a keeper hands over to the program that replaces it in the same process.
//!
//! ```text
//!   old program ── text in a memory file, as standard input ──► exec ──► new program
//!               ── descriptors, open at the same numbers ──────►
//! ```
//!
//! The text says what each number is. Everything that the keeper opens is closed by `exec`; only what is handed over
//! loses that mark, right before the call, and has it again if the call fails. `exec` keeps the process: its number,
//! its children, its locks and its open files. So nobody outside notices: there is no moment without the lock, no
//! connection ends, and a message that arrives meanwhile waits in its socket.
//!
//! Times are told as distances from the moment of the handover. The new program counts them from its own beginning, so
//! the time that the handover took is held against nobody.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use trellis_api::step::{Step, reached};

use crate::error::Error;
use crate::message::Wanted;

/// The version of the text. A program reads its own and those before it. A field that is added gets a default and
/// needs no other version; a change that an older program would misunderstand needs one.
pub const VERSION: u32 = 1;
/// The longest text: a hundred thousand processes would fit.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Microseconds from the moment of the handover; negative before it.
pub type Distance = i64;

/// All that a keeper has and knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Handover {
    pub version: u32,
    pub lock: RawFd,
    pub listener: RawFd,
    pub peers: Vec<PeerHanded>,
    pub peers_ever: u64,
    pub held: Vec<HeldHanded>,
    pub processes: Vec<ProcessHanded>,
    pub silence_ms_max: u64,
    /// The peer that waits for an answer to its wish for the replacement.
    pub asker: Option<u64>,
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeerHanded {
    pub number: u64,
    pub socket: RawFd,
    pub watches: bool,
    pub serves: Option<CallsHanded>,
}

/// A target that is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CallsHanded {
    pub volume: String,
    pub called: Option<Distance>,
    pub next: Distance,
    pub silent: bool,
}

/// What is held of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldHanded {
    pub volume: String,
    pub descriptors: Vec<RawFd>,
    pub note: String,
}

/// A process that is looked after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessHanded {
    pub volume: String,
    pub name: String,
    pub wanted: Option<Wanted>,
    /// It runs.
    pub pidfd: Option<RawFd>,
    /// It is a child, and must be let go of when it has ended.
    pub is_child: bool,
    pub started: Option<Distance>,
    pub pause_ms: u64,
    pub due: Option<Distance>,
    pub kill_at: Option<Distance>,
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Handover {
    /// Reads what was written. The text of a newer program is refused.
    pub fn read(from: impl Read) -> Result<Handover, Error> {
        let mut text = Vec::new();
        let read = from.take(TEXT_BYTES_MAX).read_to_end(&mut text);
        read.map_err(Error::TakeOver)?;
        let Versioned { version } = serde_json::from_slice(&text).map_err(Error::Unreadable)?;
        if version > VERSION {
            return Err(Error::Newer {
                found: version,
                known: VERSION,
            });
        }
        serde_json::from_slice(&text).map_err(Error::Unreadable)
    }

    /// As a file in memory that begins with the first byte.
    pub fn write(&self) -> io::Result<OwnedFd> {
        let memory = rustix::fs::memfd_create("trellis-keeper", MemfdFlags::CLOEXEC)?;
        let mut memory = File::from(memory);
        memory.write_all(&serde_json::to_vec(self)?)?;
        memory.rewind()?;
        Ok(memory.into())
    }
}

/// What a program says that can take over.
pub fn consent() -> String {
    format!("can read keeper state {VERSION}")
}

/// Descriptors that stay open.
#[derive(Default)]
pub struct Passed<'a> {
    pub all: Vec<BorrowedFd<'a>>,
}

impl<'a> Passed<'a> {
    /// Adds one, and answers its number.
    pub fn add(&mut self, descriptor: BorrowedFd<'a>) -> RawFd {
        self.all.push(descriptor);
        descriptor.as_raw_fd()
    }

    fn mark_all(&self, flags: FdFlags) -> io::Result<()> {
        let mut marked = self.all.iter().map(|each| fcntl_setfd(each, flags));
        Ok(marked.try_for_each(|each| each)?)
    }
}

/// The program that is open here, by the path under which the kernel finds it.
pub fn open_program(program: &File) -> Command {
    Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()))
}

/// Replaces the program of this process. Returns only if that fails, and then everything is as it was.
///
/// (But for one thing, which the standard library does before the call: a write to a closed pipe would now end the
/// process. The keeper writes to no pipe, and its sockets never raise that signal.)
pub fn replace(
    program: &File,
    arguments: &[OsString],
    handover: &Handover,
    passed: &Passed<'_>,
) -> io::Error {
    let call = || -> io::Result<io::Error> {
        rustix::stdio::dup2_stdin(handover.write()?)?;
        passed.mark_all(FdFlags::empty())?;
        reached(Step::KeeperHandsOver);
        let mut command = open_program(program);
        Ok(command.arg0("trellis").args(arguments).exec())
    };
    let error = call().unwrap_or_else(|error| error);
    let again = passed.mark_all(FdFlags::CLOEXEC).and(forget_input());
    if let Err(error) = again {
        tracing::warn!(%error, "what was to be handed over cannot be taken back");
    }
    error
}

/// Lets go of the text on standard input.
pub fn forget_input() -> io::Result<()> {
    Ok(rustix::stdio::dup2_stdin(File::open("/dev/null")?)?)
}

/// How far a moment is from now.
pub fn distance(at: Instant, now: Instant) -> Distance {
    let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    if at >= now {
        micros(at - now)
    } else {
        -micros(now - at)
    }
}

/// The moment that is so far from now. One that the clock cannot tell is now.
pub fn moment(distance: Distance, now: Instant) -> Instant {
    let length = Duration::from_micros(distance.unsigned_abs());
    let at = if distance >= 0 {
        now.checked_add(length)
    } else {
        now.checked_sub(length)
    };
    at.unwrap_or(now)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// What a keeper of the first version hands over. It must stay readable.
    const FIRST: &str = r#"{
        "version": 1, "lock": 3, "listener": 4, "peersEver": 9, "silenceMsMax": 15000, "asker": 7,
        "peers": [
            { "number": 7, "socket": 5, "watches": true, "serves": null },
            { "number": 8, "socket": 6, "watches": false,
              "serves": { "volume": "v", "called": -1500, "next": 20, "silent": false } }
        ],
        "held": [ { "volume": "v", "descriptors": [7, 8], "note": "{}" } ],
        "processes": [
            { "volume": "v", "name": "target", "pidfd": 9, "isChild": true, "started": -9000000,
              "wanted": { "volume": "v", "name": "target", "arguments": [ { "Unix": [104, 105] } ] },
              "pauseMs": 50, "due": null, "killAt": null }
        ]
    }"#;

    // Fails if an upgrade loses what a keeper of the first version hands over.
    #[test]
    fn the_first_version_can_be_read_for_ever() {
        let read = Handover::read(FIRST.as_bytes()).unwrap();
        assert_eq!((read.lock, read.listener, read.asker), (3, 4, Some(7)));
        assert_eq!(read.held[0].descriptors, [7, 8]);
        let wanted = read.processes[0].wanted.clone().unwrap();
        assert_eq!(wanted.arguments, ["hi"]);
        let again = File::from(read.write().unwrap());
        assert_eq!(Handover::read(again).unwrap(), read);
    }

    // Fails if a program takes over from a newer one whose text it would misunderstand, or half a text is taken for a
    // whole one.
    #[test]
    fn a_newer_version_is_refused() {
        let newer = FIRST.replace("\"version\": 1", "\"version\": 2");
        let refused = Handover::read(newer.as_bytes()).unwrap_err();
        assert!(
            matches!(refused, Error::Newer { found: 2, known: 1 }),
            "{refused}"
        );
        let half = &FIRST.as_bytes()[..FIRST.len() / 2];
        assert!(matches!(Handover::read(half), Err(Error::Unreadable(_))));
    }

    // Fails if a time before or after the handover is another one behind it.
    #[test]
    fn times_keep_their_distance() {
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(3));
        for away in [Duration::ZERO, Duration::from_millis(70)] {
            assert_eq!(moment(distance(now + away, now), later), later + away);
            assert_eq!(moment(distance(now - away, now), later), later - away);
        }
    }

    // Fails if a program that cannot be executed costs the keeper something: a descriptor that later programs get, or
    // its standard input.
    #[test]
    fn a_program_that_cannot_be_executed_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trellis");
        std::fs::write(&path, "not a program").unwrap();
        let (program, kept) = (File::open(&path).unwrap(), tempfile::tempfile().unwrap());
        let mut passed = Passed::default();
        passed.add(kept.as_fd());
        let handover = Handover::read(FIRST.as_bytes()).unwrap();
        let error = replace(&program, &[], &handover, &passed);
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        assert_eq!(rustix::io::fcntl_getfd(&kept), Ok(FdFlags::CLOEXEC));
        assert_eq!(rustix::io::fcntl_getfd(&program), Ok(FdFlags::CLOEXEC));
        let input = std::fs::read_link("/proc/self/fd/0").unwrap();
        assert_eq!(input, std::path::Path::new("/dev/null"));
    }
}
