//! Growth of filesystems that nobody uses: nothing is left, nothing that is not clean is touched.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use common::{
    Bench, Process, Volume, can_grow_ext, check, copy, devices_on, eventually, fill, fingerprint,
    run, set_size, shut_down, verify,
};
use rustix::process::{Signal, getpid, kill_process};
use trellis_api::step::{self, Step};
use trellis_api::{Bytes, HoldReason};
use trellis_node::filesystem::{FilesystemKind, Outcome};
use trellis_node::sys::mountinfo;
use trellis_node::{Error, filesystem, volume};

const FROM: Bytes = Bytes::mib(320);
const TO: Bytes = Bytes::mib(640);

/// The kinds that grow here while they are mounted.
fn growing() -> Vec<FilesystemKind> {
    let is_ext =
        |kind: &FilesystemKind| matches!(kind, FilesystemKind::Ext4 | FilesystemKind::Ext3);
    let ext = can_grow_ext();
    let mut kinds = FilesystemKind::ALL.to_vec();
    kinds.retain(|kind| ext || !is_ext(kind));
    kinds
}

/// A volume that was used and is not any more, in a file that is larger now.
fn idle(bench: &Bench, kind: FilesystemKind) -> Volume {
    let volume = bench.volume("v", kind, FROM);
    fill(&volume.staging.join("data"), 9, 20 << 20);
    volume.take_down();
    set_size(&volume.backing, TO);
    volume
}

/// No device is on the file, so nothing can be mounted from it, and nothing is mounted at its place.
fn assert_nothing_left(volume: &Volume) {
    eventually("the device is gone", || devices_on(&volume.backing) == 0);
    let mounts = mountinfo::read().unwrap();
    assert!(mountinfo::at(&mounts, &volume.staging).is_none());
    assert!(!volume.staging.exists());
}

fn assert_data(volume: &Volume) {
    let device = volume::attach(&volume.backing, false).unwrap();
    volume::stage(&device.path, volume.kind, &volume.staging, false).unwrap();
    verify(&volume.staging.join("data"), 9, 20 << 20);
    volume::unstage(&volume.staging, Some(device.number)).unwrap();
    volume::detach(&volume.backing).unwrap();
}

#[test]
fn an_idle_filesystem_grows_to_exactly_what_fits_and_nothing_is_left() {
    // Fails if the growth does not happen, is not what is on the disk, or leaves a device or a mount.
    for kind in growing() {
        let bench = Bench::new();
        let volume = idle(&bench, kind);
        let before = filesystem::measure_idle(kind, &volume.backing).unwrap();
        let outcome = volume::grow_idle(&volume.backing, kind).unwrap();
        assert_nothing_left(&volume);
        let expected = Outcome::Raised {
            from: before.size(),
            to: before.largest_fit(TO),
        };
        assert_eq!(outcome, expected, "{kind}");
        let on_disk = filesystem::measure_idle(kind, &volume.backing).unwrap();
        assert_eq!(on_disk.size(), outcome.size());
        let again = volume::grow_idle(&volume.backing, kind).unwrap();
        assert!(matches!(again, Outcome::Unchanged { .. }), "{again:?}");
        assert_nothing_left(&volume);
        check(kind, &volume.backing);
        assert_data(&volume);
    }
}

#[test]
fn an_idle_ext_without_the_capability_is_held_by_name_and_left_clean() {
    // Fails if the refusal leaves a mount, a device or an unclean filesystem behind.
    if can_grow_ext() {
        return println!("skipped: this process has CAP_SYS_RESOURCE");
    }
    for kind in [FilesystemKind::Ext4, FilesystemKind::Ext3] {
        let bench = Bench::new();
        let volume = idle(&bench, kind);
        let error = volume::grow_idle(&volume.backing, kind).unwrap_err();
        assert_eq!(error.reason(), HoldReason::MissingCapability, "{error}");
        assert_nothing_left(&volume);
        check(kind, &volume.backing);
        assert_data(&volume);
    }
}

#[test]
fn a_device_that_was_there_stays_and_is_raised_too() {
    // Fails if the device of another user is detached, or if its size is not raised first.
    for kind in growing() {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, FROM);
        volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
        set_size(&volume.backing, TO);
        volume::grow_idle(&volume.backing, kind).unwrap();
        let seen = volume::observe(&volume.backing, &volume.staging).unwrap();
        assert_eq!(seen.device.unwrap().size, TO);
        let found = seen.filesystem.unwrap();
        assert_eq!(found.geometry.size(), found.largest_fit);
        assert!(volume::detach(&volume.backing).unwrap());
    }
}

