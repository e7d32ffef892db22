//! What happens when the server of a volume dies: with a successor, after a farewell, and for good.
//!
//! The server is this test program once more, in a process of its own that can be killed.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
#[path = "common/fuse.rs"]
mod fuse;

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{Process, check, fill, verify};
use fuse::{Aligned, FileBacking, FuseHome, open_direct, pattern};
use trellis_api::Bytes;
use trellis_node::filesystem::FilesystemKind;
use trellis_node::fuse::{
    Backing, BackingError, Kept, Negotiated, Options, Server, abort, dismantle, standing,
};
use trellis_node::sys::fdpass;
use trellis_node::{Error, volume};

/// Where a server process finds the socket over which it is told what to do.
const SOCKET: &str = "TRELLIS_TEST_FUSE_SOCKET";
/// Set for a server that answers at once, and so spends its time taking requests.
const PROMPT: &str = "TRELLIS_TEST_FUSE_PROMPT";
/// How long the volume takes for everything, so that there always is something under way.
const PAUSE: Duration = Duration::from_millis(2);

/// Gives a connection to another process.
fn hand_over(kept: &Kept, socket: &UnixStream) {
    let Negotiated { minor, flags } = kept.negotiated;
    let text = format!("{minor} {flags}");
    let descriptors = [kept.fuse.as_fd(), kept.requests.as_fd()];
    fdpass::send(socket, text.as_bytes(), &descriptors).unwrap();
}

/// Gets it.
fn receive(socket: &UnixStream) -> Option<Kept> {
    let mut received = fdpass::receive(socket, 64).unwrap();
    let text = String::from_utf8(received.message).unwrap();
    let (minor, flags) = text.split_once(' ')?;
    Some(Kept {
        requests: received.descriptors.pop()?,
        fuse: received.descriptors.pop()?,
        negotiated: Negotiated {
            minor: minor.parse().unwrap(),
            flags: flags.parse().unwrap(),
        },
    })
}

/// Is the server if this process was started as one; never returns then.
fn serve_if_asked() {
    let Ok(socket) = std::env::var(SOCKET) else {
        return;
    };
    let socket = Path::new(&socket);
    let home = socket.parent().unwrap();
    let (mount_point, data) = (home.join("at"), home.join("data"));
    let stream = UnixStream::connect(socket).unwrap();
    let backing: Arc<dyn Backing> = match std::env::var_os(PROMPT) {
        Some(_) => FileBacking::prompt(&data),
        None => FileBacking::slow(&data, PAUSE),
    };
    let options = Options::default();
    let server = match receive(&stream) {
        Some(kept) => Server::resume(kept, &mount_point, backing, options).unwrap(),
        None => Server::mount(&mount_point, backing, options).unwrap(),
    };
    hand_over(&Kept::of(&server).unwrap(), &stream);
    // Until the test kills this process, or is gone itself.
    let _ = fdpass::receive(&stream, 1);
    std::process::exit(0);
}

/// Starts a server process: one that mounts, or one that goes on with what was kept.
fn start(home: &FuseHome, test: &str, kept: Option<&Kept>) -> (Process, UnixStream, Kept) {
    start_with(home, test, kept, &[])
}

fn start_with(
    home: &FuseHome,
    test: &str,
    kept: Option<&Kept>,
    environment: &[(&str, &str)],
) -> (Process, UnixStream, Kept) {
    let path = home.path("socket");
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let mut environment = environment.to_vec();
    environment.push((SOCKET, path.to_str().unwrap()));
    let process = Process::of_this_test(test, &environment);
    let (stream, _) = listener.accept().unwrap();
    match kept {
        Some(kept) => hand_over(kept, &stream),
        None => fdpass::send(&stream, b"mount", &[]).unwrap(),
    }
    let kept = receive(&stream).unwrap();
    (process, stream, kept)
}

/// Writes blocks for as long as it is let, each one again and again with another content, and reads each back
/// at once. Every writer has blocks of its own.
struct Writers {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    threads: Vec<thread::JoinHandle<Vec<u64>>>,
}

const WRITERS: u64 = 6;
const BLOCKS_EACH: u64 = 16;

fn content(block: u64, version: u64) -> Vec<u8> {
    pattern(block << 32 | version, 4096)
}

