//! The steps of every write, whatever its verb: defaults, admission, validation, ownership.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::authorize::{Attempt, Decision, Objects, Verb, decide};
use crate::cascade::Sweep;
use crate::kind::{Change, FieldError, Kind, Origin, Part};
use crate::managed::{self, Writer};
use crate::store::Txn;
use crate::store::memory::{Id, Stored};
use crate::users::User;
use crate::{events, meta, names, status::Status};

/// Attempts at a free name for `generateName`.
const NAME_ATTEMPTS_MAX: usize = 8;
/// Letters of a made name: no vowels, so that no words come out.
const NAME_LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
const NAME_SUFFIX_LETTERS: usize = 5;
const NAME_BASE_BYTES_MAX: usize = 58;

/// Whose bookkeeping of fields is still to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// What changed belongs to the writer.
    Record,
    /// Server-side apply has done it.
    Done,
}

/// A new object, decoded, on its way in.
pub(crate) fn insert(
    txn: &mut Txn<'_>,
    kind_index: usize,
    namespace: &str,
    mut object: Value,
    writer: &Writer,
    ownership: Ownership,
) -> Result<Arc<Stored>, Status> {
    let kind = &txn.kinds[kind_index];
    if !matches!(meta::text(&object, "resourceVersion"), "" | "0") {
        return Err(Status::unexplained(
            "resourceVersion should not be set on objects to be created".to_owned(),
        ));
    }
    place_in_namespace(txn, kind, namespace, &mut object)?;
    let id = choose_name(txn, kind_index, namespace, &mut object)?;
    if txn.get(&id).is_some() {
        return Err(match meta::text(&object, "generateName") {
            "" => Status::already_exists(kind, &id.place.name),
            _ => Status::generate_name_conflict(kind, &id.place.name),
        });
    }
    for field in [
        "selfLink",
        "resourceVersion",
        "generation",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ] {
        meta::remove(&mut object, field);
    }
    meta::set(&mut object, "uid", json!(uuid::Uuid::new_v4().to_string()));
    meta::set(&mut object, "creationTimestamp", json!(writer.now));
    if kind.counts_generations() {
        meta::set(&mut object, "generation", json!(1));
    }
    if !kind.keeps_status_at_creation()
        && let Value::Object(map) = &mut object
    {
        map.remove("status");
    }
    (kind.sign)(&mut object, &writer.caller.user);
    (kind.default)(&mut object);
    if ownership == Ownership::Record {
        let status = object
            .as_object_mut()
            .filter(|_| !kind.keeps_status_at_creation())
            .and_then(|map| map.remove("status"));
        managed::update(kind, None, &mut object, writer);
        if let Some(status) = status {
            meta::as_map(&mut object).insert("status".to_owned(), status);
        }
    }
    (kind.admit)(&mut object, &txn.peers());
    // Server-side apply makes objects too.
    permitted(txn, writer, Verb::Create, &id, (None, Some(&object)))?;
    check(txn, kind, None, &object, Part::Main)?;
    let stored = txn.put(&id, object);
    if kind.plural == events::PLURAL && kind.group.is_empty() {
        events::make_room(txn, kind_index);
    }
    Ok(stored)
}

/// Refuses a write that its caller may not make, with the objects as the write sees them. A token that was revoked
/// before this write no longer counts.
pub(crate) fn permitted(
    txn: &Txn<'_>,
    writer: &Writer,
    verb: Verb,
    id: &Id,
    (old, new): (Option<&Value>, Option<&Value>),
) -> Result<(), Status> {
    let caller = &writer.caller;
    if caller.user == User::Admin {
        return Ok(());
    }
    if !caller.counts_within(txn) {
        return Err(Status::unauthorized());
    }
    let kind = &txn.kinds[id.kind];
    let attempt = Attempt {
        verb,
        group: kind.group,
        resource: kind.plural,
        subresource: writer.subresource,
        namespace: &id.place.namespace,
        name: &id.place.name,
        objects: Objects::Seen { old, new },
    };
    match decide(&caller.user, &attempt) {
        Decision::Allowed => Ok(()),
        Decision::Forbidden => Err(Status::not_permitted(&caller.user, kind, &attempt)),
    }
}

