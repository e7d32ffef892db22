//! A volume as a file, through the real FUSE of this kernel.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
#[path = "common/fuse.rs"]
mod fuse;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use fuse::{FileBacking, FuseHome, pattern};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use trellis_api::Bytes;
use trellis_node::Error;
use trellis_node::fuse::{BackingError, Options, Server};

fn errno(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

#[test]
fn the_file_is_the_volume() {
    // Fails if bytes change or move on their way, if large transfers are cut, if a durable write or a sync
    // does not reach the volume as one, or if the data of a write is not aligned.
    let home = FuseHome::new(Bytes::mib(64));
    let backing = FileBacking::prompt(&home.data());
    let mut server = home.serve(&backing);
    assert_eq!(server.file(), home.file());
    let names: Vec<_> = fs::read_dir(home.mount_point())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["volume"]);
    assert_eq!(fs::metadata(home.file()).unwrap().len(), 64 << 20);

    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(home.file())
        .unwrap();
    for (seed, offset, len) in [
        (1, 0, 4096),
        (2, 4096 * 3 + 512, 512),
        (3, 8 << 20, 5 << 20),
        (4, 100, 77),
    ] {
        file.write_all_at(&pattern(seed, len), offset).unwrap();
    }
    for (seed, offset, len) in [
        (2, 4096 * 3 + 512, 512),
        (3, 8 << 20, 5 << 20),
        (4, 100, 77),
    ] {
        let (mut seen, mut stored) = (vec![0; len], vec![0; len]);
        file.read_exact_at(&mut seen, offset).unwrap();
        let data = File::open(home.data()).unwrap();
        data.read_exact_at(&mut stored, offset).unwrap();
        assert!(seen == pattern(seed, len) && stored == seen, "at {offset}");
    }
    assert_eq!(backing.misaligned.load(Ordering::SeqCst), 0);
    // Five MiB are five requests, not forty or a thousand.
    assert!(backing.writes.load(Ordering::SeqCst) <= 9);

    assert_eq!(backing.flushes.load(Ordering::SeqCst), 0);
    file.sync_data().unwrap();
    assert_eq!(backing.flushes.load(Ordering::SeqCst), 1);
    let durable = i32::try_from(OFlags::DSYNC.bits()).unwrap();
    let synced = OpenOptions::new()
        .write(true)
        .custom_flags(durable)
        .open(home.file())
        .unwrap();
    synced.write_all_at(b"durable", 0).unwrap();
    assert_eq!(backing.durable_writes.load(Ordering::SeqCst), 1);

    drop((file, synced));
    server.unmount().unwrap();
    assert!(fs::read_dir(home.mount_point()).unwrap().next().is_none());
}

#[test]
fn the_end_of_the_volume_is_the_end() {
    // Fails if a write stretches the file, if the file can be cut off, renamed over, or joined by another, or
    // if anything behind the end is more than nothing.
    let home = FuseHome::new(Bytes::mib(1));
    let backing = FileBacking::prompt(&home.data());
    let _server = home.serve(&backing);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(home.file())
        .unwrap();
    let end = 1 << 20;
    assert_eq!(file.write_at(&[1; 1024], end - 512).unwrap(), 512);
    assert_eq!(
        errno(&file.write_at(&[1; 512], end).unwrap_err()),
        Some(Errno::NOSPC)
    );
    let mut block = [0; 1024];
    assert_eq!(file.read_at(&mut block, end - 512).unwrap(), 512);
    assert_eq!(file.read_at(&mut block, end).unwrap(), 0);
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), end);
    for size in [0, end - 1, end + 1] {
        assert_eq!(
            errno(&file.set_len(size).unwrap_err()),
            Some(Errno::PERM),
            "{size}"
        );
    }
    file.set_len(end).unwrap();
    assert!(File::create(home.file()).is_err());
    assert!(File::create(home.mount_point().join("other")).is_err());
    assert!(fs::remove_file(home.file()).is_err());
    assert_eq!(
        fs::metadata(home.mount_point().join("other"))
            .unwrap_err()
            .kind(),
        std::io::ErrorKind::NotFound
    );
    assert_eq!(fs::metadata(home.data()).unwrap().len(), end);
}

#[test]
fn a_growth_is_seen_by_the_next_look() {
    // Fails if a size is cached anywhere, by stat or by seeking, however short the time since the last look.
    let home = FuseHome::new(Bytes::mib(16));
    let backing = FileBacking::prompt(&home.data());
    let server = home.serve(&backing);
    let mut file = File::open(home.file()).unwrap();
    for step in 1..=200u64 {
        let size = (16 << 20) + step * 4096;
        assert_eq!(fs::metadata(home.file()).unwrap().len(), size - 4096);
        backing.grow(Bytes::new(size));
        server.grown().unwrap();
        let mut block = [1; 4096];
        file.read_exact_at(&mut block, size - 4096).unwrap();
        assert_eq!(block, [0; 4096]);
        assert_eq!(fs::metadata(home.file()).unwrap().len(), size);
        assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), size);
    }
}

