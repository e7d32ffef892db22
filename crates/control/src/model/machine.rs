//! A machine in memory: replicas, devices and filesystems are numbers, and what a real one would lose
//! data by is written down as a mistake.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use serde_json::json;
use trellis_api::kinds::{Content, FilesystemKind};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use crate::agent::machine::{
    CopyFound, Machine, PoolMeasured, Provided, ReplicaFound, ReplicaPlace, RungFound, Stage,
    StageFound, TargetFound, TargetPlace, Use,
};

/// Filesystems grow in whole units of this size, and may leave the rest of a device unused.
const FILESYSTEM_UNIT: u64 = 8 << 20;

#[derive(Default)]
pub struct Model {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    replicas: HashMap<String, Copy>,
    broken: Option<Rung>,
    mistakes: Vec<String>,
}

struct Copy {
    size: Bytes,
    filesystem: Option<Bytes>,
    /// The device's size while it is in use.
    device: Option<Bytes>,
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

    /// What must not have happened and did.
    pub fn mistakes(&self) -> Vec<String> {
        self.state().mistakes.clone()
    }

    /// The true size of a replica.
    pub fn size(&self, replica: &str) -> Option<Bytes> {
        self.state().replicas.get(replica).map(|copy| copy.size)
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

fn missing(name: &str) -> Hold {
    Hold::new(
        HoldReason::ReplicaUnavailable,
        format!("{name} is not there."),
    )
}

fn refused(state: &State, rung: Rung) -> Result<(), Hold> {
    let hold = || Hold::new(HoldReason::KernelRefused, format!("The {rung} is broken."));
    (state.broken != Some(rung)).then_some(()).ok_or_else(hold)
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

impl Machine for Model {
    fn measure_pool(&self, _: &Path, _: Option<&str>) -> Result<PoolMeasured, Hold> {
        Err(Hold::new(
            HoldReason::PoolNotReady,
            "The histories set the sizes of pools.",
        ))
    }

    fn make_replica(&self, place: &ReplicaPlace, size: Bytes) -> Result<ReplicaFound, Hold> {
        let mut state = self.state();
        let copy = state.replicas.entry(place.name.clone()).or_insert(Copy {
            size,
            filesystem: None,
            device: None,
            uses: BTreeSet::new(),
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

    fn remove_replica(&self, place: &ReplicaPlace) -> Result<(), Hold> {
        let mut state = self.state();
        let used = state
            .replicas
            .remove(&place.name)
            .is_some_and(|copy| copy.device.is_some());
        if used {
            let mistake = format!("{} was removed while it was in use", place.name);
            state.mistakes.push(mistake);
        }
        Ok(())
    }

    fn serve_copy(&self, replica: &ReplicaPlace) -> Result<CopyFound, Hold> {
        Err(missing(&replica.name))
    }

    fn retire_copy(&self, _: &ReplicaPlace) -> Result<(), Hold> {
        Ok(())
    }

    fn serve_target(&self, target: &TargetPlace) -> Result<TargetFound, Hold> {
        Err(missing(&target.volume))
    }

    fn raise_target(&self, target: &TargetPlace, _: Bytes) -> Result<(), Hold> {
        Err(missing(&target.volume))
    }

    fn retire_target(&self, _: &str) -> Result<(), Hold> {
        Ok(())
    }

    fn target_backing(&self, volume: &str) -> PathBuf {
        PathBuf::from(volume)
    }

    fn content(&self, backing: &Path, size: Bytes) -> Option<Content> {
        let state = self.state();
        let copy = state.replicas.get(&name_of(backing))?;
        let found = match copy.filesystem {
            None => json!({ "kind": "empty", "full": true, "of": size }),
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
}
