//! What is to be written next for one volume. Pure: computed from a view of the stored objects.
//!
//! A plan holds only writes that do not depend on each other. When they are stored, their events bring the volume here
//! again, and the next plan continues from what is stored then. Nothing is remembered between two plans.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use trellis_api::Hold;
use trellis_api::kinds::Volume;

use super::{grow, provision, reclaim, status};
use crate::plan::{Note, Plan, claim_place};
use crate::view::View;
use crate::volume::rooms::Rooms;
use crate::volume::{copies, recovery, space};
use crate::write::Write;

/// The next writes for the volume in `view`.
pub fn plan(view: &View, rooms: &dyn Rooms, now: &MicroTime) -> Plan {
    match (&view.claim, &view.volume) {
        (Some(claim), _) if claim.metadata.deletion_timestamp.is_some() => {
            reclaim::release_claim(view, claim)
        }
        (Some(claim), None) => provision::begin(view, claim, rooms, now),
        (Some(claim), Some(volume)) => match provision::complete(view, claim, volume)
            .or_else(|| recovery::record(view, claim, volume, now))
        {
            Some(plan) => plan,
            None => match copies::adjust(view, volume, rooms) {
                Ok(Some(plan)) => plan,
                Ok(None) => {
                    let plan = grow::advance(view, claim, volume, rooms, None, now);
                    tell_of_copies(view, claim, volume, None, plan, now)
                }
                Err(hold) => {
                    let plan = grow::advance(view, claim, volume, rooms, Some(hold.clone()), now);
                    tell_of_copies(view, claim, volume, Some(&hold), plan, now)
                }
            },
        },
        (None, _) => reclaim::reclaim(view),
    }
}

/// Makes the claim say what holds its copies, and whose pools are full. Other writes to the claim come first: they
/// outdate what was seen.
fn tell_of_copies(
    view: &View,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    hold: Option<&Hold>,
    mut plan: Plan,
    now: &MicroTime,
) -> Plan {
    let place = claim_place(claim);
    let is_of_claim = |write: &Write| matches!(write, Write::PatchStatus(of, _) if *of == place);
    if plan.writes.iter().any(is_of_claim) {
        return plan;
    }
    let full = space::full_pools(view, volume);
    let said = [(status::COPIES, hold), (status::POOL_FULL, full.as_ref())];
    if let Some(body) = status::of_copies(claim, &said, now) {
        plan.writes
            .push(Write::PatchStatus(place, status::pinned(claim, body)));
        let new = said
            .into_iter()
            .filter_map(|(kind, hold)| Some((kind, hold?)))
            .filter(|(kind, hold)| !status::says(claim, kind, hold));
        plan.notes
            .extend(new.map(|(kind, hold)| Note::held(claim, kind, hold)));
    }
    plan
}
