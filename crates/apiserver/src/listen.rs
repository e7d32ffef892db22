//! The door: HTTPS on loopback, for clients that are other programs.
//!
//! Happy path: accept, TLS handshake, HTTP/2 or HTTP/1.1 as agreed in it, the token, the service. A client without the
//! right token gets 401.
//!
//! Any user of the machine can connect. So connections that have not shown the token have a few places of their own
//! (`waiting_room`). When these are taken, a new connection takes the place of the oldest. A stranger with many
//! connections cannot keep a client out.
//!
//! At shutdown no new connection is accepted, requests in flight may finish within a time limit, and then the rest is
//! cut. (Watches never finish by themselves.)

mod waiting_room;

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::{Service, ServiceExt};

use self::waiting_room::{Seat, WaitingRoom};
use crate::pki::{Pki, Token};

/// Connections at one time that have shown the token. The next one is closed.
const PROVEN_MAX: usize = 512;
/// Connections at one time that have not.
const UNPROVEN_MAX: usize = 64;
/// Requests at one time on one HTTP/2 connection.
const STREAMS_MAX: u32 = 250;
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// The time limit from the first byte to the end of a request's headers; also closes idle HTTP/1.1 connections.
const HEADER_READ_TIME_MAX: Duration = Duration::from_secs(30);
/// How often a silent HTTP/2 peer is asked whether it is still there, and how long it may take to answer.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_TIME_MAX: Duration = Duration::from_secs(10);
/// How long requests in flight may take once the server stops.
const DRAIN_TIME_MAX: Duration = Duration::from_millis(500);
/// Pause after a failed accept: it fails for lack of descriptors, and would fail again if retried at once.
const ACCEPT_RETRY_AFTER: Duration = Duration::from_millis(100);

/// Paths that need no token: they reveal only that the server is there, and its version.
const OPEN_PATHS: [&str; 4] = ["/healthz", "/livez", "/readyz", "/version"];

/// An error of any kind, as tower and hyper pass them around.
type BoxError = Box<dyn Error + Send + Sync>;

/// A loopback listener; port 0 takes any free port.
pub async fn bind(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await
}

/// Serves `service` over HTTPS to clients that show the token, until `shutdown` resolves.
pub async fn serve<S, B>(
    listener: TcpListener,
    pki: &Pki,
    service: S,
    shutdown: impl Future<Output = ()>,
) where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + Sync + 'static,
    S::Future: Send,
    S::Error: Into<BoxError> + Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let acceptor = TlsAcceptor::from(Arc::clone(&pki.tls));
    let room = WaitingRoom::new(UNPROVEN_MAX, PROVEN_MAX);
    let (stop, stopped) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY_AFTER).await;
                continue;
            }
        };
        let (acceptor, token, service, stopped) = (
            acceptor.clone(),
            pki.token.clone(),
            service.clone(),
            stopped.clone(),
        );
        let (seat, shown_out) = room.enter();
        connections.spawn(async move {
            let served = connection(stream, &acceptor, token, seat, service, stopped);
            tokio::select! {
                ended = served => if let Err(error) = ended {
                    tracing::debug!(error, "a connection ended early");
                },
                () = shown_out.wait() => {
                    tracing::debug!("a connection was closed to make room for another");
                }
            }
        });
    }
    drop(listener);
    // Fails only when no connection is left to hear it.
    let _ = stop.send(true);
    let drained = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN_TIME_MAX, drained).await.is_err() {
        connections.shutdown().await;
    }
}

async fn connection<S, B>(
    stream: TcpStream,
    acceptor: &TlsAcceptor,
    token: Token,
    seat: Seat,
    service: S,
    mut stopped: watch::Receiver<bool>,
) -> Result<(), BoxError>
where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + Sync + 'static,
    S::Future: Send,
    S::Error: Into<BoxError> + Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    stream.set_nodelay(true)?;
    let stream: TlsStream<TcpStream> =
        tokio::time::timeout(HANDSHAKE_TIME_MAX, acceptor.accept(stream)).await??;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let guarded = service_fn(move |request: Request<Incoming>| {
        let service = service.clone();
        let access = access(&request, &token);
        if access == Access::Proven {
            seat.prove();
        }
        let allowed = access != Access::Denied;
        async move { Ok::<_, Infallible>(answer(service, request, allowed).await) }
    });
    // Both kinds of connection are driven the same way, but share no trait.
    macro_rules! drive {
        ($connection:expr) => {{
            let mut connection = pin!($connection);
            tokio::select! {
                ended = connection.as_mut() => return ended.map_err(Into::into),
                _ = stopped.wait_for(|stopped| *stopped) => connection.as_mut().graceful_shutdown(),
            }
            connection.await.map_err(Into::into)
        }};
    }
    if is_http2 {
        drive!(
            http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS_MAX)
                .keep_alive_interval(PING_EVERY)
                .keep_alive_timeout(PING_TIME_MAX)
                .serve_connection(TokioIo::new(stream), guarded)
        )
    } else {
        drive!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_READ_TIME_MAX)
                .serve_connection(TokioIo::new(stream), guarded)
        )
    }
}

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// It shows the token.
    Proven,
    /// It shows none, and asks for what anybody may know.
    Open,
    Denied,
}

fn access<B>(request: &Request<B>, token: &Token) -> Access {
    if shows_token(request, token) {
        Access::Proven
    } else if OPEN_PATHS.contains(&request.uri().path()) {
        Access::Open
    } else {
        Access::Denied
    }
}

fn shows_token<B>(request: &Request<B>, token: &Token) -> bool {
    let Some(shown) = request
        .headers()
        .get(header::AUTHORIZATION)
        .map(HeaderValue::as_bytes)
    else {
        return false;
    };
    // The scheme's name is case-insensitive, the token is not.
    const SCHEME: &[u8] = b"bearer ";
    match shown.split_at_checked(SCHEME.len()) {
        Some((scheme, shown)) => {
            scheme.eq_ignore_ascii_case(SCHEME) && token.is(shown.trim_ascii())
        }
        None => false,
    }
}

async fn answer<S, B>(
    service: S,
    request: Request<Incoming>,
    allowed: bool,
) -> Response<Either<B, Full<Bytes>>>
where
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Error: Into<BoxError>,
{
    if !allowed {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized");
    }
    match service.oneshot(request).await {
        Ok(response) => response.map(Either::Left),
        Err(error) => {
            let error: BoxError = error.into();
            tracing::error!(error, "a request could not be answered");
            failure(
                StatusCode::INTERNAL_SERVER_ERROR,
                "InternalError",
                "the server could not answer; see its log",
            )
        }
    }
}

/// An answer that the service did not give, in Kubernetes' form.
fn failure<B>(code: StatusCode, reason: &str, message: &str) -> Response<Either<B, Full<Bytes>>> {
    let status = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code.as_u16(),
    });
    let mut response = Response::new(Either::Right(Full::from(status.to_string())));
    *response.status_mut() = code;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
