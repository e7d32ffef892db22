//! The server for scrapers: plain HTTP on the address that the user gave, `/metrics` and `/healthz`.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::Sources;
use super::text::CONTENT_TYPE;

/// Connections at one time; the next one waits in the kernel's queue. There are only a few scrapers.
const CONNECTIONS_MAX: usize = 16;
/// From the first byte that we wait for to the end of a request's headers; also closes idle connections.
const HEADER_READ_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a connection may live, so that a client that stops reading does not hold its place for ever. A scraper
/// connects again.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(3600);
/// The pause after a failed accept. It fails for lack of descriptors, and would fail again if retried at once.
const ACCEPT_RETRY_AFTER: Duration = Duration::from_millis(100);

/// Answers scrapers, for ever.
pub async fn serve(listener: TcpListener, sources: Arc<Sources>) {
    let scrape = move || {
        let sources = sources.clone();
        async move { sources.scrape().await }
    };
    accept(listener, scrape).await;
}

async fn accept<S, F>(listener: TcpListener, scrape: S)
where
    S: Fn() -> F + Clone + Send + Sync + 'static,
    F: Future<Output = String> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let permit = Arc::clone(&permits).acquire_owned().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a scraper's connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY_AFTER).await;
                continue;
            }
        };
        let scrape = scrape.clone();
        connections.spawn(async move {
            let _permit = permit;
            let lived = tokio::time::timeout(CONNECTION_TIME_MAX, connection(stream, scrape)).await;
            if let Ok(Err(error)) = lived {
                tracing::debug!(%error, "a scraper's connection ended early");
            }
        });
    }
}

async fn connection<S, F>(stream: TcpStream, scrape: S) -> hyper::Result<()>
where
    S: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = String> + Send + 'static,
{
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let answer = answer(request.method(), request.uri().path(), &scrape);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIME_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// The answer to one request. Bodies of requests are not read.
fn answer<S, F>(
    method: &Method,
    path: &str,
    scrape: &S,
) -> impl Future<Output = Response<Full<Bytes>>> + Send + use<S, F>
where
    S: Fn() -> F,
    F: Future<Output = String> + Send + 'static,
{
    let is_read = matches!(*method, Method::GET | Method::HEAD);
    let (status, body) = match (is_read, path) {
        (false, _) => (
            StatusCode::METHOD_NOT_ALLOWED,
            Err("only GET is answered\n"),
        ),
        (true, "/metrics") => (StatusCode::OK, Ok(scrape())),
        (true, "/healthz") => (StatusCode::OK, Err("ok\n")),
        (true, _) => (StatusCode::NOT_FOUND, Err("metrics are at /metrics\n")),
    };
    async move {
        let (kind, body) = match body {
            Ok(scrape) => (CONTENT_TYPE, Bytes::from(scrape.await)),
            Err(words) => (
                "text/plain; charset=utf-8",
                Bytes::from_static(words.as_bytes()),
            ),
        };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        if status == StatusCode::METHOD_NOT_ALLOWED {
            headers.insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        response
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn asked(method: Method, path: &str) -> (u16, String, String) {
        let scrape = || async { "sample 1\n".to_owned() };
        let response = answer(&method, path, &scrape).await;
        let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap();
        let (status, kind) = (response.status().as_u16(), kind.to_owned());
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, kind, String::from_utf8(body.to_vec()).unwrap())
    }

    // Fails if a scraper gets another type than it understands, or a stray path or verb gets the samples.
    #[tokio::test]
    async fn only_the_known_paths_are_answered() {
        let plain = "text/plain; charset=utf-8".to_owned();
        assert_eq!(
            asked(Method::GET, "/metrics").await,
            (200, CONTENT_TYPE.to_owned(), "sample 1\n".to_owned())
        );
        assert_eq!(
            asked(Method::GET, "/healthz").await,
            (200, plain.clone(), "ok\n".to_owned())
        );
        let (status, _, _) = asked(Method::GET, "/metrics/").await;
        assert_eq!(status, 404);
        let (status, _, body) = asked(Method::POST, "/metrics").await;
        assert_eq!((status, body.as_str()), (405, "only GET is answered\n"));
    }

    // Fails if a client that sends nonsense, or nothing, takes the door away from the others.
    #[tokio::test]
    async fn bad_clients_do_not_close_the_door() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let door = tokio::spawn(accept(listener, || async { "sample 1\n".to_owned() }));
        let _silent = TcpStream::connect(address).await.unwrap();
        let mut nonsense = TcpStream::connect(address).await.unwrap();
        nonsense.write_all(b"\0\xff\r\n\r\n").await.unwrap();
        let mut good = TcpStream::connect(address).await.unwrap();
        good.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut said = String::new();
        good.read_to_string(&mut said).await.unwrap();
        assert!(said.starts_with("HTTP/1.1 200 OK\r\n"), "{said}");
        assert!(said.ends_with("\r\n\r\nsample 1\n"), "{said}");
        door.abort();
    }
}
