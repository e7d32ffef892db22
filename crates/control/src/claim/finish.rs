//! Finishes claims in use from what their node has just measured, as the kubelet does in a cluster.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use serde_json::{Value, json};
use trellis_api::{Hold, HoldReason, Next, Observed, Rung, next_step};

use super::{provision, status};
use crate::node::{Finisher, Job, Outcome, UseJob, copies_behind};
use crate::plan::{Note, claim_place};
use crate::view::View;
use crate::write::Write;

/// The finisher of the embedded home.
pub struct Claims;

impl Finisher for Claims {
    fn finish(
        &self,
        view: &View,
        job: &Job,
        outcome: &Outcome,
        now: &MicroTime,
    ) -> Option<(Write, Note)> {
        claim_write(view, job, outcome, now)
    }
}

/// The claim's status when all its rungs on this node are as they should be, or one is held. As with the kubelet, the
/// node that sees the consumer's size reports it.
fn claim_write(
    view: &View,
    job: &Job,
    outcome: &Outcome,
    now: &MicroTime,
) -> Option<(Write, Note)> {
    let claim = view.claim.as_ref()?;
    if outcome.stage.is_none() {
        return lost_claim(view, job, outcome, now);
    }
    let wanted = provision::goal(status::requested(claim)?).ok()?;
    let bound = claim.status.as_ref()?.phase.as_deref() == Some("Bound");
    if wanted > job.goal || !bound {
        return None;
    }
    let observed: Vec<Observed> = outcome.ladder.iter().map(Observed::from).collect();
    let (body, note) = match next_step(&observed, job.goal) {
        Next::Reached => {
            let device = outcome
                .ladder
                .iter()
                .find(|each| each.rung == Rung::Device)?
                .size;
            let message = format!("MountVolume.NodeExpandVolume succeeded: {device}");
            let message = message + &copies_behind(view, outcome, job.goal);
            (
                status::finished(claim, device),
                Note::normal(claim, "FileSystemResizeSuccessful", message),
            )
        }
        Next::Held { rung, .. } => {
            let hold = outcome
                .ladder
                .iter()
                .find(|each| each.rung == rung)?
                .hold
                .clone()?;
            // A growth that waits for somebody to mount or unmount is pending; it is not an error of the node.
            let waits = matches!(
                hold.reason,
                HoldReason::ReadOnly | HoldReason::OnlineGrowthOff
            );
            if waits {
                let message = format!("{} {}", hold.message, hold.reason.action());
                let note = Note::normal(claim, "FileSystemResizeRequired", message);
                (
                    status::filesystem_pending(claim, job.goal, &hold, now),
                    note,
                )
            } else {
                let note = Note::held(claim, "FileSystemResizeFailed", &hold);
                (status::node_held(claim, job.goal, &hold, now), note)
            }
        }
        Next::Raise { .. } => return None,
    };
    let grown = status::reported(claim) != Some(job.goal) || status::progress(claim).is_some();
    let held = matches!(next_step(&observed, job.goal), Next::Held { .. });
    if (!grown && !held) || !status::changes(claim, &body) {
        return None;
    }
    Some((for_this_claim(claim, body), note))
}

/// A use that was there is gone or broken, and a growth waits for it.
fn lost_claim(view: &View, job: &Job, outcome: &Outcome, now: &MicroTime) -> Option<(Write, Note)> {
    let claim = view.claim.as_ref()?;
    let lost = |(each, hold): &(UseJob, Option<Hold>)| {
        let hold = hold.as_ref().filter(|_| each.hold.is_none());
        hold.filter(|_| each.usage.established).cloned()
    };
    let hold = outcome.uses.iter().find_map(lost)?;
    if provision::goal(status::requested(claim)?).ok()? > job.goal {
        // The planner reports on the present request.
        return None;
    }
    let body = status::node_held(claim, job.goal, &hold, now);
    let waits = status::reported(claim).is_some_and(|size| size < job.goal);
    if !waits || !status::changes(claim, &body) {
        return None;
    }
    let note = Note::held(claim, "FileSystemResizeFailed", &hold);
    Some((for_this_claim(claim, body), note))
}

/// A change of the claim's status that is not bound to a version, because the planner reports on the claim too and
/// neither waits for the other. It is meant for this claim, and not for a later one of the same name.
fn for_this_claim(claim: &PersistentVolumeClaim, mut body: Value) -> Write {
    body["metadata"] = json!({ "uid": claim.uid() });
    Write::PatchStatus(claim_place(claim), body)
}
