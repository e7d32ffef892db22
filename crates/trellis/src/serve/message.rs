//! What agent and target say to each other on the target's control socket: one request, one answer, as JSON.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trellis_api::kinds::{Members, Recovery, ReplicaSeen, ScrubSeen, WhenFull};
use trellis_api::{Bytes, HoldReason};
use trellis_control::agent::machine::{CopiesWanted, ScrubWish};
use trellis_keeper::message::{receive, send};

/// What a target is started with, and told when it changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings {
    /// The volume's name.
    pub volume: String,
    /// The volume's identity.
    pub volume_id: String,
    /// The copies that count, as far as it is known: to begin with.
    pub members: Members,
    /// The copies that are asked for.
    #[serde(default)]
    pub wanted: CopiesWanted,
    /// With which copies it goes on after others were lost for good.
    #[serde(default)]
    pub recovery: Option<Recovery>,
    /// It has been served so.
    #[serde(default)]
    pub is_recovered: bool,
    /// After which time a request without a quorum fails; none if it waits without a limit.
    #[serde(default)]
    pub fails_after: Option<Duration>,
    /// After which time a request without a quorum is asked anew, if that is said.
    #[serde(default)]
    pub asks_every: Option<Duration>,
    /// What becomes of a write for which too many pools have no space.
    #[serde(default)]
    pub when_full: WhenFull,
    /// Where copies can be reached.
    pub addresses: BTreeMap<String, String>,
    /// The iSCSI name.
    pub iqn: String,
    /// When the copies are compared with the sums of their blocks.
    #[serde(default)]
    pub scrub: ScrubWish,
}

/// What the agent asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// How it is.
    Status,
    /// To have these copies.
    Configure(Box<Settings>),
    /// To grow, and to answer when that is done or held.
    Grow {
        /// The size.
        to: Bytes,
    },
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
    /// As many copies as are asked for hold everything.
    pub redundancy_met: bool,
    /// Every copy has the volume's size.
    pub size_converged: bool,
    /// Who counts; while that changes, those of both sides.
    pub members: Members,
    /// Which history it serves; none while it serves nothing.
    #[serde(default)]
    pub lineage: Option<String>,
    /// How each copy is.
    pub replicas: Vec<ReplicaSeen>,
    /// Why a growth does not go on.
    pub growth_held: Option<HoldReason>,
    /// Where it is served by iSCSI.
    pub portal: Option<String>,
    /// The FUSE file is there.
    pub file: bool,
    /// What comparing the copies with their sums has found.
    #[serde(default)]
    pub scrub: Option<ScrubSeen>,
}

/// Asks the target at that socket, and waits no longer than `limit` for its answer.
pub fn ask(socket: &Path, request: &Request, limit: Duration) -> io::Result<Answer> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    send(&stream, request, &[])?;
    let answer = receive(&stream)?.map(|(answer, _)| answer);
    answer.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
