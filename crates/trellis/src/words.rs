//! The words in which a view of a claim is told.

use trellis_api::Bytes;
use trellis_control::view::{
    Branch, BranchState, ClaimHead, Held, RungState, RungView, Shortage, State, UseKind,
};

use crate::output::{Tone, human};

/// The size that a claim asks for, as a person wrote it if it is beyond all sizes or no size at all.
pub fn asks_for(head: &ClaimHead, show: impl Fn(Option<Bytes>) -> String) -> String {
    let text = head.requested_text.clone();
    text.unwrap_or_else(|| show(head.requested))
}

/// The tone of a claim's state.
pub fn tone_of_state(state: &State) -> Tone {
    match state {
        State::Bound => Tone::Good,
        State::Pending | State::Growing | State::Terminating | State::Foreign(_) => Tone::Moving,
        State::Held(_) | State::Degraded(_) | State::Lost => Tone::Bad,
    }
}

/// A rung's name, with the pool where there may be several copies.
pub fn rung_title(rung: &RungView) -> String {
    match &rung.pool {
        Some(pool) => format!("{} on pool {pool}", rung.rung),
        None => rung.rung.to_string(),
    }
}

/// A rung's state.
pub fn rung_state(rung: &RungView) -> String {
    match (rung.state, &rung.hold) {
        (RungState::Held, Some(hold)) => format!("held {}", hold.reason),
        (RungState::Held, None) => "held".to_owned(),
        (RungState::Ok, _) => "ok".to_owned(),
        (RungState::Rising, _) => "rising".to_owned(),
        (RungState::Waiting, _) => "waiting".to_owned(),
        (RungState::GrowsWhenMounted, _) => "grows when mounted".to_owned(),
        (RungState::Unheard, _) => rung.copy.clone().unwrap_or_else(|| "unheard".to_owned()),
    }
}

/// The tone of a rung's state.
pub fn tone_of_rung(state: RungState) -> Tone {
    match state {
        RungState::Ok => Tone::Good,
        RungState::Rising | RungState::Waiting => Tone::Moving,
        RungState::Held | RungState::GrowsWhenMounted | RungState::Unheard => Tone::Bad,
    }
}

/// What uses a volume, and where.
pub fn branch_title(branch: &Branch) -> String {
    let kind = match (branch.consumer, branch.read_only) {
        (UseKind::Mount, false) => "mount",
        (UseKind::Mount, true) => "read-only mount",
        (UseKind::Device, false) => "device",
        (UseKind::Device, true) => "read-only device",
    };
    format!("{kind} {} on node {}", branch.path, branch.node)
}

/// A branch's state.
pub fn branch_state(branch: &Branch) -> String {
    match (branch.state, &branch.hold) {
        (BranchState::Held, Some(held)) => format!("held {}", held.hold.reason),
        (BranchState::Held, None) => "held".to_owned(),
        (BranchState::Ok, _) => "ok".to_owned(),
        (BranchState::Rising, _) => "rising".to_owned(),
        (BranchState::Waiting, _) => "waiting".to_owned(),
        (BranchState::Pending, _) => "not attached yet".to_owned(),
        (BranchState::Leaving, _) => "leaving".to_owned(),
    }
}

/// The tone of a branch's state.
pub fn tone_of_branch(state: BranchState) -> Tone {
    match state {
        BranchState::Ok => Tone::Good,
        BranchState::Held => Tone::Bad,
        BranchState::Rising
        | BranchState::Waiting
        | BranchState::Pending
        | BranchState::Leaving => Tone::Moving,
    }
}

/// How many of several uses have what is asked for; nothing if all have, or if there is one at most.
pub fn uses_behind(branches: &[Branch]) -> Option<String> {
    let is_well = |branch: &&Branch| branch.state == BranchState::Ok;
    let well = branches.iter().filter(is_well).count();
    let all = branches.len();
    let have = if well == 1 { "has" } else { "have" };
    (all > 1 && well < all).then(|| format!("{well} of {all} uses {have} what is asked for"))
}

/// Where something is held; none if it is the claim as a whole.
pub fn held_at(held: &Held) -> Option<String> {
    let place = held.path.as_ref().zip(held.node.as_ref());
    let place = place.map(|(path, node)| format!("{path} on node {node}"));
    match (held.rung, place) {
        (Some(rung), Some(place)) => Some(format!("the {rung} of {place}")),
        (Some(rung), None) => Some(format!("the {rung}")),
        (None, place) => place,
    }
}

/// What is full or gone, in a sentence.
pub fn shortage(shortage: &Shortage) -> String {
    match shortage {
        Shortage::FilesystemFull { used } => format!(
            "Its filesystem is full: {} are used, and whoever writes to it gets \"no space left on device\". Grow the \
             claim (`trellis grow CLAIM +25%`), or delete something.",
            human(*used)
        ),
        Shortage::NoInodes { used } => format!(
            "Its filesystem has no inode left: {used} are used, and no file can be made. Grow the claim (`trellis grow \
             CLAIM +25%`), or delete files."
        ),
        Shortage::PoolGone { pool, path } => format!(
            "Pool {pool:?} is gone: {path} is not there, or is not the pool that it was. Is its disk mounted?"
        ),
        Shortage::PoolFull { pool, path, free } => format!(
            "Pool {pool:?} is full: {} are free on the filesystem of {path}. What was never written to the volume cannot \
             be written. Free space there, or add a pool.",
            human(*free)
        ),
    }
}
