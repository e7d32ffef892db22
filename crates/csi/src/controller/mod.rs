//! The Controller service: volumes, wherever they are.

mod capacity;
mod create;
mod delete;
mod expand;
mod list;
mod modify;
mod publish;

pub use publish::READ_ONLY_CONTEXT;

use tonic::{Request, Response, Status};
use trellis_api::kinds::Volume;
use trellis_api::{Hold, HoldReason};

use crate::capability::Usage;
use crate::codes;
use crate::objects::Objects;
use crate::patience;
use crate::proto::csi::controller_server::Controller;
use crate::proto::csi::controller_service_capability::rpc::Type as RpcType;
use crate::proto::csi::controller_service_capability::{Rpc, Type};
use crate::proto::csi::validate_volume_capabilities_response::Confirmed;
use crate::proto::csi::*;
use crate::serve::told;
use crate::turns::Turns;

/// The most volumes that CSI brings to one node.
pub const VOLUMES_PER_NODE_MAX: usize = 256;

/// What the service can do.
const CAN: [RpcType; 11] = [
    RpcType::CreateDeleteVolume,
    RpcType::PublishUnpublishVolume,
    RpcType::PublishReadonly,
    RpcType::ListVolumes,
    RpcType::ListVolumesPublishedNodes,
    RpcType::GetCapacity,
    RpcType::ExpandVolume,
    RpcType::VolumeCondition,
    RpcType::GetVolume,
    RpcType::SingleNodeMultiWriter,
    RpcType::ModifyVolume,
];

/// The service.
pub struct ControllerService {
    pub(crate) objects: Objects,
    /// Calls for one volume come one after the other.
    turns: Turns,
}

impl ControllerService {
    /// The service on these objects.
    pub fn new(objects: Objects) -> Self {
        ControllerService {
            objects,
            turns: Turns::default(),
        }
    }
}

/// The id of a request, which has to be there.
fn required(id: &str) -> Result<&str, Status> {
    if id.is_empty() {
        return Err(codes::invalid("The request names no volume."));
    }
    Ok(id)
}

/// There are no snapshots.
fn no_snapshots<T>() -> Result<T, Status> {
    let message = "Snapshots are not offered by this driver.";
    let hold = Hold::new(HoldReason::DataSourceUnsupported, message);
    Err(codes::refused_as(tonic::Code::Unimplemented, &hold))
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let until = patience::until(&request);
        let made = create::create(self, &request.into_inner(), until).await;
        let volume = Some(told("CreateVolume", made)?);
        Ok(Response::new(CreateVolumeResponse { volume }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let until = patience::until(&request);
        let deleted = delete::delete(self, required(&request.get_ref().volume_id)?, until).await;
        told("DeleteVolume", deleted)?;
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        let published = publish::publish(self, &request.into_inner()).await;
        let publish_context = told("ControllerPublishVolume", published)?;
        Ok(Response::new(ControllerPublishVolumeResponse {
            publish_context,
        }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        let until = patience::until(&request);
        let request = request.into_inner();
        let id = required(&request.volume_id)?;
        let unpublished = publish::unpublish(self, id, &request.node_id, until).await;
        told("ControllerUnpublishVolume", unpublished)?;
        Ok(Response::new(ControllerUnpublishVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        let id = required(&request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(codes::invalid("The request has no volume capability."));
        }
        let volume = self.objects.volume(id).await?;
        Ok(Response::new(validated(request, &volume)))
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let listed = list::list(&self.objects, &request.into_inner()).await;
        told("ListVolumes", listed).map(Response::new)
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        let measured = capacity::capacity(&self.objects, &request.into_inner()).await;
        told("GetCapacity", measured).map(Response::new)
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let capability = |each: RpcType| ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc {
                r#type: each.into(),
            })),
        };
        Ok(Response::new(ControllerGetCapabilitiesResponse {
            capabilities: CAN.into_iter().map(capability).collect(),
        }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let until = patience::until_grown(&request);
        let grown = expand::expand(self, &request.into_inner(), until).await;
        told("ControllerExpandVolume", grown).map(Response::new)
    }

    async fn controller_get_volume(
        &self,
        request: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        let found = list::get(&self.objects, required(&request.get_ref().volume_id)?).await;
        told("ControllerGetVolume", found).map(Response::new)
    }

    async fn controller_modify_volume(
        &self,
        request: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        let until = patience::until_grown(&request);
        let modified = modify::modify(self, &request.into_inner(), until).await;
        told("ControllerModifyVolume", modified)?;
        Ok(Response::new(ControllerModifyVolumeResponse {}))
    }

    async fn create_snapshot(
        &self,
        _: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        no_snapshots()
    }

    async fn delete_snapshot(
        &self,
        _: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        no_snapshots()
    }

    async fn list_snapshots(
        &self,
        _: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        no_snapshots()
    }

    async fn get_snapshot(
        &self,
        _: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        no_snapshots()
    }
}

/// Whether the volume can be used in all these ways. That it cannot is an answer, not an error.
fn validated(
    request: ValidateVolumeCapabilitiesRequest,
    volume: &Volume,
) -> ValidateVolumeCapabilitiesResponse {
    let refusal = |asked| match Usage::read(Some(asked)) {
        Ok(usage) => usage.refusal(volume).map(|hold| codes::sentence(&hold)),
        Err(status) => Some(status.message().to_owned()),
    };
    let refused = request.volume_capabilities.iter().find_map(refusal);
    if let Some(message) = refused {
        return ValidateVolumeCapabilitiesResponse {
            confirmed: None,
            message,
        };
    }
    ValidateVolumeCapabilitiesResponse {
        confirmed: Some(Confirmed {
            volume_context: request.volume_context,
            volume_capabilities: request.volume_capabilities,
            parameters: request.parameters,
            mutable_parameters: request.mutable_parameters,
        }),
        message: String::new(),
    }
}
