//! The ladder of a claim: the trunk of its volume, and a branch for each use of it.
//!
//! ```text
//!                     ┌ device ─ filesystem      /mnt/data on node a
//! replica ─ volume ───┤
//!                     └ device                   /dev/data on node b
//! ```
//!
//! Each branch is measured on the node of its use. Several uses on one node share device and filesystem there, so their
//! branches have the same rungs.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use trellis_api::Bytes;
use trellis_api::kinds::{Attachment, AttachmentPhase, Consumer, Via};

use super::copies::degraded;
use super::head::{ClaimHead, goal};
use super::held::{Held, held_by};
use super::rung::{RungState, RungView, idle, trunk, upper};
use crate::stored::StoredClaim;

/// A claim's ladder. The JSON and YAML form is documented in `docs/cli.md` and is stable.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ladder {
    /// Which claim.
    #[serde(flatten)]
    pub head: ClaimHead,
    /// The trunk: the copies and what is served of them, lowest first.
    pub trunk: Vec<RungView>,
    /// A branch for each use, in the order of their nodes and paths.
    pub branches: Vec<Branch>,
    /// The filesystem of a volume that nobody uses, if it has one.
    pub idle: Option<RungView>,
    /// All of these rungs in one list. What several uses on one node share stands there once.
    pub rungs: Vec<RungView>,
    /// What holds the claim.
    pub hold: Option<Held>,
    /// What its copies lack; that does not stop a growth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub degraded: Option<Held>,
}

/// One use of a volume.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Branch {
    /// Its Attachment.
    pub attachment: String,
    /// The node on which it is.
    pub node: String,
    /// What uses the volume.
    pub consumer: UseKind,
    /// Where the volume appears.
    pub path: String,
    /// Whether it may only be read there.
    pub read_only: bool,
    /// The way the bytes take to the node; none before they do.
    pub via: Option<Via>,
    /// The block device on the node.
    pub device: Option<String>,
    /// Where it stands.
    pub state: BranchState,
    /// Its rungs, lowest first; none before something is attached.
    pub rungs: Vec<RungView>,
    /// What holds it.
    pub hold: Option<Held>,
}

/// What uses a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum UseKind {
    /// A directory shows its filesystem.
    Mount,
    /// A file is its block device.
    Device,
}

/// Where a branch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum BranchState {
    /// Every rung has the wanted size.
    Ok,
    /// One of its rungs is the next to be raised.
    Rising,
    /// The trunk has to rise first.
    Waiting,
    /// Something holds it.
    Held,
    /// Nothing is attached yet, and nothing is in the way.
    Pending,
    /// It is on its way out.
    Leaving,
}

/// The rungs of a claim.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Climb {
    pub trunk: Vec<RungView>,
    pub branches: Vec<Branch>,
    pub idle: Option<RungView>,
}

impl Climb {
    pub(super) fn of(look: &StoredClaim, now: Timestamp) -> Climb {
        let want = goal(look);
        let (trunk, reached) = trunk(look, now);
        let uses = look.uses();
        let mut branches: Vec<Branch> = uses.map(|each| Branch::of(each, want, reached)).collect();
        branches.sort_by(|one, other| one.place().cmp(&other.place()));
        let is_used = branches.iter().any(|branch| !branch.rungs.is_empty());
        Climb {
            idle: idle(look, want, reached).filter(|_| !is_used),
            trunk,
            branches,
        }
    }

    /// Every rung once, the trunk first.
    fn rungs(&self) -> Vec<RungView> {
        let mut nodes = BTreeSet::new();
        let measured = self.branches.iter();
        let measured = measured.filter(|branch| !branch.rungs.is_empty());
        let first_on_node = measured.filter(|branch| nodes.insert(&branch.node));
        let of_uses = first_on_node.flat_map(|branch| &branch.rungs);
        let all = self.trunk.iter().chain(of_uses).chain(&self.idle);
        all.cloned().collect()
    }
}

/// Every rung of a claim once, the trunk first.
pub fn rungs(look: &StoredClaim, now: Timestamp) -> Vec<RungView> {
    Climb::of(look, now).rungs()
}

impl Ladder {
    /// The ladder of a claim.
    pub fn of(look: &StoredClaim, now: Timestamp) -> Ladder {
        let climb = Climb::of(look, now);
        Ladder {
            head: ClaimHead::of(look),
            hold: held_by(look, &climb),
            degraded: degraded(look, now).map(Held::of_claim),
            rungs: climb.rungs(),
            trunk: climb.trunk,
            branches: climb.branches,
            idle: climb.idle,
        }
    }
}

impl Branch {
    /// The branch of a use. `reached` says that the trunk has the wanted size.
    fn of(each: &Attachment, want: Bytes, reached: bool) -> Branch {
        let status = each.status.as_ref();
        let measured = status.map(|status| status.rungs.as_slice());
        let mut reached = reached;
        let mut rungs = Vec::new();
        for measured in measured.unwrap_or_default() {
            let rung = upper(measured, &each.spec.node, want, reached);
            reached &= rung.state == RungState::Ok;
            rungs.push(rung);
        }
        let kept = rungs.iter().find(|rung| rung.state.is_kept());
        let kept = kept.and_then(|rung| Some((Some(rung.rung), rung.hold.clone()?)));
        let told = || Some((None, status?.hold.clone()?));
        let hold = kept.or_else(told);
        Branch {
            attachment: each.name_any(),
            node: each.spec.node.clone(),
            consumer: match each.spec.consumer {
                Consumer::Mount(_) => UseKind::Mount,
                Consumer::Device(_) => UseKind::Device,
            },
            path: each.spec.consumer.path().to_owned(),
            read_only: each.spec.consumer.read_only(),
            via: status.and_then(|status| status.via),
            device: status.and_then(|status| status.device.clone()),
            state: BranchState::of(each, &rungs, hold.is_some()),
            rungs,
            hold: hold.map(|(rung, hold)| Held::of_use(each, rung, hold)),
        }
    }

    fn place(&self) -> (&str, &str, &str) {
        (&self.node, &self.path, &self.attachment)
    }
}

impl BranchState {
    fn of(each: &Attachment, rungs: &[RungView], is_held: bool) -> BranchState {
        let detaches = |phase| phase == AttachmentPhase::Detaching;
        let phase = each.status.as_ref().map(|status| status.phase);
        let is_leaving = each.metadata.deletion_timestamp.is_some() || phase.is_some_and(detaches);
        let any = |state: RungState| rungs.iter().any(|rung| rung.state == state);
        if is_held {
            BranchState::Held
        } else if is_leaving {
            BranchState::Leaving
        } else if rungs.is_empty() {
            BranchState::Pending
        } else if any(RungState::Rising) {
            BranchState::Rising
        } else if any(RungState::Waiting) {
            BranchState::Waiting
        } else {
            BranchState::Ok
        }
    }
}
