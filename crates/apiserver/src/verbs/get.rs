//! GET: one object.

use serde_json::json;

use super::{Answer, Call};
use crate::status::Status;
use crate::table::{self, IncludeObject};

pub(crate) fn get(call: &Call<'_>) -> Result<Answer, Status> {
    let kind = call.kind();
    let id = call.id()?;
    let state = call.store.shared.read();
    if let Some(wanted) = call
        .query
        .number("resourceVersion")?
        .filter(|wanted| *wanted > state.revision)
    {
        return Err(Status::future_revision(wanted, state.revision));
    }
    let stored = state.get(&id).cloned();
    drop(state);
    let stored = stored.ok_or_else(|| Status::not_found(kind, &id.place.name))?;
    call.permitted(Some(&stored))?;
    if !table::wanted(call.header(http::header::ACCEPT)) {
        return Ok(Answer::ok(stored.json.clone()));
    }
    let include = include_object(call)?;
    let meta = json!({ "resourceVersion": stored.revision.to_string() });
    let table = table::render(
        kind,
        &[stored.value()],
        meta,
        include,
        jiff::Timestamp::now(),
    );
    Ok(Answer::ok(table.to_string()))
}

/// What of each object goes with its row of a table.
pub(crate) fn include_object(call: &Call<'_>) -> Result<IncludeObject, Status> {
    let text = call.query.get("includeObject");
    IncludeObject::parse(text)
        .ok_or_else(|| Status::bad_request(format!("invalid includeObject value: {text:?}")))
}
