//! The Identity service: who the driver is, and whether it works.

use kube::api::ListParams;
use tonic::{Request, Response, Status};
use trellis_api::kinds::PROVISIONER;

use crate::codes;
use crate::objects::Objects;
use crate::proto::csi::identity_server::Identity;
use crate::proto::csi::plugin_capability::service::Type as ServiceType;
use crate::proto::csi::plugin_capability::volume_expansion::Type as ExpansionType;
use crate::proto::csi::plugin_capability::{Service, Type, VolumeExpansion};
use crate::proto::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, PluginCapability, ProbeRequest, ProbeResponse,
};

/// The service.
pub struct IdentityService {
    pub(crate) objects: Objects,
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: PROVISIONER.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: Default::default(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let service = |of: ServiceType| Type::Service(Service { r#type: of.into() });
        let online = Type::VolumeExpansion(VolumeExpansion {
            r#type: ExpansionType::Online.into(),
        });
        let all = [
            service(ServiceType::ControllerService),
            service(ServiceType::VolumeAccessibilityConstraints),
            online,
        ];
        let capability = |each| PluginCapability { r#type: Some(each) };
        Ok(Response::new(GetPluginCapabilitiesResponse {
            capabilities: all.into_iter().map(capability).collect(),
        }))
    }

    /// Ready if the API answers: without it no call can be done.
    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        let one = ListParams::default().limit(1);
        let asked = self.objects.volumes().list_metadata(&one).await;
        asked.map_err(|error| codes::from_api(&error, "the API"))?;
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}
