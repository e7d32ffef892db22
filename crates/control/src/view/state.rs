//! A claim's state in one word.

use k8s_openapi::jiff::Timestamp;
use serde::{Serialize, Serializer};

use super::copies::degraded;
use super::head::{Origin, is_growing, phase};
use super::held::{Held, held};
use crate::stored::StoredClaim;

/// A claim's state. In a structure for programs it is its word alone.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// It has no volume yet, and nothing is in the way.
    Pending,
    /// It has the size that it asks for.
    Bound,
    /// It is on its way to the size that it asks for.
    Growing,
    /// Something holds it.
    Held(Held),
    /// It has the size that it asks for, but fewer copies than it asks for.
    Degraded(Held),
    /// Another provisioner serves it.
    Foreign(String),
    /// It is being deleted.
    Terminating,
    /// It has lost its volume.
    Lost,
}

impl State {
    /// The state of a claim.
    pub fn of(look: &StoredClaim, now: Timestamp) -> State {
        if let Origin::Other(provisioner) = Origin::of(look) {
            return State::Foreign(provisioner);
        }
        if let Some(held) = held(look, now) {
            return State::Held(held);
        }
        let lacks = || degraded(look, now).map(Held::of_claim);
        let claim = look.claim.as_deref();
        let deleted = claim.is_some_and(|claim| claim.metadata.deletion_timestamp.is_some());
        match claim.and_then(phase) {
            _ if deleted => State::Terminating,
            Some("Bound") if is_growing(look) => State::Growing,
            Some("Bound") => lacks().map_or(State::Bound, State::Degraded),
            Some("Lost") => State::Lost,
            _ => State::Pending,
        }
    }

    /// The state without its code.
    pub fn word(&self) -> &'static str {
        match self {
            State::Pending => "Pending",
            State::Bound => "Bound",
            State::Growing => "Growing",
            State::Held(_) => "Held",
            State::Degraded(_) => "Degraded",
            State::Foreign(_) => "Foreign",
            State::Terminating => "Terminating",
            State::Lost => "Lost",
        }
    }

    /// What is wrong, if something is.
    pub fn fault(&self) -> Option<&Held> {
        match self {
            State::Held(held) | State::Degraded(held) => Some(held),
            _ => None,
        }
    }
}

impl Serialize for State {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(self.word())
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.fault() {
            Some(held) => write!(out, "{} {}", self.word(), held.hold.reason),
            None => out.pad(self.word()),
        }
    }
}
