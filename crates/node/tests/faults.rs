//! What others do to a volume behind our back: each is seen for what it is, and nothing is lost by it.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use common::{Bench, Process, Volume, eventually, fill, run, set_size, shut_down, verify};
use trellis_api::{Bytes, HoldReason};
use trellis_node::filesystem::FilesystemKind;
use trellis_node::volume::{self, Fault, Observation, Source};
use trellis_node::{Error, sys::loopdev};

const SIZE: Bytes = Bytes::mib(320);

fn observe(volume: &Volume) -> Observation {
    volume::observe(&volume.backing, &volume.staging).unwrap()
}

/// A volume with data, seen at a consumer's path.
fn in_use(bench: &Bench, kind: FilesystemKind) -> (Volume, PathBuf) {
    let volume = bench.volume("v", kind, SIZE);
    let path = bench.path("consumer");
    let staging = &volume.staging;
    volume::publish(Source::Filesystem { staging }, &path, false).unwrap();
    fill(&path.join("data"), 3, 4 << 20);
    let seen = observe(&volume);
    assert_eq!(seen.faults, []);
    assert_eq!(seen.missing(true, std::slice::from_ref(&path)), []);
    (volume, path)
}

#[test]
fn mounts_that_somebody_took_away_are_missing_and_come_back() {
    // Fails if a volume passes for in use after its mounts are gone, or if bringing it back loses data.
    let bench = Bench::new();
    let (volume, path) = in_use(&bench, FilesystemKind::Xfs);
    let paths = [path.clone()];
    run("umount", &[path.to_str().unwrap()]);
    let gone = Fault::PathGone { path: path.clone() };
    let missing = observe(&volume).missing(true, &paths);
    assert_eq!(missing, std::slice::from_ref(&gone));
    run("umount", &[volume.staging.to_str().unwrap()]);
    assert_eq!(
        observe(&volume).missing(true, &paths),
        [Fault::MountGone, gone]
    );
    let (kind, device) = (volume.kind, &volume.device.path);
    let error = volume::grow_filesystem(kind, &volume.staging, device).unwrap_err();
    assert_eq!(error.reason(), HoldReason::MountGone, "{error}");
    volume::stage(device, kind, &volume.staging, false).unwrap();
    let staging = &volume.staging;
    volume::publish(Source::Filesystem { staging }, &path, false).unwrap();
    assert_eq!(observe(&volume).missing(true, &paths), []);
    verify(&path.join("data"), 3, 4 << 20);
    volume::unpublish(&path, Some(volume.device.number)).unwrap();
    volume.take_down();
}

#[test]
fn a_device_that_somebody_detached_is_seen_before_and_after_it_goes() {
    // Fails if a device that vanishes with its mount passes for one that stays, or its absence for use.
    let bench = Bench::new();
    let (volume, path) = in_use(&bench, FilesystemKind::Xfs);
    let device = volume.device.path.to_str().unwrap();
    run("losetup", &["-d", device]);
    assert_eq!(observe(&volume).faults, [Fault::DeviceLeaving]);
    // Attaching takes the detachment back.
    assert!(volume::attach(&volume.backing, false).unwrap().adopted);
    assert_eq!(observe(&volume).faults, []);
    volume::unpublish(&path, Some(volume.device.number)).unwrap();
    volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
    run("losetup", &["-d", device]);
    eventually("the device is gone", || {
        common::devices_on(&volume.backing) == 0
    });
    assert_eq!(observe(&volume).missing(true, &[path]), [Fault::DeviceGone]);
    let error = volume::grow_device(&volume.backing, SIZE).unwrap_err();
    assert_eq!(error.reason(), HoldReason::DeviceGone, "{error}");
    volume::attach(&volume.backing, false).unwrap();
    volume::detach(&volume.backing).unwrap();
}

/// ext shows in mountinfo that it has stopped since Linux 6.15; before, nothing tells until it is used.
fn ext_tells_that_it_stopped() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let numbers: Vec<u32> = release
        .split(['.', '-'])
        .map_while(|part| part.parse().ok())
        .collect();
    let tells = numbers
        .get(..2)
        .is_some_and(|version| version >= &[6, 15][..]);
    if !tells {
        println!("Linux {release}: ext does not show that it has stopped");
    }
    tells
}

#[test]
fn a_filesystem_that_has_stopped_is_observed_and_can_be_taken_down() {
    // Fails if a dead mount makes the observation fail, hides the device, or cannot be unmounted.
    let kinds = match ext_tells_that_it_stopped() {
        true => &[FilesystemKind::Xfs, FilesystemKind::Ext4][..],
        false => &[FilesystemKind::Xfs][..],
    };
    for kind in kinds.iter().copied() {
        let bench = Bench::new();
        let (volume, path) = in_use(&bench, kind);
        shut_down(&volume.staging);
        let seen = observe(&volume);
        assert_eq!(seen.faults, [Fault::FilesystemDown], "{kind}");
        assert_eq!(seen.filesystem, None);
        assert_eq!(seen.device.as_ref().unwrap().size, SIZE);
        assert!(seen.staged && seen.publications.len() == 1);
        volume::unpublish(&path, Some(volume.device.number)).unwrap();
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        volume::stage(&volume.device.path, kind, &volume.staging, false).unwrap();
        assert_eq!(observe(&volume).faults, []);
        verify(&volume.staging.join("data"), 3, 4 << 20);
        volume.take_down();
    }
}

