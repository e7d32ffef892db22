//! Volumes on a node: staged, shown to a pod, grown under its hands, and taken away.

use std::path::Path;

use trellis_csi::Code;
use trellis_csi::proto::csi::volume_capability::access_mode::Mode;
use trellis_csi::proto::csi::volume_capability::{AccessType, MountVolume};
use trellis_csi::proto::csi::volume_usage::Unit;
use trellis_node::sys::block as device;

use super::caller::{Caller, GIB, NODE, block, capability, mount};
use super::leftovers;
use crate::harness::{checksum, filesystem_mib, write_file};

// Fails if a pod does not see the growth of its filesystem when the call is answered, if the kubelet is asked to do what is
// done, if data is lost, or if anything stays behind.
#[test]
fn a_filesystem_grows_in_a_pod_within_one_call() {
    let caller = Caller::start(&[]);
    let id = caller.create("pvc-grows", GIB, mount()).unwrap();
    let (staging, target) = caller.paths("a");
    caller.publish_to(&id, NODE, mount()).unwrap();
    for _ in 0..2 {
        caller.stage(&id, &staging, mount()).unwrap();
    }
    for _ in 0..2 {
        caller.show(&id, &staging, &target, mount(), false).unwrap();
    }
    let file = Path::new(&target).join("data");
    let sum = write_file(&file, 3 << 20, 7);
    let before = caller.stats(&id, &target).unwrap();
    let total = |stats: &trellis_csi::proto::csi::NodeGetVolumeStatsResponse| {
        let bytes = stats.usage.iter().find(|each| each.unit() == Unit::Bytes);
        bytes.unwrap().total
    };
    assert!(!before.volume_condition.as_ref().unwrap().abnormal);
    for size in [2 * GIB, 3 * GIB] {
        let grown = caller.expand(&id, size).unwrap();
        assert_eq!(grown.capacity_bytes, size);
        assert!(!grown.node_expansion_required);
        assert_eq!(
            filesystem_mib(Path::new(&target)),
            (size >> 20).unsigned_abs()
        );
        assert_eq!(caller.grow_on_node(&id, &target, size).unwrap(), size);
    }
    assert!(total(&caller.stats(&id, &target).unwrap()) > total(&before) + GIB);
    let smaller = caller.expand(&id, GIB).unwrap();
    assert_eq!(
        (smaller.capacity_bytes, smaller.node_expansion_required),
        (3 * GIB, false)
    );
    let above = caller.grow_on_node(&id, &target, 4 * GIB).unwrap_err();
    assert_eq!(above.code(), Code::OutOfRange);
    assert_eq!(checksum(&file), sum);
    for _ in 0..2 {
        caller.hide(&id, &target).unwrap();
    }
    assert!(!Path::new(&target).exists());
    for _ in 0..2 {
        caller.unstage(&id, &staging).unwrap();
    }
    for _ in 0..2 {
        caller.unpublish_from(&id, NODE).unwrap();
        caller.delete(&id).unwrap();
    }
    assert_eq!(leftovers(&caller), Vec::<String>::new());
}

// Fails if a pod's device does not have the new size when the call is answered, or stays behind.
#[test]
fn a_device_grows_in_a_pod_within_one_call() {
    let caller = Caller::start(&[]);
    let id = caller.create("pvc-device", GIB, block()).unwrap();
    let (staging, target) = caller.paths("a");
    caller.publish_to(&id, NODE, block()).unwrap();
    caller.stage(&id, &staging, block()).unwrap();
    let refused = caller
        .show(&id, &staging, &target, block(), true)
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    caller.show(&id, &staging, &target, block(), false).unwrap();
    let size = || {
        let opened = device::open(Path::new(&target)).unwrap();
        device::size(&opened).unwrap().get()
    };
    assert_eq!(size(), 1 << 30);
    let grown = caller.expand(&id, 2 * GIB).unwrap();
    assert!(!grown.node_expansion_required);
    assert_eq!(size(), 2 << 30);
    let stats = caller.stats(&id, &target).unwrap();
    assert_eq!(stats.usage[0].total, 2 * GIB);
    caller.hide(&id, &target).unwrap();
    assert!(!Path::new(&target).exists());
    caller.unstage(&id, &staging).unwrap();
    caller.unpublish_from(&id, "").unwrap();
    caller.delete(&id).unwrap();
    assert_eq!(leftovers(&caller), Vec::<String>::new());
}

