//! Measures volumes beside a bare file: `volume-bench DIR SECONDS [PLACES [CASES]]`.
//!
//! PLACES are some of `bare` (the same requests on a plain file, by this process), `1unix`, `3unix`, `1tls`, `3tls`
//! (copies in processes of their own, started from this program; with `tls` as if they were on other nodes). CASES are
//! like `4k-random-write-32`: length, order, direction (also `flush`: a write, then a flush), depth. By default
//! `bare,1unix,3unix,3unix-unsummed,3tls`, and all that [`CASES`] has.
//!
//! Prints requests a second, their times, and the processor time that one of them takes: in this
//! process and in all others together. At the end, if both were measured, what `3tls` does compared with `3unix`.

#[path = "../tests/common/pki.rs"]
mod pki;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pki::Home;
use rustix::process::{Signal, set_parent_process_death_signal};
use trellis_engine::drive::{
    Address, Credentials, ReplicaServer, ReplicaSettings, Volume, VolumeError, VolumeSettings,
};
use trellis_engine::proto::Config;
use trellis_engine::replica::{Identity, Pool, Provisioning};
use uuid::Uuid;

type Failure = Box<dyn std::error::Error>;

const CASES: &str = "4k-random-read-1,4k-random-read-32,4k-random-write-1,4k-random-write-32,\
                     64k-sequential-read-16,64k-sequential-write-16,1m-sequential-read-4,1m-sequential-write-4";

/// How much of the volume is used.
const SPAN: u64 = 1 << 30;

/// Buffers that are written from, so that not all of it comes from the processor's cache.
const BUFFERS: usize = 32;

/// The node of this process, for copies on others.
const TARGET: &str = "target";

/// Before it is counted.
const WARM_UP: Duration = Duration::from_millis(700);

/// Processor time is told in hundredths of a second.
const CPU_TICK_MS: u64 = 10;

#[derive(Clone, Copy, PartialEq)]
enum What {
    Read,
    Write,
    Flush,
}

#[derive(Clone)]
struct Case {
    name: String,
    length: u64,
    random: bool,
    what: What,
    depth: u64,
}

impl Case {
    fn parse(name: &str) -> Result<Case, Failure> {
        let parts: Vec<&str> = name.split('-').collect();
        let [length, order, what, depth] = parts[..] else {
            return Err(format!("{name} is no case").into());
        };
        let length = match length.split_at(length.len() - 1) {
            (number, "k") => number.parse::<u64>()? << 10,
            (number, "m") => number.parse::<u64>()? << 20,
            _ => return Err(format!("{length} is no length").into()),
        };
        let what = match what {
            "read" => What::Read,
            "write" => What::Write,
            "flush" => What::Flush,
            _ => return Err(format!("{what} is neither read, write nor flush").into()),
        };
        Ok(Case {
            name: name.to_owned(),
            length,
            random: order == "random",
            what,
            depth: depth.parse()?,
        })
    }
}

/// What is measured.
#[derive(Clone)]
enum Under {
    Bare(Arc<File>),
    Volume(Volume),
}

impl Under {
    async fn read(&self, at: u64, length: u64) -> Result<(), VolumeError> {
        match self {
            Under::Bare(file) => {
                let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
                file.read_exact_at(&mut bytes, at)
                    .map_err(|_| VolumeError::Medium)?;
                drop(std::hint::black_box(bytes));
                tokio::task::yield_now().await;
                Ok(())
            }
            Under::Volume(volume) => volume.read(at, length).await.map(drop),
        }
    }

    async fn write(&self, at: u64, data: Bytes) -> Result<(), VolumeError> {
        match self {
            Under::Bare(file) => {
                file.write_all_at(&data, at)
                    .map_err(|_| VolumeError::Medium)?;
                tokio::task::yield_now().await;
                Ok(())
            }
            Under::Volume(volume) => volume.write(at, vec![data], false).await,
        }
    }

    async fn flush(&self) -> Result<(), VolumeError> {
        match self {
            Under::Bare(file) => file.sync_data().map_err(|_| VolumeError::Medium),
            Under::Volume(volume) => volume.flush().await,
        }
    }
}

/// What ends the name of a place whose replicas have no sums of their blocks.
const UNSUMMED: &str = "-unsummed";

