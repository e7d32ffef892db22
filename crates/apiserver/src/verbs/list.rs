//! GET of a list, whole or in pages.
//!
//! All pages show one moment: the token carries its revision, and later changes are undone from the recent past.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::get::include_object;
use super::{Answer, Call};
use crate::selector::Selector;
use crate::status::Status;
use crate::store::memory::{ObjectPlace, State, Stored};
use crate::table;

/// What comes before a token's content, so that tokens of other servers are recognised.
const TOKEN_PREFIX: &str = "t1.";

/// Where the next page starts, and of which moment it is a page.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Token {
    revision: u64,
    namespace: String,
    name: String,
}

pub(crate) fn list(call: &Call<'_>) -> Result<Answer, Status> {
    let kind = call.kind();
    let query = &call.query;
    let selector = Selector::parse(kind, query.get("labelSelector"), query.get("fieldSelector"))?;
    let token = Token::parse(query.get("continue"))?;
    let limit = query.number("limit")?.filter(|limit| *limit > 0);
    let limit = limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    });
    let wanted = query.number("resourceVersion")?;
    let state = call.store.shared.read();
    if let Some(wanted) = wanted.filter(|wanted| *wanted > state.revision) {
        return Err(Status::future_revision(wanted, state.revision));
    }
    let exact = query.get("resourceVersionMatch") == "Exact";
    let at = match (&token, wanted) {
        (Some(token), _) => token.revision,
        (None, Some(wanted)) if exact => wanted,
        _ => state.revision,
    };
    let after = token
        .as_ref()
        .map(|token| ObjectPlace::new(&token.namespace, &token.name));
    let namespace = call.target.namespace.as_deref();
    let sight = call.sight();
    let mut page = Vec::new();
    let mut more = 0_usize;
    for (place, stored) in at_revision(&state, call.target.kind, at, namespace, after.as_ref())? {
        let is_shown = || {
            let sight = sight.as_ref();
            sight.is_none_or(|sight| sight.shows(&place, &stored))
        };
        if !selector.matches(&place, &stored) || !is_shown() {
            continue;
        }
        if page.len() < limit {
            page.push((place, stored));
        } else {
            more += 1;
        }
    }
    drop(state);

    let mut meta = json!({ "resourceVersion": at.to_string() });
    if let Some((last, _)) = page.last().filter(|_| more > 0) {
        let token = Token {
            revision: at,
            namespace: last.namespace.to_string(),
            name: last.name.to_string(),
        };
        meta["continue"] = json!(token.to_text());
        meta["remainingItemCount"] = json!(more);
    }
    if table::wanted(call.header(http::header::ACCEPT)) {
        let objects: Vec<Value> = page.iter().map(|(_, stored)| stored.value()).collect();
        let table = table::render(
            kind,
            &objects,
            meta,
            include_object(call)?,
            jiff::Timestamp::now(),
        );
        return Ok(Answer::ok(table.to_string()));
    }
    let head = format!(
        "{{\"kind\":\"{}List\",\"apiVersion\":\"{}\",\"metadata\":{meta},\"items\":[",
        kind.kind,
        kind.api_version()
    );
    let bytes: usize = page.iter().map(|(_, stored)| stored.json.len() + 1).sum();
    let mut json = Vec::with_capacity(head.len() + bytes + 2);
    json.extend_from_slice(head.as_bytes());
    for (index, (_, stored)) in page.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        json.extend_from_slice(&stored.json);
    }
    json.extend_from_slice(b"]}");
    Ok(Answer::ok(json))
}

/// The objects as they were at a revision.
fn at_revision(
    state: &State,
    kind: usize,
    revision: u64,
    namespace: Option<&str>,
    after: Option<&ObjectPlace>,
) -> Result<Vec<(ObjectPlace, Arc<Stored>)>, Status> {
    let now = state
        .range(kind, namespace, after)
        .map(|(place, stored)| (place.clone(), Arc::clone(stored)));
    if revision == state.revision {
        return Ok(now.collect());
    }
    let changes = state.tables[kind].ring.after(revision, usize::MAX).ok_or_else(|| {
        Status::expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter.",
        )
    })?;
    let mut then: BTreeMap<ObjectPlace, Arc<Stored>> = now.collect();
    for event in changes.into_iter().rev() {
        let within = namespace.is_none_or(|wanted| *event.place.namespace == *wanted)
            && after.is_none_or(|after| event.place > *after);
        if within {
            match event.old {
                Some(old) => then.insert(event.place, old),
                None => then.remove(&event.place),
            };
        }
    }
    Ok(then.into_iter().collect())
}

impl Token {
    fn parse(text: &str) -> Result<Option<Token>, Status> {
        if text.is_empty() {
            return Ok(None);
        }
        let invalid = || Status::bad_request("invalid continue token: continue key is not valid");
        let hex = text.strip_prefix(TOKEN_PREFIX).ok_or_else(invalid)?;
        let digits = hex.as_bytes().chunks(2).map(|pair| {
            let pair = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(pair, 16).ok()
        });
        let bytes: Vec<u8> = digits.collect::<Option<_>>().ok_or_else(invalid)?;
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|_| invalid())
    }

    fn to_text(&self) -> String {
        let json = json!(self).to_string();
        let hex: String = json.bytes().map(|byte| format!("{byte:02x}")).collect();
        format!("{TOKEN_PREFIX}{hex}")
    }
}
