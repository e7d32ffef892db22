//! A machine in memory. Replicas, devices and filesystems are numbers; whatever would lose data on a real machine is
//! recorded as a mistake.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use serde_json::json;
use trellis_api::kinds::{Content, EMPTY_CONTENT, FilesystemKind, UnknownCopy};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::targets::Served;

use crate::node::machine::{
    Consumers, Copies, CopyFound, PoolMeasured, Pools, Provided, ReplicaFound, ReplicaPlace,
    RungFound, Stage, StageFound, TargetFound, TargetPlace, Use,
};

/// Filesystems grow in whole units of this size, and may leave the rest of a device unused.
const FILESYSTEM_UNIT: u64 = 8 << 20;

#[derive(Default)]
pub struct Model {
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// By name. What a target serves is here too, under the name of its volume: it is used in the same way.
    pub(super) replicas: HashMap<String, Copy>,
    /// By volume.
    pub(super) targets: HashMap<String, Served>,
    pub(super) broken: Option<Rung>,
    /// The pool whose copies cannot be reached.
    pub(super) pool_away: Option<PathBuf>,
    pub(super) mistakes: Vec<String>,
}

#[derive(Default)]
pub(super) struct Copy {
    pub(super) id: String,
    pub(super) pool: PathBuf,
    pub(super) size: Bytes,
    /// It is one of several.
    is_of_several: bool,
    /// Its process runs.
    pub(super) is_served: bool,
    filesystem: Option<Bytes>,
    /// The device's size while it is in use.
    pub(super) device: Option<Bytes>,
    uses: BTreeSet<PathBuf>,
}

impl Model {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no test panics while it holds this")
    }

    /// The rung that cannot be raised from now on, if any.
    pub fn break_rung(&self, rung: Option<Rung>) {
        self.state().broken = rung;
    }

    /// The pool that is away from now on, if any.
    pub fn lose_pool(&self, pool: Option<PathBuf>) {
        self.state().pool_away = pool;
    }

    /// What must not have happened and did.
    pub fn mistakes(&self) -> Vec<String> {
        self.state().mistakes.clone()
    }

    /// The true size of a volume: what its target serves, or what its only replica has.
    pub fn size(&self, volume: &str) -> Option<Bytes> {
        let state = self.state();
        let served = state.targets.get(volume).map(Served::size);
        let alone = || {
            let first = state.replicas.get(&format!("{volume}-0"));
            first.filter(|copy| !copy.is_of_several)
        };
        served.or_else(|| Some(alone()?.size))
    }

    /// Whether anything of a volume is left.
    pub fn has_bytes(&self, volume: &str) -> bool {
        let state = self.state();
        let of_volume = |name: &String| name.rsplit_once('-').is_some_and(|(of, _)| of == volume);
        state.targets.contains_key(volume) || state.replicas.keys().any(of_volume)
    }
}

