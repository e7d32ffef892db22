//! Consumers: volumes brought into use by the kernel, measured, grown and taken out of use.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use trellis_api::kinds::{Content, EMPTY_CONTENT, FilesystemKind, Via};
use trellis_api::{Bytes, Hold, HoldReason, MountOptions, Rung};
use trellis_control::node::machine::{Consumers, Provided, RungFound, Stage, StageFound, Use};
use trellis_control::stored::now;
use trellis_control::usage::{Fill, Gauge};
use trellis_node::sys::block::DeviceNumber;
use trellis_node::sys::{loopdev, mountinfo};
use trellis_node::volume::{Carrier, Fault};
use trellis_node::{fuse, probe, volume};

use super::ThisMachine;
use super::hold::{carrier_hold, fault_hold, gone, node_hold, sentence};
use crate::incarnation;

impl Consumers for ThisMachine {
    fn content(&self, backing: &Path, size: Bytes) -> Option<Content> {
        match probe::probe(backing) {
            Ok(probe::Content::Empty) => Some(Content {
                kind: EMPTY_CONTENT.to_owned(),
                size: None,
                full: true,
                of: size,
                hold: None,
            }),
            Ok(probe::Content::Filesystem {
                kind,
                size: own,
                geometry,
                ..
            }) => Some(Content {
                kind: kind.name().to_owned(),
                size: Some(own),
                full: own >= geometry.largest_fit(size),
                of: size,
                hold: None,
            }),
            Ok(foreign) => Some(Content {
                kind: foreign.to_string(),
                size: None,
                full: true,
                of: size,
                hold: None,
            }),
            Err(error) => {
                tracing::warn!(
                    why = sentence(&error),
                    "the content of a volume cannot be read"
                );
                None
            }
        }
    }

    fn grow_idle(&self, backing: &Path, kind: FilesystemKind) -> Result<(), Hold> {
        volume::grow_idle(backing, kind)
            .map(drop)
            .map_err(node_hold)
    }

    fn boot_id(&self) -> String {
        incarnation::present(&self.data)
    }

    fn provide(&self, stage: &Stage, uses: &[Use]) -> Result<Provided, Hold> {
        let seen = self.observe(stage)?;
        let taken_away = taken_away(&seen, stage, uses)?;
        let there = is_provided(&seen, stage, uses);
        if there && let Ok(found) = self.found_stage(stage, &seen) {
            return Ok(Provided {
                found,
                refused: vec![None; uses.len()],
            });
        }
        let device = self.bring_into_use(stage, seen.staged)?;
        let staging = self.mount_of(stage);
        let source = match stage.filesystem {
            Some(_) => volume::Source::Filesystem { staging: &staging },
            None => volume::Source::Block { device: &device },
        };
        let publish = |usage: &Use| {
            if taken_away.contains(&usage.path) {
                let gone = Fault::PathGone {
                    path: usage.path.clone(),
                };
                return Some(fault_hold(stage, &gone));
            }
            volume::publish(source, &usage.path, usage.read_only)
                .err()
                .map(node_hold)
        };
        let refused = uses.iter().map(publish).collect();
        Ok(Provided {
            found: self.find_stage(stage)?,
            refused,
        })
    }

    fn find_stage(&self, stage: &Stage) -> Result<StageFound, Hold> {
        self.found_stage(stage, &self.observe(stage)?)
    }

    fn raise_stage(&self, stage: &Stage, rung: Rung, to: Bytes) -> Result<(), Hold> {
        match (rung, stage.filesystem) {
            (Rung::Device, _) => self
                .carrier(stage)
                .grow_device(to)
                .map(drop)
                .map_err(node_hold),
            (Rung::Filesystem, Some(kind)) => {
                let device = self
                    .carrier(stage)
                    .device()
                    .map_err(node_hold)?
                    .ok_or_else(|| gone(stage))?;
                volume::grow_filesystem(kind, &self.mount_of(stage), &device.path)
                    .map(drop)
                    .map_err(node_hold)
            }
            (rung, _) => {
                let message = format!(
                    "This machine has no {rung} rung for volume {}.",
                    stage.volume
                );
                Err(Hold::new(HoldReason::KernelRefused, message))
            }
        }
    }

