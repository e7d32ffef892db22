//! The state of a volume, in the words of the objects.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::{Timestamp, Unit};
use trellis_api::kinds::{CopiesWanted, Members, ReplicaSeen, ReplicaState, WhenFull};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_engine::coordinator::{self, GrowthHeld, Status};
use trellis_engine::drive::{self, Failure, Trouble, VolumeError};
use trellis_engine::proto::{Geometry, ReplicaId};

/// A copy that is behind by less is shown as up to date.
const BEHIND_MIN: u64 = 1 << 20;
/// The number of steps in which the progress of a repair is reported.
const REPAIR_STEPS: usize = 20;

/// Why a growth is held.
pub fn held_reason(held: GrowthHeld) -> HoldReason {
    match held {
        GrowthHeld::NoSpace => HoldReason::NoSpaceInPool,
        GrowthHeld::TooFewReplicas => HoldReason::TooFewReplicas,
    }
}

/// Why a request cannot be met.
pub fn reason(error: VolumeError) -> HoldReason {
    match error {
        VolumeError::GrowthHeld(held) => held_reason(held),
        VolumeError::NotReady => HoldReason::TooFewReplicas,
        VolumeError::SizeBad => HoldReason::SizeTooLarge,
        VolumeError::GrowthReplaced => HoldReason::OperationRunning,
        _ => HoldReason::TargetDown,
    }
}

/// What happens to writes without space, in the words of the engine.
pub fn when_full(wanted: WhenFull) -> drive::WhenFull {
    match wanted {
        WhenFull::Wait => drive::WhenFull::Wait,
        WhenFull::Fail => drive::WhenFull::Fail,
    }
}

/// What went wrong, and how many copies answer.
pub fn sentence(error: VolumeError, status: &Status) -> String {
    let members = status.view.members();
    let count = members
        .iter()
        .filter_map(|id| status.replicas.get(id))
        .filter(|replica| answers(&replica.state))
        .count();
    format!("{error}; {count} of {} copies answer.", members.len())
}

/// Whether a copy is heard of. One that is frozen stays silent while it is greeted again and again.
fn answers(state: &coordinator::ReplicaState) -> bool {
    !matches!(
        state,
        coordinator::ReplicaState::Away | coordinator::ReplicaState::Silent
    )
}

/// The size that as many copies have as must have a write.
pub fn size_of_quorum(status: &Status) -> u64 {
    let config = &status.view.current;
    let mut sizes: Vec<u64> = config
        .members
        .iter()
        .filter_map(|id| status.replicas.get(id))
        .map(|replica| replica.size)
        .collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let of_quorum = sizes.get(config.consistency.saturating_sub(1)).copied();
    // What is served is durable on so many copies, even if some of them are away now.
    of_quorum.unwrap_or_default().max(status.size)
}

/// The copies that count. During a change, those of both sides do, and a removed copy counts until the others know of
/// the removal.
pub fn members(status: &Status) -> Members {
    let mut all = status.view.members();
    all.extend(&status.leaving);
    Members {
        replicas: all.iter().map(ReplicaId::to_string).collect(),
        ..current(status)
    }
}

/// The copies that count, apart from a change that is under way.
pub fn current(status: &Status) -> Members {
    let config = &status.view.current;
    Members {
        version: status.view.version,
        consistency_factor: u32::try_from(config.consistency).unwrap_or(u32::MAX),
        replicas: config.members.iter().map(ReplicaId::to_string).collect(),
    }
}

/// Whether a copy was just seen to hold everything.
pub fn holds_everything(status: &Status, id: &str) -> bool {
    let id = id.parse::<ReplicaId>().ok();
    let replica = id.and_then(|id| status.replicas.get(&id));
    replica.is_some_and(|it| it.state == coordinator::ReplicaState::InSync)
}

/// Whether as many copies as are asked for count and hold everything.
pub fn redundancy_met(status: &Status, wanted: &CopiesWanted) -> bool {
    let count = usize::try_from(wanted.count).unwrap_or(usize::MAX);
    status.redundancy_met && status.view.current.members.len() >= count
}

