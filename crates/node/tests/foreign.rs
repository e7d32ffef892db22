//! Foreign content is never overwritten, and a torn filesystem of ours is made again.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Bench, check, installed, run};
use trellis_api::{Bytes, HoldReason};
use trellis_node::Error;
use trellis_node::filesystem::{FilesystemKind, State};
use trellis_node::probe::{self, Content, Foreign};
use trellis_node::volume::{self, Past, ensure_filesystem, ensure_filesystem_with_past};

/// Asserts that no filesystem is made on the file and that not a byte of it changes.
fn assert_untouched(bench: &Bench, file: &Path, expected: &str) {
    let before = fs::read(file).unwrap();
    let device = volume::attach(file, false).unwrap();
    for kind in FilesystemKind::ALL {
        let note = bench.path("note");
        let error = ensure_filesystem(&device.path, kind, &note).unwrap_err();
        let Error::NotEmpty { found, .. } = &error else {
            panic!("{error:?}")
        };
        assert!(
            found.to_string().contains(expected),
            "{found} where {expected:?} was expected"
        );
        assert!(!note.exists());
    }
    assert!(volume::detach(file).unwrap());
    assert!(
        fs::read(file).unwrap() == before,
        "{expected}: bytes were changed"
    );
}

fn put(file: &Path, offset: u64, bytes: &[u8]) {
    OpenOptions::new()
        .write(true)
        .open(file)
        .unwrap()
        .write_all_at(bytes, offset)
        .unwrap();
}

#[test]
fn content_that_tools_make_is_left_alone() {
    // Fails if a signature that a real tool writes is not recognised.
    let swap: &[(&str, &[&str], &str)] = &[
        ("mkswap", &[], "swap"),
        ("mkfs.ext2", &["-q"], "ext2"),
        ("mkfs.vfat", &[], "FAT"),
        ("mkfs.f2fs", &["-q"], "F2FS"),
        ("mkfs.ntfs", &["-Q", "-F"], "NTFS"),
        ("mkfs.exfat", &[], "exFAT"),
        ("sgdisk", &["-n", "1"], "GPT"),
    ];
    for (program, arguments, expected) in swap {
        if !installed(program) {
            continue;
        }
        let bench = Bench::new();
        let file = bench.file("image", Bytes::mib(64));
        run(program, &[*arguments, &[file.to_str().unwrap()]].concat());
        assert_untouched(&bench, &file, expected);
    }
}

#[test]
fn hand_made_signatures_are_left_alone() {
    // Fails if a known signature, at either end, is taken for an empty device.
    const SIZE: u64 = 400 << 20;
    let md = b"\xfc\x4e\x2b\xa9";
    let cases: &[(u64, &[u8], &str)] = &[
        (0, b"LUKS\xba\xbe\x00\x02", "LUKS2"),
        (512, b"LABELONE", "LVM"),
        (512, b"EFI PART", "GPT"),
        (SIZE - 512, b"EFI PART", "backup GPT"),
        (510, b"\x55\xaa", "MBR"),
        (131_072, &0x00ba_b10c_u64.to_le_bytes(), "ZFS"),
        (4096, md, "1.2"),
        ((SIZE / 512 - 16) / 8 * 8 * 512, md, "1.0"),
        (SIZE - 65_536, md, "0.90"),
        (32_769, b"CD001", "ISO 9660"),
        (0, b"hsqs", "squashfs"),
        (4 << 20, b"SKUL\xba\xbe", "LUKS2"),
        ((64 << 20) + 0x40, b"_BHRfS_M", "copy of a btrfs"),
        (777_777, b"x", "unrecognised data at offset 777777"),
        (SIZE - 1, b"x", "unrecognised data at offset"),
    ];
    for (offset, bytes, expected) in cases {
        let bench = Bench::new();
        let file = bench.file("image", Bytes::new(SIZE));
        put(&file, *offset, bytes);
        assert_untouched(&bench, &file, expected);
    }
}

