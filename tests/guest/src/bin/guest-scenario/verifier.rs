//! A load on a file that knows what every block must hold.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const BLOCK_BYTES: usize = 16 << 10;
const BLOCKS: usize = 2048;
/// Every so many writes are made durable, and the wait for that counts as part of the write.
const WRITES_A_SYNC: u64 = 16;

/// What was seen while writing.
pub struct Seen {
    pub writes: u64,
    lasted: Duration,
    longest: Duration,
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} writes and as many reads in {:.1?}, longest stall of a write {:.1?}",
            self.writes, self.lasted, self.longest
        )
    }
}

/// Blocks of known content: each is derived from its place and the number of the write that it is from.
pub struct Verifier {
    /// The write that each block is from; zero before the first.
    last: Vec<u64>,
    sequence: u64,
}

impl Verifier {
    /// Nothing is written yet.
    pub fn new() -> Verifier {
        Verifier {
            last: vec![0; BLOCKS],
            sequence: 0,
        }
    }

    /// Writes one block and reads another, until told to stop.
    pub fn run(&mut self, file: &File, stop: impl Fn() -> bool) -> Seen {
        let (started, first) = (Instant::now(), self.sequence);
        let mut longest = Duration::ZERO;
        while !stop() {
            self.sequence += 1;
            let index = place(self.sequence);
            let block = content(index, self.sequence);
            let writing = Instant::now();
            file.write_all_at(&block, offset(index)).unwrap();
            if self.sequence.is_multiple_of(WRITES_A_SYNC) {
                file.sync_data().unwrap();
            }
            longest = longest.max(writing.elapsed());
            self.last[index] = self.sequence;
            self.verify(file, place(self.sequence.wrapping_mul(31)));
        }
        Seen {
            writes: self.sequence - first,
            lasted: started.elapsed(),
            longest,
        }
    }

    /// Reads a block that was written before, and answers whether there was one.
    fn verify(&self, file: &File, index: usize) -> bool {
        let sequence = self.last[index];
        if sequence == 0 {
            return false;
        }
        let mut found = vec![0; BLOCK_BYTES];
        file.read_exact_at(&mut found, offset(index)).unwrap();
        assert!(
            found == content(index, sequence),
            "block {index} is not what write {sequence} wrote"
        );
        true
    }

    /// Reads every block that was written, and answers how many.
    pub fn verify_all(&self, file: &File) -> usize {
        (0..BLOCKS)
            .filter(|index| self.verify(file, *index))
            .count()
    }
}

/// Where a write goes: all over the file, in an order that does not repeat soon.
fn place(sequence: u64) -> usize {
    let mixed = sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    usize::try_from(mixed).unwrap() % BLOCKS
}

fn offset(index: usize) -> u64 {
    u64::try_from(index * BLOCK_BYTES).unwrap()
}

fn content(index: usize, sequence: u64) -> Vec<u8> {
    let mut state = sequence.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ offset(index) | 1;
    let mut block = Vec::with_capacity(BLOCK_BYTES);
    block.extend_from_slice(&sequence.to_le_bytes());
    while block.len() < BLOCK_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        block.extend_from_slice(&state.to_le_bytes());
    }
    block
}
