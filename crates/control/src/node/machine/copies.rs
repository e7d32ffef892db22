//! The copies on a machine's pools, and the targets that keep several of them the same.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use trellis_api::about::About;
use trellis_api::kinds::{
    CopiesWanted, IscsiAccess, Members, Recovery, ReplicaSeen, ScrubSeen, WhenFull,
};
use trellis_api::{Bytes, Hold};

use crate::node::chap::ChapSecret;

/// A copy of a volume on a pool of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaPlace {
    /// The pool's directory.
    pub pool: PathBuf,
    /// The identity that the directory must have, once it is known.
    pub pool_id: Option<String>,
    /// The replica's name.
    pub name: String,
    /// The volume's name.
    pub volume: String,
    /// Identity of the volume.
    pub volume_id: String,
    /// Identity of the copy.
    pub replica_id: String,
    /// Whether every byte is allocated.
    pub thick: bool,
    /// What the copy should say about itself in its own directory; none if its volume is not known.
    pub about: Option<About>,
    /// Whether a process of its own serves it.
    pub served: bool,
    /// Whether it keeps checksums of its blocks, if it is one of several.
    pub checksums: bool,
    /// The node on which its target runs now. No other node may use the copy.
    pub target_node: Option<String>,
}

/// A replica as it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaFound {
    /// Its size: the `replica` rung.
    pub size: Bytes,
    /// What a reader of its data gets: the `volume` rung of a volume that is used in place.
    pub served: Bytes,
    /// The file that holds the bytes.
    pub data: PathBuf,
}

/// One of several copies, served by a process of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyFound {
    /// Its size: its `replica` rung.
    pub size: Bytes,
    /// The file that holds the bytes.
    pub data: PathBuf,
    /// Where its process can be reached on this machine.
    pub address: String,
    /// Where other nodes reach it, if they can.
    pub link: Option<String>,
    /// What keeps other nodes from reaching it.
    pub link_hold: Option<Hold>,
}

/// When the copies of a volume are to be compared with their checksums.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScrubWish {
    /// The last request. Another value is another request.
    #[serde(default)]
    pub requested: Option<String>,
    /// How often a scrub runs by itself, in seconds; 0 for never.
    #[serde(default)]
    pub interval_seconds: u64,
    /// When the interval until the next one began (RFC 3339).
    #[serde(default)]
    pub since: Option<String>,
    /// The last one, as it was reported.
    #[serde(default)]
    pub last: Option<ScrubSeen>,
}

/// A target on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPlace {
    /// The volume's name.
    pub volume: String,
    /// The volume's identity.
    pub volume_id: String,
    /// The copies that count, as far as is known, to start with. The copies themselves know better.
    pub members: Members,
    /// The copies that are asked for. The target decides from what it sees of them which ones count
    /// ([`crate::volume::members::who_counts`]).
    pub wanted: CopiesWanted,
    /// How often it was decided anew where the volume is served.
    pub term: u32,
    /// The copies that it goes on with after others were lost for good.
    pub recovery: Option<Recovery>,
    /// The recovered volume has been served. From now on it starts like any other.
    pub is_recovered: bool,
    /// How long a request without a quorum waits before it fails; none for no limit.
    pub fails_after: Option<Duration>,
    /// How long a request without a quorum waits before it is asked again, if set.
    pub asks_every: Option<Duration>,
    /// What happens to a write if too many pools have no space for it.
    pub when_full: WhenFull,
    /// Where the copies can be reached from this machine, by identity. Includes copies that do not count yet, or no
    /// longer.
    pub addresses: BTreeMap<String, String>,
    /// The nodes of copies that cannot be reached from this machine.
    pub unlinked: Vec<String>,
    /// When they are compared with their checksums.
    pub scrub: ScrubWish,
    /// How initiators may use the volume.
    pub iscsi: IscsiAccess,
    /// What initiators must know. The agent adds it before the target is served.
    pub secret: Option<ChapSecret>,
}

