//! The replica store on real files: what it makes, refuses, heals and leaves alone.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use common::*;
use trellis_api::Bytes;
use trellis_engine::Error;
use trellis_engine::replica::{
    Finding, Identity, Outcome, Pool, Provisioning::*, REPLICAS_MAX, SIZE_MAX, Severity, check,
};

#[test]
fn a_replica_is_a_plain_sparse_file_that_survives_reopening() {
    // Fails if the size, the identity or a byte is not the same after the pool was closed.
    let home = grown_pool();
    let replica = reopen(home.path());
    assert_eq!(replica.size(), blocks(5));
    assert_eq!(replica.identity(), identity(1));
    assert_eq!((replica.size_version(), replica.generation()), (2, 0));
    assert_eq!(fs::metadata(replica.data_path()).unwrap().len(), 5 * BLOCK);
    assert_eq!(read_block(&replica.data_path(), 1), [7; 4096]);
    assert_eq!(read_block(&replica.data_path(), 4), [9; 4096]);
    assert_eq!(
        read_block(&replica.data_path(), 3),
        [0; 4096],
        "a hole must read as zeros"
    );
    let measure = replica.measure().unwrap();
    assert_eq!(
        (measure.superblock, measure.data, measure.size()),
        (blocks(5), blocks(5), blocks(5))
    );
    assert!(check(home.path()).findings.is_empty());
}

#[test]
fn growth_raises_repeats_and_never_shrinks() {
    // Fails if a smaller size is accepted, or an equal one counts as a new size.
    let home = grown_pool();
    let replica = reopen(home.path());
    assert_eq!(replica.grow(blocks(5), Thin).unwrap(), Outcome::Unchanged);
    assert_eq!(replica.size_version(), 2);
    let before = snapshot(&replica_dir(home.path()));
    let shrink = replica.grow(blocks(4), Thin).unwrap_err();
    assert!(
        matches!(shrink, Error::SizeShrinks { from, to, .. } if from == blocks(5) && to == blocks(4))
    );
    assert_eq!(snapshot(&replica_dir(home.path())), before);
    let raised = Outcome::Raised {
        from: blocks(5),
        to: blocks(6),
    };
    assert_eq!(replica.grow(blocks(6), Thin).unwrap(), raised);
}

#[test]
fn a_size_is_a_positive_number_of_blocks_up_to_the_maximum() {
    // Fails if a size that the superblock could not hold reaches the disk.
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    for size in [Bytes::ZERO, Bytes::new(1), Bytes::new(BLOCK + 512)] {
        let error = pool.create(NAME, identity(1), size, Thin).unwrap_err();
        assert!(matches!(error, Error::SizeNotBlocks { .. }), "{error}");
    }
    for size in [Bytes::new(SIZE_MAX.get() + BLOCK), Bytes::new(u64::MAX)] {
        let error = pool.create(NAME, identity(1), size, Thin).unwrap_err();
        assert!(matches!(error, Error::SizeTooLarge { .. }), "{error}");
    }
    assert!(pool.names().unwrap().is_empty());
}

