//! The door: HTTPS, for clients that are other programs.
//!
//! Happy path: accept, TLS handshake, HTTP/2 or HTTP/1.1 as agreed in it, the token, the service. The token says who the
//! client is; what it may do is the service's to decide. A client without a token that counts gets 401.
//!
//! Any user of the machine, or of the network, can connect. So connections that have not shown a token have a few places
//! of their own (`waiting_room`). When these are taken, a new connection takes the place of the oldest. A stranger with
//! many connections cannot keep a client out.
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

use self::waiting_room::{Places, Seat, WaitingRoom};
use crate::authorize::OPEN_PATHS;
use crate::pki::{Pki, Token};
use crate::users::{Caller, User};
use crate::{EmbeddedApi, Visit};

/// How many connections there may be at one time. A node has fewer than the administrator and may do less, so that no
/// node can keep others out.
const PLACES: Places = Places {
    unproven: 64,
    of_admin: 512,
    of_each_node: 64,
};
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

/// An error of any kind, as tower and hyper pass them around.
type BoxError = Box<dyn Error + Send + Sync>;

/// A loopback listener; port 0 takes any free port.
pub async fn bind(port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await
}

/// Knows the users whose tokens are not in a file.
pub trait Users {
    /// The user whose token this is.
    fn with_token(&self, shown: &[u8]) -> Option<Caller>;
}

impl Users for EmbeddedApi {
    fn with_token(&self, shown: &[u8]) -> Option<Caller> {
        self.node_with_token(shown)
    }
}

/// Serves `service` over HTTPS to clients that show a token, until `shutdown` resolves.
pub async fn serve<S, B>(
    listener: TcpListener,
    pki: &Pki,
    service: S,
    shutdown: impl Future<Output = ()>,
) where
    S: Service<Visit<Incoming>, Response = Response<B>> + Users + Clone + Send + Sync + 'static,
    S::Future: Send,
    S::Error: Into<BoxError> + Send,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let acceptor = TlsAcceptor::from(Arc::clone(&pki.tls));
    let room = WaitingRoom::new(PLACES);
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
    S: Service<Visit<Incoming>, Response = Response<B>> + Users + Clone + Send + Sync + 'static,
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
        let caller = caller(&request, &token, &service);
        if let Some(caller) = &caller
            && *caller.user() != User::Anybody
        {
            seat.prove(caller.user());
        }
        async move { Ok::<_, Infallible>(answer(service, request, caller).await) }
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

/// Who makes a request; `None` if it shows no token that counts, and asks for more than anybody may know.
fn caller<B>(request: &Request<B>, token: &Token, users: &impl Users) -> Option<Caller> {
    let shown = shown_token(request);
    let known = shown.and_then(|shown| match token.is(shown) {
        true => Some(Caller::ADMIN),
        false => users.with_token(shown),
    });
    let open = OPEN_PATHS.contains(&request.uri().path());
    known.or_else(|| open.then_some(Caller::ANYBODY))
}

fn shown_token<B>(request: &Request<B>) -> Option<&[u8]> {
    // The scheme's name is case-insensitive, the token is not.
    const SCHEME: &[u8] = b"bearer ";
    let shown = request.headers().get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, shown) = shown.split_at_checked(SCHEME.len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(SCHEME);
    is_bearer.then(|| shown.trim_ascii())
}

async fn answer<S, B>(
    service: S,
    request: Request<Incoming>,
    caller: Option<Caller>,
) -> Response<Either<B, Full<Bytes>>>
where
    S: Service<Visit<Incoming>, Response = Response<B>>,
    S::Error: Into<BoxError>,
{
    let Some(caller) = caller else {
        return failure(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized");
    };
    match service.oneshot(Visit { caller, request }).await {
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
