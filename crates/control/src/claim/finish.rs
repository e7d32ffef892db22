//! Finishes claims in use from what their node has just measured, as the kubelet does in a cluster.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use serde_json::{Value, json};
use trellis_api::{Hold, HoldReason, Next, Observed, Rung, next_step};

use super::{provision, status};
use crate::node::{Finisher, Job, Outcome, UseJob, copies_behind};
use crate::plan::{Note, claim_place};
use crate::stored::StoredVolume;
use crate::world::World;
use crate::write::Write;

/// The finisher of the embedded home, which has the claims.
pub struct Claims(pub Arc<World>);

impl Finisher for Claims {
    fn finish(
        &self,
        stored: &StoredVolume,
        job: &Job,
        outcome: &Outcome,
        now: &MicroTime,
    ) -> Option<(Write, Note)> {
        let claim = stored.volume.as_ref()?.spec.claim.as_ref()?;
        let found = self.0.claims.get(&claim.namespace, &claim.name)?;
        let is_its_claim = found.uid().as_ref() == Some(&claim.uid);
        claim_write(&found, stored, job, outcome, now).filter(|_| is_its_claim)
    }
}

/// The claim's status when all its rungs on this node are as they should be, or one is held. As with the kubelet, the
/// node that sees the consumer's size reports it.
pub(crate) fn claim_write(
    claim: &PersistentVolumeClaim,
    stored: &StoredVolume,
    job: &Job,
    outcome: &Outcome,
    now: &MicroTime,
) -> Option<(Write, Note)> {
    if outcome.stage.is_none() {
        return lost_claim(claim, job, outcome, now);
    }
    if is_used_elsewhere(stored, job) {
        // The claim has its size when every use has it, and the claim room sees them all.
        return None;
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
            let message = message + &copies_behind(stored, outcome, job.goal);
            (
                status::finished(device),
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

/// Whether something is attached on another node too.
fn is_used_elsewhere(stored: &StoredVolume, job: &Job) -> bool {
    let mut branches = stored.branches();
    branches.any(|(attachment, _)| {
        let mut here = job.uses.iter().chain(&job.endings);
        !here.any(|each| each.object.uid() == attachment.uid())
    })
}

/// A use that was there is gone or broken, and a growth waits for it.
fn lost_claim(
    claim: &PersistentVolumeClaim,
    job: &Job,
    outcome: &Outcome,
    now: &MicroTime,
) -> Option<(Write, Note)> {
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
