//! A load that knows what it has written: whole blocks with numbers in them, past the page cache.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 2048;
/// `O_DIRECT` on this architecture, as everywhere that tests run.
const DIRECT: i32 = 0o40000;
/// Every so many writes are made durable.
const FLUSH_EVERY: u64 = 32;

/// A writer that runs until it is stopped.
pub struct Load {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Written>,
}

/// What a load has written.
struct Written {
    versions: Vec<u64>,
    writes: u64,
    longest: Duration,
}

/// A buffer whose block begins at a multiple of its size in memory, as direct I/O wants it.
struct Aligned(Vec<u8>);

impl Aligned {
    fn new() -> Aligned {
        Aligned(vec![0; 2 * BLOCK])
    }

    fn block(&mut self) -> &mut [u8] {
        let skip = self.0.as_ptr().align_offset(BLOCK);
        &mut self.0[skip..skip + BLOCK]
    }
}

fn fill(block: &mut [u8], index: u64, version: u64) {
    for (place, chunk) in (0u64..).zip(block.chunks_exact_mut(8)) {
        let word = index.rotate_left(40) ^ version.rotate_left(16) ^ place;
        chunk.copy_from_slice(&word.to_le_bytes());
    }
}

impl Load {
    /// Begins to write to a new file.
    pub fn start(path: &Path) -> Load {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true);
        let file = options.custom_flags(DIRECT).open(path).unwrap();
        file.set_len(BLOCKS * u64::try_from(BLOCK).unwrap())
            .unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || write(&file, &stopped));
        Load {
            path: path.to_owned(),
            stop,
            thread,
        }
    }

    /// Stops, and checks every block. Prints how long the longest write took.
    pub fn finish(self, during: &str) {
        self.stop.store(true, Ordering::Relaxed);
        let written = self.thread.join().expect("no write fails");
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(DIRECT)
            .open(&self.path)
            .unwrap();
        let (mut found, mut expected) = (Aligned::new(), Aligned::new());
        for (index, version) in (0..).zip(&written.versions) {
            if *version == 0 {
                continue;
            }
            file.read_exact_at(found.block(), offset(index)).unwrap();
            fill(expected.block(), index, *version);
            assert!(
                found.block() == expected.block(),
                "block {index} is not what was written last ({during})"
            );
        }
        println!(
            "{during}: {} writes, the longest took {:.1?}",
            written.writes, written.longest
        );
        assert!(written.writes > 0);
    }
}

fn offset(index: u64) -> u64 {
    index * u64::try_from(BLOCK).unwrap()
}

fn write(file: &File, stop: &AtomicBool) -> Written {
    let mut written = Written {
        versions: vec![0; usize::try_from(BLOCKS).unwrap()],
        writes: 0,
        longest: Duration::ZERO,
    };
    let (mut buffer, mut state) = (Aligned::new(), 1u64);
    while !stop.load(Ordering::Relaxed) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let index = state % BLOCKS;
        let version = written.writes + 1;
        fill(buffer.block(), index, version);
        let started = Instant::now();
        file.write_all_at(buffer.block(), offset(index))
            .expect("no write fails");
        if version.is_multiple_of(FLUSH_EVERY) {
            file.sync_data().expect("no sync fails");
        }
        written.longest = written.longest.max(started.elapsed());
        written.versions[usize::try_from(index).unwrap()] = version;
        written.writes = version;
    }
    written
}
