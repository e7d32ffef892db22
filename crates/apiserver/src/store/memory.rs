//! All objects, in memory, as the bytes that readers get.
//!
//! Reads never touch the disk and seldom parse. An object is kept as its JSON, together with the few facts that lists,
//! watches and the owner cascade need. A parsed tree would take ten times the memory.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

use crate::kind::Kind;

/// Events kept for watches of one kind.
const RING_EVENTS_MAX: usize = 1024;
/// Bytes of objects that the events of one kind may hold on to.
const RING_BYTES_MAX: usize = 2 << 20;

/// Where an object is within its kind; cluster-scoped objects have an empty namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ObjectPlace {
    pub(crate) namespace: Box<str>,
    pub(crate) name: Box<str>,
}

impl ObjectPlace {
    pub(crate) fn new(namespace: &str, name: &str) -> ObjectPlace {
        ObjectPlace {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

/// Which object: the index of its kind, and its place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id {
    pub(crate) kind: usize,
    pub(crate) place: ObjectPlace,
}

impl Id {
    pub(crate) fn new(kind: usize, namespace: &str, name: &str) -> Id {
        Id {
            kind,
            place: ObjectPlace::new(namespace, name),
        }
    }

    /// The key in the file: `plural.group/namespace/name`.
    pub(crate) fn to_key(&self, kinds: &[Kind]) -> String {
        let kind = &kinds[self.kind];
        format!(
            "{}.{}/{}/{}",
            kind.plural, kind.group, self.place.namespace, self.place.name
        )
    }

    pub(crate) fn from_key(kinds: &[Kind], key: &str) -> Option<Id> {
        let mut parts = key.splitn(3, '/');
        let (plural, group) = parts.next()?.split_once('.')?;
        let (namespace, name) = (parts.next()?, parts.next()?);
        let kind = kinds
            .iter()
            .position(|kind| kind.plural == plural && kind.group == group)?;
        Some(Id::new(kind, namespace, name))
    }
}

/// One stored version of an object.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) revision: u64,
    /// The object as it is served.
    pub(crate) json: Bytes,
    pub(crate) uid: Box<str>,
    pub(crate) labels: Box<[(Box<str>, Box<str>)]>,
    pub(crate) owners: Box<[Owner]>,
    /// Whether the object is on its way out.
    pub(crate) deleting: bool,
}

/// One entry of `metadata.ownerReferences`, as far as the cascade needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: Box<str>,
    pub(crate) blocks: bool,
}

#[derive(Deserialize)]
struct Header {
    metadata: HeaderMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HeaderMeta {
    #[serde(default)]
    uid: Box<str>,
    #[serde(default)]
    resource_version: Box<str>,
    #[serde(default)]
    labels: BTreeMap<Box<str>, Box<str>>,
    #[serde(default)]
    owner_references: Vec<HeaderOwner>,
    deletion_timestamp: Option<Box<str>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HeaderOwner {
    uid: Box<str>,
    #[serde(default)]
    block_owner_deletion: bool,
}

impl Stored {
    /// Reads the facts beside the bytes; `None` if the bytes are not an object.
    pub(crate) fn from_json(json: Bytes) -> Option<Stored> {
        let header: Header = serde_json::from_slice(&json).ok()?;
        let meta = header.metadata;
        Some(Stored {
            revision: meta.resource_version.parse().ok()?,
            uid: meta.uid,
            labels: meta.labels.into_iter().collect(),
            owners: meta
                .owner_references
                .into_iter()
                .map(|owner| Owner {
                    uid: owner.uid,
                    blocks: owner.block_owner_deletion,
                })
                .collect(),
            deleting: meta.deletion_timestamp.is_some(),
            json,
        })
    }

    /// The object as a tree.
    pub(crate) fn value(&self) -> Value {
        // Every stored object was serialised by us or checked by `from_json`; an unreadable one is our bug.
        serde_json::from_slice(&self.json).expect("stored objects are JSON")
    }

    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        self.labels
            .iter()
            .find(|(have, _)| &**have == key)
            .map(|(_, value)| &**value)
    }
}

/// One change, as watches see it.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) revision: u64,
    pub(crate) place: ObjectPlace,
    /// The version before; `None` for a creation.
    pub(crate) old: Option<Arc<Stored>>,
    /// The version after. Of a removed object: the last version, with the revision of the removal.
    pub(crate) new: Arc<Stored>,
    pub(crate) removed: bool,
}

/// The recent events of one kind.
#[derive(Debug)]
pub(crate) struct Ring {
    events: VecDeque<Event>,
    bytes: usize,
    /// Every event up to and including this revision may be missing.
    forgotten: u64,
}

impl Ring {
    fn new(forgotten: u64) -> Ring {
        Ring {
            events: VecDeque::new(),
            bytes: 0,
            forgotten,
        }
    }

    fn push(&mut self, event: Event) {
        self.bytes += event.new.json.len();
        self.events.push_back(event);
        while self.events.len() > RING_EVENTS_MAX
            || (self.bytes > RING_BYTES_MAX && self.events.len() > 1)
        {
            if let Some(gone) = self.events.pop_front() {
                self.bytes -= gone.new.json.len();
                self.forgotten = gone.revision;
            }
        }
    }

