//! How the kubelet learns of the driver: it finds a socket in its directory of plugins, and asks it two things.

use std::path::PathBuf;

use tonic::{Request, Response, Status};
use trellis_api::kinds::PROVISIONER;

use crate::proto::registration::registration_server::Registration;
use crate::proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};

/// What the kubelet calls a CSI driver.
const PLUGIN_TYPE: &str = "CSIPlugin";
/// The version of the protocol, in the kubelet's words.
const PROTOCOL_VERSION: &str = "1.0.0";

/// The service.
pub struct RegistrationService {
    /// The socket at which the node service answers.
    pub(crate) endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: PLUGIN_TYPE.to_owned(),
            name: PROVISIONER.to_owned(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: vec![PROTOCOL_VERSION.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let told = request.into_inner();
        match told.plugin_registered {
            true => tracing::info!("the kubelet has registered the driver"),
            // The kubelet asks again when its socket appears anew; a person has to find out why it refused.
            false => tracing::error!(why = told.error, "the kubelet has refused the driver"),
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
