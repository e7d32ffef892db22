//! One claim among others: what it asks for, what it has, and how full it is.

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use trellis_api::kinds::Usage;
use trellis_api::{Bytes, Hold};

use super::head::ClaimHead;
use super::measured::ClaimNow;
use super::state::State;
use crate::stored::StoredClaim;

/// One claim, as programs read it; sizes are exact.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimLine {
    /// Which claim.
    #[serde(flatten)]
    pub head: ClaimHead,
    /// How full it is.
    pub usage: Option<Usage>,
    /// How much of what its users can have is used.
    pub use_percent: Option<u64>,
    /// Whether the usage was measured for this answer; otherwise its node reported it earlier.
    pub measured_now: bool,
    /// The space that its copies on this machine take on their disks.
    pub allocated: Option<Bytes>,
    /// Its state.
    pub state: State,
    /// What is wrong with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
    /// Where it appears.
    pub paths: Vec<String>,
    /// Its class.
    pub class: Option<String>,
    /// Its filesystem.
    pub filesystem: Option<&'static str>,
    /// The devices that carry it.
    pub devices: Vec<String>,
    /// The pools of its copies.
    pub pools: Vec<String>,
    /// Its volume.
    pub volume: Option<String>,
}

impl ClaimLine {
    /// The line of a claim.
    pub fn of(look: &StoredClaim, measured: ClaimNow, now: Timestamp) -> ClaimLine {
        let state = State::of(look, now);
        let spec = look.claim.as_deref().and_then(|claim| claim.spec.as_ref());
        let (stored, uses) = (&look.stored, &look.stored.attachments);
        let measured_now = measured.usage.is_some();
        // What was not measured now is shown as its node last reported it, with its age.
        let mut told = uses
            .iter()
            .filter_map(|each| each.status.as_ref()?.usage.clone());
        let usage = measured.usage.or_else(|| told.next());
        let devices = uses.iter();
        let devices = devices.filter_map(|each| each.status.as_ref()?.device.clone());
        let mut devices: Vec<String> = devices.collect();
        devices.dedup();
        let path = |each: &str| each.to_owned();
        let volume = stored.volume.as_ref();
        ClaimLine {
            head: ClaimHead::of(look),
            use_percent: usage.as_ref().map(use_percent),
            usage,
            measured_now,
            allocated: measured.allocated,
            hold: state.fault().map(|held| held.hold.clone()),
            state,
            paths: uses
                .iter()
                .map(|each| path(each.spec.consumer.path()))
                .collect(),
            class: spec.and_then(|spec| spec.storage_class_name.clone()),
            filesystem: volume.and_then(|volume| Some(volume.spec.filesystem?.name())),
            devices,
            pools: stored
                .replicas
                .iter()
                .map(|each| each.spec.pool.clone())
                .collect(),
            volume: volume.map(|volume| volume.name_any()),
        }
    }
}

/// As df does: of what a user can have, rounded up, so that a full volume never shows less than 100 %.
fn use_percent(usage: &Usage) -> u64 {
    let used = u128::from(usage.used.get());
    let all = used + u128::from(usage.available.get());
    let percent = (used * 100)
        .checked_div(all)
        .map_or(0, |_| (used * 100).div_ceil(all));
    u64::try_from(percent).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a full volume shows less than 100 %, or an empty one divides by nothing.
    #[test]
    fn use_is_rounded_up() {
        let usage = |used, available| Usage {
            used: Bytes::new(used),
            available: Bytes::new(available),
            inodes_used: 0,
            inodes_free: 0,
            observed_at: None,
        };
        assert_eq!(use_percent(&usage(1, 999)), 1);
        assert_eq!(use_percent(&usage(999, 1)), 100);
        assert_eq!(use_percent(&usage(0, 0)), 0);
    }
}
