//! What agent and target say to each other on the target's control socket: one request, one answer, as JSON, with
//! descriptors beside it where the FUSE connection changes hands.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trellis_api::kinds::{Members, ReplicaSeen};
use trellis_api::{Bytes, HoldReason};
use trellis_node::fuse::Negotiated;
use trellis_node::sys::fdpass;

/// The longest message. A status has some hundred bytes for each of at most a handful of copies.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// What a target is started with, and told when it changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings {
    /// The volume's name.
    pub volume: String,
    /// The volume's identity.
    pub volume_id: String,
    /// The copies that shall count.
    pub members: Members,
    /// Where copies can be reached.
    pub addresses: BTreeMap<String, String>,
    /// The iSCSI name.
    pub iqn: String,
}

/// What the agent asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// How it is.
    Status,
    /// To have these copies.
    Configure(Settings),
    /// To grow, and to answer when that is done or held.
    Grow {
        /// The size.
        to: Bytes,
    },
    /// For a duplicate of the FUSE connection.
    Keep,
    /// To go on with a FUSE connection, which comes with the message.
    Resume(Negotiated),
    /// To show the file anew: nothing is left of a predecessor's.
    Anew,
    /// To say a byte whenever the status has changed, from now on.
    Watch,
    /// To take the file away and to end.
    Stop,
}

/// What the target answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// How it is.
    Status(Box<TargetStatus>),
    /// It is done.
    Done,
    /// The FUSE connection comes with this message.
    Kept(Negotiated),
    /// There is no FUSE connection yet.
    NoFile,
    /// It cannot be, for this reason.
    Held {
        /// The code.
        reason: HoldReason,
        /// The case.
        message: String,
    },
}

/// How a target is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetStatus {
    /// The size that is served; none before it is known.
    pub served: Option<Bytes>,
    /// The size that as many copies have as must have a write.
    pub copies: Bytes,
    /// I/O is served.
    pub available: bool,
    /// Every copy holds everything.
    pub redundancy_met: bool,
    /// Every copy has the volume's size.
    pub size_converged: bool,
    /// Who counts.
    pub members: Members,
    /// How each copy is.
    pub replicas: Vec<ReplicaSeen>,
    /// Why a growth does not go on.
    pub growth_held: Option<HoldReason>,
    /// Where it is served by iSCSI.
    pub portal: Option<String>,
    /// The FUSE file is there.
    pub file: bool,
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

/// Asks the target at that socket, and waits no longer than `limit` for its answer.
pub fn ask(
    socket: &Path,
    request: &Request,
    descriptors: &[BorrowedFd<'_>],
    limit: Duration,
) -> io::Result<(Answer, Vec<OwnedFd>)> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    send(&stream, request, descriptors)?;
    receive(&stream)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
