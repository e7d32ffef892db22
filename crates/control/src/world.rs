//! The objects that the controllers look at, kept fresh by one watch for each kind, and who is told when one of them
//! changes.
//!
//! Everything is keyed by the name of a volume. A claim without a volume already knows the name that its volume will
//! have, so it has a key from the start.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;
use trellis_api::kinds::{Attachment, Pool, Replica, RungStatus, Target, Volume};

use crate::cache::{Cache, Changed};
use crate::ledger::Ledger;
use crate::metrics::Growths;
use crate::pods;
use crate::queue::Queue;
use crate::volume::parts;

/// How often everything is looked at again although nothing changed. Only a safety net: progress comes
/// from events.
pub const RESYNC: Duration = Duration::from_secs(600);

/// How long a pool is left alone after a change before it is measured.
const POOL_SETTLES: Duration = Duration::from_secs(1);

/// How long a growth may be under way before that alone is worth a write. Nobody notices so short a time, and a growth
/// that is over by then is reported once, when it is done.
pub const TELL_AFTER: Duration = Duration::from_millis(50);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a process has to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sees {
    /// Everything: our own kinds, and the claims, classes, persistent volumes and pods of the embedded home.
    Claims,
    /// Our own kinds.
    Volumes,
    /// Our own kinds, and of the uses those on this node.
    Node(String),
}

/// The caches.
pub struct World {
    /// Claims, grouped by the volume they have or will have.
    pub claims: Cache<PersistentVolumeClaim>,
    /// Persistent volumes; their names are those of volumes.
    pub persistent_volumes: Cache<PersistentVolume>,
    /// Classes.
    pub classes: Cache<StorageClass>,
    /// Pods, for the claims they use.
    pub pods: Cache<Pod>,
    /// Pools.
    pub pools: Cache<Pool>,
    /// Volumes.
    pub volumes: Cache<Volume>,
    /// Targets, grouped by volume.
    pub targets: Cache<Target>,
    /// Replicas, grouped by volume.
    pub replicas: Cache<Replica>,
    /// Attachments, grouped by volume, or by the claim whose volume they wait for.
    pub attachments: Cache<Attachment>,
    /// Reservations on the pools.
    pub ledger: Ledger,
    /// What is counted about growths.
    pub growths: Growths,
    /// Names of pools that want to be measured.
    pub pool_queue: Queue,
    pools_to_measure: Mutex<HashSet<String>>,
    /// Pods that wait for somebody to run them.
    pub pod_queue: Queue,
    /// Volumes whose objects are to be planned for.
    pub plans: Queue,
    /// Volumes that this node has to look at.
    pub passes: Queue,
}

/// The volume that a claim has, or will have.
pub fn volume_name(claim: &PersistentVolumeClaim) -> Option<String> {
    let named = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.volume_name.clone());
    named
        .filter(|name| !name.is_empty())
        .or_else(|| claim.uid().map(|uid| format!("pvc-{uid}")))
}

/// The volume of an attachment, or the key under which it waits for one.
pub fn attachment_key(attachment: &Attachment) -> Option<String> {
    let waits = || {
        let namespace = attachment.namespace().unwrap_or_default();
        let claim = attachment.spec.claim_name.as_deref()?;
        Some(orphan_key(&namespace, claim))
    };
    attachment.volume().map(str::to_owned).or_else(waits)
}

/// The key under which attachments wait whose claim is not there or not bound.
pub fn orphan_key(namespace: &str, claim: &str) -> String {
    format!("{ORPHAN_PREFIX}{namespace}/{claim}")
}

const ORPHAN_PREFIX: &str = "claim:";

fn pod_claims(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let sources = volumes.into_iter().flatten();
    sources
        .filter_map(|each| Some(each.persistent_volume_claim.as_ref()?.claim_name.clone()))
        .collect()
}

impl Default for World {
    fn default() -> Self {
        World::new()
    }
}

impl World {
    /// Empty caches.
    pub fn new() -> Self {
        World {
            claims: Cache::new(volume_name),
            persistent_volumes: Cache::new(|volume| Some(volume.name_any())),
            classes: Cache::new(|_| None),
            pods: Cache::new(|_| None),
            pools: Cache::new(|_| None),
            volumes: Cache::new(|volume| Some(volume.name_any())),
            targets: Cache::new(|target| Some(target.spec.volume.clone())),
            replicas: Cache::new(|replica| Some(replica.spec.volume.clone())),
            attachments: Cache::new(attachment_key),
            ledger: Ledger::default(),
            growths: Growths::default(),
            pool_queue: Queue::default(),
            pools_to_measure: Mutex::default(),
            pod_queue: Queue::default(),
            plans: Queue::default(),
            passes: Queue::default(),
        }
    }

