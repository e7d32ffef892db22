//! Paths that lead nowhere, and paths where something hides the volume.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use common::Bench;
use rustix::mount::{MountFlags, UnmountFlags};
use trellis_api::Bytes;
use trellis_node::Error;
use trellis_node::error::PathProblem;
use trellis_node::filesystem::FilesystemKind;
use trellis_node::volume::{self, Source, publish, unpublish, unstage};

/// Mounts a memory filesystem over whatever is at the path.
fn cover(path: &Path) {
    rustix::mount::mount("tmpfs", path, "tmpfs", MountFlags::empty(), None).unwrap();
}

fn uncover(path: &Path) {
    rustix::mount::unmount(path, UnmountFlags::empty()).unwrap();
}

/// The error has to say that the volume is still there, and that the mount at `cover` hides it.
fn assert_covered(error: Error, cover: &Path) {
    let said = error.to_string();
    let Error::Busy { covered_by, .. } = error else {
        panic!("{error:?}")
    };
    let found = covered_by.expect("something covers it");
    assert_eq!(
        (found.fs_type.as_str(), found.mount_point.as_path()),
        ("tmpfs", cover)
    );
    assert!(said.contains("is covered by tmpfs"), "{said}");
}

#[test]
fn a_path_that_cannot_lead_anywhere_is_refused_and_has_nothing_to_undo() {
    // Fails if an impossible path is no typed error, or can never be unpublished after it was refused.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Ext4, Bytes::mib(16));
    let file = bench.path("file");
    fs::write(&file, "mine").unwrap();
    symlink(bench.path("loop"), bench.path("loop")).unwrap();
    let long_name = "n".repeat(256);
    let cases = [
        (file.join("p"), PathProblem::ParentNotADirectory),
        (file.join("p/q"), PathProblem::ParentNotADirectory),
        (bench.path("loop/p"), PathProblem::LinkLoop),
        (bench.path(&long_name), PathProblem::TooLong),
        (bench.path(&long_name).join("p"), PathProblem::TooLong),
        (bench.path(&"n/".repeat(3000)), PathProblem::TooLong),
    ];
    let filesystem = Source::Filesystem {
        staging: &volume.staging,
    };
    let block = Source::Block {
        device: &volume.device.path,
    };
    for (path, wanted) in &cases {
        for source in [filesystem, block] {
            match publish(source, path, false).unwrap_err() {
                Error::UnusablePath { reason, .. } => assert_eq!(reason, *wanted),
                other => panic!("{other:?}"),
            }
        }
        let device = Some(volume.device.number);
        assert!(!unpublish(path, device).unwrap(), "{wanted:?}");
        assert!(!unpublish(path, None).unwrap(), "{wanted:?}");
        assert!(!unstage(path, device).unwrap(), "{wanted:?}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    volume.take_down();
}

#[test]
fn a_covered_filesystem_is_busy_and_not_gone() {
    // Fails if a foreign mount on top of the volume's passes for the volume being gone.
    for kind in [FilesystemKind::Ext4, FilesystemKind::Btrfs] {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, Bytes::mib(128));
        let device = Some(volume.device.number);
        let path = bench.path("p");
        let source = Source::Filesystem {
            staging: &volume.staging,
        };
        publish(source, &path, false).unwrap();
        cover(&path);
        assert_covered(unpublish(&path, device).unwrap_err(), &path);
        uncover(&path);
        assert!(unpublish(&path, device).unwrap());

        cover(&volume.staging);
        assert_covered(
            unstage(&volume.staging, device).unwrap_err(),
            &volume.staging,
        );
        uncover(&volume.staging);
        volume.take_down();
    }
}

#[test]
fn a_volume_below_a_covered_directory_is_busy_and_not_gone() {
    // Fails if a mount over a directory above the path makes the volume there pass for gone.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Ext4, Bytes::mib(16));
    let device = Some(volume.device.number);
    let (above, parent) = (bench.dir("above"), bench.dir("above/parent"));
    let path = parent.join("p");
    let source = Source::Filesystem {
        staging: &volume.staging,
    };
    publish(source, &path, false).unwrap();
    for covered in [&parent, &above] {
        cover(covered);
        assert_covered(unpublish(&path, device).unwrap_err(), covered);
        uncover(covered);
    }
    assert!(unpublish(&path, device).unwrap());
    volume.take_down();
}

#[test]
fn a_covered_block_volume_is_busy_and_its_device_stays() {
    // Fails if a hidden path to the device is overlooked: it would show the device's next volume.
    let bench = Bench::new();
    let backing = bench.file("b", Bytes::mib(8));
    let device = volume::attach(&backing, false).unwrap();
    let parent = bench.dir("parent");
    let path = parent.join("disk");
    let source = Source::Block {
        device: &device.path,
    };
    publish(source, &path, false).unwrap();
    cover(&parent);
    assert_covered(unpublish(&path, Some(device.number)).unwrap_err(), &parent);
    let error = volume::detach(&backing).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    uncover(&parent);
    assert!(unpublish(&path, Some(device.number)).unwrap());
    assert!(volume::detach(&backing).unwrap());
}

#[test]
fn a_foreign_mount_with_nothing_of_ours_underneath_is_told_apart() {
    // Fails if a volume that is mounted elsewhere makes a foreign mount pass for a cover.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Ext4, Bytes::mib(16));
    let path = bench.dir("p");
    cover(&path);
    let error = unpublish(&path, Some(volume.device.number)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::UnusablePath {
                reason: PathProblem::OtherMount(_),
                ..
            }
        ),
        "{error}"
    );
    uncover(&path);
    volume.take_down();
}
