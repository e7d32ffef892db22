//! NodeStageVolume and NodeUnstageVolume: an Attachment at the staging path, made or deleted, and the wait for it.

use std::path::PathBuf;

use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use tokio::time::Instant;
use tonic::Status;
use trellis_api::kinds::{
    ATTACHMENT_FINALIZER, AtPath, Attachment, AttachmentSpec, Consumer, VOLUME_LABEL, Volume,
};
use trellis_api::{Hold, HoldReason};

use super::{NodeService, paths, required};
use crate::capability::{Form, Usage, Writers};
use crate::codes;
use crate::controller::READ_ONLY_CONTEXT;
use crate::names::{attachment_name, can_be_object};
use crate::objects::{follow, is_conflict, is_gone, wait_gone};
use crate::proto::csi::{NodeStageVolumeRequest, NodeUnstageVolumeRequest};

/// Brings the volume to the staging path.
pub async fn stage(
    node: &NodeService,
    request: &NodeStageVolumeRequest,
    until: Instant,
) -> Result<(), Status> {
    let id = required(&request.volume_id, "volume id")?;
    let staging = required(&request.staging_target_path, "staging target path")?;
    let usage = Usage::read(request.volume_capability.as_ref())?;
    let volume = node.objects.volume(id).await?;
    let staging = paths::read(staging, node.below.as_deref())?;
    if let Some(hold) = usage.refusal(&volume) {
        return Err(codes::refused(&hold));
    }
    require_options(&usage, &volume)?;
    let _turn = node.turns.take(id)?;
    let told = request.publish_context.get(READ_ONLY_CONTEXT);
    let read_only = usage.writers == Writers::None || told.is_some_and(|told| told == "true");
    let wanted = attachment(node, &volume, staging, read_only);
    let (made, is_new) = ensure(node, wanted).await?;
    let hold = match staged(node, &made, until).await? {
        None => return Ok(()),
        Some(hold) => hold,
    };
    let status = codes::refused(&hold);
    if is_new && codes::is_final(status.code()) {
        // A caller that takes the answer for final never asks to unstage.
        end(node, &made.name_any(), until).await?;
    }
    Err(status)
}

/// The options are those of the volume; others were never written into it.
fn require_options(usage: &Usage, volume: &Volume) -> Result<(), Status> {
    let Form::Mount { options, .. } = &usage.form else {
        return Ok(());
    };
    let has = &volume.spec.mount_options;
    if options.is_empty() || options == has {
        return Ok(());
    }
    let message = format!(
        "Volume {} is mounted with {:?}, and {options:?} is asked for.",
        volume.name_any(),
        has
    );
    let hold = Hold::new(HoldReason::MountOptionRefused, message);
    Err(codes::refused(&hold))
}

fn attachment(
    node: &NodeService,
    volume: &Volume,
    staging: PathBuf,
    read_only: bool,
) -> Attachment {
    let name = volume.name_any();
    let is_block = volume.spec.filesystem.is_none();
    let at = AtPath {
        path: paths::staged_at(&staging, is_block).display().to_string(),
        read_only,
    };
    let spec = AttachmentSpec {
        claim_name: None,
        volume: Some(name.clone()),
        node: node.name.clone(),
        consumer: match is_block {
            true => Consumer::Device(at),
            false => Consumer::Mount(at),
        },
    };
    let mut made = Attachment::new(&attachment_name(&name, &node.name), spec);
    made.metadata.finalizers = Some(vec![ATTACHMENT_FINALIZER.to_owned()]);
    made.labels_mut().insert(VOLUME_LABEL.to_owned(), name);
    made
}

