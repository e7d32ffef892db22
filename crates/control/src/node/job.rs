//! What one node has to do for one volume. Pure: computed from a view of the stored objects.

mod copies;

use std::path::PathBuf;
use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::kinds::{
    Attachment, AttachmentPhase, Consumer, Members, Pool, Replica, RungStatus, Target,
};
use trellis_api::{Bytes, Hold, HoldReason};

use super::machine::{ReplicaPlace, Stage, TargetPlace, Use};
use crate::stored::StoredVolume;
use copies::{adrift, replica_job, replicated_job};

/// The work of one node for one volume.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The size that every rung should have.
    pub goal: Bytes,
    /// The only copy of the volume, if it is on this node and used in place.
    pub replica: Option<ReplicaJob>,
    /// The copies and the target on this node, if there are several.
    pub replicated: Option<ReplicatedJob>,
    /// Uses that are to end.
    pub endings: Vec<UseJob>,
    /// Uses that should exist.
    pub uses: Vec<UseJob>,
    /// How the volume is brought into use, apart from where its bytes are.
    pub staging: Option<Stage>,
    /// The rungs as they were last reported.
    pub reported: Vec<RungStatus>,
}

impl Job {
    /// Whether the volume concerns this node.
    pub fn has_work(&self) -> bool {
        let several = self.replicated.as_ref();
        let several = several.is_some_and(|job| {
            job.target.is_some() || job.resting.is_some() || !job.copies.is_empty()
        });
        self.replica.is_some() || several || !self.uses.is_empty() || !self.endings.is_empty()
    }

    /// Its copies on this node.
    pub fn copies(&self) -> impl Iterator<Item = &ReplicaJob> {
        let several = self.replicated.iter().flat_map(|job| &job.copies);
        self.replica.iter().chain(several)
    }

    /// The pools on which they are.
    pub fn pools(&self) -> impl Iterator<Item = &str> {
        self.copies().map(|copy| copy.object.spec.pool.as_str())
    }
}

/// The work for a volume of several copies.
#[derive(Clone, Debug)]
pub struct ReplicatedJob {
    /// The copies on this node.
    pub copies: Vec<ReplicaJob>,
    /// Copies on this node that are to go and whose pool is no longer a pool. Where their bytes are is unknown, so only
    /// their objects go.
    pub adrift: Vec<Arc<Replica>>,
    /// The target, if it runs on this node and its volume is there.
    pub target: Option<TargetJob>,
    /// The target, if it would run on this node and rests.
    pub resting: Option<Arc<Target>>,
    /// The node of the target, if it is another one.
    pub elsewhere: Option<String>,
    /// Which copies count, as a target elsewhere has agreed with them after it knew which ones are to stay. None if
    /// that is not known.
    pub agreed: Option<Members>,
}

/// The work for a target.
#[derive(Clone, Debug)]
pub struct TargetJob {
    /// The stored object.
    pub object: Arc<Target>,
    /// What it should be, with the reported addresses.
    pub place: TargetPlace,
    /// The number of copies that the volume was made with, whatever was asked for since.
    pub first_copies: usize,
    /// Pools of its copies that share a filesystem although the volume does not allow it. Copies there count as one.
    pub shared_disks: Vec<Vec<String>>,
}

/// The work for one replica.
#[derive(Clone, Debug)]
pub struct ReplicaJob {
    /// The stored object.
    pub object: Arc<Replica>,
    /// Where it is.
    pub place: ReplicaPlace,
    /// What should happen to it.
    pub fate: Fate,
}

/// What should happen to a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It never existed, and is to be made.
    Make,
    /// It has existed, so it must be found. If it is missing, that is a loss to report, not a reason to make an empty
    /// one in its place.
    Find,
    /// It is to go as soon as its target says that it does not count. Until then it is served like the others.
    Leave,
    /// It is to go with its volume, and its bytes with it.
    Remove,
    /// Its object goes, but nothing says that the bytes may go too. They stay where they are, as a copy that no object
    /// names.
    Forget,
}

impl Fate {
    /// Whether the object goes.
    pub fn is_end(self) -> bool {
        matches!(self, Fate::Remove | Fate::Forget)
    }
}

