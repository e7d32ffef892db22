//! What a role has written and its caches do not show yet.
//!
//! Whoever looks in between sees the past. A planner would plan the same writes again. A node compares what it finds
//! with what is stored, and writes only what differs: a state that has changed back looks as if it had been reported,
//! and what is stored would stay wrong until the next resync. Caches are late when the API was away: a watch comes back
//! after a pause, and a write gets through at once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::ResourceExt;
use tokio::time::Instant;

use crate::cache::Cache;
use crate::world::World;
use crate::write::{Object, Place, Write, Written, version_of};

/// How long a new object is waited for. One that was removed again at once never gets into a cache.
const NEW_OBJECT_TIME_MAX: Duration = Duration::from_secs(60);

/// When to look again whether a write is seen. Its event brings the volume back sooner.
pub const LOOK_AFTER: Duration = Duration::from_millis(500);

/// Writes that are not seen yet, by volume.
#[derive(Default)]
pub struct Unseen(Mutex<HashMap<String, Vec<Pending>>>);

struct Pending {
    place: Place,
    version: u64,
    /// Until when it is waited for, if it is a new object.
    new_until: Option<Instant>,
}

impl Unseen {
    /// Remembers what was stored of this volume, and with which versions.
    pub fn note(&self, volume: &str, writes: &[Write], answers: &[(Written, Option<u64>)]) {
        let until = Instant::now() + NEW_OBJECT_TIME_MAX;
        let versions = answers.iter().map(|(_, version)| *version);
        let stored = writes.iter().zip(versions);
        let stored = stored.filter_map(|(write, version)| {
            Some(Pending {
                place: write.place().clone(),
                version: version?,
                new_until: matches!(write, Write::Create(..)).then_some(until),
            })
        });
        let stored: Vec<Pending> = stored.collect();
        if stored.is_empty() {
            return;
        }
        let mut unseen = self.lock();
        let pending = unseen.entry(volume.to_owned()).or_default();
        pending.retain(|old| stored.iter().all(|new| new.place != old.place));
        pending.extend(stored);
    }

    /// Whether the caches show everything that was written of this volume.
    pub fn is_seen(&self, world: &World, volume: &str) -> bool {
        let mut unseen = self.lock();
        let Some(pending) = unseen.get_mut(volume) else {
            return true;
        };
        pending.retain(|each| !each.is_in(world));
        let is_empty = pending.is_empty();
        if is_empty {
            unseen.remove(volume);
        }
        is_empty
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Pending>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending {
    fn is_in(&self, world: &World) -> bool {
        match self.place.object {
            Object::Claim => self.is_in_cache(&world.claims),
            Object::PersistentVolume => self.is_in_cache(&world.persistent_volumes),
            Object::Volume => self.is_in_cache(&world.volumes),
            Object::Target => self.is_in_cache(&world.targets),
            Object::Replica => self.is_in_cache(&world.replicas),
            Object::Attachment => self.is_in_cache(&world.attachments),
            Object::Pool => self.is_in_cache(&world.pools),
            // Nobody compares these with what was written of a volume.
            Object::Pod | Object::Secret => true,
        }
    }

    /// An object that is not in its cache has gone since, unless it is new.
    fn is_in_cache<K: ResourceExt>(&self, cache: &Cache<K>) -> bool {
        match cache.get(&self.place.namespace, &self.place.name) {
            Some(object) => version_of(&*object).is_none_or(|seen| seen >= self.version),
            None => self.new_until.is_none_or(|until| Instant::now() >= until),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::runtime::watcher::Event;
    use serde_json::Value;
    use trellis_api::Bytes;
    use trellis_api::kinds::{CopiesWanted, Target, TargetSpec};

    fn target(version: &str) -> Target {
        let spec = TargetSpec {
            term: 0,
            rests: false,
            volume: "v".to_owned(),
            node: "n".to_owned(),
            capacity: Bytes::gib(1),
            copies: CopiesWanted::default(),
        };
        let mut target = Target::new("v", spec);
        target.metadata.resource_version = Some(version.to_owned());
        target
    }

    fn stored(unseen: &Unseen, write: Write, version: u64) {
        unseen.note("v", &[write], &[(Written::Stored, Some(version))]);
    }

    // Fails if somebody looks at a target as it was before the last write, or waits for one that has gone.
    #[tokio::test(start_paused = true)]
    async fn a_write_is_unseen_until_its_version_or_a_later_one_arrives() {
        let (world, unseen) = (World::new(), Unseen::default());
        let report = || Write::PatchStatus(Place::named(Object::Target, "v"), Value::Null);
        world.targets.apply(Event::Apply(target("7")));
        assert!(unseen.is_seen(&world, "v"));
        stored(&unseen, report(), 8);
        assert!(!unseen.is_seen(&world, "v"));
        assert!(unseen.is_seen(&world, "another"));
        world.targets.apply(Event::Apply(target("9")));
        assert!(unseen.is_seen(&world, "v"));
        stored(&unseen, report(), 12);
        world.targets.apply(Event::Delete(target("11")));
        assert!(unseen.is_seen(&world, "v"));
    }

    // Fails if a plan is made again before what it created is there, or never again if that has gone at once.
    #[tokio::test(start_paused = true)]
    async fn a_new_object_is_waited_for_but_not_for_ever() {
        let (world, unseen) = (World::new(), Unseen::default());
        let create = Write::Create(Place::named(Object::Target, "v"), Value::Null);
        stored(&unseen, create, 3);
        assert!(!unseen.is_seen(&world, "v"));
        tokio::time::sleep(NEW_OBJECT_TIME_MAX).await;
        assert!(unseen.is_seen(&world, "v"));
    }
}
