//! Damage to a replica's files: what is healed, what is refused, and that refusing changes nothing.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;

use common::*;
use proptest::prelude::*;
use trellis_engine::Error;
use trellis_engine::replica::{Fault, Finding, Pool, Provisioning::*, Severity, check};

/// Damages one or both superblocks in every way but flipped bits.
fn damage(path: &Path, kind: usize) {
    match kind {
        0 => fs::remove_file(path).unwrap(),
        1 => set_length(path, 0),
        2 => set_length(path, 4095),
        3 => set_length(path, 4097),
        4 => fs::write(path, [0; 4096]).unwrap(),
        5 => fs::write(path, [0xff; 4096]).unwrap(),
        // The write was cut after 512 bytes.
        6 => {
            let mut bytes = fs::read(path).unwrap();
            bytes[512..].fill(0x5a);
            fs::write(path, bytes).unwrap();
        }
        _ => unreachable!("no such damage"),
    }
}
const DAMAGES: usize = 7;

#[test]
fn one_damaged_superblock_is_healed_from_the_other() {
    // Fails if a missing, cut, padded, blank or torn superblock costs the size or stays damaged.
    for slot in ["superblock.a", "superblock.b"] {
        for kind in 0..DAMAGES {
            let home = grown_pool();
            let before = snapshot(&replica_dir(home.path()));
            damage(&replica_dir(home.path()).join(slot), kind);
            let report = check(home.path());
            assert!(
                matches!(report.findings.as_slice(), [Finding::SuperblockBad { .. }]),
                "{report:?}"
            );
            assert_eq!(
                reopen(home.path()).size(),
                blocks(5),
                "{slot}, damage {kind}"
            );
            assert_eq!(
                snapshot(&replica_dir(home.path())),
                before,
                "{slot}, damage {kind}"
            );
        }
    }
}

#[test]
fn two_damaged_superblocks_are_refused_and_nothing_is_changed() {
    // Fails if a size is guessed, or evidence that a person could repair from is overwritten.
    for kind_a in 0..DAMAGES {
        for kind_b in 0..DAMAGES {
            let home = grown_pool();
            let dir = replica_dir(home.path());
            damage(&dir.join("superblock.a"), kind_a);
            damage(&dir.join("superblock.b"), kind_b);
            let before = snapshot(&dir);
            let pool = Pool::open(home.path()).unwrap();
            let error = pool.open_replica(NAME).unwrap_err();
            let said = error.to_string();
            assert!(matches!(error, Error::SuperblocksBad { .. }), "{error}");
            assert!(
                said.contains("superblock.a") && said.contains("superblock.b"),
                "{said}"
            );
            assert!(pool.create(NAME, identity(1), blocks(5), Thin).is_err());
            assert_eq!(snapshot(&dir), before, "damages {kind_a} and {kind_b}");
            let report = check(home.path());
            assert_eq!(report.worst(), Some(Severity::Broken));
            assert_eq!(
                report.findings[0].to_string(),
                said,
                "the checker must say the same"
            );
        }
    }
}

