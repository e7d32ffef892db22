//! One measured rung with its state, and the rungs of the trunk.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use trellis_api::kinds::{Replica, ReplicaPhase, ReplicaState, RungStatus};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::copies::state_word;
use super::head::goal;
use super::held::condition;
use crate::stored::{StoredClaim, StoredVolume};
use crate::volume::redundancy::{CopySeen, seen};

/// The condition of a claim whose growth was refused before it began.
const REFUSED: &str = "ControllerResizeError";
/// The condition of a claim whose filesystem waits for a mount.
const FILESYSTEM_PENDING: &str = "FileSystemResizePending";

/// One rung.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RungView {
    /// Which.
    pub rung: Rung,
    /// The pool of a replica.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The node where it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its size.
    pub size: Bytes,
    /// The same as a plain number.
    pub bytes: u64,
    /// When it was measured; none if it was read from a superblock some time before.
    pub observed_at: Option<MicroTime>,
    /// How long its last raise took.
    pub took_micros: Option<u64>,
    /// Where it stands.
    pub state: RungState,
    /// What holds it.
    pub hold: Option<Hold>,
    /// How one of several copies was seen last, and when if that is not now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
    /// What else is worth knowing of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Where a rung stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum RungState {
    /// It has the wanted size.
    Ok,
    /// It is the next to be raised.
    Rising,
    /// A rung below it has to rise first.
    Waiting,
    /// It cannot rise.
    Held,
    /// It is a filesystem that grows as part of the next mount.
    GrowsWhenMounted,
    /// It is a copy that is away or silent now; its size is the last known one.
    Unheard,
}

impl RungState {
    /// Whether it will not rise by itself.
    pub fn is_kept(self) -> bool {
        matches!(self, RungState::Held | RungState::GrowsWhenMounted)
    }
}

/// The trunk: every copy, and what is served of them. True if it lets the rungs above it rise.
pub(super) fn trunk(look: &StoredClaim, now: Timestamp) -> (Vec<RungView>, bool) {
    let (stored, want) = (&look.stored, goal(look));
    let claim = look.claim.as_deref();
    let refused = claim.and_then(|claim| condition(claim, REFUSED));
    let target = stored.target.as_ref();
    let told = target.and_then(|target| target.status.as_ref());
    // Of several copies the target says why they do not rise.
    let refused = refused.or_else(|| told?.hold.clone());
    let copies = stored.replicas.iter();
    let copies = copies.map(|each| copy(stored, each, want, refused.as_ref(), now));
    let mut rungs: Vec<RungView> = copies.collect();
    let mut reached = is_reached_by_copies(stored, &rungs);
    let measured = told.and_then(|status| status.rung.as_ref());
    if let (Some(target), Some(measured)) = (target, measured) {
        let rung = upper(measured, &target.spec.node, want, reached);
        reached &= rung.state == RungState::Ok;
        rungs.push(rung);
    }
    (rungs, reached)
}

/// Whether the copies let the rungs above them rise: of several, as many as must have a write.
fn is_reached_by_copies(stored: &StoredVolume, copies: &[RungView]) -> bool {
    let is_there = |rung: &&RungView| rung.state == RungState::Ok;
    let there = copies.iter().filter(is_there).count();
    let volume = stored.volume.as_ref();
    let several = volume.filter(|volume| volume.spec.is_behind_target());
    let needed = several.map(|volume| volume.spec.consistency_factor);
    let needed = needed.and_then(|factor| usize::try_from(factor).ok());
    there >= needed.unwrap_or(copies.len()).min(copies.len())
}

/// The lowest rung. A growth that was refused before it began is held here: the room on the replica's pool is what is
/// missing.
fn copy(
    stored: &StoredVolume,
    replica: &Replica,
    want: Bytes,
    refused: Option<&Hold>,
    now: Timestamp,
) -> RungView {
    let seen = replica.is_of_several().then(|| seen(stored, replica));
    let is_heard =
        |copy: &CopySeen| !matches!(copy.state, Some(ReplicaState::Away | ReplicaState::Silent));
    let status = replica.status.clone().unwrap_or_default();
    let size = status.capacity.unwrap_or_default();
    let failed = status.phase == ReplicaPhase::Failed;
    let hold = status.hold.or_else(|| refused.cloned());
    let state = match (size >= want && !failed, &hold) {
        (false, Some(_)) => RungState::Held,
        _ if !seen.as_ref().is_none_or(is_heard) => RungState::Unheard,
        (true, _) => RungState::Ok,
        (false, None) => RungState::Rising,
    };
    let rung = status.rung;
    RungView {
        rung: Rung::Replica,
        pool: Some(replica.spec.pool.clone()),
        node: Some(replica.spec.node.clone()),
        size,
        bytes: size.get(),
        observed_at: rung.as_ref().map(|rung| rung.observed_at.clone()),
        took_micros: rung.and_then(|rung| Some(rung.raised?.took_micros)),
        hold: hold.filter(|_| state == RungState::Held),
        state,
        copy: seen.map(|copy| state_word(&copy, now)),
        note: None,
    }
}

/// A rung above the copies. `reached` says that all below have the wanted size.
pub(super) fn upper(measured: &RungStatus, node: &str, want: Bytes, reached: bool) -> RungView {
    let state = match &measured.hold {
        _ if measured.size >= want || (measured.full && reached) => RungState::Ok,
        _ if !reached => RungState::Waiting,
        Some(_) => RungState::Held,
        None => RungState::Rising,
    };
    RungView {
        rung: measured.rung,
        pool: None,
        node: Some(node.to_owned()),
        size: measured.size,
        bytes: measured.size.get(),
        observed_at: Some(measured.observed_at.clone()),
        took_micros: measured.raised.as_ref().map(|raised| raised.took_micros),
        hold: measured.hold.clone().filter(|_| state == RungState::Held),
        state,
        copy: None,
        note: measured.note.clone(),
    }
}

/// The filesystem on a volume that nobody uses, as its superblock says.
pub(super) fn idle(look: &StoredClaim, want: Bytes, reached: bool) -> Option<RungView> {
    look.stored.volume.as_ref()?.spec.filesystem?;
    let mut contents = look.stored.contents().into_iter().flatten();
    let (content, size) = contents.find_map(|content| Some((content.clone(), content.size?)))?;
    let node = look
        .stored
        .target
        .as_ref()
        .map(|target| target.spec.node.clone());
    let state = if size >= want || (content.full && reached) {
        RungState::Ok
    } else if reached {
        RungState::GrowsWhenMounted
    } else {
        RungState::Waiting
    };
    let told = look
        .claim
        .as_deref()
        .and_then(|claim| condition(claim, FILESYSTEM_PENDING));
    let hold = told.unwrap_or_else(|| {
        let message = format!(
            "Its {} has {size} and grows when it is mounted.",
            content.kind
        );
        Hold::new(HoldReason::NotMounted, message)
    });
    Some(RungView {
        rung: Rung::Filesystem,
        pool: None,
        node,
        size,
        bytes: size.get(),
        observed_at: None,
        took_micros: None,
        hold: (state == RungState::GrowsWhenMounted).then_some(hold),
        state,
        copy: None,
        note: None,
    })
}
