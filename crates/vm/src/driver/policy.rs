//! What a machine's state allows, and what QEMU's words mean for its state. Pure.

use std::fmt;

/// The state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmState {
    /// QEMU is there, and the guest has not run yet.
    Starting,
    /// The guest runs.
    Running,
    /// The guest is stopped and can go on.
    Paused(Pause),
    /// The guest was asked to switch itself off.
    Stopping,
    /// QEMU has ended as it should.
    Stopped(End),
    /// The machine is lost.
    Failed(VmLoss),
}

/// Why a guest is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// Somebody asked for it.
    Asked,
    /// A disk has no room for what the guest writes. It goes on after a growth, and has lost nothing.
    NoSpace,
    /// A disk has failed in another way.
    DiskError,
}

/// Who ended a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest switched itself off.
    Guest,
    /// QEMU was told to end, and the guest was not ready for it.
    Host,
}

/// How a machine was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmLoss {
    /// QEMU ended without saying that it would.
    QemuGone,
    /// The guest's kernel gave up.
    GuestPanicked,
    /// QEMU could not go on emulating.
    InternalError,
}

impl fmt::Display for VmState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            VmState::Starting => "starting",
            VmState::Running => "running",
            VmState::Paused(Pause::Asked) => "paused",
            VmState::Paused(Pause::NoSpace) => "paused, because a disk has no room",
            VmState::Paused(Pause::DiskError) => "paused, because a disk failed",
            VmState::Stopping => "stopping",
            VmState::Stopped(End::Guest) => "switched off",
            VmState::Stopped(End::Host) => "ended from outside",
            VmState::Failed(VmLoss::QemuGone) => "lost, because QEMU ended",
            VmState::Failed(VmLoss::GuestPanicked) => "lost, because the guest's kernel panicked",
            VmState::Failed(VmLoss::InternalError) => "lost, because QEMU could not go on",
        })
    }
}

impl VmState {
    /// Whether nothing can happen to it any more.
    pub fn is_over(self) -> bool {
        matches!(
            self,
            VmState::Stopped(_) | VmState::Failed(VmLoss::QemuGone)
        )
    }
}

/// What may be asked of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// To say what disks it has.
    Disks,
    /// To have a further disk.
    Plug,
    /// To give a disk back.
    Unplug,
    /// To have a larger disk.
    Grow,
    /// To use a disk less.
    Limit,
    /// To run for the first time.
    Start,
    /// To stop for a while.
    Pause,
    /// To go on.
    Resume,
    /// To end.
    Stop,
}

impl RequestKind {
    /// Every request.
    pub const ALL: [RequestKind; 9] = [
        RequestKind::Disks,
        RequestKind::Plug,
        RequestKind::Unplug,
        RequestKind::Grow,
        RequestKind::Limit,
        RequestKind::Start,
        RequestKind::Pause,
        RequestKind::Resume,
        RequestKind::Stop,
    ];
}

impl fmt::Display for RequestKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            RequestKind::Disks => "list its disks",
            RequestKind::Plug => "plug a disk",
            RequestKind::Unplug => "unplug a disk",
            RequestKind::Grow => "grow a disk",
            RequestKind::Limit => "limit a disk",
            RequestKind::Start => "start",
            RequestKind::Pause => "pause",
            RequestKind::Resume => "resume",
            RequestKind::Stop => "stop",
        })
    }
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// It is carried out.
    Do,
    /// It is so already.
    Already,
}

/// A request that the state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the machine cannot {request} now: it is {state}")]
pub struct NotNow {
    /// What was asked for.
    pub request: RequestKind,
    /// The state.
    pub state: VmState,
}

