//! Loop devices on real files.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;

use common::{Bench, set_size};
use rustix::fs::FallocateFlags;
use trellis_api::Bytes;
use trellis_node::Error;
use trellis_node::filesystem::Outcome;
use trellis_node::sys::{block, loopdev};
use trellis_node::volume::{self, Source, attach, detach, grow_device};

#[test]
fn a_device_is_attached_once_and_adopted_by_whoever_asks_again() {
    // Fails if a second call makes a second device, or if a detached device stays.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(4));
    let first = attach(&file, false).unwrap();
    let second = attach(&file, false).unwrap();
    assert!(!first.adopted && second.adopted);
    assert_eq!(first.path, second.path);
    assert_eq!(first.size, Bytes::mib(4));
    let node = File::open(&first.path).unwrap();
    assert_eq!(block::logical_block(&node).unwrap(), loopdev::LOGICAL_BLOCK);
    drop(node);
    assert!(detach(&file).unwrap());
    assert!(!detach(&file).unwrap());
    assert_eq!(loopdev::find(&file).unwrap(), None);
}

#[test]
fn a_device_is_found_by_the_files_identity_and_not_by_its_name() {
    // Fails if a renamed file loses its device, or if its old name inherits it.
    let bench = Bench::new();
    let file = bench.file("old", Bytes::mib(4));
    let device = attach(&file, false).unwrap();
    let renamed = bench.path("new");
    fs::rename(&file, &renamed).unwrap();
    bench.file("old", Bytes::mib(4));
    assert_eq!(attach(&renamed, false).unwrap().path, device.path);
    let other = attach(&file, false).unwrap();
    assert_ne!(other.path, device.path);
    assert!(detach(&renamed).unwrap());
    assert!(detach(&file).unwrap());
}

#[test]
fn a_device_whose_file_was_deleted_is_recognised_and_detached() {
    // Fails if a deleted file's device stays for ever, or if a new file of that name gets it.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(4));
    let device = attach(&file, false).unwrap();
    fs::remove_file(&file).unwrap();
    let status = loopdev::status_of(&device.path).unwrap().unwrap();
    assert!(status.backing_deleted);
    assert_eq!(status.backing_hint, file);
    assert!(detach(&file).unwrap());
    assert!(
        loopdev::list()
            .unwrap()
            .iter()
            .all(|other| other.backing_hint != file)
    );
}

#[test]
fn a_file_that_grew_raises_its_device_and_a_shorter_one_never_lowers_it() {
    // Fails if the size is not read back, if a raise is repeated, or if a device shrinks.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(4));
    attach(&file, false).unwrap();
    assert_eq!(
        grow_device(&file, Bytes::mib(4)).unwrap(),
        Outcome::Unchanged {
            size: Bytes::mib(4)
        }
    );
    let error = grow_device(&file, Bytes::mib(8)).unwrap_err();
    assert!(
        matches!(error, Error::NotRaised { measured, .. } if measured == Bytes::mib(4)),
        "{error}"
    );
    set_size(&file, Bytes::mib(8));
    let raised = Outcome::Raised {
        from: Bytes::mib(4),
        to: Bytes::mib(8),
    };
    assert_eq!(grow_device(&file, Bytes::mib(8)).unwrap(), raised);
    set_size(&file, Bytes::mib(2));
    let error = grow_device(&file, Bytes::mib(2)).unwrap_err();
    assert!(
        matches!(error, Error::WouldShrink { current, .. } if current == Bytes::mib(8)),
        "{error}"
    );
    let node = File::open(loopdev::find(&file).unwrap().unwrap().path).unwrap();
    assert_eq!(block::size(&node).unwrap(), Bytes::mib(8));
    drop(node);
    detach(&file).unwrap();
}

#[test]
fn a_partial_last_sector_is_not_part_of_the_device() {
    // Fails if a size that is no multiple of a sector makes growth wait for bytes that never come.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::new((4 << 20) + 511));
    assert_eq!(attach(&file, false).unwrap().size, Bytes::mib(4));
    set_size(&file, Bytes::new((4 << 20) + 1000));
    let outcome = grow_device(&file, Bytes::mib(4)).unwrap();
    assert_eq!(outcome.size(), Bytes::new((4 << 20) + 512));
    detach(&file).unwrap();
}

#[test]
fn a_read_only_device_refuses_writes_and_is_not_adopted_for_writing_while_in_use() {
    // Fails if read-only is lost on the way, or if a caller gets the other mode than asked for.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(4));
    let device = attach(&file, true).unwrap();
    assert!(device.read_only);
    // Some kernels refuse to open it for writing, others refuse the write.
    let written = OpenOptions::new()
        .write(true)
        .open(&device.path)
        .and_then(|node| {
            node.write_all_at(&[1; 512], 0)?;
            node.sync_all()
        });
    assert!(written.is_err());
    let claim = block::open_exclusive(&device.path).unwrap();
    let error = attach(&file, false).unwrap_err();
    drop(claim);
    assert!(
        matches!(
            error,
            Error::AttachedInOtherMode {
                found_read_only: true,
                ..
            }
        ),
        "{error}"
    );
    detach(&file).unwrap();
}

