//! Filesystems that are made, grown while mounted, and checked.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;

use common::{Bench, can_grow_ext, check, fill, run, set_size, verify};
use trellis_api::Bytes;
use trellis_node::Error;
use trellis_node::filesystem::{self, FilesystemKind, Geometry, Outcome};
use trellis_node::volume;

const ONLINE: [FilesystemKind; 2] = [FilesystemKind::Xfs, FilesystemKind::Btrfs];

fn size_of(kind: FilesystemKind) -> Bytes {
    if kind == FilesystemKind::Xfs {
        Bytes::mib(320)
    } else {
        Bytes::mib(160)
    }
}

#[test]
fn a_mounted_filesystem_grows_to_exactly_what_fits() {
    // Fails if the growth does not happen, is not read back, is repeated, or stops short of the device.
    for kind in ONLINE {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, size_of(kind));
        let from = filesystem::measure_mounted(kind, &volume.staging, &volume.device.path).unwrap();
        // Sizes with odd ends: a partial block, and a last group that is too small or just large enough.
        for extra in [0, 512, 4096 * 63, 4096 * 64 + 512] {
            let to = Bytes::new((1 << 30) + extra);
            let (_, outcome) = volume.grow(to);
            assert_eq!(outcome.size(), from.largest_fit(to), "{kind} +{extra}");
        }
        let group_end = match from {
            Geometry::Xfs(geometry) => 4 * u64::from(geometry.group_blocks) * 4096,
            _ => 2 << 30,
        };
        for blocks in [63, 64] {
            let to = Bytes::new(group_end + blocks * 4096);
            let (_, outcome) = volume.grow(to);
            assert_eq!(
                outcome.size(),
                from.largest_fit(to),
                "{kind} group end +{blocks}"
            );
        }
        let again = volume::grow_filesystem(kind, &volume.staging, &volume.device.path).unwrap();
        assert!(matches!(again, Outcome::Unchanged { .. }), "{again:?}");
        let mounted =
            filesystem::measure_mounted(kind, &volume.staging, &volume.device.path).unwrap();
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        let idle = filesystem::measure_idle(kind, &volume.device.path).unwrap();
        assert_eq!((mounted.size(), mounted.uuid()), (idle.size(), idle.uuid()));
        check(kind, &volume.device.path);
        volume::detach(&volume.backing).unwrap();
    }
}

#[test]
fn a_full_filesystem_grows_and_keeps_every_byte() {
    // Fails if growth needs free space, if the new space cannot be written, or if old data changes.
    for kind in ONLINE {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, size_of(kind));
        let (old, new) = (volume.staging.join("old"), volume.staging.join("new"));
        let before = fill(&old, 1, u64::MAX);
        assert!(before > 50 << 20, "{kind}: only {before} bytes fitted");
        assert_eq!(fill(&volume.staging.join("more"), 2, 1 << 20) & !0xffff, 0);
        let (_, outcome) = volume.grow(Bytes::mib(640));
        assert!(matches!(outcome, Outcome::Raised { .. }));
        assert_eq!(fill(&new, 3, 100 << 20), 100 << 20);
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        check(kind, &volume.device.path);
        volume::stage(&volume.device.path, kind, &volume.staging, false).unwrap();
        verify(&old, 1, fs::metadata(&old).unwrap().len());
        verify(&new, 3, 100 << 20);
        volume.take_down();
    }
}

#[test]
fn an_xfs_made_small_has_few_groups_when_it_is_large() {
    // Fails if xfs is made with the default geometry: 4096 groups at a thousandfold size.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Xfs, Bytes::GIB);
    volume.grow(Bytes::gib(100));
    let seen = volume::observe(&volume.backing, &volume.staging)
        .unwrap()
        .filesystem
        .unwrap();
    let Geometry::Xfs(geometry) = seen.geometry else {
        panic!("{seen:?}")
    };
    assert_eq!(seen.geometry.size(), seen.largest_fit);
    assert!(
        geometry
            .data_blocks
            .div_ceil(u64::from(geometry.group_blocks))
            <= 102,
        "{geometry:?}"
    );
    volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
    check(FilesystemKind::Xfs, &volume.device.path);
    volume::detach(&volume.backing).unwrap();
}

#[test]
fn an_xfs_of_any_size_can_be_made_and_fills_its_device() {
    // Fails if a geometry is computed that mkfs.xfs refuses, or that leaves space which growth cannot take.
    const GIB: u64 = 1 << 30;
    let sizes = [
        (300 << 20) + 1536,
        GIB - 512,
        64 * GIB + (15 << 20),
        70 * GIB + (7 << 20),
        260 * GIB + (9 << 20),
    ];
    for size in sizes.map(Bytes::new) {
        let bench = Bench::new();
        let volume = bench.volume("v", FilesystemKind::Xfs, size);
        volume::grow_filesystem(volume.kind, &volume.staging, &volume.device.path).unwrap();
        let seen = volume::observe(&volume.backing, &volume.staging)
            .unwrap()
            .filesystem
            .unwrap();
        assert_eq!(seen.geometry.size(), seen.largest_fit, "{size}");
        let Geometry::Xfs(geometry) = seen.geometry else {
            panic!("{seen:?}")
        };
        assert!(
            geometry
                .data_blocks
                .div_ceil(u64::from(geometry.group_blocks))
                <= 5,
            "{size}: {geometry:?}"
        );
        volume.take_down();
    }
}

