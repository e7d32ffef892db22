//! One machine of the fabric, as the agent of its node sees it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};

use serde_json::json;
use trellis_api::kinds::{Content, EMPTY_CONTENT, FilesystemKind, UnknownCopy};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::fabric::{Copy, Fabric, Flaw, Host, Staged, State, whole_units};
use super::law::Law;
use crate::node::machine::{
    Consumers, Copies, CopyFound, PoolMeasured, Pools, Provided, ReplicaFound, ReplicaPlace,
    RungFound, Stage, StageFound, TargetFound, TargetPlace, Use,
};

pub struct Model {
    pub fabric: Arc<Fabric>,
    /// Which machine.
    pub at: usize,
}

impl Model {
    fn state(&self) -> MutexGuard<'_, State> {
        self.fabric.state()
    }
}

fn name_of(backing: &Path) -> String {
    backing
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

pub(super) fn missing(name: &str) -> Hold {
    Hold::new(
        HoldReason::ReplicaUnavailable,
        format!("{name} is not there."),
    )
}

pub(super) fn refused(state: &State, rung: Rung) -> Result<(), Hold> {
    let hold = || Hold::new(HoldReason::KernelRefused, format!("The {rung} is broken."));
    (state.broken != Some(rung)).then_some(()).ok_or_else(hold)
}

fn require_pool(state: &State, place: &ReplicaPlace) -> Result<(), Hold> {
    let is_there = state.pool_away.as_ref() != Some(&place.pool);
    is_there.then_some(()).ok_or_else(|| missing(&place.name))
}

fn found(place: &ReplicaPlace, size: Bytes) -> ReplicaFound {
    ReplicaFound {
        size,
        served: size,
        data: place.pool.join(&place.name),
    }
}

/// What can be read through a file: its size, and the size of the filesystem in it.
struct Shown {
    size: Bytes,
    filesystem: Option<Bytes>,
}

impl State {
    /// The file of a single copy, or the one through which a target on that machine shows its volume.
    fn shown(&self, at: usize, name: &str) -> Result<Shown, Hold> {
        if let Some(copy) = self.hosts[at].copies.get(name) {
            return Ok(Shown {
                size: copy.size,
                filesystem: copy.filesystem,
            });
        }
        let volume = self.volumes.get(name).filter(|_| self.serves(at, name));
        let volume = volume.ok_or_else(|| missing(name))?;
        Ok(Shown {
            size: volume.size(),
            filesystem: volume.filesystem(),
        })
    }

    fn fill(&mut self, at: usize, name: &str, size: Bytes) {
        let size = whole_units(size);
        match self.hosts[at].copies.get_mut(name) {
            Some(copy) => copy.filesystem = Some(size),
            None => self.set_filesystem(name, size),
        }
    }

    fn stage_found(&self, at: usize, name: &str, stage: &Stage) -> Result<StageFound, Hold> {
        let shown = self.shown(at, name)?;
        let staged = self.hosts[at].stages.get(name);
        let staged =
            staged.ok_or_else(|| Hold::new(HoldReason::DeviceGone, "It is not in use."))?;
        let lies = self.flaw == Some(Flaw::DeviceLies);
        let device = if lies { shown.size } else { staged.device };
        let mut rungs = vec![RungFound {
            rung: Rung::Device,
            size: device,
            full: false,
            note: None,
        }];
        if stage.filesystem.is_some() {
            let found = shown.filesystem.unwrap_or_default();
            let size = if lies { whole_units(device) } else { found };
            rungs.push(RungFound {
                rung: Rung::Filesystem,
                size,
                full: size >= whole_units(device),
                note: None,
            });
        }
        Ok(StageFound {
            device: "/dev/model".to_owned(),
            rungs,
            usage: None,
        })
    }

    /// Who counts is known by the copies alone: with the last one it is forgotten.
    fn forget_volume(&mut self, volume: &str) {
        let has_target = |host: &Host| host.targets.contains_key(volume);
        if !self.has_copies(volume) && !self.hosts.iter().any(has_target) {
            self.volumes.remove(volume);
        }
    }
}

impl Pools for Model {
    fn measure_pool(&self, _: &Path, _: Option<&str>) -> Result<PoolMeasured, Hold> {
        Err(Hold::new(
            HoldReason::PoolNotReady,
            "The histories set the sizes of pools.",
        ))
    }

    fn judge_pool(&self, _: &Path, _: &[(String, PathBuf)]) -> Result<(), Hold> {
        Ok(())
    }

    fn keep_pools(&self, _: &[PathBuf]) {}

    fn look_at_stranger(&self, _: &Path, _: &str, name: &str) -> UnknownCopy {
        UnknownCopy {
            name: name.to_owned(),
            claim: None,
            size: None,
        }
    }
}

impl Copies for Model {
    fn make_replica(&self, place: &ReplicaPlace, size: Bytes) -> Result<ReplicaFound, Hold> {
        let mut state = self.state();
        require_pool(&state, place)?;
        let copies = &mut state.hosts[self.at].copies;
        let copy = copies.entry(place.name.clone()).or_insert(Copy {
            id: place.replica_id.clone(),
            pool: place.pool.clone(),
            size,
            ..Copy::default()
        });
        if copy.id != place.replica_id {
            let message = format!("{} is there and is another's.", place.name);
            return Err(Hold::new(HoldReason::ReplicaDamaged, message));
        }
        Ok(found(place, copy.size))
    }

    fn find_replica(&self, place: &ReplicaPlace) -> Result<ReplicaFound, Hold> {
        let state = self.state();
        let copy = state.hosts[self.at].copies.get(&place.name);
        copy.map(|copy| found(place, copy.size))
            .ok_or_else(|| missing(&place.name))
    }

    fn raise_replica(&self, place: &ReplicaPlace, to: Bytes) -> Result<(), Hold> {
        let mut state = self.state();
        refused(&state, Rung::Replica)?;
        let Some(copy) = state.hosts[self.at].copies.get_mut(&place.name) else {
            return Err(missing(&place.name));
        };
        let was = copy.size;
        copy.size = was.max(to);
        if to < was {
            let what = format!("{} was to be lowered from {was} to {to}", place.name);
            state.breach(Law::NothingShrinks, what);
        }
        Ok(())
    }

    fn describe_replica(&self, _: &ReplicaPlace) -> Result<(), Hold> {
        Ok(())
    }

    fn remove_replica(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        let mut state = self.state();
        require_pool(&state, place)?;
        let copies = &mut state.hosts[self.at].copies;
        let is_own = |copy: &Copy| copy.id == place.replica_id;
        if copies.get(&place.name).is_some_and(|copy| !is_own(copy)) {
            let what = format!("{} was to be removed and is another's", place.name);
            state.breach(Law::RemovedWasDeleted, what);
            return Ok(());
        }
        let Some(copy) = copies.remove(&place.name) else {
            return Ok(());
        };
        if state.hosts[self.at].stages.contains_key(&place.name) {
            let what = format!("{} was removed while it was in use", place.name);
            state.breach(Law::UsersKeepTheirs, what);
        }
        state.forget_volume(&place.volume);
        // With its volume every copy goes.
        let is_of_volume = place.about.is_some();
        let counts = |volume: &super::targets::Agreed| volume.counts(&copy.id);
        if is_of_volume && state.volumes.values().any(counts) {
            let what = format!("{} was removed while it counted", place.name);
            state.breach(Law::CopiesStay, what);
        }
        Ok(())
    }

    fn serve_copy(&self, place: &ReplicaPlace) -> Result<CopyFound, Hold> {
        let mut state = self.state();
        require_pool(&state, place)?;
        let Some(copy) = state.hosts[self.at].copies.get_mut(&place.name) else {
            return Err(missing(&place.name));
        };
        (copy.is_of_several, copy.is_served) = (true, true);
        Ok(CopyFound {
            size: copy.size,
            data: place.pool.join(&place.name),
            address: format!("unix:/{}", place.name),
            link: Some(format!("tcp:{}/{}", self.at, place.name)),
            link_hold: None,
        })
    }

    fn is_there(&self, _: &Path) -> bool {
        true
    }

    fn serve_again(&self, _: &str) {}

    fn retire_copy(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        let mut state = self.state();
        let is_removed = state.flaw == Some(Flaw::RemovesRetired);
        let copies = &mut state.hosts[self.at].copies;
        if let Some(copy) = copies.get_mut(&place.name) {
            copy.is_served = false;
        }
        if is_removed {
            copies.clear();
        }
        Ok(())
    }

    fn serve_target(&self, target: &TargetPlace) -> Result<TargetFound, Hold> {
        self.state().serve_target(self.at, target)
    }

    fn raise_target(&self, target: &TargetPlace, to: Bytes) -> Result<(), Hold> {
        self.state().raise_target(self.at, target, to)
    }

    fn has_target(&self, volume: &str) -> bool {
        self.state().hosts[self.at].targets.contains_key(volume)
    }

    fn given_term(&self, volume: &str) -> Option<u32> {
        self.state().given_term(self.at, volume)
    }

    fn abandon_target(&self, volume: &str) -> Result<(), Hold> {
        self.state().abandon_target(self.at, volume);
        Ok(())
    }

    fn outbid(&self, volume: &str) -> Option<u32> {
        self.state().outbid(self.at, volume)
    }

    fn retire_target(&self, volume: &str) -> Result<(), Hold> {
        let mut state = self.state();
        state.retire_target(self.at, volume);
        state.forget_volume(volume);
        Ok(())
    }

    fn earlier_secret(&self, _volume: &str) -> Option<String> {
        None
    }

    fn target_backing(&self, volume: &str) -> PathBuf {
        PathBuf::from(volume)
    }
}

impl Consumers for Model {
    fn boot_id(&self) -> String {
        format!("run {} of {}", self.state().hosts[self.at].boots, self.at)
    }

    fn provide(&self, stage: &Stage, uses: &[Use]) -> Result<Provided, Hold> {
        let mut state = self.state();
        let name = name_of(&stage.backing);
        let shown = state.shown(self.at, &name)?;
        let stages = &mut state.hosts[self.at].stages;
        let is_gone = |each: &Use| {
            let staged = stages.get(&name);
            each.established && staged.is_none_or(|staged| !staged.uses.contains(&each.path))
        };
        let gone = || Hold::new(HoldReason::MountGone, "Somebody has taken it away.");
        let refused: Vec<Option<Hold>> = uses.iter().map(|each| is_gone(each).then(gone)).collect();
        if !stages.contains_key(&name) {
            let number = state.begin_use(&name);
            let staged = Staged {
                number,
                device: shown.size,
                ..Staged::default()
            };
            state.hosts[self.at].stages.insert(name.clone(), staged);
        }
        let staged = state.hosts[self.at].stages.entry(name.clone()).or_default();
        let provided = uses.iter().zip(&refused).filter(|(_, hold)| hold.is_none());
        staged
            .uses
            .extend(provided.map(|(each, _)| each.path.clone()));
        let device = staged.device;
        if stage.filesystem.is_some() && shown.filesystem.is_none() {
            state.fill(self.at, &name, device);
        }
        Ok(Provided {
            found: state.stage_found(self.at, &name, stage)?,
            refused,
        })
    }

    fn find_stage(&self, stage: &Stage) -> Result<StageFound, Hold> {
        self.state()
            .stage_found(self.at, &name_of(&stage.backing), stage)
    }

    fn raise_stage(&self, stage: &Stage, rung: Rung, to: Bytes) -> Result<(), Hold> {
        let mut state = self.state();
        refused(&state, rung)?;
        let name = name_of(&stage.backing);
        let shown = state.shown(self.at, &name)?;
        let staged = state.hosts[self.at].stages.get_mut(&name);
        let staged = staged.ok_or_else(|| missing(&name))?;
        let below = if rung == Rung::Device {
            staged.device = shown.size;
            shown.size
        } else {
            let device = staged.device;
            state.fill(self.at, &name, device);
            device
        };
        if below < to {
            let what = format!("the {rung} of {name} was raised to {to} above {below}");
            state.breach(Law::MeasuredFirst, what);
        }
        Ok(())
    }

    fn unpublish(&self, stage: &Stage, usage: &Use) -> Result<(), Hold> {
        let mut state = self.state();
        let stages = &mut state.hosts[self.at].stages;
        if let Some(staged) = stages.get_mut(&name_of(&stage.backing)) {
            staged.uses.remove(&usage.path);
        }
        Ok(())
    }

    fn unstage(&self, stage: &Stage) -> Result<(), Hold> {
        let mut state = self.state();
        let name = name_of(&stage.backing);
        let staged = state.hosts[self.at].stages.remove(&name);
        if staged.is_some_and(|staged| !staged.uses.is_empty()) {
            let what = format!("{name} was taken out of use before its uses had ended");
            state.breach(Law::UsersKeepTheirs, what);
        }
        Ok(())
    }

    fn content(&self, backing: &Path, size: Bytes) -> Option<Content> {
        let shown = self.state().shown(self.at, &name_of(backing)).ok()?;
        let found = match shown.filesystem {
            None => json!({ "kind": EMPTY_CONTENT, "full": true, "of": size }),
            Some(own) => {
                let full = own >= whole_units(size);
                json!({ "kind": "ext4", "size": own, "full": full, "of": size })
            }
        };
        serde_json::from_value(found).ok()
    }

    fn grow_idle(&self, backing: &Path, _: FilesystemKind) -> Result<(), Hold> {
        let mut state = self.state();
        refused(&state, Rung::Filesystem)?;
        let name = name_of(backing);
        let shown = state.shown(self.at, &name)?;
        if shown.filesystem.is_some() {
            state.fill(self.at, &name, shown.size);
        }
        if state.hosts[self.at].stages.contains_key(&name) {
            let what = format!("{name} was grown as if it were idle while it was in use");
            state.breach(Law::UsersKeepTheirs, what);
        }
        Ok(())
    }
}
