//! Two of three pools are full: what has its space goes on, what needs more waits or fails, and nothing else does.
//! These tests mount filesystems and therefore need root.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;
#[path = "common/load.rs"]
mod load;
#[path = "common/small.rs"]
mod small;

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use cluster::{Cluster, is_whole, until};
use small::Small;
use trellis_engine::coordinator::{ReplicaState, Status};
use trellis_engine::drive::{Volume, VolumeError, VolumeSettings, WhenFull};
use trellis_engine::replica::Provisioning;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// How long a test waits for what must come.
const LONG: Duration = Duration::from_secs(60);
/// Blocks that are written before the pools are full: whole regions, and a part of one.
const WRITTEN: u64 = 600;

/// Takes all space that there is.
fn fill_up(pool: &Path) {
    let whole = File::open(pool).unwrap();
    let mut ballast = File::create(pool.join("ballast")).unwrap();
    for piece in [1 << 20, 4096, 1] {
        while ballast.write_all(&vec![1; piece]).is_ok() {}
        rustix::fs::syncfs(&whole).unwrap();
    }
}

fn free_up(pool: &Path) {
    fs::remove_file(pool.join("ballast")).unwrap();
}

async fn write(volume: &Volume, block: u64, version: u64) -> Result<(), VolumeError> {
    let data = vec![load::content(block, version)];
    let written = volume.write(block * BLOCK, data, false);
    let written = tokio::time::timeout(LONG, written).await;
    written.expect("a write hangs")
}

async fn assert_version(volume: &Volume, block: u64, version: u64) {
    let read = tokio::time::timeout(LONG, volume.read(block * BLOCK, BLOCK)).await;
    let read = read.expect("a read hangs").unwrap().concat();
    assert_eq!(
        load::version_of(block, &read),
        Some(version),
        "block {block}"
    );
}

/// A volume of three copies, of which the last two are on pools of their own.
async fn start(small: [&Small; 2], settings: impl Fn(&mut VolumeSettings)) -> (Cluster, Volume) {
    let mut cluster = Cluster::start(1, 64 * MIB);
    for pool in small {
        cluster.add(&pool.path(), 64 * MIB, Provisioning::Thin);
    }
    let mut wanted = cluster.settings();
    settings(&mut wanted);
    let volume = Volume::start(wanted);
    volume.ready().await.unwrap();
    until(&volume, "all copies", is_whole).await;
    for block in 0..WRITTEN {
        write(&volume, block, 1).await.unwrap();
    }
    volume.flush().await.unwrap();
    (cluster, volume)
}

async fn until_told_full(cluster: &Cluster, volume: &Volume) {
    let full = |status: &Status| (1..3).all(|index| status.replicas[&cluster.id(index)].full);
    until(volume, "word of full pools", full).await;
}

/// Waits until a copy is behind in so many regions and holds all others.
async fn until_behind(cluster: &Cluster, volume: &Volume, index: usize, regions: usize) {
    let id = cluster.id(index);
    let behind = |status: &Status| matches!(status.replicas[&id].state, ReplicaState::Repairing { left, .. } if left == regions);
    until(volume, "a copy that is behind", behind).await;
}

/// Overwrites what is there, some of it by epochs and sessions that are new, and looks at it.
async fn overwrite(volume: &Volume, version: u64) {
    overwrite_some(volume, WRITTEN, version).await;
}

async fn overwrite_some(volume: &Volume, blocks: u64, version: u64) {
    for block in (0..blocks).rev() {
        write(volume, block, version).await.unwrap();
    }
    tokio::time::timeout(LONG, volume.flush())
        .await
        .expect("a flush hangs")
        .unwrap();
    for block in 0..blocks {
        assert_version(volume, block, version).await;
    }
}