/// The work for one use.
#[derive(Clone, Debug)]
pub struct UseJob {
    /// The stored object.
    pub object: Arc<Attachment>,
    /// Where and how.
    pub usage: Use,
    /// Why it cannot exist, as far as the objects show.
    pub hold: Option<Hold>,
}

/// The node that the work is for.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// The present run of its kernel.
    pub boot_id: String,
    /// Whether filesystems may grow on it while they are mounted.
    pub online_growth: bool,
}

/// The work of `node` for the volume in `view`; `pool_of` finds a pool by its name.
pub fn job(view: &StoredVolume, node: &Node, pool_of: &dyn Fn(&str) -> Option<Arc<Pool>>) -> Job {
    let mine: Vec<&Arc<Attachment>> = view
        .attachments
        .iter()
        .filter(|each| each.spec.node == node.name)
        .collect();
    let (endings, uses): (Vec<_>, Vec<_>) = mine
        .into_iter()
        .partition(|each| each.metadata.deletion_timestamp.is_some());
    let uses: Vec<UseJob> = ordered(uses)
        .into_iter()
        .enumerate()
        .map(|(index, each)| use_job(view, node, each, index))
        .collect();
    let endings = endings
        .into_iter()
        .map(|each| use_job(view, node, each, 0))
        .collect();
    let mut copies: Vec<ReplicaJob> = view
        .replicas
        .iter()
        .filter(|each| each.spec.node == node.name)
        .filter_map(|each| replica_job(view, each, pool_of))
        .collect();
    let places: Vec<ReplicaPlace> = copies.iter().map(|copy| copy.place.clone()).collect();
    let (replica, replicated) = if view.is_replicated() {
        let adrift = adrift(view, node, pool_of);
        (
            None,
            Some(replicated_job(view, node, copies, adrift, pool_of)),
        )
    } else {
        (copies.pop(), None)
    };
    // Also for a volume that is gone from the store: what is left of it on this node must be found.
    let staging = Some(Stage {
        volume: view.key.clone(),
        backing: PathBuf::new(),
        via: view.way(),
        filesystem: view
            .volume
            .as_ref()
            .and_then(|volume| volume.spec.filesystem),
        mount_options: view
            .volume
            .as_ref()
            .map(|volume| volume.spec.mount_options.clone())
            .unwrap_or_default(),
        read_only: !uses.is_empty() && uses.iter().all(|each| each.usage.read_only),
        online_growth: node.online_growth
            && view
                .volume
                .as_ref()
                .is_none_or(|volume| volume.spec.online_growth),
        formatted: view.is_formatted(),
        copies: places,
    });
    let goal = goal(view);
    // Rungs that are found unchanged keep their times, so that a look that finds nothing new writes nothing. A use on
    // another node has rungs of its own.
    let reported = view.rungs_on(&node.name).cloned().collect();
    Job {
        goal,
        replica,
        replicated,
        endings,
        uses,
        staging,
        reported,
    }
}

/// The size to climb to: what target and copies were given, which is what they have a reservation for.
fn goal(view: &StoredVolume) -> Bytes {
    view.granted().unwrap_or_default()
}

/// The oldest use comes first: a claim for a single use goes to it.
fn ordered(mut uses: Vec<&Arc<Attachment>>) -> Vec<&Arc<Attachment>> {
    uses.sort_by_key(|each| (each.creation_timestamp(), each.name_any()));
    uses
}

