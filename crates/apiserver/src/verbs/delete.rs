//! DELETE: one object, with what depends on it.

use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Answer, Call};
use crate::cascade::{Propagation, Sweep};
use crate::kind::{Kind, Part};
use crate::pipeline;
use crate::request::{Query, parse_body};
use crate::status::{Status, success};
use crate::store::memory::Stored;
use crate::users::User;

/// Namespaces that a cluster cannot be without.
const IMMORTAL: [&str; 3] = ["default", "kube-system", "kube-public"];

/// Kinds of which Kubernetes answers the deleted object itself.
const SHOWN: [&str; 4] = [
    "pods",
    "persistentvolumeclaims",
    "persistentvolumes",
    "storageclasses",
];

/// How to delete.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) propagation: Propagation,
    pub(crate) dry_run: bool,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Wire {
    propagation_policy: Option<String>,
    orphan_dependents: Option<bool>,
    /// Accepted for compatibility: there is no kubelet here that would use the grace period.
    grace_period_seconds: Option<i64>,
    preconditions: Preconditions,
    dry_run: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Preconditions {
    uid: Option<String>,
    resource_version: Option<String>,
}

impl Options {
    /// Reads the options from the body and the query.
    pub(crate) fn read(query: &Query, content_type: &str, body: &[u8]) -> Result<Options, Status> {
        let value = if body.is_empty() {
            json!({})
        } else {
            parse_body(content_type, body)?
        };
        let wire: Wire = serde_json::from_value(value).map_err(|error| {
            Status::bad_request(format!("the delete options cannot be read: {error}"))
        })?;
        let grace = query
            .get("gracePeriodSeconds")
            .parse::<i64>()
            .ok()
            .or(wire.grace_period_seconds);
        if grace.is_some_and(|seconds| seconds < 0) {
            return Err(Status::bad_request(
                "gracePeriodSeconds must not be negative",
            ));
        }
        let policy = match query.get("propagationPolicy") {
            "" => wire.propagation_policy,
            policy => Some(policy.to_owned()),
        };
        let propagation = match (policy.as_deref(), wire.orphan_dependents) {
            (None | Some("Background"), Some(false) | None) => Propagation::Background,
            (Some("Foreground"), None) => Propagation::Foreground,
            (Some("Orphan"), None) | (None, Some(true)) => Propagation::Orphan,
            (Some(other), _) => return Err(unknown_policy(other)),
        };
        let dry_run = query.dry_run()? || wire.dry_run.iter().any(|how| how == "All");
        Ok(Options {
            propagation,
            dry_run,
            uid: wire.preconditions.uid,
            resource_version: wire.preconditions.resource_version,
        })
    }

    fn check(&self, kind: &Kind, name: &str, stored: &Stored) -> Result<(), Status> {
        let refused = |why: String| {
            let message = format!(
                "Operation cannot be fulfilled on {} {name:?}: {why}",
                kind.kind
            );
            let mut status = Status::conflict(kind, name, "");
            status.message = message;
            status.details["kind"] = json!(kind.kind);
            Err(status)
        };
        if let Some(uid) = self.uid.as_deref().filter(|uid| **uid != *stored.uid) {
            return refused(format!(
                "the UID in the precondition ({uid}) does not match the UID in record ({}). The object might have been deleted and then recreated",
                stored.uid
            ));
        }
        let version = stored.revision.to_string();
        if let Some(wanted) = self
            .resource_version
            .as_deref()
            .filter(|wanted| **wanted != *version)
        {
            return refused(format!(
                "the ResourceVersion in the precondition ({wanted}) does not match the ResourceVersion in record ({version}). The object might have been modified"
            ));
        }
        Ok(())
    }
}

fn unknown_policy(policy: &str) -> Status {
    let why = format!(
        "Unsupported value: {policy:?}: supported values: \"Foreground\", \"Background\", \"Orphan\", \"nil\""
    );
    let mut status = Status::unprocessable(format!(
        "DeleteOptions.meta.k8s.io \"\" is invalid: propagationPolicy: {why}"
    ));
    status.details = json!({
        "group": "meta.k8s.io",
        "kind": "DeleteOptions",
        "causes": [{ "reason": "FieldValueNotSupported", "message": why, "field": "propagationPolicy" }],
    });
    status
}

pub(crate) async fn delete(call: Call<'_>, body: Bytes) -> Result<Answer, Status> {
    let kind = call.kind();
    let id = call.id()?;
    if call.target.part != Part::Main {
        return Err(Status::method_not_allowed());
    }
    let options = Options::read(&call.query, call.header(http::header::CONTENT_TYPE), &body)?;
    if kind.plural == "namespaces" && IMMORTAL.contains(&&*id.place.name) {
        return Err(Status::forbidden(
            kind,
            &id.place.name,
            "this namespace may not be deleted",
        ));
    }
    let writer = call.writer();
    let json = call.store.write(move |txn| {
        let name = &*id.place.name;
        let stored = txn
            .get(&id)
            .ok_or_else(|| Status::not_found(kind, name))?
            .clone();
        if *writer.caller.user() != User::Admin {
            let old = stored.value();
            pipeline::permitted(txn, &writer, writer.verb, &id, (Some(&old), None))?;
        }
        options.check(kind, name, &stored)?;
        let mut sweep = Sweep::new(&writer.now);
        let (last, gone) = sweep
            .delete(txn, &id, options.propagation)
            .ok_or_else(|| Status::not_found(kind, name))?;
        sweep.run(txn);
        if options.dry_run {
            txn.discard();
        }
        Ok(match gone && !SHOWN.contains(&kind.plural) {
            true => serialised(&success(kind, name, &last.uid)),
            false => last.json.clone(),
        })
    });
    Ok(Answer {
        code: StatusCode::OK,
        json: json.await?,
        warnings: Vec::new(),
    })
}

fn serialised(value: &Value) -> Bytes {
    Bytes::from(value.to_string())
}