fn place_in_namespace(
    txn: &Txn<'_>,
    kind: &Kind,
    namespace: &str,
    object: &mut Value,
) -> Result<(), Status> {
    let given = meta::text(object, "namespace");
    if !kind.namespaced {
        meta::remove(object, "namespace");
        return Ok(());
    }
    if !given.is_empty() && given != namespace {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    meta::set(object, "namespace", json!(namespace));
    let Some(namespaces) = txn.kind_index("namespaces") else {
        return Ok(());
    };
    match txn.get(&Id::new(namespaces, "", namespace)) {
        None => Err(Status::not_found(&txn.kinds[namespaces], namespace)),
        Some(found) if found.deleting => Err(Status::namespace_terminating(
            kind,
            meta::text(object, "name"),
            namespace,
        )),
        Some(_) => Ok(()),
    }
}

fn choose_name(
    txn: &Txn<'_>,
    kind_index: usize,
    namespace: &str,
    object: &mut Value,
) -> Result<Id, Status> {
    let name = meta::text(object, "name");
    if !name.is_empty() {
        return Ok(Id::new(kind_index, namespace, name));
    }
    let base = meta::text(object, "generateName").to_owned();
    if base.is_empty() {
        let error = FieldError::required("metadata.name", "name or generateName is required");
        return Err(Status::invalid(&txn.kinds[kind_index], "", &[error]));
    }
    let cut = base.floor_char_boundary(NAME_BASE_BYTES_MAX.min(base.len()));
    let mut id = Id::new(kind_index, namespace, &base);
    for _ in 0..NAME_ATTEMPTS_MAX {
        id = Id::new(
            kind_index,
            namespace,
            &format!("{}{}", &base[..cut], name_suffix()),
        );
        if txn.get(&id).is_none() {
            break;
        }
    }
    meta::set(object, "name", json!(*id.place.name));
    Ok(id)
}

fn name_suffix() -> String {
    let random = uuid::Uuid::new_v4().into_bytes();
    let letters = random.iter().take(NAME_SUFFIX_LETTERS);
    letters
        .map(|byte| char::from(NAME_LETTERS[usize::from(*byte) % NAME_LETTERS.len()]))
        .collect()
}

/// A stored object and what shall become of it.
pub(crate) struct Replacement<'a> {
    pub(crate) id: &'a Id,
    pub(crate) old: Value,
    pub(crate) new: Value,
    pub(crate) part: Part,
    pub(crate) ownership: Ownership,
}

/// A new version of an object, on its way in.
pub(crate) fn replace(
    txn: &mut Txn<'_>,
    replacement: Replacement<'_>,
    writer: &Writer,
) -> Result<Arc<Stored>, Status> {
    let Replacement {
        id,
        old,
        mut new,
        part,
        ownership,
    } = replacement;
    let kind = &txn.kinds[id.kind];
    keep_what_the_server_keeps(kind, id, &old, &mut new)?;
    splice(kind, &old, &mut new, part);
    (kind.keep)(part, &old, &mut new);
    (kind.default)(&mut new);
    if writer.caller.user != User::Admin && ownership == Ownership::Record {
        // Only the administrator may say who owns which field.
        meta::copy(&mut new, &old, "managedFields");
    }
    permitted(txn, writer, writer.verb, id, (Some(&old), Some(&new)))?;
    if kind.counts_generations() && part == Part::Main && specification(&old) != specification(&new)
    {
        let generation = meta::get(&old, "generation")
            .and_then(Value::as_i64)
            .unwrap_or(0);
        meta::set(&mut new, "generation", json!(generation + 1));
    }
    match ownership {
        Ownership::Done if old == new => return current(txn, kind, id),
        Ownership::Done => {}
        Ownership::Record => {
            let sent = meta::remove(&mut new, "managedFields");
            let resets = sent
                .as_ref()
                .is_some_and(|sent| sent.as_array().is_some_and(|list| list.len() < 2));
            if !resets && same_but_for_owners(&old, &new) {
                return current(txn, kind, id);
            }
            if let Some(sent) = sent {
                meta::set(&mut new, "managedFields", sent);
            }
            managed::update(kind, Some(&old), &mut new, writer);
            if old == new {
                return current(txn, kind, id);
            }
        }
    }
    check(txn, kind, Some(&old), &new, part)?;
    if meta::get(&new, "deletionTimestamp").is_some()
        && meta::finalizers(&new).is_empty()
        && !holds_namespace(&new)
    {
        let mut sweep = Sweep::new(&writer.now);
        let last = sweep.remove(txn, id, new);
        sweep.run(txn);
        return Ok(last);
    }
    Ok(txn.put(id, new))
}

/// A namespace goes when it is empty, which the sweep decides.
fn holds_namespace(object: &Value) -> bool {
    object.get("kind").is_some_and(|kind| kind == "Namespace")
}

fn current(txn: &Txn<'_>, kind: &Kind, id: &Id) -> Result<Arc<Stored>, Status> {
    txn.get(id)
        .cloned()
        .ok_or_else(|| Status::not_found(kind, &id.place.name))
}

fn same_but_for_owners(old: &Value, new: &Value) -> bool {
    let (Value::Object(old), Value::Object(new)) = (old, new) else {
        return false;
    };
    let rest = |(field, _): &(&String, &Value)| *field != "metadata";
    if !old.iter().filter(rest).eq(new.iter().filter(rest)) {
        return false;
    }
    let metadata = |object: &serde_json::Map<String, Value>| {
        object.get("metadata").and_then(Value::as_object).cloned()
    };
    let (Some(mut old), Some(mut new)) = (metadata(old), metadata(new)) else {
        return false;
    };
    old.remove("managedFields");
    new.remove("managedFields");
    old == new
}

