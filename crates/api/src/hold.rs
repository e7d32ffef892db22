//! Why something is stuck: a finite list, each with one sentence and one next action.
//!
//! Every stuck state that a user can meet is a member of [`HoldReason`]. `docs/holds.md` prints the list, and a test
//! keeps the two the same.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($name:ident: $sentence:literal, $action:literal;)+) => {
        /// Why a claim, or one of its rungs, is held.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
        pub enum HoldReason {
            $(#[doc = $sentence] $name,)+
        }

        impl HoldReason {
            /// Every reason.
            pub const ALL: &'static [HoldReason] = &[$(HoldReason::$name,)+];

            /// The code: stable, in one word, for scripts, metrics and the documentation.
            pub const fn code(self) -> &'static str {
                match self { $(HoldReason::$name => stringify!($name),)+ }
            }

            /// The reason with that code.
            pub fn of_code(code: &str) -> Option<HoldReason> {
                HoldReason::ALL.iter().copied().find(|each| each.code() == code)
            }

            /// What is the matter, in one sentence.
            pub const fn sentence(self) -> &'static str {
                match self { $(HoldReason::$name => $sentence,)+ }
            }

            /// What to do about it.
            pub const fn action(self) -> &'static str {
                match self { $(HoldReason::$name => $action,)+ }
            }
        }
    };
}