/// Makes the attachment, or finds it if it is the same. Answers whether it was made now.
async fn ensure(node: &NodeService, wanted: Attachment) -> Result<(Attachment, bool), Status> {
    let (api, name) = (node.objects.attachments(), wanted.name_any());
    let failed = |error| codes::from_api(&error, &format!("attachment {name}"));
    match api.create(&PostParams::default(), &wanted).await {
        Ok(made) => return Ok((made, true)),
        Err(error) if is_conflict(&error) => {}
        Err(error) => return Err(failed(error)),
    }
    let there = api.get(&name).await.map_err(failed)?;
    if there.metadata.deletion_timestamp.is_some() {
        let message = format!("Attachment {name} is still being taken away.");
        let hold = Hold::new(HoldReason::OperationRunning, message);
        return Err(codes::refused(&hold));
    }
    if there.spec != wanted.spec {
        let path = there.spec.consumer.path();
        let message = format!(
            "The volume is staged on this node already, at {path} or in another mode; unstage it there first."
        );
        return Err(Status::already_exists(message));
    }
    Ok((there, false))
}

/// Waits until the volume is at its path. A hold that may pass is waited for, any other one is the answer.
async fn staged(
    node: &NodeService,
    made: &Attachment,
    until: Instant,
) -> Result<Option<Hold>, Status> {
    let name = made.name_any();
    let mut last: Option<Hold> = None;
    let api = node.objects.attachments();
    let judged = follow(api, &name, until, |seen: Option<Attachment>| {
        let Some(seen) = seen else {
            let message = format!("attachment {name} was deleted while the volume was staged");
            return Some(Err(Status::aborted(message)));
        };
        if node.is_staged(&seen) {
            return Some(Ok(None));
        }
        last = seen.status.and_then(|status| status.hold);
        let hold = last.clone()?;
        let is_final = codes::is_final(codes::code(hold.reason));
        is_final.then_some(Ok(Some(hold)))
    });
    match (judged.await, last) {
        (Some(judged), _) => judged,
        (None, Some(hold)) => Ok(Some(hold)),
        (None, None) => Err(Status::unavailable(format!(
            "attachment {name} is not there yet; it goes on"
        ))),
    }
}

/// Takes the volume away from the staging path. One that is not staged is unstaged.
pub async fn unstage(
    node: &NodeService,
    request: &NodeUnstageVolumeRequest,
    until: Instant,
) -> Result<(), Status> {
    let id = required(&request.volume_id, "volume id")?;
    let staging = required(&request.staging_target_path, "staging target path")?;
    paths::read(staging, node.below.as_deref())?;
    if !can_be_object(id) {
        return Ok(());
    }
    let _turn = node.turns.take(id)?;
    let Some(there) = node.use_of(id).await? else {
        return Ok(());
    };
    require_unpublished(node, &there, until).await?;
    end(node, &there.name_any(), until).await
}

/// A volume that a pod still sees stays.
async fn require_unpublished(
    node: &NodeService,
    there: &Attachment,
    until: Instant,
) -> Result<(), Status> {
    let device = there
        .status
        .as_ref()
        .and_then(|status| status.device.clone());
    let Some(device) = device.filter(|_| node.is_staged(there)) else {
        return Ok(());
    };
    let staged = PathBuf::from(there.spec.consumer.path());
    let seen = node.require(until, move |host| {
        let staged = host.real(&staged);
        let mut paths = host.shown_at(device.as_ref())?;
        paths.retain(|path| *path != staged);
        Ok(paths)
    });
    let Some(path) = seen.await?.into_iter().next() else {
        return Ok(());
    };
    let volume = there.volume().unwrap_or_default();
    let message = format!("Volume {volume} is still seen at {}.", path.display());
    let hold = Hold::new(HoldReason::StillInUse, message);
    Err(codes::refused(&hold))
}

/// Deletes the attachment, and waits until the node has ended the use.
async fn end(node: &NodeService, name: &str, until: Instant) -> Result<(), Status> {
    let api = node.objects.attachments();
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(codes::from_api(&error, &format!("attachment {name}"))),
    }
    let message = format!("Attachment {name} is being taken away, and is not gone yet.");
    let otherwise = Hold::new(HoldReason::OperationRunning, message);
    wait_gone(api, name, until, otherwise).await
}
