//! The named steps of provisioning, growth and removal: every place where a crash leaves something
//! half done.
//!
//! Code that has just made one durable or kernel-visible change says so with [`reached`]. In normal operation that is
//! a load and a branch. The crash tests install a hook that kills the process there, once for every member of
//! [`Step::ALL`]. So a new step is crash-tested from the day it exists, and a step that nothing reaches fails the
//! test.

use std::sync::OnceLock;

macro_rules! steps {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// One place where the process may die between two changes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Step { $($(#[doc = $doc])+ $name,)+ }

        impl Step {
            /// Every step, in the order of the list above.
            pub const ALL: &'static [Step] = &[$(Step::$name,)+];

            /// The name by which tests and logs call the step.
            pub const fn name(self) -> &'static str {
                match self { $(Step::$name => $text,)+ }
            }
        }
    };
}

steps! {
    /// Small files: one is written and synced under another name. A file that is made once comes about so.
    FileWritten = "file-written",
    /// Small files: it has its name, durably.
    FileInPlace = "file-in-place",
    /// Links: the home has an authority, in a file or a secret that nobody has seen yet.
    AuthorityMade = "authority-made",
    /// Links: everybody can read the authority's certificate.
    AuthorityPublished = "authority-published",
    /// Links: a node has asked for a certificate. Its key is in memory alone.
    CertificateRequested = "certificate-requested",
    /// Links: the certificate is signed and stored for the node to fetch.
    CertificateSigned = "certificate-signed",
    /// Links: the node has its certificate and its key in a file.
    CertificateStored = "certificate-stored",
    /// Provisioning: the volume is stored, and with it the choice of its pool.
    VolumeWritten = "volume-written",
    /// Provisioning: the volume's target and replica are stored.
    VolumeObjectsWritten = "volume-objects-written",
    /// Provisioning: a replica's directory exists under a temporary name.
    ReplicaDirectoryMade = "replica-directory-made",
    /// Provisioning: its data file has its size.
    ReplicaDataMade = "replica-data-made",
    /// Provisioning: both superblocks are durable.
    ReplicaSuperblocksMade = "replica-superblocks-made",
    /// Provisioning: the directory has its final name, durably.
    ReplicaPublished = "replica-published",
    /// In the process of a copy: its memory is whole again, as it was found or made anew; nothing was promised yet.
    CopyMemoryMade = "copy-memory-made",
    /// In the process of a copy: its superblock has a promise that its memory does not have yet.
    CopyPromiseKept = "copy-promise-kept",
    /// In the process of a copy: a length is durable in its superblock, and the flush behind it is not answered.
    CopyLengthKept = "copy-length-kept",
    /// In the keeper: what shall run is written, under another name.
    KeeperFileWritten = "keeper-file-written",
    /// In the keeper: it has its name, and whoever asked for it has no answer yet.
    KeeperFileInPlace = "keeper-file-in-place",
    /// In the keeper: all that it holds stays open for the program that is about to replace it.
    KeeperHandsOver = "keeper-hands-over",
    /// In the keeper: the new program has taken everything over, and has answered nobody yet.
    KeeperReplaced = "keeper-replaced",
    /// Several copies: the process of a copy runs.
    CopyServed = "copy-served",
    /// Several copies: what initiators must know is stored, and no target has asked for it yet.
    ChapSecretWritten = "chap-secret-written",
    /// Several copies: the target runs, and its file is there.
    TargetServed = "target-served",
    /// Several copies: the target serves the new size.
    TargetRaised = "target-raised",
    /// Several copies: the target is to run on another node.
    TargetMoved = "target-moved",
    /// Several copies: the target and its file are gone.
    TargetRetired = "target-retired",
    /// Several copies: the process of a copy is gone.
    CopyRetired = "copy-retired",
    /// Recovery: the target serves the history that begins with the copies that are left.
    SurvivorsServed = "survivors-served",
    /// Recovery: a copy that was given up is deleted.
    CopyGivenUp = "copy-given-up",
    /// Recovery: it is in the volume's history.
    RecoveryRecorded = "recovery-recorded",
    /// Provisioning: the replica's and the target's measured sizes are stored.
    ReplicaReported = "replica-reported",
    /// Provisioning: the persistent volume is stored.
    PersistentVolumeWritten = "persistent-volume-written",
    /// Provisioning: the claim names its volume.
    ClaimNamesVolume = "claim-names-volume",
    /// Provisioning: the claim and the persistent volume say Bound.
    ClaimBound = "claim-bound",
    /// Attachment: a block device carries the volume: a loop device on its file, or a disk of the iSCSI initiator.
    DeviceAttached = "device-attached",
    /// Attachment: a filesystem was made on it.
    FilesystemMade = "filesystem-made",
    /// Attachment: the copies know that there is a filesystem.
    FormattingNoted = "formatting-noted",
    /// Attachment: the filesystem is mounted at its private place.
    FilesystemMounted = "filesystem-mounted",
    /// Attachment: the consumer's path shows it.
    PathPublished = "path-published",
    /// Attachment: the attachment's measured rungs are stored.
    AttachmentReported = "attachment-reported",
    /// Growth: the larger goals are stored in every object below the claim.
    GoalsRaised = "goals-raised",
    /// Growth: the replica's data file is longer, its superblock is not yet.
    ReplicaDataExtended = "replica-data-extended",
    /// Growth: the replica's new size is durable.
    ReplicaRaised = "replica-raised",
    /// Growth: the block device has the new size.
    DeviceRaised = "device-raised",
    /// Growth: the filesystem has the new size.
    FilesystemRaised = "filesystem-raised",
    /// Growth of an idle filesystem: a device that lives as long as this process carries the data file.
    IdleAttached = "idle-attached",
    /// Growth of an idle filesystem: it is mounted where no path leads.
    IdleMounted = "idle-mounted",
    /// Growth of an idle filesystem: it has the new size.
    IdleRaised = "idle-raised",
    /// Growth of an idle filesystem: mount and device are gone again.
    IdleReleased = "idle-released",
    /// Growth: the claim's status says the new size.
    ClaimFinished = "claim-finished",
    /// Removal: the consumer's path is gone.
    PathUnpublished = "path-unpublished",
    /// Removal: the private mount is gone.
    FilesystemUnmounted = "filesystem-unmounted",
    /// Removal: the block device is gone.
    DeviceDetached = "device-detached",
    /// Removal: the replica's directory has a temporary name again.
    ReplicaUnpublished = "replica-unpublished",
    /// Removal: the replica's files are gone.
    ReplicaRemoved = "replica-removed",
    /// A VM's persistent root: its volume says that an image is being copied, and none of it is there.
    RootMarked = "root-marked",
    /// A VM's persistent root: the whole image is durable, and the volume still says that it is being copied.
    RootCopied = "root-copied",
    /// A VM's persistent root: the volume says that the image is whole.
    RootReady = "root-ready",
    /// A VM's image: all of it has arrived and is durable, without the name by which it is found.
    ImageReceived = "image-received",
    /// A VM's image: it can be found by its digest and by its reference.
    ImageStored = "image-stored",
    /// A VM's image: an unused one is gone.
    ImageRemoved = "image-removed",
}

