//! The Node service: volumes on this node.

mod expand;
mod paths;
mod publish;
mod stage;
mod stats;

use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::Instant;
use tonic::{Request, Response, Status};
use trellis_api::Hold;
use trellis_api::kinds::{Attachment, AttachmentPhase, NODE_LABEL};

use crate::codes;
use crate::controller::VOLUMES_PER_NODE_MAX;
use crate::host::Host;
use crate::names::attachment_name;
use crate::objects::Objects;
use crate::patience;
use crate::proto::csi::node_server::Node;
use crate::proto::csi::node_service_capability::rpc::Type as RpcType;
use crate::proto::csi::node_service_capability::{Rpc, Type};
use crate::proto::csi::*;
use crate::serve::told;
use crate::turns::Turns;

/// What the service can do.
const CAN: [RpcType; 5] = [
    RpcType::StageUnstageVolume,
    RpcType::GetVolumeStats,
    RpcType::ExpandVolume,
    RpcType::VolumeCondition,
    RpcType::SingleNodeMultiWriter,
];

/// The service.
pub struct NodeService {
    pub(crate) objects: Objects,
    /// This node.
    pub(crate) name: String,
    pub(crate) host: Arc<dyn Host>,
    /// Only below it does anything appear; none for anywhere.
    pub(crate) below: Option<PathBuf>,
    /// Calls for one volume come one after the other.
    pub(crate) turns: Turns,
}

impl NodeService {
    /// The use that CSI has made of a volume on this node, if it has.
    async fn use_of(&self, volume: &str) -> Result<Option<Attachment>, Status> {
        let name = attachment_name(volume, &self.name);
        let found = self.objects.attachments().get_opt(&name).await;
        found.map_err(|error| codes::from_api(&error, &format!("attachment {name}")))
    }

    /// Whether the use is there now, and not only in a run of the kernel that is over.
    fn is_staged(&self, attachment: &Attachment) -> bool {
        let status = attachment.status.as_ref();
        status.is_some_and(|status| {
            status.phase == AttachmentPhase::Attached
                && status.boot_id.as_deref() == Some(self.host.boot_id().as_str())
        })
    }

    /// Asks the machine. What the kernel does not answer in time goes on by itself, and the next call finds it.
    async fn ask<T: Send + 'static>(
        &self,
        until: Instant,
        ask: impl FnOnce(&dyn Host) -> Result<T, Hold> + Send + 'static,
    ) -> Result<Result<T, Hold>, Status> {
        let host = self.host.clone();
        let asked = tokio::task::spawn_blocking(move || ask(host.as_ref()));
        match tokio::time::timeout_at(until, asked).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Status::internal(format!(
                "a call to the machine has died: {error}"
            ))),
            Err(_) => Err(Status::unavailable(
                "the kernel has not answered in time; the call goes on, and can be repeated",
            )),
        }
    }

    /// The same, where a hold is the answer to the caller.
    async fn require<T: Send + 'static>(
        &self,
        until: Instant,
        ask: impl FnOnce(&dyn Host) -> Result<T, Hold> + Send + 'static,
    ) -> Result<T, Status> {
        let answer = self.ask(until, ask).await?;
        answer.map_err(|hold| codes::refused(&hold))
    }
}

/// A part of a request that has to be there.
fn required<'a>(value: &'a str, what: &str) -> Result<&'a str, Status> {
    if value.is_empty() {
        return Err(codes::invalid(format!("The request has no {what}.")));
    }
    Ok(value)
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let until = patience::until(&request);
        let staged = stage::stage(self, &request.into_inner(), until).await;
        told("NodeStageVolume", staged)?;
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let until = patience::until(&request);
        let unstaged = stage::unstage(self, &request.into_inner(), until).await;
        told("NodeUnstageVolume", unstaged)?;
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let until = patience::until(&request);
        let published = publish::publish(self, &request.into_inner(), until).await;
        told("NodePublishVolume", published)?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let until = patience::until(&request);
        let unpublished = publish::unpublish(self, &request.into_inner(), until).await;
        told("NodeUnpublishVolume", unpublished)?;
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let until = patience::until(&request);
        let measured = stats::stats(self, &request.into_inner(), until).await;
        told("NodeGetVolumeStats", measured).map(Response::new)
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let until = patience::until_grown(&request);
        let grown = expand::expand(self, &request.into_inner(), until).await;
        told("NodeExpandVolume", grown).map(Response::new)
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let capability = |each: RpcType| NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc {
                r#type: each.into(),
            })),
        };
        Ok(Response::new(NodeGetCapabilitiesResponse {
            capabilities: CAN.into_iter().map(capability).collect(),
        }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let segments = [(NODE_LABEL.to_owned(), self.name.clone())].into();
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.name.clone(),
            max_volumes_per_node: i64::try_from(VOLUMES_PER_NODE_MAX).unwrap_or(i64::MAX),
            accessible_topology: Some(Topology { segments }),
        }))
    }
}
