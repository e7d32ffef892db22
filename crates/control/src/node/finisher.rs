//! Who is told that the consumers of a claim have their size.
//!
//! A node never writes a claim. The embedded home hands it a finisher, whose write goes out with the node's report, so
//! that the claim is finished by the same flush. In a cluster the kubelet and the resizer finish claims.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use super::job::Job;
use super::work::Outcome;
use crate::plan::Note;
use crate::stored::StoredVolume;
use crate::write::Write;

/// Turns what a pass found into what the claim's owner reads.
pub trait Finisher: Send + Sync + 'static {
    /// What to write to the claim, and the event that goes with it; none if there is nothing new to say.
    fn finish(
        &self,
        stored: &StoredVolume,
        job: &Job,
        outcome: &Outcome,
        now: &MicroTime,
    ) -> Option<(Write, Note)>;
}

/// Somebody else finishes claims: the kubelet, or the embedded home on another node.
pub struct NoClaims;

impl Finisher for NoClaims {
    fn finish(
        &self,
        _: &StoredVolume,
        _: &Job,
        _: &Outcome,
        _: &MicroTime,
    ) -> Option<(Write, Note)> {
        None
    }
}
