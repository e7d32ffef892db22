//! The whole ladder through the service: a claim is mounted, written to, grown while it is mounted, measured at every
//! rung, and checked when it is idle.

use std::time::Instant;

use trellis_api::Bytes;
use trellis_node::filesystem::{self, FilesystemKind};

use crate::bytes::{assert_clean, checksum, sizes, write_file};
use crate::service::Service;

const FIRST: Bytes = Bytes::mib(320);
const STEPS: [Bytes; 3] = [Bytes::mib(400), Bytes::gib(1), Bytes::gib(3)];
const FILE_BYTES: usize = 4 << 20;

/// Climbs it with each of the filesystems, all of them with one service.
pub fn run(kinds: &[FilesystemKind]) {
    let started = Instant::now();
    let service = Service::start();
    println!("service up in {:.1?}", started.elapsed());
    for kind in kinds {
        let started = Instant::now();
        climb(&service, *kind);
        println!("{kind} done in {:.1?}", started.elapsed());
    }
}

fn climb(service: &Service, kind: FilesystemKind) {
    let claim = kind.name();
    service.class(kind);
    service.claim(claim, kind, FIRST);
    let path = service.mount(claim);
    let mut files = vec![("file-0".to_owned(), 0)];
    files[0].1 = write_file(&path.join("file-0"), FILE_BYTES, 42);
    let mut before = sizes(kind, &path);
    for (step, to) in (1u64..).zip(STEPS) {
        let started = Instant::now();
        if step == 1 {
            // The verb waits for every rung by itself.
            print!(
                "{}",
                service.verb(&["grow", claim, &to.to_string(), "--wait"])
            );
        } else {
            service.request(claim, to);
            service.wait_size(claim, to);
        }
        let took = started.elapsed();
        let after = sizes(kind, &path);
        println!(
            "{kind}: {} by its geometry, {} by statfs, after {took:.1?}",
            after.geometry, after.statfs
        );
        assert_eq!(service.reported(claim), Some(to));
        assert_eq!((after.device, after.geometry), (to, after.largest_fit));
        // What statfs shows lacks the filesystem's own tables, of which a larger one has more.
        let grown = after.geometry.get() - before.geometry.get();
        assert!(
            after.statfs.get() >= before.statfs.get() + grown / 10 * 9,
            "{before:?} {after:?}"
        );
        for (name, sum) in &files {
            assert_eq!(checksum(&path.join(name)), *sum, "{name} has changed");
        }
        let name = format!("file-{step}");
        let sum = write_file(&path.join(&name), FILE_BYTES, step);
        files.push((name, sum));
        before = after;
    }
    let data = service.data_file(claim);
    service.umount(claim);
    let idle = filesystem::measure_idle(kind, &data).unwrap();
    assert_eq!(idle.size(), before.geometry, "the superblock says the same");
    assert_clean(kind, &data);
    service.delete(claim);
}
