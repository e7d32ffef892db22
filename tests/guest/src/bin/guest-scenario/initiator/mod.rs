//! Linux's own iSCSI initiator with our target: authentication, data, growth on an open session, freed space, and a
//! filesystem that grows with the disk below it.
//!
//! The target runs in this process, and the same kernel uses the disk that it serves. That cannot work on a machine
//! that is short of memory; what is written here is a fraction of the guest's memory.

mod disk;
mod log;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::runtime::Runtime;
use trellis_api::Bytes;
use trellis_iscsi::login::Chap;
use trellis_iscsi::{Access, Answer, Lun, Server, ServerConfig};
use trellis_node::Error;
use trellis_node::filesystem::{FilesystemKind, Outcome};
use trellis_node::iscsi::{self, Credentials, Login, Problem, Target};
use trellis_node::sys::block::{self, DeviceNumber};
use trellis_node::sys::events::{DeviceChange, DeviceEvent, DeviceEvents};
use trellis_node::volume;
use trellis_test_luns::RamLun;

use self::disk::Disk;
use self::log::KernelLog;
use crate::bytes::{assert_clean, checksum, sizes, write_file};
use crate::daemon::{self, Daemon, INITIATOR, wait};
use crate::volume::sweep;

const TARGET: &str = "iqn.2026-11.dev.trellis:guest";
const OURS: (&str, &str) = ("initiator", "what-the-initiator-knows");
const THEIRS: (&str, &str) = ("target", "what-the-target-knows");
/// The logical unit.
const UNIT: u8 = 0;
/// A session whose target has died gives up soon, so that nothing hangs on it after a failure.
const PATIENCE: Duration = Duration::from_secs(5);
/// What the kernel says when the target tells it of a growth.
const TOLD: &str = "Capacity data has changed";
/// The raw disk grows by this, and then the filesystem to that.
const RAW_GROWTH: Bytes = Bytes::mib(64);
const GROWN: Bytes = Bytes::gib(1);
const FILE_BYTES: usize = 4 << 20;
const KIB: usize = 1 << 10;
const MIB: u64 = 1 << 20;
/// Places and lengths: one block, unsolicited data, several bursts, and what does not begin at a round number.
const PIECES: [(u64, usize); 5] = [
    (0, 4 * KIB),
    (64 << 10, 256 * KIB),
    (MIB, 2048 * KIB),
    (20 * MIB + 4096, 1020 * KIB),
    (30 * MIB, 64 * KIB),
];

/// A way to log in, and what is done with the disk.
struct Case {
    name: &'static str,
    block_bytes: u32,
    first: Bytes,
    mutual: bool,
    digests: bool,
    kind: FilesystemKind,
}

const CASES: [Case; 2] = [
    Case {
        name: "one-way proof, no digests, blocks of 512",
        block_bytes: 512,
        first: Bytes::mib(64),
        mutual: false,
        digests: false,
        kind: FilesystemKind::Ext4,
    },
    Case {
        name: "mutual proof, digests, blocks of 4096",
        block_bytes: 4096,
        first: Bytes::mib(320),
        mutual: true,
        digests: true,
        kind: FilesystemKind::Xfs,
    },
];

/// Runs every case with one daemon.
pub fn run() {
    let runtime = Runtime::new().unwrap();
    let dir = TempDir::with_prefix("trellis-initiator-").unwrap();
    daemon::configure(PATIENCE);
    assert_no_daemon_is_said();
    let daemon = Daemon::start();
    for case in &CASES {
        let started = Instant::now();
        case.run(&runtime, dir.path());
        println!("{}: done in {:.1?}", case.name, started.elapsed());
    }
    daemon.stop();
    // Fails if a session outlives its logout.
    assert_eq!(iscsi::sessions().unwrap(), []);
}

fn assert_no_daemon_is_said() {
    // Fails if a daemon that does not run is not what the error says, or if the secret stays on the disk.
    let target = Target {
        name: TARGET.to_owned(),
        portal: "127.0.0.1:3260".parse().unwrap(),
    };
    assert_problem(
        iscsi::attach(&target, &Login::default(), 0),
        Problem::NoDaemon,
    );
    assert!(!Path::new(daemon::RECORDS).join(TARGET).exists());
}

