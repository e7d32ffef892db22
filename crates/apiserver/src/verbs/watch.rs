//! GET with `watch`: a stream of what happens to the objects that it selects.
//!
//! A watch holds a place in the recent past of its kind, not a queue: however slow its reader is, it costs nothing but
//! that place. If the past is dropped before it was read, the watch ends with 410.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use serde_json::{Value, json};
use tokio::sync::watch::Receiver;
use tokio::time::{Instant, sleep_until};

use super::get::include_object;
use super::{Call, Sight};
use crate::kind::Kind;
use crate::meta;
use crate::selector::Selector;
use crate::status::Status;
use crate::store::memory::{Event, ObjectPlace, Stored};
use crate::store::{CLOSED, Shared};
use crate::table::{self, IncludeObject};
use crate::users::Revocation;

/// Events that go into one frame of the stream at most.
const FRAME_EVENTS_MAX: usize = 128;
/// How long a watch lasts if its client does not say.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// How long a watch lasts at most.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Marks the bookmark after the initial events.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// The frames of a watch.
pub(crate) type Frames = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

struct Watch {
    shared: Arc<Shared>,
    kind_index: usize,
    namespace: Option<String>,
    name: Option<String>,
    selector: Selector,
    sight: Option<Sight>,
    /// Everything up to this revision has been looked at.
    seen: u64,
    signal: Receiver<u64>,
    revocation: Revocation,
    until: Instant,
    bookmarks: bool,
    form: Form,
    first: Option<Bytes>,
    ended: bool,
}

/// How objects are shown.
enum Form {
    Plain,
    Table {
        include: IncludeObject,
        headings_sent: bool,
    },
}

pub(crate) fn watch(call: &Call<'_>) -> Result<Frames, Status> {
    let kind = call.kind();
    let query = &call.query;
    let selector = Selector::parse(kind, query.get("labelSelector"), query.get("fieldSelector"))?;
    let wanted = query
        .number("resourceVersion")?
        .filter(|wanted| *wanted > 0);
    let stream_list = query.flag("sendInitialEvents");
    if stream_list && query.get("resourceVersionMatch") != "NotOlderThan" {
        return Err(Status::unprocessable(
            "ListOptions.meta.k8s.io \"\" is invalid: resourceVersionMatch: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan".to_owned(),
        ));
    }
    let timeout = query
        .number("timeoutSeconds")?
        .filter(|seconds| *seconds > 0);
    let timeout = timeout
        .map_or(DEFAULT_TIMEOUT, Duration::from_secs)
        .min(TIMEOUT_MAX);
    let form = match table::wanted(call.header(http::header::ACCEPT)) {
        true => Form::Table {
            include: include_object(call)?,
            headings_sent: false,
        },
        false => Form::Plain,
    };
    let shared = Arc::clone(&call.store.shared);
    let mut watch = Watch {
        kind_index: call.target.kind,
        namespace: call.target.namespace.clone(),
        name: call.target.name.clone(),
        selector,
        sight: call.sight(),
        seen: 0,
        signal: shared.subscribe(call.target.kind),
        revocation: Revocation::of(&call.caller, &shared),
        until: Instant::now() + timeout,
        bookmarks: query.flag("allowWatchBookmarks"),
        form,
        first: None,
        ended: false,
        shared,
    };
    watch.start(wanted, stream_list)?;
    Ok(Box::pin(futures::stream::unfold(
        watch,
        |mut watch| async move {
            let frame = watch.next().await?;
            Some((frame, watch))
        },
    )))
}