#[test]
fn every_damaged_byte_of_either_superblock_is_healed() {
    // Fails if one byte, at any place, with any of three errors, costs the size or is not repaired.
    let home = grown_pool();
    let before = snapshot(&replica_dir(home.path()));
    let pool = Pool::open(home.path()).unwrap();
    for slot in ["superblock.a", "superblock.b"] {
        let path = replica_dir(home.path()).join(slot);
        let good = before[&path].clone();
        // The head byte by byte, where everything is; the reserved rest by samples.
        for at in (0..96).chain((96..4096).step_by(401)).chain([4095]) {
            let mut bad = good.clone();
            bad[at] = bad[at].wrapping_add(1);
            fs::write(&path, &bad).unwrap();
            assert_eq!(
                pool.open_replica(NAME).unwrap().size(),
                blocks(5),
                "{slot} byte {at}"
            );
            assert!(
                fs::read(&path).unwrap() == good,
                "{slot} byte {at} was not repaired"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_damage_to_one_superblock_is_healed(
        second in any::<bool>(),
        marks in prop::collection::vec((0usize..4096, 1u8..), 1..40),
    ) {
        // Fails if some pattern of damage passes the checksum or defeats the repair.
        let home = grown_pool();
        let before = snapshot(&replica_dir(home.path()));
        let path = replica_dir(home.path()).join(if second { "superblock.b" } else { "superblock.a" });
        let mut bytes = before[&path].clone();
        for (at, flip) in marks {
            bytes[at] ^= flip;
        }
        fs::write(&path, bytes).unwrap();
        prop_assert_eq!(reopen(home.path()).size(), blocks(5));
        prop_assert_eq!(snapshot(&replica_dir(home.path())), before);
    }
}

#[test]
fn a_handle_measures_what_the_disk_says_while_it_is_damaged() {
    // Fails if measuring answers from memory, or a damaged slot makes a good replica unmeasurable.
    let home = grown_pool();
    let replica = reopen(home.path());
    let dir = replica_dir(home.path());
    damage(&dir.join("superblock.a"), 5);
    assert_eq!(replica.measure().unwrap().size(), blocks(5));
    set_length(&dir.join("data"), 3 * BLOCK);
    assert_eq!(replica.measure().unwrap().size(), blocks(3));
    let cut = replica.grow(blocks(9), Thin).unwrap_err();
    assert!(
        matches!(cut, Error::DataCut { length, .. } if length == blocks(3)),
        "{cut}"
    );
    damage(&dir.join("superblock.b"), 5);
    assert!(matches!(
        replica.measure(),
        Err(Error::SuperblocksBad { .. })
    ));
}

#[test]
fn a_cut_into_durable_bytes_under_an_open_handle_is_said_when_measured() {
    // Fails if lost bytes of a volume look like a volume that is merely smaller.
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    let replica = pool.create(NAME, identity(1), blocks(2), Thin).unwrap();
    replica.grow(blocks(5), Thick).unwrap();
    set_length(&replica.data_path(), 4 * BLOCK);
    let cut = replica.measure().unwrap_err();
    assert!(
        matches!(&cut, Error::DataCut { length, expected, .. }
            if (*length, *expected) == (blocks(4), blocks(5))),
        "{cut}"
    );
    drop(replica);
    let opening = pool.open_replica(NAME).unwrap_err();
    assert_eq!(opening.to_string(), cut.to_string());
}

#[test]
fn a_growth_repairs_a_slot_that_was_damaged_while_in_use() {
    // Fails if a growth overwrites the good slot while the other is damaged, and leaves both bad.
    let home = grown_pool();
    let replica = reopen(home.path());
    damage(&replica_dir(home.path()).join("superblock.a"), 5);
    replica.grow(blocks(6), Thin).unwrap();
    damage(&replica_dir(home.path()).join("superblock.b"), 5);
    replica.grow(blocks(7), Thin).unwrap();
    drop(replica);
    assert!(check(home.path()).findings.is_empty());
    assert_eq!(reopen(home.path()).size(), blocks(7));
}

#[test]
fn a_data_file_that_is_longer_is_kept_and_not_counted() {
    // Fails if a length counts as a size, or something is cut off.
    let home = grown_pool();
    let data = replica_dir(home.path()).join("data");
    set_length(&data, 9 * BLOCK);
    let report = check(home.path());
    assert!(
        matches!(report.findings.as_slice(), [Finding::DataLong { .. }]),
        "{report:?}"
    );
    let replica = reopen(home.path());
    assert_eq!(replica.measure().unwrap().size(), blocks(5));
    replica.grow(blocks(7), Thin).unwrap();
    assert_eq!(fs::metadata(&data).unwrap().len(), 9 * BLOCK);
    replica.grow(blocks(11), Thick).unwrap();
    assert_eq!(fs::metadata(&data).unwrap().len(), 11 * BLOCK);
    assert_eq!(replica.measure().unwrap().size(), blocks(11));
}

#[test]
fn a_data_file_that_lost_an_unsynced_length_is_extended_and_a_cut_one_is_refused() {
    // Fails if a crash after a thin growth is an error, or lost bytes are passed off as zeros.
    let home = grown_pool();
    let data = replica_dir(home.path()).join("data");
    // The replica was made with 2 blocks, synced, and raised to 5 without a sync of the data.
    for length in [2, 3, 4] {
        set_length(&data, length * BLOCK);
        assert!(matches!(
            check(home.path()).findings.as_slice(),
            [Finding::DataShort { .. }]
        ));
        assert_eq!(reopen(home.path()).measure().unwrap().size(), blocks(5));
        assert_eq!(read_block(&data, 4), [0; 4096]);
        assert_eq!(read_block(&data, 1), [7; 4096]);
    }
    set_length(&data, 2 * BLOCK - 1);
    let before = snapshot(&replica_dir(home.path()));
    let pool = Pool::open(home.path()).unwrap();
    let error = pool.open_replica(NAME).unwrap_err();
    assert!(
        matches!(error, Error::DataCut { expected, .. } if expected == blocks(2)),
        "{error}"
    );
    assert_eq!(snapshot(&replica_dir(home.path())), before);
    fs::remove_file(&data).unwrap();
    assert!(matches!(
        pool.open_replica(NAME),
        Err(Error::DataAbsent { .. })
    ));
    assert_eq!(check(home.path()).worst(), Some(Severity::Broken));
}

#[test]
fn superblocks_of_two_replicas_in_one_directory_are_refused() {
    // Fails if a mix-up by hand is resolved by a guess.
    let home = grown_pool();
    let pool = Pool::open(home.path()).unwrap();
    pool.create("other", identity(2), blocks(9), Thin).unwrap();
    let (mine, other) = (replica_dir(home.path()), home.path().join("replicas/other"));
    fs::copy(other.join("superblock.b"), mine.join("superblock.b")).unwrap();
    let before = snapshot(&mine);
    assert!(matches!(
        pool.open_replica(NAME),
        Err(Error::SuperblocksContradict { .. })
    ));
    assert_eq!(snapshot(&mine), before);
}

#[test]
fn a_copied_replica_is_found_by_the_checker() {
    // Fails if two directories can both claim to be one copy without anybody noticing.
    let home = grown_pool();
    let copy = home.path().join("replicas/copy");
    fs::create_dir(&copy).unwrap();
    for (path, bytes) in snapshot(&replica_dir(home.path())) {
        fs::write(copy.join(path.file_name().unwrap()), bytes).unwrap();
    }
    let report = check(home.path());
    assert!(
        matches!(report.findings.as_slice(), [Finding::IdentityTwice { .. }]),
        "{report:?}"
    );
}

#[test]
fn a_superblock_that_was_copied_over_its_twin_is_told_apart() {
    // Fails if one file in two places counts as two copies.
    let home = grown_pool();
    let dir = replica_dir(home.path());
    fs::copy(dir.join("superblock.a"), dir.join("superblock.b")).unwrap();
    let report = check(home.path());
    assert!(matches!(
        report.findings.as_slice(),
        [Finding::SuperblockBad {
            fault: Fault::OtherSlot,
            ..
        }]
    ));
    assert_eq!(reopen(home.path()).size(), blocks(5));
    assert!(check(home.path()).findings.is_empty());
}