fn assert_problem<T: std::fmt::Debug>(answer: Result<T, Error>, expected: Problem) {
    match answer {
        Err(Error::Initiator { problem, .. }) if problem == expected => {}
        other => panic!("{expected:?} was expected: {other:?}"),
    }
}

fn credentials((user, secret): (&str, &str)) -> Option<Credentials> {
    Some(Credentials {
        user: user.to_owned(),
        secret: secret.to_owned(),
    })
}

/// Our target with one disk in memory. The session with it ends before it does, also in a panic.
struct Served {
    server: Option<Server>,
    lun: Arc<RamLun>,
    target: Target,
}

impl Served {
    fn start(case: &Case, runtime: &Runtime) -> Served {
        let _within = runtime.enter();
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let server = Server::bind(address, ServerConfig::default()).unwrap();
        let mut chap = Chap::one_way(OURS.0, OURS.1).unwrap();
        if case.mutual {
            chap = chap.mutual(THEIRS.0, THEIRS.1).unwrap();
        }
        let access = Access {
            initiators: Some(BTreeSet::from([INITIATOR.to_owned()])),
            chap: Some(chap),
        };
        let served = trellis_iscsi::Target::new(TARGET, access).unwrap();
        let lun = Arc::new(RamLun::new("guest", case.first.get(), case.block_bytes));
        served.add_unit(UNIT, lun.clone()).unwrap();
        server.portal().add_target(served).unwrap();
        let target = Target {
            name: TARGET.to_owned(),
            portal: server.local_addr(),
        };
        Served {
            server: Some(server),
            lun,
            target,
        }
    }

    fn sessions(&self) -> usize {
        let server = self.server.as_ref();
        server.map_or(0, |server| server.portal().session_count())
    }

    fn stop(mut self, runtime: &Runtime) {
        if let Some(server) = self.server.take() {
            runtime.block_on(server.stop());
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if self.server.is_some() {
            let _ = iscsi::detach(&self.target);
        }
    }
}

/// Unmounts what a panic has left mounted.
struct Swept<'a>(&'a Path);

impl Drop for Swept<'_> {
    fn drop(&mut self) {
        sweep(self.0);
    }
}

impl Case {
    fn run(&self, runtime: &Runtime, dir: &Path) {
        let mut log = KernelLog::open();
        let served = Served::start(self, runtime);
        let _swept = Swept(dir);
        self.assert_refusals(&served);
        let (device, session) = self.log_in(&served);
        self.assert_data_is_kept(&served, &device);
        self.assert_growth_under_load(&served, &device, &mut log);
        self.assert_space_is_given_back(&served, &device);
        let staging = dir.join("staging");
        let sums = self.assert_filesystem_grows(&served, &device, &staging, &mut log);
        // Fails if a growth, or anything else on the way, made a new session.
        let now = served.target.session().unwrap().unwrap();
        assert_eq!((now.id, served.sessions()), (session, 1));
        self.log_out(&served, &device);
        self.assert_all_is_there_after_a_new_login(&served, &staging, &sums);
        served.stop(runtime);
        log.print_those_with(&["Capacity data", "capacity change", "rejected", "error"]);
    }

    fn login(&self) -> Login {
        Login {
            ours: credentials(OURS),
            theirs: self.mutual.then(|| credentials(THEIRS)).flatten(),
            digests: self.digests,
        }
    }

    fn assert_refusals(&self, served: &Served) {
        // Fails if the target is not shown to the initiator, or if one that does not prove itself, on either side,
        // gets a session or leaves its secret behind.
        let shown = iscsi::discover(served.target.portal).unwrap();
        assert_eq!(shown, [TARGET]);
        let ours = Login {
            ours: credentials((OURS.0, "something-else-altogether")),
            ..self.login()
        };
        let mut wrong = vec![(ours, Problem::Denied)];
        if self.mutual {
            let theirs = Login {
                theirs: credentials((THEIRS.0, "something-else-altogether")),
                ..self.login()
            };
            // open-iscsi has no word of its own for a target that does not prove itself.
            wrong.push((theirs, Problem::Refused));
        }
        for (login, problem) in wrong {
            let started = Instant::now();
            let answer = iscsi::attach(&served.target, &login, UNIT.into());
            assert_problem(answer, problem);
            println!("refused after {:.1?}", started.elapsed());
            assert_eq!(served.target.session().unwrap(), None);
            assert!(!Path::new(daemon::RECORDS).join(TARGET).exists());
        }
    }

