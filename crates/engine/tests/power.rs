//! Real power losses: filesystems that are shut down and lose everything that was not synced. These
//! tests mount filesystems and therefore need root.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;

use common::dying::dying_after;
use common::small::Small;
use common::*;
use trellis_api::Bytes;
use trellis_engine::Error;
use trellis_engine::replica::{Outcome, Pool, Provisioning::*, Severity, check};

fn create(small: &Small) {
    let pool = Pool::open(&small.path()).unwrap();
    pool.create(NAME, identity(1), Bytes::MIB, Thin).unwrap();
}

fn measured(small: &Small) -> Bytes {
    reopen(&small.path()).measure().unwrap().size()
}

fn what_was_answered_is_durable(small: &Small) {
    create(small);
    small.lose_power();
    assert_eq!(measured(small), Bytes::MIB);
    fill_block(&replica_dir(&small.path()).join("data"), 255, 5);

    for to in [Bytes::mib(2), Bytes::mib(3), Bytes::mib(4)] {
        reopen(&small.path()).grow(to, Thin).unwrap();
        small.lose_power();
        assert!(check(&small.path()).worst() <= Some(Severity::Healable));
        assert_eq!(measured(small), to);
    }
    let replica = reopen(&small.path());
    for to in [Bytes::mib(5), Bytes::mib(6), Bytes::mib(7)] {
        replica.grow(to, Thin).unwrap();
    }
    fill_block(&replica.data_path(), 1791, 6);
    drop(replica);
    small.lose_power();
    assert_eq!(measured(small), Bytes::mib(7));

    reopen(&small.path()).grow(Bytes::mib(9), Thick).unwrap();
    small.lose_power();
    let replica = reopen(&small.path());
    assert_eq!(replica.measure().unwrap().size(), Bytes::mib(9));
    assert!(
        replica.allocated().unwrap() >= Bytes::mib(2),
        "thick space was lost"
    );
    assert_eq!(read_block(&replica.data_path(), 255), [5; 4096]);
    assert_eq!(read_block(&replica.data_path(), 1791), [6; 4096]);
    assert_eq!(read_block(&replica.data_path(), 1790), [0; 4096]);
    drop(replica);

    Pool::open(&small.path())
        .unwrap()
        .remove(NAME, identity(1))
        .unwrap();
    small.lose_power();
    let pool = Pool::open(&small.path()).unwrap();
    assert!(matches!(
        pool.open_replica(NAME),
        Err(Error::ReplicaAbsent { .. })
    ));
}

fn what_a_dead_process_left_unsynced_is_not_believed(small: &Small) {
    create(small);
    let dir = replica_dir(&small.path());
    let before = snapshot(&dir);
    reopen(&small.path()).grow(Bytes::mib(2), Thin).unwrap();
    let after = snapshot(&dir);
    let write = |name: &str, files: &Files| {
        let path = dir.join(name);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&files[&path], 0).unwrap();
        file
    };
    // A growth that was killed between the write and the sync of its commit leaves one such slot;
    // if the opening that followed was killed while it healed the other, there are two.
    for unsynced in [&["superblock.b"][..], &["superblock.a", "superblock.b"][..]] {
        for name in ["superblock.a", "superblock.b"] {
            write(name, &before).sync_all().unwrap();
        }
        for name in unsynced {
            drop(write(name, &after));
        }
        let seen = measured(small);
        small.lose_power();
        assert_eq!(measured(small), seen, "a size that was measured went away");
    }
}

fn a_death_at_any_step_with_a_power_loss_leaves_the_old_or_the_new(small: &Small) {
    for death in 0..4 {
        dying_after(Some(death), || create(small));
        small.lose_power();
        let pool = Pool::open(&small.path()).unwrap();
        match pool.open_replica(NAME) {
            Ok(replica) => assert_eq!(replica.measure().unwrap().size(), Bytes::MIB),
            Err(Error::ReplicaAbsent { .. }) => assert!(death < 3, "a published replica was lost"),
            Err(other) => panic!("{other}"),
        }
        pool.remove(NAME, identity(1)).unwrap();
    }
    create(small);
    for (provisioning, to) in [(Thin, Bytes::mib(2)), (Thick, Bytes::mib(3))] {
        for death in 0..2 {
            let from = measured(small);
            dying_after(Some(death), || {
                reopen(&small.path()).grow(to, provisioning).unwrap();
            });
            small.lose_power();
            assert_eq!(measured(small), if death == 0 { from } else { to });
        }
        assert_eq!(
            reopen(&small.path()).grow(to, provisioning).unwrap(),
            Outcome::Unchanged
        );
    }
    for death in 0..2 {
        create(small);
        dying_after(Some(death), || {
            Pool::open(&small.path())
                .unwrap()
                .remove(NAME, identity(1))
                .unwrap()
        });
        small.lose_power();
        assert!(
            Pool::open(&small.path())
                .unwrap()
                .names()
                .unwrap()
                .is_empty()
        );
        assert!(check(&small.path()).findings.is_empty());
    }
}

#[test]
fn what_was_answered_is_durable_on_xfs() {
    // Fails if creation, growth or removal is answered before its last sync.
    what_was_answered_is_durable(&Small::xfs());
}

#[test]
fn what_was_answered_is_durable_on_ext4() {
    // Fails if creation, growth or removal is answered before its last sync.
    what_was_answered_is_durable(&Small::ext4());
}

#[test]
fn what_a_dead_process_left_unsynced_is_not_believed_on_xfs() {
    // Fails if opening reads a superblock from the page cache that is not on the disk.
    what_a_dead_process_left_unsynced_is_not_believed(&Small::xfs());
}

#[test]
fn what_a_dead_process_left_unsynced_is_not_believed_on_ext4() {
    // Fails if opening reads a superblock from the page cache that is not on the disk.
    what_a_dead_process_left_unsynced_is_not_believed(&Small::ext4());
}

#[test]
fn a_death_with_a_power_loss_leaves_the_old_or_the_new_on_xfs() {
    // Fails if a step is said to be durable before it is, or a half-made state does not open.
    a_death_at_any_step_with_a_power_loss_leaves_the_old_or_the_new(&Small::xfs());
}

#[test]
fn a_death_with_a_power_loss_leaves_the_old_or_the_new_on_ext4() {
    // Fails if a step is said to be durable before it is, or a half-made state does not open.
    a_death_at_any_step_with_a_power_loss_leaves_the_old_or_the_new(&Small::ext4());
}
