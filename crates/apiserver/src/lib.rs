//! The Kubernetes API, embedded: a tower service on one redb file.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let api = trellis_apiserver::EmbeddedApi::open("state.redb".as_ref())?;
//! let client: kube::Client = api.client();
//! # Ok(()) }
//! ```
//!
//! Every verb (`verbs/`) is generic over kinds; a kind is a row (`kinds/`). Reads are answered from memory. Writes go
//! through one thread that makes a batch of them durable with one flush (`store/`). No reader, watch or caller sees a
//! write before that.
//!
//! It is not a second Kubernetes. It has no scheduler, no kubelet and no aggregation, and only the admission that
//! claims, volumes and namespaces need.

mod authorize;
pub mod backup;
mod cascade;
mod decode;
mod discovery;
mod error;
mod events;
mod kind;
mod kinds;
mod managed;
mod meta;
mod names;
mod openapi;
mod patch;
mod pipeline;
mod request;
mod selector;
mod server;
mod status;
mod store;
mod table;
pub mod users;
mod verbs;

pub mod kubeconfig;
pub mod listen;
pub mod pki;
mod protobuf_body;

use std::convert::Infallible;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use serde_json::json;
use tower::ServiceExt;

pub use error::{Damage, Error};
pub use server::{ApiBody, BACKUP_PATH, Visit};
pub use store::Stats;

use authorize::Verb;
use managed::Writer;
use pipeline::Ownership;
use store::{Store, Txn};
use users::{Caller, NODE_LEASES_NAMESPACE, NODE_TOKENS_NAMESPACE, User};

/// Namespaces that exist from the start.
const FIRST_NAMESPACES: [&str; 3] = ["default", NODE_TOKENS_NAMESPACE, NODE_LEASES_NAMESPACE];
/// The name under which the server's own writes stand in `managedFields`.
const OWN_MANAGER: &str = "trellis";

/// The embedded API. Clones share one store; the last one to go closes the file.
#[derive(Clone, Debug)]
pub struct EmbeddedApi {
    store: Arc<Store>,
}

impl EmbeddedApi {
    /// Opens the file, or makes an empty one. A damaged file, or one that is not a store, is refused and left alone.
    pub fn open(path: &Path) -> Result<EmbeddedApi, Error> {
        let store = Store::open(path, kinds::all(), prepare)?;
        Ok(EmbeddedApi {
            store: Arc::new(store),
        })
    }

    /// A client in the namespace `default`.
    pub fn client(&self) -> kube::Client {
        kube::Client::new(self.clone(), "default")
    }

    /// A client that asks as that user, and may do what that user may.
    pub fn client_as(&self, user: User) -> kube::Client {
        let caller = Caller::of(user);
        let named = move |request: Request<kube::client::Body>| Visit {
            caller: caller.clone(),
            request,
        };
        let service = ServiceExt::<Visit<kube::client::Body>>::map_request(self.clone(), named);
        kube::Client::new(service, "default")
    }

    /// Answers a request of this process, which may do everything.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<ApiBody>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let caller = Caller::ADMIN;
        self.receive(Visit { caller, request }).await
    }

    /// Answers a request of whoever it is.
    pub async fn receive<B>(&self, visit: Visit<B>) -> Response<ApiBody>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        server::respond(&self.store, visit).await
    }

    /// The node whose token this is, if it is one that counts.
    pub fn node_with_token(&self, shown: &[u8]) -> Option<Caller> {
        Caller::with_node_token(&self.store.shared, shown)
    }

    /// Everything that is stored, as of one moment.
    pub fn backup(&self) -> backup::Backup {
        self.store.backup()
    }

    /// How much has been written since the file was opened.
    pub fn stats(&self) -> Stats {
        self.store.stats()
    }
}

impl<B> tower::Service<Request<B>> for EmbeddedApi
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<ApiBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ApiBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let caller = Caller::ADMIN;
        tower::Service::<Visit<B>>::call(self, Visit { caller, request })
    }
}

impl<B> tower::Service<Visit<B>> for EmbeddedApi
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<ApiBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ApiBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, visit: Visit<B>) -> Self::Future {
        let api = self.clone();
        if visit.request.method().is_safe() {
            return Box::pin(async move { Ok(api.receive(visit).await) });
        }
        let arriving = self.store.arriving();
        Box::pin(async move { Ok(arriving.during(api.receive(visit)).await) })
    }
}

/// The first write of every run: makes the first namespaces, finishes what an earlier run began, and brings what an
/// earlier release stored into the present form.
fn prepare(txn: &mut Txn<'_>) -> Result<(), status::Status> {
    let writer = Writer {
        caller: Caller::ADMIN,
        verb: Verb::Create,
        manager: OWN_MANAGER.to_owned(),
        subresource: "",
        now: meta::time(jiff::Timestamp::now()),
    };
    if let Some(namespaces) = txn.kind_index("namespaces") {
        for name in FIRST_NAMESPACES {
            if txn
                .get(&store::memory::Id::new(namespaces, "", name))
                .is_none()
            {
                let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
                pipeline::insert(txn, namespaces, "", namespace, &writer, Ownership::Record)?;
            }
        }
    }
    cascade::repair(txn);
    kinds::earlier::convert(txn);
    Ok(())
}
