//! A claim with three copies over Linux's own iSCSI initiator, through the service. It is mounted, written to and
//! grown, and meanwhile its target and its service are killed.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use trellis_api::Bytes;
use trellis_api::kinds::Via;
use trellis_node::filesystem::FilesystemKind;
use trellis_node::iscsi;

use crate::bytes::{assert_clean, checksum, sizes, write_file};
use crate::daemon::{self, Daemon};
use crate::service::Service;
use crate::verifier::Verifier;

const POOLS: [&str; 3] = ["a", "b", "c"];
const FIRST: Bytes = Bytes::mib(320);
/// The sizes to which it grows: with all well, after the death of its target, with the death of the service, and
/// while nobody uses it.
const STEPS: [Bytes; 4] = [
    Bytes::mib(400),
    Bytes::mib(480),
    Bytes::mib(640),
    Bytes::gib(1),
];
const FILE_BYTES: usize = 4 << 20;
/// A session waits for its target as long as it does by default.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs it with each of the filesystems, with one daemon and one service.
pub fn run(kinds: &[FilesystemKind]) {
    daemon::configure(PATIENCE);
    let daemon = Daemon::start();
    let mut service = Service::start();
    for pool in POOLS {
        let path = service.path(pool);
        std::fs::create_dir_all(&path).unwrap();
        service.verb(&["pool", "add", pool, path.to_str().unwrap()]);
    }
    for kind in kinds {
        let started = Instant::now();
        live(&mut service, *kind);
        println!("{kind} done in {:.1?}", started.elapsed());
    }
    drop(service);
    daemon.stop();
    // Fails if a session outlives its claim.
    assert_eq!(iscsi::sessions().unwrap(), []);
}

fn live(service: &mut Service, kind: FilesystemKind) {
    let claim = kind.name();
    let parameters = [
        ("replicas", "3"),
        ("via", "iscsi"),
        ("pools", "a,b,c"),
        ("allowSharedDisk", "true"),
    ];
    service.class_with(kind, &parameters);
    service.claim(claim, kind, FIRST);
    // The mount is asked of a service that dies when the disk is there, and found by the next one.
    service.restart(Some("device-attached"));
    let path = service.path(&format!("mnt-{claim}"));
    let refused = catch_unwind(AssertUnwindSafe(|| service.mount(claim)));
    assert!(refused.is_err(), "the service was to die");
    service.wait_death();
    assert_eq!(iscsi::sessions().unwrap().len(), 1);
    service.restart(None);
    wait_attached(service, claim);
    let device = device_of(service);
    let sum = write_file(&path.join("old"), FILE_BYTES, 5);
    let verifier = load(service, kind, &path, &device);
    assert_eq!(checksum(&path.join("old")), sum);

    service.restart(Some("device-detached"));
    let refused = catch_unwind(AssertUnwindSafe(|| service.umount(claim)));
    assert!(refused.is_err(), "the service was to die");
    service.wait_death();
    assert_eq!(iscsi::sessions().unwrap(), []);
    service.restart(None);
    service.wait("the use is over", || {
        service.attachments().is_empty().then_some(())
    });
    // Nobody uses it, and its filesystem grows all the same.
    service.request(claim, STEPS[3]);
    service.wait_size(claim, STEPS[3]);
    assert_eq!(iscsi::sessions().unwrap(), []);
    assert_clean(kind, &file_of(service, claim));
    let path = service.mount(claim);
    let found = sizes(kind, &path);
    assert_eq!(
        (found.device, found.geometry),
        (STEPS[3], found.largest_fit)
    );
    assert_eq!(checksum(&path.join("old")), sum);
    let blocks = verifier.verify_all(&File::open(path.join("load")).unwrap());
    println!("{kind}: {blocks} blocks read back after a new mount");
    service.umount(claim);
    assert_clean(kind, &file_of(service, claim));
    let run = service.path("data/run").join(service.volume(claim));
    service.delete(claim);
    service.wait("its processes are gone", || (!run.exists()).then_some(()));
}

/// Grows the mounted volume under a load that is checked, and kills what serves it.
fn load(service: &mut Service, kind: FilesystemKind, path: &Path, device: &str) -> Verifier {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut options = File::options();
            let options = options.read(true).write(true).create_new(true);
            let file = options.open(path.join("load")).unwrap();
            let mut verifier = Verifier::new();
            let seen = verifier.run(&file, || stop.load(Ordering::Relaxed));
            (verifier, seen)
        });
        let grown = catch_unwind(AssertUnwindSafe(|| grow(service, kind, path)));
        stop.store(true, Ordering::Relaxed);
        let (verifier, seen) = writer.join().unwrap();
        if let Err(panic) = grown {
            resume_unwind(panic);
        }
        println!("{kind}, three growths, target and service killed: {seen}");
        assert!(seen.writes > 0, "it was written to all the time");
        // Fails if the disk was taken away and another one came in its place.
        assert_eq!(device_of(service), device);
        verifier
    })
}

fn grow(service: &mut Service, kind: FilesystemKind, path: &Path) {
    let claim = kind.name();
    let session = iscsi::sessions().unwrap()[0].id;
    let assert_size = |to: Bytes| {
        let found = sizes(kind, path);
        assert_eq!((found.device, found.geometry), (to, found.largest_fit));
    };
    let to = STEPS[0].to_string();
    print!("{}", service.verb(&["grow", claim, &to, "--wait"]));
    assert_size(STEPS[0]);

    let lock = service.path("data/run").join(service.volume(claim));
    let pid = std::fs::read_to_string(lock.join("target.lock")).unwrap();
    let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    service.request(claim, STEPS[1]);
    service.wait_size(claim, STEPS[1]);
    assert_size(STEPS[1]);

    service.restart(Some("device-raised"));
    service.request(claim, STEPS[2]);
    service.wait_death();
    service.restart(None);
    service.wait_size(claim, STEPS[2]);
    assert_size(STEPS[2]);
    // What each rung took; nothing is promised of it on an emulated processor.
    print!("{}", service.verb(&["history", claim]));
    // Fails if a growth or a death needs a new login.
    assert_eq!(iscsi::sessions().unwrap()[0].id, session);
}

fn wait_attached(service: &Service, claim: &str) {
    service.wait(&format!("{claim} is mounted"), || {
        let all = service.attachments();
        let status = all.first()?.status.as_ref()?;
        status.device.as_ref().map(|_| ())
    });
}

/// The disk that the only use has.
fn device_of(service: &Service) -> String {
    let status = service.attachments().remove(0).status.unwrap();
    assert_eq!(status.via, Some(Via::Iscsi));
    let device = status.device.unwrap();
    assert!(device.starts_with("/dev/sd"), "{device}");
    device
}

/// The file through which the target shows the volume.
fn file_of(service: &Service, claim: &str) -> PathBuf {
    let run = service.path("data/run").join(service.volume(claim));
    run.join("file/volume")
}