    /// Whether a pod that is not over yet uses the claim.
    pub fn used_by_pod(&self, namespace: &str, claim: &str) -> bool {
        !self.pods_using(namespace, claim).is_empty()
    }

    /// The pods that use the claim and are not over yet.
    pub fn pods_using(&self, namespace: &str, claim: &str) -> Vec<Arc<Pod>> {
        let over = |pod: &Pod| {
            let phase = pod
                .status
                .as_ref()
                .and_then(|status| status.phase.as_deref());
            matches!(phase, Some("Succeeded" | "Failed"))
        };
        let mut pods = self.pods.all();
        pods.retain(|pod| {
            pod.namespace().as_deref() == Some(namespace)
                && !over(pod)
                && pod_claims(pod).iter().any(|each| each == claim)
        });
        pods
    }

    /// Starts one watch for each kind that a process needs. Each answer becomes true when the first listing of its kind
    /// is complete.
    pub fn watch(
        self: &Arc<Self>,
        client: &Client,
        sees: &Sees,
        tasks: &mut JoinSet<()>,
    ) -> Vec<watch::Receiver<bool>> {
        let mut ready = Vec::new();
        macro_rules! follow {
            ($cache:ident: $kind:ty, $follow:expr) => {
                follow!($cache: $kind, $follow, watcher::Config::default())
            };
            ($cache:ident: $kind:ty, $follow:expr, $config:expr) => {{
                let (sender, receiver) = watch::channel(false);
                let api = Api::<$kind>::all(client.clone());
                let cache: fn(&World) -> &Cache<$kind> = |world| &world.$cache;
                let config = $config.any_semantic();
                tasks.spawn(follow(api, config, self.clone(), cache, $follow, sender));
                ready.push(receiver);
            }};
        }
        let uses = match sees {
            Sees::Node(name) => watcher::Config::default().fields(&format!("spec.node={name}")),
            Sees::Claims | Sees::Volumes => watcher::Config::default(),
        };
        follow!(pools: Pool, Follow::of(World::keys_of_pool, always).noticed(World::note_pool));
        follow!(volumes: Volume, Follow::of(World::keys_of_named, volume_concerns_node).noticed(World::note_volume));
        follow!(targets: Target, Follow::of(|_, target: &Target| vec![target.spec.volume.clone()], wish_changed)
            .noticed(World::note_target));
        follow!(replicas: Replica, Follow::of(|_, replica: &Replica| vec![replica.spec.volume.clone()], wish_changed)
            .noticed(World::note_replica));
        follow!(attachments: Attachment, Follow::of(World::keys_of_attachment, wish_changed)
            .noticed(World::note_attachment), uses);
        if *sees != Sees::Claims {
            return ready;
        }
        follow!(claims: PersistentVolumeClaim, Follow::of(World::keys_of_claim, never).trimmed(keep_requester)
            .noticed(|world, change| world.growths.note_claim(change)));
        follow!(persistent_volumes: PersistentVolume, Follow::of(World::keys_of_persistent_volume, never));
        follow!(classes: StorageClass, Follow::of(World::keys_of_class, never));
        follow!(pods: Pod, Follow::of(World::keys_of_pod, never).noticed(World::note_pod));
        ready
    }

    /// Looks at every volume again, now and then.
    pub async fn resync(self: Arc<Self>, every: Duration) {
        loop {
            tokio::time::sleep(every).await;
            self.pools
                .all()
                .iter()
                .for_each(|pool| self.pool_queue.push(&pool.name_any()));
            self.push_all();
        }
    }

    /// Asks for a run of every key that any object has.
    pub fn push_all(&self) {
        let mut keys: Vec<String> = self
            .claims
            .all()
            .iter()
            .filter_map(|each| volume_name(each))
            .collect();
        keys.extend(self.volumes.all().iter().map(|each| each.name_any()));
        keys.extend(
            self.persistent_volumes
                .all()
                .iter()
                .map(|each| each.name_any()),
        );
        keys.extend(
            self.replicas
                .all()
                .iter()
                .map(|each| each.spec.volume.clone()),
        );
        keys.extend(
            self.attachments
                .all()
                .iter()
                .flat_map(|each| self.keys_of_attachment(each)),
        );
        keys.sort_unstable();
        keys.dedup();
        keys.iter().for_each(|key| self.push(key));
    }

