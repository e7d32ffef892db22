//! The rules that must hold after every step of a history, and when it has come to rest.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use trellis_api::Bytes;
use trellis_api::kinds::{GrowthResult, Replica, Target, Volume};

use super::simulation::{POOLS, Simulation, read};
use crate::claim::{provision, status};
use crate::world::volume_name;
use crate::write::{Object, Place};

/// What earlier steps have shown, to compare the next one with.
#[derive(Default)]
pub struct Rules {
    /// The sizes that were reported, by kind and uid.
    reported: BTreeMap<String, Bytes>,
    /// The claims that there ever were, by the names of their volumes.
    claims: BTreeMap<String, Known>,
}

/// What is known of a claim that may be gone.
#[derive(Default)]
struct Known {
    name: String,
    bound: bool,
}

fn rule(holds: bool, broken: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(broken()) }
}

impl Rules {
    /// Holds after every step.
    pub fn check(&mut self, simulation: &Simulation) -> Result<(), String> {
        let mistakes = simulation.machine.mistakes();
        rule(mistakes.is_empty(), || mistakes.join("; "))?;
        for claim in simulation.store.all(Object::Claim) {
            let claim: PersistentVolumeClaim = read(claim);
            let Some(key) = volume_name(&claim) else {
                continue;
            };
            let size = status::reported(&claim);
            self.only_grows(simulation, &format!("claim {key}"), &key, size)?;
            let known = self.claims.entry(key).or_default();
            known.name = claim.name_any();
            known.bound |= size.is_some();
        }
        for persistent in simulation.store.all(Object::PersistentVolume) {
            let persistent: PersistentVolume = read(persistent);
            let key = persistent.name_any();
            let gone = persistent.metadata.deletion_timestamp.is_some()
                || simulation.machine.size(&key).is_none();
            if !gone {
                let size = persistent_size(&persistent);
                self.only_grows(simulation, &format!("PV {key}"), &key, size)?;
            }
        }
        records_are_unique(simulation)
    }

    fn only_grows(
        &mut self,
        simulation: &Simulation,
        who: &str,
        key: &str,
        size: Option<Bytes>,
    ) -> Result<(), String> {
        let Some(size) = size else { return Ok(()) };
        let before = self.reported.insert(who.to_owned(), size);
        rule(before <= Some(size), || {
            format!("{who} went down from {before:?} to {size}")
        })?;
        let measured = simulation.machine.size(key);
        rule(Some(size) <= measured, || {
            format!("{who} reports {size}, measured is {measured:?}")
        })
    }

    /// Holds when nothing is left to do.
    pub fn check_at_rest(&self, simulation: &Simulation) -> Result<(), String> {
        for claim in simulation.store.all(Object::Claim) {
            claim_at_rest(simulation, &read(claim))?;
        }
        let living: Vec<String> = simulation
            .store
            .all(Object::Claim)
            .into_iter()
            .filter_map(|claim| volume_name(&read(claim)))
            .collect();
        for (key, known) in &self.claims {
            // A volume may outlast its claim as long as anything wants to use it.
            if !living.contains(key) && !is_used(simulation, &known.name) {
                reclaimed(simulation, key, known.bound)?;
            }
        }
        ledger_at_rest(simulation)
    }
}

fn persistent_size(persistent: &PersistentVolume) -> Option<Bytes> {
    let capacity = persistent.spec.as_ref()?.capacity.as_ref()?;
    capacity.get("storage")?.0.parse().ok()
}

fn is_used(simulation: &Simulation, claim: &str) -> bool {
    let uses = simulation.store.all(Object::Attachment);
    uses.iter().any(|each| each["spec"]["claimName"] == claim)
}

/// A growth ends once.
fn records_are_unique(simulation: &Simulation) -> Result<(), String> {
    for volume in simulation.store.all(Object::Volume) {
        let volume: Volume = read(volume);
        let records = volume
            .status
            .map(|status| status.growths)
            .unwrap_or_default();
        let mut ended: Vec<_> = records
            .iter()
            .filter(|each| each.result != GrowthResult::Cancelled)
            .map(|each| each.requested_at.clone())
            .collect();
        let count = ended.len();
        ended.dedup();
        rule(ended.len() == count, || {
            format!("a growth ended twice: {records:?}")
        })?;
    }
    Ok(())
}

