//! What a plan for one volume has to know of everything else.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;

use super::nodes::Nodes;
use super::rooms::Rooms;

/// How long the volume room waits before it acts on something that may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits {
    /// How long a node may be lost before the copies on it are replaced elsewhere.
    pub copy_lost: Duration,
    /// How long a volume may be idle before its target is ended.
    pub rest: Duration,
}

impl Waits {
    /// What holds unless it is set.
    pub const USUAL: Waits = Waits {
        copy_lost: Duration::from_secs(600),
        rest: Duration::from_secs(30),
    };
}

/// How much of a wait is left; none if it is over.
pub fn left(since: Timestamp, wait: Duration, now: &MicroTime) -> Option<Duration> {
    let passed = Duration::try_from(now.0.duration_since(since)).unwrap_or_default();
    wait.checked_sub(passed).filter(|left| !left.is_zero())
}

/// Pools and nodes, as they are while one volume is planned.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Where there is room.
    pub rooms: &'a dyn Rooms,
    /// Which nodes are there.
    pub nodes: &'a Nodes,
    /// How long to wait.
    pub waits: Waits,
}
