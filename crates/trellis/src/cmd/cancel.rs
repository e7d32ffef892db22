//! `trellis cancel`: cancels the part of a growth that is not committed yet, and says what was undone and what was not.
//!
//! A cluster's API server does not allow a request to go back to exactly the size that a claim reports, only to one
//! above it (for the size itself it answers "field can not be less than status.capacity"). So if nothing has been
//! committed yet, the request is lowered to the next size that a volume can have.

use serde::Serialize;
use trellis_api::Bytes;
use trellis_control::stored::StoredClaim;
use trellis_control::view::{goal, is_bound, is_growing, reported, requested};

use super::patch;
use crate::cli::{Cancel, Global};
use crate::connect::connect;
use crate::load::load;
use crate::output;

/// Cancels a growth.
pub async fn run(global: &Global, verb: &Cancel) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let look = load(&service, &verb.claim).await?;
    let undoing = Undoing::of(&look);
    if let (Undoing::Lower { to, .. }, Some(claim)) = (undoing, &look.claim) {
        patch::request(&service, claim, to, false).await?;
    }
    let answer = Answer::new(&service.namespace, &verb.claim, &look, undoing);
    let text = output::text(verb.output, &answer, |_| format!("{}\n", answer.message))?;
    output::print(&text)
}

/// What can be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Undoing {
    /// No growth is under way.
    Nothing,
    /// It has no volume yet, and Kubernetes changes the request of bound claims only.
    Unbound,
    /// All that was asked for is already committed, or is the least that can be asked for.
    Committed,
    /// The request can be lowered.
    Lower {
        /// To this size.
        to: Bytes,
        /// The size that some copy already has.
        committed: Bytes,
    },
}

impl Undoing {
    fn of(look: &StoredClaim) -> Undoing {
        if !look.claim.as_deref().is_some_and(is_bound) {
            return Undoing::Unbound;
        }
        if !is_growing(look) {
            return Undoing::Nothing;
        }
        let capacity = reported(look).unwrap_or_default();
        let sizes = look
            .stored
            .replicas
            .iter()
            .filter_map(|each| each.status.as_ref()?.capacity);
        let committed = sizes.max().unwrap_or_default().max(capacity);
        let least = if committed > capacity {
            Some(committed)
        } else {
            let above = capacity.checked_add(Bytes::new(1));
            above.and_then(|above| above.checked_next_multiple_of(Bytes::MIB))
        };
        match least.filter(|to| *to < goal(look)) {
            Some(to) => Undoing::Lower { to, committed },
            None => Undoing::Committed,
        }
    }
}

/// What was undone and what was not.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    claim: String,
    namespace: String,
    /// Whether the request was lowered.
    changed: bool,
    /// The size that was asked for before.
    from: Option<Bytes>,
    /// The size that is asked for now.
    to: Option<Bytes>,
    message: String,
}

impl Answer {
    fn new(namespace: &str, claim: &str, look: &StoredClaim, undoing: Undoing) -> Answer {
        let from = requested(look);
        let asked = from.unwrap_or_default();
        let capacity = reported(look).unwrap_or_default();
        let (changed, to, message) = match undoing {
            Undoing::Nothing => {
                let message =
                    format!("claim {claim}: no growth is under way, so nothing was changed");
                (false, from, message)
            }
            Undoing::Unbound => {
                let message = format!(
                    "claim {claim}: nothing was changed; it has no volume yet, so no growth is under way, and Kubernetes changes the request of bound claims only: delete it and create it anew to ask for less"
                );
                (false, from, message)
            }
            Undoing::Committed => {
                let message = format!(
                    "claim {claim}: nothing was undone; {asked} is committed already and nothing shrinks, so the growth goes on"
                );
                (false, from, message)
            }
            Undoing::Lower { to, committed } if committed > capacity => {
                let message = format!(
                    "claim {claim}: called off the growth to {asked}; {to} stays, since a copy already has it and nothing shrinks"
                );
                (true, Some(to), message)
            }
            Undoing::Lower { to, .. } => {
                let message = format!(
                    "claim {claim}: called off the growth to {asked}; it asks for {to} now, the least above the {capacity} that it has, since Kubernetes takes no request back to that size itself"
                );
                (true, Some(to), message)
            }
        };
        Answer {
            claim: claim.to_owned(),
            namespace: namespace.to_owned(),
            changed,
            from,
            to,
            message,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use trellis_control::view::scenario;

    // Fails if a growth of which nothing is committed is not called off, or to a size that a cluster
    // refuses.
    #[test]
    fn a_growth_without_room_goes_back_to_just_above_the_size() {
        let expected = Undoing::Lower {
            to: Bytes::mib(1025),
            committed: Bytes::gib(1),
        };
        assert_eq!(Undoing::of(&scenario::refused()), expected);
    }

    // Fails if the part of a growth that a copy already has is called off, or the rest is not.
    #[test]
    fn a_growth_that_is_half_done_goes_back_to_what_is_committed() {
        let mut look = scenario::mounted(1, 4);
        look.stored.replicas = vec![Arc::new(scenario::replica(4, Some(2)))];
        let undoing = Undoing::of(&look);
        let expected = Undoing::Lower {
            to: Bytes::gib(2),
            committed: Bytes::gib(2),
        };
        assert_eq!(undoing, expected);
        let message = Answer::new("default", "data", &look, undoing).message;
        assert!(message.contains("2Gi stays"), "{message}");
    }

    // Fails if what a copy already has is promised to be undone.
    #[test]
    fn what_is_committed_stays() {
        assert_eq!(Undoing::of(&scenario::idle()), Undoing::Committed);
        assert_eq!(Undoing::of(&scenario::mounted(2, 2)), Undoing::Nothing);
        assert_eq!(Undoing::of(&scenario::pending()), Undoing::Unbound);
    }
}
