//! Every way in which a volume may be in use, times every way of growing it.

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::Instant;

use trellis_api::Bytes;
use trellis_node::Error;
use trellis_node::filesystem::{self, FilesystemKind};

use crate::bytes::{assert_clean, assert_full, checksum, fill, sizes, write_file};
use crate::volume::Volume;

/// How the volume is used while it grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// By one consumer that writes.
    Mounted,
    /// By one consumer that has written until nothing more fitted.
    Full,
    /// By two consumers that write.
    TwoWriters,
    /// By one that only reads and one that writes.
    ReaderAndWriter,
    /// By one that only reads: the filesystem is not grown behind its back, but when somebody writes.
    ReaderAlone,
    /// By nobody.
    Idle,
}

/// How it is grown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    /// To twice its size.
    OneStep,
    /// So many times by 4 MiB.
    Steps(u64),
    /// From 1 GiB to this, in one step.
    Far(Bytes),
}

/// How much of the table is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What a minute or two suffices for, also on an emulated processor.
    Usual,
    /// All of it.
    Everything,
}

const USES: [Use; 6] = [
    Use::Mounted,
    Use::Full,
    Use::TwoWriters,
    Use::ReaderAndWriter,
    Use::ReaderAlone,
    Use::Idle,
];
/// The thousandfold size, and where the usual extent stops instead: ext and xfs write tables for every group, and
/// their own programs read them, which takes minutes on an emulated processor.
const FAR: Bytes = Bytes::gib(1024);
const NOT_SO_FAR: Bytes = Bytes::gib(64);
/// The small steps, and those of the usual extent where each step is a mount and an unmount.
const STEPS: u64 = 100;
const STEPS_WHEN_IDLE: u64 = 10;
const SMALL: Bytes = Bytes::mib(320);
const STEP: Bytes = Bytes::mib(4);
const FILE_BYTES: usize = 1 << 20;

impl std::fmt::Display for Growth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Growth::OneStep => write!(f, "one step"),
            Growth::Steps(steps) => write!(f, "{steps} steps"),
            Growth::Far(to) => write!(f, "{} to {to}", self.first()),
        }
    }
}

impl Growth {
    fn first(self) -> Bytes {
        match self {
            Growth::OneStep | Growth::Steps(_) => SMALL,
            Growth::Far(_) => Bytes::GIB,
        }
    }

    fn steps(self) -> Vec<Bytes> {
        match self {
            Growth::OneStep => vec![Bytes::new(2 * SMALL.get())],
            Growth::Steps(steps) => (1..=steps)
                .map(|step| Bytes::new(SMALL.get() + step * STEP.get()))
                .collect(),
            Growth::Far(to) => vec![to],
        }
    }
}

/// The ways of growing a filesystem in one use.
fn growths(kind: FilesystemKind, usage: Use, extent: Extent) -> [Growth; 3] {
    let everything = extent == Extent::Everything;
    let far = if everything || kind == FilesystemKind::Btrfs {
        FAR
    } else {
        NOT_SO_FAR
    };
    let steps = if everything || usage != Use::Idle {
        STEPS
    } else {
        STEPS_WHEN_IDLE
    };
    [Growth::OneStep, Growth::Steps(steps), Growth::Far(far)]
}

/// Whether the filesystem's own program looks at the outcome. For a large ext3 it reads every inode that there
/// could be, which takes longer than all else together: in the usual extent it looks at one of them.
fn is_checked(kind: FilesystemKind, usage: Use, growth: Growth, extent: Extent) -> bool {
    let takes_long = kind == FilesystemKind::Ext3 && matches!(growth, Growth::Far(_));
    extent == Extent::Everything || !takes_long || usage == Use::Mounted
}