reasons! {
    WaitingForConsumer:
        "The class provisions a claim only when something uses it, and nothing does yet.",
        "Mount the claim with `trellis mount`.";
    ClassNotFound:
        "The claim names a StorageClass that does not exist.",
        "Create the class, or create the claim anew with an existing one (`kubectl get sc`).";
    ClassNotSet:
        "The claim names no StorageClass, so no volume is made for it, and no PersistentVolume that was made by hand is free and fits.",
        "Create a PersistentVolume that fits, or create the claim anew with a class (`kubectl get sc`).";
    ClassInvalid:
        "The claim's StorageClass has a parameter that Trellis does not understand.",
        "Create a class with valid parameters and create the claim anew with it.";
    VolumeNotFound:
        "The claim names a PersistentVolume that does not exist.",
        "Create the PersistentVolume, or create the claim anew without volumeName.";
    VolumeUnknown:
        "An attachment names a volume that does not exist.",
        "Delete the attachment, or make the volume that it names.";
    VolumeMismatch:
        "The claim names a PersistentVolume that it cannot have.",
        "Change the PersistentVolume, or create the claim anew so that they fit; the message says what does not.";
    SelectorUnmatched:
        "The claim selects a PersistentVolume by its labels, and none fits.",
        "Create a PersistentVolume with these labels, or create the claim anew without a selector.";
    DataSourceUnsupported:
        "The claim asks to be filled from a snapshot or from another claim, which Trellis cannot do yet.",
        "Create the claim anew without a data source, and copy the data.";
    AccessModeUnsupported:
        "The claim's access mode does not allow this use.",
        "End the other use first, or create a claim with another access mode.";
    ConsumerUnfit:
        "The attachment asks for a use that the volume is not made for.",
        "Delete the attachment and make one with `consumer.mount` for a claim with a filesystem, or with `consumer.device` for a block claim.";
    PoolNotFound:
        "None of the pools that the class names exists.",
        "Add the pool with `trellis pool add NAME DIR`.";
    PoolNotReady:
        "The pool's directory cannot be used on its node.",
        "Look at `trellis pool ls -o wide`; mount or repair the directory, then add the pool again.";
    PoolUnfit:
        "The directory cannot be a pool: it is another pool's, the system's or Trellis' own.",
        "Remove the pool with `trellis pool rm NAME` and add another directory; the message says what is wrong with this one.";
    PoolInUse:
        "The pool is to be removed, and copies are still on it.",
        "Move them away with `trellis pool rm NAME --drain`, or delete their claims; the pool goes by itself then.";
    NoSpaceInPool:
        "No pool has room for the size that is asked for.",
        "Free space, raise the pool's overcommitPercent, add a pool, or lower the request with `trellis cancel`.";
    TooFewPools:
        "The class asks for more copies than there are pools to keep them, and every copy needs a pool of its own.",
        "Add pools with `trellis pool add NAME DIR`, on disks of their own, or use a class with fewer replicas.";
    DiskShared:
        "The only pools left for one more copy are on a filesystem that has a copy of the volume already, and would be lost with it.",
        "Add a pool on another disk with `trellis pool add NAME DIR`, use a class with fewer replicas, or accept it: a class with `allowSharedDisk: \"true\"`, or `trellis volume scale CLAIM N --allow-shared-disk`.";
    SizeTooLarge:
        "The size is larger than a volume can be.",
        "Lower the request with `trellis cancel`.";
    SizeInvalid:
        "What is asked for is no size.",
        "Ask for a number with a unit, such as 20Gi.";
    SizeTooSmall:
        "The size is smaller than the smallest filesystem of the kind that the class asks for.",
        "Create the claim anew with a larger request, or with another class.";
    NotMounted:
        "The volume carries a filesystem that is not mounted, and its node has not grown it yet.",
        "Mount the claim with `trellis mount`: the filesystem grows as part of it.";
    OnlineGrowthOff:
        "The class or the node says that filesystems do not grow while they are mounted.",
        "Unmount the claim: the filesystem grows as soon as nobody uses it.";
    ReadOnly:
        "Every use of the volume is read-only, and a read-only filesystem is never grown.",
        "Mount the claim once without --read-only.";
    FilesystemUnsupported:
        "The filesystem on the volume is of a kind that Trellis cannot grow.",
        "Grow it with its own tools; the device below already has the new size.";
    MountOptionRefused:
        "The PersistentVolume asks for a mount option that is not honoured, and none is ignored.",
        "Change `spec.mountOptions` of the PersistentVolume (`kubectl edit pv`) and mount the claim again; docs/classes.md lists the options.";
    FilesystemErrors:
        "The filesystem has recorded errors, and the kernel refuses to grow it before a repair.",
        "Unmount the claim and run the filesystem's repair tool, then mount it again.";
    ForeignData:
        "The volume carries data that is not the filesystem asked for, and Trellis never overwrites data.",
        "Save or remove the data yourself, or create the claim anew with volumeMode Block.";
    FilesystemMismatch:
        "The volume carries a filesystem of another kind than its class asks for; it is neither used nor grown.",
        "Create a claim of a class with that filesystem and copy the data, or remove the filesystem yourself if nobody needs it.";
    FilesystemGone:
        "The volume once carried a filesystem and is found empty; what was on it is lost, and no new one is made.",
        "Find out what emptied the copies and restore them from a backup; or delete the claim and create it anew.";
    MissingCapability:
        "The kernel refuses because the process lacks a capability (CAP_SYS_RESOURCE for ext3 and ext4 growth).",
        "Run Trellis with the capability; `trellis doctor` shows what is missing.";
    MissingProgram:
        "A program that makes the filesystem is not installed on the node.",
        "Install it (`trellis doctor` names it); the mount goes on by itself.";
    PathBusy:
        "The path where the volume shall appear is in use by something else.",
        "Unmount or empty the path, or mount the claim elsewhere.";
    PathInvalid:
        "The path where the volume shall appear cannot be used.",
        "Give an absolute path to an empty directory, or to one that does not exist yet.";
    StillInUse:
        "Something still uses the mount, so it cannot be taken away.",
        "Stop the programs that use it (`fuser -vm PATH`); the unmount goes on by itself.";
    ClaimNotBound:
        "The claim has no volume yet.",
        "Wait for the claim to bind; `trellis explain CLAIM` says what keeps it.";
    ReplicaDamaged:
        "A copy of the volume does not pass its checks.",
        "Run `trellis check POOL-DIR`, keep the files, and restore the copy from a backup.";
    ReplicaUnavailable:
        "A copy of the volume is on a node or pool that cannot be reached.",
        "Bring the node or the pool back (is its disk mounted?); everything goes on by itself then.";
    LinkRefused:
        "The node of a copy and the node of its target refuse each other's connections.",
        "The message says who refused whom and why: compare the clocks, run the same release on both nodes, or see docs/operating.md for certificates.";
    LinkMissing:
        "A copy is on another node than its target, and its node cannot be reached from there.",
        "Start the service on the copy's node with `--link-address IP`, an address of that node that the others reach.";
    TooFewReplicas:
        "Fewer copies answer than must have a write before it is acknowledged, or something that was written is in none of those that answer. So growth waits, and I/O waits or fails as the class says (`whenBelowQuorum`).",
        "Bring the pools or nodes of the missing copies back (`trellis volume show CLAIM`); everything goes on by itself then. If they are lost for good, see `trellis volume recover CLAIM`.";
    RedundancyLow:
        "Fewer copies hold everything than are asked for: the volume is served, and a further loss may stop it.",
        "See `trellis volume show CLAIM`: a copy that is being repaired needs nothing, and one that is away or silent comes back with its disk and its process. If its disk is lost, move it with `trellis volume replace CLAIM POOL`.";
    PoolFull:
        "The filesystem of a pool is full, so a copy cannot take what was not written before; what has its space is read and overwritten as always.",
        "Free space on the pools that the message names, or move copies to others with `trellis volume replace`; everything goes on by itself then. Trimming the volume (`fstrim`) frees space too.";
    TargetDown:
        "The process that serves the volume does not run or does not answer.",
        "Nothing at first: it is started again by itself. If that repeats, read its log, which the message names.";
    NodeLost:
        "The node that serves the volume has said nothing for too long.",
        "Bring the node back. A volume of several copies can be used on another node at once; it moves there by itself. `trellis node ls` shows the nodes.";
    TargetOutbid:
        "Copies of the volume have followed another process that served it, so this one may not.",
        "Nothing: it is started with the right to serve, on the node that the volume is for. If that repeats, two services decide about one volume: `trellis node ls`.";
    UsedElsewhere:
        "The volume is served on another node, and can be used on one node at a time.",
        "Unmount it there, and it moves here by itself. If that node is lost, it moves as soon as the node counts as lost: `trellis node ls`.";
    TargetSilent:
        "The process that serves the volume runs and does not answer: it is frozen, or cannot get on.",
        "Nothing at first: it is killed and replaced by itself (15 s, `trellis up --silent-target-seconds`); I/O waits until then. If that repeats, read its log, which the message names.";
    DeviceGone:
        "The block device that carried the volume has vanished.",
        "Unmount the claim and mount it again.";
    KernelRefused:
        "The kernel refused an operation on the volume.",
        "Read the message for the operation and its error; `trellis doctor` checks this machine.";
    GeometryLimit:
        "The filesystem was made with a geometry that cannot reach the size that is asked for.",
        "Lower the request with `trellis cancel`, or copy the data to a new claim.";
    OperationRunning:
        "Another operation on the filesystem is running, such as a balance or a resize.",
        "Wait for it to end; the growth goes on by itself.";
    FilesystemUnclean:
        "The idle filesystem was not unmounted cleanly, and it is not touched before its journal has been replayed.",
        "Mount the claim with `trellis mount`: the journal is replayed and the filesystem grows as part of it.";
    FilesystemDown:
        "The mounted filesystem has stopped: it has shut itself down, or what is below it does not answer.",
        "Look at the disk below, unmount the claim and mount it again.";
    MountGone:
        "Somebody else has unmounted the volume.",
        "If it was not meant, `trellis umount` the claim and mount it again; it is not put back behind anybody's back.";
    DeviceShrunk:
        "The file or the device below is smaller than what it carries; a part of the data is cut off.",
        "Restore the file to at least its former size and its former content; nothing is written meanwhile.";
    ForeignUse:
        "Another process uses the volume as its own.",
        "Stop the other agent or program; the message names it as far as it is known.";
    InUse:
        "The claim is being deleted while something still uses it.",
        "Unmount it with `trellis umount`; it goes away by itself then.";
}

impl std::fmt::Display for HoldReason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.pad(self.code())
    }
}

/// A reason together with what is known of this one case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Hold {
    /// The reason, from the finite list.
    pub reason: HoldReason,
    /// This case in one sentence: names, sizes, what the kernel said.
    pub message: String,
}

impl Hold {
    /// A hold for `reason` with the particulars of this case.
    pub fn new(reason: HoldReason, message: impl Into<String>) -> Self {
        Hold {
            reason,
            message: message.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a reason is added, renamed or reworded without its page in the documentation.
    #[test]
    fn every_reason_stands_in_the_documentation() {
        let page = include_str!("../../../docs/holds.md");
        for reason in HoldReason::ALL {
            let section = format!(
                "## {reason}\n\n{}\n\nWhat to do: {}\n",
                reason.sentence(),
                reason.action()
            );
            assert!(
                page.contains(&section),
                "docs/holds.md lacks this section:\n{section}"
            );
        }
        let sections = page.lines().filter(|line| line.starts_with("## ")).count();
        assert_eq!(
            sections,
            HoldReason::ALL.len(),
            "docs/holds.md has a section for a reason that is gone"
        );
    }
}