#[test]
fn another_filesystem_of_ours_is_kept_and_named() {
    // Fails if a claim for one filesystem destroys another one, or takes it for its own.
    for made in FilesystemKind::ALL {
        let bench = Bench::new();
        let volume = bench.volume("v", made, Bytes::mib(300));
        fs::write(volume.staging.join("file"), "mine").unwrap();
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        for asked in FilesystemKind::ALL.into_iter().filter(|kind| *kind != made) {
            let error =
                ensure_filesystem(&volume.device.path, asked, &bench.path("n")).unwrap_err();
            assert!(
                matches!(error, Error::OtherFilesystem { found, asked: a, .. } if found == made && a == asked),
                "{error}"
            );
        }
        assert!(
            !ensure_filesystem(&volume.device.path, made, &bench.path("n"))
                .unwrap()
                .made
        );
        volume::stage(&volume.device.path, made, &volume.staging, false).unwrap();
        assert_eq!(
            fs::read_to_string(volume.staging.join("file")).unwrap(),
            "mine"
        );
        volume.take_down();
    }
}

#[test]
fn what_is_made_is_recognised_measured_and_clean() {
    // Fails if the probe and the superblock disagree with the tool that made the filesystem.
    for kind in FilesystemKind::ALL {
        let bench = Bench::new();
        let backing = bench.file("v", Bytes::mib(300));
        let device = volume::attach(&backing, false).unwrap();
        let made = ensure_filesystem(&device.path, kind, &bench.path("n")).unwrap();
        assert!(made.made && !bench.path("n").exists());
        check(kind, &device.path);
        let found = probe::probe(&device.path).unwrap();
        let Content::Filesystem {
            kind: seen,
            size,
            uuid,
            state,
            ..
        } = found
        else {
            panic!("{found}")
        };
        assert_eq!(
            (seen, size, uuid),
            (kind, made.geometry.size(), made.geometry.uuid())
        );
        assert_eq!(state, State::Clean);
        assert_eq!(size, made.geometry.largest_fit(Bytes::mib(300)));
        volume::detach(&backing).unwrap();
    }
}

#[test]
fn what_once_held_data_is_never_formatted() {
    // Fails if a device that was in use and is found empty, or cut up, gets a new filesystem, note or not.
    for kind in FilesystemKind::ALL {
        let bench = Bench::new();
        let backing = bench.file("v", Bytes::mib(300));
        let note = bench.path("n");
        let device = volume::attach(&backing, false).unwrap();
        let again = |past| ensure_filesystem_with_past(&device.path, kind, &note, past);
        assert!(again(Past::Unused).unwrap().made);
        assert!(!again(Past::Formatted).unwrap().made);
        let empty = fs::File::create(&backing).unwrap();
        empty.set_len(Bytes::mib(300).get()).unwrap();
        for intent in [false, true] {
            if intent {
                fs::write(&note, uuid::Uuid::new_v4().to_string()).unwrap();
            }
            let error = again(Past::Formatted).unwrap_err();
            assert!(matches!(error, Error::FilesystemGone { .. }), "{error}");
            assert_eq!(error.reason(), HoldReason::FilesystemGone);
        }
        assert!(matches!(
            probe::probe(&device.path).unwrap(),
            Content::Empty
        ));
        volume::detach(&backing).unwrap();
    }
}

