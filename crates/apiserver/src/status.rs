//! Errors as Kubernetes words them: `Status` objects.

use std::path::Path;

use http::StatusCode;
use serde_json::{Value, json};

use crate::authorize::Attempt;
use crate::error::CommitError;
use crate::kind::{FieldError, Kind};
use crate::users::User;

/// The Retry-After, in seconds, for callers that came when too much was waiting.
const RETRY_AFTER_SECONDS: u32 = 1;

/// An answer that is not the object which was asked for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Status {
    pub(crate) code: StatusCode,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) details: Value,
}

impl Status {
    fn new(code: StatusCode, reason: &'static str, message: String) -> Status {
        Status {
            code,
            reason,
            message,
            details: Value::Null,
        }
    }

    fn about(mut self, kind: &Kind, name: &str) -> Status {
        self.details = details(name, kind.group, kind.plural);
        self
    }

    fn with_cause(mut self, reason: &str, message: &str) -> Status {
        if !self.details.is_object() {
            self.details = json!({});
        }
        self.details["causes"] = json!([{ "reason": reason, "message": message }]);
        self
    }

    pub(crate) fn not_found(kind: &Kind, name: &str) -> Status {
        let message = format!("{} {} not found", resource(kind), quoted(name));
        Status::new(StatusCode::NOT_FOUND, "NotFound", message).about(kind, name)
    }

    pub(crate) fn no_such_path() -> Status {
        let message = "the server could not find the requested resource".to_owned();
        let mut status = Status::new(StatusCode::NOT_FOUND, "NotFound", message);
        status.details = json!({});
        status
    }

    pub(crate) fn already_exists(kind: &Kind, name: &str) -> Status {
        let message = format!("{} {} already exists", resource(kind), quoted(name));
        Status::new(StatusCode::CONFLICT, "AlreadyExists", message).about(kind, name)
    }

    /// A name could not be made from `generateName`.
    pub(crate) fn generate_name_conflict(kind: &Kind, name: &str) -> Status {
        let message = format!(
            "{} {} already exists, the server was not able to generate a unique name for the object",
            resource(kind),
            quoted(name)
        );
        let mut status =
            Status::new(StatusCode::CONFLICT, "AlreadyExists", message).about(kind, name);
        status.details["retryAfterSeconds"] = json!(RETRY_AFTER_SECONDS);
        status
    }

    pub(crate) fn conflict(kind: &Kind, name: &str, why: &str) -> Status {
        let message = format!(
            "Operation cannot be fulfilled on {} {}: {why}",
            resource(kind),
            quoted(name)
        );
        Status::new(StatusCode::CONFLICT, "Conflict", message).about(kind, name)
    }

    pub(crate) fn modified(kind: &Kind, name: &str) -> Status {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Status::conflict(kind, name, why)
    }

    /// Server-side apply met fields that others own.
    pub(crate) fn apply_conflict(causes: &[(String, String)]) -> Status {
        let message = match causes {
            [(who, field)] => format!("Apply failed with 1 conflict: conflict with {who}: {field}"),
            many => {
                let mut lines: Vec<String> = Vec::new();
                for (index, (who, field)) in many.iter().enumerate() {
                    if index == 0 || many[index - 1].0 != *who {
                        lines.push(format!("conflicts with {who}:"));
                    }
                    lines.push(format!("- {field}"));
                }
                format!(
                    "Apply failed with {} conflicts: {}",
                    many.len(),
                    lines.join("\n")
                )
            }
        };
        let mut status = Status::new(StatusCode::CONFLICT, "Conflict", message);
        let causes: Vec<Value> = causes
            .iter()
            .map(|(who, field)| {
                json!({
                    "reason": "FieldManagerConflict",
                    "message": format!("conflict with {who}"),
                    "field": field,
                })
            })
            .collect();
        status.details = json!({ "causes": causes });
        status
    }