// Fails if a pod that may only read can write, if a second pod gets a volume that is for one, or if the mount options of a
// volume are not those that were asked for.
#[test]
fn readers_read_and_a_single_writer_is_alone() {
    let caller = Caller::start(&[]);
    let options = |flags: &[&str]| MountVolume {
        mount_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        ..MountVolume::default()
    };
    let alone = capability(
        AccessType::Mount(options(&["noatime"])),
        Mode::SingleNodeSingleWriter,
    );
    let id = caller.create("pvc-alone", GIB, alone.clone()).unwrap();
    let (staging, first) = caller.paths("a");
    let (_, second) = caller.paths("b");
    let other = capability(
        AccessType::Mount(options(&["nodiscard"])),
        Mode::SingleNodeSingleWriter,
    );
    let refused = caller.stage(&id, &staging, other).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    caller.stage(&id, &staging, alone.clone()).unwrap();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.contains(&staging)).unwrap();
    assert!(line.contains("noatime"), "{line}");
    caller
        .show(&id, &staging, &first, alone.clone(), false)
        .unwrap();
    let refused = caller
        .show(&id, &staging, &second, alone, false)
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(!Path::new(&second).exists());

    let id = caller.create("pvc-read", GIB, mount()).unwrap();
    let (staging, writer) = caller.paths("c");
    let (_, reader) = caller.paths("d");
    caller.stage(&id, &staging, mount()).unwrap();
    caller.show(&id, &staging, &writer, mount(), false).unwrap();
    caller.show(&id, &staging, &reader, mount(), true).unwrap();
    std::fs::write(Path::new(&writer).join("a"), "b").unwrap();
    assert_eq!(
        std::fs::read_to_string(Path::new(&reader).join("a")).unwrap(),
        "b"
    );
    assert!(std::fs::write(Path::new(&reader).join("c"), "d").is_err());
    let other_mode = caller
        .show(&id, &staging, &reader, mount(), false)
        .unwrap_err();
    assert_eq!(other_mode.code(), Code::AlreadyExists, "{other_mode}");
    // A reader does not keep the filesystem from growing.
    assert!(!caller.expand(&id, 2 * GIB).unwrap().node_expansion_required);
    assert_eq!(filesystem_mib(Path::new(&reader)), 2048);
}

// Fails if a volume that a pod still sees is taken away or deleted, or if a use that the kubelet left behind keeps a volume
// for ever.
#[test]
fn a_volume_in_use_is_kept_until_its_use_has_ended() {
    let caller = Caller::start(&[]);
    let id = caller.create("pvc-used", GIB, mount()).unwrap();
    let (staging, target) = caller.paths("a");
    caller.publish_to(&id, NODE, mount()).unwrap();
    caller.stage(&id, &staging, mount()).unwrap();
    caller.show(&id, &staging, &target, mount(), false).unwrap();
    assert_eq!(caller.delete(&id), Err(Code::FailedPrecondition));
    let refused = caller.unstage(&id, &staging).unwrap_err();
    assert_eq!(refused.code(), Code::Aborted, "{refused}");
    assert!(refused.message().contains(&target), "{refused}");
    let elsewhere = caller.stats(&id, "/").unwrap_err();
    assert_eq!(elsewhere.code(), Code::NotFound);
    caller.hide(&id, &target).unwrap();
    // The kubelet never unstages: unpublishing does.
    caller.unpublish_from(&id, NODE).unwrap();
    caller.delete(&id).unwrap();
    assert_eq!(leftovers(&caller), Vec::<String>::new());
}
