//! Pools that are out of space. These tests mount filesystems and therefore need root.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::small::Small;
use common::*;
use trellis_api::Bytes;
use trellis_engine::Error;
use trellis_engine::replica::{Outcome, Pool, Provisioning::*, Replica, Severity, check};

/// Writes until there is not one block left.
fn fill_up(dir: &Path) {
    let whole = File::open(dir).unwrap();
    let mut file = File::create(dir.join("ballast")).unwrap();
    let mut pebbles = 0;
    loop {
        let before = (file.metadata().unwrap().len(), pebbles);
        while file.write_all(&[1; 65536]).is_ok() {}
        while file.write_all(&[1; 1]).is_ok() {}
        let _ = file.sync_all();
        // ext4 sets blocks aside for small files, where a large one does not find them.
        while fs::write(dir.join(format!("pebble-{pebbles}")), [1; 4096]).is_ok() {
            pebbles += 1;
        }
        // A journal gives blocks that were freed back only when it has committed.
        rustix::fs::syncfs(&whole).unwrap();
        if (file.metadata().unwrap().len(), pebbles) == before {
            break;
        }
    }
    let one_more = file.write_all(&[1; 4096]).unwrap_err();
    assert_eq!(one_more.kind(), ErrorKind::StorageFull);
}

/// What a replica's data file looks like from outside: length and allocated bytes.
fn shape(replica: &Replica) -> (u64, u64) {
    let data = fs::metadata(replica.data_path()).unwrap();
    (data.len(), data.blocks() * 512)
}

fn free(dir: &Path) -> u64 {
    let space = rustix::fs::statvfs(dir).unwrap();
    space.f_bfree * space.f_frsize
}