#[test]
fn a_volume_that_is_mounted_after_all_grows_through_its_mount() {
    // Fails if a mounted volume is refused, or mounted a second time.
    for kind in growing() {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, FROM);
        set_size(&volume.backing, TO);
        let outcome = volume::grow_idle(&volume.backing, kind).unwrap();
        assert!(matches!(outcome, Outcome::Raised { .. }), "{outcome:?}");
        let seen = volume::observe(&volume.backing, &volume.staging).unwrap();
        assert!(seen.staged);
        assert_eq!(seen.filesystem.unwrap().geometry.size(), outcome.size());
        volume.take_down();
    }
}

#[test]
fn a_volume_in_use_in_another_mount_namespace_is_busy() {
    // Fails if the filesystem of somebody who cannot be seen from here is taken for idle.
    let bench = Bench::new();
    let volume = bench.volume("v", FilesystemKind::Xfs, FROM);
    volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
    let place = bench.dir("elsewhere");
    let (device, place) = (
        volume.device.path.to_str().unwrap(),
        place.to_str().unwrap(),
    );
    let script = format!("mount {device} {place} && exec sleep 600");
    let other = Process(
        Command::new("unshare")
            .args(["-m", "sh", "-c", &script])
            .spawn()
            .unwrap(),
    );
    let mounts = format!("/proc/{}/mountinfo", other.0.id());
    eventually("it is mounted elsewhere", || {
        let text = std::fs::read_to_string(&mounts).unwrap_or_default();
        text.contains(place)
    });
    set_size(&volume.backing, TO);
    let error = volume::grow_idle(&volume.backing, FilesystemKind::Xfs).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error:?}");
    drop(other);
    eventually("the other mount is gone", || {
        volume::grow_idle(&volume.backing, FilesystemKind::Xfs).is_ok()
    });
    volume::detach(&volume.backing).unwrap();
}

/// Whether a growth of the idle file is refused for that reason, with not a byte changed.
fn assert_untouched(backing: &Path, kind: FilesystemKind, reason: HoldReason) {
    let before = fingerprint(backing);
    let error = volume::grow_idle(backing, kind).unwrap_err();
    assert_eq!(error.reason(), reason, "{kind}: {error}");
    eventually("the device is gone", || devices_on(backing) == 0);
    assert_eq!(fingerprint(backing), before, "{kind} was changed");
}

#[test]
fn a_filesystem_that_was_not_left_cleanly_is_not_touched() {
    // Fails if a journal that wants replaying is overlooked, or if looking changes a byte.
    for kind in [
        FilesystemKind::Xfs,
        FilesystemKind::Ext4,
        FilesystemKind::Ext3,
    ] {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, FROM);
        fill(&volume.staging.join("data"), 9, 20 << 20);
        shut_down(&volume.staging);
        volume.take_down();
        set_size(&volume.backing, TO);
        assert_untouched(&volume.backing, kind, HoldReason::FilesystemUnclean);
        // One mount replays the journal; then it grows.
        assert_data(&volume);
        match volume::grow_idle(&volume.backing, kind) {
            Ok(outcome) => assert!(matches!(outcome, Outcome::Raised { .. })),
            Err(error) => assert_eq!(error.reason(), HoldReason::MissingCapability),
        }
    }
}

#[test]
fn a_btrfs_with_a_log_is_not_touched() {
    // Fails if the log that btrfs keeps between two commits is overlooked.
    let bench = Bench::new();
    let kind = FilesystemKind::Btrfs;
    let volume = bench.volume("v", kind, FROM);
    rustix::fs::sync();
    let crashed = bench.path("crashed");
    let copied = || {
        // A synced file is in the log until the next commit, half a minute later.
        fill(&volume.staging.join("data"), 9, 1 << 20);
        copy(&volume.backing, &crashed);
        matches!(
            trellis_node::probe::probe(&crashed).unwrap(),
            trellis_node::probe::Content::Filesystem {
                state: filesystem::State::Unclean,
                ..
            }
        )
    };
    eventually("a copy with a log", copied);
    volume.take_down();
    set_size(&crashed, TO);
    assert_untouched(&crashed, kind, HoldReason::FilesystemUnclean);
}

