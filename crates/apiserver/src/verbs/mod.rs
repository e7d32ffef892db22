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

use crate::authorize::{Attempt, Decision, Objects, Verb, decide, decides_by_object};
use crate::kind::Kind;
use crate::managed::Writer;
use crate::meta;
use crate::request::{Query, Target};
use crate::selector::FieldSelector;
use crate::status::Status;
use crate::store::Store;
use crate::store::memory::{Id, ObjectPlace, Stored};
use crate::users::{Caller, User};

/// The name of a manager is cut at this length; as in Kubernetes.
const MANAGER_BYTES_MAX: usize = 128;
/// Who writes when a client says nothing of itself.
const UNKNOWN_MANAGER: &str = "unknown";

/// A request, taken apart.
pub(crate) struct Call<'a> {
    pub(crate) store: &'a Store,
    pub(crate) caller: Caller,
    pub(crate) verb: Verb,
    pub(crate) target: Target,
    pub(crate) query: Query,
    pub(crate) headers: HeaderMap,
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

/// A list or a watch of which the caller sees only some objects.
pub(crate) struct Sight {
    user: User,
    verb: Verb,
    kind: &'static Kind,
}

impl Sight {
    pub(crate) fn shows(&self, place: &ObjectPlace, stored: &Stored) -> bool {
        let object = stored.value();
        let attempt = Attempt {
            verb: self.verb,
            group: self.kind.group,
            resource: self.kind.plural,
            subresource: "",
            namespace: &place.namespace,
            name: &place.name,
            objects: Objects::Seen {
                old: Some(&object),
                new: None,
            },
        };
        decide(&self.user, &attempt) == Decision::Allowed
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

    /// Refuses what the caller may not do, as far as the path and, if it is there, the stored object tell. What a write
    /// makes of an object is looked at within the write.
    pub(crate) fn permitted(&self, stored: Option<&Stored>) -> Result<(), Status> {
        if self.caller.user == User::Admin {
            return Ok(());
        }
        let selected = self.selected_name();
        let old = stored.map(Stored::value);
        let objects = match &old {
            Some(old) => Objects::Seen {
                old: Some(old),
                new: None,
            },
            None => Objects::Unseen,
        };
        let attempt = self.attempt(&selected, objects);
        match decide(&self.caller.user, &attempt) {
            Decision::Allowed => Ok(()),
            Decision::Forbidden => Err(Status::not_permitted(
                &self.caller.user,
                self.kind(),
                &attempt,
            )),
        }
    }

    /// What of a list or a watch the caller sees; `None` if it sees everything.
    pub(crate) fn sight(&self) -> Option<Sight> {
        let selected = self.selected_name();
        let attempt = self.attempt(&selected, Objects::Unseen);
        decides_by_object(&self.caller.user, &attempt).then(|| Sight {
            user: self.caller.user.clone(),
            verb: self.verb,
            kind: self.kind(),
        })
    }

    fn attempt<'a>(&'a self, selected: &'a str, objects: Objects<'a>) -> Attempt<'a> {
        let kind = self.kind();
        Attempt {
            verb: self.verb,
            group: kind.group,
            resource: kind.plural,
            subresource: self.target.part.name(),
            namespace: self.target.namespace_key(),
            name: self.target.name.as_deref().unwrap_or(selected),
            objects,
        }
    }

    /// The name by which a list or a watch selects a single object; empty if it does not.
    fn selected_name(&self) -> String {
        let fields = FieldSelector::parse(self.query.get("fieldSelector"));
        let name = fields
            .ok()
            .and_then(|fields| fields.name().map(str::to_owned));
        name.filter(|_| matches!(self.verb, Verb::List | Verb::Watch))
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
            caller: self.caller.clone(),
            verb: self.verb,
            manager: manager[..cut].to_owned(),
            subresource: self.target.part.name(),
            now: meta::time(jiff::Timestamp::now()),
        }
    }
}
