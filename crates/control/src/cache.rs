//! What this process knows of the stored objects of one kind, indexed by the volume they belong to.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use kube::ResourceExt;
use kube::runtime::watcher;

/// Namespace (empty for kinds without one) and name.
pub type ObjectKey = (String, String);

/// The group by which objects of a kind are looked up, besides their name.
pub type GroupOf<K> = fn(&K) -> Option<String>;

/// All objects of one kind.
pub struct Cache<K> {
    inner: RwLock<Inner<K>>,
    group_of: GroupOf<K>,
}

struct Inner<K> {
    objects: HashMap<ObjectKey, Arc<K>>,
    groups: HashMap<String, BTreeSet<ObjectKey>>,
    /// Objects of a listing that is under way; they replace the old ones when it is complete.
    listing: HashMap<ObjectKey, Arc<K>>,
}

/// An object before and after an event.
pub struct Changed<K> {
    /// As it was.
    pub old: Option<Arc<K>>,
    /// As it is.
    pub new: Option<Arc<K>>,
}

impl<K: ResourceExt> Cache<K> {
    /// An empty cache whose objects are grouped by `group_of`.
    pub fn new(group_of: GroupOf<K>) -> Self {
        let inner = Inner {
            objects: HashMap::new(),
            groups: HashMap::new(),
            listing: HashMap::new(),
        };
        Cache {
            inner: RwLock::new(inner),
            group_of,
        }
    }

    /// The object of that name.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.read()
            .objects
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned()
    }

    /// The objects of one group, in the order of their names.
    pub fn group(&self, group: &str) -> Vec<Arc<K>> {
        let inner = self.read();
        let Some(keys) = inner.groups.get(group) else {
            return Vec::new();
        };
        keys.iter()
            .filter_map(|key| inner.objects.get(key).cloned())
            .collect()
    }

    /// Every object.
    pub fn all(&self) -> Vec<Arc<K>> {
        self.read().objects.values().cloned().collect()
    }

    /// Takes in one event of a watch, and returns what it changed.
    pub fn apply(&self, event: watcher::Event<K>) -> Vec<Changed<K>> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        match event {
            watcher::Event::Apply(object) => vec![inner.put(Arc::new(object), self.group_of)],
            watcher::Event::Delete(object) => {
                vec![inner.remove(&key_of(&object), self.group_of)]
            }
            watcher::Event::Init => {
                inner.listing.clear();
                Vec::new()
            }
            watcher::Event::InitApply(object) => {
                let object = Arc::new(object);
                inner.listing.insert(key_of(&*object), object);
                Vec::new()
            }
            watcher::Event::InitDone => {
                let listing = std::mem::take(&mut inner.listing);
                let gone: Vec<ObjectKey> = inner
                    .objects
                    .keys()
                    .filter(|key| !listing.contains_key(*key))
                    .cloned()
                    .collect();
                let mut changes: Vec<Changed<K>> = gone
                    .iter()
                    .map(|key| inner.remove(key, self.group_of))
                    .collect();
                changes.extend(
                    listing
                        .into_values()
                        .map(|object| inner.put(object, self.group_of)),
                );
                changes
            }
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner<K>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: ResourceExt> Inner<K> {
    fn put(&mut self, object: Arc<K>, group_of: GroupOf<K>) -> Changed<K> {
        let key = key_of(&*object);
        let old = self.objects.insert(key.clone(), object.clone());
        let old_group = old.as_deref().and_then(group_of);
        let new_group = group_of(&object);
        if old_group != new_group {
            self.leave(old_group, &key);
        }
        if let Some(group) = new_group {
            self.groups.entry(group).or_default().insert(key);
        }
        Changed {
            old,
            new: Some(object),
        }
    }

    fn remove(&mut self, key: &ObjectKey, group_of: GroupOf<K>) -> Changed<K> {
        let old = self.objects.remove(key);
        self.leave(old.as_deref().and_then(group_of), key);
        Changed { old, new: None }
    }

    fn leave(&mut self, group: Option<String>, key: &ObjectKey) {
        let Some(group) = group else { return };
        if let Some(keys) = self.groups.get_mut(&group) {
            keys.remove(key);
            if keys.is_empty() {
                self.groups.remove(&group);
            }
        }
    }
}

fn key_of<K: ResourceExt>(object: &K) -> ObjectKey {
    (object.namespace().unwrap_or_default(), object.name_any())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;

    fn object(name: &str, group: &str) -> ConfigMap {
        let mut object = ConfigMap::default();
        object.metadata.name = Some(name.to_owned());
        object
            .labels_mut()
            .insert("group".to_owned(), group.to_owned());
        object
    }

    fn cache() -> Cache<ConfigMap> {
        Cache::new(|object| object.labels().get("group").cloned())
    }

    fn names(cache: &Cache<ConfigMap>, group: &str) -> Vec<String> {
        cache
            .group(group)
            .iter()
            .map(|each| each.name_any())
            .collect()
    }

    // Fails if an object stays listed under a group that it has left.
    #[test]
    fn an_object_moves_between_groups() {
        let cache = cache();
        cache.apply(watcher::Event::Apply(object("a", "one")));
        cache.apply(watcher::Event::Apply(object("a", "two")));
        assert!(names(&cache, "one").is_empty());
        assert_eq!(names(&cache, "two"), ["a"]);
        cache.apply(watcher::Event::Delete(object("a", "two")));
        assert!(names(&cache, "two").is_empty());
    }

    // Fails if an object that vanished while the watch was down is still believed to exist.
    #[test]
    fn a_new_listing_replaces_what_was_known() {
        let cache = cache();
        cache.apply(watcher::Event::Apply(object("gone", "one")));
        cache.apply(watcher::Event::Init);
        cache.apply(watcher::Event::InitApply(object("here", "one")));
        let changes = cache.apply(watcher::Event::InitDone);
        assert_eq!(changes.len(), 2);
        assert_eq!(names(&cache, "one"), ["here"]);
    }
}
