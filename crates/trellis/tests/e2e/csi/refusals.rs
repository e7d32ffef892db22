//! Requests that a sane caller never sends.

use std::path::Path;

use trellis_csi::Code;
use trellis_csi::proto::csi::volume_capability::access_mode::Mode;
use trellis_csi::proto::csi::volume_capability::{AccessType, MountVolume};
use trellis_csi::proto::csi::*;

use super::caller::{Caller, GIB, NODE, block, capability, mount, request, with};
use super::leftovers;

// Fails if an id leads to another object, or if one that is unknown is not told as such.
#[test]
fn unknown_ids_are_not_found_and_lead_nowhere() {
    let caller = Caller::start(&[]);
    let (staging, target) = caller.paths("a");
    for id in [
        "nobody",
        "../pools/default",
        "a?b=c",
        "UPPER",
        "pools/default",
        "%2e%2e",
    ] {
        let code = |result: Result<(), trellis_csi::Status>| result.map_err(|status| status.code());
        assert_eq!(caller.delete(id), Ok(()), "{id}");
        assert_eq!(code(caller.unpublish_from(id, NODE)), Ok(()), "{id}");
        assert_eq!(code(caller.unstage(id, &staging)), Ok(()), "{id}");
        assert_eq!(code(caller.hide(id, &target)), Ok(()), "{id}");
        let missing = Err(Code::NotFound);
        assert_eq!(code(caller.expand(id, GIB).map(drop)), missing, "{id}");
        assert_eq!(
            code(caller.publish_to(id, NODE, mount()).map(drop)),
            missing,
            "{id}"
        );
        assert_eq!(code(caller.stage(id, &staging, mount())), missing, "{id}");
        let shown = caller.show(id, &staging, &target, mount(), false);
        assert_eq!(code(shown), missing, "{id}");
        assert_eq!(code(caller.stats(id, &target).map(drop)), missing, "{id}");
        assert_eq!(
            code(caller.grow_on_node(id, "some/path", GIB).map(drop)),
            missing,
            "{id}"
        );
    }
    let pool = caller.service.object("pools.trellis.dev", "default");
    assert_eq!(
        pool["metadata"]["deletionTimestamp"],
        serde_json::Value::Null
    );
}

// Fails if a caller can have a volume appear at a path that it should not, or take away what is not the driver's.
#[test]
fn hostile_paths_are_refused_and_nothing_is_touched() {
    let kubelet = tempfile::tempdir().unwrap();
    let registry = kubelet.path().join("plugins_registry");
    std::fs::create_dir(&registry).unwrap();
    let caller = Caller::start(&["--kubelet-dir", kubelet.path().to_str().unwrap()]);
    let below = |name: &str| kubelet.path().join(name).to_str().unwrap().to_owned();
    let (staging, target) = (below("staging"), below("target"));
    std::fs::create_dir(&staging).unwrap();
    let id = caller.create("pvc-paths", GIB, mount()).unwrap();
    let outside = caller.service.path("outside");
    std::fs::create_dir(&outside).unwrap();
    let hostile = [
        "some/path".to_owned(),
        "..".to_owned(),
        below("../elsewhere"),
        outside.to_str().unwrap().to_owned(),
        "/etc".to_owned(),
        kubelet.path().to_str().unwrap().to_owned(),
    ];
    for path in &hostile {
        let refused = caller.stage(&id, path, mount()).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{path}");
    }
    caller.stage(&id, &staging, mount()).unwrap();
    for path in &hostile {
        let refused = caller
            .show(&id, &staging, path, mount(), false)
            .unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{path}");
        let refused = caller.hide(&id, path).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{path}");
    }
    // A link at the pod's path, or something else in its place, is not followed and not touched.
    std::os::unix::fs::symlink(&outside, &target).unwrap();
    let refused = caller
        .show(&id, &staging, &target, mount(), false)
        .unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    caller.hide(&id, &target).unwrap();
    assert!(Path::new(&target).is_symlink());
    let taken = below("taken");
    std::fs::create_dir(&taken).unwrap();
    std::fs::write(Path::new(&taken).join("file"), "of somebody").unwrap();
    let refused = caller
        .show(&id, &staging, &taken, mount(), false)
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    caller.hide(&id, &taken).unwrap();
    assert!(Path::new(&taken).join("file").exists());
    caller.unstage(&id, &staging).unwrap();
    caller.delete(&id).unwrap();
    assert_eq!(leftovers(&caller), Vec::<String>::new());
}

// Fails if something is made although the request is nonsense, or if what the driver cannot do is not said.
#[test]
fn what_the_driver_cannot_do_is_refused_in_words() {
    let caller = Caller::start(&[]);
    let many = capability(
        AccessType::Mount(MountVolume::default()),
        Mode::MultiNodeMultiWriter,
    );
    let ntfs = MountVolume {
        fs_type: "ntfs".to_owned(),
        ..MountVolume::default()
    };
    let ntfs = capability(AccessType::Mount(ntfs), Mode::SingleNodeWriter);
    let mut both = request("pvc-x", GIB, mount());
    both.volume_capabilities.push(block());
    let mut copied = request("pvc-x", GIB, mount());
    copied.volume_content_source = Some(VolumeContentSource {
        r#type: Some(volume_content_source::Type::Volume(
            volume_content_source::VolumeSource {
                volume_id: "pvc-y".to_owned(),
            },
        )),
    });
    let mut mutable = request("pvc-x", GIB, mount());
    mutable.mutable_parameters = [("thick".to_owned(), "true".to_owned())].into();
    let bad = [
        request("pvc-x", GIB, many),
        request("pvc-x", GIB, ntfs),
        request("", GIB, mount()),
        with(request("pvc-x", GIB, mount()), &[("replicas", "9")]),
        with(request("pvc-x", GIB, mount()), &[("colour", "red")]),
        both,
        copied,
        mutable,
    ];
    for request in bad {
        let refused = caller.create_with(request).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(!refused.message().is_empty());
    }
    let mut controller = caller.driver.controller.clone();
    let refused = caller.wait(controller.create_snapshot(CreateSnapshotRequest {}));
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    assert!(refused.message().contains("Snapshots"), "{refused}");
    assert_eq!(leftovers(&caller), Vec::<String>::new());
}
