//! Growth while things go wrong, under a load that knows what it wrote: replicas are processes that are
//! frozen and killed, and so is the one that coordinates.
//!
//! Every test prints the longest time that a write took; how long that is depends on the machine, so
//! it is not asserted.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;
#[path = "common/load.rs"]
mod load;

use std::ffi::CString;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cluster::{Cluster, Process, Replica, example, is_whole, until};
use load::Model;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::Signal;
use trellis_engine::coordinator::{GrowthHeld, ReplicaState};
use trellis_engine::drive::{Volume, VolumeError, VolumeSettings, WhenFull};
use trellis_engine::replica::{Identity, Provisioning};
use uuid::Uuid;

const MIB: u64 = 1 << 20;

const WRITERS: u64 = 32;

/// A volume under load.
struct Loaded {
    cluster: Cluster,
    volume: Volume,
    model: Arc<Model>,
    load: tokio::task::JoinSet<()>,
}

impl Loaded {
    async fn start(cluster: Cluster) -> Loaded {
        let volume = Volume::start(cluster.settings());
        volume.ready().await.unwrap();
        let model = Arc::new(Model::default());
        let load = load::start(&volume, &model, WRITERS, None);
        let loaded = Loaded {
            cluster,
            volume,
            model,
            load,
        };
        loaded.go_on(500).await;
        loaded.model.longest();
        loaded
    }

