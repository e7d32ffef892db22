//! How a volume stands: what was granted, what is served, what its uses have, and what holds it.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use kube::ResourceExt;
use serde_json::{Map, Value, json};
use trellis_api::kinds::conditions::{Says, renew};
use trellis_api::kinds::{COPIES_HELD, POOL_FULL, Volume, VolumePhase, VolumeStatus};
use trellis_api::{Bytes, Hold, HoldReason};

use super::{goals, history, space};
use crate::plan::Plan;
use crate::stored::StoredVolume;
use crate::world::TELL_AFTER;
use crate::write::{Object, Place, Write};

/// What a volume wants and does not have, as far as the pools are the reason.
#[derive(Debug, Default)]
pub struct Withheld {
    /// Why its size cannot be granted.
    pub refused: Option<Hold>,
    /// Why it does not have as many copies as it should. That does not stop a growth.
    pub copies_hold: Option<Hold>,
    /// Its node is lost: what was measured last may not be so any more.
    pub lost: Option<Hold>,
}

impl Withheld {
    /// Whether more room on a pool would help.
    pub fn waits_for_room(&self) -> bool {
        let is_about_room = |hold: &Hold| hold.reason != HoldReason::SizeTooLarge;
        self.refused.as_ref().is_some_and(is_about_room) || self.copies_hold.is_some()
    }
}

/// The status that follows from what was measured.
pub fn measure(
    stored: &StoredVolume,
    volume: &Volume,
    served: Bytes,
    withheld: &Withheld,
    is_idle: bool,
    now: &MicroTime,
) -> VolumeStatus {
    let goal = goals::goal(stored, volume);
    let usable = stored.usable();
    let is_reached = withheld.refused.is_none() && usable.is_some_and(|usable| usable >= goal);
    let granted = match &withheld.refused {
        Some(_) => stored.granted(),
        None => Some(goal),
    };
    let hold = withheld.lost.clone();
    let hold = hold.or_else(|| withheld.refused.clone());
    let hold = hold.or_else(|| stored.held(goal));
    let hold = hold.or_else(|| withheld.copies_hold.clone());
    let old = volume.status.clone().unwrap_or_default();
    let began = volume.spec.growth.as_ref().map(|growth| &growth.at);
    let full = space::full_pools(stored, volume);
    let told = [
        (COPIES_HELD, withheld.copies_hold.as_ref()),
        (POOL_FULL, full.as_ref()),
    ];
    VolumeStatus {
        phase: if is_reached {
            VolumePhase::Ready
        } else {
            VolumePhase::Resizing
        },
        granted,
        capacity: Some(served),
        usable,
        formatted: stored.is_formatted(),
        conditions: conditions(
            &old.conditions,
            is_reached,
            hold.as_ref(),
            withheld.lost.as_ref(),
            began,
            &told,
            now,
        ),
        hold,
        idle_since: is_idle.then(|| old.idle_since.unwrap_or_else(|| now.clone())),
        growths: history::succeeded(stored, volume, now),
        recoveries: old.recoveries,
    }
}

/// `Ready` and `Resizing`, of a growth that began at `began`, and what is told of the copies.
fn conditions(
    old: &[Condition],
    is_reached: bool,
    hold: Option<&Hold>,
    lost: Option<&Hold>,
    began: Option<&MicroTime>,
    told: &[(&str, Option<&Hold>)],
    now: &MicroTime,
) -> Vec<Condition> {
    let (reason, message) = match hold.filter(|_| !is_reached) {
        Some(hold) => (hold.reason.code(), hold.message.as_str()),
        None if is_reached => ("Reached", ""),
        None => ("Growing", ""),
    };
    let mut says = vec![
        Says {
            kind: "Ready",
            is_true: lost.is_none(),
            reason: lost.map_or("Served", |hold| hold.reason.code()),
            message: lost.map_or("", |hold| hold.message.as_str()),
            began: None,
        },
        Says {
            kind: "Resizing",
            is_true: !is_reached,
            reason,
            message,
            began,
        },
    ];
    says.extend(told.iter().filter_map(|(kind, hold)| {
        hold.map(|hold| Says {
            kind,
            is_true: true,
            reason: hold.reason.code(),
            message: &hold.message,
            began: None,
        })
    }));
    renew(old, &says, now)
}

/// Writes the volume's status if anything in it is new and worth a write already.
pub fn report(volume: &Volume, measured: &VolumeStatus, now: &MicroTime) -> Plan {
    let mut plan = Plan::default();
    let old = volume.status.clone().unwrap_or_default();
    if old == *measured {
        return plan;
    }
    if let Some(pause) = put_off(volume, measured, now) {
        plan.look_again_after = Some(pause);
        return plan;
    }
    let mut change = Map::new();
    change.insert("phase".to_owned(), json!(measured.phase));
    change.insert("granted".to_owned(), json!(measured.granted));
    change.insert("capacity".to_owned(), json!(measured.capacity));
    change.insert("usable".to_owned(), json!(measured.usable));
    if measured.formatted {
        change.insert("formatted".to_owned(), json!(true));
    }
    change.insert("hold".to_owned(), json!(measured.hold));
    change.insert("conditions".to_owned(), json!(measured.conditions));
    change.insert("idleSince".to_owned(), json!(measured.idle_since));
    if old.growths != measured.growths {
        change.insert("growths".to_owned(), json!(measured.growths));
    }
    plan.writes.push(write(volume, change));
    plan
}

/// How long to wait before reporting that a growth is under way. Most growths are over by then, and the write that is
/// saved would have delayed them.
fn put_off(volume: &Volume, measured: &VolumeStatus, now: &MicroTime) -> Option<Duration> {
    let under_way = measured.phase == VolumePhase::Resizing && measured.hold.is_none();
    let growth = volume.spec.growth.as_ref().filter(|_| under_way)?;
    let since = now.0.duration_since(growth.at.0);
    let since = Duration::try_from(since).ok()?;
    TELL_AFTER.checked_sub(since).filter(|rest| !rest.is_zero())
}

/// Its copies have no place: the volume says why.
pub fn unplaced(volume: &Volume, hold: Hold, now: &MicroTime) -> Plan {
    let old = volume.status.clone().unwrap_or_default();
    let says = [Says {
        kind: "Ready",
        is_true: false,
        reason: hold.reason.code(),
        message: &hold.message,
        began: None,
    }];
    let conditions = renew(&old.conditions, &says, now);
    if old.hold.as_ref() == Some(&hold) && old.conditions == conditions {
        return Plan::default();
    }
    let change = [
        ("hold".to_owned(), json!(hold)),
        ("conditions".to_owned(), json!(conditions)),
    ];
    Plan {
        writes: vec![write(volume, Map::from_iter(change))],
        ..Plan::default()
    }
}

/// A change of the volume's status, for the volume that was looked at and no later one.
pub fn write(volume: &Volume, change: Map<String, Value>) -> Write {
    let body = json!({
        "metadata": { "resourceVersion": volume.resource_version() },
        "status": change,
    });
    Write::PatchStatus(Place::named(Object::Volume, volume.name_any()), body)
}
