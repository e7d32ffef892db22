//! The rules that must hold after every step of a history, and when it has come to rest.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use trellis_api::kinds::{Attachment, AttachmentPhase, GrowthResult, Replica, Target, Volume};
use trellis_api::{Bytes, HoldReason};

use super::law::{Breach, Law, rule};
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
    /// The identity and the size of every copy on a disk, by machine and name.
    copies: BTreeMap<(usize, String), (String, Bytes)>,
}

/// What is known of a claim that may be gone.
#[derive(Default)]
struct Known {
    name: String,
    bound: bool,
}

impl Rules {
    /// Holds after every step.
    pub fn check(&mut self, simulation: &Simulation) -> Result<(), Breach> {
        one_acknowledges(simulation)?;
        if let Some(first) = simulation.fabric.breaches().into_iter().next() {
            return Err(first);
        }
        self.copies_are_kept(simulation)?;
        for claim in simulation.store.all(Object::Claim) {
            let claim: PersistentVolumeClaim = read(claim);
            let Some(key) = volume_name(&claim) else {
                continue;
            };
            let size = status::reported(&claim);
            self.is_finished_late_enough(simulation, &key, size)?;
            self.only_grows(simulation, &format!("claim {key}"), &key, size)?;
            let known = self.claims.entry(key).or_default();
            known.name = claim.name_any();
            known.bound |= size.is_some();
        }
        for persistent in simulation.store.all(Object::PersistentVolume) {
            let persistent: PersistentVolume = read(persistent);
            let key = persistent.name_any();
            let gone = persistent.metadata.deletion_timestamp.is_some()
                || simulation.fabric.size(&key).is_none();
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
    ) -> Result<(), Breach> {
        let Some(size) = size else { return Ok(()) };
        let before = self.reported.insert(who.to_owned(), size);
        rule(Law::NothingShrinks, before <= Some(size), || {
            format!("{who} went down from {before:?} to {size}")
        })?;
        let measured = simulation.fabric.size(key);
        rule(Law::MeasuredFirst, Some(size) <= measured, || {
            format!("{who} reports {size}, measured is {measured:?}")
        })?;
        Ok(())
    }

    /// A claim that has just got a larger size has it wherever it is used.
    fn is_finished_late_enough(
        &self,
        simulation: &Simulation,
        key: &str,
        size: Option<Bytes>,
    ) -> Result<(), Breach> {
        let before = self.reported.get(&format!("claim {key}")).copied();
        let Some(size) = size.filter(|_| before.is_some() && before < size) else {
            return Ok(());
        };
        let branches = simulation.fabric.branches(key);
        let is_reached = branches.iter().all(|(_, measured)| *measured >= size);
        rule(Law::MeasuredFirst, is_reached, || {
            format!("claim {key} rose to {size}, and its uses have {branches:?}")
        })
    }

    /// A copy stays until its object was deleted, and keeps what it has.
    fn copies_are_kept(&mut self, simulation: &Simulation) -> Result<(), Breach> {
        let now = simulation.fabric.copies();
        for (place, (id, was)) in &self.copies {
            let size = now
                .get(place)
                .filter(|(of, _)| of == id)
                .map(|(_, size)| *size);
            let (node, name) = place;
            let may_go = size.is_some() || simulation.store.was_marked(id);
            rule(Law::RemovedWasDeleted, may_go, || {
                format!("copy {name} on node {node} is gone, and nobody has deleted it")
            })?;
            rule(
                Law::NothingShrinks,
                size.is_none_or(|size| size >= *was),
                || format!("copy {name} on node {node} went down from {was} to {size:?}"),
            )?;
        }
        self.copies = now;
        Ok(())
    }

    /// Holds when nothing is left to do.
    pub fn check_at_rest(&self, simulation: &Simulation) -> Result<(), Breach> {
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
        for attachment in simulation.store.all(Object::Attachment) {
            use_at_rest(&read(attachment))?;
        }
        ledger_at_rest(simulation)
    }
}

fn one_acknowledges(simulation: &Simulation) -> Result<(), Breach> {
    for (volume, nodes) in simulation.fabric.acknowledging() {
        rule(Law::OneAcknowledges, nodes.len() <= 1, || {
            format!("targets of {volume} on nodes {nodes:?} can")
        })?;
    }
    Ok(())
}

/// A use exists or says why not. Nobody takes mounts away in these histories, so none is missed.
fn use_at_rest(attachment: &Attachment) -> Result<(), Breach> {
    let name = attachment.name_any();
    let status = attachment.status.as_ref();
    let hold = status.and_then(|status| status.hold.as_ref());
    let is_attached = status.is_some_and(|status| status.phase == AttachmentPhase::Attached);
    rule(Law::StuckSaysWhy, is_attached || hold.is_some(), || {
        format!("use {name} does not exist and does not say why: {attachment:?}")
    })?;
    let is_missed = hold.is_some_and(|hold| hold.reason == HoldReason::MountGone);
    rule(Law::UsersKeepTheirs, !is_missed, || {
        format!("use {name} is gone, and nobody has taken it away")
    })
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
fn records_are_unique(simulation: &Simulation) -> Result<(), Breach> {
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
        rule(Law::GrowthEndsOnce, ended.len() == count, || {
            format!("a growth ended twice: {records:?}")
        })?;
    }
    Ok(())
}

fn claim_at_rest(simulation: &Simulation, claim: &PersistentVolumeClaim) -> Result<(), Breach> {
    let name = claim.name_any();
    let key = volume_name(claim).unwrap_or_default();
    if claim.metadata.deletion_timestamp.is_some() {
        return rule(Law::StuckSaysWhy, is_used(simulation, &name), || {
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
        return rule(Law::StuckSaysWhy, says, || {
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
    rule(Law::StuckSaysWhy, reached || says || hold.is_some(), || {
        format!("{name} is not at {goal:?} and does not say why: {claim:?} {volume:?}")
    })?;
    let lacks_copies = volume.spec.is_behind_target() && {
        let wanted = usize::try_from(volume.spec.replicas).unwrap_or(usize::MAX);
        let stays = |copy: &&Replica| copy.metadata.deletion_timestamp.is_none();
        simulation.copies(&key).iter().filter(stays).count() != wanted
    };
    let is_complete = reached && !lacks_copies && !lacks_uses(simulation, &key);
    rule(
        Law::Arrives,
        !(is_complete && (says || hold.is_some())),
        || format!("{name} is where it should be and complains: {conditions:?} {hold:?}"),
    )?;
    if status::progress(claim) == Some("ControllerResizeInfeasible") {
        return Ok(());
    }
    goals_agree(simulation, &volume)
}

/// Whether a use of the volume does not exist.
fn lacks_uses(simulation: &Simulation, volume: &str) -> bool {
    let uses = simulation.store.all(Object::Attachment).into_iter();
    let mut uses = uses.map(read::<Attachment>);
    uses.any(|each| {
        let status = each.status.as_ref();
        each.volume() == Some(volume) && status.is_none_or(|status| status.hold.is_some())
    })
}

/// What is reserved is what is wished for.
fn goals_agree(simulation: &Simulation, volume: &Volume) -> Result<(), Breach> {
    let key = volume.name_any();
    let target = simulation.store.get(&Place::named(Object::Target, &key));
    let copies = simulation.copies(&key);
    let Some(target) = target.filter(|_| !copies.is_empty()) else {
        return Err(Breach::of(Law::Arrives, format!("{key} lacks its parts")));
    };
    let target: Target = read(target);
    let mut goals = vec![volume.spec.capacity, target.spec.capacity];
    goals.extend(copies.iter().map(|copy| copy.spec.capacity));
    rule(
        Law::Arrives,
        goals.iter().all(|goal| *goal == goals[0]),
        || format!("the goals of {key} differ: {goals:?}"),
    )?;
    copies_at_rest(&key, volume, &target, &copies)
}

/// There are as many copies as are asked for, on pools of their own, and all of them count.
fn copies_at_rest(
    key: &str,
    volume: &Volume,
    target: &Target,
    copies: &[Replica],
) -> Result<(), Breach> {
    if !volume.spec.is_behind_target() {
        return Ok(());
    }
    let status = volume.status.as_ref();
    if status.is_some_and(|status| status.hold.is_some()) {
        return Ok(());
    }
    let wanted = usize::try_from(volume.spec.replicas).unwrap_or(usize::MAX);
    rule(Law::Arrives, copies.len() == wanted, || {
        format!("{key} has {} copies and shall have {wanted}", copies.len())
    })?;
    let mut pools: Vec<&str> = copies.iter().map(|copy| copy.spec.pool.as_str()).collect();
    pools.sort_unstable();
    pools.dedup();
    rule(Law::Arrives, pools.len() == copies.len(), || {
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
    rule(Law::Arrives, copies.iter().all(count), || {
        format!("not all copies of {key} count: {members:?}")
    })
}

fn reclaimed(simulation: &Simulation, key: &str, bound: bool) -> Result<(), Breach> {
    let there = |object, name: String| simulation.store.get(&Place::named(object, name)).is_some();
    let volume = there(Object::Volume, key.to_owned());
    let replica = !simulation.copies(key).is_empty();
    let data = simulation.fabric.has_bytes(key);
    let place = Place::named(Object::PersistentVolume, key);
    let Some(persistent) = simulation.store.get(&place) else {
        let target = there(Object::Target, key.to_owned());
        return rule(
            Law::Reclaimed,
            !volume && !replica && !target && !data,
            || {
                format!(
                    "{key} left something: volume {volume}, target {target}, replica {replica}, data {data}"
                )
            },
        );
    };
    let spec = &persistent["spec"];
    rule(
        Law::Reclaimed,
        spec["persistentVolumeReclaimPolicy"] == "Retain",
        || format!("{key} should be gone and is {persistent}"),
    )?;
    rule(
        Law::Reclaimed,
        persistent["status"]["phase"] == "Released",
        || format!("{key} is kept and not released: {persistent}"),
    )?;
    rule(
        Law::Reclaimed,
        !bound || (volume && replica && data),
        || format!("{key} was kept and has lost its bytes"),
    )
}

/// The ledger has forgotten no reservation and remembers none that is gone.
fn ledger_at_rest(simulation: &Simulation) -> Result<(), Breach> {
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
        let reserved = simulation
            .leading()
            .world
            .ledger
            .open()
            .reserved_beside(pool, "");
        rule(Law::RoomOnce, reserved == stored, || {
            format!("{reserved} is reserved on {pool}, and {stored} is stored")
        })?;
    }
    Ok(())
}
