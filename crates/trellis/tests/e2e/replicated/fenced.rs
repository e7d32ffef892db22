//! A target that was replaced while it was frozen, and wakes up: here the test plays the target that took its place.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use bytes::Bytes;
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use trellis_engine::drive::{Address, Ended, Volume, VolumeSettings};
use trellis_engine::proto::{Config, ReplicaId, Term};

use super::{end, process, run_dir, service_told, successor};
use crate::harness::{Service, claim};

const BLOCK: usize = 4096;
/// Where the user writes, and where the target that took over does.
const USERS: u64 = 0;
const OTHERS: u64 = 64 << 20;

/// The device, past the cache.
fn open(device: &Path) -> File {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let mut options = File::options();
    options.read(true).write(true).custom_flags(direct);
    options.open(device).unwrap()
}

/// Does something with a block whose place in memory suits direct I/O.
fn with_block<T>(byte: u8, act: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut memory = vec![byte; 2 * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    act(&mut memory[start..start + BLOCK])
}

fn write(device: &Path, at: u64, byte: u8) -> std::io::Result<()> {
    let device = open(device);
    with_block(byte, |block| device.write_all_at(block, at))?;
    device.sync_all()
}

fn assert_has(device: &Path, at: u64, byte: u8) {
    let device = open(device);
    let found = with_block(0, |block| {
        device.read_exact_at(block, at).unwrap();
        block.to_vec()
    });
    assert!(
        found.iter().all(|each| *each == byte),
        "{byte} is not at {at}"
    );
}

/// Takes the copies over, as a target with the same settings does.
fn take_over(service: &Service) -> Volume {
    let settings = std::fs::read(run_dir(service).join("target.json")).unwrap();
    let settings: Value = serde_json::from_slice(&settings).unwrap();
    let addresses = settings["addresses"].as_object().unwrap().iter();
    let addresses: BTreeMap<ReplicaId, Address> = addresses
        .map(|(id, at)| (id.parse().unwrap(), at.as_str().unwrap().parse().unwrap()))
        .collect();
    let members: BTreeSet<ReplicaId> = addresses.keys().copied().collect();
    assert_eq!(members.len(), 3);
    let id = settings["volumeId"].as_str().unwrap().parse().unwrap();
    let term = u32::try_from(settings["term"].as_u64().unwrap()).unwrap();
    Volume::start(VolumeSettings {
        term: Term::new(term),
        ..VolumeSettings::new(id, Config::majority(members), addresses)
    })
}

// Fails if a target that wakes up goes on serving although another one has taken over, if it overwrites what that one
// made durable, or if whoever uses the volume sees an error.
#[test]
fn a_frozen_target_that_wakes_after_it_was_replaced_is_fenced() {
    let service = service_told(&["--silent-target-seconds", "3600"]);
    let block = claim("data", "three", "128Mi");
    service.apply(&block.replace("spec:\n", "spec:\n  volumeMode: Block\n"));
    service.wait_bound("data");
    let device = service.mount("data");
    write(&device, USERS, 1).unwrap();
    let frozen = process(&service, "target");
    kill_process(frozen, Signal::STOP).unwrap();
    // The frozen one has this request before it when it wakes.
    let place = device.clone();
    let writer = std::thread::spawn(move || write(&place, USERS, 2));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _runtime = runtime.enter();
    let other = take_over(&service);
    runtime.block_on(async {
        other.ready().await.unwrap();
        let found = other.read(USERS, 4096).await.unwrap().concat();
        assert!(found == [1; BLOCK], "what was durable is not there");
        let data = vec![Bytes::from(vec![3; BLOCK])];
        other.write(OTHERS, data, true).await.unwrap();
    });
    assert!(!writer.is_finished(), "its target is frozen");
    kill_process(frozen, Signal::CONT).unwrap();
    // It learns from the copies that it may not serve any more, and ends; its successor answers the user.
    successor(&service, frozen);
    let log = std::fs::read_to_string(run_dir(&service).join("target.log")).unwrap();
    assert!(log.contains("another target has taken over"), "{log}");
    service.wait("the write is answered", |_| {
        writer.is_finished().then_some(())
    });
    writer.join().unwrap().unwrap();
    assert!(matches!(
        runtime.block_on(other.ended()),
        Ended::Deposed { .. }
    ));
    assert_has(&device, USERS, 2);
    assert_has(&device, OTHERS, 3);
    end(&service, &device);
}
