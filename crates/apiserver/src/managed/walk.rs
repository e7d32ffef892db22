//! Walking two versions of an object side by side: what differs, what a configuration names, how it merges.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::fieldset::FieldSet;
use crate::kind::Kind;

/// Fields that are maps with free keys: such a map can be owned as a whole besides its entries.
const MAPS: [&str; 18] = [
    "labels",
    "annotations",
    "requests",
    "limits",
    "capacity",
    "allocatable",
    "allocatedResources",
    "allocatedResourceStatuses",
    "data",
    "binaryData",
    "stringData",
    "parameters",
    "matchLabels",
    "volumeAttributes",
    "options",
    "overhead",
    "hugepages",
    "requirements",
];
/// Fields of the metadata that the server keeps, and nobody owns.
const SERVER_KEPT: [&str; 12] = [
    "name",
    "namespace",
    "generateName",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "selfLink",
    "managedFields",
    "clusterName",
];

/// What a list means when it is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListType {
    /// Entries are told apart by these fields.
    Keyed(&'static [&'static str]),
    /// Entries are told apart by their value.
    Set,
    /// The list is one value.
    Atomic,
}

/// How the lists and maps of a kind merge.
#[derive(Clone, Copy)]
pub(crate) struct Shape<'k> {
    pub(crate) kind: &'k Kind,
    /// Whether a map with free keys counts as a field besides its entries: for updates it does.
    pub(crate) owns_maps: bool,
}

impl Shape<'_> {
    /// The list at a path of field names with dots.
    pub(crate) fn list(self, path: &str) -> ListType {
        match path {
            "metadata.ownerReferences" => return ListType::Keyed(&["uid"]),
            "metadata.finalizers" => return ListType::Set,
            _ => {}
        }
        let keyed = self.kind.keyed_lists.iter().find(|(at, _)| *at == path);
        keyed.map_or(ListType::Atomic, |(_, keys)| ListType::Keyed(keys))
    }

    fn is_atomic_map(self, path: &str) -> bool {
        self.kind.atomic_maps.contains(&path)
    }
}

fn is_map(path: &str) -> bool {
    MAPS.contains(&path.rsplit('.').next().unwrap_or_default())
}

/// A path of field names, with dots.
pub(crate) fn join(path: &str, field: &str) -> String {
    if path.is_empty() {
        field.to_owned()
    } else {
        format!("{path}.{field}")
    }
}

fn is_owned_by_nobody(path: &str, field: &str) -> bool {
    match path {
        "" => matches!(field, "apiVersion" | "kind"),
        "metadata" => SERVER_KEPT.contains(&field),
        _ => false,
    }
}

/// The step that tells an entry of a list from the others.
pub(super) fn step(list: ListType, entry: &Value) -> String {
    match list {
        ListType::Keyed(keys) => {
            let key: Map<String, Value> = keys
                .iter()
                .filter_map(|key| {
                    entry
                        .get(*key)
                        .map(|value| ((*key).to_owned(), value.clone()))
                })
                .collect();
            format!("k:{}", Value::Object(key))
        }
        ListType::Set | ListType::Atomic => format!("v:{entry}"),
    }
}

/// All fields that a (part of an) object names.
pub(crate) fn fields(shape: Shape<'_>, path: &str, value: &Value, into: &mut FieldSet) {
    match value {
        Value::Object(map) if !shape.is_atomic_map(path) => {
            if !path.is_empty() && (map.is_empty() || (shape.owns_maps && is_map(path))) {
                into.member = true;
            }
            for (field, child) in map.iter().filter(|(_, child)| !child.is_null()) {
                if is_owned_by_nobody(path, field) {
                    continue;
                }
                let mut below = FieldSet::default();
                fields(shape, &join(path, field), child, &mut below);
                if !below.is_empty() {
                    into.child(&format!("f:{field}")).union(&below);
                }
            }
        }
        Value::Array(entries) => match shape.list(path) {
            ListType::Atomic => into.member = true,
            list => {
                for entry in entries {
                    let at = into.child(&step(list, entry));
                    at.member = true;
                    if list != ListType::Set {
                        fields(shape, path, entry, at);
                    }
                }
            }
        },
        _ => into.member = true,
    }
}

/// What differs between two versions of an object.
#[derive(Debug, Default)]
pub(crate) struct Difference {
    /// Fields that are new or have another value.
    pub(crate) changed: FieldSet,
    /// Fields that are gone.
    pub(crate) removed: FieldSet,
}