fn whole_units(size: Bytes) -> Bytes {
    Bytes::new(size.get() - size.get() % FILESYSTEM_UNIT)
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

fn stage_found(copy: &Copy, stage: &Stage) -> Result<StageFound, Hold> {
    let device = copy
        .device
        .ok_or_else(|| Hold::new(HoldReason::DeviceGone, "It is not in use."))?;
    let mut rungs = vec![RungFound {
        rung: Rung::Device,
        size: device,
        full: false,
        note: None,
    }];
    if stage.filesystem.is_some() {
        let size = copy.filesystem.unwrap_or_default();
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
        let copy = state.replicas.entry(place.name.clone()).or_insert(Copy {
            id: place.replica_id.clone(),
            pool: place.pool.clone(),
            size,
            ..Copy::default()
        });
        Ok(found(place, copy.size))
    }

    fn find_replica(&self, place: &ReplicaPlace) -> Result<ReplicaFound, Hold> {
        let state = self.state();
        let copy = state.replicas.get(&place.name);
        copy.map(|copy| found(place, copy.size))
            .ok_or_else(|| missing(&place.name))
    }

    fn raise_replica(&self, place: &ReplicaPlace, to: Bytes) -> Result<(), Hold> {
        let mut state = self.state();
        refused(&state, Rung::Replica)?;
        let Some(copy) = state.replicas.get_mut(&place.name) else {
            return Err(missing(&place.name));
        };
        let was = copy.size;
        copy.size = was.max(to);
        if to < was {
            let mistake = format!("{} was to be lowered from {was} to {to}", place.name);
            state.mistakes.push(mistake);
        }
        Ok(())
    }

    fn describe_replica(&self, _: &ReplicaPlace) -> Result<(), Hold> {
        Ok(())
    }

    fn remove_replica(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        let mut state = self.state();
        require_pool(&state, place)?;
        let is_own = |copy: &Copy| copy.id == place.replica_id;
        if state
            .replicas
            .get(&place.name)
            .is_some_and(|copy| !is_own(copy))
        {
            let mistake = format!("{} was to be removed and is another's", place.name);
            state.mistakes.push(mistake);
            return Ok(());
        }
        let Some(copy) = state.replicas.remove(&place.name) else {
            return Ok(());
        };
        if copy.device.is_some() {
            let mistake = format!("{} was removed while it was in use", place.name);
            state.mistakes.push(mistake);
        }
        let of_volume = |name: &String| {
            name.rsplit_once('-')
                .is_some_and(|(of, _)| of == place.volume)
        };
        let has_others = state.replicas.keys().any(of_volume);
        if !has_others && !state.has_target(&place.volume) {
            // Who counts is known by the copies alone.
            state.targets.remove(&place.volume);
        }
        // With its volume every copy goes.
        let is_of_volume = place.about.is_some();
        if is_of_volume && state.targets.values().any(|target| target.counts(&copy.id)) {
            let mistake = format!("{} was removed while it counted", place.name);
            state.mistakes.push(mistake);
        }
        Ok(())
    }

    fn serve_copy(&self, place: &ReplicaPlace) -> Result<CopyFound, Hold> {
        let mut state = self.state();
        require_pool(&state, place)?;
        let Some(copy) = state.replicas.get_mut(&place.name) else {
            return Err(missing(&place.name));
        };
        (copy.is_of_several, copy.is_served) = (true, true);
        Ok(CopyFound {
            size: copy.size,
            data: place.pool.join(&place.name),
            address: format!("unix:/{}", place.name),
            link: None,
            link_hold: None,
        })
    }

    fn is_there(&self, _: &Path) -> bool {
        true
    }

    fn serve_again(&self, _: &str) {}

    fn retire_copy(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        if let Some(copy) = self.state().replicas.get_mut(&place.name) {
            copy.is_served = false;
        }
        Ok(())
    }

    fn serve_target(&self, target: &TargetPlace) -> Result<TargetFound, Hold> {
        Ok(self.state().serve_target(target))
    }

    fn raise_target(&self, target: &TargetPlace, to: Bytes) -> Result<(), Hold> {
        self.state().raise_target(target, to)
    }

    fn has_target(&self, volume: &str) -> bool {
        self.state().has_target(volume)
    }

    fn abandon_target(&self, volume: &str) -> Result<(), Hold> {
        let mistake = format!("{volume} was taken from its users, and there is one node");
        self.state().mistakes.push(mistake);
        Ok(())
    }

    fn outbid(&self, _: &str) -> Option<u32> {
        None
    }

    fn retire_target(&self, volume: &str) -> Result<(), Hold> {
        self.state().retire_target(volume);
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
        "the only run".to_owned()
    }

    fn provide(&self, stage: &Stage, uses: &[Use]) -> Result<Provided, Hold> {
        let mut state = self.state();
        let name = name_of(&stage.backing);
        let copy = state
            .replicas
            .get_mut(&name)
            .ok_or_else(|| missing(&name))?;
        let device = *copy.device.get_or_insert(copy.size);
        if stage.filesystem.is_some() && copy.filesystem.is_none() {
            copy.filesystem = Some(whole_units(device));
        }
        copy.uses.extend(uses.iter().map(|each| each.path.clone()));
        Ok(Provided {
            found: stage_found(copy, stage)?,
            refused: vec![None; uses.len()],
        })
    }

    fn find_stage(&self, stage: &Stage) -> Result<StageFound, Hold> {
        let state = self.state();
        let name = name_of(&stage.backing);
        let copy = state.replicas.get(&name).ok_or_else(|| missing(&name))?;
        stage_found(copy, stage)
    }

    fn raise_stage(&self, stage: &Stage, rung: Rung, to: Bytes) -> Result<(), Hold> {
        let mut state = self.state();
        refused(&state, rung)?;
        let name = name_of(&stage.backing);
        let copy = state
            .replicas
            .get_mut(&name)
            .ok_or_else(|| missing(&name))?;
        let below = if rung == Rung::Device {
            copy.device = Some(copy.size);
            copy.size
        } else {
            let device = copy.device.unwrap_or_default();
            copy.filesystem = Some(whole_units(device));
            device
        };
        if below < to {
            let mistake = format!("the {rung} of {name} was raised to {to} above {below}");
            state.mistakes.push(mistake);
        }
        Ok(())
    }

    fn unpublish(&self, stage: &Stage, usage: &Use) -> Result<(), Hold> {
        let mut state = self.state();
        if let Some(copy) = state.replicas.get_mut(&name_of(&stage.backing)) {
            copy.uses.remove(&usage.path);
        }
        Ok(())
    }

    fn unstage(&self, stage: &Stage) -> Result<(), Hold> {
        let mut state = self.state();
        let name = name_of(&stage.backing);
        let Some(copy) = state.replicas.get_mut(&name) else {
            return Ok(());
        };
        copy.device = None;
        if !std::mem::take(&mut copy.uses).is_empty() {
            state.mistakes.push(format!(
                "{name} was taken out of use before its uses had ended"
            ));
        }
        Ok(())
    }

    fn content(&self, backing: &Path, size: Bytes) -> Option<Content> {
        let state = self.state();
        let copy = state.replicas.get(&name_of(backing))?;
        let found = match copy.filesystem {
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
        let copy = state
            .replicas
            .get_mut(&name)
            .ok_or_else(|| missing(&name))?;
        copy.filesystem = copy.filesystem.map(|_| whole_units(copy.size));
        if copy.device.is_some() {
            let mistake = format!("{name} was grown as if it were idle while it was in use");
            state.mistakes.push(mistake);
        }
        Ok(())
    }
}