#[test]
fn an_idle_device_changes_its_mode_with_its_next_user() {
    // Fails if a volume that was last read, or last written, can never be used the other way again.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(4));
    for read_only in [true, false, true] {
        let device = attach(&file, read_only).unwrap();
        assert_eq!((device.read_only, device.adopted), (read_only, false));
        let devices = loopdev::list().unwrap();
        let on_file = devices.iter().filter(|each| each.backing_hint == file);
        assert_eq!(on_file.count(), 1);
    }
    detach(&file).unwrap();
}

#[test]
fn a_device_in_use_keeps_its_mode_and_outlives_the_attempt_to_change_it() {
    // Fails if a published or open device is taken away, at once or when its user closes it.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(4));
    let device = attach(&file, false).unwrap();
    let refused = || {
        let error = attach(&file, true).unwrap_err();
        let in_other_mode = matches!(
            error,
            Error::AttachedInOtherMode {
                found_read_only: false,
                ..
            }
        );
        assert!(in_other_mode, "{error}");
        let found = loopdev::find(&file).unwrap().unwrap();
        assert_eq!((&found.path, found.autoclear), (&device.path, false));
    };
    let path = bench.path("disk");
    let source = Source::Block {
        device: &device.path,
    };
    volume::publish(source, &path, false).unwrap();
    refused();
    volume::unpublish(&path, Some(device.number)).unwrap();
    let open = File::open(&device.path).unwrap();
    refused();
    drop(open);
    assert!(loopdev::find(&file).unwrap().is_some());
    assert!(attach(&file, true).unwrap().read_only);
    detach(&file).unwrap();
}

#[test]
fn discarded_blocks_leave_the_backing_file() {
    // Fails if a discard does not reach the file as a hole: deleted data would keep its space.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(8));
    let device = attach(&file, false).unwrap();
    let node = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&device.path)
        .unwrap();
    node.write_all_at(&vec![7; 8 << 20], 0).unwrap();
    node.sync_all().unwrap();
    let full = fs::metadata(&file).unwrap().blocks();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&node, hole, 0, 8 << 20).unwrap();
    node.sync_all().unwrap();
    drop(node);
    assert!(fs::metadata(&file).unwrap().blocks() < full / 2);
    detach(&file).unwrap();
}

#[test]
fn an_open_device_is_reported_busy_with_its_holder_and_goes_with_the_last_close() {
    // Fails if detach claims success while the device lives, or does not name who has it open.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(4));
    let device = attach(&file, false).unwrap();
    let held = File::open(&device.path).unwrap();
    let error = detach(&file).unwrap_err();
    let Error::Busy { holders, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        holders
            .iter()
            .any(|holder| holder.pid == std::process::id()),
        "{error}"
    );
    // An interrupted detach is taken back by attaching again.
    assert!(attach(&file, false).unwrap().adopted);
    drop(held);
    assert_eq!(attach(&file, false).unwrap().path, device.path);
    assert!(detach(&file).unwrap());
}

#[test]
fn eight_volumes_attached_at_once_get_eight_devices() {
    // Fails if a race for a free device is lost for good, or two files end on one device.
    let bench = Bench::new();
    let files: Vec<_> = (0..8)
        .map(|index| bench.file(&format!("f{index}"), Bytes::mib(2)))
        .collect();
    let mut devices: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = files
            .iter()
            .map(|file| scope.spawn(|| attach(file, false).unwrap()))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap().path)
            .collect()
    });
    devices.sort();
    devices.dedup();
    assert_eq!(devices.len(), 8);
    thread::scope(|scope| {
        for file in &files {
            scope.spawn(|| assert!(detach(file).unwrap()));
        }
    });
}

#[test]
fn many_callers_for_one_file_share_one_device() {
    // Fails if two threads that attach the same file at once make two devices on it.
    let bench = Bench::new();
    let file = bench.file("a", Bytes::mib(2));
    let mut devices: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| attach(&file, false).unwrap()))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap().path)
            .collect()
    });
    devices.dedup();
    assert_eq!(devices.len(), 1);
    assert!(detach(&file).unwrap());
}

#[test]
fn a_file_system_without_direct_io_is_served_buffered_and_says_so() {
    // Fails if the answer about direct I/O is not what the kernel has set, on disk or in memory.
    let bench = Bench::new();
    let memory = bench.dir("memory");
    rustix::mount::mount(
        "tmpfs",
        &memory,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        None,
    )
    .unwrap();
    for file in [memory.join("a"), bench.path("a")] {
        set_size(&file, Bytes::mib(4));
        let device = attach(&file, false).unwrap();
        let name = device.path.file_name().unwrap().to_str().unwrap();
        let shown = fs::read_to_string(format!("/sys/block/{name}/loop/dio")).unwrap();
        assert_eq!(shown.trim() == "1", device.direct_io);
        assert!(detach(&file).unwrap());
    }
}

#[test]
fn observing_nothing_answers_nothing() {
    // Fails if a volume that was never attached is an error.
    let bench = Bench::new();
    let seen = volume::observe(&bench.path("absent"), &bench.path("m")).unwrap();
    assert_eq!(
        (seen.backing, seen.device, seen.staged),
        (None, None, false)
    );
}
