//! The one error type of the crate: what happened, to what, and what to do about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use trellis_api::Bytes;

use crate::agent::script::GuestUse;
use crate::driver::policy::NotNow;
use crate::graph::{Bus, DiskId};

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something about a virtual machine could not be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, socket or directory could not be used.
    #[error("could not {action} {path}", path = .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A program that runs for a moment failed.
    #[error("the probe of the accelerator could not be run")]
    Probe {
        /// Why.
        source: trellis_node::Error,
    },

    /// What listens there says nothing. QEMU greets at once, but serves one client at a time.
    #[error(
        "the monitor at {path} did not greet within {limit:?}; another client may be connected to it",
        path = .path.display()
    )]
    NoGreeting {
        /// The monitor's socket.
        path: PathBuf,
        /// How long it was waited for.
        limit: Duration,
    },
    /// What listens there is not QEMU.
    #[error("what listens at {path} does not speak QMP", path = .path.display())]
    NotQmp {
        /// The socket.
        path: PathBuf,
    },
    /// The connection to QEMU ended before a command was answered. Whether QEMU has carried it out is not known; ask it
    /// again on a new connection.
    #[error("no answer to {command}: {fault}")]
    Connection {
        /// The command.
        command: &'static str,
        /// How the connection ended.
        fault: ConnectionEnd,
    },
    /// QEMU did not answer in time.
    #[error("QEMU did not answer {command} within {limit:?}")]
    Deadline {
        /// The command.
        command: &'static str,
        /// The time that it had.
        limit: Duration,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {description} ({class})")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's class of the error.
        class: String,
        /// QEMU's sentence.
        description: String,
    },
    /// QEMU's answer lacks what it should have.
    #[error("QEMU's answer to {command} has no {what}")]
    Answer {
        /// The command.
        command: &'static str,
        /// What is missing.
        what: &'static str,
    },

    /// A machine cannot be built so.
    #[error("{field} {rule}")]
    Spec {
        /// Which part of the machine.
        field: &'static str,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// A disk's identity is not usable.
    #[error("{id:?} cannot name a disk: 1 to 253 printable ASCII characters without spaces can")]
    BadDiskId {
        /// The identity.
        id: String,
    },
    /// What was handed over as a disk is neither a block device nor a regular file.
    #[error("the descriptor for disk {id} is neither a block device nor a regular file")]
    NotADisk {
        /// The disk.
        id: DiskId,
    },
    /// The machine has no such disk.
    #[error("the machine has no disk {id}")]
    NotPlugged {
        /// The disk.
        id: DiskId,
    },
    /// No further disk fits on the bus.
    #[error(
        "no further disk fits on the {bus} bus of this machine: all {limit} places are taken; \
         unplug one, or use the other bus"
    )]
    BusFull {
        /// The bus.
        bus: Bus,
        /// How many disks it holds.
        limit: usize,
    },
    /// The device uses a node that was put there by somebody else.
    #[error(
        "disk {id} uses the node {node}, which Trellis did not make; it is not resized while that is so"
    )]
    ForeignGraph {
        /// The disk.
        id: DiskId,
        /// The node that the device uses.
        node: String,
    },
    /// Disks are counted in sectors.
    #[error("{size} is not a whole number of sectors of 512 bytes")]
    Unaligned {
        /// The size.
        size: Bytes,
    },
    /// A growth of a raw file needs the file, because only the file knows its size.
    #[error("disk {id} is a raw file; its growth needs the open file, to measure it first")]
    FileNeeded {
        /// The disk.
        id: DiskId,
    },
    /// The file that was handed over for a growth is shorter than the disk.
    #[error(
        "the file handed over for disk {id} has {file}, less than the disk's {disk}: it is another file"
    )]
    FileShorter {
        /// The disk.
        id: DiskId,
        /// The file's size.
        file: Bytes,
        /// The disk's size.
        disk: Bytes,
    },
    /// Something in QEMU holds the disk for the moment.
    #[error("disk {id} cannot grow while {by} uses it; retry when that has ended")]
    Busy {
        /// The disk.
        id: DiskId,
        /// What holds it.
        by: Blocker,
    },
    /// The disk is smaller than wanted after a growth that QEMU accepted.
    #[error("disk {id} has {size} of {want}: what is below it has not grown yet")]
    NotGrown {
        /// The disk.
        id: DiskId,
        /// What was measured.
        size: Bytes,
        /// What was wanted.
        want: Bytes,
    },
    /// The guest has not given the disk back in time. The disk stays until it does.
    #[error(
        "the guest has not released disk {id} within {limit:?}; the disk stays plugged. \
         Retry, or restart the guest"
    )]
    UnplugTimedOut {
        /// The disk.
        id: DiskId,
        /// The time that it had.
        limit: Duration,
    },
    /// The guest refused to give the disk back.
    #[error(
        "the guest refused to release disk {id}; the disk stays plugged. Stop using it in the guest, and retry"
    )]
    UnplugRefused {
        /// The disk.
        id: DiskId,
    },
    /// The guest still uses the disk.
    #[error("disk {id} is in use in the guest: {}", Uses(.uses))]
    GuestUses {
        /// The disk.
        id: DiskId,
        /// By what.
        uses: Vec<GuestUse>,
    },
    /// The same disk is already being unplugged by another request.
    #[error("disk {id} is already being unplugged")]
    UnplugUnderWay {
        /// The disk.
        id: DiskId,
    },

    /// The guest agent does not answer.
    #[error(
        "the guest agent did not answer {command} within {limit:?}; is it installed and running in the guest?"
    )]
    AgentSilent {
        /// The command.
        command: &'static str,
        /// The time that it had.
        limit: Duration,
    },
    /// The guest sends more than any answer can be.
    #[error("the guest sent more than {limit} bytes where the answer to {command} should be")]
    AgentFlood {
        /// The command.
        command: &'static str,
        /// The bound.
        limit: usize,
    },
    /// The agent's channel has ended.
    #[error("the guest agent's channel closed before {command} was answered")]
    AgentClosed {
        /// The command.
        command: &'static str,
    },
    /// The agent refused a command.
    #[error("the guest agent refused {command}: {description}")]
    AgentRefused {
        /// The command.
        command: &'static str,
        /// Its sentence.
        description: String,
    },
    /// The agent's answer lacks what it should have.
    #[error("the guest agent's answer to {command} has no {what}")]
    AgentAnswer {
        /// The command.
        command: &'static str,
        /// What is missing.
        what: &'static str,
    },
    /// A program in the guest did not end in time.
    #[error("{program} did not end in the guest within {limit:?}")]
    GuestProgramTimedOut {
        /// The program.
        program: String,
        /// The time that it had.
        limit: Duration,
    },
    /// Our script in the guest failed in a way that it has no word for.
    #[error("the script for {purpose} failed in the guest with {status}: {said}")]
    GuestScript {
        /// What it was for.
        purpose: &'static str,
        /// Its exit status, or the signal's number below zero.
        status: i64,
        /// The end of what it said.
        said: String,
    },

    /// The machine's state does not allow the request.
    #[error(transparent)]
    NotNow(#[from] NotNow),
    /// The machine's driver has ended.
    #[error("the driver of this machine has ended")]
    DriverGone,
}

