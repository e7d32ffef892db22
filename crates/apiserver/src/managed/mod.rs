//! Who owns which field: `metadata.managedFields`, and server-side apply on top of it.
//!
//! An update takes ownership of the fields that it changes: they leave every other manager's set. An application takes
//! the fields that it names. If another manager owns one with another value, it conflicts, unless it is forced. A
//! field that it named the last time and no longer names is removed, unless another manager owns it too.

pub(crate) mod fieldset;
pub(crate) mod walk;

use serde_json::{Value, json};

use crate::authorize::Verb;
use crate::kind::Kind;
use crate::meta;
use crate::status::Status;
use crate::users::Caller;
use fieldset::FieldSet;
use walk::Shape;

/// The number of updating managers above which the oldest are merged into one, as in Kubernetes.
const UPDATE_MANAGERS_MAX: usize = 10;
/// The name under which old updates are folded.
const ANCIENT: &str = "ancient-changes";

/// Who writes, how, and when.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    pub(crate) caller: Caller,
    pub(crate) verb: Verb,
    pub(crate) manager: String,
    pub(crate) subresource: &'static str,
    pub(crate) now: String,
}

/// One entry of `metadata.managedFields`.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    manager: String,
    operation: String,
    api_version: String,
    subresource: String,
    time: String,
    set: FieldSet,
}

const UPDATE: &str = "Update";
const APPLY: &str = "Apply";

/// Records an update: `new` gets the managed fields of `old`, with what changed given to the writer.
pub(crate) fn update(kind: &Kind, old: Option<&Value>, new: &mut Value, writer: &Writer) {
    let reset = is_reset(new);
    let mut entries = old.filter(|_| !reset).map(read).unwrap_or_default();
    let nothing = json!({});
    let difference = walk::difference(
        Shape {
            kind,
            owns_maps: true,
        },
        old.unwrap_or(&nothing),
        new,
    );
    for entry in &mut entries {
        entry.set.subtract(&difference.removed);
        if !entry.is(UPDATE, writer) {
            entry.set.subtract(&difference.changed);
        }
    }
    if !difference.changed.is_empty() {
        let own = own_entry(&mut entries, kind, UPDATE, writer);
        own.set.union(&difference.changed);
        own.time.clone_from(&writer.now);
    }
    fold(&mut entries);
    write(new, entries);
}

/// Applies a configuration to the live object (an empty one, if there is none yet).
pub(crate) fn apply(
    kind: &Kind,
    live: &Value,
    configuration: &Value,
    force: bool,
    writer: &Writer,
) -> Result<Value, Status> {
    let shape = Shape {
        kind,
        owns_maps: false,
    };
    let mut named = FieldSet::default();
    walk::fields(shape, "", configuration, &mut named);
    let mut new = live.clone();
    walk::merge(shape, "", &mut new, configuration);
    let mut entries = read(live);
    let changed = walk::difference(shape, live, &new).changed;

    let mut conflicts = Vec::new();
    for entry in entries.iter_mut().filter(|entry| !entry.is(APPLY, writer)) {
        let contested = entry.set.intersection(&changed).intersection(&named);
        if force {
            entry.set.subtract(&contested);
        } else {
            let who = entry.described();
            conflicts.extend(
                contested
                    .paths()
                    .into_iter()
                    .map(|path| (who.clone(), path)),
            );
        }
    }
    if !conflicts.is_empty() {
        return Err(Status::apply_conflict(&conflicts));
    }

    let before = own_entry(&mut entries, kind, APPLY, writer).set.clone();
    let mut dropped = before.clone();
    dropped.subtract(&named);
    for entry in entries.iter().filter(|entry| !entry.is(APPLY, writer)) {
        dropped.subtract(&entry.set);
    }
    walk::remove(shape, "", &mut new, &dropped);
    let removed = walk::difference(shape, live, &new).removed;
    for entry in &mut entries {
        entry.set.subtract(&removed);
    }
    let own = own_entry(&mut entries, kind, APPLY, writer);
    if before != named || !changed.is_empty() || !removed.is_empty() {
        own.time.clone_from(&writer.now);
    }
    own.set = named;
    write(&mut new, entries);
    Ok(new)
}

