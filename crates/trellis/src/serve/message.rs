//! What agent and target say to each other on the target's control socket: one request, one answer, as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use trellis_api::kinds::{
    CopiesWanted, IscsiAccess, Members, Recovery, ReplicaSeen, ScrubSeen, WhenFull,
};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::node::machine::ScrubWish;
use trellis_keeper::message::{receive, send};

/// What a target starts with, and is told when it changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings {
    /// The volume's name.
    pub volume: String,
    /// The volume's identity.
    pub volume_id: String,
    /// The copies that count, as far as is known, to start with.
    pub members: Members,
    /// The copies that are asked for.
    #[serde(default)]
    pub wanted: CopiesWanted,
    /// How often it was decided anew where the volume is served.
    #[serde(default)]
    pub term: u32,
    /// The copies that it goes on with after others were lost for good.
    #[serde(default)]
    pub recovery: Option<Recovery>,
    /// The recovered volume has been served.
    #[serde(default)]
    pub is_recovered: bool,
    /// How long a request without a quorum waits before it fails; none for no limit.
    #[serde(default)]
    pub fails_after: Option<Duration>,
    /// How long a request without a quorum waits before it is asked again, if set.
    #[serde(default)]
    pub asks_every: Option<Duration>,
    /// What happens to a write if too many pools have no space for it.
    #[serde(default)]
    pub when_full: WhenFull,
    /// Where copies can be reached.
    pub addresses: BTreeMap<String, String>,
    /// The iSCSI name.
    pub iqn: String,
    /// When the copies are compared with their checksums.
    #[serde(default)]
    pub scrub: ScrubWish,
    /// How initiators may use the volume.
    #[serde(default)]
    pub iscsi: IscsiAccess,
    /// Where they find it.
    #[serde(default = "loopback")]
    pub portal: IpAddr,
    /// What the target proves itself with to copies on other nodes.
    #[serde(default)]
    pub proof: Option<Proof>,
}

fn loopback() -> IpAddr {
    IpAddr::V4(Ipv4Addr::LOCALHOST)
}

/// Who a process is among nodes, and how it proves it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Proof {
    /// Its node.
    pub node: String,
    /// The directory with the node's credentials.
    pub credentials: PathBuf,
}

/// What the agent asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// Its status.
    Status,
    /// To use these copies.
    Configure(Box<Settings>),
    /// To grow, and to answer when that is done or held.
    Grow {
        /// The size.
        to: Bytes,
    },
    /// To send a byte whenever the status changes, from now on.
    Watch,
    /// To take the file away and to end.
    Stop,
}

/// What the target answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// Its status.
    Status(Box<TargetStatus>),
    /// It is done.
    Done,
    /// It cannot be done, for this reason.
    Held {
        /// The code.
        reason: HoldReason,
        /// The case.
        message: String,
    },
}

/// What a copy is told about other nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopySettings {
    /// Where it listens for other nodes; none if it does not.
    pub link: Option<LinkSettings>,
    /// The nodes that may serve the volume.
    pub allowed: BTreeSet<String>,
}

/// Where a copy listens for other nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkSettings {
    /// This node.
    pub node: String,
    /// Its address.
    pub ip: IpAddr,
    /// The directory with its credentials.
    pub credentials: PathBuf,
}

/// What the agent asks a copy.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CopyRequest {
    /// To link like this from now on.
    Configure(CopySettings),
    /// To send a byte whenever the status changes, from now on.
    Watch,
}

/// What a copy answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CopyAnswer {
    /// How its links are.
    Status(CopyStatus),
}

/// The links of a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CopyStatus {
    /// Where other nodes reach it.
    pub link: Option<String>,
    /// What keeps them from it.
    pub hold: Option<Hold>,
}

/// The status of a target.
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
    /// The copies that count. During a change of the view, those of both sides.
    pub members: Members,
    /// Which history it serves; none while it serves nothing.
    #[serde(default)]
    pub lineage: Option<String>,
    /// The state of each copy.
    pub replicas: Vec<ReplicaSeen>,
    /// Why a growth does not go on.
    pub growth_held: Option<HoldReason>,
    /// Where it is served by iSCSI.
    pub portal: Option<String>,
    /// The FUSE file is there.
    pub file: bool,
    /// How many initiators are logged in.
    #[serde(default)]
    pub sessions: u32,
    /// What scrubs have found.
    #[serde(default)]
    pub scrub: Option<ScrubSeen>,
    /// How many bytes of each copy are still to be repaired, exactly.
    #[serde(default)]
    pub repairs_left: BTreeMap<String, Bytes>,
}

/// Asks the target at that socket, and waits no longer than `limit` for its answer.
pub fn ask(socket: &Path, request: &Request, limit: Duration) -> io::Result<Answer> {
    converse(socket, request, limit)
}

/// Tells a copy about other nodes, and hears how its links are.
pub fn tell_copy(socket: &Path, settings: CopySettings, limit: Duration) -> io::Result<CopyStatus> {
    let CopyAnswer::Status(status) = converse(socket, &CopyRequest::Configure(settings), limit)?;
    Ok(status)
}

fn converse<A: DeserializeOwned>(
    socket: &Path,
    request: &impl Serialize,
    limit: Duration,
) -> io::Result<A> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    send(&stream, request, &[])?;
    let answer = receive(&stream)?.map(|(answer, _)| answer);
    answer.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}