/// Runs every cell of a filesystem, says how each went, and fails if one did.
pub fn run(kind: FilesystemKind, extent: Extent) {
    let mut failed = Vec::new();
    for usage in USES {
        for growth in growths(kind, usage, extent) {
            let name = format!("{kind} {usage:?} {growth}");
            let check = is_checked(kind, usage, growth, extent);
            let started = Instant::now();
            let went = catch_unwind(|| cell(kind, usage, growth, check));
            let took = started.elapsed();
            match went {
                Ok(times) => println!("cell ok   {name:<36} {took:>7.1?}  {times}"),
                Err(_) => {
                    println!("cell FAIL {name:<36} {took:>7.1?}");
                    failed.push(name);
                }
            }
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// Runs a cell, and answers the times of its parts.
fn cell(kind: FilesystemKind, usage: Use, growth: Growth, check: bool) -> String {
    let volume = Volume::make(kind, growth.first());
    let writer = volume.publish("a", false);
    let sum = write_file(&writer.join("old"), FILE_BYTES, 7);
    let mut paths = bring_into_use(&volume, usage, writer);
    let started = Instant::now();
    match usage {
        Use::ReaderAlone => climb_held(&volume, kind, &paths[0], growth),
        Use::Idle => climb_idle(&volume, kind, growth),
        _ => climb(&volume, kind, &paths[0], growth),
    }
    let grown = started.elapsed();
    for path in &paths {
        let place = path.display();
        assert_eq!(checksum(&path.join("old")), sum, "seen at {place}");
    }
    if usage == Use::ReaderAlone {
        // A consumer comes that writes, and now the filesystem grows.
        paths.insert(0, volume.publish("c", false));
        let found = sizes(kind, &paths[0]);
        assert_eq!(volume.grow_filesystem().unwrap(), found.largest_fit);
    } else if usage == Use::Idle {
        paths.push(volume.publish("c", false));
        let found = sizes(kind, &paths[0]);
        assert_eq!(found.geometry, found.largest_fit);
    }
    // Every consumer sees what another has written into the new space.
    let new = write_file(&paths[0].join("new"), FILE_BYTES, 8);
    for path in &paths {
        let place = path.display();
        assert_eq!(checksum(&path.join("new")), new, "seen at {place}");
        assert_eq!(checksum(&path.join("old")), sum, "seen at {place}");
    }
    let mounted = sizes(kind, &paths[0]);
    volume.withdraw(&paths);
    let idle = filesystem::measure_idle(kind, &volume.data()).unwrap();
    assert_eq!(
        idle.size(),
        mounted.geometry,
        "the superblock says the same"
    );
    if !check {
        return format!("grown {grown:.1?}");
    }
    let started = Instant::now();
    assert_clean(kind, &volume.data());
    format!("grown {grown:.1?}, checked {:.1?}", started.elapsed())
}

/// The paths at which it is used; the first is one that can be written to, if there is such a one.
fn bring_into_use(volume: &Volume, usage: Use, writer: PathBuf) -> Vec<PathBuf> {
    match usage {
        Use::Mounted => vec![writer],
        Use::Full => {
            fill(&writer.join("filler"));
            assert_full(&writer.join("more"));
            vec![writer]
        }
        Use::TwoWriters => vec![writer, volume.publish("b", false)],
        Use::ReaderAndWriter => vec![writer, volume.publish("b", true)],
        Use::ReaderAlone => {
            volume.withdraw(&[writer]);
            vec![volume.publish("b", true)]
        }
        Use::Idle => {
            volume.withdraw(&[writer]);
            Vec::new()
        }
    }
}

fn climb(volume: &Volume, kind: FilesystemKind, path: &Path, growth: Growth) {
    for to in growth.steps() {
        volume.grow_device(to);
        let size = volume.grow_filesystem().unwrap();
        let found = sizes(kind, path);
        assert_eq!(found.device, to);
        assert_eq!(
            (size, found.geometry),
            (found.largest_fit, found.largest_fit)
        );
    }
}

/// The device grows, the filesystem does not, and it is said why.
fn climb_held(volume: &Volume, kind: FilesystemKind, path: &Path, growth: Growth) {
    let before = sizes(kind, path);
    for to in growth.steps() {
        volume.grow_device(to);
        let error = volume.grow_filesystem().unwrap_err();
        assert!(matches!(error, Error::ReadOnly { .. }), "{error:?}");
        let found = sizes(kind, path);
        assert_eq!((found.device, found.geometry), (to, before.geometry));
    }
    let written = std::fs::write(path.join("new"), "x");
    assert!(written.is_err(), "it cannot be written to");
}

/// The filesystem grows although nobody has mounted it.
fn climb_idle(volume: &Volume, kind: FilesystemKind, growth: Growth) {
    for to in growth.steps() {
        volume.grow_file(to);
        let size = volume.grow_idle();
        let found = filesystem::measure_idle(kind, &volume.data()).unwrap();
        assert_eq!(
            (size, found.size()),
            (found.largest_fit(to), found.largest_fit(to))
        );
    }
}