impl Watch {
    fn kind(&self) -> &'static Kind {
        &self.shared.kinds[self.kind_index]
    }

    fn selects(&self, place: &ObjectPlace, stored: &Stored) -> bool {
        self.namespace
            .as_deref()
            .is_none_or(|wanted| *place.namespace == *wanted)
            && self
                .name
                .as_deref()
                .is_none_or(|wanted| *place.name == *wanted)
            && self.selector.matches(place, stored)
            && self
                .sight
                .as_ref()
                .is_none_or(|sight| sight.shows(place, stored))
    }

    /// Decides where the watch begins, and collects the objects that it begins with.
    fn start(&mut self, wanted: Option<u64>, stream_list: bool) -> Result<(), Status> {
        let shared = Arc::clone(&self.shared);
        let state = shared.read();
        if let Some(wanted) = wanted.filter(|wanted| *wanted > state.revision) {
            return Err(Status::future_revision(wanted, state.revision));
        }
        if let Some(wanted) = wanted.filter(|_| !stream_list) {
            self.seen = wanted;
            return Ok(());
        }
        self.seen = state.revision;
        let initial: Vec<Arc<Stored>> = state
            .range(self.kind_index, self.namespace.as_deref(), None)
            .filter(|(place, stored)| self.selects(place, stored))
            .map(|(_, stored)| Arc::clone(stored))
            .collect();
        drop(state);
        let mut frame = Vec::new();
        for stored in initial {
            self.show(&mut frame, "ADDED", &stored.json);
        }
        if stream_list {
            self.bookmark(&mut frame, true);
        }
        self.first = Some(Bytes::from(frame)).filter(|frame| !frame.is_empty());
        Ok(())
    }

    async fn next(&mut self) -> Option<Bytes> {
        if self.revocation.has_come() {
            return None;
        }
        if let Some(frame) = self.first.take() {
            return Some(frame);
        }
        while !self.ended {
            // Taken before the events are read: what comes after it wakes us again.
            let closed = *self.signal.borrow_and_update() == CLOSED;
            let (events, revision) = {
                let state = self.shared.read();
                let ring = &state.tables[self.kind_index].ring;
                (ring.after(self.seen, FRAME_EVENTS_MAX), state.revision)
            };
            let mut frame = Vec::new();
            match events {
                None => {
                    self.ended = true;
                    let status = Status::expired(format!(
                        "too old resource version: {} ({revision})",
                        self.seen
                    ));
                    envelope(
                        &mut frame,
                        "ERROR",
                        status.to_value().to_string().as_bytes(),
                    );
                }
                Some(events) if events.is_empty() => {
                    if closed {
                        return None;
                    }
                    let timed_out = tokio::select! {
                        biased;
                        () = self.revocation.comes() => return None,
                        changed = self.signal.changed() => { self.ended = changed.is_err(); false }
                        () = sleep_until(self.until) => true,
                    };
                    if timed_out {
                        self.ended = true;
                        if self.bookmarks {
                            // Nothing of this kind has happened since, so the watch is as new as the store was.
                            self.seen = self.seen.max(revision);
                            self.bookmark(&mut frame, false);
                        }
                    }
                }
                Some(events) => {
                    for event in &events {
                        self.seen = event.revision;
                        self.event(&mut frame, event);
                    }
                    self.ended = Instant::now() >= self.until;
                }
            }
            if !frame.is_empty() {
                return Some(Bytes::from(frame));
            }
        }
        None
    }

    /// Shows an event as seen through the selection: an object that leaves it is deleted, one that enters it is added.
    fn event(&mut self, frame: &mut Vec<u8>, event: &Event) {
        let before = event
            .old
            .as_ref()
            .filter(|old| self.selects(&event.place, old))
            .cloned();
        let after = !event.removed && self.selects(&event.place, &event.new);
        match (before, after) {
            (None, false) => {}
            (None, true) => self.show(frame, "ADDED", &event.new.json),
            (Some(_), true) => self.show(frame, "MODIFIED", &event.new.json),
            (Some(_), false) if event.removed => self.show(frame, "DELETED", &event.new.json),
            (Some(old), false) => {
                let mut object = old.value();
                meta::set(
                    &mut object,
                    "resourceVersion",
                    json!(event.revision.to_string()),
                );
                self.show(frame, "DELETED", object.to_string().as_bytes());
            }
        }
    }

    fn show(&mut self, frame: &mut Vec<u8>, what: &str, object: &[u8]) {
        let kind = self.kind();
        match &mut self.form {
            Form::Plain => envelope(frame, what, object),
            Form::Table {
                include,
                headings_sent,
            } => {
                let object: Value = serde_json::from_slice(object).unwrap_or_default();
                let list_meta =
                    json!({ "resourceVersion": meta::text(&object, "resourceVersion") });
                let mut table =
                    table::render(kind, &[object], list_meta, *include, jiff::Timestamp::now());
                if *headings_sent {
                    table["columnDefinitions"] = Value::Null;
                }
                *headings_sent = true;
                envelope(frame, what, table.to_string().as_bytes());
            }
        }
    }

    fn bookmark(&self, frame: &mut Vec<u8>, initial_events_end: bool) {
        let kind = self.kind();
        let mut metadata =
            json!({ "resourceVersion": self.seen.to_string(), "creationTimestamp": null });
        if initial_events_end {
            metadata["annotations"] = json!({ INITIAL_EVENTS_END: "true" });
        }
        let object =
            json!({ "kind": kind.kind, "apiVersion": kind.api_version(), "metadata": metadata });
        envelope(frame, "BOOKMARK", object.to_string().as_bytes());
    }
}

fn envelope(frame: &mut Vec<u8>, what: &str, object: &[u8]) {
    frame.extend_from_slice(b"{\"type\":\"");
    frame.extend_from_slice(what.as_bytes());
    frame.extend_from_slice(b"\",\"object\":");
    frame.extend_from_slice(object);
    frame.extend_from_slice(b"}\n");
}