/// A target as it was found.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetFound {
    /// The size that as many copies have as must have a write: the `replica` rung of the volume.
    pub copies: Bytes,
    /// What a reader gets: the `volume` rung.
    pub served: Bytes,
    /// The file through which the volume is used on this machine.
    pub backing: PathBuf,
    /// Its iSCSI name.
    pub iqn: Option<String>,
    /// Its iSCSI address.
    pub portal: Option<String>,
    /// How many initiators are logged in there.
    pub sessions: u32,
    /// The copies that count now. During a change of the view, those of both sides.
    pub members: Members,
    /// Which history it serves; none while it serves nothing.
    pub lineage: Option<String>,
    /// The state of each copy.
    pub replicas: Vec<ReplicaSeen>,
    /// I/O is served.
    pub available: bool,
    /// As many copies as are asked for are there, and each of them holds everything.
    pub redundancy_met: bool,
    /// Every copy has the volume's size.
    pub size_converged: bool,
    /// What scrubs have found.
    pub scrub: Option<ScrubSeen>,
    /// What keeps it from serving or growing.
    pub hold: Option<Hold>,
}

/// What a machine can do with copies and targets.
pub trait Copies: Send + Sync + 'static {
    /// Makes a new replica, or finds the one that an earlier try has made.
    fn make_replica(&self, replica: &ReplicaPlace, size: Bytes) -> Result<ReplicaFound, Hold>;

    /// Finds a replica that must be there.
    fn find_replica(&self, replica: &ReplicaPlace) -> Result<ReplicaFound, Hold>;

    /// Raises a replica, durably.
    fn raise_replica(&self, replica: &ReplicaPlace, to: Bytes) -> Result<(), Hold>;

    /// Updates what a replica says about itself in its directory, if it says something else.
    fn describe_replica(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Removes a replica and its bytes.
    fn remove_replica(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Serves one of several copies by a process of its own, which is started if it does not run.
    fn serve_copy(&self, replica: &ReplicaPlace) -> Result<CopyFound, Hold>;

    /// Whether there is a file at that path.
    fn is_there(&self, path: &Path) -> bool;

    /// Starts at once whatever should run for a volume. A pass over the volume does the same, but may be waiting for
    /// I/O that only these processes can answer.
    fn serve_again(&self, volume: &str);

    /// Ends the process that serves a copy; does nothing if there is none.
    fn retire_copy(&self, replica: &ReplicaPlace) -> Result<(), Hold>;

    /// Runs a target with these copies, in a process of its own, and measures it.
    fn serve_target(&self, target: &TargetPlace) -> Result<TargetFound, Hold>;

    /// Raises the copies and what the target serves.
    fn raise_target(&self, target: &TargetPlace, to: Bytes) -> Result<(), Hold>;

    /// Whether there is a target of the volume on this machine, or something that is left of one.
    fn has_target(&self, volume: &str) -> bool;

    /// The term that the target of the volume on this machine was given last; none if there is nothing of one.
    fn given_term(&self, volume: &str) -> Option<u32>;

    /// Gives every request that waits for the target an error, for ever: its volume is served elsewhere, so that it will
    /// never be answered. Whoever waited lets go of the volume then.
    fn abandon_target(&self, volume: &str) -> Result<(), Hold>;

    /// The term of another target whose copies this one was refused by, if that is later than the term it was given.
    fn outbid(&self, volume: &str) -> Option<u32>;

    /// Ends a target; does nothing if there is none.
    fn retire_target(&self, volume: &str) -> Result<(), Hold>;

    /// What initiators of a volume had to know before that was stored, if the volume was served here then.
    fn earlier_secret(&self, volume: &str) -> Option<String>;

    /// The file through which a replicated volume is used on this machine, whether it exists or not.
    fn target_backing(&self, volume: &str) -> PathBuf;
}