impl Entry {
    fn is(&self, operation: &str, writer: &Writer) -> bool {
        self.operation == operation
            && self.manager == writer.manager
            && self.subresource == writer.subresource
    }

    fn described(&self) -> String {
        let Entry {
            manager,
            subresource,
            api_version,
            ..
        } = self;
        let from = match subresource.as_str() {
            "" => String::new(),
            name => format!(" with subresource {name:?}"),
        };
        // An applier stands for its configuration, an updater for one version of the kind.
        match self.operation.as_str() {
            APPLY => format!("{manager:?}{from}"),
            _ => format!("{manager:?}{from} using {api_version}"),
        }
    }
}

fn own_entry<'a>(
    entries: &'a mut Vec<Entry>,
    kind: &Kind,
    operation: &str,
    writer: &Writer,
) -> &'a mut Entry {
    let index = entries
        .iter()
        .position(|entry| entry.is(operation, writer))
        .unwrap_or_else(|| {
            entries.push(Entry {
                manager: writer.manager.clone(),
                operation: operation.to_owned(),
                api_version: kind.api_version(),
                subresource: writer.subresource.to_owned(),
                time: writer.now.clone(),
                set: FieldSet::default(),
            });
            entries.len() - 1
        });
    &mut entries[index]
}

/// A client may ask to forget all owners, by sending a list that is empty or has one empty entry.
fn is_reset(object: &Value) -> bool {
    match meta::get(object, "managedFields")
        .and_then(Value::as_array)
        .map(Vec::as_slice)
    {
        Some([]) => true,
        Some([only]) => only.as_object().is_some_and(serde_json::Map::is_empty),
        _ => false,
    }
}

fn fold(entries: &mut Vec<Entry>) {
    entries.retain(|entry| !entry.set.is_empty());
    let updates = entries
        .iter()
        .filter(|entry| entry.operation == UPDATE)
        .count();
    let Some(excess) = updates
        .checked_sub(UPDATE_MANAGERS_MAX)
        .filter(|excess| *excess > 0)
    else {
        return;
    };
    entries.sort_by(|a, b| a.time.cmp(&b.time));
    let mut ancient: Option<Entry> = None;
    let mut left = excess + 1;
    entries.retain_mut(|entry| {
        if entry.operation != UPDATE || left == 0 {
            return true;
        }
        left -= 1;
        match &mut ancient {
            Some(ancient) => ancient.set.union(&entry.set),
            None => {
                ancient = Some(Entry {
                    manager: ANCIENT.to_owned(),
                    ..entry.clone()
                })
            }
        }
        false
    });
    entries.extend(ancient);
}

fn read(object: &Value) -> Vec<Entry> {
    let list = meta::get(object, "managedFields").and_then(Value::as_array);
    let text = |entry: &Value, field: &str| {
        entry
            .get(field)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    list.into_iter()
        .flatten()
        .filter_map(|entry| {
            Some(Entry {
                manager: text(entry, "manager"),
                operation: text(entry, "operation"),
                api_version: text(entry, "apiVersion"),
                subresource: text(entry, "subresource"),
                time: text(entry, "time"),
                set: FieldSet::from_value(entry.get("fieldsV1")?),
            })
        })
        .collect()
}

fn write(object: &mut Value, mut entries: Vec<Entry>) {
    entries.retain(|entry| !entry.set.is_empty());
    if entries.is_empty() {
        meta::remove(object, "managedFields");
        return;
    }
    let list = entries.iter().map(|entry| {
        let mut wire = json!({
            "manager": entry.manager,
            "operation": entry.operation,
            "apiVersion": entry.api_version,
            "time": entry.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": entry.set.to_value(),
        });
        if !entry.subresource.is_empty() {
            wire["subresource"] = json!(entry.subresource);
        }
        wire
    });
    let list = list.collect();
    meta::set(object, "managedFields", Value::Array(list));
}
