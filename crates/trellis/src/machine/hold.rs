//! Turns errors of the replica store and of the kernel into the holds that a user reads.

use trellis_api::{Hold, HoldReason};
use trellis_control::node::machine::Stage;
use trellis_node::volume::Fault;

pub(super) fn gone(stage: &Stage) -> Hold {
    Hold::new(
        HoldReason::DeviceGone,
        format!("No block device carries volume {} any more.", stage.volume),
    )
}

pub(super) fn fault_hold(stage: &Stage, fault: &Fault) -> Hold {
    Hold::new(fault.reason(), format!("Volume {}: {fault}.", stage.volume))
}

/// An error with all its causes as one sentence.
pub(super) fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}

pub(super) fn store_hold(error: trellis_engine::Error) -> Hold {
    use trellis_engine::Error;
    let reason = match &error {
        Error::PoolNotDirectory { .. }
        | Error::PoolOwned { .. }
        | Error::PoolUnknown { .. }
        | Error::PoolIdBad { .. }
        | Error::PoolCrowded { .. } => HoldReason::PoolNotReady,
        Error::NoSpace { .. } => HoldReason::NoSpaceInPool,
        Error::SizeTooLarge { .. } | Error::FileTooLong { .. } => HoldReason::SizeTooLarge,
        Error::ThickUnsupported { .. } => HoldReason::ClassInvalid,
        // A copy that is not there is most often on a disk that is not mounted.
        Error::ReplicaAbsent { .. } | Error::ReplicaRemoved { .. } => {
            HoldReason::ReplicaUnavailable
        }
        error if is_no_space(error) => HoldReason::NoSpaceInPool,
        Error::Io { .. } => HoldReason::ReplicaUnavailable,
        _ => HoldReason::ReplicaDamaged,
    };
    Hold::new(reason, sentence(&error))
}

fn is_no_space(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(next) = cause {
        if next
            .downcast_ref::<std::io::Error>()
            .is_some_and(|io| io.kind() == std::io::ErrorKind::StorageFull)
        {
            return true;
        }
        cause = next.source();
    }
    false
}

/// An error while a device is attached to a volume's file. If the file is missing, its disk is most often not mounted.
pub(super) fn carrier_hold(stage: &Stage, error: trellis_node::Error) -> Hold {
    match &error {
        trellis_node::Error::Io { path, source, .. }
            if *path == stage.backing && source.kind() == std::io::ErrorKind::NotFound =>
        {
            Hold::new(HoldReason::ReplicaUnavailable, sentence(&error))
        }
        _ => node_hold(error),
    }
}

/// The hold of an error of the kernel.
pub fn node_hold(error: trellis_node::Error) -> Hold {
    Hold::new(error.reason(), sentence(&error))
}
