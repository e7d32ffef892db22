use std::pin::Pin;
use std::task::{Context, Poll};

use http_body_util::BodyExt;
use hyper::client::conn::{http1 as client1, http2 as client2};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use super::*;

/// A server whose service answers every request with the path that was asked for.
struct Server {
    address: SocketAddr,
    pki: Pki,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    _directory: tempfile::TempDir,
}

/// Answers with the path, and with who asked if it was not the administrator.
#[derive(Clone)]
struct Echo;

impl Users for Echo {
    fn with_token(&self, shown: &[u8]) -> Option<Caller> {
        (shown == NODE_TOKEN).then(|| Caller::of(User::Node("b".into())))
    }
}

const NODE_TOKEN: &[u8] = b"b.secret";

impl Service<Visit<Incoming>> for Echo {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, visit: Visit<Incoming>) -> Self::Future {
        Box::pin(async move {
            let path = visit.request.uri().path();
            if path == "/hang" {
                std::future::pending::<()>().await;
            }
            let said = match visit.caller.user() {
                User::Node(name) => format!("{name} {path}"),
                User::Admin | User::Anybody => path.to_owned(),
            };
            Ok(Response::new(Full::new(Bytes::from(said))))
        })
    }
}

impl Server {
    async fn start() -> Server {
        let directory = tempfile::tempdir().unwrap();
        let pki = Pki::open(directory.path(), None).unwrap();
        let listener = bind(0).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn({
            let pki = pki.clone();
            async move {
                serve(listener, &pki, Echo, async {
                    let _ = stopped.await;
                })
                .await;
            }
        });
        Server {
            address,
            pki,
            stop,
            task,
            _directory: directory,
        }
    }

    async fn connect(
        &self,
        protocol: &[u8],
        name: &str,
    ) -> tokio_rustls::client::TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.pki.ca_pem.as_bytes()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.to_vec()];
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
            .unwrap()
    }

    async fn get(&self, path: &str, authorization: Option<&str>) -> (u16, String) {
        let stream = self.connect(b"http/1.1", "127.0.0.1").await;
        let (mut sender, connection) = client1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let mut request = Request::get(path).header(header::HOST, "127.0.0.1");
        if let Some(authorization) = authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        read(
            sender
                .send_request(request.body(Full::<Bytes>::default()).unwrap())
                .await
                .unwrap(),
        )
        .await
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.pki.token.as_str())
    }
}

async fn read(response: Response<Incoming>) -> (u16, String) {
    let code = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (code, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn a_client_with_the_token_is_served_in_both_versions_of_http_and_under_every_name() {
    // Fails when the protocol is not agreed in the handshake, or the certificate lacks a name.
    let server = Server::start().await;
    assert_eq!(
        server.get("/api/v1/pods", Some(&server.bearer())).await,
        (200, "/api/v1/pods".to_owned())
    );
    for name in ["localhost", "127.0.0.1", "::1"] {
        let stream = server.connect(b"h2", name).await;
        let (mut sender, connection) =
            client2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .unwrap();
        tokio::spawn(connection);
        let request = Request::get("https://localhost/apis")
            .header(header::AUTHORIZATION, server.bearer())
            .body(Full::<Bytes>::default())
            .unwrap();
        assert_eq!(
            read(sender.send_request(request).await.unwrap()).await,
            (200, "/apis".to_owned())
        );
    }
}

#[tokio::test]
async fn without_the_token_only_health_and_version_answer() {
    // Fails when a request without the right token reaches the service, or is refused in a form kubectl cannot read.
    let server = Server::start().await;
    let token = server.pki.token.as_str().to_owned();
    let wrong = [
        None,
        Some("Bearer wrong".to_owned()),
        Some(format!("Basic {token}")),
        Some(format!("Bearer {token}0")),
        Some(token),
    ];
    for authorization in wrong {
        let (code, body) = server
            .get("/api/v1/secrets", authorization.as_deref())
            .await;
        let status: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (code, &status["reason"], &status["kind"]),
            (401, &json!("Unauthorized"), &json!("Status"))
        );
        assert_eq!(
            server
                .get("/healthz/../api", authorization.as_deref())
                .await
                .0,
            401
        );
        for open in OPEN_PATHS {
            assert_eq!(
                server.get(open, authorization.as_deref()).await,
                (200, open.to_owned())
            );
        }
    }
}

#[tokio::test]
async fn a_stop_ends_the_server_even_while_a_request_hangs() {
    // Fails by never ending, when a watch that is open keeps the process from stopping.
    let server = Server::start().await;
    let stream = server.connect(b"http/1.1", "localhost").await;
    let (mut sender, connection) = client1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("/hang")
        .header(header::HOST, "localhost")
        .header(header::AUTHORIZATION, server.bearer())
        .body(Full::<Bytes>::default())
        .unwrap();
    let hanging = tokio::spawn(sender.send_request(request));
    assert_eq!(server.get("/livez", None).await.0, 200);
    server.stop.send(()).unwrap();
    server.task.await.unwrap();
    assert!(hanging.await.unwrap().is_err());
    assert!(TcpStream::connect(server.address).await.is_err());
}

#[tokio::test]
async fn strangers_cannot_take_all_connections() {
    // Fails if connections that show no token can keep out a client that has it, or cost a client its connection.
    let server = Server::start().await;
    let stream = server.connect(b"h2", "localhost").await;
    let (mut sender, connection) = client2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    let mut ask = async |path: &str| {
        let request = Request::get(format!("https://localhost{path}"))
            .header(header::AUTHORIZATION, server.bearer())
            .body(Full::<Bytes>::default())
            .unwrap();
        read(sender.send_request(request).await.unwrap()).await
    };
    assert_eq!(ask("/before").await, (200, "/before".to_owned()));
    let mut strangers = Vec::new();
    for _ in 0..PLACES.of_admin + PLACES.unproven + 10 {
        strangers.push(TcpStream::connect(server.address).await.unwrap());
    }
    let bearer = server.bearer();
    let newcomer = server.get("/new", Some(&bearer));
    let newcomer = tokio::time::timeout(HANDSHAKE_TIME_MAX / 2, newcomer).await;
    assert_eq!(newcomer.unwrap(), (200, "/new".to_owned()));
    assert_eq!(ask("/after").await, (200, "/after".to_owned()));
}

#[tokio::test]
async fn a_node_is_known_by_its_token() {
    // Fails if a node's token is not let in, or is taken for the administrator's.
    let server = Server::start().await;
    let token = std::str::from_utf8(NODE_TOKEN).unwrap();
    let (code, said) = server.get("/x", Some(&format!("Bearer {token}"))).await;
    assert_eq!((code, said.as_str()), (200, "b /x"));
    assert_eq!(
        server.get("/x", Some(&format!("Bearer {token}x"))).await.0,
        401
    );
}
