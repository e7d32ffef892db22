//! What one operation on the backing file costs with no target at all.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Work;

/// How many operations are done between two looks at the clock.
const BETWEEN_LOOKS: u32 = 64;

/// The same operations on the file itself, one after the other: how many a second.
pub fn a_second(backing: &Path, work: Work, seconds: f64) -> anyhow::Result<f64> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(backing)
        .context("no backing file")?;
    let block = u64::from(work.block);
    let places = file.metadata().context("no backing file")?.len() / block;
    let mut room = vec![0xa5; usize::try_from(work.block).context("a block beyond memory")?];
    let (start, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let (mut state, mut done) = (0x9e37_79b9_7f4a_7c15_u64, 0_u32);
    while start.elapsed() < limit {
        for _ in 0..BETWEEN_LOOKS {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let at = state % places.max(1) * block;
            if work.write {
                file.write_all_at(&room, at)
                    .context("the backing file cannot be written")?;
            } else {
                file.read_exact_at(&mut room, at)
                    .context("the backing file cannot be read")?;
            }
        }
        done += BETWEEN_LOOKS;
    }
    Ok(f64::from(done) / start.elapsed().as_secs_f64())
}
