//! PUT: a whole new version of an object.

use bytes::Bytes;
use http::StatusCode;

use super::{Answer, Call};
use crate::decode::{self, FieldValidation};
use crate::pipeline::{self, Ownership, Replacement};
use crate::request;
use crate::status::Status;

pub(crate) async fn update(call: Call<'_>, body: Bytes) -> Result<Answer, Status> {
    let kind = call.kind();
    let id = call.id()?;
    let validation = FieldValidation::parse(call.query.get("fieldValidation"))?;
    let dry_run = call.query.dry_run()?;
    let value = request::parse_body(call.header(http::header::CONTENT_TYPE), &body)?;
    let (new, warnings) = decode::object(kind, value, validation)?;
    let writer = call.writer();
    let part = call.target.part;
    let stored = call.store.write(move |txn| {
        let old = txn
            .get(&id)
            .ok_or_else(|| Status::not_found(kind, &id.place.name))?
            .value();
        pipeline::same_uid(kind, &id, &new, &old)?;
        let replacement = Replacement {
            id: &id,
            old,
            new,
            part,
            ownership: Ownership::Record,
        };
        let stored = pipeline::replace(txn, replacement, &writer)?;
        if dry_run {
            txn.discard();
        }
        Ok(stored)
    });
    Ok(Answer::object(StatusCode::OK, &*stored.await?, warnings))
}