#[test]
fn what_ends_before_what_it_carries_is_named_on_both_levels() {
    // Fails if a truncated file or a shrunken device passes unseen, or if restoring it is not enough.
    let bench = Bench::new();
    let (volume, path) = in_use(&bench, FilesystemKind::Xfs);
    volume.grow(Bytes::mib(640));
    set_size(&volume.backing, Bytes::mib(600));
    let (full, cut) = (Bytes::mib(640), Bytes::mib(600));
    let expected = Fault::BackingCutOff {
        backing: cut,
        device: full,
    };
    assert_eq!(observe(&volume).faults, [expected]);
    run("losetup", &["-c", volume.device.path.to_str().unwrap()]);
    let expected = Fault::DeviceCutOff {
        device: cut,
        filesystem: full,
    };
    assert_eq!(observe(&volume).faults, [expected]);
    set_size(&volume.backing, full);
    volume::grow_device(&volume.backing, full).unwrap();
    assert_eq!(observe(&volume).faults, []);
    verify(&path.join("data"), 3, 4 << 20);
    volume::unpublish(&path, Some(volume.device.number)).unwrap();
    volume.take_down();
}

#[test]
fn a_deleted_file_is_told_while_its_device_still_has_the_bytes() {
    // Fails if the device is lost sight of with the file's name, or if it is taken off the last bytes.
    let bench = Bench::new();
    let (volume, path) = in_use(&bench, FilesystemKind::Btrfs);
    fs::remove_file(&volume.backing).unwrap();
    let seen = observe(&volume);
    assert_eq!(seen.faults, [Fault::BackingDeleted]);
    assert_eq!(seen.device.unwrap().number, volume.device.number);
    verify(&path.join("data"), 3, 4 << 20);
    volume::unpublish(&path, Some(volume.device.number)).unwrap();
    volume.take_down();
}

#[test]
fn recorded_errors_of_a_mounted_ext_are_observed() {
    // Fails if damage is first noticed when a growth is refused.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Ext4, Bytes::mib(64));
    volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
    run(
        "tune2fs",
        &["-E", "force_fsck", volume.device.path.to_str().unwrap()],
    );
    assert_eq!(observe(&volume).faults, [Fault::RecordedErrors]);
    volume::stage(&volume.device.path, volume.kind, &volume.staging, false).unwrap();
    assert_eq!(observe(&volume).faults, [Fault::RecordedErrors]);
    volume.take_down();
}

#[test]
fn errors_that_btrfs_has_counted_are_told_and_keep_nothing_from_growing() {
    // Fails if bad bytes on the disk pass unseen, or if one bad block holds a growth for ever.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Btrfs, SIZE);
    let (marker, file) = ("trellis-looks-for-this-text", volume.staging.join("data"));
    fs::write(&file, marker.repeat(40_000)).unwrap();
    volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
    let backing = volume.backing.to_str().unwrap();
    let output = Command::new("grep")
        .args(["-abo", "-m1", marker, backing])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let offset = text.split(':').next().unwrap().parse().unwrap();
    let image = OpenOptions::new().write(true).open(backing).unwrap();
    image.write_all_at(b"changed", offset).unwrap();
    image.sync_all().unwrap();
    volume::stage(&volume.device.path, volume.kind, &volume.staging, false).unwrap();
    assert_eq!(observe(&volume).faults, []);
    fs::read(&file).unwrap_err();
    let faults = observe(&volume).faults;
    assert!(
        matches!(faults[..], [Fault::DeviceErrors { errors }] if errors > 0),
        "{faults:?}"
    );
    assert!(!faults[0].breaks_use());
    volume.grow(Bytes::mib(640));
    volume.take_down();
}

const OWNED: &str = "TRELLIS_TEST_OWNED";

#[test]
fn a_volume_belongs_to_one_process_until_it_ends() {
    // Fails if two agents work on one device, or if the death of the first does not free the volume.
    if let Ok(file) = std::env::var(OWNED) {
        let file = PathBuf::from(file);
        volume::attach(&file, false).unwrap();
        fs::write(file.with_extension("ready"), b"").unwrap();
        // Until it is killed, or for as long as a test may take.
        return std::thread::sleep(Duration::from_secs(600));
    }
    let name = "a_volume_belongs_to_one_process_until_it_ends";
    let bench = Bench::new();
    let file = bench.file("v", SIZE);
    let other = Process::of_this_test(name, &[(OWNED, file.to_str().unwrap())]);
    eventually("the other process has it", || {
        file.with_extension("ready").exists()
    });
    let pid = Some(other.0.id());
    let seen = volume::observe(&file, &bench.path("m")).unwrap();
    assert_eq!(seen.faults, [Fault::ForeignUse { pid }]);
    let refusals = [
        volume::attach(&file, false).map(drop),
        volume::grow_device(&file, SIZE).map(drop),
        volume::grow_idle(&file, FilesystemKind::Xfs).map(drop),
        volume::detach(&file).map(drop),
    ];
    for refusal in refusals {
        let error = refusal.unwrap_err();
        assert!(
            matches!(error, Error::ForeignUse { pid: found, .. } if found == pid),
            "{error}"
        );
    }
    assert!(loopdev::find(&file).unwrap().is_some());
    drop(other);
    // The device is still there, and the next process adopts it.
    assert!(volume::attach(&file, false).unwrap().adopted);
    let seen = volume::observe(&file, &bench.path("m")).unwrap();
    assert_eq!(seen.faults, []);
    assert!(volume::detach(&file).unwrap());
}
