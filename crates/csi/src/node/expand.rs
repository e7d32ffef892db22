//! NodeExpandVolume: waits until every use of the volume has the size. The node grows them by itself.

use std::path::PathBuf;

use tokio::time::Instant;
use tonic::Status;
use trellis_api::kinds::{Volume, VolumeStatus};
use trellis_api::{Hold, HoldReason};

use super::stats::require_seen;
use super::{NodeService, required};
use crate::capability::Usage;
use crate::codes;
use crate::objects::follow;
use crate::proto::csi::{NodeExpandVolumeRequest, NodeExpandVolumeResponse};
use crate::range::{Range, wire};

/// Waits for the growth, and answers with the size that was measured.
pub async fn expand(
    node: &NodeService,
    request: &NodeExpandVolumeRequest,
    until: Instant,
) -> Result<NodeExpandVolumeResponse, Status> {
    let id = required(&request.volume_id, "volume id")?;
    let path = required(&request.volume_path, "volume path")?;
    let volume = node.objects.volume(id).await?;
    if request.volume_capability.is_some() {
        let usage = Usage::read(request.volume_capability.as_ref())?;
        if let Some(hold) = usage.refusal(&volume) {
            return Err(codes::refused(&hold));
        }
    }
    require_seen(node, id, PathBuf::from(path), until).await?;
    let range = Range::read(request.capacity_range.as_ref())?;
    let size = match range.least {
        Some(_) => range.size()?,
        None => volume.spec.capacity,
    };
    if size > volume.spec.capacity {
        let message = format!(
            "{size} is asked for on the node, and the volume itself was asked to have {}.",
            volume.spec.capacity
        );
        return Err(codes::refused(&Hold::new(
            HoldReason::SizeTooLarge,
            message,
        )));
    }
    let _turn = node.turns.take(id)?;
    let mut last = VolumeStatus::default();
    let api = node.objects.volumes();
    let grown = follow(api, id, until, |seen: Option<Volume>| {
        let Some(seen) = seen else {
            return Some(Err(codes::no_volume(id)));
        };
        last = seen.status.unwrap_or_default();
        let usable = last.usable.filter(|usable| *usable >= size)?;
        Some(Ok(usable))
    });
    match (grown.await, &last.hold) {
        (Some(grown), _) => Ok(NodeExpandVolumeResponse {
            capacity_bytes: wire(grown?),
        }),
        (None, Some(hold)) => Err(codes::refused(hold)),
        (None, None) => {
            let has = last.usable.unwrap_or_default();
            Err(Status::unavailable(format!(
                "volume {id} has {has} of {size} and grows"
            )))
        }
    }
}
