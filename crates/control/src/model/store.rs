//! A store in memory that treats writes as the API does: versions, finalizers, owners, what a node may write, and for
//! each watch one ordered stream of events for each kind.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::world::Sees;
use crate::write::{Object, Place, Write, merge_conditions};

/// Every kind that plans write.
pub const KINDS: [Object; 7] = [
    Object::Claim,
    Object::PersistentVolume,
    Object::Volume,
    Object::Target,
    Object::Replica,
    Object::Attachment,
    Object::Pool,
];

/// The index of Nodes, which no plan writes.
pub const NODES: usize = KINDS.len();
/// How many kinds a watch may be told of.
pub const KIND_COUNT: usize = NODES + 1;

/// What a watch is told.
#[derive(Clone)]
pub enum Event {
    /// The object is this now.
    Apply(Arc<Value>),
    /// The object, as it was last, is gone.
    Delete(Arc<Value>),
}

/// What one process has not been told yet, by kind.
struct Watch {
    sees: Sees,
    events: [VecDeque<Event>; KIND_COUNT],
}

impl Watch {
    /// Whether it is told of an object, as [`crate::world::World::watch`] asks for it.
    fn follows(&self, kind: usize, body: &Value) -> bool {
        let Sees::Node(name) = &self.sees else {
            return true;
        };
        match KINDS.get(kind) {
            None | Some(Object::Claim | Object::PersistentVolume) => false,
            Some(Object::Attachment) => body["spec"]["node"] == **name,
            Some(_) => true,
        }
    }
}

/// Kind, namespace, name.
type Key = (usize, String, String);

pub struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    watches: Vec<Watch>,
    version: u64,
    uids: u64,
    /// The time, which the simulation moves.
    pub now: MicroTime,
    /// The identities of replicas that somebody has deleted, whether they are gone or not.
    marked: BTreeSet<String>,
}

impl Default for Store {
    fn default() -> Self {
        let began = Timestamp::from_second(1_700_000_000).expect("a time");
        Store {
            objects: BTreeMap::new(),
            watches: Vec::new(),
            version: 0,
            uids: 0,
            now: MicroTime(began),
            marked: BTreeSet::new(),
        }
    }
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
        self.objects.get(&key(place)).map(AsRef::as_ref)
    }

    /// Whether a replica of that identity was ever deleted.
    pub fn was_marked(&self, id: &str) -> bool {
        self.marked.contains(id)
    }

    pub fn all(&self, object: Object) -> Vec<&Value> {
        let kind = index(object);
        self.objects
            .iter()
            .filter(|(key, _)| key.0 == kind)
            .map(|(_, value)| value.as_ref())
            .collect()
    }

    /// Begins a watch, and returns its number.
    pub fn watch(&mut self, sees: Sees) -> usize {
        let events = std::array::from_fn(|_| VecDeque::new());
        self.watches.push(Watch { sees, events });
        let number = self.watches.len() - 1;
        self.list_again(number);
        number
    }

    /// The next event of a kind that a watch has not been told yet.
    pub fn next_event(&mut self, watch: usize, kind: usize) -> Option<Event> {
        self.watches[watch].events[kind].pop_front()
    }

    /// A watch starts again, with all that is stored.
    pub fn list_again(&mut self, watch: usize) {
        let watch = &mut self.watches[watch];
        watch.events.iter_mut().for_each(VecDeque::clear);
        for (key, body) in &self.objects {
            if watch.follows(key.0, body) {
                watch.events[key.0].push_back(Event::Apply(body.clone()));
            }
        }
    }

    /// Stores what is known of a node.
    pub fn put_node(&mut self, node: &v1::Node) {
        let name = node.metadata.name.clone().unwrap_or_default();
        self.put((NODES, String::new(), name), json!(node));
    }

    /// Carries one write of a node out. A node changes only what belongs to it before the write.
    pub fn apply_of_node(&mut self, node: &str, write: &Write) -> bool {
        let stored = self.get(write.place());
        let is_its_own = stored.is_some_and(|stored| stored["spec"]["node"] == *node);
        is_its_own && self.apply(write)
    }

    /// Carries one write out; false when it is refused as outdated.
    pub fn apply(&mut self, write: &Write) -> bool {
        if write.place().object == Object::Secret {
            // There are none.
            return false;
        }
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
        meta.insert("creationTimestamp".to_owned(), json!(self.now));
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
        let old = old.clone();
        let mut new = Value::clone(&old);
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
        let body = Arc::new(body);
        self.tell(key.0, Event::Apply(body.clone()));
        self.objects.insert(key, body);
    }

    fn tell(&mut self, kind: usize, event: Event) {
        let (Event::Apply(body) | Event::Delete(body)) = &event;
        for watch in &mut self.watches {
            if watch.follows(kind, body) {
                watch.events[kind].push_back(event.clone());
            }
        }
    }

    fn delete(&mut self, key: &Key) -> bool {
        let Some(body) = self.objects.get(key) else {
            return false;
        };
        let mut body = Value::clone(body);
        if body["metadata"]["deletionTimestamp"].is_null() {
            for id in [&body["spec"]["replicaId"], &body["metadata"]["uid"]] {
                self.marked.extend(id.as_str().map(str::to_owned));
            }
            body["metadata"]["deletionTimestamp"] = json!(self.now);
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
        self.tell(key.0, Event::Delete(body));
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
