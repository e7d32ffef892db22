//! From an HTTP request to the verb that answers it, and back.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WARNING};
use http::{Method, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use serde_json::Value;

use crate::authorize::{Decision, Verb, decide_path};
use crate::kind::Part;
use crate::request::{self, Query, Target};
use crate::status::Status;
use crate::store::Store;
use crate::users::{Caller, User};
use crate::verbs::watch::Frames;
use crate::verbs::{self, Answer, Call};
use crate::{discovery, openapi};

const JSON: &str = "application/json";
/// A warning is cut at this length, so that headers stay small.
const WARNING_BYTES_MAX: usize = 512;

/// Where a client with the token gets a backup of the store.
pub const BACKUP_PATH: &str = "/debug/backup";

/// A request, and who makes it.
#[derive(Debug)]
pub struct Visit<B> {
    /// Who it is.
    pub caller: Caller,
    /// What is asked for.
    pub request: Request<B>,
}

/// The body of an answer: whole, or the frames of a watch.
pub struct ApiBody(Content);

enum Content {
    Whole(Option<Bytes>),
    Watch(Frames),
}

impl std::fmt::Debug for ApiBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match &self.0 {
            Content::Whole(bytes) => return f.debug_tuple("ApiBody").field(bytes).finish(),
            Content::Watch(_) => "watch",
        };
        f.debug_tuple("ApiBody").field(&what).finish()
    }
}

impl http_body::Body for ApiBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.0 {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Watch(frames) => frames
                .as_mut()
                .poll_next(context)
                .map(|frame| frame.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.0, Content::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Content::Whole(bytes) => SizeHint::with_exact(
                bytes
                    .as_ref()
                    .map_or(0, |bytes| u64::try_from(bytes.len()).unwrap_or(u64::MAX)),
            ),
            Content::Watch(_) => SizeHint::default(),
        }
    }
}

/// Answers one request.
pub(crate) async fn respond<B>(store: &Store, visit: Visit<B>) -> Response<ApiBody>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match dispatch(store, visit).await {
        Ok(response) => response,
        Err(status) => failure(&status),
    }
}

async fn dispatch<B>(store: &Store, visit: Visit<B>) -> Result<Response<ApiBody>, Status>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let Visit { caller, request } = visit;
    let (head, body) = request.into_parts();
    let path = head.uri.path();
    let Some(target) = Target::parse(store.shared.kinds, path) else {
        return plain(store, caller.user(), &head);
    };
    let query = Query::parse(head.uri.query().unwrap_or_default());
    let one = target.name.is_some();
    let watches = query.flag("watch") && target.part == Part::Main;
    let verb = match (&head.method, one) {
        (&Method::GET | &Method::HEAD, _) if watches => Verb::Watch,
        (&Method::GET | &Method::HEAD, true) => Verb::Get,
        (&Method::GET | &Method::HEAD, false) => Verb::List,
        (&Method::POST, false) => Verb::Create,
        (&Method::PUT, true) => Verb::Update,
        (&Method::PATCH, true) => Verb::Patch,
        (&Method::DELETE, true) => Verb::Delete,
        (&Method::DELETE, false) => Verb::DeleteCollection,
        _ => return Err(Status::method_not_allowed()),
    };
    let call = Call {
        store,
        caller,
        verb,
        target,
        query,
        headers: head.headers,
    };
    call.permitted(None)?;
    if let Some(fill_in) = call.kind().answer {
        if verb != Verb::Create {
            return Err(Status::method_not_allowed());
        }
        let body = request::read_body(body).await?;
        return Ok(success(verbs::create::answer(&call, &body, fill_in)?));
    }
    let body = match verb {
        Verb::Get => return verbs::get::get(&call).map(success),
        Verb::List => return verbs::list::list(&call).map(success),
        Verb::Watch => {
            let frames = verbs::watch::watch(&call)?;
            return Ok(whole(StatusCode::OK, JSON, Content::Watch(frames)));
        }
        _ => request::read_body(body).await?,
    };
    let answer = match verb {
        Verb::Create => verbs::create::create(call, body).await?,
        Verb::Update => verbs::update::update(call, body).await?,
        Verb::Patch => verbs::patch::patch(call, body).await?,
        Verb::Delete => verbs::delete::delete(call, body).await?,
        Verb::DeleteCollection => verbs::deletecollection::delete_collection(call, body).await?,
        Verb::Get | Verb::List | Verb::Watch => return Err(Status::method_not_allowed()),
    };
    Ok(success(answer))
}

/// Paths that are not objects: health, discovery, schemas, counters.
fn plain(
    store: &Store,
    user: &User,
    head: &http::request::Parts,
) -> Result<Response<ApiBody>, Status> {
    let kinds = store.shared.kinds;
    let path = head.uri.path();
    if decide_path(user, path) == Decision::Forbidden {
        let method = head.method.as_str();
        return Err(Status::path_not_permitted(user, method, path));
    }
    let accept = head
        .headers
        .get(http::header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let answer = match path.trim_end_matches('/') {
        "/healthz" | "/livez" | "/readyz" => whole(
            StatusCode::OK,
            "text/plain; charset=utf-8",
            Content::Whole(Some(Bytes::from_static(b"ok"))),
        ),
        "/debug/store" => {
            let stats = serde_json::to_vec(&store.stats()).unwrap_or_default();
            whole(StatusCode::OK, JSON, Content::Whole(Some(stats.into())))
        }
        BACKUP_PATH => {
            let text = store.backup().text();
            whole(StatusCode::OK, JSON, Content::Whole(Some(text.into())))
        }
        path => {
            if let Some(document) = discovery::respond(kinds, path, accept) {
                let bytes = Bytes::from(document.to_string());
                whole(
                    StatusCode::OK,
                    discovery::content_type(&document),
                    Content::Whole(Some(bytes)),
                )
            } else if let Some((content_type, bytes)) = openapi::respond(kinds, path, accept) {
                whole(StatusCode::OK, content_type, Content::Whole(Some(bytes)))
            } else {
                return Err(Status::no_such_path());
            }
        }
    };
    match head.method {
        Method::GET | Method::HEAD => Ok(answer),
        _ => Err(Status::method_not_allowed()),
    }
}

fn success(answer: Answer) -> Response<ApiBody> {
    let mut response = whole(answer.code, JSON, Content::Whole(Some(answer.json)));
    for warning in &answer.warnings {
        let cut = warning.floor_char_boundary(WARNING_BYTES_MAX.min(warning.len()));
        if let Ok(value) = HeaderValue::from_str(&format!("299 - {}", Value::from(&warning[..cut])))
        {
            response.headers_mut().append(WARNING, value);
        }
    }
    response
}

fn failure(status: &Status) -> Response<ApiBody> {
    let bytes = Bytes::from(status.to_value().to_string());
    let mut response = whole(status.code, JSON, Content::Whole(Some(bytes)));
    if let Some(seconds) = status
        .details
        .get("retryAfterSeconds")
        .and_then(Value::as_u64)
    {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

fn whole(code: StatusCode, content_type: &'static str, content: Content) -> Response<ApiBody> {
    let mut response = Response::new(ApiBody(content));
    *response.status_mut() = code;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
