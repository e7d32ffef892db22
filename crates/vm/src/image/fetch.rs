//! Fetches a file from a web server, and goes on where it stopped.
//!
//! ```text
//!   ask (Range, If-Range) ──▶ redirect? ask there, at most five times
//!      ├─ 200 ──▶ begin anew     ├─ 304 ──▶ unchanged
//!      └─ 206 ──▶ go on          └─ else ──▶ an error, or another try
//!   body: each piece within the stall deadline ──▶ cut off? another try goes on from there
//! ```
//!
//! One request a connection: a download is minutes long, and a pool of connections would serve nobody.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HOST, IF_NONE_MATCH,
    IF_RANGE, LAST_MODIFIED, LOCATION, RANGE, TRANSFER_ENCODING, USER_AGENT,
};
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes as Piece, Incoming};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

use super::partial::Partial;
use super::reference::web;
use super::{DownloadProgress, ImageError, ImageSettings, path_error};

/// How often a server may lead elsewhere.
pub const REDIRECTS_MAX: usize = 5;
/// How often a download is tried before its error counts.
pub const ATTEMPTS_MAX: u32 = 5;

const AGENT: &str = concat!("trellis/", env!("CARGO_PKG_VERSION"));
/// Pieces are gathered to this size before they are written.
const WRITE_BYTES: usize = 1 << 20;
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What came of a download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fetched {
    /// All bytes are there, and by this the server knows them.
    Complete { etag: Option<String> },
    /// They are those that the caller has.
    Unchanged,
}

/// What is to be fetched.
pub(super) struct Wanted<'a> {
    pub reference: &'a str,
    pub url: &'a Uri,
    /// Whether the bytes are checked against a digest in the end.
    pub is_pinned: bool,
    /// By what the server knows the bytes that the caller has.
    pub known: Option<&'a str>,
}

pub(super) struct Fetcher<'a> {
    pub settings: &'a ImageSettings,
    pub tls: Option<&'a Arc<ClientConfig>>,
}