/// Everything but metadata and status: what a generation counts.
fn specification(object: &Value) -> Vec<(&String, &Value)> {
    let map = object.as_object();
    let counted = |(field, _): &(&String, &Value)| !matches!(field.as_str(), "metadata" | "status");
    map.into_iter().flatten().filter(counted).collect()
}

fn keep_what_the_server_keeps(
    kind: &Kind,
    id: &Id,
    old: &Value,
    new: &mut Value,
) -> Result<(), Status> {
    let name = &*id.place.name;
    let given = meta::text(new, "name");
    if given.is_empty() {
        meta::set(new, "name", json!(name));
    } else if given != name {
        return Err(Status::bad_request(format!(
            "the name of the object ({given}) does not match the name on the URL ({name})"
        )));
    }
    let given = meta::text(new, "namespace");
    if !given.is_empty() && *given != *id.place.namespace {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    meta::copy(new, old, "namespace");
    match meta::text(new, "resourceVersion") {
        "" | "0" if kind.origin == Origin::Custom => {
            let error = FieldError {
                reason: "FieldValueInvalid",
                field: "metadata.resourceVersion".to_owned(),
                message: "Invalid value: 0: must be specified for an update".to_owned(),
            };
            return Err(Status::invalid(kind, name, &[error]));
        }
        "" | "0" => {}
        given if given != meta::text(old, "resourceVersion") => {
            return Err(Status::modified(kind, name));
        }
        _ => {}
    }
    meta::copy(new, old, "resourceVersion");
    let given = meta::text(new, "uid");
    if !given.is_empty() && given != meta::text(old, "uid") {
        let error = FieldError::invalid("metadata.uid", &json!(given), "field is immutable");
        return Err(Status::invalid(kind, name, &[error]));
    }
    for field in [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "selfLink",
        "generateName",
    ] {
        meta::copy(new, old, field);
    }
    Ok(())
}

/// Refuses a whole object that was meant for an earlier one of the same name.
pub(crate) fn same_uid(kind: &Kind, id: &Id, sent: &Value, old: &Value) -> Result<(), Status> {
    let (given, there) = (meta::text(sent, "uid"), meta::text(old, "uid"));
    if given.is_empty() || given == there {
        return Ok(());
    }
    let why =
        format!("Precondition failed: UID in precondition: {given}, UID in object meta: {there}");
    Err(Status::conflict(kind, &id.place.name, &why))
}

/// The main resource leaves the status alone, and the other parts everything else.
fn splice(kind: &Kind, old: &Value, new: &mut Value, part: Part) {
    if !kind.status {
        return;
    }
    let Value::Object(old_map) = old else { return };
    let managed = meta::get(new, "managedFields").cloned();
    let map = meta::as_map(new);
    if part == Part::Main {
        match old_map.get("status") {
            Some(status) => map.insert("status".to_owned(), status.clone()),
            None => map.remove("status"),
        };
        return;
    }
    map.retain(|field, _| matches!(field.as_str(), "metadata" | "status"));
    for (field, value) in old_map {
        let keep = match field.as_str() {
            "status" => false,
            "metadata" => kind.origin == Origin::Custom,
            _ => true,
        };
        if keep {
            map.insert(field.clone(), value.clone());
        }
    }
    if let Some(managed) = managed {
        meta::set(new, "managedFields", managed);
    }
}

fn check(
    txn: &Txn<'_>,
    kind: &Kind,
    old: Option<&Value>,
    new: &Value,
    part: Part,
) -> Result<(), Status> {
    let peers = txn.peers();
    let lookup = |plural: &str, namespace: &str, name: &str| peers.get(plural, namespace, name);
    let change = Change {
        old,
        new,
        part,
        lookup: &lookup,
    };
    let name = meta::text(new, "name");
    let mut errors = match old {
        // What was accepted once is not looked at again, unless it changes.
        Some(old) if old.get("metadata") == new.get("metadata") => Vec::new(),
        _ => names::check_metadata(kind, new),
    };
    errors.extend(old.and_then(|old| new_finalizers(old, new)));
    errors.extend((kind.validate)(change));
    if !errors.is_empty() {
        return Err(Status::invalid(kind, name, &errors));
    }
    match (kind.forbid)(change) {
        Some(why) => Err(Status::forbidden(kind, name, &why)),
        None => Ok(()),
    }
}

/// Nothing may hold an object back once it is on its way out.
fn new_finalizers(old: &Value, new: &Value) -> Option<FieldError> {
    meta::get(old, "deletionTimestamp")?;
    let before = meta::finalizers(old);
    let fresh: Vec<String> = meta::finalizers(new)
        .into_iter()
        .filter(|name| !before.contains(name))
        .map(|name| format!("{name:?}"))
        .collect();
    (!fresh.is_empty()).then(|| {
        FieldError::forbidden(
            "metadata.finalizers",
            &format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                fresh.join(", ")
            ),
        )
    })
}