fn refused(replica: &Replica, to: Bytes) {
    let from = replica.size();
    match replica.grow(to, Thick).unwrap_err() {
        Error::NoSpace { wanted, free, .. } => {
            assert_eq!(wanted, to.saturating_sub(from));
            assert!(free <= wanted, "{free} free is enough for {wanted}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(replica.measure().unwrap().superblock, from);
    assert_eq!(read_block(&replica.data_path(), 200), [5; 4096]);
}

fn a_thick_wish_that_is_too_large_leaves_everything(small: &Small) {
    let pool = Pool::open(&small.path()).unwrap();
    let replica = pool.create(NAME, identity(1), Bytes::MIB, Thick).unwrap();
    fill_block(&replica.data_path(), 200, 5);
    let before = shape(&replica);
    refused(&replica, Bytes::GIB);
    assert_eq!(shape(&replica), before, "space was not given back");

    let error = pool
        .create("other", identity(2), Bytes::GIB, Thick)
        .unwrap_err();
    assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    assert_eq!(pool.names().unwrap(), [NAME]);
    assert!(
        check(&small.path()).findings.is_empty(),
        "a failed creation left something"
    );

    // A crash has left a long and empty tail, so that only the filesystem knows what is missing.
    let length = ((1 << 20) + free(&small.path()) + (1 << 19)).next_multiple_of(BLOCK);
    File::options()
        .write(true)
        .open(replica.data_path())
        .unwrap()
        .set_len(length)
        .unwrap();
    refused(&replica, Bytes::new(length));
    assert_eq!(shape(&replica).0, length, "the tail was cut off");
}

fn a_full_pool_still_grows_thin(small: &Small) {
    let pool = Pool::open(&small.path()).unwrap();
    let replica = pool.create(NAME, identity(1), Bytes::MIB, Thin).unwrap();
    fill_block(&replica.data_path(), 255, 5);
    fill_up(&small.path());
    let mut from = Bytes::MIB;
    // More than two growths, so that both slots are overwritten while there is no space.
    for to in [Bytes::mib(2), Bytes::mib(3), Bytes::GIB, Bytes::gib(2)] {
        assert_eq!(
            replica.grow(to, Thin).unwrap(),
            Outcome::Raised { from, to }
        );
        from = to;
    }
    drop((pool, replica));
    let replica = reopen(&small.path());
    assert_eq!(replica.measure().unwrap().size(), Bytes::gib(2));
    assert_eq!(read_block(&replica.data_path(), 255), [5; 4096]);
    assert_eq!(read_block(&replica.data_path(), 256), [0; 4096]);
    assert!(check(&small.path()).findings.is_empty());
}

fn a_flaw_that_a_full_pool_cannot_repair_keeps_nobody_from_the_bytes(small: &Small) {
    let pool = Pool::open(&small.path()).unwrap();
    let replica = pool.create(NAME, identity(1), Bytes::MIB, Thin).unwrap();
    fill_block(&replica.data_path(), 200, 5);
    drop(replica);
    set_length(&replica_dir(&small.path()).join("superblock.a"), 0);
    fill_up(&small.path());
    let replica = pool.open_replica(NAME).unwrap();
    assert_eq!(replica.measure().unwrap().size(), Bytes::MIB);
    assert_eq!(read_block(&replica.data_path(), 200), [5; 4096]);
    // A growth would have only one superblock to rest on, so that it must fail and change nothing.
    assert!(matches!(
        replica.grow(Bytes::mib(2), Thin),
        Err(Error::Io { .. })
    ));
    assert_eq!(replica.measure().unwrap().size(), Bytes::MIB);
    assert_eq!(check(&small.path()).worst(), Some(Severity::Healable));

    fs::remove_file(small.path().join("ballast")).unwrap();
    replica.grow(Bytes::mib(3), Thin).unwrap();
    drop((pool, replica));
    assert_eq!(
        reopen(&small.path()).measure().unwrap().size(),
        Bytes::mib(3)
    );
    assert!(check(&small.path()).findings.is_empty());
}

#[test]
fn a_flaw_that_a_full_pool_cannot_repair_keeps_nobody_from_the_bytes_on_tmpfs() {
    // Fails if a full pool turns a flaw that costs nothing into a volume that does not open.
    a_flaw_that_a_full_pool_cannot_repair_keeps_nobody_from_the_bytes(&Small::tmpfs());
}

#[test]
fn a_flaw_that_a_full_pool_cannot_repair_keeps_nobody_from_the_bytes_on_ext4() {
    // Fails if a full pool turns a flaw that costs nothing into a volume that does not open.
    a_flaw_that_a_full_pool_cannot_repair_keeps_nobody_from_the_bytes(&Small::ext4());
}

#[test]
fn too_large_a_thick_wish_on_tmpfs_leaves_everything() {
    // Fails if no space is not a typed error with the numbers, or costs size, length or blocks.
    a_thick_wish_that_is_too_large_leaves_everything(&Small::tmpfs());
}

#[test]
fn too_large_a_thick_wish_on_ext4_leaves_everything() {
    // Fails if what ext4 had allocated before it ran out is not given back.
    a_thick_wish_that_is_too_large_leaves_everything(&Small::ext4());
}

#[test]
fn what_ext4_hands_out_before_it_runs_out_is_given_back() {
    // Fails if the undo of a partial allocation behind the end of the file is left out.
    let small = Small::ext4();
    let pool = Pool::open(&small.path()).unwrap();
    let replica = pool.create(NAME, identity(1), Bytes::MIB, Thick).unwrap();
    fill_block(&replica.data_path(), 200, 5);
    let (before, free_before) = (shape(&replica), free(&small.path()));
    // ext4 keeps some of what it calls free for itself, so that it gives up near the end.
    let to = Bytes::new(((1 << 20) + free_before) / BLOCK * BLOCK);
    refused(&replica, to);
    // Once it has grown, the tree in which ext4 keeps a file's extents stays a block larger.
    let (after, free_after) = (shape(&replica), free(&small.path()));
    assert_eq!(after.0, before.0);
    assert!(after.1 <= before.1 + BLOCK && free_after + BLOCK >= free_before);
    assert_eq!(
        replica.grow(Bytes::mib(2), Thick).unwrap(),
        Outcome::Raised {
            from: Bytes::MIB,
            to: Bytes::mib(2)
        }
    );
}

#[test]
fn a_full_tmpfs_still_grows_thin() {
    // Fails if a superblock needs a block that was not allocated when the replica was made.
    a_full_pool_still_grows_thin(&Small::tmpfs());
}

#[test]
fn a_full_ext4_still_grows_thin() {
    // Fails if a superblock needs a block that was not allocated when the replica was made.
    a_full_pool_still_grows_thin(&Small::ext4());
}