/// A connection that ends with whoever holds this.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Fetcher<'_> {
    /// Fetches all of it, in as many tries as it is given.
    pub async fn fetch(
        &self,
        wanted: &Wanted<'_>,
        partial: &mut Option<Partial>,
        progress: &(dyn Fn(DownloadProgress) + Send + Sync),
    ) -> Result<Fetched, ImageError> {
        let mut attempt = 1;
        loop {
            match self.try_once(wanted, partial, progress).await {
                Err(error) if error.is_passing() && attempt < ATTEMPTS_MAX => {
                    let pause = self.settings.pause.saturating_mul(1 << attempt);
                    sleep(pause.min(PAUSE_MAX)).await;
                    attempt += 1;
                }
                other => return other,
            }
        }
    }

    async fn try_once(
        &self,
        wanted: &Wanted<'_>,
        partial: &mut Option<Partial>,
        progress: &(dyn Fn(DownloadProgress) + Send + Sync),
    ) -> Result<Fetched, ImageError> {
        let (received, validator) = match partial {
            Some(partial) if partial.is_complete() => return Ok(Fetched::Complete { etag: None }),
            Some(partial) => (partial.received, partial.expected.validator.clone()),
            None => (0, None),
        };
        let mut asked = HeaderMap::new();
        let mut ask = |name: HeaderName, value: &str| {
            if let Ok(value) = value.parse() {
                asked.insert(name, value);
            }
        };
        match (&validator, wanted.known) {
            (Some(validator), _) if received > 0 => {
                ask(RANGE, &format!("bytes={received}-"));
                ask(IF_RANGE, validator);
            }
            (_, Some(known)) => ask(IF_NONE_MATCH, known),
            _ => {}
        }
        let (_connection, url, answer) = self.follow(wanted, &asked).await?;
        let bad = |what| ImageError::BadAnswer {
            url: url.clone(),
            what,
        };
        let headers = answer.headers();
        if headers
            .get(CONTENT_ENCODING)
            .is_some_and(|encoding| encoding != "identity")
        {
            return Err(bad("Content-Encoding"));
        }
        let mut open = match partial.take() {
            Some(partial) => partial,
            None => {
                return Err(ImageError::Interrupted {
                    reference: wanted.reference.to_owned(),
                });
            }
        };
        let etag = text(headers, &ETAG);
        let prepared = match answer.status() {
            StatusCode::OK => self.begin(wanted, &mut open, headers, &url),
            StatusCode::PARTIAL_CONTENT => self.go_on(wanted, &mut open, headers, &url),
            StatusCode::NOT_MODIFIED if wanted.known.is_some() && received == 0 => {
                *partial = Some(open);
                return Ok(Fetched::Unchanged);
            }
            // What is here cannot be gone on with.
            StatusCode::RANGE_NOT_SATISFIABLE if received > 0 => {
                open.begin(None, None).and(Err(ImageError::CutOff {
                    url: url.clone(),
                    said: 0,
                    received,
                }))
            }
            status => Err(ImageError::Status {
                url: url.clone(),
                status: status.as_u16(),
            }),
        };
        if let Err(error) = prepared {
            *partial = Some(open);
            return Err(error);
        }
        let (open, done) = self
            .take_in(wanted, &url, open, answer.into_body(), progress)
            .await;
        *partial = open;
        done.map(|()| Fetched::Complete { etag })
    }

    /// The whole file from its beginning.
    fn begin(
        &self,
        wanted: &Wanted<'_>,
        partial: &mut Partial,
        headers: &HeaderMap,
        url: &str,
    ) -> Result<(), ImageError> {
        let said = number(headers, &CONTENT_LENGTH);
        // Without a length and without chunks the end of the connection is the end of the file, wherever it was cut.
        if said.is_none() && !headers.contains_key(TRANSFER_ENCODING) && !wanted.is_pinned {
            let (url, what) = (url.to_owned(), "length");
            return Err(ImageError::BadAnswer { url, what });
        }
        self.check_size(wanted, said.unwrap_or_default())?;
        partial.begin(validator(headers), said)
    }

    /// The rest of a file.
    fn go_on(
        &self,
        wanted: &Wanted<'_>,
        partial: &mut Partial,
        headers: &HeaderMap,
        url: &str,
    ) -> Result<(), ImageError> {
        let bad = ImageError::BadAnswer {
            url: url.to_owned(),
            what: "Content-Range",
        };
        let range = text(headers, &CONTENT_RANGE);
        let range = range
            .as_deref()
            .and_then(|range| range.strip_prefix("bytes ")?.split_once('/'));
        let Some((start, total)) =
            range.and_then(|(span, total)| Some((span.split_once('-')?.0, total)))
        else {
            return Err(bad);
        };
        let (start, now): (Option<u64>, Option<u64>) = (start.parse().ok(), total.parse().ok());
        if start != Some(partial.received) {
            return Err(bad);
        }
        match (partial.expected.said, now) {
            (Some(before), Some(now)) if before != now => {
                partial.begin(None, None)?;
                let url = url.to_owned();
                Err(ImageError::LengthChanged { url, before, now })
            }
            (_, now) => self.check_size(wanted, now.unwrap_or_default()),
        }
    }

    fn check_size(&self, wanted: &Wanted<'_>, bytes: u64) -> Result<(), ImageError> {
        if bytes <= self.settings.size_max.get() {
            return Ok(());
        }
        Err(ImageError::TooLarge {
            reference: wanted.reference.to_owned(),
            max: self.settings.size_max,
        })
    }

    /// Takes the body in. What has arrived counts, however it ends; it is gone only if writing did not end.
    async fn take_in(
        &self,
        wanted: &Wanted<'_>,
        url: &str,
        partial: Partial,
        mut body: Incoming,
        progress: &(dyn Fn(DownloadProgress) + Send + Sync),
    ) -> (Option<Partial>, Result<(), ImageError>) {
        let mut partial = partial;
        let mut gathered: Vec<u8> = Vec::with_capacity(WRITE_BYTES);
        let said = partial.expected.said;
        loop {
            let before = partial
                .received
                .saturating_add(u64::try_from(gathered.len()).unwrap_or_default());
            let ended = match timeout(self.settings.stall, body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    gathered.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                    None
                }
                Ok(None) if said.is_none_or(|said| said == before) => Some(Ok(())),
                Ok(None) => Some(Err(cut_off(url, said, before))),
                // Of a body with a length nothing can go wrong but its end.
                Ok(Some(Err(_))) if said.is_some() => Some(Err(cut_off(url, said, before))),
                Ok(Some(Err(error))) => Some(Err(ImageError::Http {
                    url: url.to_owned(),
                    source: Arc::new(error),
                })),
                Err(_) => Some(Err(ImageError::Stalled {
                    url: url.to_owned(),
                    received: before,
                    after: self.settings.stall,
                })),
            };
            let received = partial
                .received
                .saturating_add(u64::try_from(gathered.len()).unwrap_or_default());
            if let Err(error) = self.check_size(wanted, received) {
                return (Some(partial), Err(error));
            }
            if ended.is_some() || gathered.len() >= WRITE_BYTES {
                let pieces = std::mem::replace(&mut gathered, Vec::with_capacity(WRITE_BYTES));
                match write(partial, pieces).await {
                    Ok((after, written)) => {
                        partial = after;
                        progress(DownloadProgress {
                            received: partial.received,
                            of: said,
                        });
                        if written.is_err() {
                            return (Some(partial), written);
                        }
                    }
                    Err(error) => return (None, Err(error)),
                }
            }
            if let Some(ended) = ended {
                return (Some(partial), ended);
            }
        }
    }

    /// Asks, and follows where the server leads.
    async fn follow(
        &self,
        wanted: &Wanted<'_>,
        asked: &HeaderMap,
    ) -> Result<(Connection, String, Response<Incoming>), ImageError> {
        let mut url = wanted.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let plain = url.scheme_str() == Some("http");
            if plain && !wanted.is_pinned && !self.settings.plain_http {
                let url = url.to_string();
                return Err(ImageError::PlainHttp { url });
            }
            let (connection, answer) = self.ask(&url, asked).await?;
            let leads = matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            if !leads {
                return Ok((connection, url.to_string(), answer));
            }
            let to = text(answer.headers(), &LOCATION).and_then(|to| resolve(&url, &to));
            let to = to.ok_or_else(|| ImageError::BadAnswer {
                url: url.to_string(),
                what: "Location",
            })?;
            if !plain && to.scheme_str() == Some("http") {
                let (url, to) = (url.to_string(), to.to_string());
                return Err(ImageError::Downgrade { url, to });
            }
            url = to;
        }
        let url = wanted.url.to_string();
        Err(ImageError::TooManyRedirects { url })
    }

    async fn ask(
        &self,
        url: &Uri,
        asked: &HeaderMap,
    ) -> Result<(Connection, Response<Incoming>), ImageError> {
        let stalled = |_| ImageError::Stalled {
            url: url.to_string(),
            received: 0,
            after: self.settings.stall,
        };
        let failed = |error| ImageError::Http {
            url: url.to_string(),
            source: Arc::new(error),
        };
        let stream = timeout(self.settings.stall, self.connect(url))
            .await
            .map_err(stalled)??;
        let opened = hyper::client::conn::http1::handshake::<_, Empty<Piece>>(TokioIo::new(stream));
        let (mut sender, connection) = timeout(self.settings.stall, opened)
            .await
            .map_err(stalled)?
            .map_err(failed)?;
        // How a connection ended is said by the body as well.
        let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
        let path = url.path_and_query().map_or("/", |path| path.as_str());
        let authority = url.authority().map_or("", |authority| authority.as_str());
        let request = Request::get(path)
            .header(HOST, authority)
            .header(USER_AGENT, AGENT);
        let mut request = request
            .header(ACCEPT_ENCODING, "identity")
            .body(Empty::new())
            .map_err(|_| ImageError::BadReference {
                text: url.to_string(),
            })?;
        request.headers_mut().extend(asked.clone());
        let answer = timeout(self.settings.stall, sender.send_request(request)).await;
        let answer = answer.map_err(stalled)?.map_err(failed)?;
        Ok((connection, answer))
    }

    async fn connect(&self, url: &Uri) -> Result<Box<dyn Stream>, ImageError> {
        let failed = |error: io::Error| ImageError::Connect {
            url: url.to_string(),
            source: Arc::new(error),
        };
        let host = url
            .host()
            .unwrap_or_default()
            .trim_start_matches('[')
            .trim_end_matches(']');
        let is_tls = url.scheme_str() == Some("https");
        let port = url.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        let tcp = TcpStream::connect((host, port)).await.map_err(failed)?;
        if !is_tls {
            return Ok(Box::new(tcp));
        }
        let config = self.tls.ok_or(ImageError::NoRoots)?;
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| failed(io::Error::other(error)))?;
        let connector = TlsConnector::from(Arc::clone(config));
        Ok(Box::new(
            connector.connect(name, tcp).await.map_err(failed)?,
        ))
    }
}

