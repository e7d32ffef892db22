//! Growths that the kernel refuses, or that must not be tried: each has a name, and changes nothing.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;
use std::process::{Command, Stdio};

use common::{Bench, Volume, can_grow_ext, run, set_size, shut_down};
use trellis_api::{Bytes, HoldReason};
use trellis_node::Error;
use trellis_node::filesystem::{self, FilesystemKind, Outcome, Outgrown};
use trellis_node::volume;

const EXT: [FilesystemKind; 2] = [FilesystemKind::Ext4, FilesystemKind::Ext3];
/// How often the balance that is to be paused may end before the pause reaches it.
const PAUSE_ATTEMPTS_MAX: usize = 20;

/// Raises what is below the filesystem.
fn raise_device(volume: &Volume, to: Bytes) {
    set_size(&volume.backing, to);
    volume::grow_device(&volume.backing, to).unwrap();
}

fn grow(volume: &Volume) -> trellis_node::Result<Outcome> {
    volume::grow_filesystem(volume.kind, &volume.staging, &volume.device.path)
}

fn measured(volume: &Volume) -> Bytes {
    let (kind, device) = (volume.kind, &volume.device.path);
    filesystem::measure_mounted(kind, &volume.staging, device)
        .unwrap()
        .size()
}

/// A mounted filesystem that another program made with `arguments`.
fn made_by(
    bench: &Bench,
    program: &str,
    arguments: &[&str],
    size: Bytes,
    kind: FilesystemKind,
) -> Volume {
    let backing = bench.file("v", size);
    run(program, &[arguments, &[backing.to_str().unwrap()]].concat());
    let (device, staging) = (
        volume::attach(&backing, false).unwrap(),
        bench.path("v.mount"),
    );
    volume::stage(&device.path, kind, &staging, false).unwrap();
    Volume {
        backing,
        staging,
        device,
        kind,
    }
}

#[test]
fn recorded_errors_are_told_from_a_missing_capability() {
    // Fails if the driver's EPERM is read without the superblock, or if the repair is not named.
    for kind in EXT {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, Bytes::mib(64));
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        let device = volume.device.path.to_str().unwrap();
        // This sets the flag of recorded errors.
        run("tune2fs", &["-E", "force_fsck", device]);
        volume::stage(&volume.device.path, kind, &volume.staging, false).unwrap();
        raise_device(&volume, Bytes::mib(128));
        let error = grow(&volume).unwrap_err();
        assert!(matches!(error, Error::FilesystemErrors { .. }), "{error:?}");
        assert!(
            error.to_string().contains(&format!("e2fsck -f {device}")),
            "{error}"
        );
        assert_eq!(measured(&volume), Bytes::mib(64));
        volume.take_down();
    }
}

#[test]
fn a_read_only_ext_is_told_from_a_missing_capability() {
    // Fails if EROFS is taken for damage, or if the capability is blamed where it is there.
    for kind in EXT {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, Bytes::mib(64));
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        volume::stage(&volume.device.path, kind, &volume.staging, true).unwrap();
        raise_device(&volume, Bytes::mib(128));
        let expected = match can_grow_ext() {
            true => HoldReason::ReadOnly,
            false => HoldReason::MissingCapability,
        };
        assert_eq!(grow(&volume).unwrap_err().reason(), expected);
        volume.take_down();
    }
}

#[test]
fn a_filesystem_that_has_shut_itself_down_is_not_called_damaged() {
    // Fails if a stopped filesystem is reported as anything that a repair of an idle one would mend.
    let kinds = match can_grow_ext() {
        true => &[
            FilesystemKind::Xfs,
            FilesystemKind::Ext4,
            FilesystemKind::Ext3,
        ][..],
        false => &[FilesystemKind::Xfs][..],
    };
    for kind in kinds {
        let bench = Bench::new();
        let volume = bench.volume("v", *kind, Bytes::mib(320));
        raise_device(&volume, Bytes::mib(640));
        shut_down(&volume.staging);
        let error = grow(&volume).unwrap_err();
        assert!(matches!(error, Error::FilesystemDown { .. }), "{error:?}");
        // Mounted again, its journal is replayed, and it grows.
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        volume::stage(&volume.device.path, *kind, &volume.staging, false).unwrap();
        assert!(matches!(grow(&volume).unwrap(), Outcome::Raised { .. }));
        volume.take_down();
    }
}

