//! One file for each verb, generic over kinds.

pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod deletecollection;
pub(crate) mod get;
pub(crate) mod list;
pub(crate) mod patch;
pub(crate) mod update;
pub(crate) mod watch;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::User;
use crate::kind::Kind;
use crate::managed::Writer;
use crate::meta;
use crate::request::{Query, Target};
use crate::status::Status;
use crate::store::Store;
use crate::store::memory::{Id, Stored};

/// The name of a manager is cut at this length; as in Kubernetes.
const MANAGER_BYTES_MAX: usize = 128;
/// Who writes when a client says nothing of itself.
const UNKNOWN_MANAGER: &str = "unknown";

/// A request, taken apart.
pub(crate) struct Call<'a> {
    pub(crate) store: &'a Store,
    pub(crate) target: Target,
    pub(crate) query: Query,
    pub(crate) headers: HeaderMap,
    /// Who asks.
    pub(crate) user: User,
}

/// An answer that is not a stream.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: StatusCode,
    pub(crate) json: Bytes,
    pub(crate) warnings: Vec<String>,
}

impl Answer {
    pub(crate) fn object(code: StatusCode, stored: &Stored, warnings: Vec<String>) -> Answer {
        Answer {
            code,
            json: stored.json.clone(),
            warnings,
        }
    }

    pub(crate) fn ok(json: impl Into<Bytes>) -> Answer {
        Answer {
            code: StatusCode::OK,
            json: json.into(),
            warnings: Vec::new(),
        }
    }
}

impl Call<'_> {
    pub(crate) fn kind(&self) -> &'static Kind {
        &self.store.shared.kinds[self.target.kind]
    }

    pub(crate) fn header(&self, name: http::header::HeaderName) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    /// The one object that the path names.
    pub(crate) fn id(&self) -> Result<Id, Status> {
        let name = self
            .target
            .name
            .as_deref()
            .ok_or_else(Status::method_not_allowed)?;
        Ok(Id::new(self.target.kind, self.target.namespace_key(), name))
    }

    /// Who writes: `fieldManager`, or the client's program.
    pub(crate) fn writer(&self) -> Writer {
        let agent = self.header(http::header::USER_AGENT);
        let program = agent.split(['/', ' ']).next().unwrap_or_default();
        let named = [self.query.get("fieldManager"), program, UNKNOWN_MANAGER];
        let manager = named
            .into_iter()
            .find(|name| !name.is_empty())
            .unwrap_or(UNKNOWN_MANAGER);
        let cut = manager.floor_char_boundary(MANAGER_BYTES_MAX.min(manager.len()));
        Writer {
            manager: manager[..cut].to_owned(),
            user: self.user.clone(),
            subresource: self.target.part.name(),
            now: meta::time(jiff::Timestamp::now()),
        }
    }
}