fn settings(pool: &Path, identity: Identity, checksums: bool) -> ReplicaSettings {
    ReplicaSettings {
        path: pool.join("replicas/r"),
        pool: None,
        identity,
        provisioning: Provisioning::Thin,
        checksums,
    }
}

/// The other end of this program: a replica.
fn serve(arguments: &[String]) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let identity = Identity {
        volume: arguments[1].parse()?,
        replica: arguments[2].parse()?,
    };
    let (listen, credentials) = (arguments[3].parse()?, &arguments[4]);
    let checksums = arguments.get(5).is_none();
    let settings = settings(Path::new(&arguments[0]), identity, checksums);
    let server = match listen {
        Address::Unix(_) => ReplicaServer::start(settings, &listen)?,
        Address::Tls { .. } => {
            let credentials = Credentials::read(Path::new(credentials))?;
            let allowed = [TARGET.parse()?].into();
            ReplicaServer::start_tls(settings, &listen, &credentials, allowed)?
        }
    };
    println!("{}", server.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Processor time of a process so far.
fn cpu_of(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Duration::from_millis(ticks * CPU_TICK_MS)
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "serve") {
        return serve(&arguments[1..]);
    }
    let [dir, seconds, rest @ ..] = &arguments[..] else {
        return Err("volume-bench DIR SECONDS [PLACES [CASES]]".into());
    };
    let seconds = Duration::from_secs(seconds.parse()?);
    let places = rest
        .first()
        .map_or("bare,1unix,3unix,3unix-unsummed,3tls", String::as_str);
    let cases: Vec<Case> = rest
        .get(1)
        .map_or(CASES, String::as_str)
        .split(',')
        .map(Case::parse)
        .collect::<Result<_, _>>()?;
    println!(
        "place          case                     requests/s   median      99 %   longest  us here  us there"
    );
    let mut found = BTreeMap::new();
    for place in places.split(',') {
        let home = tempfile::tempdir_in(dir)?;
        let mut children = Children(Vec::new());
        let costs = measure_place(place, home.path(), &mut children, &cases, seconds)?;
        found.insert(place, costs);
    }
    if let (Some(tls), Some(unix)) = (found.get("3tls"), found.get("3unix")) {
        println!("3tls : 3unix                        requests/s           processor time");
        for ((case, tls), unix) in cases.iter().zip(tls).zip(unix) {
            let (rate, cpu) = (tls.rate / unix.rate, tls.cpu_us / unix.cpu_us);
            println!("               {:24} {rate:10.2} {cpu:24.2}", case.name);
        }
    }
    Ok(())
}

/// What a case costs in a place.
struct Cost {
    /// Requests a second.
    rate: f64,
    /// Processor time of a request, in all processes.
    cpu_us: f64,
}

/// Processes that end with this one.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn measure_place(
    place: &str,
    home: &Path,
    children: &mut Children,
    cases: &[Case],
    seconds: Duration,
) -> Result<Vec<Cost>, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let under = if place == "bare" {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(home.join("bare"))?;
        file.set_len(SPAN)?;
        Under::Bare(Arc::new(file))
    } else {
        let _in_runtime = runtime.enter();
        Under::Volume(start(place, home, children)?)
    };
    runtime.block_on(async {
        if let Under::Volume(volume) = &under {
            volume.ready().await?;
        }
        // Every block has bytes.
        let data = Bytes::from(vec![0xA5; 1 << 20]);
        for at in (0..SPAN).step_by(data.len()) {
            under.write(at, data.clone()).await?;
        }
        let mut costs = Vec::new();
        for case in cases {
            costs.push(measure(place, &under, case, seconds, &children.0).await?);
        }
        Ok(costs)
    })
}