#[test]
fn a_torn_mkfs_of_ours_is_made_again_and_anything_else_is_not() {
    // Fails if a crash during mkfs leaves a volume that needs help, or if the note excuses too much.
    for kind in FilesystemKind::ALL {
        let bench = Bench::new();
        let backing = bench.file("v", Bytes::mib(300));
        let (note, identity) = (bench.path("n"), uuid::Uuid::new_v4());
        fs::write(&note, identity.to_string()).unwrap();
        put(&backing, 300_000, b"half of a filesystem");
        let device = volume::attach(&backing, false).unwrap();
        let made = ensure_filesystem(&device.path, kind, &note).unwrap();
        assert!(made.made && made.geometry.uuid() == identity && !note.exists());
        // A note that outlived its mkfs: the finished filesystem stays.
        fs::write(&note, identity.to_string()).unwrap();
        let again = ensure_filesystem(&device.path, kind, &note).unwrap();
        assert!(!again.made && !note.exists());
        volume::detach(&backing).unwrap();

        let foreign = bench.file("f", Bytes::mib(300));
        put(&foreign, 0, b"LUKS\xba\xbe\x00\x02");
        fs::write(&note, identity.to_string()).unwrap();
        let device = volume::attach(&foreign, false).unwrap();
        let error = ensure_filesystem(&device.path, kind, &note).unwrap_err();
        assert!(matches!(error, Error::NotEmpty { .. }), "{error}");
        volume::detach(&foreign).unwrap();
    }
}

#[test]
fn an_mkfs_that_was_killed_anywhere_is_repaired_without_help() {
    // Fails if mkfs, cut short at some point, leaves content that is refused or taken for finished.
    for kind in FilesystemKind::ALL {
        for delay_us in (0..16_000).step_by(1600) {
            let bench = Bench::new();
            let backing = bench.file("v", Bytes::mib(300));
            let device = volume::attach(&backing, false).unwrap();
            let (note, identity) = (bench.path("n"), uuid::Uuid::new_v4());
            fs::write(&note, identity.to_string()).unwrap();
            let uuid = match kind {
                FilesystemKind::Xfs => format!("-muuid={identity}"),
                FilesystemKind::Btrfs | FilesystemKind::Ext4 | FilesystemKind::Ext3 => {
                    format!("-U{identity}")
                }
            };
            let program = format!("mkfs.{kind}");
            let mut child = Command::new(program)
                .args(["-q", &uuid])
                .arg(&device.path)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_micros(delay_us));
            child.kill().unwrap();
            child.wait().unwrap();
            let made = ensure_filesystem(&device.path, kind, &note).unwrap();
            assert!(!note.exists());
            let kept = made.geometry.uuid() == identity;
            assert!(kept || made.made, "{kind} after {delay_us} us");
            check(kind, &device.path);
            assert!(volume::detach(&backing).unwrap());
        }
    }
}

#[test]
fn an_unfinished_xfs_is_recognised_and_only_its_owner_makes_it_again() {
    // Fails if the mark of an unfinished mkfs is overlooked, or another's unfinished work is taken.
    let bench = Bench::new();
    let backing = bench.file("v", Bytes::mib(300));
    let (note, kind) = (bench.path("n"), FilesystemKind::Xfs);
    let device = volume::attach(&backing, false).unwrap();
    let made = ensure_filesystem(&device.path, kind, &note).unwrap();
    let node = OpenOptions::new().write(true).open(&device.path).unwrap();
    node.write_all_at(&[1], 126).unwrap();
    node.sync_all().unwrap();
    drop(node);
    let found = probe::probe(&device.path).unwrap();
    assert!(
        matches!(
            found,
            Content::Filesystem {
                state: State::Unfinished,
                ..
            }
        ),
        "{found:?}"
    );
    for text in [None, Some(uuid::Uuid::new_v4())] {
        if let Some(uuid) = text {
            fs::write(&note, uuid.to_string()).unwrap();
        }
        let error = ensure_filesystem(&device.path, kind, &note).unwrap_err();
        assert!(matches!(error, Error::NotEmpty { .. }), "{error}");
    }
    fs::write(&note, made.geometry.uuid().to_string()).unwrap();
    assert!(ensure_filesystem(&device.path, kind, &note).unwrap().made);
    check(kind, &device.path);
    volume::detach(&backing).unwrap();
}