impl Writers {
    fn start(device: &Path) -> Writers {
        let (stop, acknowledged) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let threads = (0..WRITERS)
            .map(|writer| {
                let (stop, acknowledged) = (Arc::clone(&stop), Arc::clone(&acknowledged));
                let file = open_direct(device);
                thread::spawn(move || {
                    let mut versions = vec![0; usize::try_from(BLOCKS_EACH).unwrap()];
                    let mut room = Aligned::new(4096);
                    while !stop.load(Ordering::Relaxed) {
                        for (index, version) in versions.iter_mut().enumerate() {
                            let block = writer * BLOCKS_EACH + u64::try_from(index).unwrap();
                            room.bytes().copy_from_slice(&content(block, *version + 1));
                            file.write_all_at(room.bytes(), block * 4096).unwrap();
                            *version += 1;
                            acknowledged.fetch_add(1, Ordering::Relaxed);
                            room.bytes().fill(0);
                            file.read_exact_at(room.bytes(), block * 4096).unwrap();
                            assert!(room.bytes() == content(block, *version), "block {block}");
                        }
                    }
                    versions
                })
            })
            .collect();
        Writers {
            stop,
            acknowledged,
            threads,
        }
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits until so many more writes were acknowledged.
    fn go_on(&self, more: u64) {
        let goal = self.acknowledged() + more;
        common::eventually("writes go on", || self.acknowledged() >= goal);
    }

    /// Ends the writers and compares every block with what was acknowledged last.
    fn verify(self, data: &Path) {
        self.stop.store(true, Ordering::Relaxed);
        let data = File::open(data).unwrap();
        let mut block = 0;
        for thread in self.threads {
            for version in thread.join().unwrap() {
                let mut stored = vec![0; 4096];
                data.read_exact_at(&mut stored, block * 4096).unwrap();
                assert!(
                    version > 0 && stored == content(block, version),
                    "block {block}"
                );
                block += 1;
            }
        }
        assert_eq!(block, WRITERS * BLOCKS_EACH);
    }
}

#[test]
fn a_successor_goes_on_where_a_killed_server_stopped() {
    // Fails if an I/O fails or hangs, or an acknowledged write is lost, when the server process is killed with
    // requests under way and another one resumes on the connection that was kept.
    serve_if_asked();
    let home = FuseHome::new(Bytes::mib(16));
    let test = "a_successor_goes_on_where_a_killed_server_stopped";
    let (mut server, mut stream, mut kept) = start(&home, test, None);
    let device = volume::attach(&home.file(), false).unwrap();
    assert!(device.direct_io);
    let writers = Writers::start(&device.path);
    for _ in 0..4 {
        writers.go_on(100);
        server.0.kill().unwrap();
        server.0.wait().unwrap();
        let at_death = writers.acknowledged();
        drop(stream);
        // Nobody serves: everybody waits, and nobody gets an error.
        thread::sleep(Duration::from_millis(50));
        // (A writer may have been on its way to count what was answered.)
        assert!(writers.acknowledged() <= at_death + WRITERS);
        (server, stream, kept) = start(&home, test, Some(&kept));
    }
    writers.go_on(100);
    writers.verify(&home.data());
    assert!(volume::detach(&home.file()).unwrap());
}

#[test]
fn a_server_that_is_killed_while_it_takes_a_write_fails_nobody() {
    // Fails if a write gets EIO because the server was killed when the kernel was copying it into memory that the
    // server had not touched before, or a read because of the same in the other direction.
    serve_if_asked();
    const WRITE_BYTES: usize = 1 << 20;
    const KILLS: u32 = 48;
    let home = FuseHome::new(Bytes::mib(16));
    let test = "a_server_that_is_killed_while_it_takes_a_write_fails_nobody";
    let prompt = [(PROMPT, "1")];
    let (mut server, mut stream, mut kept) = start_with(&home, test, None, &prompt);
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..2)
        .map(|writer| {
            let (stop, file) = (Arc::clone(&stop), open_direct(&home.file()));
            thread::spawn(move || {
                let mut room = Aligned::new(WRITE_BYTES);
                room.bytes().fill(7);
                let mut writes = 0;
                while !stop.load(Ordering::Relaxed) {
                    file.write_all_at(room.bytes(), writer << 20).unwrap();
                    file.read_exact_at(room.bytes(), writer << 20).unwrap();
                    writes += 1;
                }
                writes
            })
        })
        .collect();
    for kill in 0..KILLS {
        thread::sleep(Duration::from_micros(127 * u64::from(kill)));
        server.0.kill().unwrap();
        server.0.wait().unwrap();
        drop(stream);
        (server, stream, kept) = start_with(&home, test, Some(&kept), &prompt);
    }
    stop.store(true, Ordering::Relaxed);
    let writes: u32 = writers.into_iter().map(|each| each.join().unwrap()).sum();
    assert!(writes > 0, "nothing was written between {KILLS} deaths");
}