fn claim_at_rest(simulation: &Simulation, claim: &PersistentVolumeClaim) -> Result<(), String> {
    let name = claim.name_any();
    let key = volume_name(claim).unwrap_or_default();
    if claim.metadata.deletion_timestamp.is_some() {
        return rule(is_used(simulation, &name), || {
            format!("{name} is not used and does not go")
        });
    }
    let conditions = claim
        .status
        .as_ref()
        .and_then(|status| status.conditions.clone());
    let says = conditions.iter().flatten().any(|each| {
        [
            "Held",
            "ControllerResizeError",
            "FileSystemResizePending",
            "NodeResizeError",
        ]
        .contains(&each.type_.as_str())
            && each.reason.is_some()
    });
    let Some(volume) = simulation.store.get(&Place::named(Object::Volume, &key)) else {
        return rule(says, || {
            format!("{name} has no volume and does not say why")
        });
    };
    let volume: Volume = read(volume);
    let hold = volume
        .status
        .as_ref()
        .and_then(|status| status.hold.clone());
    let goal = provision::goal(status::requested(claim).unwrap_or_default()).ok();
    let reached = status::reported(claim) >= goal && status::progress(claim).is_none();
    rule(reached || says || hold.is_some(), || {
        format!("{name} is not at {goal:?} and does not say why: {claim:?} {volume:?}")
    })?;
    let lacks_copies = volume.spec.is_behind_target() && {
        let wanted = usize::try_from(volume.spec.replicas).unwrap_or(usize::MAX);
        let stays = |copy: &&Replica| copy.metadata.deletion_timestamp.is_none();
        simulation.copies(&key).iter().filter(stays).count() != wanted
    };
    rule(
        !(reached && !lacks_copies && (says || hold.is_some())),
        || format!("{name} is where it should be and complains: {conditions:?} {hold:?}"),
    )?;
    if status::progress(claim) == Some("ControllerResizeInfeasible") {
        return Ok(());
    }
    goals_agree(simulation, &volume)
}

/// What is reserved is what is wished for.
fn goals_agree(simulation: &Simulation, volume: &Volume) -> Result<(), String> {
    let key = volume.name_any();
    let target = simulation.store.get(&Place::named(Object::Target, &key));
    let copies = simulation.copies(&key);
    let Some(target) = target.filter(|_| !copies.is_empty()) else {
        return Err(format!("{key} lacks its parts"));
    };
    let target: Target = read(target);
    let mut goals = vec![volume.spec.capacity, target.spec.capacity];
    goals.extend(copies.iter().map(|copy| copy.spec.capacity));
    rule(goals.iter().all(|goal| *goal == goals[0]), || {
        format!("the goals of {key} differ: {goals:?}")
    })?;
    copies_at_rest(&key, volume, &target, &copies)
}

/// There are as many copies as are asked for, on pools of their own, and all of them count.
fn copies_at_rest(
    key: &str,
    volume: &Volume,
    target: &Target,
    copies: &[Replica],
) -> Result<(), String> {
    if !volume.spec.is_behind_target() {
        return Ok(());
    }
    let status = volume.status.as_ref();
    if status.is_some_and(|status| status.hold.is_some()) {
        return Ok(());
    }
    let wanted = usize::try_from(volume.spec.replicas).unwrap_or(usize::MAX);
    rule(copies.len() == wanted, || {
        format!("{key} has {} copies and shall have {wanted}", copies.len())
    })?;
    let mut pools: Vec<&str> = copies.iter().map(|copy| copy.spec.pool.as_str()).collect();
    pools.sort_unstable();
    pools.dedup();
    rule(pools.len() == copies.len(), || {
        format!("copies of {key} share a pool: {pools:?}")
    })?;
    let members = target
        .status
        .as_ref()
        .and_then(|status| status.members.as_ref());
    let count = |copy: &Replica| {
        let id = copy.identity();
        members.is_some_and(|members| members.replicas.contains(&id))
    };
    rule(copies.iter().all(count), || {
        format!("not all copies of {key} count: {members:?}")
    })
}

fn reclaimed(simulation: &Simulation, key: &str, bound: bool) -> Result<(), String> {
    let there = |object, name: String| simulation.store.get(&Place::named(object, name)).is_some();
    let volume = there(Object::Volume, key.to_owned());
    let replica = !simulation.copies(key).is_empty();
    let data = simulation.machine.has_bytes(key);
    let place = Place::named(Object::PersistentVolume, key);
    let Some(persistent) = simulation.store.get(&place) else {
        let target = there(Object::Target, key.to_owned());
        return rule(!volume && !replica && !target && !data, || {
            format!(
                "{key} left something: volume {volume}, target {target}, replica {replica}, data {data}"
            )
        });
    };
    let spec = &persistent["spec"];
    rule(spec["persistentVolumeReclaimPolicy"] == "Retain", || {
        format!("{key} should be gone and is {persistent}")
    })?;
    rule(persistent["status"]["phase"] == "Released", || {
        format!("{key} is kept and not released: {persistent}")
    })?;
    rule(!bound || (volume && replica && data), || {
        format!("{key} was kept and has lost its bytes")
    })
}

/// The ledger has forgotten no reservation and remembers none that is gone.
fn ledger_at_rest(simulation: &Simulation) -> Result<(), String> {
    let reservations = simulation.stored_reservations();
    for pool in POOLS {
        let held = reservations.iter().filter(|(_, (on, _))| on == pool);
        let stored: Bytes = held
            .map(|(replica, (_, goal))| {
                let place = Place::named(Object::Replica, replica);
                let replica = simulation.store.get(&place).map(read::<Replica>);
                let measured = replica.and_then(|each| each.status?.capacity);
                measured.unwrap_or_default().max(*goal)
            })
            .sum();
        let reserved = simulation.world.ledger.open().reserved_beside(pool, "");
        rule(reserved == stored, || {
            format!("{reserved} is reserved on {pool}, and {stored} is stored")
        })?;
    }
    Ok(())
}