    /// Asks for a plan and for a pass.
    pub fn push(&self, key: &str) {
        self.plans.push(key);
        self.passes.push(key);
    }

    /// The kernel says that a block device has changed: whoever uses it is looked at again.
    pub fn device_changed(&self, device: &str) {
        self.look_at_uses(|attachment| {
            let status = attachment.status.as_ref();
            status.and_then(|status| status.device.as_deref()) == Some(device)
        });
    }

    /// The kernel says that what is mounted at a path has changed.
    pub fn path_changed(&self, path: &str) {
        self.look_at_uses(|attachment| attachment.spec.consumer.path() == path);
    }

    /// The volume whose bytes are in a file: the file of its only copy, or the file through which its target shows
    /// them, which is in a directory of the volume's name.
    pub fn volume_in(&self, file: &Path) -> Option<String> {
        let is_of = |replica: &Arc<Replica>| {
            let path = replica.status.as_ref().and_then(|it| it.path.as_deref());
            path.is_some_and(|path| Path::new(path) == file)
        };
        let replicas = self.replicas.all();
        let copy = replicas.iter().find(|each| is_of(each));
        let of_copy = copy.map(|replica| replica.spec.volume.clone());
        of_copy.or_else(|| {
            let mut names = file.iter().filter_map(|name| name.to_str());
            let found = names.find(|name| self.volumes.get("", name).is_some());
            found.map(str::to_owned)
        })
    }

    fn look_at_uses(&self, concerned: impl Fn(&Attachment) -> bool) {
        let attachments = self.attachments.all();
        let concerned = attachments.iter().filter(|each| concerned(each));
        for key in concerned.flat_map(|each| self.keys_of_attachment(each)) {
            self.passes.push(&key);
        }
    }

    /// Keeps the reservations right, and wakes whoever waited for the room that appeared.
    pub(crate) fn note_replica(&self, change: &Changed<Replica>) {
        if let (Some(old), Some(new)) = (&change.old, &change.new) {
            // The target has to be told where its copies are.
            let address = |replica: &Replica| Some(replica.status.as_ref()?.address.clone());
            if address(old) != address(new) {
                self.passes.push(&new.spec.volume);
            }
            let (old, new) = (&old.status, &new.status);
            let old = old.as_ref().and_then(|status| status.rung.as_ref());
            let new = new.as_ref().and_then(|status| status.rung.as_ref());
            self.growths.note_rungs(old.as_slice(), new);
        }
        if let (None, Some(new)) = (&change.old, &change.new) {
            self.note_taken_in(new);
        }
        let woken = self
            .ledger
            .note(change.old.as_deref(), change.new.as_deref());
        woken.iter().for_each(|key| self.push(key));
        if let (Some(old), None) = (&change.old, &change.new) {
            self.look_whether_removable(&old.spec.pool);
        }
    }

    /// A copy that nobody knew has an object now: its pool is looked at again.
    fn note_taken_in(&self, replica: &Replica) {
        let Some(pool) = self.pools.get("", &replica.spec.pool) else {
            return;
        };
        let status = pool.status.as_ref();
        if status.is_some_and(|status| status.unknown_count > 0) {
            self.pool_queue.push(&pool.name_any());
        }
    }

    /// A volume reserves room before its replica is stored, and releases it if the replica never will be.
    pub(crate) fn note_volume(&self, change: &Changed<Volume>) {
        self.growths.note_volume(change);
        let either = change.new.as_ref().or(change.old.as_ref());
        let Some(volume) = either else { return };
        if change.new.is_some() && parts::was_served(volume) {
            // Its copies are stored, each with its own reservation, and may be others by now than the first ones.
            return;
        }
        let size = change.new.as_ref().map(|_| volume.spec.capacity);
        for (replica, pool) in parts::reservations(volume) {
            let woken = self.ledger.note_volume(&replica, &pool, size);
            woken.iter().for_each(|key| self.push(key));
            if size.is_none() {
                self.look_whether_removable(&pool);
            }
        }
    }

    fn note_target(&self, change: &Changed<Target>) {
        if let (Some(old), Some(new)) = (&change.old, &change.new) {
            // A copy that does not count any more may go, wherever it is.
            let members = |target: &Target| Some(target.status.as_ref()?.members.clone());
            // What the target serves now, its copies on other nodes have now too: only these can measure it.
            let served = |target: &Target| target.status.as_ref().and_then(|it| it.capacity);
            let replicas = self.replicas.group(&new.spec.volume);
            let has_others = replicas.iter().any(|it| it.spec.node != new.spec.node);
            let is_news_elsewhere = has_others && served(old) != served(new);
            if members(old) != members(new) || is_news_elsewhere {
                self.passes.push(&new.spec.volume);
            }
            let (old, new) = (&old.status, &new.status);
            let old = old.as_ref().and_then(|status| status.rung.as_ref());
            let new = new.as_ref().and_then(|status| status.rung.as_ref());
            self.growths.note_rungs(old.as_slice(), new);
        }
    }

