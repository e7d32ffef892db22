//! Measures a volume: `volume-bench DIR COPIES here|unix|tcp SECONDS DEPTH read|write|flush [SPAN-MIB]`.
//! Prints requests a second, their times, and the processor time that one of them takes in all
//! processes together. With `here` the one copy is in this process; otherwise each has a process of its
//! own, started from this program.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::process::{Signal, set_parent_process_death_signal};
use trellis_engine::drive::{
    Address, LocalReplica, ReplicaServer, ReplicaSettings, Volume, VolumeSettings,
};
use trellis_engine::proto::Config;
use trellis_engine::replica::{Identity, Pool, Provisioning};
use uuid::Uuid;

type Failure = Box<dyn std::error::Error>;

const BLOCK: u64 = 4096;

fn settings(pool: &Path, identity: Identity) -> ReplicaSettings {
    ReplicaSettings {
        path: pool.join("replicas/r"),
        pool: None,
        identity,
        provisioning: Provisioning::Thin,
    }
}

/// The other end of this program: a replica.
fn serve(arguments: &[String]) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let identity = Identity {
        volume: arguments[1].parse()?,
        replica: arguments[2].parse()?,
    };
    let settings = settings(Path::new(&arguments[0]), identity);
    let server = ReplicaServer::start(settings, &arguments[3].parse()?)?;
    println!("{}", server.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Processor time of a process so far.
fn cpu_of(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<u64> = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse().ok())
        .collect();
    // The kernel counts in hundredths of a second.
    Duration::from_millis(fields.iter().sum::<u64>() * 10)
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "serve") {
        return serve(&arguments[1..]);
    }
    let [dir, copies, place, seconds, depth, what, rest @ ..] = &arguments[..] else {
        return Err(
            "volume-bench DIR COPIES here|unix|tcp SECONDS DEPTH read|write|flush [SPAN-MIB]"
                .into(),
        );
    };
    let (seconds, depth): (u64, u64) = (seconds.parse()?, depth.parse()?);
    let span = rest.first().map_or(Ok(1024), |span| span.parse::<u64>())? << 20;
    let home = tempfile::tempdir_in(dir)?;
    let volume = Uuid::new_v4();
    let mut children: Vec<Child> = Vec::new();
    let mut addresses = BTreeMap::new();
    let mut local = Vec::new();
    let mut members = std::collections::BTreeSet::new();
    for index in 0..copies.parse::<usize>()? {
        let pool: PathBuf = home.path().join(format!("{index}"));
        std::fs::create_dir(&pool)?;
        let identity = Identity {
            volume,
            replica: Uuid::new_v4(),
        };
        members.insert(identity.replica);
        let size = trellis_api::Bytes::new(span);
        Pool::open(&pool)?.create("r", identity, size, Provisioning::Thin)?;
        let address = match place.as_str() {
            "here" => {
                local.push(LocalReplica::open(settings(&pool, identity))?);
                continue;
            }
            "unix" => Address::Unix(home.path().join(format!("{index}.sock"))),
            _ => "tcp:127.0.0.1:0".parse()?,
        };
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .arg(&pool)
            .args([
                volume.to_string(),
                identity.replica.to_string(),
                address.to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let out = child.stdout.take().ok_or("no output")?;
        BufReader::new(out).read_line(&mut line)?;
        addresses.insert(identity.replica, line.trim().parse()?);
        children.push(child);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let settings = VolumeSettings::new(volume, Config::majority(members), addresses);
    let result = runtime.block_on(async {
        let volume = if local.is_empty() {
            Volume::start(settings)
        } else {
            Volume::start_local(settings, local)?
        };
        volume.ready().await?;
        measure(&volume, seconds, depth, what, span, &children).await
    });
    for child in &mut children {
        child.kill()?;
        child.wait()?;
    }
    result
}

async fn measure(
    volume: &Volume,
    seconds: u64,
    depth: u64,
    what: &str,
    span: u64,
    children: &[Child],
) -> Result<(), Failure> {
    let data = Bytes::from(vec![0xA5; 4096]);
    if what == "read" {
        for at in (0..span).step_by(1 << 20) {
            volume
                .write(at, vec![Bytes::from(vec![0xA5; 1 << 20])], false)
                .await?;
        }
    }
    let counting = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    let stop = Arc::new(AtomicU64::new(0));
    for worker in 0..depth {
        let (volume, data, what) = (volume.clone(), data.clone(), what.to_owned());
        let (counting, done, stop) = (Arc::clone(&counting), Arc::clone(&done), Arc::clone(&stop));
        tasks.spawn(async move {
            let mut times = Vec::new();
            let mut random = worker + 1;
            while stop.load(Ordering::Relaxed) == 0 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let at = (random >> 20) % (span / BLOCK) * BLOCK;
                let began = Instant::now();
                match what.as_str() {
                    "read" => drop(volume.read(at, BLOCK).await?),
                    "flush" => {
                        volume.write(at, vec![data.clone()], false).await?;
                        volume.flush().await?;
                    }
                    _ => volume.write(at, vec![data.clone()], false).await?,
                }
                if counting.load(Ordering::Relaxed) == 1 {
                    times.push(began.elapsed());
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok::<_, trellis_engine::drive::VolumeError>(times)
        });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let pids: Vec<u32> = children
        .iter()
        .map(Child::id)
        .chain([std::process::id()])
        .collect();
    let cpu = || pids.iter().map(|pid| cpu_of(*pid)).sum::<Duration>();
    let (before, began) = (cpu(), Instant::now());
    counting.store(1, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    counting.store(0, Ordering::Relaxed);
    let (used, took) = (cpu() - before, began.elapsed());
    stop.store(1, Ordering::Relaxed);
    let mut times = Vec::new();
    while let Some(result) = tasks.join_next().await {
        times.extend(result??);
    }
    times.sort();
    let count = u32::try_from(times.len())?.max(1);
    let at = |share: usize| {
        times
            .get(times.len() * share / 1000)
            .copied()
            .unwrap_or_default()
    };
    println!(
        "{what} depth {depth}: {:.0}/s, mean {:?}, median {:?}, 99 % {:?}, longest {:?}; {:.2} us of processor each",
        f64::from(count) / took.as_secs_f64(),
        times.iter().sum::<Duration>() / count,
        at(500),
        at(990),
        times.last().copied().unwrap_or_default(),
        used.as_secs_f64() * 1e6 / f64::from(count),
    );
    Ok(())
}