    /// Up to `count` events after `revision`, or `None` if some of them are forgotten.
    pub(crate) fn after(&self, revision: u64, count: usize) -> Option<Vec<Event>> {
        if revision < self.forgotten {
            return None;
        }
        let start = self
            .events
            .partition_point(|event| event.revision <= revision);
        Some(self.events.range(start..).take(count).cloned().collect())
    }
}

/// All objects of one kind, and their recent past.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) objects: BTreeMap<ObjectPlace, Arc<Stored>>,
    pub(crate) ring: Ring,
}

/// Everything.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) revision: u64,
    pub(crate) tables: Vec<Table>,
    by_uid: HashMap<Box<str>, Id>,
    dependents: HashMap<Box<str>, BTreeSet<Id>>,
}

impl State {
    pub(super) fn new(kinds: &[Kind], revision: u64) -> State {
        let table = |_| Table {
            objects: BTreeMap::new(),
            ring: Ring::new(revision),
        };
        State {
            revision,
            tables: kinds.iter().map(table).collect(),
            by_uid: HashMap::new(),
            dependents: HashMap::new(),
        }
    }

    /// Every object there is.
    pub(super) fn ids(&self) -> impl Iterator<Item = Id> {
        self.tables.iter().enumerate().flat_map(|(kind, table)| {
            let places = table.objects.keys().cloned();
            places.map(move |place| Id { kind, place })
        })
    }

    pub(crate) fn get(&self, id: &Id) -> Option<&Arc<Stored>> {
        self.tables[id.kind].objects.get(&id.place)
    }

    /// The objects of a kind in one namespace, or in all of them, that come after `after`.
    pub(crate) fn range<'a>(
        &'a self,
        kind: usize,
        namespace: Option<&'a str>,
        after: Option<&ObjectPlace>,
    ) -> impl Iterator<Item = (&'a ObjectPlace, &'a Arc<Stored>)> {
        let start = match (after, namespace) {
            (Some(place), _) => Bound::Excluded(place.clone()),
            (None, Some(namespace)) => Bound::Included(ObjectPlace::new(namespace, "")),
            (None, None) => Bound::Unbounded,
        };
        self.tables[kind]
            .objects
            .range((start, Bound::Unbounded))
            .take_while(move |(place, _)| {
                namespace.is_none_or(|wanted| *place.namespace == *wanted)
            })
    }

    pub(crate) fn with_uid(&self, uid: &str) -> Option<&Id> {
        self.by_uid.get(uid)
    }

    pub(crate) fn dependents(&self, uid: &str) -> impl Iterator<Item = &Id> {
        self.dependents.get(uid).into_iter().flatten()
    }

    /// Puts an object in its place, or takes it away.
    pub(super) fn set(&mut self, id: &Id, stored: Option<Arc<Stored>>) {
        let objects = &mut self.tables[id.kind].objects;
        let old = match &stored {
            Some(stored) => objects.insert(id.place.clone(), Arc::clone(stored)),
            None => objects.remove(&id.place),
        };
        if let Some(old) = old {
            self.by_uid.remove(&old.uid);
            for owner in &old.owners {
                if let Some(ids) = self.dependents.get_mut(&owner.uid) {
                    ids.remove(id);
                    if ids.is_empty() {
                        self.dependents.remove(&owner.uid);
                    }
                }
            }
        }
        if let Some(stored) = stored {
            self.by_uid.insert(stored.uid.clone(), id.clone());
            for owner in &stored.owners {
                self.dependents
                    .entry(owner.uid.clone())
                    .or_default()
                    .insert(id.clone());
            }
        }
    }

    pub(super) fn record(&mut self, kind: usize, event: Event) {
        self.tables[kind].ring.push(event);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn event(revision: u64, bytes: usize) -> Event {
        let json = Bytes::from(vec![b' '; bytes]);
        let stored = Stored {
            revision,
            json,
            uid: "".into(),
            labels: Box::new([]),
            owners: Box::new([]),
            deleting: false,
        };
        Event {
            revision,
            place: ObjectPlace::new("", "x"),
            old: None,
            new: Arc::new(stored),
            removed: false,
        }
    }

    #[test]
    fn a_ring_is_bounded_by_count_and_by_bytes_and_says_what_it_forgot() {
        // Fails if a ring grows beyond its bounds, or hands out a past with a hole in it.
        let mut ring = Ring::new(5);
        assert!(ring.after(4, 10).is_none());
        assert_eq!(ring.after(5, 10).unwrap().len(), 0);
        for revision in 6..6 + 2000 {
            ring.push(event(revision, 10));
        }
        assert_eq!(ring.events.len(), RING_EVENTS_MAX);
        assert!(ring.after(100, 10).is_none());
        assert_eq!(ring.after(2003, 10).unwrap().len(), 2);
        for revision in 3000..3010 {
            ring.push(event(revision, RING_BYTES_MAX / 2));
        }
        assert!(ring.bytes <= RING_BYTES_MAX);
        assert!(ring.after(2999, 10).is_none());
    }

    #[test]
    fn a_key_names_the_same_object_both_ways() {
        // Fails if an object would come back in another place after a restart.
        let kinds = crate::kinds::all();
        for (kind, _) in kinds.iter().enumerate() {
            let id = Id::new(kind, "some-ns", "a.b-c");
            assert_eq!(Id::from_key(kinds, &id.to_key(kinds)), Some(id));
        }
        assert_eq!(Id::from_key(kinds, "pods"), None);
        assert_eq!(Id::from_key(kinds, "no.such/a/b"), None);
    }
}
