//! What is wrong with a claim that has its size, and which claims are not ours to judge.

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use trellis_api::Hold;
use trellis_api::kinds::{PROVISIONER, ReplicaState};
use trellis_control::claim::class::Class;
use trellis_control::view::View;
use trellis_control::volume::redundancy::{CopySeen, lacking};

use crate::output::age;

/// The annotation that names who made a persistent volume.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// The other provisioner that a claim belongs to, if it does.
pub fn other_provisioner(view: &View) -> Option<String> {
    if view.stored.volume.is_some() {
        return None;
    }
    let class = view.class.as_deref();
    let of_class = class.filter(|class| !Class::is_ours(class));
    let of_class = of_class.map(|class| class.provisioner.clone());
    let volume = view.persistent_volume.as_deref();
    let of_volume = volume.and_then(|volume| volume.annotations().get(PROVISIONED_BY));
    of_class.or_else(|| of_volume.filter(|name| *name != PROVISIONER).cloned())
}

/// The persistent volume of a claim that somebody made by hand.
pub fn made_by_hand(view: &View) -> Option<String> {
    let volume = view.persistent_volume.as_deref()?;
    view.stored.volume.is_none().then(|| volume.name_any())
}

/// What a replicated volume lacks.
pub fn degraded(view: &View, now: Timestamp) -> Option<Hold> {
    let volume = view.stored.volume.as_deref()?;
    lacking(&view.stored, volume, &|copy| with_age(copy, now))
}

/// The state of a copy, as a word of a table: what was seen last, and when if that is not now.
pub fn state_word(copy: &CopySeen, now: Timestamp) -> String {
    let word = copy.state.map_or("Unknown", ReplicaState::name);
    match &copy.silent_since {
        Some(since) => format!("{word} {}", age(since, now)),
        None => word.to_owned(),
    }
}

/// The state of a copy, in a sentence.
pub fn with_age(copy: &CopySeen, now: Timestamp) -> String {
    let word = state_word(copy, now);
    match copy.state {
        Some(ReplicaState::Repairing) => format!("{word} ({} left)", copy.repair_left),
        _ => word,
    }
}
