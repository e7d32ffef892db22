//! What keeps a claim from what is asked of it, and where.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use trellis_api::kinds::Attachment;
use trellis_api::{Hold, HoldReason, Rung};

use super::ladder::Climb;
use super::rung::RungView;
use crate::claim::status;
use crate::stored::StoredClaim;
use crate::volume::redundancy::unasked;

/// What holds a claim or one of its uses, and where.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Held {
    /// The rung that cannot rise; none if what is held is not a rung.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rung: Option<Rung>,
    /// The node of the use that is held; none if the trunk or the claim is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The path of that use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The reason and this case of it.
    #[serde(flatten)]
    pub hold: Hold,
    /// What to do.
    pub action: &'static str,
}

impl Held {
    /// A hold of the claim as a whole.
    pub(super) fn of_claim(hold: Hold) -> Held {
        Held {
            action: hold.reason.action(),
            rung: None,
            node: None,
            path: None,
            hold,
        }
    }

    /// A hold of a rung of the trunk, or of an idle filesystem.
    fn of_rung(rung: Rung, hold: Hold) -> Held {
        Held {
            rung: Some(rung),
            ..Held::of_claim(hold)
        }
    }

    /// A hold of a use, at one of its rungs or as a whole.
    pub(super) fn of_use(attachment: &Attachment, rung: Option<Rung>, hold: Hold) -> Held {
        Held {
            rung,
            node: Some(attachment.spec.node.clone()),
            path: Some(attachment.spec.consumer.path().to_owned()),
            ..Held::of_claim(hold)
        }
    }
}

/// What keeps a claim from what is asked of it, the lowest rung first; none if nothing does.
pub fn held(look: &StoredClaim, now: Timestamp) -> Option<Held> {
    held_by(look, &Climb::of(look, now))
}

/// The same, for a claim whose rungs are known.
pub(super) fn held_by(look: &StoredClaim, climb: &Climb) -> Option<Held> {
    let claim = look.claim.as_deref()?;
    let user = look.stored.attachments.first();
    if let Some(user) = user.filter(|_| claim.metadata.deletion_timestamp.is_some()) {
        let message = format!(
            "It is still in use at {} of node {}.",
            user.spec.consumer.path(),
            user.spec.node
        );
        let hold = Hold::new(HoldReason::InUse, message);
        return Some(Held::of_use(user, None, hold));
    }
    let lost = || {
        let hold = look.stored.volume.as_ref()?.status.as_ref()?.hold.clone();
        hold.filter(|hold| hold.reason == HoldReason::NodeLost)
            .map(Held::of_claim)
    };
    let unprovisioned = || condition(claim, status::HELD).map(Held::of_claim);
    let copies = || {
        let kinds = [status::POOL_FULL, status::COPIES];
        let found = kinds.into_iter().find_map(|kind| condition(claim, kind));
        found.map(Held::of_claim)
    };
    // If the target cannot be asked, what it said before is no news of the volume.
    let target = || {
        let status = look.stored.target.as_ref()?.status.as_ref()?;
        unasked(status)?;
        Some(Held::of_rung(Rung::Volume, status.hold.clone()?))
    };
    let inside = || {
        let hold = look.stored.foreign_content()?;
        Some(Held::of_rung(Rung::Filesystem, hold))
    };
    unprovisioned()
        .or_else(lost)
        .or_else(inside)
        .or_else(target)
        .or_else(|| on_rung(&climb.trunk))
        .or_else(|| on_use(climb, true))
        .or_else(|| on_rung(climb.idle.as_slice()))
        .or_else(|| on_use(climb, false))
        .or_else(copies)
}

/// The lowest of these rungs that will not rise by itself.
fn on_rung(rungs: &[RungView]) -> Option<Held> {
    let kept = rungs.iter().find(|rung| rung.state.is_kept())?;
    Some(Held::of_rung(kept.rung, kept.hold.clone()?))
}

/// The first use that is held: at one of its rungs, or as a whole.
fn on_use(climb: &Climb, at_rung: bool) -> Option<Held> {
    let holds = climb
        .branches
        .iter()
        .filter_map(|branch| branch.hold.as_ref());
    let mut holds = holds.filter(|held| held.rung.is_some() == at_rung);
    holds.next().cloned()
}

/// The hold that a condition of the claim reports.
pub(super) fn condition(claim: &PersistentVolumeClaim, kind: &str) -> Option<Hold> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    let found = conditions
        .iter()
        .find(|each| each.type_ == kind && each.status == "True")?;
    let reason = HoldReason::of_code(found.reason.as_deref()?)?;
    let message = found.message.clone().unwrap_or_default();
    Some(Hold::new(reason, message))
}
