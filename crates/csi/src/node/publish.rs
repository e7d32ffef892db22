//! NodePublishVolume and NodeUnpublishVolume: the staged volume appears at a pod's path, and goes from there.

use std::path::{Path, PathBuf};

use tokio::time::Instant;
use tonic::Status;
use trellis_api::kinds::{Attachment, Consumer};
use trellis_api::{Hold, HoldReason};

use super::{NodeService, paths, required};
use crate::capability::{Usage, Writers};
use crate::codes;
use crate::host::{Host, Shown};
use crate::names::can_be_object;
use crate::proto::csi::{NodePublishVolumeRequest, NodeUnpublishVolumeRequest};

/// Shows the staged volume at the target path.
pub async fn publish(
    node: &NodeService,
    request: &NodePublishVolumeRequest,
    until: Instant,
) -> Result<(), Status> {
    let id = required(&request.volume_id, "volume id")?;
    let target = required(&request.target_path, "target path")?;
    let usage = Usage::read(request.volume_capability.as_ref())?;
    if request.staging_target_path.is_empty() {
        return Err(not_staged(id));
    }
    let volume = node.objects.volume(id).await?;
    let target = paths::read(target, node.below.as_deref())?;
    let staging = paths::read(&request.staging_target_path, node.below.as_deref())?;
    if let Some(hold) = usage.refusal(&volume) {
        return Err(codes::refused(&hold));
    }
    let _turn = node.turns.take(id)?;
    let staged = node.use_of(id).await?.filter(|each| node.is_staged(each));
    let staged = staged.ok_or_else(|| not_staged(id))?;
    let at = paths::staged_at(&staging, volume.spec.filesystem.is_none());
    if Path::new(staged.spec.consumer.path()) != at {
        return Err(not_staged(id));
    }
    let read_only = request.readonly || usage.writers == Writers::None;
    require_mode(&staged, id, read_only)?;
    let device = device_of(&staged).ok_or_else(|| not_staged(id))?;
    let is_alone = usage.writers == Writers::One;
    let name = id.to_owned();
    let shown = node.ask(until, move |host| {
        let real = host.real(&target);
        let others = others(host, &device, &at)?;
        if is_alone && let Some(other) = others.iter().find(|path| **path != real) {
            return Ok(Err(single_use(&name, other)));
        }
        let is_there = others.contains(&real);
        let what = match staged.spec.consumer {
            Consumer::Mount(_) => Shown::Filesystem(&at),
            Consumer::Device(_) => Shown::Device(&device),
        };
        match host.show(what, &target, read_only) {
            Err(hold) if is_there && hold.reason == HoldReason::PathBusy => {
                let message = format!("Volume {name} is there already, in the other mode.");
                Ok(Err(Status::already_exists(message)))
            }
            other => other.map(Ok),
        }
    });
    shown.await?.map_err(|hold| codes::refused(&hold))?
}

/// Where else than at its staging path the volume is seen.
fn others(host: &dyn Host, device: &Path, staged: &Path) -> Result<Vec<PathBuf>, Hold> {
    let staged = host.real(staged);
    let mut paths = host.shown_at(device)?;
    paths.retain(|path| *path != staged);
    Ok(paths)
}

/// A device cannot be read-only at one path and writable at another.
fn require_mode(staged: &Attachment, id: &str, read_only: bool) -> Result<(), Status> {
    let is_writable = !staged.spec.consumer.read_only();
    let message = match (&staged.spec.consumer, read_only, is_writable) {
        (Consumer::Device(_), true, true) => {
            format!("Volume {id} is a device that was staged for writing, and is to be read-only.")
        }
        (_, false, false) => {
            format!("Volume {id} was staged for reading alone, and is to be written.")
        }
        _ => return Ok(()),
    };
    let hold = Hold::new(HoldReason::AccessModeUnsupported, message);
    Err(codes::refused(&hold))
}

fn device_of(staged: &Attachment) -> Option<PathBuf> {
    let status = staged.status.as_ref()?;
    status.device.as_ref().map(PathBuf::from)
}

fn not_staged(id: &str) -> Status {
    let message = format!("Volume {id} is not staged at that path on this node.");
    let hold = Hold::new(HoldReason::NotMounted, message);
    codes::refused_as(tonic::Code::FailedPrecondition, &hold)
}

fn single_use(id: &str, other: &Path) -> Status {
    let message = format!(
        "Volume {id} allows a single use (ReadWriteOncePod), and is seen at {}.",
        other.display()
    );
    let hold = Hold::new(HoldReason::AccessModeUnsupported, message);
    codes::refused_as(tonic::Code::FailedPrecondition, &hold)
}

/// Takes the volume away from the target path, and removes the path.
pub async fn unpublish(
    node: &NodeService,
    request: &NodeUnpublishVolumeRequest,
    until: Instant,
) -> Result<(), Status> {
    let id = required(&request.volume_id, "volume id")?;
    let target = required(&request.target_path, "target path")?;
    let target = paths::read(target, node.below.as_deref())?;
    let _turn = node.turns.take(id)?;
    let staged = match can_be_object(id) {
        true => node.use_of(id).await?.filter(|each| node.is_staged(each)),
        false => None,
    };
    let device = staged.as_ref().and_then(device_of);
    let hidden = node.require(until, move |host| host.hide(&target, device.as_deref()));
    hidden.await
}
