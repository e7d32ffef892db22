//! What the copies of a replicated volume lack, in the words that all reports share.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use trellis_api::kinds::{
    Replica, ReplicaSeen, ReplicaState, TargetStatus, Volume, behind_sentence as sentence,
};
use trellis_api::{Bytes, Hold, HoldReason};

use super::copies::staying;
use crate::stored::StoredVolume;

/// How a copy was last seen, and since when it is silent, if it is.
#[derive(Clone, Debug, PartialEq)]
pub struct CopySeen {
    /// Its pool.
    pub pool: String,
    /// Its state. None: the target has not reported it yet.
    pub state: Option<ReplicaState>,
    /// Since when nobody has heard of it.
    pub silent_since: Option<MicroTime>,
    /// Its size, as it was measured last.
    pub size: Option<Bytes>,
    /// Bytes that are still to be repaired.
    pub repair_left: Bytes,
}

/// What holds a target that cannot be asked, and since when.
pub fn unasked(status: &TargetStatus) -> Option<(HoldReason, MicroTime)> {
    let is_unasked = |hold: &&Hold| {
        matches!(
            hold.reason,
            HoldReason::TargetSilent | HoldReason::TargetDown
        )
    };
    let hold = status.hold.as_ref().filter(is_unasked)?;
    let of_service = |each: &&Condition| each.type_ == "Available" && each.status == "False";
    let since = status.conditions.iter().find(of_service)?;
    Some((hold.reason, MicroTime(since.last_transition_time.0)))
}

/// One copy. If the target does not answer, what it said before is no news of its copies.
pub fn seen(view: &StoredVolume, replica: &Replica) -> CopySeen {
    let id = replica.identity();
    let status = view
        .target
        .as_ref()
        .and_then(|target| target.status.as_ref());
    let mut told = status.into_iter().flat_map(|status| &status.replicas);
    let told: Option<&ReplicaSeen> = told.find(|each| each.id == id);
    let unheard = status.and_then(unasked);
    let is_there = |state: ReplicaState| state != ReplicaState::Away;
    let (state, silent_since) = match (told, unheard) {
        (Some(told), Some((_, since))) if is_there(told.state) => {
            let since = told.heard_at.clone().unwrap_or(since);
            (Some(ReplicaState::Silent), Some(since))
        }
        (Some(told), _) => (Some(told.state), told.heard_at.clone()),
        (None, _) => (None, None),
    };
    CopySeen {
        pool: replica.spec.pool.clone(),
        state,
        silent_since,
        size: replica.status.as_ref().and_then(|status| status.capacity),
        repair_left: told.map(|told| told.repair_left).unwrap_or_default(),
    }
}

/// The copies that are to stay and do not hold everything, in the order of their pools.
pub fn faults(view: &StoredVolume) -> Vec<CopySeen> {
    let mut faults: Vec<CopySeen> = staying(view)
        .map(|replica| seen(view, replica))
        .filter(|each| each.state != Some(ReplicaState::InSync))
        .collect();
    faults.sort_by(|one, other| one.pool.cmp(&other.pool));
    faults
}

/// The pools of copies that are to stay and have not reached that size, as the target sees them.
pub fn behind(view: &StoredVolume, seen: &[ReplicaSeen], size: Bytes) -> Vec<String> {
    let is_smaller = |replica: &&Arc<Replica>| {
        let id = replica.identity();
        let told = seen.iter().find(|each| each.id == id);
        told.is_some_and(|told| told.size.is_none_or(|has| has < size))
    };
    let behind = staying(view).filter(is_smaller);
    let mut pools: Vec<String> = behind.map(|each| each.spec.pool.clone()).collect();
    pools.sort();
    pools
}

/// The same in a sentence that follows another one; nothing if there are none.
pub fn behind_sentence(view: &StoredVolume, seen: &[ReplicaSeen], size: Bytes) -> String {
    sentence(&behind(view, seen, size))
}

/// What is wrong if a replicated volume has fewer whole copies than are asked for. `how` describes one copy.
pub fn lacking(
    view: &StoredVolume,
    volume: &Volume,
    how: &dyn Fn(&CopySeen) -> String,
) -> Option<Hold> {
    let status = view.target.as_ref()?.status.as_ref()?;
    if !volume.spec.is_behind_target() || status.members.is_none() {
        return None;
    }
    let faults = faults(view);
    let whole = staying(view).count().saturating_sub(faults.len());
    let wanted = usize::try_from(volume.spec.replicas).unwrap_or(usize::MAX);
    let unmet = |each: &&Condition| each.type_ == "RedundancyMet" && each.status == "False";
    let unmet = status.conditions.iter().find(unmet);
    if whole >= wanted && faults.is_empty() && unmet.is_none() {
        return None;
    }
    let mut parts: Vec<String> = faults
        .iter()
        .map(|each| format!("the copy on pool {:?} is {}", each.pool, how(each)))
        .collect();
    let there = staying(view).count();
    if there < wanted {
        parts.push(format!("{} more have no place yet", wanted - there));
    }
    if parts.is_empty()
        && let Some(unmet) = unmet.filter(|unmet| !unmet.message.is_empty())
    {
        return Some(Hold::new(HoldReason::RedundancyLow, unmet.message.clone()));
    }
    let mut message = format!("{whole} of {wanted} copies hold everything");
    if !parts.is_empty() {
        message.push_str(": ");
        message.push_str(&parts.join(", "));
    }
    message.push('.');
    Some(Hold::new(HoldReason::RedundancyLow, message))
}

/// The state of a copy, for a text that stays: with the time, not with an age.
pub fn with_time(copy: &CopySeen) -> String {
    let since = || match &copy.silent_since {
        Some(at) => format!(" since {}", at.0.strftime("%Y-%m-%d %H:%M:%SZ")),
        None => String::new(),
    };
    match copy.state {
        None => "not told of by the target yet".to_owned(),
        Some(ReplicaState::Away) => format!("away{}", since()),
        Some(ReplicaState::Silent) => format!("silent{}", since()),
        Some(ReplicaState::Arriving) => "coming back".to_owned(),
        Some(ReplicaState::Repairing) => {
            format!("being repaired ({} left)", copy.repair_left)
        }
        Some(ReplicaState::InSync) => "whole".to_owned(),
    }
}
