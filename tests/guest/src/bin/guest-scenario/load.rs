//! Growth under load. One thread writes numbered patterns and reads them back without pause; another grows the
//! filesystem twenty times. Nothing may fail, and no byte may differ, then or after a new mount.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trellis_api::Bytes;
use trellis_node::filesystem::FilesystemKind;

use crate::bytes::{assert_clean, sizes};
use crate::verifier::Verifier;
use crate::volume::Volume;

const FIRST: Bytes = Bytes::mib(320);
const BY: Bytes = Bytes::mib(16);
const GROWTHS: u64 = 20;
/// How long is written before the first growth, for comparison.
const ALONE: Duration = Duration::from_secs(2);
/// The pause between two growths.
const BETWEEN: Duration = Duration::from_millis(100);

/// Runs it.
pub fn run(kind: FilesystemKind) {
    let volume = Volume::make(kind, FIRST);
    let path = volume.publish("a", false);
    let stop = AtomicBool::new(false);
    let (verifier, alone, growing) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut options = File::options();
            let options = options.read(true).write(true).create_new(true);
            let file = options.open(path.join("load")).unwrap();
            let mut verifier = Verifier::new();
            let until = Instant::now() + ALONE;
            let alone = verifier.run(&file, || Instant::now() >= until);
            let growing = verifier.run(&file, || stop.load(Ordering::Relaxed));
            (verifier, alone, growing)
        });
        std::thread::sleep(ALONE);
        let grown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            grow(&volume, kind, &path);
        }));
        stop.store(true, Ordering::Relaxed);
        let written = writer.join().unwrap();
        grown.unwrap();
        written
    });
    println!("{kind} without growth:         {alone}");
    println!("{kind} during {GROWTHS} growths:     {growing}");
    assert!(growing.writes > GROWTHS, "it was written to all the time");
    // What is read back now comes from the device.
    volume.withdraw(&[path]);
    let path = volume.publish("b", true);
    let blocks = verifier.verify_all(&File::open(path.join("load")).unwrap());
    println!("{kind}: {blocks} blocks read back after a new mount");
    volume.withdraw(&[path]);
    assert_clean(kind, &volume.data());
}

fn grow(volume: &Volume, kind: FilesystemKind, path: &Path) {
    for step in 1..=GROWTHS {
        let to = Bytes::new(FIRST.get() + step * BY.get());
        volume.grow_device(to);
        volume.grow_filesystem().unwrap();
        let found = sizes(kind, path);
        assert_eq!((found.device, found.geometry), (to, found.largest_fit));
        std::thread::sleep(BETWEEN);
    }
}