struct Uses<'a>(&'a [GuestUse]);

impl fmt::Display for Uses<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self.0.iter().map(GuestUse::to_string).collect();
        out.write_str(&words.join(", "))
    }
}

/// How a connection to QEMU ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The other side closed it: QEMU has ended.
    Closed,
    /// A line was longer than any answer can be.
    LineTooLong,
    /// A line was not JSON.
    Garbage,
    /// The system refused to read or write.
    Socket(io::ErrorKind),
}

impl fmt::Display for ConnectionEnd {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionEnd::Closed => out.write_str("QEMU closed the connection"),
            ConnectionEnd::LineTooLong => {
                out.write_str("the other side sent a line that is longer than any answer")
            }
            ConnectionEnd::Garbage => {
                out.write_str("the other side sent something that is not JSON")
            }
            ConnectionEnd::Socket(kind) => write!(out, "the connection failed ({kind})"),
        }
    }
}

/// What keeps a disk from being resized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocker {
    /// A block job, such as a mirror or a backup.
    Job(String),
    /// An export of the disk to somebody else.
    Export(String),
}

impl fmt::Display for Blocker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Blocker::Job(id) => write!(out, "the block job {id}"),
            Blocker::Export(id) => write!(out, "the export {id}"),
        }
    }
}

/// Adds what was tried to a system's answer.
pub(crate) trait Context<T> {
    /// The error with its context.
    fn context(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Io {
            action,
            path: path.to_owned(),
            source: source.into(),
        })
    }
}
