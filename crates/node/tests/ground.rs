//! Which filesystem a directory is on, on real filesystems, and whether it can be a pool.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::{Bench, run};
use trellis_api::Bytes;
use trellis_node::filesystem::FilesystemKind;
use trellis_node::ground::{OtherPool, Unfit, filesystem_of, require_fit};

// Fails if subvolumes of one btrfs, which share all space and have device numbers of their own, look like two disks.
#[test]
fn subvolumes_of_one_btrfs_are_one_filesystem() {
    let bench = Bench::new();
    let volume = bench.volume("disk", FilesystemKind::Btrfs, Bytes::mib(256));
    let pools = ["a", "b"].map(|name| {
        let path = volume.staging.join(name);
        run("btrfs", &["subvolume", "create", path.to_str().unwrap()]);
        path
    });
    let [first, second] = pools.each_ref().map(|path| path.metadata().unwrap().dev());
    assert_ne!(first, second, "or there is nothing to tell apart");
    let [first, second] = pools.each_ref().map(|path| filesystem_of(path).unwrap());
    assert_eq!(first, second);
    assert!(first.starts_with("btrfs "), "{first}");
}

// Fails if two filesystems of a kind are taken for one, or one for another after it was mounted anew.
#[test]
fn every_filesystem_has_a_name_of_its_own_and_keeps_it() {
    let bench = Bench::new();
    for kind in [
        FilesystemKind::Xfs,
        FilesystemKind::Btrfs,
        FilesystemKind::Ext4,
    ] {
        let [one, other] = ["one", "other"]
            .map(|name| bench.volume(&format!("{name}-{kind}"), kind, Bytes::mib(320)));
        let known = filesystem_of(&one.staging).unwrap();
        assert_ne!(known, filesystem_of(&other.staging).unwrap());
        assert_ne!(known, filesystem_of(Path::new("/")).unwrap());
        let deeper = one.staging.join("deeper");
        std::fs::create_dir(&deeper).unwrap();
        assert_eq!(known, filesystem_of(&deeper).unwrap());
        one.take_down();
        let device = trellis_node::volume::attach(&one.backing, false).unwrap();
        trellis_node::volume::stage(&device.path, kind, &one.staging, false).unwrap();
        assert_eq!(known, filesystem_of(&one.staging).unwrap());
    }
}

// Fails if the copy of another service, shown by its loop device, or a directory that a bind mount shows again, becomes
// a pool.
#[test]
fn what_is_a_pool_or_a_volume_already_is_found_by_what_it_is() {
    let bench = Bench::new();
    let data = bench.dir("data");
    std::fs::create_dir_all(bench.path("pool/replicas/pvc-x-0")).unwrap();
    let copy = "pool/replicas/pvc-x-0/data";
    let volume = bench.volume(copy, FilesystemKind::Ext4, Bytes::mib(64));
    let found = require_fit(&volume.staging, &data, &[]).unwrap();
    assert!(matches!(found, Err(Unfit::OnVolume { .. })), "{found:?}");
    let (pool, again) = (bench.path("pool"), bench.dir("again"));
    let shown = [pool.to_str().unwrap(), again.to_str().unwrap()];
    run("mount", &["--bind", shown[0], shown[1]]);
    let others = [OtherPool {
        name: "a".to_owned(),
        path: pool,
    }];
    let found = require_fit(&again, &data, &others).unwrap();
    assert!(matches!(found, Err(Unfit::SamePool { .. })), "{found:?}");
    assert_eq!(
        require_fit(&bench.dir("free"), &data, &others).unwrap(),
        Ok(())
    );
}

// Fails if a filesystem that somebody mounted below `/dev` is refused, or what the kernel has there is not.
#[test]
fn a_mount_below_the_kernels_own_directories_is_judged_by_what_it_is() {
    let bench = Bench::new();
    let data = bench.dir("data");
    let in_memory = tempfile::tempdir_in("/dev/shm").unwrap();
    assert_eq!(require_fit(in_memory.path(), &data, &[]).unwrap(), Ok(()));
    for of_the_kernel in ["/dev", "/dev/pts", "/proc/sys", "/sys/kernel"] {
        let found = require_fit(Path::new(of_the_kernel), &data, &[]).unwrap();
        assert!(matches!(found, Err(Unfit::System { .. })), "{found:?}");
    }
}
