//! What a deletion takes with it: dependents by `ownerReferences`, the content of a namespace.
//!
//! The cascade is part of the write that caused it, so a crash leaves either all of it or nothing. An object with
//! finalizers stays, marked, until the last of them goes; then the sweep continues from there.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::meta;
use crate::store::Txn;
use crate::store::memory::{Id, Stored};

/// Holds an owner back until the dependents that block it are gone.
const FOREGROUND: &str = "foregroundDeletion";

/// What becomes of the dependents of a deleted object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Propagation {
    /// They go after it.
    Background,
    /// They go before it.
    Foreground,
    /// They stay, without an owner.
    Orphan,
}

/// A deletion and all that follows from it.
pub(crate) struct Sweep {
    now: String,
    gone: Vec<(Id, Arc<Stored>)>,
    namespaces: BTreeSet<Box<str>>,
}

impl Sweep {
    pub(crate) fn new(now: &str) -> Sweep {
        Sweep {
            now: now.to_owned(),
            gone: Vec::new(),
            namespaces: BTreeSet::new(),
        }
    }

    /// Deletes an object, or marks it if something holds it; returns what is left of it and whether it is gone.
    pub(crate) fn delete(
        &mut self,
        txn: &mut Txn<'_>,
        id: &Id,
        propagation: Propagation,
    ) -> Option<(Arc<Stored>, bool)> {
        let stored = Arc::clone(txn.get(id)?);
        let mut object = stored.value();
        match propagation {
            Propagation::Background => {}
            Propagation::Orphan => release(txn, &stored.uid),
            Propagation::Foreground => {
                if txn
                    .dependents(&stored.uid)
                    .iter()
                    .any(|dependent| blocks(txn, dependent, &stored.uid))
                {
                    add_finalizer(&mut object, FOREGROUND);
                }
            }
        }
        let is_namespace = txn.kinds[id.kind].plural == "namespaces";
        if meta::finalizers(&object).is_empty() && !is_namespace {
            return Some((self.remove(txn, id, object), true));
        }
        let held = if stored.deleting && stored.value() == object {
            stored
        } else {
            self.mark(txn, id, object, is_namespace)
        };
        if propagation == Propagation::Foreground {
            for dependent in txn.dependents(&held.uid) {
                self.delete(txn, &dependent, Propagation::Background);
            }
        }
        if is_namespace {
            self.empty_namespace(txn, &id.place.name);
        }
        Some((held, false))
    }

    fn mark(
        &self,
        txn: &mut Txn<'_>,
        id: &Id,
        mut object: Value,
        is_namespace: bool,
    ) -> Arc<Stored> {
        if meta::get(&object, "deletionTimestamp").is_none() {
            meta::set(&mut object, "deletionTimestamp", json!(self.now));
            meta::set(&mut object, "deletionGracePeriodSeconds", json!(0));
            if txn.kinds[id.kind].counts_generations() {
                let generation = meta::get(&object, "generation")
                    .and_then(Value::as_i64)
                    .unwrap_or(0);
                meta::set(&mut object, "generation", json!(generation + 1));
            }
        }
        if is_namespace {
            object["status"]["phase"] = json!("Terminating");
        }
        txn.put(id, object)
    }

    fn empty_namespace(&mut self, txn: &mut Txn<'_>, namespace: &str) {
        for kind in 0..txn.kinds.len() {
            if txn.kinds[kind].namespaced {
                for (id, _) in txn.list(kind, Some(namespace)) {
                    self.delete(txn, &id, Propagation::Background);
                }
            }
        }
        self.namespaces.insert(namespace.into());
    }

    /// Takes an object away; `run` then looks after those it leaves behind.
    pub(crate) fn remove(&mut self, txn: &mut Txn<'_>, id: &Id, object: Value) -> Arc<Stored> {
        let last = txn.remove(id, object);
        self.gone.push((id.clone(), Arc::clone(&last)));
        if txn.kinds[id.kind].namespaced {
            self.namespaces.insert(id.place.namespace.clone());
        }
        last
    }

    /// Follows up on every removal. Each round removes an object or is the last, so this ends.
    pub(crate) fn run(mut self, txn: &mut Txn<'_>) {
        loop {
            while let Some((_, last)) = self.gone.pop() {
                for dependent in txn.dependents(&last.uid) {
                    self.collect(txn, &dependent);
                }
                for owner in &last.owners {
                    self.unblock(txn, &owner.uid);
                }
            }
            let Some(namespace) = self.namespaces.pop_first() else {
                return;
            };
            self.close_namespace(txn, &namespace);
        }
    }

