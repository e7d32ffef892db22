//! A caller of the driver, for those who test it.

use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::error::Error;
use crate::proto::csi::controller_client::ControllerClient;
use crate::proto::csi::identity_client::IdentityClient;
use crate::proto::csi::node_client::NodeClient;
use crate::proto::registration::registration_client::RegistrationClient;

/// What a Unix socket is called where a name is needed.
const AUTHORITY: &str = "http://localhost";

/// The driver behind a socket.
#[derive(Clone, Debug)]
pub struct Driver {
    /// Who it is.
    pub identity: IdentityClient<Channel>,
    /// Volumes, wherever they are.
    pub controller: ControllerClient<Channel>,
    /// Volumes on its node.
    pub node: NodeClient<Channel>,
    /// How it makes itself known to a kubelet.
    pub registration: RegistrationClient<Channel>,
}

/// Connects to the driver at that socket.
pub async fn connect(socket: &Path) -> Result<Driver, Error> {
    let path: PathBuf = socket.to_owned();
    let dial = service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static(AUTHORITY);
    let channel = endpoint.connect_with_connector(dial).await;
    let channel = channel.map_err(|source| Error::Unanswered {
        path: socket.to_owned(),
        source,
    })?;
    Ok(Driver {
        identity: IdentityClient::new(channel.clone()),
        controller: ControllerClient::new(channel.clone()),
        node: NodeClient::new(channel.clone()),
        registration: RegistrationClient::new(channel),
    })
}
