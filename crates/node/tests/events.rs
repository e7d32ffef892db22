//! The kernel's own events: devices that change, mounts that come and go.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::Duration;

use common::{Bench, eventually, set_size};
use trellis_api::Bytes;
use trellis_node::filesystem::FilesystemKind;
use trellis_node::sys::events::{DeviceChange, DeviceEvent, DeviceEvents, MountEvent, MountEvents};
use trellis_node::volume;

const A_WHILE: Duration = Duration::from_millis(100);

#[test]
fn a_device_that_grows_and_one_that_goes_are_told() {
    // Fails if the kernel's message is not received, is read wrongly, or is taken for another device's.
    let bench = Bench::new();
    let file = bench.file("v", Bytes::mib(16));
    let device = volume::attach(&file, false).unwrap();
    let events = DeviceEvents::open().unwrap();
    set_size(&file, Bytes::mib(32));
    volume::grow_device(&file, Bytes::mib(32)).unwrap();
    let told = |wanted: DeviceChange| {
        events.wait(A_WHILE).unwrap();
        events.read_events().unwrap().into_iter().any(|event| {
            matches!(event, DeviceEvent::Device { number, name, change }
                if number == device.number && device.path.ends_with(&name) && change == wanted)
        })
    };
    eventually("the growth is told", || told(DeviceChange::Resized));
    volume::detach(&file).unwrap();
    eventually("the loss of the file is told", || {
        told(DeviceChange::Changed)
    });
}

#[test]
fn a_mount_is_told_when_it_comes_when_it_changes_and_when_it_goes() {
    // Fails if the watcher is not woken, tells what was there before, or misses a change.
    let bench = Bench::new();
    let backing = bench.file("v", Bytes::mib(320));
    let (kind, staging) = (FilesystemKind::Xfs, bench.path("m"));
    let device = volume::attach(&backing, false).unwrap();
    volume::ensure_filesystem(&device.path, kind, &bench.path("n")).unwrap();
    let mut events = MountEvents::open().unwrap();
    let mut next = |what: &str| {
        let mut found = Vec::new();
        eventually(what, || {
            events.wait(A_WHILE).unwrap();
            let events = events.read_events().unwrap();
            found.extend(
                events
                    .into_iter()
                    .filter(|event| event.mount().mount_point == staging),
            );
            !found.is_empty()
        });
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    };
    volume::stage(&device.path, kind, &staging, true).unwrap();
    assert!(matches!(next("it comes"), MountEvent::Mounted(mount) if mount.is_of(device.number)));
    volume::stage(&device.path, kind, &staging, false).unwrap();
    assert!(matches!(next("it changes"), MountEvent::Changed(mount) if !mount.read_only()));
    volume::unstage(&staging, Some(device.number)).unwrap();
    assert!(matches!(next("it goes"), MountEvent::Unmounted(_)));
    volume::detach(&backing).unwrap();
}

#[test]
fn the_watcher_of_mounts_sleeps_until_one_changes() {
    // Fails if the descriptor is not woken by a change: the wait would then last its whole hour.
    let bench = Bench::new();
    let events = MountEvents::open().unwrap();
    let volume = bench.volume("v", FilesystemKind::Btrfs, Bytes::mib(160));
    assert!(events.wait(Duration::from_secs(3600)).unwrap());
    volume.take_down();
}