#[test]
fn a_filesystem_does_not_notice_that_its_server_was_killed() {
    // Fails if the filesystem stops, or loses a byte, when the server is killed and replaced under it; or if a
    // growth during the time without a server is not seen.
    serve_if_asked();
    let home = FuseHome::new(Bytes::mib(512));
    let test = "a_filesystem_does_not_notice_that_its_server_was_killed";
    let (mut server, _stream, kept) = start(&home, test, None);
    let device = volume::attach(&home.file(), false).unwrap();
    let staging = home.path("mounted");
    volume::ensure_filesystem(&device.path, FilesystemKind::Xfs, &home.path("note")).unwrap();
    volume::stage(&device.path, FilesystemKind::Xfs, &staging, false).unwrap();
    let file = staging.join("file");
    let writer = {
        let file = file.clone();
        thread::spawn(move || fill(&file, 5, 96 << 20))
    };
    common::eventually("the file grows", || {
        fs::metadata(home.data()).unwrap().len() > 0
            && fs::metadata(&file).is_ok_and(|meta| meta.len() > 8 << 20)
    });
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    common::set_size(&home.data(), Bytes::mib(640));
    let (_server, _stream, _kept) = start(&home, test, Some(&kept));
    volume::grow_device(&home.file(), Bytes::mib(640)).unwrap();
    volume::grow_filesystem(FilesystemKind::Xfs, &staging, &device.path).unwrap();
    let written = writer.join().unwrap();
    assert_eq!(written, 96 << 20);
    volume::unstage(&staging, Some(device.number)).unwrap();
    volume::stage(&device.path, FilesystemKind::Xfs, &staging, false).unwrap();
    verify(&file, 5, written);
    volume::unstage(&staging, Some(device.number)).unwrap();
    check(FilesystemKind::Xfs, &device.path);
    assert!(volume::detach(&home.file()).unwrap());
}

#[test]
fn a_server_that_leaves_has_nothing_under_way() {
    // Fails if a request is lost or fails between a server that leaves and the one that goes on, or if the
    // first one still works on something when it has left.
    let home = FuseHome::new(Bytes::mib(16));
    let first = FileBacking::slow(&home.data(), PAUSE);
    let mut server = home.serve(&first);
    let file = home.file();
    let writers = Writers::start(&file);
    for _ in 0..10 {
        writers.go_on(50);
        let kept = Kept::of(&server).unwrap();
        assert!(server.leave(Duration::from_secs(20)));
        let at_farewell = writers.acknowledged();
        thread::sleep(4 * PAUSE);
        // A writer may have been on its way to count what was answered.
        assert!(writers.acknowledged() <= at_farewell + WRITERS);
        let backing: Arc<dyn Backing> = FileBacking::slow(&home.data(), PAUSE);
        let at = home.mount_point();
        server = Server::resume(kept, &at, backing, Options::default()).unwrap();
    }
    writers.go_on(50);
    writers.verify(&home.data());
    server.unmount().unwrap();
}