    /// Deletes an object if none of its owners is left; otherwise it only drops the references to those that are gone.
    fn collect(&mut self, txn: &mut Txn<'_>, id: &Id) {
        let Some(stored) = txn.get(id).cloned() else {
            return;
        };
        if stored.owners.is_empty() {
            return;
        }
        let left: Vec<bool> = stored
            .owners
            .iter()
            .map(|owner| txn.with_uid(&owner.uid).is_some())
            .collect();
        if left.iter().all(|is_left| !is_left) {
            if !stored.deleting {
                self.delete(txn, id, Propagation::Background);
            }
        } else if left.iter().any(|is_left| !is_left) {
            let mut object = stored.value();
            if let Some(Value::Array(owners)) = meta::map(&mut object).get_mut("ownerReferences") {
                let mut keep = left.iter();
                owners.retain(|_| keep.next().copied().unwrap_or(true));
            }
            txn.put(id, object);
        }
    }

    /// Lets an owner go that has waited for its dependents.
    fn unblock(&mut self, txn: &mut Txn<'_>, uid: &str) {
        let Some(id) = txn.with_uid(uid) else { return };
        let Some(stored) = txn.get(&id).cloned() else {
            return;
        };
        if !stored.deleting
            || txn
                .dependents(uid)
                .iter()
                .any(|dependent| blocks(txn, dependent, uid))
        {
            return;
        }
        let mut object = stored.value();
        let finalizers: Vec<String> = meta::finalizers(&object)
            .into_iter()
            .map(str::to_owned)
            .collect();
        let rest: Vec<String> = finalizers
            .iter()
            .filter(|name| *name != FOREGROUND)
            .cloned()
            .collect();
        if rest.len() == finalizers.len() {
            return;
        }
        meta::set_finalizers(&mut object, &rest);
        if rest.is_empty() {
            self.remove(txn, &id, object);
        } else {
            txn.put(&id, object);
        }
    }

    fn close_namespace(&mut self, txn: &mut Txn<'_>, name: &str) {
        let Some(kind) = txn.kind_index("namespaces") else {
            return;
        };
        let id = Id::new(kind, "", name);
        let Some(stored) = txn.get(&id).cloned() else {
            return;
        };
        if !stored.deleting || !txn.namespace_is_empty(name) {
            return;
        }
        let mut object = stored.value();
        if meta::finalizers(&object).is_empty() {
            if let Some(Value::Object(spec)) = object.get_mut("spec") {
                spec.remove("finalizers");
            }
            self.remove(txn, &id, object);
        }
    }
}

/// Looks at objects whose owners were not there when they were written.
pub(crate) fn examine(txn: &mut Txn<'_>, suspects: &[Id]) {
    let mut sweep = Sweep::new(&meta::time(jiff::Timestamp::now()));
    for id in suspects {
        sweep.collect(txn, id);
    }
    sweep.run(txn);
}

/// Finishes what an earlier run may have left: orphans, owners that wait for nothing, empty namespaces.
pub(crate) fn repair(txn: &mut Txn<'_>) {
    let mut sweep = Sweep::new(&meta::time(jiff::Timestamp::now()));
    for kind in 0..txn.kinds.len() {
        for (id, stored) in txn.list(kind, None) {
            sweep.collect(txn, &id);
            if stored.deleting {
                sweep.unblock(txn, &stored.uid);
                if txn.kinds[kind].plural == "namespaces" {
                    sweep.namespaces.insert(id.place.name.clone());
                }
            }
        }
    }
    sweep.run(txn);
}

fn blocks(txn: &Txn<'_>, dependent: &Id, uid: &str) -> bool {
    txn.get(dependent).is_some_and(|stored| {
        stored
            .owners
            .iter()
            .any(|owner| *owner.uid == *uid && owner.blocks)
    })
}

/// Takes the owner out of all its dependents.
fn release(txn: &mut Txn<'_>, uid: &str) {
    for id in txn.dependents(uid) {
        let Some(mut object) = txn.get(&id).map(|stored| stored.value()) else {
            continue;
        };
        if let Some(Value::Array(owners)) = meta::map(&mut object).get_mut("ownerReferences") {
            owners.retain(|owner| owner.get("uid").is_none_or(|have| have != uid));
            if owners.is_empty() {
                meta::remove(&mut object, "ownerReferences");
            }
        }
        txn.put(&id, object);
    }
}

fn add_finalizer(object: &mut Value, name: &str) {
    let mut finalizers: Vec<String> = meta::finalizers(object)
        .into_iter()
        .map(str::to_owned)
        .collect();
    if !finalizers.iter().any(|have| have == name) {
        finalizers.push(name.to_owned());
        meta::set_finalizers(object, &finalizers);
    }
}