/// Writes where waiting for a disk holds up nobody else.
async fn write(
    partial: Partial,
    bytes: Vec<u8>,
) -> Result<(Partial, Result<(), ImageError>), ImageError> {
    let path = partial.path.clone();
    let written = tokio::task::spawn_blocking(move || {
        let mut partial = partial;
        let written = partial.append(&bytes);
        (partial, written)
    });
    written
        .await
        .map_err(|error| path_error(&path, io::Error::other(error)))
}

fn cut_off(url: &str, said: Option<u64>, received: u64) -> ImageError {
    ImageError::CutOff {
        url: url.to_owned(),
        said: said.unwrap_or_default(),
        received,
    }
}

fn text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    text(headers, name)?.parse().ok()
}

/// By what parts of one file can be told from parts of another. A weak tag cannot.
fn validator(headers: &HeaderMap) -> Option<String> {
    let strong = text(headers, &ETAG).filter(|tag| tag.starts_with('"'));
    strong.or_else(|| text(headers, &LAST_MODIFIED))
}

/// Where a server leads, seen from `url`.
fn resolve(url: &Uri, to: &str) -> Option<Uri> {
    let scheme = url.scheme_str()?;
    let authority = url.authority()?;
    if to.contains("://") {
        return web(to);
    }
    if let Some(rest) = to.strip_prefix("//") {
        return web(&format!("{scheme}://{rest}"));
    }
    if to.starts_with('/') {
        return web(&format!("{scheme}://{authority}{to}"));
    }
    let directory = url
        .path()
        .rsplit_once('/')
        .map_or("", |(directory, _)| directory);
    web(&format!("{scheme}://{authority}{directory}/{to}"))
}