pub(crate) fn difference(shape: Shape<'_>, old: &Value, new: &Value) -> Difference {
    let mut difference = Difference::default();
    compare(
        shape,
        "",
        Some(old),
        Some(new),
        &mut difference.changed,
        &mut difference.removed,
    );
    difference
}

fn compare(
    shape: Shape<'_>,
    path: &str,
    old: Option<&Value>,
    new: Option<&Value>,
    changed: &mut FieldSet,
    removed: &mut FieldSet,
) {
    match (old, new) {
        (None, None) => {}
        (Some(old), Some(new)) if old == new => {}
        (None, Some(new)) => fields(shape, path, new, changed),
        (Some(old), None) => fields(shape, path, old, removed),
        (Some(Value::Object(old)), Some(Value::Object(new))) if !shape.is_atomic_map(path) => {
            let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for name in names {
                let pair = (present(old.get(name)), present(new.get(name)));
                if is_owned_by_nobody(path, name) || pair.0 == pair.1 {
                    continue;
                }
                let step = format!("f:{name}");
                let (changed, removed) = (changed.child(&step), removed.child(&step));
                compare(shape, &join(path, name), pair.0, pair.1, changed, removed);
            }
        }
        (Some(Value::Array(old)), Some(Value::Array(new)))
            if shape.list(path) != ListType::Atomic =>
        {
            let list = shape.list(path);
            let find = |entries: &[Value], wanted: &str| {
                entries.iter().position(|entry| step(list, entry) == wanted)
            };
            let steps: BTreeSet<String> = old
                .iter()
                .chain(new)
                .map(|entry| step(list, entry))
                .collect();
            for at in steps {
                let pair = (
                    find(old, &at).map(|index| &old[index]),
                    find(new, &at).map(|index| &new[index]),
                );
                let (changed, removed) = (changed.child(&at), removed.child(&at));
                match pair {
                    (None, Some(_)) => changed.member = true,
                    (Some(_), None) => removed.member = true,
                    _ => {}
                }
                if list != ListType::Set {
                    compare(shape, path, pair.0, pair.1, changed, removed);
                }
            }
        }
        _ => changed.member = true,
    }
    prune_empty(changed);
    prune_empty(removed);
}

fn present(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !value.is_null())
}

fn prune_empty(set: &mut FieldSet) {
    set.children.retain(|_, child| !child.is_empty());
}

/// Lays an applied configuration over the live object.
pub(crate) fn merge(shape: Shape<'_>, path: &str, live: &mut Value, applied: &Value) {
    match (live, applied) {
        (Value::Object(live), Value::Object(applied)) if !shape.is_atomic_map(path) => {
            for (field, value) in applied {
                if value.is_null() || is_owned_by_nobody(path, field) {
                    continue;
                }
                match live.get_mut(field) {
                    Some(old) => merge(shape, &join(path, field), old, value),
                    None => {
                        live.insert(field.clone(), value.clone());
                    }
                }
            }
        }
        (Value::Array(live), Value::Array(applied)) if shape.list(path) != ListType::Atomic => {
            let list = shape.list(path);
            for entry in applied {
                let wanted = step(list, entry);
                match live.iter_mut().find(|old| step(list, old) == wanted) {
                    Some(old) if list != ListType::Set => merge(shape, path, old, entry),
                    Some(_) => {}
                    None => live.push(entry.clone()),
                }
            }
        }
        (live, applied) => *live = applied.clone(),
    }
}

/// Removes the members of `set` from an object, and whatever becomes empty by that.
pub(crate) fn remove(shape: Shape<'_>, path: &str, object: &mut Value, set: &FieldSet) {
    match object {
        Value::Object(map) => {
            for (name, child) in &set.children {
                let Some(field) = name.strip_prefix("f:") else {
                    continue;
                };
                let Some(value) = map.get_mut(field) else {
                    continue;
                };
                let leaf = child.member && child.children.is_empty();
                if !leaf {
                    remove(shape, &join(path, field), value, child);
                }
                let emptied = match value {
                    Value::Object(map) => map.is_empty(),
                    Value::Array(list) => list.is_empty(),
                    _ => false,
                };
                if leaf || emptied {
                    map.remove(field);
                }
            }
        }
        Value::Array(entries) => {
            let list = shape.list(path);
            for (name, child) in &set.children {
                let Some(index) = entries.iter().position(|entry| step(list, entry) == *name)
                else {
                    continue;
                };
                if child.member {
                    entries.remove(index);
                } else {
                    remove(shape, path, &mut entries[index], child);
                }
            }
        }
        _ => {}
    }
}
