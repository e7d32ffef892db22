//! How a volume is, in the words of the objects.

use trellis_api::kinds::{Members, ReplicaSeen, ReplicaState, WhenFull};
use trellis_api::{Bytes, HoldReason};
use trellis_control::agent::machine::CopiesWanted;
use trellis_engine::coordinator::{self, GrowthHeld, Status};
use trellis_engine::drive::{self, VolumeError};
use trellis_engine::proto::{Geometry, ReplicaId};

/// A copy that is behind by less counts as up to date for whoever looks.
const BEHIND_MIN: u64 = 1 << 20;
/// In how many steps the progress of a repair is told.
const REPAIR_STEPS: usize = 20;

/// Why a growth is held.
pub fn held_reason(held: GrowthHeld) -> HoldReason {
    match held {
        GrowthHeld::NoSpace => HoldReason::NoSpaceInPool,
        GrowthHeld::TooFewReplicas => HoldReason::TooFewReplicas,
    }
}

/// Why a wish cannot be met.
pub fn reason(error: VolumeError) -> HoldReason {
    match error {
        VolumeError::GrowthHeld(held) => held_reason(held),
        VolumeError::NotReady => HoldReason::TooFewReplicas,
        VolumeError::SizeBad => HoldReason::SizeTooLarge,
        VolumeError::GrowthReplaced => HoldReason::OperationRunning,
        _ => HoldReason::TargetDown,
    }
}

/// What becomes of writes without space, in the words of the engine.
pub fn when_full(wanted: WhenFull) -> drive::WhenFull {
    match wanted {
        WhenFull::Wait => drive::WhenFull::Wait,
        WhenFull::Fail => drive::WhenFull::Fail,
    }
}

/// What went wrong, with how many copies are there.
pub fn sentence(error: VolumeError, status: &Status) -> String {
    let there = status
        .replicas
        .values()
        .filter(|replica| replica.state != coordinator::ReplicaState::Away)
        .count();
    format!(
        "{error}; {there} of {} copies are there.",
        status.replicas.len()
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
    // What is served is durable on so many copies, also on such as are away just now.
    of_quorum.unwrap_or_default().max(status.size)
}

/// Who counts. While that changes, those of both sides do, and who was let go of counts until the others know it.
pub fn members(status: &Status) -> Members {
    let mut all = status.view.members();
    all.extend(&status.leaving);
    Members {
        replicas: all.iter().map(ReplicaId::to_string).collect(),
        ..current(status)
    }
}

/// Who counts apart from a change that is under way.
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

/// How a copy is.
pub fn seen((id, replica): (&ReplicaId, &coordinator::ReplicaStatus)) -> ReplicaSeen {
    let bytes = |regions: usize| {
        let region = u64::from(Geometry::STANDARD.region_bytes);
        Bytes::new(
            u64::try_from(regions)
                .unwrap_or(u64::MAX)
                .saturating_mul(region),
        )
    };
    let (state, left, of) = match replica.state {
        coordinator::ReplicaState::Away => (ReplicaState::Away, 0, 0),
        coordinator::ReplicaState::Arriving => (ReplicaState::Arriving, 0, 0),
        coordinator::ReplicaState::Repairing { left, of } => (ReplicaState::Repairing, left, of),
        coordinator::ReplicaState::InSync => (ReplicaState::InSync, 0, 0),
    };
    ReplicaSeen {
        id: id.to_string(),
        state,
        size: Some(replica.size).filter(|size| *size > 0).map(Bytes::new),
        behind: roughly(replica.behind_bytes),
        repair_left: bytes(in_steps(left, of)),
        repair_total: bytes(of),
        full: replica.full,
    }
}

/// A power of two, or nothing: what is worth telling of a number that changes with every write.
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
