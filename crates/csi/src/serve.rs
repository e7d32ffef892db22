//! Serves the driver on its socket.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use futures::stream;
use kube::Client;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic::{Code, Status};

use crate::controller::ControllerService;
use crate::error::Error;
use crate::host::Host;
use crate::identity::IdentityService;
use crate::node::NodeService;
use crate::objects::Objects;
use crate::proto::csi::controller_server::ControllerServer;
use crate::proto::csi::identity_server::IdentityServer;
use crate::proto::csi::node_server::NodeServer;
use crate::proto::registration::registration_server::RegistrationServer;
use crate::registration::RegistrationService;
use crate::socket::{Name, Socket};
use crate::turns::Turns;

/// How many calls of one connection are worked on at a time.
const CALLS_MAX: usize = 64;

/// What is served, next to who the driver is.
#[derive(Clone)]
pub struct Roles {
    /// Volumes, wherever they are.
    pub controller: bool,
    /// Volumes on this node.
    pub node: Option<NodeRole>,
}

/// The node that volumes are brought to.
#[derive(Clone)]
pub struct NodeRole {
    /// Its name.
    pub name: String,
    /// Its machine.
    pub host: Arc<dyn Host>,
    /// The directory below which everything has to appear; none for anywhere.
    pub below: Option<PathBuf>,
}

/// Serves the driver until `stopped`.
pub async fn serve(
    socket: Socket,
    client: Client,
    roles: Roles,
    stopped: impl Future<Output = ()>,
) -> Result<(), Error> {
    let objects = Objects(client);
    let identity = IdentityService {
        objects: objects.clone(),
    };
    let controller = roles
        .controller
        .then(|| ControllerService::new(objects.clone()));
    let node = roles.node.map(|role| NodeService {
        objects,
        name: role.name,
        host: role.host,
        below: role.below,
        turns: Turns::default(),
    });
    let router = Server::builder()
        .concurrency_limit_per_connection(CALLS_MAX)
        .add_service(IdentityServer::new(identity))
        .add_optional_service(controller.map(ControllerServer::new))
        .add_optional_service(node.map(NodeServer::new));
    run(socket, router, stopped).await
}

/// Tells the kubelet, at a socket in its directory of plugins, that the driver answers at `endpoint`.
pub async fn register(
    socket: Socket,
    endpoint: PathBuf,
    stopped: impl Future<Output = ()>,
) -> Result<(), Error> {
    let service = RegistrationService { endpoint };
    let router = Server::builder().add_service(RegistrationServer::new(service));
    run(socket, router, stopped).await
}

async fn run(
    socket: Socket,
    router: Router,
    stopped: impl Future<Output = ()>,
) -> Result<(), Error> {
    let Socket { listener, name } = socket;
    let Name(path) = &name;
    let incoming = stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    });
    let served = router.serve_with_incoming_shutdown(incoming, stopped).await;
    served.map_err(|source| Error::Served {
        path: path.clone(),
        source,
    })
}

/// Logs what was refused. Requests are never logged: they come from outside, and may hold what is nobody's business.
pub(crate) fn told<T>(call: &'static str, result: Result<T, Status>) -> Result<T, Status> {
    if let Err(status) = &result {
        let (code, why) = (status.code(), status.message());
        match code {
            Code::Internal => tracing::error!(call, why, "a call has failed; this is a bug"),
            _ => tracing::info!(call, ?code, why, "a call was refused"),
        }
    }
    result
}
