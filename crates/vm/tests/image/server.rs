//! Web servers for the tests: one of hyper that does as its handler says, and one that lies.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// How a body ends.
#[derive(Clone, Copy)]
pub enum Ending {
    Well,
    Cut,
    Never,
}

pub struct Script {
    left: Bytes,
    ending: Ending,
}

impl Body for Script {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if !self.left.is_empty() {
            let count = self.left.len().min(64 << 10);
            return Poll::Ready(Some(Ok(Frame::data(self.left.split_to(count)))));
        }
        match self.ending {
            Ending::Well => Poll::Ready(None),
            Ending::Cut => Poll::Ready(Some(Err(io::Error::other("cut")))),
            Ending::Never => Poll::Pending,
        }
    }
}

pub fn answer(
    status: u16,
    headers: &[(&str, &str)],
    bytes: &[u8],
    ending: Ending,
) -> Response<Script> {
    let builder = headers.iter().fold(
        Response::builder().status(status),
        |builder, (name, value)| builder.header(*name, *value),
    );
    let left = Bytes::copy_from_slice(bytes);
    builder.body(Script { left, ending }).unwrap()
}

pub fn whole(bytes: &[u8], etag: &str) -> Response<Script> {
    let length = bytes.len().to_string();
    answer(
        200,
        &[("content-length", &length), ("etag", etag)],
        bytes,
        Ending::Well,
    )
}

/// Answers as an honest server does, with ranges and tags.
pub fn honest(request: &Request<Incoming>, bytes: &[u8], etag: &str) -> Response<Script> {
    let header = |name: &str| {
        request
            .headers()
            .get(name)
            .and_then(|value| value.to_str().ok())
    };
    if header("if-none-match") == Some(etag) {
        return answer(304, &[], &[], Ending::Well);
    }
    let start = header("range").and_then(|range| {
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse::<usize>()
            .ok()
    });
    match start {
        Some(start) if header("if-range") == Some(etag) => {
            let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
            let length = (bytes.len() - start).to_string();
            answer(
                206,
                &[
                    ("content-range", &range),
                    ("content-length", &length),
                    ("etag", etag),
                ],
                &bytes[start..],
                Ending::Well,
            )
        }
        _ => whole(bytes, etag),
    }
}

pub type Seen = Arc<Mutex<Vec<String>>>;

/// A server that runs until its runtime ends. It is told how many requests came before.
pub async fn serve(
    tls: Option<TlsAcceptor>,
    handler: impl Fn(&Request<Incoming>, usize) -> Response<Script> + Send + Sync + 'static,
) -> (SocketAddr, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (seen, handler) = (Seen::default(), Arc::new(handler));
    let log = Arc::clone(&seen);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (handler, log, tls) = (Arc::clone(&handler), Arc::clone(&log), tls.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let range = request
                        .headers()
                        .get("range")
                        .map_or("", |range| range.to_str().unwrap())
                        .to_owned();
                    let before = {
                        let mut log = log.lock().unwrap();
                        log.push(format!("{} {range}", request.uri().path()));
                        log.len() - 1
                    };
                    let answer = handler(&request, before);
                    async move { Ok::<_, Infallible>(answer) }
                });
                let builder = hyper::server::conn::http1::Builder::new();
                match tls {
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            let _ = builder
                                .serve_connection(TokioIo::new(stream), service)
                                .await;
                        }
                    }
                    None => drop(
                        builder
                            .serve_connection(TokioIo::new(stream), service)
                            .await,
                    ),
                }
            });
        }
    });
    (address, seen)
}

/// A server that sends these bytes to whoever asks, and closes: no library lies that well. Says how often it was asked.
pub async fn liar(bytes: Vec<u8>) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).await.unwrap();
                request.extend(byte);
            }
            count.fetch_add(1, Ordering::SeqCst);
            stream.write_all(&bytes).await.unwrap();
            stream.shutdown().await.unwrap();
        }
    });
    (address, asked)
}
