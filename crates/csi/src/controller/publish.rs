//! ControllerPublishVolume and ControllerUnpublishVolume: which node may use a volume.
//!
//! One node at a time. The mark is written into the Volume, and only if the Volume is still the one that was looked at, so
//! two nodes cannot both get it. What keeps a node that was cut off from writing is not the mark but the term of the
//! volume's target, which the copies know; the mark only says who is next.

use std::collections::HashMap;

use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::json;
use tokio::time::Instant;
use tonic::{Code, Status};
use trellis_api::kinds::{PublishedTo, Volume};
use trellis_api::{Hold, HoldReason, MountOptions};
use trellis_control::volume::nodes::lost_since;

use super::{ControllerService, VOLUMES_PER_NODE_MAX, required};
use crate::capability::{Form, Usage, Writers};
use crate::codes;
use crate::names::{attachment_name, can_be_object};
use crate::objects::{CONFLICTS_MAX, Objects, is_conflict, is_gone, wait_gone};
use crate::proto::csi::ControllerPublishVolumeRequest;

/// The entry of the context by which a node learns that it may only read.
pub const READ_ONLY_CONTEXT: &str = "trellis.dev/readOnly";

/// Allows a node to use the volume, and answers what the node has to know.
pub async fn publish(
    service: &ControllerService,
    request: &ControllerPublishVolumeRequest,
) -> Result<HashMap<String, String>, Status> {
    let id = required(&request.volume_id)?;
    let node = &request.node_id;
    if node.is_empty() {
        return Err(codes::invalid("The request names no node."));
    }
    let usage = Usage::read(request.volume_capability.as_ref())?;
    let objects = &service.objects;
    objects.volume(id).await?;
    require_node(objects, node).await?;
    let _turn = service.turns.take(id)?;
    let asked = PublishedTo {
        node: node.clone(),
        read_only: request.readonly || usage.writers == Writers::None,
    };
    for _ in 0..CONFLICTS_MAX {
        let volume = objects.volume(id).await?;
        if let Some(hold) = usage.refusal(&volume) {
            return Err(codes::refused(&hold));
        }
        let options = options(&usage, &volume)?;
        if is_published(&volume, &asked)? && options == volume.spec.mount_options {
            return Ok(context(&asked));
        }
        require_room(objects, node, id).await?;
        let body = json!({
            "metadata": { "uid": volume.uid(), "resourceVersion": volume.resource_version() },
            "spec": { "publishedTo": asked, "mountOptions": options },
        });
        match objects.patch_volume(id, &body).await {
            Ok(_) => return Ok(context(&asked)),
            Err(error) if is_conflict(&error) => {}
            Err(error) => return Err(codes::from_api(&error, &format!("volume {id}"))),
        }
    }
    Err(changing(id))
}

/// The options that the filesystem is mounted with from now on: a PersistentVolume may say others than its class did.
fn options(usage: &Usage, volume: &Volume) -> Result<Vec<String>, Status> {
    match &usage.form {
        Form::Mount { options, .. } if !options.is_empty() => {
            let kind = volume.spec.filesystem.unwrap_or_default();
            MountOptions::read(kind, options).map_err(|refused| {
                let message = format!("Volume {}: {refused}.", volume.name_any());
                codes::refused(&Hold::new(HoldReason::MountOptionRefused, message))
            })?;
            Ok(options.clone())
        }
        _ => Ok(volume.spec.mount_options.clone()),
    }
}

fn context(asked: &PublishedTo) -> HashMap<String, String> {
    let told = (READ_ONLY_CONTEXT.to_owned(), asked.read_only.to_string());
    HashMap::from([told])
}