#[test]
fn a_raid_member_is_not_taken_for_the_filesystem_it_begins_with() {
    // Fails if a mirror's half is mounted alone; its superblock is behind the filesystem's end.
    let bench = Bench::new();
    let file = bench.file("image", Bytes::mib(64));
    run("mkfs.ext4", &["-q", file.to_str().unwrap(), "60M"]);
    assert!(matches!(
        probe::probe(&file).unwrap(),
        Content::Filesystem { .. }
    ));
    put(&file, (64 << 20) - 65_536, b"\xfc\x4e\x2b\xa9");
    let found = probe::probe(&file).unwrap();
    assert!(
        matches!(
            found,
            Content::Foreign {
                what: Foreign::Known(_)
            }
        ),
        "{found}"
    );
}

#[test]
fn a_users_data_at_the_end_of_the_device_is_not_a_signature() {
    // Fails if a user can make a volume unusable by writing a signature into a file.
    let bench = Bench::new();
    let file = bench.file("image", Bytes::mib(64));
    run("mkfs.ext4", &["-q", file.to_str().unwrap()]);
    put(&file, (64 << 20) - 512, b"EFI PART");
    let found = probe::probe(&file).unwrap();
    assert!(matches!(found, Content::Filesystem { .. }), "{found}");
}

#[test]
fn too_small_a_device_is_refused_before_anything_is_written() {
    // Fails if mkfs is tried on a device below the minimum, or if a note stays.
    for kind in FilesystemKind::ALL {
        let bench = Bench::new();
        let file = bench.file("image", Bytes::mib(8));
        let device = volume::attach(&file, false).unwrap();
        let error = ensure_filesystem(&device.path, kind, &bench.path("n")).unwrap_err();
        assert!(matches!(error, Error::TooSmall { .. }), "{error}");
        assert!(!bench.path("n").exists());
        assert_eq!(probe::probe(&device.path).unwrap(), Content::Empty);
        volume::detach(&file).unwrap();
    }
}

#[test]
fn the_smallest_device_of_each_kind_is_enough_and_a_sector_less_is_not() {
    // Fails if a size that passes for enough is refused by mkfs, or if another bound is applied.
    for kind in FilesystemKind::ALL {
        let bench = Bench::new();
        let less = Bytes::new(kind.size_min().get() - 512);
        let file = bench.file("image", less);
        let device = volume::attach(&file, false).unwrap();
        let error = ensure_filesystem(&device.path, kind, &bench.path("n")).unwrap_err();
        assert!(
            matches!(error, Error::TooSmall { minimum, .. } if minimum == kind.size_min()),
            "{error}"
        );
        common::set_size(&file, kind.size_min());
        volume::grow_device(&file, kind.size_min()).unwrap();
        assert!(
            ensure_filesystem(&device.path, kind, &bench.path("n"))
                .unwrap()
                .made
        );
        volume::detach(&file).unwrap();
    }
}

#[test]
fn a_real_filesystem_with_damaged_bytes_is_never_empty() {
    // Fails if a damaged superblock of a real filesystem makes the probe panic or call it empty.
    use proptest::prelude::*;
    for kind in FilesystemKind::ALL {
        let bench = Bench::new();
        let backing = bench.file("v", Bytes::mib(300));
        let device = volume::attach(&backing, false).unwrap();
        ensure_filesystem(&device.path, kind, &bench.path("n")).unwrap();
        volume::detach(&backing).unwrap();
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(64));
        let superblocks = prop_oneof![0u64..512, 1024u64..2048, 65_536u64..66_048];
        let damage = proptest::collection::vec((superblocks, any::<u8>()), 1..4);
        let result = runner.run(&damage, |damage| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .open(&backing)
                .unwrap();
            let mut kept = Vec::new();
            for (offset, byte) in damage {
                let mut old = [0];
                file.read_exact_at(&mut old, offset).unwrap();
                kept.push((offset, old));
                file.write_all_at(&[byte], offset).unwrap();
            }
            let found = probe::probe(&backing).unwrap();
            for (offset, old) in kept.into_iter().rev() {
                file.write_all_at(&old, offset).unwrap();
            }
            prop_assert_ne!(found, Content::Empty);
            Ok(())
        });
        result.unwrap();
    }
}