#[test]
fn a_growth_beside_another_exclusive_operation_waits_for_its_turn() {
    // Fails if btrfs's positive answer is taken for success, or for an error that does not pass.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Btrfs, Bytes::mib(400));
    common::fill(&volume.staging.join("data"), 5, 200 << 20);
    let staging = volume.staging.to_str().unwrap();
    let mut paused = false;
    for _ in 0..PAUSE_ATTEMPTS_MAX {
        let balance = ["balance", "start", "--full-balance", staging];
        let mut child = Command::new("btrfs")
            .args(balance)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pause = ["balance", "pause", staging];
        while !paused && child.try_wait().unwrap().is_none() {
            let output = Command::new("btrfs").args(pause).output().unwrap();
            paused = output.status.success();
        }
        child.wait().unwrap();
        if paused {
            break;
        }
    }
    assert!(paused, "no balance could be paused");
    raise_device(&volume, Bytes::mib(800));
    let error = grow(&volume).unwrap_err();
    assert!(matches!(error, Error::OperationRunning { .. }), "{error:?}");
    run("btrfs", &["balance", "cancel", staging]);
    assert_eq!(grow(&volume).unwrap().size(), Bytes::mib(800));
    volume.take_down();
}

#[test]
fn a_device_that_ends_before_its_filesystem_is_named() {
    // Fails if a cut-off device passes for a filesystem that is as large as it can be.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Xfs, Bytes::mib(320));
    volume.grow(Bytes::mib(640));
    set_size(&volume.backing, Bytes::mib(600));
    let short = volume::grow_device(&volume.backing, Bytes::mib(640)).unwrap_err();
    assert!(matches!(short, Error::WouldShrink { .. }), "{short:?}");
    run("losetup", &["-c", volume.device.path.to_str().unwrap()]);
    let error = grow(&volume).unwrap_err();
    assert!(matches!(error, Error::DeviceCutOff { .. }), "{error:?}");
    assert_eq!(error.reason(), HoldReason::DeviceShrunk);
    raise_device(&volume, Bytes::mib(640));
    assert!(matches!(grow(&volume).unwrap(), Outcome::Unchanged { .. }));
    volume.take_down();
}

#[test]
fn a_size_above_what_the_geometry_can_reach_is_refused_before_it_is_tried() {
    // Fails if the limit of 32-bit block or inode numbers is left to the driver, which overflows or says EINVAL.
    let by_blocks = ["-q", "-b", "1024", "-O", "^64bit"];
    let by_inodes = ["-q", "-b", "1024", "-i", "1024", "-I", "128"];
    let cases = [
        (&by_blocks[..], (4 << 40) - 1024),
        (&by_inodes[..], (4 << 40) - (8 << 20) + 1024),
    ];
    for (arguments, expected) in cases {
        let bench = Bench::new();
        let kind = FilesystemKind::Ext4;
        let volume = made_by(&bench, "mkfs.ext4", arguments, Bytes::mib(64), kind);
        raise_device(&volume, Bytes::gib(5000));
        let error = grow(&volume).unwrap_err();
        assert!(
            matches!(error, Error::GeometryLimit { limit, .. } if limit == Bytes::new(expected)),
            "{error}"
        );
        assert_eq!(measured(&volume), Bytes::mib(64));
        volume.take_down();
    }
}

#[test]
fn an_outgrown_xfs_is_told_and_one_made_to_grow_is_none_at_the_same_size() {
    // Fails if the number of groups is not counted, or if our own geometry is as bad as the default one.
    let bench = Bench::new();
    let (kind, size) = (FilesystemKind::Xfs, Bytes::mib(320));
    let foreign = made_by(&bench, "mkfs.xfs", &["-q"], size, kind);
    let other = Bench::new();
    let own = other.volume("v", kind, size);
    let outgrown = |volume: &Volume| {
        volume.grow(Bytes::gib(200));
        let seen = volume::observe(&volume.backing, &volume.staging).unwrap();
        seen.filesystem.unwrap().geometry.outgrown()
    };
    assert!(matches!(outgrown(&foreign), Some(Outgrown::Groups { groups }) if groups > 2048));
    assert_eq!(outgrown(&own), None);
    foreign.take_down();
    own.take_down();
}

#[test]
fn an_ext_made_small_keeps_its_descriptors_together_and_has_inodes_when_it_is_large() {
    // Fails if the reserve does not last for a thousandfold growth, or if a small start means few inodes.
    for kind in EXT {
        let bench = Bench::new();
        let backing = bench.file("v", Bytes::mib(16));
        let device = volume::attach(&backing, false).unwrap();
        volume::ensure_filesystem(&device.path, kind, &bench.path("n")).unwrap();
        volume::detach(&backing).unwrap();
        set_size(&backing, Bytes::gib(16));
        let file = backing.to_str().unwrap();
        run("e2fsck", &["-fp", file]);
        run("resize2fs", &[file]);
        let grown = filesystem::measure_idle(kind, &backing).unwrap();
        assert_eq!(grown.size(), Bytes::gib(16));
        assert_eq!(grown.outgrown(), None);
        let filesystem::Geometry::Ext(shape) = grown else {
            panic!("{grown:?}")
        };
        assert_eq!(shape.inodes_in_group, 8192);
        fs::remove_file(&backing).unwrap();
    }
}
