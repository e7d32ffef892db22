//! A store in memory that treats writes as the API does: versions, finalizers, owners, and one ordered stream of events
//! for each kind.

use std::collections::{BTreeMap, HashMap, VecDeque};

use serde_json::{Map, Value, json};

use crate::write::{Object, Place, Write, merge_conditions};

/// Every kind that the store holds.
pub const KINDS: [Object; 7] = [
    Object::Claim,
    Object::PersistentVolume,
    Object::Volume,
    Object::Target,
    Object::Replica,
    Object::Attachment,
    Object::Pool,
];

/// What a watch is told.
pub enum Event {
    /// The object is this now.
    Apply(Value),
    /// The object, as it was last, is gone.
    Delete(Value),
}

/// Kind, namespace, name.
type Key = (usize, String, String);

#[derive(Default)]
pub struct Store {
    objects: BTreeMap<Key, Value>,
    events: HashMap<usize, VecDeque<Event>>,
    version: u64,
    uids: u64,
}

fn index(object: Object) -> usize {
    KINDS
        .iter()
        .position(|each| *each == object)
        .expect("a kind that the store holds")
}

fn key(place: &Place) -> Key {
    (
        index(place.object),
        place.namespace.clone(),
        place.name.clone(),
    )
}

impl Store {
    /// Grows with every change that is stored.
    pub fn version(&self) -> u64 {
        self.version
    }

    pub fn get(&self, place: &Place) -> Option<&Value> {
        self.objects.get(&key(place))
    }

    pub fn all(&self, object: Object) -> Vec<&Value> {
        let kind = index(object);
        self.objects
            .iter()
            .filter(|(key, _)| key.0 == kind)
            .map(|(_, value)| value)
            .collect()
    }

    /// The next event of a kind that its watch has not been told yet.
    pub fn next_event(&mut self, object: Object) -> Option<Event> {
        self.events.get_mut(&index(object))?.pop_front()
    }

    /// The watches start again, with all that is stored.
    pub fn list_again(&mut self) {
        self.events.clear();
        for (key, body) in &self.objects {
            let events = self.events.entry(key.0).or_default();
            events.push_back(Event::Apply(body.clone()));
        }
    }

    /// Carries one write out; false when it is refused as outdated.
    pub fn apply(&mut self, write: &Write) -> bool {
        match write {
            Write::Create(place, body) => self.create(place, body.clone()),
            Write::Patch(place, body) => self.patch(place, body, false),
            Write::PatchStatus(place, body) => self.patch(place, body, true),
            Write::Delete(place) => self.delete(&key(place)),
        }
    }

    fn create(&mut self, place: &Place, mut body: Value) -> bool {
        let key = key(place);
        if self.objects.contains_key(&key) {
            return false;
        }
        self.uids += 1;
        let fields = body.as_object_mut().expect("an object");
        fields.remove("status");
        let meta = fields["metadata"].as_object_mut().expect("metadata");
        meta.insert("name".to_owned(), json!(place.name));
        if !place.namespace.is_empty() {
            meta.insert("namespace".to_owned(), json!(place.namespace));
        }
        meta.insert("uid".to_owned(), json!(format!("u{}", self.uids)));
        meta.insert("generation".to_owned(), json!(1));
        meta.insert("creationTimestamp".to_owned(), json!(crate::stored::now()));
        self.put(key.clone(), body);
        self.collect(&key);
        true
    }

    /// An object whose owner is not there goes at once.
    fn collect(&mut self, key: &Key) {
        let owners = self.objects[key]["metadata"]["ownerReferences"].as_array();
        let orphaned = owners.is_some_and(|owners| {
            let there = |uid: &Value| {
                self.objects
                    .values()
                    .any(|each| each["metadata"]["uid"] == *uid)
            };
            !owners.iter().any(|owner| there(&owner["uid"]))
        });
        if orphaned {
            self.delete(key);
        }
    }

    fn patch(&mut self, place: &Place, body: &Value, status: bool) -> bool {
        let key = key(place);
        let Some(old) = self.objects.get(&key) else {
            return false;
        };
        let pin = &body["metadata"]["resourceVersion"];
        if !pin.is_null() && *pin != old["metadata"]["resourceVersion"] {
            return false;
        }
        let mut new = old.clone();
        if status {
            let mut part = old.get("status").cloned().unwrap_or(Value::Null);
            let mut change = body["status"].clone();
            let conditions = change
                .as_object_mut()
                .filter(|_| place.object.is_core())
                .and_then(|fields| fields.remove("conditions"));
            merge(&mut part, &change);
            if let Some(conditions) = conditions {
                merge_conditions(&mut part["conditions"], &conditions);
            }
            new["status"] = part;
        } else {
            merge(&mut new, body);
            match old.get("status") {
                Some(status) => new["status"] = status.clone(),
                None => drop(new.as_object_mut().map(|fields| fields.remove("status"))),
            }
        }
        if new == *old {
            return true;
        }
        if new["spec"] != old["spec"] {
            let generation = old["metadata"]["generation"].as_u64().unwrap_or(1);
            new["metadata"]["generation"] = json!(generation + 1);
        }
        self.put(key.clone(), new);
        self.finish_deletion(&key);
        true
    }

    fn put(&mut self, key: Key, mut body: Value) {
        self.version += 1;
        body["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let events = self.events.entry(key.0).or_default();
        events.push_back(Event::Apply(body.clone()));
        self.objects.insert(key, body);
    }

    fn delete(&mut self, key: &Key) -> bool {
        let Some(mut body) = self.objects.get(key).cloned() else {
            return false;
        };
        if body["metadata"]["deletionTimestamp"].is_null() {
            body["metadata"]["deletionTimestamp"] = json!(crate::stored::now());
            self.put(key.clone(), body);
        }
        self.finish_deletion(key);
        true
    }

    fn finish_deletion(&mut self, key: &Key) {
        let meta = &self.objects[key]["metadata"];
        let kept = meta["finalizers"]
            .as_array()
            .is_some_and(|all| !all.is_empty());
        if meta["deletionTimestamp"].is_null() || kept {
            return;
        }
        let Some(body) = self.objects.remove(key) else {
            return;
        };
        self.version += 1;
        let uid = body["metadata"]["uid"].clone();
        self.events
            .entry(key.0)
            .or_default()
            .push_back(Event::Delete(body));
        let owned = |each: &Value| {
            let owners = each["metadata"]["ownerReferences"].as_array();
            owners.is_some_and(|owners| owners.iter().any(|owner| owner["uid"] == uid))
        };
        let dependents: Vec<Key> = self
            .objects
            .iter()
            .filter(|(_, each)| owned(each))
            .map(|(key, _)| key.clone())
            .collect();
        for dependent in dependents {
            self.delete(&dependent);
        }
    }
}

/// RFC 7386.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let target = target.as_object_mut().expect("made one just now");
    for (name, value) in fields {
        if value.is_null() {
            target.remove(name);
        } else {
            merge(target.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}
