//! Paths of consumers: what they show, and what is refused.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::Path;
use std::process::{Child, Command};

use common::{Bench, Volume};
use trellis_api::Bytes;
use trellis_node::Error;
use trellis_node::error::PathProblem;
use trellis_node::filesystem::FilesystemKind;
use trellis_node::sys::mountinfo;
use trellis_node::volume::{self, Published, Source, publish, unpublish};

fn xfs(bench: &Bench) -> Volume {
    bench.volume("v", FilesystemKind::Xfs, Bytes::mib(300))
}

fn problem(error: Error) -> PathProblem {
    match error {
        Error::UnusablePath { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

fn is_mounted(path: &Path) -> bool {
    mountinfo::at(&mountinfo::read().unwrap(), path).is_some()
}

#[test]
fn a_published_path_shows_the_volume_and_goes_without_a_trace() {
    // Fails if the path does not show the volume's files, or if something is left after unpublish.
    let bench = Bench::new();
    let volume = xfs(&bench);
    let (path, kept) = (bench.path("made"), bench.dir("kept"));
    let source = Source::Filesystem {
        staging: &volume.staging,
    };
    for target in [&path, &kept] {
        assert_eq!(publish(source, target, false).unwrap(), Published::Mounted);
        assert_eq!(
            publish(source, target, false).unwrap(),
            Published::AlreadyThere
        );
    }
    fs::write(path.join("file"), "text").unwrap();
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "text");
    for target in [&path, &kept] {
        assert!(unpublish(target, Some(volume.device.number)).unwrap());
        assert!(!unpublish(target, Some(volume.device.number)).unwrap());
    }
    assert!(!path.exists(), "a directory that publish made is removed");
    assert!(kept.exists(), "a directory that was there before stays");
    volume.take_down();
    assert!(!volume.staging.exists());
}

#[test]
fn a_read_only_path_refuses_writes_while_another_path_writes() {
    // Fails if read-only is not enforced, or makes the whole volume read-only.
    for kind in [
        FilesystemKind::Xfs,
        FilesystemKind::Btrfs,
        FilesystemKind::Ext4,
    ] {
        let bench = Bench::new();
        let volume = bench.volume("v", kind, Bytes::mib(300));
        let (ro, rw) = (bench.path("ro"), bench.path("rw"));
        let source = Source::Filesystem {
            staging: &volume.staging,
        };
        publish(source, &ro, true).unwrap();
        publish(source, &rw, false).unwrap();
        let error = fs::write(ro.join("file"), "no").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        fs::write(rw.join("file"), "yes").unwrap();
        assert_eq!(fs::read_to_string(ro.join("file")).unwrap(), "yes");
        assert_eq!(publish(source, &ro, true).unwrap(), Published::AlreadyThere);
        // What a crash between the bind and its remount leaves is mended.
        assert_eq!(publish(source, &rw, true).unwrap(), Published::MadeReadOnly);
        assert!(fs::write(rw.join("file"), "no").is_err());
        assert!(matches!(
            problem(publish(source, &ro, false).unwrap_err()),
            PathProblem::OtherMount(_)
        ));
        for path in [&ro, &rw] {
            unpublish(path, Some(volume.device.number)).unwrap();
        }
        volume.take_down();
    }
}

#[test]
fn a_path_in_use_is_refused_and_left_as_it_was() {
    // Fails if a mount hides somebody's files, follows a link, or replaces another mount.
    let bench = Bench::new();
    let volume = xfs(&bench);
    let source = Source::Filesystem {
        staging: &volume.staging,
    };
    let full = bench.dir("full");
    fs::write(full.join("file"), "mine").unwrap();
    let file = bench.path("file");
    fs::write(&file, "mine").unwrap();
    let link = bench.path("link");
    symlink(bench.dir("real"), &link).unwrap();
    let memory = bench.dir("memory");
    rustix::mount::mount(
        "tmpfs",
        &memory,
        "tmpfs",
        rustix::mount::MountFlags::empty(),
        None,
    )
    .unwrap();

    let refuse = |path: &Path| problem(publish(source, path, false).unwrap_err());
    assert_eq!(refuse(&full), PathProblem::NotEmpty);
    assert_eq!(refuse(&file), PathProblem::NotADirectory);
    assert_eq!(refuse(&link), PathProblem::Symlink);
    assert_eq!(refuse(Path::new("relative/path")), PathProblem::NotAbsolute);
    assert_eq!(refuse(Path::new("/")), PathProblem::NotAbsolute);
    assert_eq!(
        refuse(&bench.path("real/../real")),
        PathProblem::NotAbsolute
    );
    assert!(matches!(refuse(&memory), PathProblem::OtherMount(_)));
    let error = publish(source, &bench.path("no/parent"), false).unwrap_err();
    assert_eq!(error.errno(), Some(rustix::io::Errno::NOENT));

    let error = unpublish(&memory, Some(volume.device.number)).unwrap_err();
    assert!(matches!(problem(error), PathProblem::OtherMount(_)));
    let error = unpublish(&memory, None).unwrap_err();
    assert!(matches!(problem(error), PathProblem::OtherMount(_)));
    for path in [
        &full,
        &file,
        &link,
        &bench.path("absent"),
        &bench.path("no/parent"),
    ] {
        assert!(!unpublish(path, Some(volume.device.number)).unwrap());
    }
    assert_eq!(fs::read_to_string(full.join("file")).unwrap(), "mine");
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(is_mounted(&memory));
    volume.take_down();
}

#[test]
fn an_unstaged_volume_is_never_published() {
    // Fails if the bare directory below a missing mount is shown: writes would land on the host's disk.
    let bench = Bench::new();
    let staging = bench.dir("staging");
    let error = publish(
        Source::Filesystem { staging: &staging },
        &bench.path("p"),
        false,
    )
    .unwrap_err();
    assert!(matches!(error, Error::NotStaged { .. }), "{error}");
    assert!(!bench.path("p").exists());
}

#[test]
fn a_block_volume_is_the_device_at_a_file() {
    // Fails if the path is not the device, or if the file stays after unpublish.
    let bench = Bench::new();
    let backing = bench.file("b", Bytes::mib(8));
    let device = volume::attach(&backing, false).unwrap();
    let source = Source::Block {
        device: &device.path,
    };
    let path = bench.path("disk");
    assert_eq!(publish(source, &path, false).unwrap(), Published::Mounted);
    assert_eq!(
        publish(source, &path, false).unwrap(),
        Published::AlreadyThere
    );
    let shown = fs::metadata(&path).unwrap();
    assert!(shown.file_type().is_block_device());
    assert_eq!(shown.rdev(), fs::metadata(&device.path).unwrap().rdev());
    let seen = volume::observe(&backing, &bench.path("m")).unwrap();
    assert!(
        seen.publications.len() == 1 && seen.publications[0].block,
        "{seen:?}"
    );
    let error = publish(source, &bench.path("ro"), true).unwrap_err();
    assert!(matches!(error, Error::DeviceWritable { .. }), "{error}");
    let taken = bench.path("taken");
    fs::write(&taken, "mine").unwrap();
    assert_eq!(
        problem(publish(source, &taken, false).unwrap_err()),
        PathProblem::NotAnEmptyFile
    );
    // Detached now, the path would show whatever the device carries next.
    assert!(matches!(
        volume::detach(&backing).unwrap_err(),
        Error::Busy { .. }
    ));
    assert!(unpublish(&path, Some(device.number)).unwrap());
    assert!(!path.exists());
    assert!(volume::detach(&backing).unwrap());
}

#[test]
fn a_busy_mount_stays_and_its_holder_is_named() {
    // Fails if a mount in use is taken away lazily, or if the error does not say who uses it.
    let bench = Bench::new();
    let volume = xfs(&bench);
    let path = bench.path("p");
    publish(
        Source::Filesystem {
            staging: &volume.staging,
        },
        &path,
        false,
    )
    .unwrap();
    let open = File::create(path.join("file")).unwrap();
    let error = unpublish(&path, Some(volume.device.number)).unwrap_err();
    let Error::Busy { holders, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        holders
            .iter()
            .any(|holder| holder.pid == std::process::id()),
        "{error}"
    );
    assert!(is_mounted(&path));
    drop(open);
    assert!(unpublish(&path, Some(volume.device.number)).unwrap());
    volume.take_down();
}

/// A process in a mount namespace of its own, with a copy of all mounts, that runs `first` and sleeps.
struct Elsewhere(Child);

impl Elsewhere {
    fn start(bench: &Bench, first: &str) -> Elsewhere {
        let ready = bench.path("ready");
        let script = format!("{first}; touch {}; exec sleep 600", ready.display());
        let arguments = ["-m", "--propagation", "private", "sh", "-c", &script];
        let mut child = Elsewhere(Command::new("unshare").args(arguments).spawn().unwrap());
        while !ready.exists() {
            assert!(
                child.0.try_wait().unwrap().is_none(),
                "the process ended early"
            );
            std::thread::yield_now();
        }
        child
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_copy_of_the_mounts_in_another_namespace_does_not_pin_a_volume() {
    // Fails if a container that was started while the volume was mounted keeps its device for ever.
    let bench = Bench::new();
    let volume = xfs(&bench);
    let path = bench.path("p");
    publish(
        Source::Filesystem {
            staging: &volume.staging,
        },
        &path,
        false,
    )
    .unwrap();
    let _elsewhere = Elsewhere::start(&bench, "true");
    unpublish(&path, Some(volume.device.number)).unwrap();
    volume.take_down();
}

#[test]
fn a_file_open_in_another_namespace_keeps_the_device_and_is_named() {
    // Fails if the device is taken from a user in another namespace, or if the user is not named.
    let bench = Bench::new();
    let volume = xfs(&bench);
    fs::write(volume.staging.join("file"), "text").unwrap();
    let open = format!("exec 3< {}/file", volume.staging.display());
    let elsewhere = Elsewhere::start(&bench, &open);
    volume::unstage(&volume.staging, Some(volume.device.number)).unwrap();
    let error = volume::detach(&volume.backing).unwrap_err();
    let Error::Busy { holders, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        holders.iter().any(|holder| holder.pid == elsewhere.0.id()),
        "{error}"
    );
    drop(elsewhere);
    // The last close ends the mount, shortly after the process.
    for _ in 0..200 {
        match volume::detach(&volume.backing) {
            Ok(done) => return assert!(done),
            Err(Error::Busy { .. }) => std::thread::sleep(std::time::Duration::from_millis(50)),
            Err(error) => panic!("{error}"),
        }
    }
    panic!("the device stays busy");
}

#[test]
fn a_read_only_device_can_be_staged_and_published_read_only() {
    // Fails if a read-only attachment cannot be read, or can be written.
    let bench = Bench::new();
    let volume = xfs(&bench);
    fs::write(volume.staging.join("file"), "text").unwrap();
    volume.take_down();
    let device = volume::attach(&volume.backing, true).unwrap();
    volume::stage(&device.path, volume.kind, &volume.staging, true).unwrap();
    assert_eq!(
        fs::read_to_string(volume.staging.join("file")).unwrap(),
        "text"
    );
    assert!(
        OpenOptions::new()
            .write(true)
            .open(volume.staging.join("file"))
            .is_err()
    );
    let disk = bench.path("disk");
    publish(
        Source::Block {
            device: &device.path,
        },
        &disk,
        true,
    )
    .unwrap();
    unpublish(&disk, Some(device.number)).unwrap();
    volume.take_down();
}
