//! What is wrong with a claim, where, and what was measured of it.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use trellis_api::kinds::{Pool, Usage};

use super::copies::degraded;
use super::head::Origin;
use super::ladder::{Branch, Ladder};
use super::measured::{ClaimNow, PoolNow};
use super::shortage::Shortage;
use super::{ClaimHead, Held, RungView, State};
use crate::stored::StoredClaim;

/// An explanation.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// Which claim.
    #[serde(flatten)]
    pub head: ClaimHead,
    /// Its state.
    pub state: State,
    /// What holds it, or what it lacks.
    pub hold: Option<Held>,
    /// Who serves it, if that is another provisioner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provisioner: Option<String>,
    /// What its copies lack besides that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<String>,
    /// The trunk: the copies and what is served of them, lowest first.
    pub trunk: Vec<RungView>,
    /// A branch for each use.
    pub branches: Vec<Branch>,
    /// The filesystem of a volume that nobody uses.
    pub idle: Option<RungView>,
    /// How full its filesystem is, if it is mounted where it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// What is full or gone below it. Whoever shows it says so in sentences.
    #[serde(skip)]
    pub shortages: Vec<Shortage>,
}

impl Explanation {
    /// Explains a claim, given what was just measured of it and of the pools of its copies.
    pub fn of(
        look: &StoredClaim,
        measured: &ClaimNow,
        pools: &[(Pool, PoolNow)],
        now: Timestamp,
    ) -> Explanation {
        let ladder = Ladder::of(look, now);
        let state = State::of(look, now);
        let is_said = matches!(state, State::Degraded(_));
        let lacks = degraded(look, now).map(|hold| hold.message);
        let of_filesystem = measured.usage.as_ref().and_then(Shortage::of_filesystem);
        let of_pools = pools.iter();
        let of_pools = of_pools.filter_map(|(pool, found)| Shortage::of_pool(pool, found));
        Explanation {
            hold: state.fault().cloned(),
            state,
            provisioner: match &ladder.head.origin {
                Origin::Other(provisioner) => Some(provisioner.clone()),
                Origin::Ours | Origin::ByHand(_) => None,
            },
            copies: lacks.filter(|_| !is_said),
            trunk: ladder.trunk,
            branches: ladder.branches,
            idle: ladder.idle,
            usage: measured.usage.clone(),
            shortages: of_filesystem.into_iter().chain(of_pools).collect(),
            head: ladder.head,
        }
    }
}