    pub(crate) fn invalid(kind: &Kind, name: &str, errors: &[FieldError]) -> Status {
        let sentences: Vec<String> = errors.iter().map(sentence).collect();
        let list = match sentences.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let what = match kind.group {
            "" => kind.kind.to_owned(),
            group => format!("{}.{group}", kind.kind),
        };
        let message = format!("{what} {} is invalid: {list}", quoted(name));
        let causes: Vec<Value> = errors
            .iter()
            .map(|error| {
                json!({ "reason": error.reason, "message": error.message, "field": error.field })
            })
            .collect();
        let mut status = Status::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message);
        status.details = details(name, kind.group, kind.kind);
        status.details["causes"] = Value::Array(causes);
        status
    }

    /// A patch that is well formed, but cannot be applied to this object.
    pub(crate) fn unprocessable(message: String) -> Status {
        let mut status = Status::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message);
        status.details = json!({});
        status
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Status {
        Status::new(StatusCode::BAD_REQUEST, "BadRequest", message.into())
    }

    pub(crate) fn forbidden(kind: &Kind, name: &str, why: &str) -> Status {
        let message = match name {
            "" => format!("{} is forbidden: {why}", resource(kind)),
            name => format!("{} {} is forbidden: {why}", resource(kind), quoted(name)),
        };
        Status::new(StatusCode::FORBIDDEN, "Forbidden", message).about(kind, name)
    }

    /// The caller may not do this, in the words of Kubernetes.
    pub(crate) fn not_permitted(user: &User, kind: &Kind, attempt: &Attempt<'_>) -> Status {
        let resource = match attempt.subresource {
            "" => attempt.resource.to_owned(),
            subresource => format!("{}/{subresource}", attempt.resource),
        };
        let scope = match attempt.namespace {
            "" => "at the cluster scope".to_owned(),
            namespace => format!("in the namespace {}", quoted(namespace)),
        };
        let why = format!(
            "User {} cannot {} resource {} in API group {} {scope}",
            quoted(&user.name()),
            attempt.verb.name(),
            quoted(&resource),
            quoted(attempt.group),
        );
        Status::forbidden(kind, attempt.name, &why)
    }

    /// The caller may not see this path.
    pub(crate) fn path_not_permitted(user: &User, method: &str, path: &str) -> Status {
        let message = format!(
            "forbidden: User {} cannot {} path {}",
            quoted(&user.name()),
            method.to_lowercase(),
            quoted(path)
        );
        let mut status = Status::new(StatusCode::FORBIDDEN, "Forbidden", message);
        status.details = json!({});
        status
    }

    /// The caller's token does not count, or no longer.
    pub(crate) fn unauthorized() -> Status {
        let message = "Unauthorized".to_owned();
        Status::new(StatusCode::UNAUTHORIZED, "Unauthorized", message)
    }

    pub(crate) fn namespace_terminating(kind: &Kind, name: &str, namespace: &str) -> Status {
        let why = format!(
            "unable to create new content in namespace {namespace} because it is being terminated"
        );
        let mut status = Status::forbidden(kind, name, &why);
        status.details["causes"] = json!([{
            "reason": "NamespaceTerminating",
            "message": format!("namespace {namespace} is being terminated"),
            "field": "metadata.namespace",
        }]);
        status
    }

    pub(crate) fn expired(message: impl Into<String>) -> Status {
        Status::new(StatusCode::GONE, "Expired", message.into())
    }

    pub(crate) fn future_revision(asked: u64, current: u64) -> Status {
        let message = format!("Too large resource version: {asked}, current: {current}");
        let mut status = Status::new(
            StatusCode::GATEWAY_TIMEOUT,
            "Timeout",
            format!("Timeout: {message}"),
        )
        .with_cause("ResourceVersionTooLarge", "Too large resource version");
        status.details["retryAfterSeconds"] = json!(RETRY_AFTER_SECONDS);
        status
    }

    pub(crate) fn method_not_allowed() -> Status {
        let message = "the server does not allow this method on the requested resource".to_owned();
        let mut status = Status::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message);
        status.details = json!({});
        status
    }

    pub(crate) fn unsupported_media_type(accepted: &[&str]) -> Status {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {}",
            accepted.join(", ")
        );
        Status::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "UnsupportedMediaType",
            message,
        )
    }

    pub(crate) fn too_large(limit: usize) -> Status {
        let message = format!("Request entity too large: limit is {limit}");
        Status::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "RequestEntityTooLarge",
            message,
        )
    }

    pub(crate) fn too_many_requests() -> Status {
        let message = "too many writes are waiting; try again later".to_owned();
        let mut status = Status::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message);
        status.details = json!({ "retryAfterSeconds": RETRY_AFTER_SECONDS });
        status
    }

    pub(crate) fn internal(why: &str) -> Status {
        let message = format!("Internal error occurred: {why}");
        Status::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message).with_cause("", why)
    }

    /// An error that Kubernetes answers with 500 and no reason.
    pub(crate) fn unexplained(message: String) -> Status {
        Status::new(StatusCode::INTERNAL_SERVER_ERROR, "", message)
    }

    /// A write that could not be made durable; `undone` when it is certain that nothing of it is left.
    pub(crate) fn not_durable(path: &Path, error: &CommitError, undone: bool) -> Status {
        let fate = if undone {
            "the write was not made"
        } else {
            "it is not certain whether the write was made"
        };
        let remedy = if error.is_full() {
            "free space on its filesystem"
        } else {
            "check the disk that holds it"
        };
        Status::internal(&format!(
            "{fate}, because {} could not be written: {error}; {remedy}, then try again",
            path.display()
        ))
    }

    pub(crate) fn store_closed() -> Status {
        let message = "the server is shutting down".to_owned();
        Status::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "ServiceUnavailable",
            message,
        )
    }

    /// The object that goes over the wire.
    pub(crate) fn to_value(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code.as_u16(),
        });
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

/// What a deletion answers when there is nothing left to show.
pub(crate) fn success(kind: &Kind, name: &str, uid: &str) -> Value {
    let mut details = details(name, kind.group, kind.plural);
    details["uid"] = json!(uid);
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details })
}

fn details(name: &str, group: &str, kind: &str) -> Value {
    let mut details = json!({ "kind": kind });
    if !name.is_empty() {
        details["name"] = json!(name);
    }
    if !group.is_empty() {
        details["group"] = json!(group);
    }
    details
}

fn resource(kind: &Kind) -> String {
    match kind.group {
        "" => kind.plural.to_owned(),
        group => format!("{}.{group}", kind.plural),
    }
}

fn sentence(error: &FieldError) -> String {
    format!("{}: {}", error.field, error.message)
}

/// A name in quotes, as Go prints it.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