    fn unpublish(&self, stage: &Stage, usage: &Use) -> Result<(), Hold> {
        let device = self.device_of(stage)?;
        match volume::unpublish(&usage.path, device) {
            Ok(_) => Ok(()),
            // Somebody else's mount is there: ours is gone, and theirs is not ours to touch.
            Err(trellis_node::Error::UnusablePath { .. }) => Ok(()),
            Err(error) => Err(node_hold(error)),
        }
    }

    fn unstage(&self, stage: &Stage) -> Result<(), Hold> {
        let device = self.device_of(stage)?;
        volume::unstage(&self.mount_of(stage), device).map_err(node_hold)?;
        if stage.via == Via::Iscsi {
            return self.carrier(stage).detach().map(drop).map_err(node_hold);
        }
        if volume::is_unreachable(&stage.backing) {
            // The mount itself is its target's to remove: the next one may have replaced it since we looked.
            let place = stage.backing.parent().unwrap_or(&stage.backing);
            return fuse::detach_dead(place).map_err(node_hold);
        }
        volume::detach(&stage.backing).map(drop).map_err(node_hold)
    }
}

impl ThisMachine {
    fn mount_of(&self, stage: &Stage) -> PathBuf {
        self.mounts.join(&stage.volume)
    }

    /// Device, filesystem if there is none yet, private mount. Returns the device.
    fn bring_into_use(&self, stage: &Stage, is_staged: bool) -> Result<PathBuf, Hold> {
        // The device of a filesystem is always writable: a read-only mount may have to replay its journal. The device
        // of a block volume is what its user gets.
        let device_read_only = stage.read_only && stage.filesystem.is_none();
        let device = self
            .carrier(stage)
            .attach(device_read_only)
            .map_err(|error| carrier_hold(stage, error))?
            .path;
        if let Some(kind) = stage.filesystem {
            // This comes before anything is made: a request that cannot be met must not look as if it were.
            let options = MountOptions::read(kind, &stage.mount_options).map_err(|refused| {
                let message = format!("PersistentVolume {}: {refused}.", stage.volume);
                Hold::new(HoldReason::MountOptionRefused, message)
            })?;
            if !is_staged {
                let note = self.notes.join(&stage.volume);
                let past = self.past(stage);
                volume::ensure_filesystem_with_past(&device, kind, &note, past)
                    .map_err(node_hold)?;
                self.note_formatted(stage)?;
            }
            let staging = self.mount_of(stage);
            volume::stage_with(&device, kind, &staging, stage.read_only, &options)
                .map_err(node_hold)?;
        }
        Ok(device)
    }

    fn found_stage(&self, stage: &Stage, seen: &volume::Observation) -> Result<StageFound, Hold> {
        let device = seen.device.as_ref().ok_or_else(|| gone(stage))?;
        let mut rungs = vec![RungFound {
            rung: Rung::Device,
            size: device.size,
            full: false,
            note: None,
        }];
        if stage.filesystem.is_some() {
            let Some(filesystem) = seen.filesystem else {
                if let Some(fault) = seen.faults.first() {
                    return Err(fault_hold(stage, fault));
                }
                let message = format!(
                    "{} carries no filesystem that can be read.",
                    device.path.display()
                );
                return Err(Hold::new(HoldReason::FilesystemUnsupported, message));
            };
            let size = filesystem.geometry.size();
            rungs.push(RungFound {
                rung: Rung::Filesystem,
                size,
                full: size >= filesystem.largest_fit,
                note: filesystem.geometry.outgrown().map(|how| how.to_string()),
            });
        }
        let usage = seen
            .staged
            .then(|| volume::usage(&self.mount_of(stage)).ok())
            .flatten();
        let usage = usage.map(|usage| fill(&usage).status(now()));
        Ok(StageFound {
            device: device.path.display().to_string(),
            rungs,
            usage,
        })
    }