/// The state of a copy. `began` is when the volume's clock began, and `trouble` why it is not reached.
pub fn seen(
    began: Timestamp,
    (id, replica): (&ReplicaId, &coordinator::ReplicaStatus),
    trouble: Option<&Trouble>,
) -> ReplicaSeen {
    let at = |ms: u64| {
        let at = began.checked_add(Duration::from_millis(ms)).ok()?;
        Some(MicroTime(at.round(Unit::Microsecond).ok()?))
    };
    let (state, left, of) = match replica.state {
        coordinator::ReplicaState::Away => (ReplicaState::Away, 0, 0),
        coordinator::ReplicaState::Silent => (ReplicaState::Silent, 0, 0),
        coordinator::ReplicaState::Arriving => (ReplicaState::Arriving, 0, 0),
        coordinator::ReplicaState::Repairing { left, of } => (ReplicaState::Repairing, left, of),
        coordinator::ReplicaState::InSync => (ReplicaState::InSync, 0, 0),
    };
    ReplicaSeen {
        id: id.to_string(),
        state,
        heard_at: replica.heard_ms.and_then(at),
        size: Some(replica.size).filter(|size| *size > 0).map(Bytes::new),
        behind: roughly(replica.behind_bytes),
        repair_left: region_bytes(in_steps(left, of)),
        repair_total: region_bytes(of),
        full: replica.full,
        link_hold: trouble.and_then(|trouble| link_hold(&trouble.failure)),
    }
}

/// Why two nodes do not let each other in; none if that is not what keeps them apart.
pub(in crate::serve) fn link_hold(failure: &Failure) -> Option<Hold> {
    match failure {
        Failure::Refused(_) | Failure::RefusedUs(_) | Failure::NoCredentials => {
            let message = format!("The copy is not reached: {failure}.");
            Some(Hold::new(HoldReason::LinkRefused, message))
        }
        Failure::Connect(_)
        | Failure::Late
        | Failure::Closed
        | Failure::Broken(_)
        | Failure::Choked => None,
    }
}

/// How many bytes of each copy are still to be repaired.
pub fn repairs_left(status: &Status) -> BTreeMap<String, Bytes> {
    let left = status.replicas.iter().map(|(id, replica)| {
        let left = match replica.state {
            coordinator::ReplicaState::Repairing { left, .. } => left,
            _ => 0,
        };
        (id.to_string(), region_bytes(left))
    });
    left.collect()
}

fn region_bytes(regions: usize) -> Bytes {
    let region = u64::from(Geometry::STANDARD.region_bytes);
    let regions = u64::try_from(regions).unwrap_or(u64::MAX);
    Bytes::new(regions.saturating_mul(region))
}

/// A power of two, or nothing: enough for a number that changes with every write.
fn roughly(behind: u64) -> Bytes {
    if behind < BEHIND_MIN {
        return Bytes::ZERO;
    }
    Bytes::new(behind.checked_next_power_of_two().unwrap_or(u64::MAX))
}

/// What is left, rounded up to a twentieth of all.
fn in_steps(left: usize, of: usize) -> usize {
    let step = of.div_ceil(REPAIR_STEPS).max(1);
    left.div_ceil(step).saturating_mul(step).min(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a copy that is behind is told to be up to date, or every write is told.
    #[test]
    fn what_is_told_changes_rarely_and_is_never_too_little() {
        assert_eq!(roughly(0), Bytes::ZERO);
        assert_eq!(roughly(BEHIND_MIN), Bytes::new(BEHIND_MIN));
        assert_eq!(roughly(BEHIND_MIN + 1), Bytes::new(2 * BEHIND_MIN));
        assert_eq!(in_steps(0, 1000), 0);
        assert_eq!(in_steps(1, 1000), 50);
        assert_eq!(in_steps(1000, 1000), 1000);
        assert_eq!(in_steps(3, 3), 3);
    }
}