#[test]
fn ext_grows_where_it_may_and_names_the_missing_capability_where_not() {
    // Fails if a growth that may happen does not, if EPERM is reported as anything but the missing
    // capability, or if a size is made up.
    for kind in [FilesystemKind::Ext4, FilesystemKind::Ext3] {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, Bytes::mib(64));
        let old = volume.staging.join("old");
        fill(&old, 1, 8 << 20);
        set_size(&volume.backing, Bytes::mib(512));
        volume::grow_device(&volume.backing, Bytes::mib(512)).unwrap();
        let before =
            filesystem::measure_mounted(kind, &volume.staging, &volume.device.path).unwrap();
        let grown = volume::grow_filesystem(kind, &volume.staging, &volume.device.path);
        let expected = match can_grow_ext() {
            true => before.largest_fit(Bytes::mib(512)),
            false => before.size(),
        };
        match grown {
            Ok(outcome) => assert_eq!(outcome.size(), expected),
            Err(Error::MissingCapability { capability, .. }) => {
                assert!(!can_grow_ext() && capability == "CAP_SYS_RESOURCE");
            }
            Err(error) => panic!("{error}"),
        }
        let after = filesystem::measure_mounted(kind, &volume.staging, &volume.device.path);
        assert_eq!(after.unwrap().size(), expected);
        verify(&old, 1, 8 << 20);
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        check(kind, &volume.device.path);
        volume::detach(&volume.backing).unwrap();
    }
}

#[test]
fn ext_is_made_as_large_as_the_rule_of_its_own_tools_says() {
    // Fails if our rule for the last group differs from the one of mke2fs and resize2fs.
    let bench = Bench::new();
    for kind in [FilesystemKind::Ext4, FilesystemKind::Ext3] {
        for blocks in [
            32_768 * 2,
            32_768 * 2 + 100,
            32_768 * 3 + 600,
            32_768 * 3 + 1400,
            32_768 * 4 + 560,
            32_768 * 5 + 3000,
        ] {
            let file = bench.path("image");
            let size = Bytes::new(blocks * 4096);
            set_size(&file, size);
            let device = volume::attach(&file, false).unwrap();
            let made = filesystem::make(kind, &device.path, uuid::Uuid::new_v4(), false).unwrap();
            assert_eq!(
                made.size(),
                made.largest_fit(size),
                "{kind} {blocks} after mke2fs"
            );
            let larger = Bytes::new((blocks + 32_768 * 9 + 300) * 4096);
            volume::detach(&file).unwrap();
            set_size(&file, larger);
            run("e2fsck", &["-fp", file.to_str().unwrap()]);
            run("resize2fs", &[file.to_str().unwrap()]);
            let grown = filesystem::measure_idle(kind, &file).unwrap();
            assert_eq!(
                grown.size(),
                made.largest_fit(larger),
                "{kind} {blocks} after resize2fs"
            );
            fs::remove_file(&file).unwrap();
        }
    }
}

#[test]
fn growth_through_a_read_only_mount_is_refused_by_name() {
    // Fails if a read-only mount gives an error that does not say so.
    for kind in ONLINE {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, size_of(kind));
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        volume::stage(&volume.device.path, kind, &volume.staging, true).unwrap();
        set_size(&volume.backing, Bytes::GIB);
        volume::grow_device(&volume.backing, Bytes::GIB).unwrap();
        let error =
            volume::grow_filesystem(kind, &volume.staging, &volume.device.path).unwrap_err();
        assert!(matches!(error, Error::ReadOnly { .. }), "{error:?}");
        volume.take_down();
    }
}

#[test]
fn a_restarted_process_finds_everything_and_goes_on() {
    // Fails if the observation misses a rung, or if a step that is done is done again.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Xfs, Bytes::mib(320));
    let path = bench.path("consumer");
    let source = volume::Source::Filesystem {
        staging: &volume.staging,
    };
    volume::publish(source, &path, true).unwrap();
    set_size(&volume.backing, Bytes::mib(640));

    let seen = volume::observe(&volume.backing, &volume.staging).unwrap();
    assert_eq!(seen.backing, Some(Bytes::mib(640)));
    assert!(seen.staged);
    assert_eq!(seen.publications.len(), 1);
    assert_eq!(
        (&seen.publications[0].path, seen.publications[0].read_only),
        (&path, true)
    );
    let device = seen.device.unwrap();
    assert_eq!(
        (&device.path, device.size),
        (&volume.device.path, Bytes::mib(320))
    );

    let note = bench.path("v.mkfs");
    assert!(volume::attach(&volume.backing, false).unwrap().adopted);
    assert!(
        !volume::ensure_filesystem(&device.path, volume.kind, &note)
            .unwrap()
            .made
    );
    let staged = volume::stage(&device.path, volume.kind, &volume.staging, false).unwrap();
    assert_eq!(staged, volume::Published::AlreadyThere);
    volume.grow(Bytes::mib(640));
    let seen = volume::observe(&volume.backing, &volume.staging).unwrap();
    let filesystem = seen.filesystem.unwrap();
    assert_eq!(filesystem.geometry.size(), filesystem.largest_fit);
    let usage = volume::usage(&path).unwrap();
    assert!(
        usage.bytes_total > Bytes::mib(500) && usage.inodes_used > 0,
        "{usage:?}"
    );
    volume::unpublish(&path, Some(device.number)).unwrap();
    assert!(!path.exists());
    volume.take_down();
}
