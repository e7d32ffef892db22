//! PATCH: changes an object, in one of four formats.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use super::{Answer, Call};
use crate::decode::{self, FieldValidation};
use crate::kind::{FieldError, Kind, Part};
use crate::managed::{self, Writer};
use crate::meta;
use crate::patch::Patch;
use crate::pipeline::{self, Ownership, Replacement};
use crate::request::{media_type, parse_yaml};
use crate::status::Status;
use crate::store::Txn;
use crate::store::memory::{Id, Stored};

/// What is to be changed, and how.
struct Patching {
    kind: &'static Kind,
    id: Id,
    patch: Patch,
    validation: FieldValidation,
    part: Part,
    writer: Writer,
}

struct Done {
    stored: Arc<Stored>,
    created: bool,
    warnings: Vec<String>,
}

pub(crate) async fn patch(call: Call<'_>, body: Bytes) -> Result<Answer, Status> {
    let dry_run = call.query.dry_run()?;
    let patching = Patching {
        kind: call.kind(),
        id: call.id()?,
        patch: read(&call, &body)?,
        validation: FieldValidation::parse(call.query.get("fieldValidation"))?,
        part: call.target.part,
        writer: call.writer(),
    };
    let done = call.store.write(move |txn| {
        let done = match &patching.patch {
            Patch::Apply {
                configuration,
                force,
            } => patching.server_side_apply(txn, configuration, *force),
            _ => patching.lay_over(txn),
        }?;
        if dry_run {
            txn.discard();
        }
        Ok(done)
    });
    let Done {
        stored,
        created,
        warnings,
    } = done.await?;
    let code = if created {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok(Answer::object(code, &stored, warnings))
}

fn read(call: &Call<'_>, body: &[u8]) -> Result<Patch, Status> {
    let malformed = |error: &dyn std::fmt::Display| {
        Status::bad_request(format!("error decoding patch: {error}"))
    };
    match media_type(call.header(http::header::CONTENT_TYPE)) {
        "application/json-patch+json" => serde_json::from_slice(body)
            .map(Patch::Json)
            .map_err(|error| malformed(&error)),
        "application/merge-patch+json" => serde_json::from_slice(body)
            .map(Patch::Merge)
            .map_err(|error| malformed(&error)),
        "application/strategic-merge-patch+json" => serde_json::from_slice(body)
            .map(Patch::Strategic)
            .map_err(|error| malformed(&error)),
        "application/apply-patch+yaml" => {
            if call.query.get("fieldManager").is_empty() {
                return Err(missing_manager());
            }
            let mut configuration = parse_yaml(body)?;
            decode::identify(call.kind(), &mut configuration)?;
            Ok(Patch::Apply {
                configuration,
                force: call.query.flag("force"),
            })
        }
        _ => Err(Status::unsupported_media_type(&[
            "application/json-patch+json",
            "application/merge-patch+json",
            "application/strategic-merge-patch+json",
            "application/apply-patch+yaml",
        ])),
    }
}

/// A value as Go's `%+v` prints it.
fn go_printed(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(go_printed).collect();
            format!("[{}]", items.join(" "))
        }
        Value::Object(map) => {
            let mut fields: Vec<(&String, &Value)> = map.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            let fields: Vec<String> = fields
                .into_iter()
                .map(|(name, value)| format!("{name}:{}", go_printed(value)))
                .collect();
            format!("map[{}]", fields.join(" "))
        }
        number_or_flag => number_or_flag.to_string(),
    }
}

fn missing_manager() -> Status {
    let mut status = Status::unprocessable(
        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch"
            .to_owned(),
    );
    let error = FieldError::required("fieldManager", "is required for apply patch");
    status.details = json!({
        "group": "meta.k8s.io",
        "kind": "PatchOptions",
        "causes": [{ "reason": error.reason, "message": error.message, "field": error.field }],
    });
    status
}

impl Patching {
    fn lay_over(&self, txn: &mut Txn<'_>) -> Result<Done, Status> {
        let Patching { kind, id, .. } = self;
        let mut old = txn
            .get(id)
            .ok_or_else(|| Status::not_found(kind, &id.place.name))?
            .value();
        // The owners are half of a small object. A patch that does not touch them need not carry them along.
        let owners = (!self.patch.touches("managedFields"))
            .then(|| meta::remove(&mut old, "managedFields"))
            .flatten();
        let before = &old;
        let mut patched = before.clone();
        self.patch.apply(kind, &mut patched)?;
        decode::identify(kind, &mut patched)?;
        let mut decoded = match self.validation {
            FieldValidation::Ignore => decode::normalise_silently(kind, patched),
            FieldValidation::Warn | FieldValidation::Strict => decode::normalise(kind, patched),
        }
        .map_err(|error| self.spoils(before, &error))?;
        if let Some(owners) = owners {
            meta::set(&mut decoded.object, "managedFields", owners.clone());
            meta::set(&mut old, "managedFields", owners);
        }
        if self.validation == FieldValidation::Strict && !decoded.unknown.is_empty() {
            let why = format!("strict decoding error: {}", decoded.unknown.join(", "));
            return Err(Status::unprocessable(format!(
                " \"\" is invalid: patch: Invalid value: {why}"
            )));
        }
        let replacement = Replacement {
            id,
            old,
            new: decoded.object,
            part: self.part,
            ownership: Ownership::Record,
        };
        let stored = pipeline::replace(txn, replacement, &self.writer)?;
        let warnings = if self.validation == FieldValidation::Warn {
            decoded.unknown
        } else {
            Vec::new()
        };
        Ok(Done {
            stored,
            created: false,
            warnings,
        })
    }