impl Step {
    /// Whether the step belongs to the growth of a filesystem that nobody uses. A claim that is mounted
    /// all the time never gets there.
    pub const fn is_of_idle_growth(self) -> bool {
        matches!(
            self,
            Step::IdleAttached | Step::IdleMounted | Step::IdleRaised | Step::IdleReleased
        )
    }

    /// Whether the step belongs to volumes of several copies. A single copy never gets there.
    pub const fn is_of_several_copies(self) -> bool {
        matches!(
            self,
            Step::CopyServed
                | Step::ChapSecretWritten
                | Step::TargetServed
                | Step::TargetRaised
                | Step::TargetRetired
                | Step::CopyRetired
        )
    }

    /// Whether the step belongs to the credentials of a node. The first start takes them, and no claim waits for them.
    pub const fn is_of_credentials(self) -> bool {
        matches!(
            self,
            Step::AuthorityMade
                | Step::AuthorityPublished
                | Step::CertificateRequested
                | Step::CertificateSigned
                | Step::CertificateStored
        )
    }

    /// Whether the step belongs to the move of a target to another node. The old and the new node take further steps, which
    /// they also take without a move.
    pub const fn is_of_a_move(self) -> bool {
        matches!(self, Step::TargetMoved)
    }

    /// Whether the step belongs to the recovery of a volume whose copies were lost for good.
    pub const fn is_of_recovery(self) -> bool {
        matches!(
            self,
            Step::SurvivorsServed | Step::CopyGivenUp | Step::RecoveryRecorded
        )
    }

    /// Whether the step is also taken by `trellis down --all`, which ends everything.
    pub const fn is_of_the_end(self) -> bool {
        matches!(
            self,
            Step::FileWritten
                | Step::FileInPlace
                | Step::PathUnpublished
                | Step::FilesystemUnmounted
                | Step::DeviceDetached
                | Step::TargetRetired
                | Step::CopyRetired
        )
    }

    /// Whether the step is taken in the process of a copy, and not in the service.
    pub const fn is_of_a_copy(self) -> bool {
        matches!(
            self,
            Step::CopyMemoryMade | Step::CopyPromiseKept | Step::CopyLengthKept
        )
    }

    /// Whether the step is taken in the process of the keeper, and not in the service.
    pub const fn is_of_the_keeper(self) -> bool {
        matches!(
            self,
            Step::KeeperFileWritten
                | Step::KeeperFileInPlace
                | Step::KeeperHandsOver
                | Step::KeeperReplaced
        )
    }

    /// Whether the step belongs to the images and the persistent roots of VMs.
    pub const fn is_of_vm_images(self) -> bool {
        matches!(
            self,
            Step::RootMarked
                | Step::RootCopied
                | Step::RootReady
                | Step::ImageReceived
                | Step::ImageStored
                | Step::ImageRemoved
        )
    }

    /// The step of that name.
    pub fn from_name(name: &str) -> Option<Step> {
        Step::ALL.iter().copied().find(|step| step.name() == name)
    }
}

static HOOK: OnceLock<fn(Step)> = OnceLock::new();

/// Calls `hook` at every step from now on. Only the first call of a process counts.
pub fn install_hook(hook: fn(Step)) {
    let _ = HOOK.set(hook);
}

/// Says that `step` has just been taken.
pub fn reached(step: Step) {
    if let Some(hook) = HOOK.get() {
        hook(step);
    }
}
