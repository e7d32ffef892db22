//! A set of fields, as `fieldsV1` writes it.
//!
//! A node's name is one step of a path: `f:name` (a field), `k:{"name":"a"}` (an entry of a keyed list) or
//! `v:"a"` (a value of a set). A node without children is a member; a node with children is one if it has `.`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Nesting at which `fieldsV1` of a client is no longer read.
const DEPTH_MAX: usize = 64;

/// Fields, as a tree of path steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FieldSet {
    /// Whether this very path is in the set.
    pub(super) member: bool,
    pub(super) children: BTreeMap<String, FieldSet>,
}

impl FieldSet {
    pub(crate) fn is_empty(&self) -> bool {
        !self.member && self.children.values().all(FieldSet::is_empty)
    }

    pub(super) fn child(&mut self, step: &str) -> &mut FieldSet {
        self.children.entry(step.to_owned()).or_default()
    }

    pub(crate) fn union(&mut self, other: &FieldSet) {
        self.member |= other.member;
        for (step, child) in &other.children {
            self.child(step).union(child);
        }
    }

    /// Takes out the members of `other`; empty branches fall away.
    pub(crate) fn subtract(&mut self, other: &FieldSet) {
        self.member &= !other.member;
        for (step, child) in &other.children {
            if let Some(own) = self.children.get_mut(step) {
                own.subtract(child);
                if own.is_empty() {
                    self.children.remove(step);
                }
            }
        }
    }

    pub(crate) fn intersection(&self, other: &FieldSet) -> FieldSet {
        let mut common = FieldSet {
            member: self.member && other.member,
            children: BTreeMap::new(),
        };
        for (step, child) in &self.children {
            if let Some(theirs) = other.children.get(step) {
                let both = child.intersection(theirs);
                if !both.is_empty() {
                    common.children.insert(step.clone(), both);
                }
            }
        }
        common
    }

    /// The members' paths, as Kubernetes prints them: `.spec.containers[name="a"].image`.
    pub(crate) fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.collect("", &mut paths);
        paths
    }

    fn collect(&self, prefix: &str, paths: &mut Vec<String>) {
        if self.member {
            paths.push(prefix.to_owned());
        }
        for (step, child) in &self.children {
            child.collect(&format!("{prefix}{}", printed(step)), paths);
        }
    }

    pub(crate) fn to_value(&self) -> Value {
        let mut map = Map::new();
        if self.member && !self.children.is_empty() {
            map.insert(".".to_owned(), Value::Object(Map::new()));
        }
        for (step, child) in &self.children {
            map.insert(step.clone(), child.to_value());
        }
        Value::Object(map)
    }

    pub(crate) fn from_value(value: &Value) -> FieldSet {
        let mut set = FieldSet::read(value, 0);
        // The root stands for the object itself, which nobody owns.
        set.member = false;
        set
    }

    fn read(value: &Value, depth: usize) -> FieldSet {
        let mut set = FieldSet::default();
        let map = match value {
            Value::Object(map) if depth < DEPTH_MAX => map,
            _ => {
                return FieldSet {
                    member: true,
                    children: BTreeMap::new(),
                };
            }
        };
        set.member = map.is_empty() || map.contains_key(".");
        for (step, child) in map.iter().filter(|(step, _)| *step != ".") {
            set.children
                .insert(step.clone(), FieldSet::read(child, depth + 1));
        }
        set
    }
}

fn printed(step: &str) -> String {
    match step.split_once(':') {
        Some(("f", name)) => format!(".{name}"),
        Some(("k", keys)) => {
            let keys: Map<String, Value> = serde_json::from_str(keys).unwrap_or_default();
            let pairs: Vec<String> = keys
                .iter()
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            format!("[{}]", pairs.join(","))
        }
        Some(("v", value)) => format!("[={value}]"),
        _ => format!("[{step}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_set_survives_its_wire_form() {
        // Fails if ownership is lost or gained by storing it.
        let wire = json!({
            "f:metadata": { "f:labels": { ".": {}, "f:a": {} } },
            "f:spec": { "f:containers": { "k:{\"name\":\"c\"}": { ".": {}, "f:image": {} } } },
        });
        let set = FieldSet::from_value(&wire);
        assert_eq!(set.to_value(), wire);
        assert_eq!(
            set.paths(),
            [
                ".metadata.labels",
                ".metadata.labels.a",
                ".spec.containers[name=\"c\"]",
                ".spec.containers[name=\"c\"].image"
            ]
        );
        let mut rest = set.clone();
        rest.subtract(&FieldSet::from_value(
            &json!({ "f:metadata": { "f:labels": { "f:a": {} } } }),
        ));
        assert_eq!(rest.paths().len(), 3);
        assert_eq!(set.intersection(&rest), rest);
    }
}
