//! A volume as a block device: a loop device on the file that FUSE shows, and a filesystem on that.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
#[path = "common/fuse.rs"]
mod fuse;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{check, fill, run, verify};
use fuse::{Aligned, FileBacking, FuseHome, open_direct};
use trellis_api::Bytes;
use trellis_node::filesystem::{FilesystemKind, Outcome};
use trellis_node::sys::block;
use trellis_node::sys::loopdev;
use trellis_node::volume;

/// A loop device with that sector on the file, made by hand: ours always have 512 bytes.
fn losetup(file: &Path, sector: &str) -> PathBuf {
    let output = Command::new("losetup")
        .args([
            "--find",
            "--show",
            "--direct-io=on",
            "--sector-size",
            sector,
        ])
        .arg(file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

#[test]
fn a_filesystem_grows_while_it_is_mounted_and_written() {
    // Fails if direct I/O does not hold through loop and FUSE, if the device or the filesystem misses a growth
    // or needs a second look, if an I/O fails meanwhile, or if a byte or the filesystem's order suffers.
    for sector in ["512", "4096"] {
        let home = FuseHome::new(Bytes::mib(512));
        let backing = FileBacking::prompt(&home.data());
        let mut server = home.serve(&backing);
        let node = losetup(&server.file(), sector);
        let device = volume::attach(&server.file(), false).unwrap();
        assert_eq!(device.path, node);
        assert!(device.adopted && device.direct_io);
        let logical = block::logical_block(block::open(&node).unwrap()).unwrap();
        assert_eq!(
            logical.to_string(),
            Bytes::new(sector.parse().unwrap()).to_string()
        );

        let staging = home.path("mounted");
        volume::ensure_filesystem(&node, FilesystemKind::Xfs, &home.path("note")).unwrap();
        volume::stage(&node, FilesystemKind::Xfs, &staging, false).unwrap();
        let before = fill(&staging.join("before"), 1, 64 << 20);
        let during = {
            let path = staging.join("during");
            thread::spawn(move || fill(&path, 2, 128 << 20))
        };
        for to in [Bytes::mib(600), Bytes::mib(1024)] {
            // A look just before must not be remembered.
            assert!(fs::metadata(server.file()).unwrap().len() < to.get());
            backing.grow(to);
            server.grown().unwrap();
            assert_eq!(fs::metadata(server.file()).unwrap().len(), to.get());
            let raised = volume::grow_device(&server.file(), to).unwrap();
            assert!(matches!(raised, Outcome::Raised { to: size, .. } if size == to));
            let grown = volume::grow_filesystem(FilesystemKind::Xfs, &staging, &node).unwrap();
            assert!(matches!(grown, Outcome::Raised { .. }));
        }
        let during = during.join().unwrap();
        assert_eq!((before, during), (64 << 20, 128 << 20));
        // More than the volume had at first.
        let after = fill(&staging.join("after"), 3, 500 << 20);
        assert_eq!(after, 500 << 20);
        volume::unstage(&staging, Some(device.number)).unwrap();
        volume::stage(&node, FilesystemKind::Xfs, &staging, false).unwrap();
        for (name, seed, length) in [
            ("before", 1, before),
            ("during", 2, during),
            ("after", 3, after),
        ] {
            verify(&staging.join(name), seed, length);
        }
        volume::unstage(&staging, Some(device.number)).unwrap();
        check(FilesystemKind::Xfs, &node);
        assert!(volume::detach(&server.file()).unwrap());
        server.unmount().unwrap();
        assert_eq!(backing.misaligned.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn a_device_under_load_can_use_all_of_a_growth_at_once() {
    // Fails if the kernel does not know the new end of the file although everybody was told of it: it then
    // refuses to read behind the old one. It throws an answer about the size away when a write has ended
    // meanwhile, so writes go on all the time.
    let home = FuseHome::new(Bytes::mib(16));
    let backing = FileBacking::prompt(&home.data());
    let mut server = home.serve(&backing);
    let device = volume::attach(&server.file(), false).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..4u64)
        .map(|writer| {
            let (stop, file) = (Arc::clone(&stop), open_direct(&device.path));
            thread::spawn(move || {
                let mut block = Aligned::new(4096);
                while !stop.load(Ordering::Relaxed) {
                    file.write_all_at(block.bytes(), writer * 8192).unwrap();
                }
            })
        })
        .collect();
    let file = open_direct(&device.path);
    let mut block = Aligned::new(4096);
    for step in 1..=200u64 {
        let size = Bytes::new((16 << 20) + step * 4096);
        backing.grow(size);
        server.grown().unwrap();
        let raised = volume::grow_device(&server.file(), size).unwrap();
        assert!(matches!(raised, Outcome::Raised { to, .. } if to == size));
        block.bytes().fill(1);
        file.read_exact_at(block.bytes(), size.get() - 4096)
            .unwrap();
        assert!(block.bytes().iter().all(|byte| *byte == 0));
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.join().unwrap();
    }
    drop(file);
    volume::detach(&server.file()).unwrap();
    server.unmount().unwrap();
}

#[test]
fn trimming_a_mounted_filesystem_gives_back_the_volumes_space() {
    // Fails if a loop device on FUSE passes no discards on, or only some of them.
    let home = FuseHome::new(Bytes::mib(512));
    let backing = FileBacking::prompt(&home.data());
    let mut server = home.serve(&backing);
    let device = volume::attach(&server.file(), false).unwrap();
    let staging = home.path("mounted");
    volume::ensure_filesystem(&device.path, FilesystemKind::Xfs, &home.path("note")).unwrap();
    volume::stage(&device.path, FilesystemKind::Xfs, &staging, false).unwrap();
    let empty = backing.allocated();
    fill(&staging.join("large"), 1, 200 << 20);
    assert!(backing.allocated() >= empty + (200 << 20));
    fs::remove_file(staging.join("large")).unwrap();
    // The filesystem frees what was removed a moment later, on its own thread, and cannot trim it before. The log and
    // some counters are written meanwhile.
    common::eventually("all of the space is given back", || {
        run("sync", &["-f", staging.to_str().unwrap()]);
        run("fstrim", &[staging.to_str().unwrap()]);
        let left = backing.allocated();
        println!(
            "empty {empty}, after the trim {left}, zeroed {}",
            backing.zeroed.load(Ordering::SeqCst)
        );
        left < empty + (16 << 20)
    });
    volume::unstage(&staging, Some(device.number)).unwrap();
    check(FilesystemKind::Xfs, &device.path);
    volume::detach(&server.file()).unwrap();
    server.unmount().unwrap();
}

#[test]
fn a_barrier_on_the_device_is_a_flush_of_the_volume() {
    // Fails if syncing the device does not reach the volume: what the filesystem believes durable would not be.
    let home = FuseHome::new(Bytes::mib(16));
    let backing = FileBacking::prompt(&home.data());
    let mut server = home.serve(&backing);
    let device = volume::attach(&server.file(), false).unwrap();
    let file = open_direct(&device.path);
    let mut block = Aligned::new(4096);
    let before = backing.flushes.load(Ordering::SeqCst);
    file.write_all_at(block.bytes(), 0).unwrap();
    file.sync_data().unwrap();
    assert_eq!(backing.flushes.load(Ordering::SeqCst), before + 1);
    drop(file);
    volume::detach(&server.file()).unwrap();
    server.unmount().unwrap();
}

/// Operations a second of so many threads, each with one operation of 4 KiB at a time.
fn operations_a_second(device: &Path, depth: u64, write: bool) -> u64 {
    const TIME: Duration = Duration::from_millis(400);
    let (stop, count) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let blocks = block::size(block::open(device).unwrap()).unwrap().get() / 4096;
    let since = Instant::now();
    let threads: Vec<_> = (0..depth)
        .map(|thread| {
            let (stop, count, file) = (Arc::clone(&stop), Arc::clone(&count), open_direct(device));
            thread::spawn(move || {
                let mut block = Aligned::new(4096);
                let mut at = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                while !stop.load(Ordering::Relaxed) {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let offset = (at >> 16) % blocks * 4096;
                    if write {
                        file.write_all_at(block.bytes(), offset).unwrap();
                    } else {
                        file.read_exact_at(block.bytes(), offset).unwrap();
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    thread::sleep(TIME);
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    let millis = u64::try_from(since.elapsed().as_millis()).unwrap();
    count.load(Ordering::Relaxed) * 1000 / millis
}

#[test]
fn its_speed_is_printed_beside_that_of_a_plain_file() {
    // Fails only if an operation does; the figures are for whoever looks at them.
    let home = FuseHome::below(Path::new("/dev/shm"), Bytes::mib(64));
    let bare = home.path("bare");
    common::set_size(&bare, Bytes::mib(64));
    let backing = FileBacking::prompt(&home.data());
    let mut server = home.serve(&backing);
    let devices =
        [bare.clone(), server.file()].map(|file| volume::attach(&file, false).unwrap().path);
    for (write, depth) in [(false, 1), (false, 32), (true, 1), (true, 32)] {
        let [bare, fuse] = devices
            .each_ref()
            .map(|device| operations_a_second(device, depth, write));
        let what = if write { "write" } else { "read" };
        println!("4 KiB random {what} depth {depth}: bare loop {bare}/s, loop on FUSE {fuse}/s");
    }
    for file in [bare, server.file()] {
        volume::detach(&file).unwrap();
    }
    server.unmount().unwrap();
    assert!(loopdev::on_path(&home.file()).unwrap().is_empty());
}
