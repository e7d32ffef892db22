//! Three copies compared with one, and with checksums compared with without, on block devices of the same service:
//! speed, memory, and a growth under load.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::replicated;
use super::service::Service;
use super::statistics::{Times, millis};

/// `O_DIRECT` on the architectures that this runs on.
const DIRECT: i32 = 0o40000;
const PAGE: usize = 4096;
/// The part of the device that is read and written.
const SPAN_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 3;
/// How long the load runs before the growth, and after it.
const AROUND_GROWTH: Duration = Duration::from_millis(2500);

/// One kind of load.
struct Cell {
    name: &'static str,
    bytes: usize,
    writes: bool,
    random: bool,
    depth: u64,
}

const CELLS: [Cell; 6] = [
    Cell {
        name: "4 KiB random read, depth 1",
        bytes: 4 << 10,
        writes: false,
        random: true,
        depth: 1,
    },
    Cell {
        name: "4 KiB random read, depth 32",
        bytes: 4 << 10,
        writes: false,
        random: true,
        depth: 32,
    },
    Cell {
        name: "4 KiB random write, depth 1",
        bytes: 4 << 10,
        writes: true,
        random: true,
        depth: 1,
    },
    Cell {
        name: "4 KiB random write, depth 32",
        bytes: 4 << 10,
        writes: true,
        random: true,
        depth: 32,
    },
    Cell {
        name: "1 MiB read, depth 4",
        bytes: 1 << 20,
        writes: false,
        random: false,
        depth: 4,
    },
    Cell {
        name: "1 MiB write, depth 4",
        bytes: 1 << 20,
        writes: true,
        random: false,
        depth: 4,
    },
];

/// Runs every cell for `seconds` in each of three rounds, below `below`.
pub fn run(binary: &Path, below: &Path, seconds: u64) -> anyhow::Result<()> {
    let service = Service::start(binary, below)?;
    replicated::add_pools(&service, binary)?;
    let one = claim(&service, binary, "one", 1, true, "1Gi")?;
    let three = claim(&service, binary, "three", 3, true, "1Ti")?;
    let volume = volume_of_copies(&service)?;
    println!(
        "one copy of 1 GiB and three of 1 TiB as block devices, below {}",
        below.display()
    );
    print_memory(&volume, "idle")?;
    let unsummed = claim(&service, binary, "unsummed", 3, false, "1Ti")?;
    println!(
        "  {:<30} {:>12} {:>12} {:>12}  three of one, sums of none",
        "", "one copy", "three copies", "without sums"
    );
    for cell in &CELLS {
        let mut rates = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (device, rates) in [&one, &three, &unsummed].into_iter().zip(&mut rates) {
                rates.push(load(device, cell, Duration::from_secs(seconds), None)?.rate(seconds));
            }
        }
        let [one, three, unsummed] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates
        });
        let middle = |rates: &[f64]| rates.get(rates.len() / 2).copied().unwrap_or_default();
        println!(
            "  {:<30} {:>10.0}/s {:>10.0}/s {:>10.0}/s  {:.2} {:.2}",
            cell.name,
            middle(&one),
            middle(&three),
            middle(&unsummed),
            middle(&three) / middle(&one).max(1.0),
            middle(&three) / middle(&unsummed).max(1.0)
        );
    }
    print_memory(&volume, "after the load")?;
    growth(&service, binary, &three)
}

/// Makes a block claim with so many copies, and answers its device.
fn claim(
    service: &Service,
    binary: &Path,
    name: &str,
    copies: u32,
    checksums: bool,
    size: &str,
) -> anyhow::Result<PathBuf> {
    replicated::claim_block(service, name, copies, checksums, size)?;
    let device = service.path(&format!("{name}.device"));
    service.verb(binary, &["mount", name, &device.display().to_string()])?;
    Ok(device)
}

/// What a load has done.
struct Done {
    operations: u64,
    times: Vec<(Instant, Duration)>,
}

impl Done {
    fn rate(&self, seconds: u64) -> f64 {
        let operations = u32::try_from(self.operations).unwrap_or(u32::MAX);
        f64::from(operations) / Duration::from_secs(seconds).as_secs_f64()
    }
}