#[test]
fn a_hole_is_a_hole_in_the_volume() {
    // Fails if punching or zeroing does not reach the volume, gives back nothing, or reaches too far.
    let home = FuseHome::new(Bytes::mib(8));
    let backing = FileBacking::prompt(&home.data());
    let _server = home.serve(&backing);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(home.file())
        .unwrap();
    file.write_all_at(&vec![7; 8 << 20], 0).unwrap();
    let full = backing.allocated();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 1 << 20, 4 << 20).unwrap();
    assert_eq!(backing.allocated(), full - (4 << 20));
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 6 << 20, 1 << 20).unwrap();
    // Behind the end: as far as there is something.
    rustix::fs::fallocate(&file, punch, (8 << 20) - 4096, 8192).unwrap();
    let behind = rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 8 << 20, 4096);
    assert_eq!(behind, Err(Errno::NOSPC));
    let allocate = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 4096);
    assert_eq!(allocate, Err(Errno::OPNOTSUPP));
    let mut seen = Vec::new();
    File::open(home.file())
        .unwrap()
        .read_to_end(&mut seen)
        .unwrap();
    let zero = |at: usize| {
        (1 << 20..5 << 20).contains(&at)
            || (6 << 20..7 << 20).contains(&at)
            || at >= (8 << 20) - 4096
    };
    assert!(
        seen.iter()
            .enumerate()
            .all(|(at, byte)| (*byte == 0) == zero(at))
    );
    assert_eq!(fs::metadata(home.file()).unwrap().size(), 8 << 20);
}

#[test]
fn an_error_has_its_own_number_and_one_that_passes_is_waited_for() {
    // Fails if an error of the volume arrives as another one, if a volume that is not ready fails a request
    // before its time, or if it is waited for longer than that.
    let home = FuseHome::new(Bytes::mib(1));
    let backing = FileBacking::prompt(&home.data());
    let options = Options {
        patience: Some(Duration::from_millis(600)),
        ..Options::default()
    };
    let dynamic: Arc<dyn trellis_node::fuse::Backing> = Arc::<FileBacking>::clone(&backing);
    let _server = Server::mount(&home.mount_point(), dynamic, options).unwrap();
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(home.file())
        .unwrap();
    for (error, number) in [
        (BackingError::Medium, Errno::IO),
        (BackingError::NoSpace, Errno::NOSPC),
        (BackingError::ReadOnly, Errno::ROFS),
        (BackingError::OutOfRange, Errno::NXIO),
        (BackingError::NotReady, Errno::TIMEDOUT),
    ] {
        backing.refuse(Some(error));
        assert_eq!(
            errno(&file.write_at(&[1; 512], 0).unwrap_err()),
            Some(number)
        );
    }
    let since = Instant::now();
    let (other, waiting) = (Arc::clone(&backing), Duration::from_millis(250));
    let ready = thread::spawn(move || {
        thread::sleep(waiting);
        other.refuse(None);
    });
    file.write_all(b"waited").unwrap();
    assert!(since.elapsed() >= waiting);
    ready.join().unwrap();

    backing.read_only.store(true, Ordering::SeqCst);
    assert_eq!(
        errno(&file.write_at(&[1; 512], 0).unwrap_err()),
        Some(Errno::ROFS)
    );
    let opened = OpenOptions::new().write(true).open(home.file());
    assert_eq!(errno(&opened.unwrap_err()), Some(Errno::ROFS));
    let mut text = [0; 6];
    file.read_exact_at(&mut text, 0).unwrap();
    assert_eq!(&text, b"waited");
}

#[test]
fn a_volume_in_use_stays_and_one_that_is_dropped_is_gone() {
    // Fails if an open file does not keep the mount, if a refused unmounting ends the service, if dropping
    // leaves a mount, or if a directory with something in it is covered.
    let home = FuseHome::new(Bytes::mib(1));
    let backing = FileBacking::prompt(&home.data());
    let mut server = home.serve(&backing);
    let file = File::open(home.file()).unwrap();
    assert!(matches!(server.unmount(), Err(Error::Busy { .. })));
    file.read_at(&mut [0; 512], 0).unwrap();
    drop(file);
    drop(server);
    assert!(!home.file().exists());
    fs::write(home.mount_point().join("precious"), b"").unwrap();
    let dynamic: Arc<dyn trellis_node::fuse::Backing> = Arc::<FileBacking>::clone(&backing);
    let refused = Server::mount(&home.mount_point(), dynamic, Options::default());
    assert!(matches!(refused, Err(Error::UnusablePath { .. })));
}

#[test]
fn a_mount_that_others_took_away_ends_its_server() {
    // Fails if the server does not notice, or if its end hangs or fails.
    let home = FuseHome::new(Bytes::mib(1));
    let backing = FileBacking::prompt(&home.data());
    let server = home.serve(&backing);
    assert!(!server.ended());
    rustix::mount::unmount(home.mount_point(), rustix::mount::UnmountFlags::empty()).unwrap();
    common::eventually("the server has noticed", || server.ended());
    server.grown().unwrap();
    drop(server);
}