async fn writes_wait_for_space(small: [&Small; 2]) {
    let (mut cluster, volume) = start(small, |settings| {
        settings.patience = LONG;
    })
    .await;
    for pool in small {
        fill_up(&pool.path());
    }
    until_told_full(&cluster, &volume).await;
    overwrite(&volume, 2).await;
    let in_sync = |status: &Status| {
        let mut replicas = status.replicas.values();
        status.available && replicas.all(|it| it.state == ReplicaState::InSync)
    };
    assert!(in_sync(&volume.status()), "{:#?}", volume.status());

    // Beside what is written, in the same region, and elsewhere.
    let new = [WRITTEN, WRITTEN + 1, 4000];
    let waiting: Vec<_> = new
        .map(|block| {
            let volume = volume.clone();
            tokio::spawn(async move { write(&volume, block, 7).await })
        })
        .into();
    overwrite(&volume, 3).await;
    // A growth takes no space of a thin copy, and a copy that begins anew on a full pool takes part.
    assert_eq!(volume.grow(80 * MIB).await, Ok(80 * MIB));
    cluster.replicas[1].kill();
    cluster.replicas[1].start();
    until(&volume, "the copy that began anew", in_sync).await;
    overwrite(&volume, 4).await;
    assert!(
        waiting.iter().all(|it| !it.is_finished()),
        "a write has not waited"
    );
    assert!(in_sync(&volume.status()), "{:#?}", volume.status());

    free_up(&small[0].path());
    for write in waiting {
        write.await.unwrap().unwrap();
    }
    // The copy that still has no space misses these regions, and no other.
    until_behind(&cluster, &volume, 2, 2).await;
    overwrite_some(&volume, 2 * 256, 5).await;
    until_behind(&cluster, &volume, 2, 2).await;
    free_up(&small[1].path());
    until(&volume, "everything in sync", is_whole).await;
    volume.flush().await.unwrap();
    overwrite(&volume, 6).await;
    for block in new {
        assert_version(&volume, block, 7).await;
    }
    cluster.assert_same(64 * MIB);
    volume.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_needs_space_waits_and_all_else_goes_on_on_ext4() {
    // Fails if a full pool stops an overwrite, if a write that waits stops anything else, or does not go on.
    let small = Small::two(Small::ext4_pool);
    writes_wait_for_space([&small[0], &small[1]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_needs_space_waits_and_all_else_goes_on_on_xfs() {
    // Fails if xfs needs space for what is overwritten.
    let small = Small::two(Small::xfs_pool);
    writes_wait_for_space([&small[0], &small[1]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_writes_fail_for_want_of_space_they_fail_at_once_and_overwriting_goes_on() {
    // Fails if the write waits, if a part of it is done, or if it takes anything else with it.
    let small = Small::two(Small::tmpfs_pool);
    let (cluster, volume) = start([&small[0], &small[1]], |settings| {
        settings.when_full = WhenFull::Fail;
        settings.patience = LONG;
    })
    .await;
    for pool in &small {
        fill_up(&pool.path());
    }
    until_told_full(&cluster, &volume).await;
    assert_eq!(write(&volume, 4000, 7).await, Err(VolumeError::NoSpace));
    // Half of it is there already.
    let data = vec![load::content(WRITTEN - 1, 7), load::content(WRITTEN, 7)];
    let both = volume.write((WRITTEN - 1) * BLOCK, data, false).await;
    assert_eq!(both, Err(VolumeError::NoSpace));
    assert_version(&volume, WRITTEN - 1, 1).await;
    overwrite(&volume, 2).await;
    assert_eq!(write(&volume, 4000, 7).await, Err(VolumeError::NoSpace));
    // What the volume gives back it may have again, as far as nobody else has taken it.
    volume.zero(0, 64 * BLOCK).await.unwrap();
    let emptied = |status: &Status| !status.replicas[&cluster.id(1)].full;
    free_up(&small[0].path());
    until(&volume, "space", emptied).await;
    overwrite(&volume, 3).await;
    write(&volume, 4000, 7).await.unwrap();
    until_behind(&cluster, &volume, 2, 1).await;
    free_up(&small[1].path());
    until(&volume, "everything in sync", is_whole).await;
    volume.flush().await.unwrap();
    cluster.assert_same(64 * MIB);
    volume.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_without_space_misses_what_does_not_fit_and_nothing_else() {
    // Fails if one full pool costs more of its copy than the regions for which it has no space, or if these are
    // not repaired when there is some.
    let small = Small::two(Small::tmpfs_pool);
    let (cluster, volume) = start([&small[0], &small[1]], |_| {}).await;
    fill_up(&small[0].path());
    // Without a look at the space before: the copy finds out by the write itself.
    write(&volume, 4000, 7).await.unwrap();
    write(&volume, 4001, 7).await.unwrap();
    until_behind(&cluster, &volume, 1, 1).await;
    overwrite(&volume, 2).await;
    until_behind(&cluster, &volume, 1, 1).await;
    assert_version(&volume, 4000, 7).await;
    free_up(&small[0].path());
    until(&volume, "everything in sync", is_whole).await;
    volume.flush().await.unwrap();
    cluster.assert_same(64 * MIB);
    volume.stop().await;
}