    /// Lets the load go on for a while, and checks that it does.
    async fn go_on(&self, ms: u64) {
        let before = self.model.writes();
        tokio::time::sleep(Duration::from_millis(ms)).await;
        // Disks that others keep busy may take longer than that for a sync.
        let progress = async {
            while self.model.writes() <= before {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let limit = Duration::from_secs(20);
        let in_time = tokio::time::timeout(limit, progress).await;
        assert!(in_time.is_ok(), "nothing was written");
    }

    fn say(&self, what: &str) {
        println!("{what}: longest write {:?}", self.model.longest());
    }

    /// Everything must come to rest, with every byte everywhere.
    async fn end(mut self, size: u64) {
        until(&self.volume, "everything in sync", is_whole).await;
        load::finish(&self.model, &mut self.load).await;
        load::check_all(&self.volume, &self.model).await;
        until(&self.volume, "everything in sync", is_whole).await;
        assert_eq!(self.volume.size(), size);
        self.volume.flush().await.unwrap();
        self.cluster.assert_same(size);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_replica_stops_neither_writes_nor_a_growth() {
    // Fails if an I/O fails or the growth waits for a replica that does not answer.
    frozen(Cluster::start(3, 32 * MIB)).await;
}

async fn frozen(cluster: Cluster) {
    let loaded = Loaded::start(cluster).await;
    loaded.cluster.replicas[2].signal(Signal::STOP);
    loaded.go_on(1_000).await;
    loaded.say("one frozen");
    assert_eq!(loaded.volume.grow(48 * MIB).await, Ok(48 * MIB));
    loaded.go_on(3_000).await;
    loaded.say("one frozen, grown");
    loaded.cluster.replicas[2].signal(Signal::CONT);
    loaded.end(48 * MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_are_frozen_in_turns_hold_the_same_bytes_in_the_end() {
    // Fails if replicas do not see the writes in the memory of the volume, or one that was given up while it looked
    // at them writes what is there now.
    let loaded = Loaded::start(Cluster::start(3, 32 * MIB)).await;
    for replica in &loaded.cluster.replicas {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", replica.pid())).unwrap();
        assert!(maps.contains("memfd:trellis-writes"), "{maps}");
    }
    for round in 0..6 {
        let replica = &loaded.cluster.replicas[round % 3];
        replica.signal(Signal::STOP);
        loaded.go_on(600).await;
        replica.signal(Signal::CONT);
        until(&loaded.volume, "everything in sync", is_whole).await;
    }
    loaded.say("frozen in turns, each before the last has caught up");
    loaded.end(32 * MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_replica_stops_neither_writes_nor_a_growth() {
    // Fails if a growth needs all replicas, or one that comes back keeps its old size.
    dead(Cluster::start(3, 32 * MIB)).await;
}

async fn dead(cluster: Cluster) {
    let mut loaded = Loaded::start(cluster).await;
    loaded.cluster.replicas[0].kill();
    loaded.go_on(300).await;
    assert_eq!(loaded.volume.grow(40 * MIB).await, Ok(40 * MIB));
    loaded.go_on(300).await;
    loaded.say("one dead, grown");
    loaded.cluster.replicas[0].start();
    loaded.go_on(300).await;
    loaded.say("it comes back");
    loaded.end(40 * MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_acknowledged_write_is_lost_when_all_replicas_are_killed() {
    // Fails if a replica forgets with its process how far it was, so that one that had less is believed.
    all_killed(Cluster::start(3, 32 * MIB)).await;
}

async fn all_killed(cluster: Cluster) {
    let mut loaded = Loaded::start(cluster).await;
    for _ in 0..3 {
        for index in [2, 0, 1] {
            loaded.cluster.replicas[index].kill();
            tokio::time::sleep(Duration::from_millis(40)).await;
        }
        for index in 0..3 {
            loaded.cluster.replicas[index].start();
        }
        until(&loaded.volume, "everything in sync", is_whole).await;
        loaded.go_on(300).await;
        loaded.say("all were killed, and came back");
    }
    loaded.end(32 * MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_replaced_under_load() {
    // Fails if the new one counts before it has everything, or the old one is still waited for.
    replaced(Cluster::start(3, 32 * MIB)).await;
}

async fn replaced(cluster: Cluster) {
    let mut loaded = Loaded::start(cluster).await;
    let pool = loaded.cluster.new_pool();
    loaded.cluster.add(&pool, 16 * MIB, Provisioning::Thin);
    let old = loaded.cluster.replicas.remove(0);
    let (config, addresses) = (loaded.cluster.config(), loaded.cluster.addresses());
    let wanted = config.clone();
    loaded.volume.reconfigure(config, addresses).await.unwrap();
    let changed = |status: &trellis_engine::coordinator::Status| {
        status.view.current == wanted
            && status.view.next.is_none()
            && !status.replicas.contains_key(&old.identity.replica)
    };
    until(&loaded.volume, "the new view", changed).await;
    drop(old);
    loaded.go_on(300).await;
    loaded.say("one replaced");
    assert_eq!(loaded.volume.grow(48 * MIB).await, Ok(48 * MIB));
    loaded.end(48 * MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_growths_at_the_same_time_end_at_the_larger() {
    // Fails if one of them is lost, or the volume ends at the smaller one.
    let loaded = Loaded::start(Cluster::start(3, 32 * MIB)).await;
    let (first, second) = tokio::join!(loaded.volume.grow(48 * MIB), loaded.volume.grow(64 * MIB));
    assert!(first.is_ok_and(|size| size >= 48 * MIB), "{first:?}");
    assert_eq!(second, Ok(64 * MIB));
    loaded.go_on(200).await;
    loaded.say("two growths");
    loaded.end(64 * MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_acknowledged_write_is_lost_when_the_coordinator_is_killed_in_a_growth() {
    // Fails if a successor serves less than was acknowledged, or less than a size that was served.
    coordinator_killed(Cluster::start(3, 32 * MIB)).await;
}

async fn coordinator_killed(cluster: Cluster) {
    let model = Arc::new(Model::default());
    for round in 0..3 {
        let (begun, acked) = run_and_kill(&cluster, &model, round);
        println!("killed after {acked} of {begun} writes");
        let volume = Volume::start(cluster.settings());
        let began = Instant::now();
        let size = volume.ready().await.unwrap();
        println!(
            "a successor serves {} MiB after {:?}",
            size / MIB,
            began.elapsed()
        );
        assert!(acked > 0 && size >= 32 * MIB);
        load::check_all(&volume, &model).await;
        until(&volume, "everything in sync", is_whole).await;
        volume.flush().await.unwrap();
        cluster.assert_same(size);
        volume.stop().await;
    }
}

/// Lets another process write and grow the volume, and kills it in the middle.
fn run_and_kill(cluster: &Cluster, model: &Arc<Model>, round: u64) -> (u64, u64) {
    let mut command = Command::new(example("volume-load"));
    command
        .arg(cluster.volume.to_string())
        .arg("2")
        .arg((40 * MIB + round * 64 * MIB).to_string())
        .arg(model.last_version().to_string());
    if cluster.credentials().is_some() {
        let dir = cluster.credentials_dir();
        command.arg(format!("credentials={}", dir.display()));
    }
    for (replica, address) in cluster.addresses() {
        command.arg(format!("{replica}={address}"));
    }
    let mut process = Process::start(&mut command);
    let lines = BufReader::new(process.child().stdout.take().unwrap()).lines();
    let heard = Arc::clone(model);
    let listener = std::thread::spawn(move || {
        let (mut begun, mut acked) = (0u64, 0u64);
        for line in lines.map_while(Result::ok) {
            let words: Vec<&str> = line.split(' ').collect();
            let [what, block, version] = words[..] else {
                panic!("{line}")
            };
            let is_acked = what == "acked";
            heard.heard(block.parse().unwrap(), version.parse().unwrap(), is_acked);
            begun += u64::from(!is_acked);
            acked += u64::from(is_acked);
        }
        (begun, acked)
    });
    std::thread::sleep(Duration::from_millis(1_200));
    process
        .child()
        .stdin
        .as_mut()
        .unwrap()
        .write_all(b"grow\n")
        .unwrap();
    std::thread::sleep(Duration::from_millis(150 + 70 * round));
    drop(process);
    listener.join().unwrap()
}

/// A small filesystem in memory, which goes away with this, also by a panic.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(size: &str) -> Tmpfs {
        let home = tempfile::tempdir().unwrap();
        let options = CString::new(format!("size={size},mode=0700")).unwrap();
        mount(
            "tmpfs",
            home.path(),
            "tmpfs",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .expect("this test mounts a tmpfs, so it must run as root");
        Tmpfs(home)
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_growth_that_does_not_fit_is_held_with_the_reason_and_io_goes_on() {
    // Fails if the volume is raised beyond what CF pools have, if I/O stops, or if what was set aside
    // for the growth that did not fit is missing for one that does.
    let small = [Tmpfs::mount("64m"), Tmpfs::mount("64m")];
    let mut cluster = Cluster::start(1, 16 * MIB);
    for pool in &small {
        cluster.add(&pool.path(), 16 * MIB, Provisioning::Thick);
    }
    let loaded = Loaded::start(cluster).await;
    let held = loaded.volume.grow(256 * MIB).await;
    assert_eq!(held, Err(VolumeError::GrowthHeld(GrowthHeld::NoSpace)));
    let told = |status: &trellis_engine::coordinator::Status| {
        status.growth_held == Some(GrowthHeld::NoSpace) && status.growing_to == Some(256 * MIB)
    };
    until(&loaded.volume, "the reason", told).await;
    assert_eq!(loaded.volume.size(), 16 * MIB);
    loaded.go_on(500).await;
    loaded.say("held for want of space");
    assert_eq!(loaded.volume.grow(48 * MIB).await, Ok(48 * MIB));
    loaded.end(48 * MIB).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_is_told_at_once_and_only_to_who_writes() {
    // Fails if a client waits for space, is not told why, cannot read, or loses what was acknowledged.
    let small = Tmpfs::mount("24m");
    let mut cluster = Cluster::start(0, 0);
    cluster.add(&small.path(), 64 * MIB, Provisioning::Thin);
    let volume = Volume::start(VolumeSettings {
        when_full: WhenFull::Fail,
        ..cluster.settings()
    });
    volume.ready().await.unwrap();
    let filler = small.path().join("filler");
    std::fs::write(&filler, vec![1; 16 << 20]).unwrap();
    let page = |block| vec![load::content(block, 1)];
    let mut written = 0;
    let error = loop {
        match volume.write(written * 4096, page(written), false).await {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    println!("full after {written} blocks");
    assert_eq!(error, VolumeError::NoSpace);
    assert!(written > 256);
    let id = cluster.id(0);
    until(&volume, "a full pool", |status| status.replicas[&id].full).await;
    for block in 0..written {
        let read = volume.read(block * 4096, 4096).await.unwrap().concat();
        assert_eq!(load::version_of(block, &read), Some(1));
    }
    volume.flush().await.unwrap();
    volume.zero(0, 4096).await.unwrap();
    std::fs::remove_file(filler).unwrap();
    until(&volume, "space", |status| !status.replicas[&id].full).await;
    volume.write(0, page(0), true).await.unwrap();
    volume
        .write(written * 4096, page(written), true)
        .await
        .unwrap();
    for block in 0..=written {
        let read = volume.read(block * 4096, 4096).await.unwrap().concat();
        assert_eq!(load::version_of(block, &read), Some(1));
    }
}

/// A replica is away while the volume is written and grows twice, and is repaired when it comes back.
async fn away(mut cluster: Cluster, mib: u64) {
    let volume = Volume::start(cluster.settings());
    volume.ready().await.unwrap();
    until(&volume, "everything in sync", is_whole).await;
    cluster.replicas[1].kill();
    volume.grow(768 * MIB).await.unwrap();
    let began = Instant::now();
    let mut longest = Duration::ZERO;
    for region in 0..mib {
        // Half of it behind the old end.
        let at = if region % 2 == 0 {
            region / 2
        } else {
            512 + region / 2
        };
        if at == 512 + 200 {
            volume.grow(2048 * MIB).await.unwrap();
        }
        let pages = (0..256).map(|page| load::content(at * 256 + page, 1));
        let data = Bytes::from(pages.collect::<Vec<_>>().concat());
        let wrote = Instant::now();
        volume.write(at * MIB, vec![data], false).await.unwrap();
        longest = longest.max(wrote.elapsed());
    }
    volume.grow(2048 * MIB).await.unwrap();
    println!(
        "{mib} MiB written in {:?}, longest write {longest:?}",
        began.elapsed()
    );
    cluster.replicas[1].start();
    let began = Instant::now();
    let id = cluster.id(1);
    let status = until(&volume, "a repair", |status| {
        matches!(status.replicas[&id].state, ReplicaState::Repairing { .. }) || is_whole(status)
    })
    .await;
    println!(
        "back after {:?}: {:?}",
        began.elapsed(),
        status.replicas[&id]
    );
    let status = until(&volume, "everything in sync", is_whole).await;
    println!("repaired after {:?}", began.elapsed());
    assert_eq!(status.replicas[&id].size, 2048 * MIB);
    volume.flush().await.unwrap();
    cluster.assert_same(2048 * MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_missed_two_growths_and_a_gib_of_writes_gets_all_of_it() {
    // Fails if it comes back with its old size, or with bytes that it missed.
    away(Cluster::start(3, 512 * MIB), 1024).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_of_another_volume_at_a_recycled_address_is_left_alone() {
    // Fails if a volume writes to, raises or fences a replica that is not one of its own.
    let mut loaded = Loaded::start(Cluster::start(3, 16 * MIB)).await;
    let identity = loaded.cluster.replicas[2].identity;
    let recycled = loaded.cluster.replicas[2].address();
    loaded.cluster.replicas[2].kill();
    let home = tempfile::tempdir().unwrap();
    let stranger = Identity {
        volume: Uuid::new_v4(),
        replica: Uuid::new_v4(),
    };
    let mut other = Replica::make(home.path(), stranger, 8 * MIB, Provisioning::Thin, recycled);
    other.start();
    let before = files(&other);
    assert_eq!(loaded.volume.grow(32 * MIB).await, Ok(32 * MIB));
    loaded.go_on(3_000).await;
    loaded.say("a stranger in the place of a replica");
    let status = loaded.volume.status();
    let state = status.replicas[&identity.replica].state;
    assert!(
        matches!(state, ReplicaState::Away | ReplicaState::Arriving),
        "{state:?}"
    );
    assert!(files(&other) == before, "the stranger was changed");
    other.kill();
    loaded.cluster.replicas[2].start();
    loaded.end(32 * MIB).await;
}

/// Every file of a replica, with its bytes.
fn files(replica: &Replica) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    std::fs::read_dir(replica.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

/// The same with replicas on nodes of their own.
mod over_tls {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_frozen_replica_stops_neither_writes_nor_a_growth() {
        // Fails if a handshake with a frozen replica is waited for by anything else.
        frozen(Cluster::start_tls(3, 32 * MIB)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_dead_replica_stops_neither_writes_nor_a_growth() {
        // Fails if a replica that comes back is not let in, or keeps its old size.
        dead(Cluster::start_tls(3, 32 * MIB)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_acknowledged_write_is_lost_when_all_replicas_are_killed() {
        // Fails if bytes that were sealed and not sent count as applied.
        all_killed(Cluster::start_tls(3, 32 * MIB)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_replica_is_replaced_under_load() {
        // Fails if a replica on a further node cannot join, or the old one is still waited for.
        replaced(Cluster::start_tls(3, 32 * MIB)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_acknowledged_write_is_lost_when_the_coordinator_is_killed_in_a_growth() {
        // Fails if a successor on the same node is not let in next to the connections of the dead one.
        coordinator_killed(Cluster::start_tls(3, 32 * MIB)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_replica_that_missed_growths_and_writes_gets_all_of_it() {
        // Fails if a repair, whose frames are as long as frames get, is cut or mixed up.
        away(Cluster::start_tls(3, 512 * MIB), 256).await;
    }
}
