//! Events expire: they go after an hour, and the oldest go when there are too many.

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::meta;
use crate::store::Txn;

/// The kind's plural.
pub(crate) const PLURAL: &str = "events";
/// How long an event stays after it was last seen.
const LIFETIME: SignedDuration = SignedDuration::from_hours(1);
/// Events that are kept at most.
const EVENTS_MAX: usize = 2000;
/// How many are removed at once when there are too many, so that not every new event pays for it.
const EVENTS_DROPPED_AT_ONCE: usize = 200;

/// Removes the oldest events if there are too many.
pub(crate) fn make_room(txn: &mut Txn<'_>, kind: usize) {
    if txn.count(kind) <= EVENTS_MAX {
        return;
    }
    let mut events = txn.list(kind, None);
    let excess = events.len().saturating_sub(EVENTS_MAX);
    if excess == 0 {
        return;
    }
    events.sort_by_key(|(_, stored)| stored.revision);
    for (id, stored) in events.into_iter().take(excess + EVENTS_DROPPED_AT_ONCE) {
        txn.remove(&id, stored.value());
    }
}

/// Removes the events whose time is over.
pub(crate) fn expire(txn: &mut Txn<'_>, now: Timestamp) {
    let kinds = txn.kinds;
    let Some(kind) = kinds
        .iter()
        .position(|kind| kind.plural == PLURAL && kind.group.is_empty())
    else {
        return;
    };
    for (id, stored) in txn.list(kind, None) {
        let event = stored.value();
        if last_seen(&event).is_some_and(|seen| now.duration_since(seen) > LIFETIME) {
            txn.remove(&id, event);
        }
    }
}

fn last_seen(event: &Value) -> Option<Timestamp> {
    let times = [
        event.get("lastTimestamp"),
        event.pointer("/series/lastObservedTime"),
        event.get("eventTime"),
        meta::get(event, "creationTimestamp"),
    ];
    times
        .into_iter()
        .flatten()
        .filter_map(|time| time.as_str()?.parse().ok())
        .max()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::Store;
    use crate::store::memory::Id;
    use serde_json::json;

    #[tokio::test]
    async fn an_event_goes_an_hour_after_it_was_last_seen() {
        // Fails if old events pile up, or if one goes that was seen again lately.
        let dir = tempfile::tempdir().unwrap();
        let kinds = crate::kinds::all();
        let kind = kinds.iter().position(|kind| kind.plural == PLURAL).unwrap();
        let store = Store::open(&dir.path().join("store"), kinds, |_| Ok(())).unwrap();
        let left = store.write(move |txn| {
            let now: Timestamp = "2026-01-01T12:00:00Z".parse().unwrap();
            for (name, made, seen) in [
                ("old", "2026-01-01T10:00:00Z", "2026-01-01T10:59:59Z"),
                ("again", "2026-01-01T10:00:00Z", "2026-01-01T11:30:00Z"),
                ("new", "2026-01-01T11:30:00Z", "2026-01-01T11:30:00Z"),
            ] {
                let event = json!({ "metadata": { "name": name, "uid": name, "creationTimestamp": made }, "lastTimestamp": seen });
                txn.put(&Id::new(kind, "default", name), event);
            }
            expire(txn, now);
            let left = txn.list(kind, None).into_iter();
            Ok(left.map(|(id, _)| id.place.name.to_string()).collect::<Vec<_>>())
        });
        assert_eq!(left.await.unwrap(), ["again", "new"]);
    }
}