fn use_job(view: &StoredVolume, node: &Node, object: &Arc<Attachment>, index: usize) -> UseJob {
    let modes = view
        .volume
        .as_ref()
        .map(|volume| volume.spec.access_modes.clone())
        .unwrap_or_default();
    let allows = |mode: &str| modes.iter().any(|each| each == mode);
    let only_reads = !modes.is_empty() && modes.iter().all(|mode| mode == "ReadOnlyMany");
    let usage = Use {
        path: PathBuf::from(object.spec.consumer.path()),
        read_only: object.spec.consumer.read_only() || only_reads,
        established: object.status.as_ref().is_some_and(|status| {
            status.phase == AttachmentPhase::Attached
                && status.boot_id.as_deref() == Some(node.boot_id.as_str())
        }),
    };
    let hold = if object.volume().is_none() {
        let claim = object.spec.claim_name.as_deref().unwrap_or_default();
        let message = format!("Claim {claim:?} is not bound.");
        Some(Hold::new(HoldReason::ClaimNotBound, message))
    } else if view.volume.is_none() && !is_attached(object) {
        let message = format!("Volume {:?} does not exist.", view.key);
        Some(Hold::new(HoldReason::VolumeUnknown, message))
    } else if let Some(hold) = unfit(view, object) {
        Some(hold)
    } else if allows("ReadWriteOncePod") && index > 0 {
        let message = format!(
            "Volume {} allows a single use (ReadWriteOncePod).",
            view.key
        );
        Some(Hold::new(HoldReason::AccessModeUnsupported, message))
    } else {
        None
    };
    UseJob {
        object: object.clone(),
        usage,
        hold,
    }
}

/// Whether its node has begun with it.
fn is_attached(object: &Attachment) -> bool {
    let status = object.status.as_ref();
    status.is_some_and(|status| status.volume.is_some())
}