#[test]
fn a_file_that_the_filesystem_cannot_hold_is_a_typed_error_and_leaves_the_replica() {
    // Fails if a size above the filesystem's own limit is an anonymous I/O error, or is promised.
    let home = grown_pool();
    let replica = reopen(home.path());
    // Filesystems that can hold even the largest replica have nothing to refuse.
    match replica.grow(SIZE_MAX, Thin) {
        Ok(outcome) => assert_eq!(
            outcome,
            Outcome::Raised {
                from: blocks(5),
                to: SIZE_MAX
            }
        ),
        Err(Error::FileTooLong { size, .. }) => {
            assert_eq!(size, SIZE_MAX);
            assert_eq!(replica.measure().unwrap().size(), blocks(5));
            assert_eq!(fs::metadata(replica.data_path()).unwrap().len(), 5 * BLOCK);
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn creation_is_idempotent_for_one_identity_and_refuses_another() {
    // Fails if a second creation starts afresh, shrinks, or hands out another volume's bytes.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    assert_eq!(
        pool.create(NAME, identity(1), blocks(2), Thin)
            .unwrap()
            .size(),
        blocks(5)
    );
    assert_eq!(
        pool.create(NAME, identity(1), blocks(8), Thin)
            .unwrap()
            .size(),
        blocks(8)
    );
    let before = snapshot(&replica_dir(home.path()));
    let error = pool.create(NAME, identity(2), blocks(8), Thin).unwrap_err();
    assert!(
        matches!(error, Error::ReplicaForeign { found, asked, .. } if found == identity(1) && asked == identity(2))
    );
    assert_eq!(snapshot(&replica_dir(home.path())), before);
    assert_eq!(
        read_block(&replica_dir(home.path()).join("data"), 4),
        [9; 4096]
    );
}

#[test]
fn handles_on_one_replica_share_its_state_and_a_removed_one_says_so() {
    // Fails if two handles can write superblocks past each other, or grow an unlinked file.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    let (one, two) = (
        pool.open_replica(NAME).unwrap(),
        pool.open_replica(NAME).unwrap(),
    );
    one.grow(blocks(6), Thin).unwrap();
    assert_eq!(two.size(), blocks(6));
    two.grow(blocks(7), Thin).unwrap();
    assert_eq!(one.measure().unwrap().size(), blocks(7));

    pool.remove(NAME, identity(1)).unwrap();
    assert!(matches!(
        one.grow(blocks(9), Thin),
        Err(Error::ReplicaRemoved { .. })
    ));
    assert!(matches!(two.measure(), Err(Error::ReplicaRemoved { .. })));
    let new = pool.create(NAME, identity(2), blocks(1), Thin).unwrap();
    assert_eq!((new.size(), new.identity()), (blocks(1), identity(2)));
    assert!(matches!(
        one.grow(blocks(9), Thin),
        Err(Error::ReplicaRemoved { .. })
    ));
    assert_eq!(read_block(&new.data_path(), 0), [0; 4096]);
}

#[test]
fn growths_by_many_threads_end_at_the_largest_size() {
    // Fails if concurrent growths lose one, repeat a sequence number, or leave slots that disagree.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let replica = pool.open_replica(NAME).unwrap();
            scope.spawn(move || {
                for step in 0..10 {
                    match replica.grow(blocks(6 + 4 * step + thread), Thin) {
                        Ok(_) | Err(Error::SizeShrinks { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
    });
    drop(pool);
    assert!(check(home.path()).findings.is_empty());
    assert_eq!(reopen(home.path()).size(), blocks(45));
}

#[test]
fn a_replica_goes_only_for_whom_its_bytes_are() {
    // Fails if bytes are removed by name alone: for another identity, or where no superblock says whose they are.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    let before = snapshot(&replica_dir(home.path()));
    let foreign = |identity: Identity| {
        let refused = pool.remove(NAME, identity).unwrap_err();
        assert!(matches!(refused, Error::ReplicaForeign { .. }), "{refused}");
    };
    foreign(identity(2));
    let own = identity(1);
    foreign(Identity {
        replica: identity(2).replica,
        ..own
    });
    foreign(Identity {
        volume: identity(2).volume,
        ..own
    });
    assert_eq!(snapshot(&replica_dir(home.path())), before);
    for slot in ["superblock.a", "superblock.b"] {
        fs::write(replica_dir(home.path()).join(slot), "").unwrap();
    }
    let refused = pool.remove(NAME, own).unwrap_err();
    assert!(
        matches!(refused, Error::ReplicaUnproven { .. }),
        "{refused}"
    );
    assert!(replica_dir(home.path()).join("data").exists());
}

#[test]
fn removal_is_idempotent() {
    // Fails if a second removal, or one of a name that never was, is an error.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    assert_eq!(pool.names().unwrap(), [NAME]);
    for _ in 0..2 {
        pool.remove(NAME, identity(1)).unwrap();
        assert!(pool.names().unwrap().is_empty());
    }
    assert!(matches!(
        pool.open_replica(NAME),
        Err(Error::ReplicaAbsent { .. })
    ));
    assert_eq!(
        fs::read_dir(home.path().join("replicas")).unwrap().count(),
        0
    );
}

#[test]
fn a_pool_has_one_owner_until_its_last_handle_is_gone() {
    // Fails if a second agent could write to a pool while a replica of the first is still held.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    let replica = pool.open_replica(NAME).unwrap();
    assert!(matches!(
        Pool::open(home.path()),
        Err(Error::PoolOwned { .. })
    ));
    drop(pool);
    assert!(matches!(
        Pool::open(home.path()),
        Err(Error::PoolOwned { .. })
    ));
    drop(replica);
    Pool::open(home.path()).unwrap();
}

#[test]
fn a_pool_is_a_directory() {
    // Fails if a pool is made in a place that nobody has prepared.
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file, home.path().join("absent")] {
        assert!(matches!(
            Pool::open(&path),
            Err(Error::PoolNotDirectory { .. })
        ));
        assert_eq!(check(&path).worst(), Some(Severity::Broken));
    }
}

#[test]
fn names_that_lead_elsewhere_are_refused_everywhere() {
    // Fails if any entrance lets a path through.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    for name in ["..", "../x", "a/b", ".making-a", "", "A"] {
        let refused =
            |error: Error| assert!(matches!(error, Error::NameNotAllowed { .. }), "{error}");
        refused(pool.create(name, identity(1), blocks(1), Thin).unwrap_err());
        refused(pool.open_replica(name).unwrap_err());
        refused(pool.remove(name, identity(1)).unwrap_err());
    }
}

#[test]
fn links_and_pipes_in_place_of_files_are_refused() {
    // Fails if a planted link leads a write out of the pool, or a pipe holds the store up.
    for file in ["superblock.a", "data"] {
        let home = grown_pool();
        let (path, away) = (
            replica_dir(home.path()).join(file),
            home.path().join("away"),
        );
        fs::rename(&path, &away).unwrap();
        symlink(&away, &path).unwrap();
        let pool = Pool::open(home.path()).unwrap();
        assert!(
            matches!(pool.open_replica(NAME), Err(Error::NotAFile { .. })),
            "link {file}"
        );
        fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(
            matches!(pool.open_replica(NAME), Err(Error::NotAFile { .. })),
            "pipe {file}"
        );
        assert_eq!(check(home.path()).worst(), Some(Severity::Broken));
    }
}

#[test]
fn leftovers_are_cleaned_and_strangers_are_left_alone() {
    // Fails if a half-made or half-removed replica stays, shows as a replica, or strangers are lost.
    let home = grown_pool();
    let replicas = home.path().join("replicas");
    for leftover in [".making-a", ".removing-b"] {
        fs::create_dir(replicas.join(leftover)).unwrap();
        fs::write(replicas.join(leftover).join("data"), "x").unwrap();
    }
    fs::create_dir(replicas.join("lost+found")).unwrap();
    let report = check(home.path());
    assert_eq!((report.replicas, report.findings.len()), (1, 3));
    assert_eq!(report.worst(), Some(Severity::Note));

    let pool = Pool::open(home.path()).unwrap();
    assert_eq!(pool.names().unwrap(), [NAME]);
    assert!(!replicas.join(".making-a").exists() && !replicas.join(".removing-b").exists());
    assert!(replicas.join("lost+found").exists());
    let report = check(home.path());
    assert!(matches!(
        report.findings.as_slice(),
        [Finding::Stranger { .. }]
    ));
}

#[test]
fn leftovers_of_work_that_failed_are_not_in_the_way_of_its_repetition() {
    // Fails if a creation or removal that could not clean up after itself blocks its name for good.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    for leftover in [format!(".making-{NAME}"), format!(".removing-{NAME}")] {
        let path = home.path().join("replicas").join(leftover);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("data"), "x").unwrap();
    }
    pool.remove(NAME, identity(1)).unwrap();
    let making = home.path().join("replicas").join(format!(".making-{NAME}"));
    fs::create_dir(&making).unwrap();
    fs::write(making.join("data"), "x").unwrap();
    let replica = pool.create(NAME, identity(1), blocks(1), Thin).unwrap();
    assert_eq!(read_block(&replica.data_path(), 0), [0; 4096]);
    assert!(check(home.path()).findings.is_empty());
}

#[test]
fn a_thick_replica_has_all_its_blocks_and_a_thin_one_has_none() {
    // Fails if thick space is only promised, or thin space is taken.
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    let thick = pool
        .create("thick", identity(1), Bytes::MIB, Thick)
        .unwrap();
    assert!(thick.allocated().unwrap() >= Bytes::MIB);
    thick.grow(Bytes::mib(3), Thick).unwrap();
    assert!(thick.allocated().unwrap() >= Bytes::mib(3));
    assert_eq!(
        fs::metadata(thick.data_path()).unwrap().blocks() * 512,
        thick.allocated().unwrap().get()
    );
    thick.grow(Bytes::mib(64), Thin).unwrap();
    assert!(thick.allocated().unwrap() < Bytes::mib(64));

    let thin = pool.create("thin", identity(2), Bytes::GIB, Thin).unwrap();
    assert!(thin.allocated().unwrap() < Bytes::MIB);
    let capacity = pool.capacity().unwrap();
    let used = thick.allocated().unwrap().get() + thin.allocated().unwrap().get();
    assert_eq!(capacity.used_by_replicas.get(), used);
    assert!(capacity.free <= capacity.total && capacity.total > Bytes::ZERO);
}

#[test]
fn the_checker_changes_nothing_and_works_beside_growth() {
    // Fails if the checker writes, needs the lock, or takes a growth on its way for damage.
    let home = grown_pool();
    let before = snapshot(&replica_dir(home.path()));
    check(home.path());
    assert_eq!(snapshot(&replica_dir(home.path())), before);
    let replica = reopen(home.path());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for size in 6..200 {
                replica.grow(blocks(size), Thin).unwrap();
            }
        });
        for _ in 0..200 {
            let report = check(home.path());
            assert!(report.worst() <= Some(Severity::Note), "{report:?}");
            assert_eq!(report.replicas, 1);
        }
    });
}

#[test]
fn a_crowded_pool_refuses_one_more() {
    // Fails if the number of replicas on a pool has no limit.
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    for index in 0..REPLICAS_MAX {
        fs::create_dir(home.path().join(format!("replicas/r{index}"))).unwrap();
    }
    let error = pool.create(NAME, identity(1), blocks(1), Thin).unwrap_err();
    assert!(matches!(error, Error::PoolCrowded { .. }), "{error}");
}