/// Runs a load on as many threads as its depth, until the time is over or `stop` is set.
fn load(
    device: &Path,
    cell: &Cell,
    time: Duration,
    stop: Option<&AtomicBool>,
) -> anyhow::Result<Done> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(DIRECT);
    let file = options.open(device)?;
    let until = Instant::now() + time;
    let over = || stop.map_or(Instant::now() >= until, |stop| stop.load(Ordering::Relaxed));
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cell.depth)
            .map(|thread| {
                let (file, over) = (&file, &over);
                scope.spawn(move || work(file, cell, thread, over, stop.is_some()))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()))
            })
            .collect::<std::io::Result<Vec<Done>>>()
    })?;
    Ok(Done {
        operations: results.iter().map(|done| done.operations).sum(),
        times: results.into_iter().flat_map(|done| done.times).collect(),
    })
}

fn work(
    file: &File,
    cell: &Cell,
    thread: u64,
    over: &(impl Fn() -> bool + Sync),
    timed: bool,
) -> std::io::Result<Done> {
    let mut memory = vec![0x5a; cell.bytes + PAGE];
    let skip = memory.as_ptr().align_offset(PAGE);
    let buffer = memory.get_mut(skip..skip + cell.bytes).unwrap_or_default();
    let bytes = u64::try_from(cell.bytes).unwrap_or(u64::MAX);
    let places = SPAN_BYTES / bytes;
    let mut state = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut done = Done {
        operations: 0,
        times: Vec::new(),
    };
    while !over() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let place = if cell.random {
            state % places
        } else {
            (done.operations * cell.depth + thread) % places
        };
        let started = Instant::now();
        if cell.writes {
            file.write_all_at(buffer, place * bytes)?;
        } else {
            file.read_exact_at(buffer, place * bytes)?;
        }
        if timed {
            done.times.push((started, started.elapsed()));
        }
        done.operations += 1;
    }
    Ok(done)
}

/// The run directory of the only volume of several copies.
fn volume_of_copies(service: &Service) -> anyhow::Result<PathBuf> {
    let run = std::fs::read_dir(service.path("data/run"))?;
    let mut volumes = run.flatten().map(|entry| entry.path());
    volumes
        .find(|path| path.join("target.lock").exists())
        .context("no volume of several copies")
}

/// Memory of the target of three copies, and of its copies.
fn print_memory(volume: &Path, when: &str) -> anyhow::Result<()> {
    let resident = |name: &str| -> anyhow::Result<u64> {
        let pid = std::fs::read_to_string(volume.join(format!("{name}.lock")))?;
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.trim()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        Ok(kib.context("no memory is told")? / 1000)
    };
    println!(
        "  memory {when}: target {} MB; copies {}, {} and {} MB",
        resident("target")?,
        resident("0")?,
        resident("1")?,
        resident("2")?
    );
    Ok(())
}

/// Grows the volume under load, and tells how long that took and what writers saw of it.
fn growth(service: &Service, binary: &Path, device: &Path) -> anyhow::Result<()> {
    let cell = Cell {
        name: "",
        bytes: 4 << 10,
        writes: true,
        random: true,
        depth: 8,
    };
    let stop = AtomicBool::new(false);
    let before = size_of(device)?;
    let (done, seen) = std::thread::scope(|scope| {
        let writers = scope.spawn(|| load(device, &cell, Duration::ZERO, Some(&stop)));
        std::thread::sleep(AROUND_GROWTH);
        let asked = Instant::now();
        let grown = service.verb(binary, &["grow", "three", "+1Gi"]);
        let seen = grown.and_then(|()| {
            while size_of(device)? == before {
                anyhow::ensure!(
                    asked.elapsed() < Duration::from_secs(30),
                    "it does not grow"
                );
                std::thread::sleep(Duration::from_micros(200));
            }
            Ok(asked.elapsed())
        });
        std::thread::sleep(AROUND_GROWTH);
        stop.store(true, Ordering::Relaxed);
        let done = writers
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("a writer failed")));
        (done, seen)
    });
    let mut times = Times::default();
    let done = done?;
    done.times.iter().for_each(|(_, time)| times.push(*time));
    println!(
        "  growth under load: {} from the request (with the program's start) to the larger device; of {} writes in \
         the 5 s around it p99.9 {}, longest {}",
        millis(seen?),
        done.operations,
        millis(times.permille(999)),
        millis(times.permille(1000)),
    );
    Ok(())
}

fn size_of(device: &Path) -> anyhow::Result<u64> {
    use std::io::Seek;
    Ok(File::open(device)?.seek(std::io::SeekFrom::End(0))?)
}
