//! One write among others of its batch: sees what the writes before it left, and changes nothing by itself.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

use super::memory::{Event, Id, ObjectPlace, State, Stored};
use crate::kind::{Kind, Peers};
use crate::meta;

/// The staged changes of a batch; a refused write leaves no trace here.
#[derive(Debug, Default)]
pub(super) struct Staged {
    pub(super) objects: BTreeMap<Id, Option<Arc<Stored>>>,
    pub(super) events: Vec<(usize, Event)>,
    pub(super) revision: u64,
    /// Objects whose owners have to be looked at once the batch is durable.
    pub(super) suspects: Vec<Id>,
    /// Objects that were staged with this uid; they may have gone again.
    uids: HashMap<Box<str>, Id>,
    /// Objects that were staged with this owner; they may have changed again.
    owned: HashMap<Box<str>, Vec<Id>>,
}

impl Staged {
    /// Nothing yet, on top of a revision.
    pub(super) fn at(revision: u64) -> Staged {
        Staged {
            revision,
            ..Staged::default()
        }
    }

    /// Adds the changes of a write that came later.
    pub(super) fn absorb(&mut self, later: Staged) {
        self.objects.extend(later.objects);
        self.events.extend(later.events);
        self.suspects.extend(later.suspects);
        self.uids.extend(later.uids);
        for (owner, ids) in later.owned {
            self.owned.entry(owner).or_default().extend(ids);
        }
        self.revision = later.revision;
    }
}

/// What a write works on.
pub(crate) struct Txn<'a> {
    pub(crate) kinds: &'static [Kind],
    base: &'a State,
    batch: &'a Staged,
    own: Staged,
}

impl<'a> Txn<'a> {
    pub(super) fn new(kinds: &'static [Kind], base: &'a State, batch: &'a Staged) -> Txn<'a> {
        Txn {
            kinds,
            base,
            batch,
            own: Staged::at(batch.revision),
        }
    }

    pub(super) fn into_staged(self) -> Staged {
        self.own
    }

    /// Forgets what this write has staged so far: a dry run went as far as it should.
    pub(crate) fn discard(&mut self) {
        self.own = Staged::at(self.batch.revision);
    }

    pub(crate) fn get(&self, id: &Id) -> Option<&Arc<Stored>> {
        if let Some(staged) = self
            .own
            .objects
            .get(id)
            .or_else(|| self.batch.objects.get(id))
        {
            return staged.as_ref();
        }
        self.base.get(id)
    }

    /// Puts a new version of an object, and gives it its resourceVersion.
    pub(crate) fn put(&mut self, id: &Id, mut object: Value) -> Arc<Stored> {
        let old = self.get(id).cloned();
        self.own.revision += 1;
        let stored = Arc::new(seal(&mut object, self.own.revision));
        self.stage(id, old, Arc::clone(&stored), false);
        stored
    }

    /// Takes an object away; returns its last version.
    pub(crate) fn remove(&mut self, id: &Id, mut object: Value) -> Arc<Stored> {
        let old = self.get(id).cloned();
        self.own.revision += 1;
        let last = Arc::new(seal(&mut object, self.own.revision));
        self.stage(id, old, Arc::clone(&last), true);
        last
    }

    fn stage(&mut self, id: &Id, old: Option<Arc<Stored>>, new: Arc<Stored>, removed: bool) {
        if !removed
            && new
                .owners
                .iter()
                .any(|owner| self.with_uid(&owner.uid).is_none())
        {
            self.own.suspects.push(id.clone());
        }
        if !removed {
            self.own.uids.insert(new.uid.clone(), id.clone());
            for owner in &new.owners {
                self.own
                    .owned
                    .entry(owner.uid.clone())
                    .or_default()
                    .push(id.clone());
            }
        }
        self.own
            .objects
            .insert(id.clone(), (!removed).then(|| Arc::clone(&new)));
        let event = Event {
            revision: self.own.revision,
            place: id.place.clone(),
            old,
            new,
            removed,
        };
        self.own.events.push((id.kind, event));
    }

    /// The object with this uid, wherever it is.
    pub(crate) fn with_uid(&self, uid: &str) -> Option<Id> {
        let places = [
            self.own.uids.get(uid),
            self.batch.uids.get(uid),
            self.base.with_uid(uid),
        ];
        let has_it = |id: &&Id| self.get(id).is_some_and(|stored| *stored.uid == *uid);
        places.into_iter().flatten().find(has_it).cloned()
    }

    /// The objects that name `uid` as an owner.
    pub(crate) fn dependents(&self, uid: &str) -> Vec<Id> {
        let owned = |stored: &Arc<Stored>| stored.owners.iter().any(|owner| *owner.uid == *uid);
        let staged = [self.own.owned.get(uid), self.batch.owned.get(uid)]
            .into_iter()
            .flatten()
            .flatten();
        let mut ids: Vec<Id> = self.base.dependents(uid).chain(staged).cloned().collect();
        ids.sort();
        ids.dedup();
        ids.retain(|id| self.get(id).is_some_and(owned));
        ids
    }

    /// The objects of a kind in one namespace, or in all of them.
    pub(crate) fn list(&self, kind: usize, namespace: Option<&str>) -> Vec<(Id, Arc<Stored>)> {
        let within = |id: &Id| {
            id.kind == kind && namespace.is_none_or(|wanted| *id.place.namespace == *wanted)
        };
        let mut places: Vec<ObjectPlace> = self
            .base
            .range(kind, namespace, None)
            .map(|(place, _)| place.clone())
            .collect();
        let staged = self.own.objects.keys().chain(self.batch.objects.keys());
        places.extend(staged.filter(|id| within(id)).map(|id| id.place.clone()));
        places.sort();
        places.dedup();
        places
            .into_iter()
            .map(|place| Id { kind, place })
            .filter_map(|id| self.get(&id).cloned().map(|stored| (id, stored)))
            .collect()
    }

    /// How many objects of a kind there are, or would be.
    pub(crate) fn count(&self, kind: usize) -> usize {
        self.base.tables[kind].objects.len()
            + self
                .own
                .objects
                .keys()
                .chain(self.batch.objects.keys())
                .filter(|id| id.kind == kind)
                .count()
    }

    /// Whether anything is left in a namespace.
    pub(crate) fn namespace_is_empty(&self, namespace: &str) -> bool {
        let staged = self.own.objects.keys().chain(self.batch.objects.keys());
        let mut kinds = (0..self.kinds.len()).filter(|kind| self.kinds[*kind].namespaced);
        let left_over = kinds.any(|kind| {
            let mut places = self
                .base
                .range(kind, Some(namespace), None)
                .map(|(place, _)| place);
            places.any(|place| {
                self.get(&Id {
                    kind,
                    place: place.clone(),
                })
                .is_some()
            })
        });
        let mut staged = staged.filter(|id| *id.place.namespace == *namespace);
        !left_over && !staged.any(|id| self.get(id).is_some())
    }

    /// The other objects, as validation may read them.
    pub(crate) fn peers(&self) -> Peers<'_> {
        Peers { txn: self }
    }

    pub(crate) fn kind_index(&self, plural: &str) -> Option<usize> {
        self.kinds.iter().position(|kind| kind.plural == plural)
    }
}

fn seal(object: &mut Value, revision: u64) -> Stored {
    meta::set(
        object,
        "resourceVersion",
        Value::String(revision.to_string()),
    );
    // A tree of JSON values always serialises, and every object we hold has metadata.
    let json = serde_json::to_vec(object).expect("a JSON tree serialises");
    Stored::from_json(Bytes::from(json)).expect("a stored object has metadata")
}
