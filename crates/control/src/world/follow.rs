//! One watch of one kind: feeds its cache, and says which volumes are to be planned and which are to be looked at.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::utils::Backoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use trellis_api::kinds::Volume;

use super::World;
use crate::cache::{Cache, Changed};

/// Pauses between two tries to watch while the API is away. Until a watch is back, everything here is seen as it was, so
/// the longest pause is short.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(3);

/// The next pause.
struct Pauses(Duration);

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let longer = self.0.saturating_mul(2).min(PAUSE_MAX);
        Some(std::mem::replace(&mut self.0, longer))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.0 = PAUSE_FIRST;
    }
}

/// What is done with the events of one kind.
pub(super) struct Follow<K> {
    /// The volumes that an object belongs to.
    keys: fn(&World, &K) -> Vec<String>,
    /// Whether the agent has to look, besides the planner.
    concerns_node: fn(&Changed<K>) -> bool,
    notice: fn(&World, &Changed<K>),
    /// Removes what nobody here reads, before the object is kept.
    trim: fn(&mut K),
}

impl<K: ResourceExt> Follow<K> {
    pub(super) fn of(
        keys: fn(&World, &K) -> Vec<String>,
        concerns_node: fn(&Changed<K>) -> bool,
    ) -> Self {
        Follow {
            keys,
            concerns_node,
            notice: |_, _| (),
            trim: |object| object.managed_fields_mut().clear(),
        }
    }

    pub(super) fn trimmed(self, trim: fn(&mut K)) -> Self {
        Follow { trim, ..self }
    }

    pub(super) fn noticed(self, notice: fn(&World, &Changed<K>)) -> Self {
        Follow { notice, ..self }
    }
}

/// A claim's managed fields are needed for one question only: who asked for the present size.
pub(super) fn keep_requester(claim: &mut PersistentVolumeClaim) {
    claim
        .managed_fields_mut()
        .retain(crate::claim::asks_for_size);
    claim
        .annotations_mut()
        .remove("kubectl.kubernetes.io/last-applied-configuration");
}

pub(super) fn always<K>(_: &Changed<K>) -> bool {
    true
}

pub(super) fn never<K>(_: &Changed<K>) -> bool {
    false
}

/// Whether what is wanted of an object changed, and not only what is reported of it. The agent's own
/// reports would otherwise send it to look again at what it has just looked at.
pub(super) fn wish_changed<K: ResourceExt>(change: &Changed<K>) -> bool {
    let (Some(old), Some(new)) = (&change.old, &change.new) else {
        return true;
    };
    let (old, new) = (old.meta(), new.meta());
    old.generation != new.generation
        || old.deletion_timestamp != new.deletion_timestamp
        || old.finalizers != new.finalizers
}

/// A volume concerns the agent by what is wanted of it, and by a refusal, which shows on the layers that do not grow.
pub(super) fn volume_concerns_node(change: &Changed<Volume>) -> bool {
    let refusal = |volume: &Volume| {
        let status = volume.status.as_ref()?;
        let is_refused = status.granted < Some(volume.spec.capacity);
        status.hold.clone().filter(|_| is_refused)
    };
    let (Some(old), Some(new)) = (&change.old, &change.new) else {
        return true;
    };
    refusal(old) != refusal(new) || (wish_changed(change) && !is_for_others(old, new))
}

/// Whether nothing was changed but what only the planner reads. The size is among that: the goals of target and copies
/// follow, and these the agent sees. Growths and bindings are many, and each look costs something.
fn is_for_others(old: &Volume, new: &Volume) -> bool {
    let metadata = (&old.metadata.deletion_timestamp, &old.metadata.finalizers);
    let mut before = old.spec.clone();
    before.capacity = new.spec.capacity;
    before.growth.clone_from(&new.spec.growth);
    before.provisional = new.spec.provisional;
    metadata == (&new.metadata.deletion_timestamp, &new.metadata.finalizers) && before == new.spec
}

/// Follows one kind for ever, feeding its cache and pushing the keys of what changed.
pub(super) async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    world: Arc<World>,
    cache: fn(&World) -> &Cache<K>,
    kind: Follow<K>,
    ready: watch::Sender<bool>,
) where
    K: kube::Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
{
    let mut events = watcher(api, config)
        .backoff(Pauses(PAUSE_FIRST))
        .modify(kind.trim)
        .boxed();
    loop {
        let event = match events.try_next().await {
            Ok(Some(event)) => event,
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(%error, "a watch was interrupted and goes on");
                continue;
            }
        };
        let listed = matches!(event, watcher::Event::InitDone);
        for change in cache(&world).apply(event) {
            (kind.notice)(&world, &change);
            let both = change.old.iter().chain(&change.new);
            let mut touched: Vec<String> = both
                .flat_map(|object| (kind.keys)(&world, object))
                .collect();
            touched.sort_unstable();
            touched.dedup();
            let concerns_node = (kind.concerns_node)(&change);
            tracing::trace!(
                ?touched,
                concerns_node,
                kind = std::any::type_name::<K>(),
                "event"
            );
            for key in &touched {
                if concerns_node {
                    world.passes.push(key);
                }
                world.plans.push(key);
            }
        }
        if listed {
            ready.send_replace(true);
        }
    }
}