    fn log_in(&self, served: &Served) -> (PathBuf, u32) {
        // Fails if the session is not as agreed, the disk is not what is served, or a second call makes a second session.
        let started = Instant::now();
        let first = iscsi::attach(&served.target, &self.login(), UNIT.into()).unwrap();
        println!("{} after {:.1?}", first.device.display(), started.elapsed());
        let again = iscsi::attach(&served.target, &self.login(), UNIT.into()).unwrap();
        assert_eq!((first.adopted, again.adopted), (false, true));
        assert_eq!(first.session, again.session);
        let session = served.target.session().unwrap().unwrap();
        let digests = (session.header_digest, session.data_digest);
        assert_eq!(digests, (self.digests, self.digests));
        let node = block::open(&first.device).unwrap();
        let block = Bytes::new(self.block_bytes.into());
        assert_eq!(block::logical_block(&node).unwrap(), block);
        (first.device, first.session)
    }

    fn assert_data_is_kept(&self, served: &Served, device: &Path) {
        // Fails if the disk has another size than the volume, or if what is written is not what is read.
        let size = size_of(device);
        assert_eq!((size, size.get()), (self.first, served.lun.size()));
        let disk = Disk::open(device);
        let last = (size.get() - 4096, 4 * KIB);
        for (seed, (offset, len)) in (1..).zip(PIECES.into_iter().chain([last])) {
            disk.write(offset, len, seed);
        }
        for (seed, (offset, len)) in (1..).zip(PIECES.into_iter().chain([last])) {
            disk.verify(offset, len, seed);
        }
    }