    /// The answer to a patch after which the object would no longer be valid for its kind. Kubernetes quotes the patch
    /// if it is its own kind of patch, and the patched object otherwise.
    fn spoils(&self, old: &Value, error: &serde_json::Error) -> Status {
        let quoted = match &self.patch {
            Patch::Strategic(patch) => go_printed(patch),
            patch => {
                let mut patched = old.clone();
                // It could be applied a moment ago.
                let _ = patch.apply(self.kind, &mut patched);
                patched.to_string()
            }
        };
        let error = FieldError::invalid("patch", &json!(quoted), &error.to_string());
        let message = format!(" \"\" is invalid: {}: {}", error.field, error.message);
        let mut status = Status::unprocessable(message);
        status.details["causes"] =
            json!([{ "reason": error.reason, "message": error.message, "field": error.field }]);
        status
    }

    fn server_side_apply(
        &self,
        txn: &mut Txn<'_>,
        sent: &Value,
        force: bool,
    ) -> Result<Done, Status> {
        let Patching {
            kind, id, writer, ..
        } = self;
        let live = txn.get(id).map(|stored| stored.value());
        if meta::get(sent, "managedFields")
            .is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty()))
        {
            return Err(Status::bad_request("metadata.managedFields must be nil"));
        }
        let configuration = self.configuration(sent, live.as_ref())?;
        let Some(old) = live else {
            if self.part != Part::Main {
                return Err(Status::not_found(kind, &id.place.name));
            }
            // Whoever names a uid means one object, and that one is gone: another may not take its place.
            let uid = meta::text(sent, "uid");
            if !uid.is_empty() {
                let why = format!(
                    "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                );
                return Err(Status::conflict(kind, &id.place.name, &why));
            }
            let new = managed::apply(kind, &json!({}), &configuration, force, writer)?;
            let new = decode::normalise(kind, named(kind, id, new))
                .map_err(|error| decode::malformed(kind, &error))?
                .object;
            let stored = pipeline::insert(
                txn,
                id.kind,
                &id.place.namespace,
                new,
                writer,
                Ownership::Done,
            )?;
            return Ok(Done {
                stored,
                created: true,
                warnings: Vec::new(),
            });
        };
        check_preconditions(kind, id, sent, &old)?;
        let new = managed::apply(kind, &old, &configuration, force, writer)?;
        let new = decode::normalise(kind, new)
            .map_err(|error| decode::malformed(kind, &error))?
            .object;
        let replacement = Replacement {
            id,
            old,
            new,
            part: self.part,
            ownership: Ownership::Done,
        };
        let stored = pipeline::replace(txn, replacement, writer)?;
        Ok(Done {
            stored,
            created: false,
            warnings: Vec::new(),
        })
    }

    /// The configuration in the kind's own form, with only the fields that the applier named.
    fn configuration(&self, sent: &Value, live: Option<&Value>) -> Result<Value, Status> {
        let Patching { kind, id, .. } = self;
        let given = meta::text(sent, "name");
        if !given.is_empty() && *given != *id.place.name {
            return Err(Status::bad_request(format!(
                "the name of the object ({given}) does not match the name on the URL ({})",
                id.place.name
            )));
        }
        // Types have required fields; the live object lends those that a partial configuration leaves out.
        let mut whole = live.cloned().unwrap_or_else(|| json!({}));
        managed::walk::merge(
            managed::walk::Shape {
                kind,
                owns_maps: false,
            },
            "",
            &mut whole,
            sent,
        );
        decode::identify(kind, &mut whole)?;
        let normal =
            decode::normalise(kind, whole).map_err(|error| decode::malformed(kind, &error))?;
        if let Some(first) = normal.unknown.first() {
            let field = first
                .trim_start_matches("unknown field ")
                .trim_matches('"')
                .to_owned();
            return Err(Status::unexplained(format!(
                "failed to create typed patch object ({}; {}, Kind={}): .{field}: field not declared in schema",
                place(id),
                group_version(kind),
                kind.kind
            )));
        }
        let alone = (kind.normalise)(sent.clone()).unwrap_or(normal.object);
        let mut configuration = decode::restricted(&alone, sent);
        let map = meta::as_map(&mut configuration);
        if kind.status {
            if self.part != Part::Main {
                map.retain(|field, _| matches!(field.as_str(), "status" | "apiVersion" | "kind"));
            } else {
                map.remove("status");
            }
        }
        Ok(configuration)
    }
}

fn check_preconditions(kind: &Kind, id: &Id, sent: &Value, old: &Value) -> Result<(), Status> {
    let version = meta::text(sent, "resourceVersion");
    if !version.is_empty() && version != meta::text(old, "resourceVersion") {
        return Err(Status::modified(kind, &id.place.name));
    }
    pipeline::same_uid(kind, id, sent, old)
}

fn named(kind: &Kind, id: &Id, mut object: Value) -> Value {
    meta::set(&mut object, "name", json!(*id.place.name));
    let map = meta::as_map(&mut object);
    map.insert("apiVersion".to_owned(), json!(kind.api_version()));
    map.insert("kind".to_owned(), json!(kind.kind));
    object
}

fn place(id: &Id) -> String {
    match &*id.place.namespace {
        "" => format!("/{}", id.place.name),
        namespace => format!("{namespace}/{}", id.place.name),
    }
}

fn group_version(kind: &Kind) -> String {
    format!("{}/{}", kind.group, kind.version)
}
