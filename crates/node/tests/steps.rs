//! The named steps, in a process of their own because the hook is the process's.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Mutex;

use common::{Bench, set_size};
use trellis_api::Bytes;
use trellis_api::step::{self, Step};
use trellis_node::filesystem::FilesystemKind;
use trellis_node::volume;

static REACHED: Mutex<Vec<Step>> = Mutex::new(Vec::new());

#[test]
fn every_change_is_a_step_and_a_repetition_is_none() {
    // Fails if a change happens without its step, out of order, or again when nothing was to do.
    step::install_hook(|step| REACHED.lock().unwrap().push(step));
    let bench = Bench::new();
    let backing = bench.file("v", Bytes::mib(300));
    let (note, staging, path) = (bench.path("n"), bench.path("m"), bench.path("p"));
    let kind = FilesystemKind::Xfs;
    let bring_up = || {
        let device = volume::attach(&backing, false).unwrap();
        volume::ensure_filesystem(&device.path, kind, &note).unwrap();
        volume::stage(&device.path, kind, &staging, false).unwrap();
        volume::publish(
            volume::Source::Filesystem { staging: &staging },
            &path,
            true,
        )
        .unwrap();
        device
    };
    let device = bring_up();
    bring_up();
    set_size(&backing, Bytes::mib(600));
    for _ in 0..2 {
        volume::grow_device(&backing, Bytes::mib(600)).unwrap();
        volume::grow_filesystem(kind, &staging, &device.path).unwrap();
    }
    for _ in 0..2 {
        volume::unpublish(&path, Some(device.number)).unwrap();
        volume::unstage(&staging, Some(device.number)).unwrap();
        volume::detach(&backing).unwrap();
    }
    let expected = [
        Step::DeviceAttached,
        // The note that it is about to be formatted.
        Step::FileWritten,
        Step::FileInPlace,
        Step::FilesystemMade,
        Step::FilesystemMounted,
        Step::PathPublished,
        Step::DeviceRaised,
        Step::FilesystemRaised,
        Step::PathUnpublished,
        Step::FilesystemUnmounted,
        Step::DeviceDetached,
    ];
    assert_eq!(*REACHED.lock().unwrap(), expected);
}
