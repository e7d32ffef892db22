//! The condition `Resizing` of the layers below a claim: whether a layer is still growing, what holds it, and since
//! when that growth has been wanted.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use trellis_api::kinds::conditions::Says;
use trellis_api::{Bytes, Hold};

use crate::claim::status;
use crate::view::View;

/// What is asked of the layers of a volume.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// When the growth to the present goal began.
    began: Option<MicroTime>,
    /// A growth that cannot be granted now, so that no goal below the claim was raised.
    refused: Option<Refused>,
}

#[derive(Clone, Debug)]
struct Refused {
    reason: String,
    message: String,
    since: Option<MicroTime>,
}

impl Asked {
    /// What is asked of the layers of the volume in `view`.
    pub fn of(view: &View) -> Asked {
        let volume = view.volume.as_ref();
        let growth = volume.and_then(|volume| volume.spec.growth.as_ref());
        let goal = volume.map(|volume| volume.spec.capacity);
        let claim = view.claim.as_deref();
        let is_more = |size: Option<Bytes>| size.is_some_and(|size| Some(size) > goal);
        let wants_more = claim.is_some_and(|claim| is_more(status::allocated(claim)));
        let refusal = claim.filter(|_| wants_more).and_then(status::refusal);
        Asked {
            began: growth.map(|growth| growth.at.clone()),
            refused: refusal.map(|said| Refused {
                reason: said.reason.clone().unwrap_or_default(),
                message: said.message.clone().unwrap_or_default(),
                since: said.last_transition_time.as_ref().map(|at| MicroTime(at.0)),
            }),
        }
    }

    /// What a layer of `size` reports if it should have `goal` and `hold` keeps it from that.
    pub fn says<'a>(&'a self, size: Bytes, goal: Bytes, hold: Option<&'a Hold>) -> Says<'a> {
        let kind = "Resizing";
        let began = self.began.as_ref();
        let is_true = size < goal;
        if !is_true && let Some(refused) = &self.refused {
            return Says {
                kind,
                is_true: true,
                reason: &refused.reason,
                message: &refused.message,
                began: refused.since.as_ref(),
            };
        }
        let (reason, message) = match hold.filter(|_| is_true) {
            Some(hold) => (hold.reason.code(), hold.message.as_str()),
            None if is_true => ("Growing", ""),
            None => ("Reached", ""),
        };
        Says {
            kind,
            is_true,
            reason,
            message,
            began,
        }
    }
}
