//! Everything that is stored about one volume: our own kinds, and no other. [`StoredClaim`] adds the claim's kinds.

mod claim;

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::{Timestamp, Unit};
use trellis_api::kinds::{
    Attachment, Content, EMPTY_CONTENT, FilesystemKind, Replica, RungStatus, Target, Via, Volume,
};
use trellis_api::{Bytes, Hold, HoldReason};

pub use self::claim::StoredClaim;
use crate::world::World;

/// One volume and all that belongs to it.
#[derive(Clone, Default)]
pub struct StoredVolume {
    /// The volume's name, also where there is no volume yet.
    pub key: String,
    /// The volume.
    pub volume: Option<Arc<Volume>>,
    /// Its target.
    pub target: Option<Arc<Target>>,
    /// Its copies.
    pub replicas: Vec<Arc<Replica>>,
    /// Its uses.
    pub attachments: Vec<Arc<Attachment>>,
}

impl StoredVolume {
    /// Gathers what the caches know of the volume `key`.
    pub fn gather(world: &World, key: &str) -> StoredVolume {
        StoredVolume {
            key: key.to_owned(),
            volume: world.volumes.get("", key),
            target: world.targets.group(key).into_iter().next(),
            replicas: world.replicas.group(key),
            attachments: world.attachments.group(key),
        }
    }

    /// Whether the volume has several copies behind a target. If the volume is gone, its copies still tell.
    pub fn is_replicated(&self) -> bool {
        let copy = |each: &Arc<Replica>| each.is_of_several();
        let volume = self
            .volume
            .as_ref()
            .map(|volume| volume.spec.is_behind_target());
        volume.unwrap_or_else(|| self.replicas.iter().any(copy))
    }

    /// Whether the volume is known to have carried a filesystem that somebody could use.
    pub fn is_formatted(&self) -> bool {
        let volume = self.volume.as_ref();
        let wanted = volume.and_then(|volume| volume.spec.filesystem);
        let told = volume.and_then(|volume| volume.status.as_ref());
        let used = self.attachments.iter().any(|each| {
            let status = each.status.as_ref();
            status.is_some_and(|status| status.filesystem.is_some())
        });
        let found = || {
            let contents = self.contents().into_iter().flatten();
            let mut contents = contents.map(|content| content.kind.as_str());
            contents.any(|kind| wanted.is_some_and(|wanted| wanted.name() == kind))
        };
        wanted.is_some() && (told.is_some_and(|status| status.formatted) || used || found())
    }

    /// How its bytes get to a node. If the volume is gone, its uses still tell.
    pub fn way(&self) -> Via {
        let used = self.attachments.iter();
        let used = || used.clone().find_map(|each| each.status.as_ref()?.via);
        let volume = self.volume.as_ref().map(|volume| volume.spec.way());
        volume.or_else(used).unwrap_or(if self.is_replicated() {
            Via::Fuse
        } else {
            Via::Local
        })
    }

    /// What is known about the bytes: of every copy that is used in place, or of what the target shows.
    pub fn contents(&self) -> Vec<Option<&Content>> {
        if self.is_replicated() {
            let target = self.target.as_ref();
            let content = target.and_then(|target| target.status.as_ref()?.content.as_ref());
            return vec![content];
        }
        let replicas = self.replicas.iter();
        replicas
            .map(|replica| replica.status.as_ref()?.content.as_ref())
            .collect()
    }

    /// What is wrong with the bytes of an idle volume: they are not the filesystem that it should have.
    pub fn foreign_content(&self) -> Option<Hold> {
        let wanted = self.volume.as_ref()?.spec.filesystem?;
        let contents = self.contents().into_iter().flatten();
        let mut kinds = contents.map(|content| content.kind.as_str());
        let found = kinds.find(|kind| *kind != wanted.name() && *kind != EMPTY_CONTENT)?;
        let (reason, message) = match found.parse::<FilesystemKind>() {
            Ok(found) => (
                HoldReason::FilesystemMismatch,
                format!(
                    "Volume {} carries {found}, and {wanted} is asked for.",
                    self.key
                ),
            ),
            Err(_) => (
                HoldReason::ForeignData,
                format!(
                    "Volume {} carries {found}, and {wanted} is asked for.",
                    self.key
                ),
            ),
        };
        Some(Hold::new(reason, message))
    }

    /// The size that the target was measured to serve; with a single copy that is used in place, not more than that
    /// copy has. None before it exists.
    pub fn served(&self) -> Option<Bytes> {
        let target = self.target.as_ref()?.status.as_ref()?.capacity?;
        if self.is_replicated() {
            return Some(target);
        }
        let mut least = target;
        for replica in &self.replicas {
            least = least.min(replica.status.as_ref()?.capacity?);
        }
        (!self.replicas.is_empty()).then_some(least)
    }
}

/// How far the volume has come, from what its layers have reported.
impl StoredVolume {
    /// The largest size that any copy already has, or that is served of them: it is committed and can only be kept. What
    /// is served may be known before the copies themselves were measured again.
    pub fn committed(&self) -> Bytes {
        let copies = self.replicas.iter();
        let copies = copies.filter_map(|replica| replica.status.as_ref()?.capacity);
        copies.chain(self.served()).max().unwrap_or_default()
    }

