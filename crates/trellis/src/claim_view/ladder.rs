//! The ladder of a claim as a person or a program reads it: every measured rung with its state.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use trellis_api::kinds::{Replica, ReplicaPhase, ReplicaState, RungStatus};
use trellis_api::{Bytes, Hold, HoldReason, Rung};
use trellis_control::view::View;
use trellis_control::volume::redundancy::{CopySeen, seen};

use super::health::{degraded, state_word};
use super::{Held, condition, goal, held, reported, requested};
use crate::output::Tone;

/// The condition of a claim whose growth was refused before it began.
const REFUSED: &str = "ControllerResizeError";
/// The condition of a claim whose filesystem waits for a mount.
const FILESYSTEM_PENDING: &str = "FileSystemResizePending";

/// A claim's rungs, lowest first. The JSON and YAML form is documented in `docs/cli.md` and is stable.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ladder {
    /// The claim.
    pub claim: String,
    /// Its namespace.
    pub namespace: String,
    /// The size that it asks for.
    pub requested: Option<Bytes>,
    /// The size that it reports.
    pub capacity: Option<Bytes>,
    /// The rungs.
    pub rungs: Vec<RungView>,
    /// What holds it.
    pub hold: Option<Held>,
    /// What its copies lack; that does not stop a growth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub degraded: Option<Held>,
}

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
    pub fn kept(self) -> bool {
        matches!(self, RungState::Held | RungState::GrowsWhenMounted)
    }

    /// The tone of the word.
    pub fn tone(self) -> Tone {
        match self {
            RungState::Ok => Tone::Good,
            RungState::Rising | RungState::Waiting => Tone::Moving,
            RungState::Held | RungState::GrowsWhenMounted | RungState::Unheard => Tone::Bad,
        }
    }
}

impl RungView {
    /// The state in words.
    pub fn state_text(&self) -> String {
        match (self.state, &self.hold) {
            (RungState::Held, Some(hold)) => format!("held {}", hold.reason),
            (RungState::Held, None) => "held".to_owned(),
            (RungState::Ok, _) => "ok".to_owned(),
            (RungState::Rising, _) => "rising".to_owned(),
            (RungState::Waiting, _) => "waiting".to_owned(),
            (RungState::GrowsWhenMounted, _) => "grows when mounted".to_owned(),
            (RungState::Unheard, _) => self
                .copy
                .as_ref()
                .map_or_else(|| "unheard".to_owned(), |copy| copy.clone()),
        }
    }

    /// The rung's name, with the pool where there may be several copies.
    pub fn title(&self) -> String {
        match &self.pool {
            Some(pool) => format!("{} on pool {pool}", self.rung),
            None => self.rung.to_string(),
        }
    }
}

/// The ladder of a claim.
pub fn ladder(view: &View) -> Ladder {
    let claim = view.claim.as_deref();
    Ladder {
        claim: claim.map(|claim| claim.name_any()).unwrap_or_default(),
        namespace: claim
            .and_then(|claim| claim.namespace())
            .unwrap_or_default(),
        requested: requested(view),
        capacity: reported(view),
        rungs: rungs(view),
        hold: held(view),
        degraded: degraded(view, Timestamp::now()).map(|hold| Held::new(None, hold)),
    }
}

/// Every rung of a claim, lowest first.
pub fn rungs(view: &View) -> Vec<RungView> {
    let want = goal(view);
    let refused = view
        .claim
        .as_deref()
        .and_then(|claim| condition(claim, REFUSED));
    // Of several copies the target says why they do not rise.
    let of_target = || view.stored.target.as_ref()?.status.as_ref()?.hold.clone();
    let refused = refused.or_else(of_target);
    let mut rungs: Vec<RungView> = view
        .stored
        .replicas
        .iter()
        .map(|each| replica(view, each, want, refused.as_ref()))
        .collect();
    let mut reached = is_reached_by_copies(view, &rungs);
    if let Some(target) = &view.stored.target
        && let Some(measured) = target
            .status
            .as_ref()
            .and_then(|status| status.rung.as_ref())
    {
        let rung = upper(measured, &target.spec.node, want, reached);
        reached &= rung.state == RungState::Ok;
        rungs.push(rung);
    }
    let in_use = uses(view, want, reached);
    if in_use.is_empty() {
        rungs.extend(idle(view, want, reached));
    }
    rungs.extend(in_use);
    rungs
}

/// Whether the copies let the rungs above them rise: of several, as many as must have a write.
fn is_reached_by_copies(view: &View, copies: &[RungView]) -> bool {
    let is_there = |rung: &&RungView| rung.state == RungState::Ok;
    let there = copies.iter().filter(is_there).count();
    let several = view
        .stored
        .volume
        .as_ref()
        .filter(|volume| volume.spec.is_behind_target());
    let needed = several.map(|volume| volume.spec.consistency_factor);
    let needed = needed.and_then(|factor| usize::try_from(factor).ok());
    there >= needed.unwrap_or(copies.len()).min(copies.len())
}

/// The lowest rung. A growth that was refused before it began is held here: the room on the replica's pool is what is
/// missing.
fn replica(view: &View, replica: &Replica, want: Bytes, refused: Option<&Hold>) -> RungView {
    let seen = replica.is_of_several().then(|| seen(&view.stored, replica));
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
        copy: seen.map(|copy| state_word(&copy, Timestamp::now())),
        note: None,
    }
}

/// A rung above the replicas. `reached` says that all below have the wanted size.
fn upper(measured: &RungStatus, node: &str, want: Bytes, reached: bool) -> RungView {
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

/// The rungs on the nodes that use the volume. Several uses on one node share their rungs.
fn uses(view: &View, want: Bytes, reached: bool) -> Vec<RungView> {
    let mut rungs = Vec::new();
    let mut nodes: Vec<&str> = Vec::new();
    for each in &view.stored.attachments {
        let measured = each
            .status
            .as_ref()
            .map(|status| status.rungs.as_slice())
            .unwrap_or_default();
        let node = each.spec.node.as_str();
        if measured.is_empty() || nodes.contains(&node) {
            continue;
        }
        nodes.push(node);
        let mut reached = reached;
        for measured in measured {
            let rung = upper(measured, node, want, reached);
            reached &= rung.state == RungState::Ok;
            rungs.push(rung);
        }
    }
    rungs
}

/// The filesystem on a volume that nobody uses, as its superblock says.
fn idle(view: &View, want: Bytes, reached: bool) -> Option<RungView> {
    view.stored.volume.as_ref()?.spec.filesystem?;
    let mut contents = view.stored.contents().into_iter().flatten();
    let (content, size) = contents.find_map(|content| Some((content.clone(), content.size?)))?;
    let node = view
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
    let told = view
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
