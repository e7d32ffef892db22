//! POST: creates an object, or answers a review.

use bytes::Bytes;
use http::StatusCode;
use serde_json::Value;

use super::{Answer, Call};
use crate::decode::{self, FieldValidation};
use crate::kind::Asker;
use crate::meta;
use crate::pipeline::{self, Ownership};
use crate::request;
use crate::status::Status;

pub(crate) async fn create(call: Call<'_>, body: Bytes) -> Result<Answer, Status> {
    let kind = call.kind();
    if call.target.name.is_some() || (kind.namespaced && call.target.namespace.is_none()) {
        return Err(Status::method_not_allowed());
    }
    let validation = FieldValidation::parse(call.query.get("fieldValidation"))?;
    let dry_run = call.query.dry_run()?;
    let value = request::parse_body(call.header(http::header::CONTENT_TYPE), &body)?;
    let (object, warnings) = decode::object(kind, value, validation)?;
    let writer = call.writer();
    let (index, namespace) = (call.target.kind, call.target.namespace_key().to_owned());
    let stored = call.store.write(move |txn| {
        let stored = pipeline::insert(txn, index, &namespace, object, &writer, Ownership::Record)?;
        if dry_run {
            txn.discard();
        }
        Ok(stored)
    });
    let stored = stored.await?;
    let mut answer = Answer::object(StatusCode::CREATED, &stored, warnings);
    if dry_run {
        // What was never stored has no version.
        let mut object = stored.value();
        meta::remove(&mut object, "resourceVersion");
        answer.json = object.to_string().into();
    }
    Ok(answer)
}

/// Answers a question. Nothing is stored.
pub(crate) fn answer(
    call: &Call<'_>,
    body: &[u8],
    fill_in: fn(&mut Value, &Asker<'_>),
) -> Result<Answer, Status> {
    let validation = FieldValidation::parse(call.query.get("fieldValidation"))?;
    let value = request::parse_body(call.header(http::header::CONTENT_TYPE), body)?;
    let (mut object, warnings) = decode::object(call.kind(), value, validation)?;
    let asker = Asker {
        user: call.caller.user(),
        shared: &call.store.shared,
    };
    fill_in(&mut object, &asker);
    Ok(Answer {
        code: StatusCode::CREATED,
        json: object.to_string().into(),
        warnings,
    })
}