    fn assert_growth_under_load(&self, served: &Served, device: &Path, log: &mut KernelLog) {
        // Fails if a growth makes a write or read fail that goes on meanwhile, if the kernel is not told exactly once, or
        // if it does not see the new size on the same session.
        let disk = Disk::open(device);
        let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
        let to = Bytes::new(self.first.get() + RAW_GROWTH.get());
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = writes.fetch_add(1, Ordering::Relaxed);
                    let offset = 40 * MIB + (seed % 64) * (64 << 10);
                    disk.write(offset, 64 * KIB, seed);
                    disk.verify(offset, 64 * KIB, seed);
                }
            });
            let more = || {
                let now = writes.load(Ordering::Relaxed);
                wait("a write", || writes.load(Ordering::Relaxed) > now + 4);
            };
            let grown = catch_unwind(AssertUnwindSafe(|| {
                more();
                served.lun.grow(to.get());
                // It comes with the next command, whatever that is.
                wait(TOLD, || log.count(TOLD) > 0);
                assert_eq!(size_of(device), self.first, "nothing rescans by itself");
                take_over(device, self.first, to);
                more();
            }));
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            grown.unwrap();
        });
        assert_eq!(log.count(TOLD), 1);
        println!("{} writes beside a growth", writes.into_inner());
        // The old bytes, and new ones behind them.
        disk.verify(MIB, 2048 * KIB, 3);
        disk.write(self.first.get() - 4096, 1024 * KIB, 77);
        disk.verify(self.first.get() - 4096, 1024 * KIB, 77);
        disk.write(to.get() - 4096, 4 * KIB, 78);
        disk.verify(to.get() - 4096, 4 * KIB, 78);
    }

    fn assert_space_is_given_back(&self, served: &Served, device: &Path) {
        // Fails if discarded or zeroed bytes do not read as zeros, if the space of discarded ones is kept, or if a
        // neighbour changes.
        let disk = Disk::open(device);
        let (from, len) = (10 * MIB, 2 * MIB);
        for zero in [false, true] {
            disk.write(from - MIB, 4096 * KIB, 90);
            blkdiscard(device, from, len, zero);
            disk.assert_zeros(from, 2048 * KIB);
            for neighbour in [0..1024 * KIB, 3072 * KIB..4096 * KIB] {
                disk.verify_part(from - MIB, 4096 * KIB, 90, neighbour);
            }
            if !zero {
                let Answer::Now(Ok(extents)) = served.lun.extents(from, len, 8) else {
                    panic!("memory answers at once")
                };
                assert!(extents.iter().all(|extent| !extent.mapped), "{extents:?}");
            }
        }
        blkdiscard(device, 0, size_of(device).get(), false);
        disk.assert_zeros(0, 4096 * KIB);
        println!("2 MiB discarded, 2 MiB zeroed, then all of it discarded");
    }

    fn assert_filesystem_grows(
        &self,
        served: &Served,
        device: &Path,
        staging: &Path,
        log: &mut KernelLog,
    ) -> Vec<(&'static str, u32)> {
        // Fails if the filesystem on the disk does not grow with it while it is mounted, loses a byte, is not whole
        // afterwards, or if the disk can be taken away under it.
        let note = staging.with_extension("note");
        volume::ensure_filesystem(device, self.kind, &note).unwrap();
        volume::stage(device, self.kind, staging, false).unwrap();
        let old = write_file(&staging.join("old"), FILE_BYTES, 5);
        let (before, told) = (size_of(device), log.count(TOLD));
        served.lun.grow(GROWN.get());
        take_over(device, before, GROWN);
        let outcome = volume::grow_filesystem(self.kind, staging, device).unwrap();
        let found = sizes(self.kind, staging);
        println!("{}: {outcome:?}", self.kind);
        assert_eq!(
            (found.device, outcome.size(), found.geometry),
            (GROWN, found.largest_fit, found.largest_fit)
        );
        wait(TOLD, || log.count(TOLD) > told);
        let new = write_file(&staging.join("new"), FILE_BYTES, 6);
        assert_eq!(log.count(TOLD), told + 1);
        let number = DeviceNumber::of_block_device(device).unwrap();
        block::drop_cache(block::open(device).unwrap()).unwrap();
        assert_eq!(checksum(&staging.join("old")), old);
        let busy = iscsi::detach(&served.target);
        assert!(matches!(busy, Err(Error::Busy { .. })), "{busy:?}");
        volume::unstage(staging, number).unwrap();
        assert_clean(self.kind, device);
        vec![("old", old), ("new", new)]
    }

    fn log_out(&self, served: &Served, device: &Path) {
        // Fails if a logout leaves the disk, the session on either side, or the record with the secret.
        assert!(iscsi::detach(&served.target).unwrap());
        assert!(!device.exists());
        assert_eq!(served.target.session().unwrap(), None);
        wait("the target's session to end", || served.sessions() == 0);
        assert!(!Path::new(daemon::RECORDS).join(TARGET).exists());
        assert!(!iscsi::detach(&served.target).unwrap());
    }

    fn assert_all_is_there_after_a_new_login(
        &self,
        served: &Served,
        staging: &Path,
        sums: &[(&str, u32)],
    ) {
        // Fails if what was written stayed in the initiator's memory and never reached the volume.
        let (device, _) = self.log_in(served);
        assert_eq!(size_of(&device), GROWN);
        volume::stage(&device, self.kind, staging, true).unwrap();
        for (name, sum) in sums {
            assert_eq!(checksum(&staging.join(name)), *sum, "{name} has changed");
        }
        let number = DeviceNumber::of_block_device(&device).unwrap();
        volume::unstage(staging, number).unwrap();
        self.log_out(served, &device);
    }
}

/// Has the kernel take a new size over, and hears it say so.
fn take_over(device: &Path, from: Bytes, to: Bytes) {
    let events = DeviceEvents::open().unwrap();
    let started = Instant::now();
    let outcome = iscsi::rescan(device, to).unwrap();
    println!("rescan: {outcome:?} in {:.1?}", started.elapsed());
    assert_eq!(outcome, Outcome::Raised { from, to });
    assert_eq!(size_of(device), to);
    let resized = |event: &DeviceEvent| matches!(event, DeviceEvent::Device { name, change: DeviceChange::Resized, .. } if device.ends_with(name));
    wait("the event of the growth", || {
        events.read_events().unwrap().iter().any(resized)
    });
    let again = iscsi::rescan(device, to).unwrap();
    assert_eq!(again, Outcome::Unchanged { size: to });
}

fn size_of(device: &Path) -> Bytes {
    block::size(block::open(device).unwrap()).unwrap()
}

fn blkdiscard(device: &Path, offset: u64, len: u64, zero: bool) {
    let mut command = Command::new("/usr/sbin/blkdiscard");
    command.args(["-o", &offset.to_string(), "-l", &len.to_string()]);
    command.args(zero.then_some("-z")).arg(device);
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}