/// Whether the node has it already, in the same mode. It is an error if it has it in the other one, or another node has
/// it.
fn is_published(volume: &Volume, asked: &PublishedTo) -> Result<bool, Status> {
    let name = volume.name_any();
    match &volume.spec.published_to {
        None => Ok(false),
        Some(there) if there == asked => Ok(true),
        Some(there) if there.node == asked.node => Err(Status::already_exists(format!(
            "Volume {name} is published to node {} already, in the other mode.",
            there.node
        ))),
        Some(there) => {
            let message = format!("Volume {name} is published to node {}.", there.node);
            let hold = Hold::new(HoldReason::UsedElsewhere, message);
            Err(codes::refused_as(Code::FailedPrecondition, &hold))
        }
    }
}

async fn require_node(objects: &Objects, node: &str) -> Result<(), Status> {
    let found = match can_be_object(node) {
        true => objects.nodes().get_opt(node).await,
        false => Ok(None),
    };
    match found {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(Status::not_found(format!("Node {node:?} does not exist."))),
        Err(error) => Err(codes::from_api(&error, &format!("node {node}"))),
    }
}

async fn require_room(objects: &Objects, node: &str, id: &str) -> Result<(), Status> {
    let volumes = objects.all_volumes().await?;
    let is_there = |each: &&Volume| {
        let published = each.spec.published_to.as_ref();
        each.name_any() != id && published.is_some_and(|published| published.node == node)
    };
    if volumes.iter().filter(is_there).count() >= VOLUMES_PER_NODE_MAX {
        return Err(Status::resource_exhausted(format!(
            "Node {node} has {VOLUMES_PER_NODE_MAX} volumes, and takes no more."
        )));
    }
    Ok(())
}

/// Ends the right of a node to use the volume, or that of all nodes, and what it does with it. A volume that does not
/// exist is published nowhere.
pub async fn unpublish(
    service: &ControllerService,
    id: &str,
    node: &str,
    until: Instant,
) -> Result<(), Status> {
    let objects = &service.objects;
    let Some(volume) = objects.find_volume(id).await? else {
        return Ok(());
    };
    let _turn = service.turns.take(id)?;
    let published = volume.spec.published_to.as_ref();
    let node = match (node, published) {
        ("", None) => return Ok(()),
        ("", Some(published)) => &published.node,
        (node, _) => node,
    };
    end_use(objects, id, node, until).await?;
    for _ in 0..CONFLICTS_MAX {
        let Some(volume) = objects.find_volume(id).await? else {
            return Ok(());
        };
        let published = volume.spec.published_to.as_ref();
        if published.is_none_or(|published| published.node != node) {
            return Ok(());
        }
        let body = json!({
            "metadata": { "uid": volume.uid(), "resourceVersion": volume.resource_version() },
            "spec": { "publishedTo": null },
        });
        match objects.patch_volume(id, &body).await {
            Ok(_) => return Ok(()),
            Err(error) if is_conflict(&error) => {}
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(codes::from_api(&error, &format!("volume {id}"))),
        }
    }
    Err(changing(id))
}

/// Ends the use that CSI made on the node, if the kubelet has not. A node that is lost cannot be waited for: when it is
/// back, it ends the use, and until then its term keeps it from writing.
async fn end_use(objects: &Objects, id: &str, node: &str, until: Instant) -> Result<(), Status> {
    let (api, name) = (objects.attachments(), attachment_name(id, node));
    if !can_be_object(node) {
        return Ok(());
    }
    match api.delete(&name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(codes::from_api(&error, &format!("attachment {name}"))),
    }
    let found = objects.nodes().get_opt(node).await;
    let found = found.map_err(|error| codes::from_api(&error, &format!("node {node}")))?;
    if found.is_none_or(|node| lost_since(&node).is_some()) {
        return Ok(());
    }
    let message = format!("Node {node} has not ended its use of volume {id} yet.");
    let otherwise = Hold::new(HoldReason::StillInUse, message);
    wait_gone(api, &name, until, otherwise).await
}

fn changing(id: &str) -> Status {
    let message = format!("Volume {id} is changed by others all the time.");
    codes::refused(&Hold::new(HoldReason::OperationRunning, message))
}