    /// Several uses on one node share their rungs, and each reports the same raise.
    fn note_attachment(&self, change: &Changed<Attachment>) {
        let (Some(old), Some(new)) = (&change.old, &change.new) else {
            return;
        };
        let group = attachment_key(new).unwrap_or_default();
        let others = self.attachments.group(&group);
        let others = others
            .iter()
            .filter(|each| each.name_any() != new.name_any());
        let known: Vec<&RungStatus> = others.chain([old]).flat_map(|each| rungs(each)).collect();
        self.growths.note_rungs(&known, rungs(new));
    }

    /// A pod that waits is told why.
    fn note_pod(&self, change: &Changed<Pod>) {
        if let Some(pod) = change.new.as_ref().filter(|pod| pods::waits_untold(pod)) {
            self.pod_queue.push(&pods::key(pod));
        }
    }

    /// A pool whose spec changed is measured again; one that only reports its own measurement is not.
    fn note_pool(&self, change: &Changed<Pool>) {
        let Some(new) = &change.new else {
            // Its directory is released.
            let gone = change.old.as_ref();
            gone.iter()
                .for_each(|old| self.pool_queue.push(&old.name_any()));
            return;
        };
        let same = change.old.as_ref().is_some_and(|old| {
            old.spec == new.spec
                && old.metadata.annotations == new.metadata.annotations
                && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        });
        if !same {
            self.pool_queue.push(&new.name_any());
        }
        let ground = |pool: &Pool| {
            let filesystem = pool.status.as_ref().and_then(|it| it.filesystem.clone());
            (pool.spec.drain, filesystem)
        };
        if change.old.as_deref().map(ground) != Some(ground(new)) {
            // Copies there move away, or are worth more or less than before.
            let name = new.name_any();
            let replicas = self.replicas.all();
            let there = replicas.iter().filter(|each| each.spec.pool == name);
            there.for_each(|each| self.push(&each.spec.volume));
        }
    }

    /// A pool that is to be removed may go when nothing needs it any more.
    fn look_whether_removable(&self, pool: &str) {
        let pool = self.pools.get("", pool);
        if let Some(pool) = pool.filter(|pool| pool.metadata.deletion_timestamp.is_some()) {
            self.pool_queue.push(&pool.name_any());
        }
    }

    /// Space on a pool was taken or given back: it is measured soon, once for many such changes.
    pub fn pool_used(self: &Arc<Self>, pool: &str) {
        let fresh = lock(&self.pools_to_measure).insert(pool.to_owned());
        if !fresh {
            return;
        }
        let (world, pool) = (self.clone(), pool.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(POOL_SETTLES).await;
            lock(&world.pools_to_measure).remove(&pool);
            world.pool_queue.push(&pool);
        });
    }

    fn keys_of_claim(&self, claim: &PersistentVolumeClaim) -> Vec<String> {
        let orphan = orphan_key(&claim.namespace().unwrap_or_default(), &claim.name_any());
        volume_name(claim).into_iter().chain([orphan]).collect()
    }

    fn keys_of_named<K: ResourceExt>(&self, object: &K) -> Vec<String> {
        vec![object.name_any()]
    }

    /// A persistent volume that is free may be what a claim without one waits for.
    fn keys_of_persistent_volume(&self, volume: &PersistentVolume) -> Vec<String> {
        let mut keys = vec![volume.name_any()];
        let is_bound = volume
            .status
            .as_ref()
            .is_some_and(|status| status.phase.as_deref() == Some("Bound"));
        if !is_bound {
            let claims = self.claims.all();
            let pending = claims.iter().filter(|claim| {
                let phase = claim
                    .status
                    .as_ref()
                    .and_then(|status| status.phase.as_deref());
                phase != Some("Bound")
            });
            keys.extend(pending.filter_map(|claim| volume_name(claim)));
        }
        keys
    }

    fn keys_of_class(&self, class: &StorageClass) -> Vec<String> {
        let name = class.name_any();
        let of_class = |claim: &Arc<PersistentVolumeClaim>| {
            claim
                .spec
                .as_ref()
                .and_then(|spec| spec.storage_class_name.as_deref())
                == Some(&name)
        };
        self.claims
            .all()
            .iter()
            .filter(|each| of_class(each))
            .filter_map(|each| volume_name(each))
            .collect()
    }

    fn keys_of_pod(&self, pod: &Pod) -> Vec<String> {
        let namespace = pod.namespace().unwrap_or_default();
        let claims = pod_claims(pod);
        claims
            .iter()
            .filter_map(|name| volume_name(&*self.claims.get(&namespace, name)?))
            .collect()
    }

    /// A change of a pool may help any claim that waits for room.
    fn keys_of_pool(&self, pool: &Pool) -> Vec<String> {
        let name = pool.name_any();
        let mut keys = self.ledger.open().take_waiting();
        let waiting = |replica: &Arc<Replica>| {
            let measured = replica.status.as_ref().and_then(|status| status.capacity);
            replica.spec.pool == name && measured != Some(replica.spec.capacity)
        };
        let replicas = self.replicas.all();
        keys.extend(
            replicas
                .iter()
                .filter(|each| waiting(each))
                .map(|each| each.spec.volume.clone()),
        );
        keys
    }

    /// The volume of an attachment. While it waits for one, also the volume that its claim will have.
    fn keys_of_attachment(&self, attachment: &Attachment) -> Vec<String> {
        let key = attachment_key(attachment);
        let claim = || {
            let namespace = attachment.namespace().unwrap_or_default();
            let name = attachment.spec.claim_name.as_deref()?;
            volume_name(&*self.claims.get(&namespace, name)?)
        };
        let mut keys: Vec<String> = key.into_iter().chain(claim()).collect();
        keys.dedup();
        keys
    }
}

