//! What many observations cost. Alone in its process, because the counts are the process's.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::path::PathBuf;

use common::{Bench, run};
use trellis_api::Bytes;
use trellis_node::sys::loopdev;
use trellis_node::volume;

const VOLUMES: usize = 12;

#[test]
fn a_device_that_is_known_is_asked_alone_and_never_believed() {
    // Fails if every observation asks all devices, if a remembered device is believed without asking it, or
    // if observations are not counted.
    let bench = Bench::new();
    let files: Vec<PathBuf> = (0..VOLUMES)
        .map(|index| bench.file(&format!("v{index}"), Bytes::mib(16)))
        .collect();
    for file in &files {
        volume::attach(file, false).unwrap();
    }
    let staging = bench.path("m");
    let (searches, observations) = (loopdev::searches(), volume::observations());
    for file in files.iter().chain(&files) {
        let seen = volume::observe(file, &staging).unwrap();
        assert!(seen.device.is_some());
    }
    assert_eq!(loopdev::searches(), searches);
    let counted = u64::try_from(2 * VOLUMES).unwrap();
    assert_eq!(volume::observations(), observations + counted);

    let idle = bench.file("idle", Bytes::mib(16));
    // Somebody gives the remembered device to another file.
    let device = loopdev::find(&files[0]).unwrap().unwrap().path;
    let node = device.to_str().unwrap();
    run("losetup", &["-d", node]);
    common::eventually("the device is free", || {
        loopdev::status_of(&device).unwrap().is_none()
    });
    run("losetup", &[node, idle.to_str().unwrap()]);
    assert_eq!(loopdev::find(&files[0]).unwrap(), None);
    assert_eq!(volume::observe(&files[0], &staging).unwrap().device, None);
    let found = volume::observe(&idle, &staging).unwrap().device.unwrap();
    assert_eq!(found.path, device);
    for file in files.iter().chain([&idle]) {
        volume::detach(file).unwrap();
    }
}