/// Whether a request is carried out in a state.
pub fn accept(state: VmState, request: RequestKind) -> Result<Ruling, NotNow> {
    use RequestKind as R;
    use VmState as S;
    let refused = Err(NotNow { request, state });
    match (state, request) {
        (S::Stopped(_) | S::Failed(VmLoss::QemuGone), R::Stop) => Ok(Ruling::Already),
        (S::Stopped(_) | S::Failed(VmLoss::QemuGone), _) => refused,
        (_, R::Disks) => Ok(Ruling::Do),
        // A machine without a living guest still has a QEMU to be ended.
        (S::Failed(_), R::Stop) => Ok(Ruling::Do),
        (S::Failed(_), _) => refused,
        (S::Stopping, R::Stop) => Ok(Ruling::Already),
        // The guest writes back what it has, and may be out of room while it does.
        (S::Stopping, R::Grow) => Ok(Ruling::Do),
        (S::Stopping, _) => refused,
        (_, R::Plug | R::Unplug | R::Grow | R::Limit | R::Stop) => Ok(Ruling::Do),
        (S::Starting, R::Start) => Ok(Ruling::Do),
        (S::Running, R::Start) => Ok(Ruling::Already),
        (S::Paused(_), R::Start) => refused,
        (S::Starting, R::Pause | R::Resume) => refused,
        (S::Running, R::Pause) => Ok(Ruling::Do),
        (S::Running, R::Resume) => Ok(Ruling::Already),
        (S::Paused(_), R::Pause) => Ok(Ruling::Already),
        (S::Paused(_), R::Resume) => Ok(Ruling::Do),
    }
}

/// The state that QEMU's run state means. `out_of_space` says whether a disk waits for room, `stopping` whether the
/// guest was asked to switch itself off.
pub fn state_of(run_state: &str, out_of_space: bool, stopping: bool) -> VmState {
    match run_state {
        "prelaunch" | "inmigrate" => VmState::Starting,
        "running" if stopping => VmState::Stopping,
        "running" => VmState::Running,
        "io-error" if out_of_space => VmState::Paused(Pause::NoSpace),
        "io-error" => VmState::Paused(Pause::DiskError),
        "guest-panicked" => VmState::Failed(VmLoss::GuestPanicked),
        "internal-error" => VmState::Failed(VmLoss::InternalError),
        "shutdown" => VmState::Stopped(End::Guest),
        // There are a dozen more, in all of which the guest does not run and can go on.
        _ => VmState::Paused(Pause::Asked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [VmState; 11] = [
        VmState::Starting,
        VmState::Running,
        VmState::Paused(Pause::Asked),
        VmState::Paused(Pause::NoSpace),
        VmState::Paused(Pause::DiskError),
        VmState::Stopping,
        VmState::Stopped(End::Guest),
        VmState::Stopped(End::Host),
        VmState::Failed(VmLoss::QemuGone),
        VmState::Failed(VmLoss::GuestPanicked),
        VmState::Failed(VmLoss::InternalError),
    ];

    #[test]
    fn a_machine_that_is_over_does_nothing_more() {
        // Fails if a command would be sent to a QEMU that is not there, or if stopping twice were an error.
        for state in STATES.into_iter().filter(|state| state.is_over()) {
            for request in RequestKind::ALL {
                let expected = match request {
                    RequestKind::Stop => Ok(Ruling::Already),
                    _ => Err(NotNow { request, state }),
                };
                assert_eq!(accept(state, request), expected);
            }
        }
    }

    #[test]
    fn disks_grow_in_every_state_in_which_the_guest_can_still_write() {
        // Fails if a guest that is out of room, paused or on its way out cannot be given more.
        for state in STATES {
            let dead = state.is_over() || matches!(state, VmState::Failed(_));
            let grows = accept(state, RequestKind::Grow) == Ok(Ruling::Do);
            assert_eq!(grows, !dead, "{state}");
        }
    }

    #[test]
    fn whatever_is_not_over_can_be_stopped() {
        // Fails if there is a state without a way out.
        for state in STATES {
            assert!(accept(state, RequestKind::Stop).is_ok(), "{state}");
        }
    }

    #[test]
    fn nothing_is_plugged_into_a_machine_that_stops() {
        // Fails if a disk is handed to a machine that will not use it any more.
        for request in [RequestKind::Plug, RequestKind::Unplug, RequestKind::Start] {
            assert!(accept(VmState::Stopping, request).is_err());
        }
    }

    #[test]
    fn a_pause_for_room_is_told_from_others() {
        // Fails if a machine that only needs room is shown as broken, or resumed for the wrong reason.
        assert_eq!(
            state_of("io-error", true, true),
            VmState::Paused(Pause::NoSpace)
        );
        assert_eq!(
            state_of("io-error", false, false),
            VmState::Paused(Pause::DiskError)
        );
        assert_eq!(
            state_of("a state of the future", true, false),
            VmState::Paused(Pause::Asked)
        );
        assert_eq!(state_of("running", false, true), VmState::Stopping);
    }
}
