//! NodeGetVolumeStats: how full a volume is at a path, and whether it is well.

use std::path::PathBuf;

use tokio::time::Instant;
use tonic::Status;
use trellis_api::{Bytes, Hold, HoldReason};

use super::{NodeService, required};
use crate::codes;
use crate::condition;
use crate::host::Measured;
use crate::proto::csi::volume_usage::Unit;
use crate::proto::csi::{NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, VolumeUsage};
use crate::range::wire;

/// Measures the volume.
pub async fn stats(
    node: &NodeService,
    request: &NodeGetVolumeStatsRequest,
    until: Instant,
) -> Result<NodeGetVolumeStatsResponse, Status> {
    let id = required(&request.volume_id, "volume id")?;
    let path = required(&request.volume_path, "volume path")?;
    let volume = node.objects.volume(id).await?;
    let path = PathBuf::from(path);
    require_seen(node, id, path.clone(), until).await?;
    let measured = node.require(until, move |host| host.measure(&path)).await?;
    Ok(NodeGetVolumeStatsResponse {
        usage: usage(measured),
        volume_condition: Some(condition::of(&volume)),
    })
}

/// A path at which the volume is not seen on this node is not found.
pub async fn require_seen(
    node: &NodeService,
    id: &str,
    path: PathBuf,
    until: Instant,
) -> Result<(), Status> {
    let staged = node.use_of(id).await?.filter(|each| node.is_staged(each));
    let device = staged.and_then(|each| each.status?.device);
    let shown = path.display().to_string();
    let seen = match device.filter(|_| path.is_absolute()) {
        None => Vec::new(),
        Some(device) => {
            let seen = node.require(until, move |host| {
                let path = host.real(&path);
                let mut paths = host.shown_at(device.as_ref())?;
                paths.retain(|each| *each == path);
                Ok(paths)
            });
            seen.await?
        }
    };
    if seen.is_empty() {
        let message = format!("Volume {id} is not at {shown} on this node.");
        let hold = Hold::new(HoldReason::NotMounted, message);
        return Err(codes::refused_as(tonic::Code::NotFound, &hold));
    }
    Ok(())
}

fn usage(measured: Measured) -> Vec<VolumeUsage> {
    let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    match measured {
        Measured::Device(size) => vec![VolumeUsage {
            available: 0,
            total: wire(size),
            used: 0,
            unit: Unit::Bytes.into(),
        }],
        Measured::Filesystem {
            total,
            used,
            available,
            inodes,
            inodes_used,
            inodes_free,
        } => {
            let bytes = |size: Bytes| wire(size);
            vec![
                VolumeUsage {
                    available: bytes(available),
                    total: bytes(total),
                    used: bytes(used),
                    unit: Unit::Bytes.into(),
                },
                VolumeUsage {
                    available: count(inodes_free),
                    total: count(inodes),
                    used: count(inodes_used),
                    unit: Unit::Inodes.into(),
                },
            ]
        }
    }
}