#[test]
fn a_filesystem_with_recorded_errors_is_not_touched() {
    // Fails if the mark of damage is overlooked while nobody uses the filesystem.
    let damage = |kind, file: &str| match kind {
        FilesystemKind::Xfs => {
            // The lowest byte of the features without which no mount is allowed: "needs repair".
            let image = OpenOptions::new()
                .read(true)
                .write(true)
                .open(file)
                .unwrap();
            let mut byte = [0];
            image.read_exact_at(&mut byte, 219).unwrap();
            image.write_all_at(&[byte[0] | 0x10], 219).unwrap();
        }
        _ => run("tune2fs", &["-E", "force_fsck", file]),
    };
    for kind in [
        FilesystemKind::Xfs,
        FilesystemKind::Ext4,
        FilesystemKind::Ext3,
    ] {
        let bench = Bench::new();
        let volume = idle(&bench, kind);
        damage(kind, volume.backing.to_str().unwrap());
        assert_untouched(&volume.backing, kind, HoldReason::FilesystemErrors);
    }
}

#[test]
fn what_is_not_the_filesystem_asked_for_is_not_touched() {
    // Fails if an empty or another content is mounted or made into something.
    let bench = Bench::new();
    let empty = bench.file("empty", FROM);
    let kind = FilesystemKind::Xfs;
    assert_untouched(&empty, kind, HoldReason::FilesystemUnsupported);
    let volume = idle(&bench, FilesystemKind::Btrfs);
    assert_untouched(&volume.backing, kind, HoldReason::FilesystemMismatch);
}

/// The log of an xfs as its own tool reads it.
fn log_is_clean_by_its_tool(file: &Path) -> bool {
    let output = Command::new("xfs_logprint")
        .args(["-t", file.to_str().unwrap()])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("state:"), "{text}");
    text.contains("<CLEAN>")
}

#[test]
fn the_log_of_xfs_is_read_as_its_own_tool_reads_it() {
    // Fails if the end of the log is looked for in the wrong place after some history.
    let bench = Bench::new();
    let kind = FilesystemKind::Xfs;
    let volume = bench.volume("v", kind, FROM);
    volume.take_down();
    let mut size = FROM;
    for round in 0..12u64 {
        let device = volume::attach(&volume.backing, false).unwrap();
        volume::stage(&device.path, kind, &volume.staging, false).unwrap();
        for file in 0..round * 20 {
            std::fs::write(volume.staging.join(format!("{round}-{file}")), b"x").unwrap();
        }
        let crash = round % 3 == 2;
        if crash {
            shut_down(&volume.staging);
        }
        volume::unstage(&volume.staging, Some(device.number)).unwrap();
        volume::detach(&volume.backing).unwrap();
        size = Bytes::new(size.get() + (64 << 20));
        set_size(&volume.backing, size);
        let clean = log_is_clean_by_its_tool(&volume.backing);
        assert_eq!(clean, !crash, "round {round}");
        assert_eq!(
            volume::grow_idle(&volume.backing, kind).is_ok(),
            clean,
            "round {round}"
        );
    }
}

const STEP: &str = "TRELLIS_TEST_STEP";
const FILE: &str = "TRELLIS_TEST_FILE";
const KIND: &str = "TRELLIS_TEST_KIND";

/// What the process that is to die does.
fn die(step: &str) {
    let (file, kind) = (std::env::var(FILE).unwrap(), std::env::var(KIND).unwrap());
    assert!(Step::from_name(step).is_some());
    step::install_hook(|reached| {
        if std::env::var(STEP).is_ok_and(|wanted| wanted == reached.name()) {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    });
    let _ = volume::grow_idle(Path::new(&file), kind.parse().unwrap());
}

#[test]
fn a_death_at_any_step_leaves_nothing_and_a_second_try_ends_it() {
    // Fails if a killed growth leaves a device, a mount or an unclean filesystem, or cannot be repeated.
    if let Ok(step) = std::env::var(STEP) {
        return die(&step);
    }
    let name = "a_death_at_any_step_leaves_nothing_and_a_second_try_ends_it";
    let steps = Step::ALL.iter().filter(|step| step.is_of_idle_growth());
    for (step, kind) in steps.flat_map(|step| growing().into_iter().map(move |kind| (step, kind))) {
        let bench = Bench::new();
        let volume = idle(&bench, kind);
        let variables = [
            (STEP, step.name()),
            (FILE, volume.backing.to_str().unwrap()),
            (KIND, kind.name()),
        ];
        let mut child = Process::of_this_test(name, &variables);
        let status = child.0.wait().unwrap();
        assert_eq!(
            status.signal(),
            Some(9),
            "nothing reaches {step:?} on {kind}"
        );
        assert_nothing_left(&volume);
        check(kind, &volume.backing);
        let fit = filesystem::measure_idle(kind, &volume.backing).unwrap();
        let outcome = volume::grow_idle(&volume.backing, kind).unwrap();
        assert_eq!(outcome.size(), fit.largest_fit(TO), "{step:?} on {kind}");
        assert_nothing_left(&volume);
        assert_data(&volume);
    }
}