    /// What carries the volume's bytes.
    fn carrier(&self, stage: &Stage) -> Carrier {
        match stage.via {
            Via::Local | Via::Fuse => Carrier::File(stage.backing.clone()),
            Via::Iscsi => self.processes.by_iscsi(&stage.volume),
        }
    }

    /// The number of the volume's device. A device on a file that nobody serves any more is recognized by the file's
    /// path.
    fn device_of(&self, stage: &Stage) -> Result<Option<DeviceNumber>, Hold> {
        if stage.via == Via::Iscsi || !volume::is_unreachable(&stage.backing) {
            return Ok(self.observe(stage)?.device.map(|device| device.number));
        }
        let devices = loopdev::on_path(&stage.backing).map_err(node_hold)?;
        Ok(devices.into_iter().next().map(|(_, number)| number))
    }

    fn observe(&self, stage: &Stage) -> Result<volume::Observation, Hold> {
        self.carrier(stage)
            .observe(&self.mount_of(stage))
            .map_err(node_hold)
    }
}

/// The paths from which somebody has taken the volume away. If what they are built on is gone or broken, that holds the
/// whole volume, and nothing is put in its place: what is gone was taken by somebody, and mounting over what is broken
/// does not repair it.
fn taken_away(
    seen: &volume::Observation,
    stage: &Stage,
    uses: &[Use],
) -> Result<Vec<PathBuf>, Hold> {
    if let Some(fault) = seen.faults.iter().find(|fault| fault.breaks_use()) {
        return Err(fault_hold(stage, fault));
    }
    let established = uses.iter().filter(|each| each.established);
    let established: Vec<PathBuf> = established.map(|each| each.path.clone()).collect();
    if established.is_empty() {
        return Ok(Vec::new());
    }
    let mut paths = Vec::new();
    for fault in seen.missing(stage.filesystem.is_some(), &established) {
        match fault {
            Fault::PathGone { path } => paths.push(path),
            fault => return Err(fault_hold(stage, &fault)),
        }
    }
    Ok(paths)
}

/// Whether the volume is in use just as it should be, at every path.
fn is_provided(seen: &volume::Observation, stage: &Stage, uses: &[Use]) -> bool {
    let is_block = stage.filesystem.is_none();
    let writable = seen
        .device
        .as_ref()
        .is_some_and(|device| !device.read_only || (is_block && stage.read_only));
    let staged = is_block || (seen.staged && (stage.read_only || !seen.staged_read_only));
    let published = |usage: &Use| {
        seen.publications.iter().any(|each| {
            each.path == usage.path && each.block == is_block && each.read_only == usage.read_only
        })
    };
    writable && staged && uses.iter().all(published)
}

impl Gauge for ThisMachine {
    fn mounted(&self) -> HashSet<String> {
        let mounts = mountinfo::read().unwrap_or_default();
        let private = |mount: &mountinfo::Mount| {
            let name = mount.mount_point.strip_prefix(&self.mounts).ok()?;
            name.to_str().map(str::to_owned)
        };
        mounts.iter().filter_map(private).collect()
    }

    fn fill(&self, volume: &str) -> Option<Fill> {
        let usage = volume::usage(&self.mounts.join(volume)).ok()?;
        Some(fill(&usage))
    }
}

/// How full a filesystem is: from the node's measurement to the reported form.
pub fn fill(usage: &volume::Usage) -> Fill {
    Fill {
        capacity: usage.bytes_total,
        used: usage.bytes_used,
        available: usage.bytes_available,
        inodes: usage.inodes_total,
        inodes_used: usage.inodes_used,
        inodes_free: usage.inodes_available,
    }
}
