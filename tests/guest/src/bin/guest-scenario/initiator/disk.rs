//! A disk without the kernel's cache: every write and read is a command to the target.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::bytes::content;

/// The kernel wants memory at such a boundary for it.
const BOUNDARY: usize = 4096;

/// An open disk.
pub struct Disk(File);

impl Disk {
    /// Opens it.
    pub fn open(device: &Path) -> Disk {
        let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap();
        let mut options = File::options();
        options.read(true).write(true).custom_flags(direct);
        Disk(options.open(device).unwrap())
    }

    /// Writes the bytes that belong to a seed.
    pub fn write(&self, offset: u64, len: usize, seed: u64) {
        let mut room = Room::new(len);
        room.bytes().copy_from_slice(&content(len, seed));
        self.0.write_all_at(room.bytes(), offset).unwrap();
    }

    /// Panics if other bytes are there than those that belong to the seed.
    pub fn verify(&self, offset: u64, len: usize, seed: u64) {
        self.verify_part(offset, len, seed, 0..len);
    }

    /// The same for a part of what was written.
    pub fn verify_part(&self, offset: u64, len: usize, seed: u64, part: Range<usize>) {
        let mut room = Room::new(len);
        self.0.read_exact_at(room.bytes(), offset).unwrap();
        let same = room.bytes()[part.clone()] == content(len, seed)[part.clone()];
        assert!(
            same,
            "bytes {part:?} at {offset} are not those of seed {seed}"
        );
    }

    /// Panics if anything but zeros is there.
    pub fn assert_zeros(&self, offset: u64, len: usize) {
        let mut room = Room::new(len);
        room.bytes().fill(1);
        self.0.read_exact_at(room.bytes(), offset).unwrap();
        // A comparison of slices is one call, also where nothing is optimised.
        let zeros = room.bytes() == vec![0; len].as_slice();
        assert!(zeros, "{len} bytes at {offset} are not all zeros");
    }
}

/// Memory at a boundary.
struct Room {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Room {
    fn new(len: usize) -> Room {
        let memory = vec![0; len + BOUNDARY];
        let start = memory.as_ptr().align_offset(BOUNDARY);
        Room { memory, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}