#[test]
fn what_was_not_ready_when_a_server_left_is_served_by_the_next() {
    // Fails if a write that waits for its volume is lost, or is written with other bytes, when its server leaves without
    // having answered it.
    const WRITE_BYTES: usize = 64 << 10;
    const WRITES: u64 = 24;
    let home = FuseHome::new(Bytes::mib(16));
    let first = FileBacking::prompt(&home.data());
    let server = home.serve(&first);
    first.refuse(Some(BackingError::NotReady));
    let written = |writer: u64| pattern(writer, WRITE_BYTES);
    let at = |writer: u64| writer * u64::try_from(WRITE_BYTES).unwrap();
    let writers: Vec<_> = (0..WRITES)
        .map(|writer| {
            let file = open_direct(&home.file());
            thread::spawn(move || {
                let mut room = Aligned::new(WRITE_BYTES);
                room.bytes().copy_from_slice(&written(writer));
                file.write_all_at(room.bytes(), at(writer)).unwrap();
            })
        })
        .collect();
    common::eventually("all of them wait", || {
        first.writes.load(Ordering::SeqCst) >= WRITES
    });
    let kept = Kept::of(&server).unwrap();
    assert!(!server.leave(Duration::ZERO), "something was answered");
    let backing: Arc<dyn Backing> = FileBacking::prompt(&home.data());
    let mount_point = home.mount_point();
    let mut server = Server::resume(kept, &mount_point, backing, Options::default()).unwrap();
    writers.into_iter().for_each(|each| each.join().unwrap());
    let data = fs::read(home.data()).unwrap();
    for writer in 0..WRITES {
        let start = usize::try_from(at(writer)).unwrap();
        assert!(data[start..start + WRITE_BYTES] == written(writer));
    }
    server.unmount().unwrap();
}

#[test]
fn a_connection_that_nobody_serves_is_found_and_ended() {
    // Fails if requests that wait for a server that is gone are not seen, or cannot be freed while somebody holds the
    // connection; or if a connection that is served is shown as one where somebody waits.
    serve_if_asked();
    let home = FuseHome::new(Bytes::mib(16));
    let test = "a_connection_that_nobody_serves_is_found_and_ended";
    let (mut server, _stream, kept) = start(&home, test, None);
    let found = || standing(&home.mount_point()).unwrap();
    let file = open_direct(&home.file());
    common::eventually("nobody waits", || found()[0].waiting == 0);
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    let writer = thread::spawn(move || {
        let mut room = Aligned::new(4096);
        file.write_all_at(room.bytes(), 0)
    });
    common::eventually("somebody waits", || found()[0].waiting == 1);
    assert!(!writer.is_finished());
    abort(found()[0].number).unwrap();
    writer.join().unwrap().unwrap_err();
    common::eventually("nobody waits any more", || {
        found().iter().all(|each| each.waiting == 0)
    });
    drop(kept);
    assert!(dismantle(&home.mount_point()).unwrap());
}

#[test]
fn without_a_successor_consumers_get_errors_and_all_can_be_cleared_away() {
    // Fails if anything hangs when a server dies for good: the consumer's calls, the unmounting of its
    // filesystem, or the clearing of device and mount; or if a device that is mounted is taken away.
    serve_if_asked();
    let home = FuseHome::new(Bytes::mib(512));
    let test = "without_a_successor_consumers_get_errors_and_all_can_be_cleared_away";
    let (mut server, _stream, kept) = start(&home, test, None);
    let device = volume::attach(&home.file(), false).unwrap();
    let staging = home.path("mounted");
    volume::ensure_filesystem(&device.path, FilesystemKind::Xfs, &home.path("note")).unwrap();
    volume::stage(&device.path, FilesystemKind::Xfs, &staging, false).unwrap();
    let mut file = File::create(staging.join("file")).unwrap();
    file.write_all(&[1; 65_536]).unwrap();
    file.sync_all().unwrap();
    assert!(matches!(
        dismantle(&home.mount_point()),
        Err(Error::Busy { .. })
    ));

    drop(kept);
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    file.write_all(&[2; 65_536]).unwrap();
    let error = file.sync_all().unwrap_err();
    println!("the consumer's fsync: {error}");
    let looked = fs::metadata(home.file()).unwrap_err();
    println!("a look at the volume: {looked}");
    drop(file);
    volume::unstage(&staging, Some(device.number)).unwrap();
    assert!(dismantle(&home.mount_point()).unwrap());
    assert!(!dismantle(&home.mount_point()).unwrap());
    let left: Vec<PathBuf> = fs::read_dir(home.mount_point())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(left.is_empty());

    // And what was durable before is there for the next one.
    let (_server, _stream, _kept) = start(&home, test, None);
    let device = volume::attach(&home.file(), false).unwrap();
    volume::stage(&device.path, FilesystemKind::Xfs, &staging, false).unwrap();
    let found = fs::read(staging.join("file")).unwrap();
    assert!(found.starts_with(&[1; 65_536]));
    volume::unstage(&staging, Some(device.number)).unwrap();
    check(FilesystemKind::Xfs, &device.path);
    assert!(volume::detach(&home.file()).unwrap());
}