fn rungs(attachment: &Attachment) -> &[RungStatus] {
    let status = attachment.status.as_ref();
    status.map_or(&[], |status| status.rungs.as_slice())
}

/// What is done with the events of one kind.
struct Follow<K> {
    /// The volumes that an object belongs to.
    keys: fn(&World, &K) -> Vec<String>,
    /// Whether the agent has to look, besides the planner.
    concerns_node: fn(&Changed<K>) -> bool,
    notice: fn(&World, &Changed<K>),
    /// Removes what nobody here reads, before the object is kept.
    trim: fn(&mut K),
}

impl<K: ResourceExt> Follow<K> {
    fn of(keys: fn(&World, &K) -> Vec<String>, concerns_node: fn(&Changed<K>) -> bool) -> Self {
        Follow {
            keys,
            concerns_node,
            notice: |_, _| (),
            trim: |object| object.managed_fields_mut().clear(),
        }
    }

    fn trimmed(self, trim: fn(&mut K)) -> Self {
        Follow { trim, ..self }
    }

    fn noticed(self, notice: fn(&World, &Changed<K>)) -> Self {
        Follow { notice, ..self }
    }
}

/// A claim's managed fields are needed for one question only: who asked for the present size.
fn keep_requester(claim: &mut PersistentVolumeClaim) {
    claim
        .managed_fields_mut()
        .retain(crate::claim::asks_for_size);
    claim
        .annotations_mut()
        .remove("kubectl.kubernetes.io/last-applied-configuration");
}

fn always<K>(_: &Changed<K>) -> bool {
    true
}

fn never<K>(_: &Changed<K>) -> bool {
    false
}

/// Whether what is wanted of an object changed, and not only what is reported of it. The agent's own
/// reports would otherwise send it to look again at what it has just looked at.
fn wish_changed<K: ResourceExt>(change: &Changed<K>) -> bool {
    let (Some(old), Some(new)) = (&change.old, &change.new) else {
        return true;
    };
    let (old, new) = (old.meta(), new.meta());
    old.generation != new.generation
        || old.deletion_timestamp != new.deletion_timestamp
        || old.finalizers != new.finalizers
}

/// A volume concerns the agent by what is wanted of it, and by a refusal, which shows on the layers that do not grow.
fn volume_concerns_node(change: &Changed<Volume>) -> bool {
    let refusal = |volume: &Volume| {
        let status = volume.status.as_ref()?;
        let is_refused = status.granted < Some(volume.spec.capacity);
        status.hold.clone().filter(|_| is_refused)
    };
    let differs = match (&change.old, &change.new) {
        (Some(old), Some(new)) => refusal(old) != refusal(new),
        _ => true,
    };
    differs || wish_changed(change)
}

/// Follows one kind for ever, feeding its cache and pushing the keys of what changed.
async fn follow<K>(
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
        .default_backoff()
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