    /// The goal of target and copies: what they have room for.
    pub fn granted(&self) -> Option<Bytes> {
        let target = self.target.iter().map(|target| target.spec.capacity);
        let replicas = self.replicas.iter().map(|replica| replica.spec.capacity);
        target.chain(replicas).min()
    }

    /// The uses that have rungs: something is attached.
    pub fn branches(&self) -> impl Iterator<Item = (&Arc<Attachment>, &[RungStatus])> {
        self.attachments.iter().filter_map(|each| {
            let rungs = each.status.as_ref()?.rungs.as_slice();
            (!rungs.is_empty()).then_some((each, rungs))
        })
    }

    /// Whether anything is attached.
    pub fn is_in_use(&self) -> bool {
        self.branches().next().is_some()
    }

    /// The size that every use was measured to have; of an idle volume, the size that its filesystem was found with.
    /// None if that is not known.
    pub fn usable(&self) -> Option<Bytes> {
        let served = self.served()?;
        if self.is_in_use() {
            let rungs = self.branches().flat_map(|(_, rungs)| rungs);
            let sizes = rungs.filter(|rung| !rung.full).map(|rung| rung.size);
            return Some(sizes.fold(served, Bytes::min));
        }
        if !self.is_content_known(served) || self.foreign_content().is_some() {
            return None;
        }
        let contents = self.contents().into_iter().flatten();
        let has_filesystem = self.wants_filesystem();
        let behind = contents.filter(|content| has_filesystem && !content.full);
        let sizes = behind.filter_map(|content| content.size);
        Some(sizes.fold(served, Bytes::min))
    }

    fn wants_filesystem(&self) -> bool {
        let volume = self.volume.as_ref();
        volume.is_some_and(|volume| volume.spec.filesystem.is_some())
    }

    /// Whether it is known what the bytes of an idle volume are, at the size that it has now.
    fn is_content_known(&self, served: Bytes) -> bool {
        let known = |content: Option<&Content>| content.is_some_and(|it| it.of == served);
        !self.wants_filesystem() || self.contents().into_iter().all(known)
    }

    /// What holds the layers of the volume on their way to `goal`, lowest first. A use that never came about does not
    /// hold a volume that nobody uses and that has its size.
    pub fn held(&self, goal: Bytes) -> Option<Hold> {
        if !self.is_in_use() && self.served().is_some_and(|served| served >= goal) {
            return self.held_while_idle();
        }
        self.held_below().or_else(|| self.held_in_use())
    }

    /// What holds target and copies. One of several copies that cannot rise holds nothing up, as long as the target
    /// can.
    fn held_below(&self) -> Option<Hold> {
        if self.is_replicated() {
            return self.target.as_ref()?.status.as_ref()?.hold.clone();
        }
        let mut replicas = self.replicas.iter();
        replicas.find_map(|replica| replica.status.as_ref()?.hold.clone())
    }

    /// What holds a use. One that waits for its turn holds nothing: it begins at whatever size there is then.
    fn held_in_use(&self) -> Option<Hold> {
        self.attachments.iter().find_map(|each| {
            let status = each.status.as_ref()?;
            let of_rung = || status.rungs.iter().find_map(|rung| rung.hold.clone());
            let hold = status.hold.clone().or_else(of_rung);
            hold.filter(|hold| hold.reason != HoldReason::UsedElsewhere)
        })
    }

    /// What keeps the filesystem of an idle volume from its size.
    fn held_while_idle(&self) -> Option<Hold> {
        let served = self.served()?;
        if self.is_in_use() || !self.is_content_known(served) {
            return None;
        }
        self.foreign_content().or_else(|| {
            let mut contents = self.contents().into_iter().flatten();
            contents.find_map(|content| {
                let size = content.size?;
                let behind = self.wants_filesystem() && !content.full && size < served;
                behind.then(|| {
                    let message = format!(
                        "The volume has {served}; its {} has {size} and grows when it is mounted.",
                        content.kind
                    );
                    let not_yet = || Hold::new(HoldReason::NotMounted, message);
                    content.hold.clone().unwrap_or_else(not_yet)
                })
            })
        })
    }

    /// Every rung of the volume as it was last reported, the lower ones first.
    pub fn rungs(&self) -> impl Iterator<Item = &RungStatus> {
        self.rungs_of_uses(|_| true)
    }

    /// The rungs that the ladder of one node has: those of its own uses, above those that all nodes share.
    pub fn rungs_on(&self, node: &str) -> impl Iterator<Item = &RungStatus> {
        self.rungs_of_uses(move |each| each.spec.node == node)
    }

    fn rungs_of_uses(
        &self,
        is_it: impl Fn(&Attachment) -> bool,
    ) -> impl Iterator<Item = &RungStatus> {
        let replicas = self
            .replicas
            .iter()
            .filter_map(|each| each.status.as_ref()?.rung.as_ref());
        let target = self
            .target
            .iter()
            .filter_map(|each| each.status.as_ref()?.rung.as_ref());
        let attached = self
            .attachments
            .iter()
            .filter(move |each| is_it(each))
            .filter_map(|each| each.status.as_ref());
        replicas
            .chain(target)
            .chain(attached.flat_map(|status| &status.rungs))
    }
}

/// Now, to the microsecond that objects can hold.
pub fn now() -> MicroTime {
    let now = Timestamp::now();
    MicroTime(now.round(Unit::Microsecond).unwrap_or(now))
}
