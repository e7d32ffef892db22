//! Messages to the keeper: one request, one answer, as JSON, with descriptors attached when a FUSE connection changes
//! hands. A client that subscribes gets events, one message each.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use trellis_node::sys::fdpass;

use crate::build::Build;

/// The longest message.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// What the keeper is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// To have a process run from now on, and to start it at once unless it runs.
    Run(Wanted),
    /// Not to start a process again when it ends.
    Forget {
        /// Its volume.
        volume: String,
        /// Its name.
        name: String,
    },
    /// To have a process run no longer: it is asked to end, and killed when it does not.
    End {
        /// Its volume.
        volume: String,
        /// Its name.
        name: String,
    },
    /// Hold the FUSE connection of a volume; its descriptors come with the message, and replace those held before.
    Deposit {
        /// The volume.
        volume: String,
        /// What a successor has to know besides the descriptors. The keeper does not look at it.
        note: String,
    },
    /// For duplicates of what is held of a volume.
    Take {
        /// The volume.
        volume: String,
    },
    /// To hold nothing of a volume any more.
    Release {
        /// The volume.
        volume: String,
    },
    /// To be told of events from now on.
    Watch {
        /// How long a target may be silent before it is killed, from now on.
        silence_ms_max: u64,
    },
    /// Which build it runs.
    Build,
    /// To become the program that comes with the message, with all that it holds. The answer comes when that is done,
    /// from the new program, or when it is clear that it cannot be.
    ///
    /// The program comes as an open file and not as a path. A path says little: when a package was upgraded, the one
    /// of the keeper's own program leads to another file or to none (`/proc/self/exe` ends in ` (deleted)`), and the
    /// service may be in another mount namespace. Whoever asks has the file at hand, because it runs it. What was tried
    /// is then also what is executed. And the keeper does not follow a path that might lead through a volume.
    Replace {
        /// Where the program was found, for people.
        program: PathBuf,
    },
    /// Nothing: a target answers that it was called. This has no answer itself.
    Here,
}

/// What the keeper answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// It is done.
    Done,
    /// What is held comes with this message.
    Held {
        /// What was said at the deposit.
        note: String,
    },
    /// Nothing is held.
    Nothing,
    /// The build that it runs.
    Runs {
        /// The build.
        build: Build,
        /// Why it was not replaced when it was last asked to be.
        not_replaced: Option<String>,
    },
    /// It cannot be done.
    Refused {
        /// Why.
        message: String,
    },
}

/// What the keeper tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    /// A process has been started.
    Started {
        /// Its volume.
        volume: String,
        /// Its name.
        name: String,
    },
    /// Only to a target: it is to say that it is there.
    Call,
    /// The target of a volume does not answer when it is called.
    Silent {
        /// The volume.
        volume: String,
    },
    /// A target that was silent has answered.
    Heard {
        /// The volume.
        volume: String,
    },
    /// A process has ended.
    Ended {
        /// Its volume.
        volume: String,
        /// Its name.
        name: String,
    },
}

/// A process that shall run: this program, with these arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Wanted {
    /// The volume that it is of.
    pub volume: String,
    /// Its name among the processes of the volume.
    pub name: String,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// Sends a message.
pub fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    Ok(fdpass::send(socket, &bytes, descriptors)?)
}

/// Receives a message; none when the other side has gone.
pub fn receive<T: for<'de> Deserialize<'de>>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let received = fdpass::receive(socket, MESSAGE_BYTES_MAX)?;
    if received.message.is_empty() {
        return Ok(None);
    }
    let message = serde_json::from_slice(&received.message)?;
    Ok(Some((message, received.descriptors)))
}