/// Starts the copies of a volume, and the volume.
fn start(place: &str, home: &Path, children: &mut Children) -> Result<Volume, Failure> {
    let (copies, place) = place.split_at(1);
    let unsummed = place.strip_suffix(UNSUMMED);
    let (place, checksums) = unsummed.map_or((place, true), |place| (place, false));
    let volume = Uuid::new_v4();
    let mut addresses = BTreeMap::new();
    let mut members = BTreeSet::new();
    let authority = Home::new();
    for index in 0..copies.parse::<usize>()? {
        let pool = home.join(format!("{index}"));
        std::fs::create_dir(&pool)?;
        let identity = Identity {
            volume,
            replica: Uuid::new_v4(),
        };
        members.insert(identity.replica);
        let size = trellis_api::Bytes::new(SPAN);
        Pool::open(&pool)?.create("r", identity, size, Provisioning::Thin)?;
        let address = match place {
            "unix" => Address::Unix(home.join(format!("{index}.sock"))),
            "tls" => {
                let node = format!("node-{index}");
                authority.credentials(home, &node);
                format!("tls:{node}@127.0.0.1:0").parse()?
            }
            _ => return Err(format!("{place} is no place").into()),
        };
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .arg(&pool)
            .args([
                volume.to_string(),
                identity.replica.to_string(),
                address.to_string(),
            ])
            .arg(home.join(format!("node-{index}")))
            .args((!checksums).then_some("unsummed"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = child.stdout.take().ok_or("no output")?;
        children.0.push(child);
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        addresses.insert(identity.replica, line.trim().parse()?);
    }
    let settings = VolumeSettings {
        credentials: Some(authority.credentials(home, TARGET)),
        ..VolumeSettings::new(volume, Config::majority(members), addresses)
    };
    Ok(Volume::start(settings))
}

/// What the workers of one case share.
struct Shared {
    counts: AtomicBool,
    stops: AtomicBool,
    next: AtomicU64,
}

async fn work(
    under: Under,
    case: Case,
    shared: Arc<Shared>,
    mut random: u64,
) -> Result<Vec<Duration>, VolumeError> {
    let slots = SPAN / case.length;
    let buffers: Vec<Bytes> = (1..=BUFFERS)
        .map(|fill| {
            let length = usize::try_from(case.length).unwrap_or(0);
            Bytes::from(vec![u8::try_from(fill).unwrap_or(1); length])
        })
        .take(if case.what == What::Read { 0 } else { BUFFERS })
        .collect();
    let mut times = Vec::new();
    while !shared.stops.load(Ordering::Relaxed) {
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let slot = if case.random { random >> 20 } else { number } % slots;
        let (at, buffer) = (slot * case.length, usize::try_from(number).unwrap_or(0));
        let began = Instant::now();
        match case.what {
            What::Read => under.read(at, case.length).await?,
            What::Write | What::Flush => under.write(at, buffers[buffer % BUFFERS].clone()).await?,
        }
        if case.what == What::Flush {
            under.flush().await?;
        }
        if shared.counts.load(Ordering::Relaxed) {
            times.push(began.elapsed());
        }
    }
    Ok(times)
}

async fn measure(
    place: &str,
    under: &Under,
    case: &Case,
    seconds: Duration,
    children: &[Child],
) -> Result<Cost, Failure> {
    let shared = Arc::new(Shared {
        counts: AtomicBool::new(false),
        stops: AtomicBool::new(false),
        next: AtomicU64::new(0),
    });
    let mut tasks = tokio::task::JoinSet::new();
    for worker in 0..case.depth {
        tasks.spawn(work(
            under.clone(),
            case.clone(),
            Arc::clone(&shared),
            worker + 1,
        ));
    }
    tokio::time::sleep(WARM_UP).await;
    let here = || cpu_of(std::process::id());
    let there = || children.iter().map(|it| cpu_of(it.id())).sum::<Duration>();
    let (began, here_before, there_before) = (Instant::now(), here(), there());
    shared.counts.store(true, Ordering::Relaxed);
    tokio::time::sleep(seconds).await;
    shared.counts.store(false, Ordering::Relaxed);
    let took = began.elapsed();
    let (here, there) = (here() - here_before, there() - there_before);
    shared.stops.store(true, Ordering::Relaxed);
    let mut times = Vec::new();
    while let Some(result) = tasks.join_next().await {
        times.extend(result??);
    }
    times.sort();
    let count = f64::from(u32::try_from(times.len())?.max(1));
    let at = |share: usize| times.get(times.len() * share / 1000).copied();
    println!(
        "{place:14} {:24} {:10.0} {:8.0?} {:9.0?} {:9.0?} {:8.1} {:9.1}",
        case.name,
        count / took.as_secs_f64(),
        at(500).unwrap_or_default(),
        at(990).unwrap_or_default(),
        times.last().copied().unwrap_or_default(),
        here.as_secs_f64() * 1e6 / count,
        there.as_secs_f64() * 1e6 / count,
    );
    Ok(Cost {
        rate: count / took.as_secs_f64(),
        cpu_us: (here + there).as_secs_f64() * 1e6 / count,
    })
}
