//! From a hold to an answer: one code for each reason, and the hold's own sentence.
//!
//! Codes decide what a cluster does next. A final one lets a user lower a request; one that may pass is repeated soon.
//! INTERNAL is for our own mistakes alone, so no hold has it.

use tonic::{Code, Status};
use trellis_api::{Hold, HoldReason};

/// The code for a reason.
pub const fn code(reason: HoldReason) -> Code {
    use HoldReason as R;
    match reason {
        // What is asked for cannot be had at all, or not in this size.
        R::NoSpaceInPool
        | R::TooFewPools
        | R::DiskShared
        | R::PoolNotFound
        | R::SizeTooLarge
        | R::SizeTooSmall
        | R::GeometryLimit => Code::OutOfRange,
        R::SizeInvalid
        | R::ClassInvalid
        | R::ClassNotFound
        | R::ClassNotSet
        | R::DataSourceUnsupported
        | R::AccessModeUnsupported
        | R::ConsumerUnfit
        | R::MountOptionRefused
        | R::PathInvalid
        | R::FilesystemUnsupported
        | R::SelectorUnmatched => Code::InvalidArgument,
        R::VolumeUnknown | R::VolumeNotFound => Code::NotFound,
        // Somebody is at it.
        R::OperationRunning | R::StillInUse => Code::Aborted,
        // It stays so until somebody does something about it.
        R::InUse
        | R::PathBusy
        | R::PoolInUse
        | R::PoolUnfit
        | R::OnlineGrowthOff
        | R::ReadOnly
        | R::ForeignData
        | R::ForeignUse
        | R::FilesystemMismatch
        | R::FilesystemGone
        | R::FilesystemErrors
        | R::VolumeMismatch => Code::FailedPrecondition,
        // It may pass, and everything goes on then.
        R::WaitingForConsumer
        | R::ClaimNotBound
        | R::PoolNotReady
        | R::PoolFull
        | R::NotMounted
        | R::MissingCapability
        | R::MissingProgram
        | R::ReplicaDamaged
        | R::ReplicaUnavailable
        | R::LinkRefused
        | R::LinkMissing
        | R::TooFewReplicas
        | R::RedundancyLow
        | R::TargetDown
        | R::TargetSilent
        | R::TargetOutbid
        | R::NodeLost
        | R::UsedElsewhere
        | R::DeviceGone
        | R::DeviceShrunk
        | R::KernelRefused
        | R::FilesystemUnclean
        | R::FilesystemDown
        | R::MountGone => Code::Unavailable,
    }
}

/// Whether a caller takes the code for the end of what it asked for. Of any other it assumes that it may still happen.
pub const fn is_final(code: Code) -> bool {
    !matches!(
        code,
        Code::Aborted
            | Code::Unavailable
            | Code::ResourceExhausted
            | Code::Cancelled
            | Code::DeadlineExceeded
    )
}

/// The answer for a hold.
pub fn refused(hold: &Hold) -> Status {
    refused_as(code(hold.reason), hold)
}

/// The answer for a hold, with the code that this call has for it.
pub fn refused_as(code: Code, hold: &Hold) -> Status {
    Status::new(code, sentence(hold))
}

/// A hold as a person reads it: the reason in one word, this case, and what to do.
pub fn sentence(hold: &Hold) -> String {
    let message = hold.message.trim_end();
    let stop = if message.ends_with(['.', '!', '?']) {
        ""
    } else {
        "."
    };
    format!("{}: {message}{stop} {}", hold.reason, hold.reason.action())
}

/// A request that is not one.
pub fn invalid(what: impl Into<String>) -> Status {
    Status::invalid_argument(what)
}

/// There is no such volume.
pub fn no_volume(id: &str) -> Status {
    let message = format!("Volume {id:?} does not exist.");
    refused(&Hold::new(HoldReason::VolumeUnknown, message))
}

/// The API has not done what it was asked for. It may be away for a moment; that it did not understand us is our mistake.
pub fn from_api(error: &kube::Error, what: &str) -> Status {
    let kube::Error::Api(status) = error else {
        return Status::unavailable(format!("{what}: the API does not answer: {error}."));
    };
    let said = &status.message;
    match status.code {
        404 => Status::not_found(format!("{what}: {said}.")),
        409 => Status::aborted(format!(
            "{what} was changed by somebody else meanwhile: {said}."
        )),
        401 | 403 => Status::permission_denied(format!("{what}: {said}.")),
        400 | 422 => Status::internal(format!("{what}: {said}.")),
        _ => Status::unavailable(format!("{what}: {said}.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a reason has another code than the documentation says, or none.
    #[test]
    fn the_code_of_every_reason_stands_in_the_documentation() {
        let page = include_str!("../../../docs/kubernetes.md");
        for reason in HoldReason::ALL {
            let name = name(code(*reason));
            let row = page
                .lines()
                .find(|line| line.starts_with(&format!("| {name} |")));
            let row = row.unwrap_or_else(|| panic!("docs/kubernetes.md has no row for {name}"));
            assert!(
                row.contains(&format!("`{reason}`")),
                "{name} lacks {reason}"
            );
        }
    }

    fn name(code: Code) -> &'static str {
        match code {
            Code::OutOfRange => "OUT_OF_RANGE",
            Code::InvalidArgument => "INVALID_ARGUMENT",
            Code::NotFound => "NOT_FOUND",
            Code::Aborted => "ABORTED",
            Code::FailedPrecondition => "FAILED_PRECONDITION",
            Code::Unavailable => "UNAVAILABLE",
            other => panic!("no hold is {other:?}"),
        }
    }

    // Fails if an answer lacks the reason, the case, or what to do.
    #[test]
    fn an_answer_says_why_and_what_to_do() {
        let hold = Hold::new(HoldReason::NoSpaceInPool, "Pool \"a\" is full.");
        let status = refused(&hold);
        assert_eq!(status.code(), Code::OutOfRange);
        let action = HoldReason::NoSpaceInPool.action();
        assert_eq!(
            status.message(),
            format!("NoSpaceInPool: Pool \"a\" is full. {action}")
        );
    }
}
