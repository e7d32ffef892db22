//! The objects that the controllers look at, kept fresh by one watch for each kind, and who is told when one of them
//! changes.
//!
//! Everything is keyed by the name of a volume. A claim without a volume already knows the name that its volume will
//! have, so it has a key from the start.

mod follow;
mod notices;

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

use self::follow::{
    Follow, always, follow, keep_requester, never, volume_concerns_node, wish_changed,
};
use crate::cache::Cache;
use crate::ledger::Ledger;
use crate::metrics::Growths;
use crate::queue::Queue;
use crate::unseen::Unseen;
use crate::volume::surroundings::Waits;

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
    /// Our own kinds, and the nodes.
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
    /// Nodes.
    pub nodes: Cache<Node>,
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
    /// What was planned and written, and is not seen yet.
    pub unseen: Unseen,
    /// How long the volume room waits for what may pass.
    pub waits: Waits,
    /// The node of the embedded home, whose agent finishes claims.
    pub home: OnceLock<String>,
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
            nodes: Cache::new(|_| None),
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
            unseen: Unseen::default(),
            waits: Waits::USUAL,
            home: OnceLock::new(),
        }
    }

    /// Empty caches of a process whose volume room waits as long as that.
    pub fn waiting(waits: Waits) -> Self {
        World {
            waits,
            ..World::new()
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
        if matches!(sees, Sees::Node(_)) {
            return ready;
        }
        follow!(nodes: Node, Follow::of(|_, _| Vec::new(), never).noticed(World::note_node));
        if *sees == Sees::Volumes {
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