/// Why the volume cannot be used in the way that is asked for: only one with a filesystem can be mounted, and only one
/// without can be a device.
fn unfit(view: &StoredVolume, object: &Attachment) -> Option<Hold> {
    let volume = view.volume.as_ref()?;
    let is_for_filesystem = matches!(object.spec.consumer, Consumer::Mount(_));
    let (asked, has) = match (is_for_filesystem, volume.spec.filesystem) {
        (true, None) => ("a mount", "no filesystem".to_owned()),
        (false, Some(kind)) => ("a device", kind.name().to_owned()),
        _ => return None,
    };
    let message = format!(
        "Attachment {:?} asks for {asked}, and volume {} has {has}.",
        object.name_any(),
        view.key
    );
    Some(Hold::new(HoldReason::ConsumerUnfit, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use trellis_api::kinds::{
        AtPath, AttachmentSpec, AttachmentStatus, ClaimRef, CopiesWanted, IscsiAccess, PoolSpec,
        ReplicaSpec, ReplicaStatus, TargetSpec, Volume, VolumeSpec,
    };

    const NODE: &str = "n";
    const BOOT: &str = "b";

    fn attachment(name: &str, second: i64, node: &str) -> Attachment {
        let spec = AttachmentSpec {
            claim_name: Some("c".to_owned()),
            volume: Some("v".to_owned()),
            node: node.to_owned(),
            consumer: Consumer::Mount(AtPath {
                path: format!("/{name}"),
                read_only: false,
            }),
        };
        let mut attachment = Attachment::new(name, spec);
        attachment.metadata.creation_timestamp = Some(time(second));
        attachment
    }

    fn time(second: i64) -> Time {
        Time(Timestamp::from_second(second).expect("a valid time"))
    }

    fn replica(goal: u64, measured: Option<u64>) -> Replica {
        let spec = ReplicaSpec {
            volume: "v".to_owned(),
            volume_id: "r".to_owned(),
            replica_id: "r".to_owned(),
            pool: "p".to_owned(),
            node: NODE.to_owned(),
            capacity: Bytes::gib(goal),
            thick: false,
            discard: false,
        };
        let mut replica = Replica::new("v-0", spec);
        replica.status = measured.map(|size| ReplicaStatus {
            capacity: Some(Bytes::gib(size)),
            ..ReplicaStatus::default()
        });
        replica
    }

    fn volume(goal: u64, mode: &str) -> Arc<Volume> {
        let spec = VolumeSpec {
            capacity: Bytes::gib(goal),
            claim: Some(ClaimRef {
                namespace: String::new(),
                name: "c".to_owned(),
                uid: String::new(),
            }),
            placement: Vec::new(),
            pools: Vec::new(),
            access_modes: vec![mode.to_owned()],
            published_to: None,
            mount_options: Vec::new(),
            volume_id: String::new(),
            released_by: None,
            discard: false,
            provisional: false,
            class: "s".to_owned(),
            replicas: 1,
            consistency_factor: 1,
            via: None,
            thick: false,
            checksums: true,
            scrub_interval_seconds: 0,
            scrub_requested: None,
            filesystem: Some(trellis_api::kinds::FilesystemKind::Xfs),
            online_growth: true,
            when_below_quorum: trellis_api::kinds::WhenBelowQuorum::Wait,
            when_full: trellis_api::kinds::WhenFull::Wait,
            patience_seconds: None,
            allow_shared_disk: false,
            iscsi: IscsiAccess::default(),
            recovery: None,
            growth: None,
        };
        Arc::new(Volume::new("v", spec))
    }

    fn view(mode: &str, attachments: Vec<Attachment>) -> StoredVolume {
        StoredVolume {
            key: "v".to_owned(),
            volume: Some(volume(2, mode)),
            replicas: vec![Arc::new(replica(2, Some(1)))],
            attachments: attachments.into_iter().map(Arc::new).collect(),
            ..StoredVolume::default()
        }
    }

    fn job_of(view: &StoredVolume) -> Job {
        let spec = PoolSpec {
            node: NODE.to_owned(),
            path: "/pool".to_owned(),
            overcommit_percent: 100,
            drain: false,
        };
        let pool = Arc::new(Pool::new("p", spec));
        let node = Node {
            name: NODE.to_owned(),
            boot_id: BOOT.to_owned(),
            online_growth: true,
        };
        job(view, &node, &|name| (name == "p").then(|| pool.clone()))
    }

    fn reasons(job: &Job) -> Vec<(String, Option<HoldReason>)> {
        let of = |each: &UseJob| {
            let reason = each.hold.as_ref().map(|hold| hold.reason);
            (each.object.name_any(), reason)
        };
        job.uses.iter().map(of).collect()
    }

    // Fails if two uses of a claim for a single one begin, or if the younger one wins.
    #[test]
    fn a_claim_for_a_single_use_goes_to_the_oldest() {
        let uses = vec![attachment("a", 2, NODE), attachment("b", 1, NODE)];
        let job = job_of(&view("ReadWriteOncePod", uses));
        let held = Some(HoldReason::AccessModeUnsupported);
        assert_eq!(
            reasons(&job),
            [("b".to_owned(), None), ("a".to_owned(), held)]
        );
    }

    // Fails if the first use keeps its place while it ends, so that the next one never begins.
    #[test]
    fn a_use_that_ends_gives_its_place_to_the_next() {
        let mut ending = attachment("a", 1, NODE);
        ending.metadata.deletion_timestamp = Some(time(3));
        let uses = vec![ending, attachment("b", 2, NODE)];
        let job = job_of(&view("ReadWriteOncePod", uses));
        assert_eq!(reasons(&job), [("b".to_owned(), None)]);
        assert_eq!(job.endings.len(), 1);
        assert_eq!(job.endings[0].object.name_any(), "a");
    }

    // Fails if a claim that may only be read is mounted for writing.
    #[test]
    fn a_claim_that_is_only_read_forces_every_use_to_read() {
        let job = job_of(&view("ReadOnlyMany", vec![attachment("a", 1, NODE)]));
        assert!(job.uses[0].usage.read_only);
        assert!(job.staging.expect("there is a volume").read_only);
        let job = job_of(&view("ReadWriteOnce", vec![attachment("a", 1, NODE)]));
        assert!(!job.uses[0].usage.read_only);
        assert!(!job.staging.expect("there is a volume").read_only);
    }

    // Fails if a use begins before its claim is bound or without its volume, or is cut off when its volume is gone from
    // the store.
    #[test]
    fn a_use_waits_for_its_volume_and_outlives_it() {
        let mut waiting = attachment("a", 1, NODE);
        waiting.spec.volume = None;
        let held = |view: &StoredVolume| reasons(&job_of(view))[0].1;
        let unbound = StoredVolume {
            attachments: vec![Arc::new(waiting)],
            ..StoredVolume::default()
        };
        assert_eq!(held(&unbound), Some(HoldReason::ClaimNotBound));
        let mut unknown = view("ReadWriteOnce", vec![attachment("a", 1, NODE)]);
        assert_eq!(held(&unknown), None);
        unknown.volume = None;
        assert_eq!(held(&unknown), Some(HoldReason::VolumeUnknown));
        let mut attached = attachment("a", 1, NODE);
        attached.status = Some(AttachmentStatus {
            volume: Some("v".to_owned()),
            ..AttachmentStatus::default()
        });
        unknown.attachments = vec![Arc::new(attached)];
        assert_eq!(held(&unknown), None);
    }

    // Fails if a mount that went with a restart of the machine is taken for one that somebody took away, or
    // the other way round.
    #[test]
    fn a_use_is_established_only_in_the_run_that_brought_it() {
        let established = |phase: AttachmentPhase, boot_id: &str| {
            let mut attached = attachment("a", 1, NODE);
            attached.status = Some(AttachmentStatus {
                phase,
                boot_id: Some(boot_id.to_owned()),
                ..AttachmentStatus::default()
            });
            let job = job_of(&view("ReadWriteOnce", vec![attached]));
            job.uses[0].usage.established
        };
        assert!(established(AttachmentPhase::Attached, BOOT));
        assert!(!established(AttachmentPhase::Attached, "another run"));
        assert!(!established(AttachmentPhase::Pending, BOOT));
    }

    // Fails if a node works for the uses of another.
    #[test]
    fn uses_and_copies_of_other_nodes_are_left_alone() {
        let mut view = view("ReadWriteOnce", vec![attachment("a", 1, "other")]);
        let mut elsewhere = replica(2, Some(2));
        elsewhere.spec.node = "other".to_owned();
        view.replicas = vec![Arc::new(elsewhere)];
        let job = job_of(&view);
        assert!(job.uses.is_empty() && job.endings.is_empty());
        assert!(job.replica.is_none());
    }

    // Fails if an empty copy is made in the place of one that was lost, or one is made that shall go.
    #[test]
    fn a_copy_is_made_only_before_it_was_ever_reported() {
        let fate = |replica: Replica, has_volume: bool| {
            let mut view = view("ReadWriteOnce", Vec::new());
            view.replicas = vec![Arc::new(replica)];
            if !has_volume {
                view.volume = None;
            }
            job_of(&view).replica.expect("it is on this node").fate
        };
        assert_eq!(fate(replica(2, None), true), Fate::Make);
        assert_eq!(fate(replica(2, Some(1)), true), Fate::Find);
        for (measured, kept) in [(None, Fate::Make), (Some(1), Fate::Find)] {
            let mut going = replica(2, measured);
            going.metadata.deletion_timestamp = Some(time(1));
            assert_eq!(
                fate(going.clone(), false),
                Fate::Forget,
                "its volume is not known, and nothing says that the bytes may go"
            );
            assert_eq!(
                fate(going.clone(), true),
                kept,
                "somebody deleted it by hand"
            );
            going.spec.discard = true;
            assert_eq!(
                fate(going.clone(), false),
                Fate::Remove,
                "it goes with its volume"
            );
            assert_eq!(fate(going, true), kept, "its volume is still there");
        }
    }

    // Fails if a copy grows beyond its reservation because the volume wants more than was granted.
    #[test]
    fn the_goal_is_what_was_granted() {
        let mut view = view("ReadWriteOnce", Vec::new());
        view.volume = Some(volume(9, "ReadWriteOnce"));
        assert_eq!(job_of(&view).goal, Bytes::gib(2));
        let mut target = Target::new(
            "v",
            TargetSpec {
                term: 0,
                rests: false,
                volume: "v".to_owned(),
                node: NODE.to_owned(),
                capacity: Bytes::gib(3),
                copies: CopiesWanted::default(),
            },
        );
        view.target = Some(Arc::new(target.clone()));
        assert_eq!(job_of(&view).goal, Bytes::gib(2));
        target.spec.capacity = Bytes::gib(1);
        view.target = Some(Arc::new(target));
        assert_eq!(job_of(&view).goal, Bytes::gib(1));
    }
}
