//! A program on a node that writes numbers into a volume, and notes each number that is durable there.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::machine::Machine;

/// The bytes of one number with its end of line.
const RECORD: usize = 9;
/// How long a write may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// The file in the volume.
const FILE: &str = "numbers";

/// A program that writes.
pub struct Writer {
    child: Child,
    notes: PathBuf,
}

impl Writer {
    /// Starts to write after the numbers that are there. `notes` is a file outside of the volume.
    pub fn start(on: &Machine, volume: &Path, name: &str) -> Result<Writer> {
        let notes = on.directory().join(format!("notes-{name}"));
        File::create(&notes).context("make", &notes)?;
        // A number is noted only after it is durable: `dd` syncs before it succeeds. The time of each note shows stalls.
        let script = format!(
            "n=$(( $(stat -c %s {file} 2>/dev/null || echo 0) / {RECORD} ))
             while :; do
               printf '%08d\\n' $n | dd of={file} bs={RECORD} seek=$n conv=notrunc,fsync 2>/dev/null || exit 3
               echo $n $(date +%s%N) >> {notes}
               n=$((n + 1))
             done",
            file = volume.join(FILE).display(),
            notes = notes.display(),
        );
        let mut command = on.command("sh");
        command.args(["-c", &script]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|source| Error::NoProgram {
            program: "nsenter".to_owned(),
            source,
        })?;
        Ok(Writer { child, notes })
    }

    /// The numbers that were noted, with the longest time between two of them.
    pub fn noted(&self) -> Result<(Vec<u64>, Duration)> {
        let text = std::fs::read_to_string(&self.notes).context("read", &self.notes)?;
        let lines = text.lines().filter_map(|line| {
            let (number, time) = line.split_once(' ')?;
            Some((number.parse::<u64>().ok()?, time.parse::<u64>().ok()?))
        });
        let (numbers, times): (Vec<u64>, Vec<u64>) = lines.unzip();
        let stalls = times.windows(2).map(|two| two[1].saturating_sub(two[0]));
        let longest = Duration::from_nanos(stalls.max().unwrap_or_default());
        Ok((numbers, longest))
    }

    /// Waits until it has noted so many more.
    pub fn wait_for(&self, more: usize) -> Result<()> {
        let (before, began) = (self.count()?, Instant::now());
        while self.count()? < before + more {
            if began.elapsed() >= PATIENCE {
                return Err(Error::Never {
                    what: "writes do not go on".to_owned(),
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// How many numbers were noted.
    pub fn count(&self) -> Result<usize> {
        Ok(self.noted()?.0.len())
    }

    /// Whether it has failed to write.
    pub fn has_failed(&mut self) -> bool {
        let ended = self.child.try_wait().ok().flatten();
        ended.is_some_and(|status| status.code() == Some(3))
    }

    /// Ends it; what it has noted.
    pub fn stop(mut self) -> Result<(Vec<u64>, Duration)> {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.noted()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The numbers that a volume holds, up to the first place where there is none.
pub fn held(volume: &Path) -> Result<Vec<u64>> {
    let path = volume.join(FILE);
    let bytes = std::fs::read(&path).context("read", &path)?;
    let number = |record: &[u8]| std::str::from_utf8(record).ok()?.trim_end().parse().ok();
    Ok(bytes.chunks(RECORD).map_while(number).collect())
}
