//! Copies that have lost their memory, or a part of their bytes: they are repaired, and decide nothing. Replicas are
//! processes.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use cluster::{Cluster, is_whole, until};
use trellis_api::step::Step;
use trellis_engine::coordinator::{NotServed, Standing};
use trellis_engine::drive::{Address, ReplicaServer, ReplicaSettings, Volume, VolumeSettings};
use trellis_engine::proto::{Config, Lineage};
use trellis_engine::replica::{Identity, Provisioning};
use uuid::Uuid;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const MEMORY: [&str; 4] = ["meta.a", "meta.b", "meta.log", "note"];

async fn write(volume: &Volume, at: u64, value: u8) {
    let data = vec![Bytes::from(vec![value; 64 << 10])];
    volume.write(at, data, false).await.unwrap();
}

async fn value_at(volume: &Volume, at: u64) -> u8 {
    volume.read(at, 4096).await.unwrap().concat()[0]
}

fn memory_of(replica: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = MEMORY.iter().map(|name| replica.join(name));
    paths
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// Copy 2 misses everything that is written, copy 1 has `damage` done to its memory, copy 0 is away. The two that are
/// left must not decide; with copy 0 everything is there.
async fn a_copy_without_its_memory_has_no_vote(damage: impl Fn(&Path, &[(PathBuf, Vec<u8>)])) {
    let mut cluster = Cluster::start(3, SIZE);
    let volume = Volume::start(cluster.settings());
    until(&volume, "the volume", is_whole).await;
    let early = memory_of(&cluster.replicas[1].path());
    cluster.replicas[2].kill();
    until(&volume, "its absence", |it| !it.redundancy_met).await;
    for at in 0..8 {
        write(&volume, at * MIB, 5).await;
    }
    volume.flush().await.unwrap();
    volume.stop().await;
    cluster.replicas[0].kill();
    cluster.replicas[1].kill();
    damage(&cluster.replicas[1].path(), &early);
    cluster.replicas[1].start();
    cluster.replicas[2].start();

    let volume = Volume::start(cluster.settings());
    until(&volume, "its report", |it| {
        it.replicas[&cluster.id(1)].standing == Some(Standing::Unproven)
    })
    .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let status = volume.status();
    let told = NotServed::TooFewReports {
        counted: 1,
        needed: 2,
    };
    assert_eq!(status.not_served, Some(told), "{status:#?}");
    cluster.replicas[0].start();
    until(&volume, "the volume", is_whole).await;
    for at in 0..8 {
        assert_eq!(value_at(&volume, at * MIB).await, 5, "{at} MiB");
    }
    volume.stop().await;
    cluster.assert_same(SIZE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_memory_is_gone_has_no_vote() {
    // Fails if 8 of 8 MiB that were flushed are rolled back by a copy that knows of nothing, and one that was away.
    a_copy_without_its_memory_has_no_vote(|replica, _| {
        for name in MEMORY {
            fs::remove_file(replica.join(name)).unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_memory_is_of_a_backup_has_no_vote() {
    // Fails if meta data that are whole and old are taken for what the copy has told others.
    a_copy_without_its_memory_has_no_vote(|_, early| {
        for (path, bytes) in early {
            fs::write(path, bytes).unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_memory_was_cut_has_no_vote() {
    // Fails if what is left of a log is taken for all of it.
    a_copy_without_its_memory_has_no_vote(|replica, _| {
        fs::write(replica.join("meta.log"), []).unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_file_that_was_cut_to_its_size_before_a_growth_is_not_filled_with_zeros() {
    // Fails if zeros that nobody wrote win over the bytes of two good copies.
    let mut cluster = Cluster::start(3, SIZE);
    let volume = Volume::start(cluster.settings());
    until(&volume, "the volume", is_whole).await;
    volume.grow(2 * SIZE).await.unwrap();
    until(&volume, "the growth", is_whole).await;
    write(&volume, 0, 5).await;
    write(&volume, SIZE + MIB, 7).await;
    volume.flush().await.unwrap();
    volume.stop().await;
    // Of copies that are equal, the last one is chosen.
    let last = (0..3).max_by_key(|index| cluster.id(*index)).unwrap();
    for replica in &mut cluster.replicas {
        replica.kill();
    }
    let data = fs::OpenOptions::new()
        .write(true)
        .open(cluster.replicas[last].data())
        .unwrap();
    data.set_len(SIZE).unwrap();
    for replica in &mut cluster.replicas {
        replica.start();
    }
    let volume = Volume::start(cluster.settings());
    until(&volume, "the volume", is_whole).await;
    assert_eq!(value_at(&volume, 0).await, 5);
    assert_eq!(value_at(&volume, SIZE + MIB).await, 7);
    volume.stop().await;
    cluster.assert_same(2 * SIZE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_dies_at_any_step_of_its_own_starts_again() {
    // Fails if a death in the process of a copy leaves a copy that cannot be served, or one without its bytes.
    for step in Step::ALL.iter().filter(|step| step.is_of_a_copy()) {
        let mut cluster = Cluster::start(2, SIZE);
        // One copy without its memory, as a first start finds one that an earlier version has made.
        cluster.replicas[1].kill();
        for name in MEMORY {
            fs::remove_file(cluster.replicas[1].path().join(name)).unwrap();
        }
        let listens = cluster.replicas[1].start_to_die(Some(*step));
        if listens {
            let volume = Volume::start(cluster.settings());
            let going = volume.clone();
            let load = tokio::spawn(async move {
                going.ready().await.unwrap();
                going.grow(2 * SIZE).await.unwrap();
                write(&going, SIZE, 9).await;
                let _ = going.flush().await;
            });
            cluster.replicas[1].wait_for_death();
            volume.stop().await;
            // It may have been told that the volume has ended.
            let _ = load.await;
        } else {
            cluster.replicas[1].wait_for_death();
        }
        cluster.replicas[1].start();
        let volume = Volume::start(cluster.settings());
        until(&volume, "the volume", is_whole).await;
        write(&volume, 0, 3).await;
        volume.flush().await.unwrap();
        let size = volume.size();
        volume.stop().await;
        cluster.assert_same(size);
    }
}

/// A replica as the first format has left it, served by this process.
fn of_version_1(home: &Path, kind: &str, length: u64) -> ReplicaServer {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/version-1");
    let replica = home.join("replicas").join(kind);
    fs::create_dir_all(&replica).unwrap();
    for entry in fs::read_dir(corpus.join(kind)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let mut bytes = fs::read(entry.path()).unwrap();
        // The zeros at their ends were left out.
        let whole = match &*name {
            "meta.log" => 1 << 20,
            "meta.a" | "meta.b" => 64 << 10,
            "note" => 40,
            _ => 4096,
        };
        bytes.resize(whole, 0);
        fs::write(replica.join(&name), bytes).unwrap();
    }
    let data = fs::File::create(replica.join("data")).unwrap();
    data.set_len(length).unwrap();
    if kind == "served" {
        use std::os::unix::fs::FileExt;
        data.write_all_at(&[7; 4096], 4096).unwrap();
        data.write_all_at(&[9; 4096], 2 * MIB + 8192).unwrap();
    }
    serve_version_1(&replica)
}

fn serve_version_1(replica: &Path) -> ReplicaServer {
    let settings = ReplicaSettings {
        path: replica.to_owned(),
        pool: None,
        identity: Identity {
            volume: Uuid::from_u128(1),
            replica: Uuid::from_u128(2),
        },
        provisioning: Provisioning::Thin,
        checksums: true,
    };
    let socket = Address::Unix(replica.with_extension("sock"));
    ReplicaServer::start(settings, &socket).unwrap()
}

fn volume_of_version_1(replica: &ReplicaServer) -> Volume {
    let id = Uuid::from_u128(2);
    let config = Config::majority([id].into());
    let addresses = [(id, replica.address().clone())].into();
    Volume::start(VolumeSettings::new(Uuid::from_u128(1), config, addresses))
}

#[tokio::test]
async fn a_replica_of_the_first_format_opens_and_is_believed() {
    // Fails if an upgrade loses what an earlier version has kept, or takes a copy that never served for a lost one.
    let home = tempfile::tempdir().unwrap();
    let replica = of_version_1(home.path(), "served", 3 * MIB);
    let volume = volume_of_version_1(&replica);
    assert_eq!(volume.ready().await.unwrap(), 3 * MIB);
    assert_eq!(value_at(&volume, 4096).await, 7);
    assert_eq!(value_at(&volume, 2 * MIB + 8192).await, 9);
    volume.stop().await;
    let replica = of_version_1(home.path(), "unserved", 2 * MIB);
    let volume = volume_of_version_1(&replica);
    assert_eq!(volume.ready().await.unwrap(), 2 * MIB);
    write(&volume, 0, 1).await;
    volume.stop().await;
}

#[tokio::test]
async fn a_replica_of_the_first_format_that_was_written_to_and_knows_nothing_is_lost() {
    // Fails if the memory of an earlier version can be lost without anybody noticing.
    let home = tempfile::tempdir().unwrap();
    let served = home.path().join("replicas/served");
    drop(of_version_1(home.path(), "served", 3 * MIB));
    for name in MEMORY {
        fs::remove_file(served.join(name)).unwrap();
    }
    let replica = serve_version_1(&served);
    let volume = volume_of_version_1(&replica);
    let status = until(&volume, "its report", |it| {
        it.replicas
            .values()
            .any(|it| it.standing == Some(Standing::Unproven))
    })
    .await;
    assert!(!status.available);
    assert_eq!(status.view.lineage, Lineage::Original);
    volume.stop().await;
}
