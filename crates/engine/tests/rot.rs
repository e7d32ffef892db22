//! Bytes that change by themselves, below copies that are real processes: nothing wrong is ever read, and what
//! has rotted is mended from another copy.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use cluster::{Cluster, is_whole, until};
use trellis_engine::coordinator::{ScrubResult, Status};
use trellis_engine::drive::{Volume, VolumeError};
use trellis_engine::replica::{Finding, Report, check_data};

const MIB: u64 = 1 << 20;
const MIB_BYTES: usize = 1 << 20;
const SIZE: u64 = 24 * MIB;

/// What the test wrote to a MiB: no two blocks are the same.
fn pattern(mib: u64) -> Bytes {
    let blocks = (0..256_u64).flat_map(|block| {
        let word = ((mib << 32) | (block << 8) | 0x5a).to_le_bytes();
        word.repeat(512)
    });
    blocks.collect::<Vec<u8>>().into()
}

async fn started(cluster: &Cluster) -> Volume {
    let volume = Volume::start(cluster.settings());
    volume.ready().await.unwrap();
    until(&volume, "everything in sync", is_whole).await;
    volume
}

async fn fill(volume: &Volume) {
    for mib in 0..SIZE / MIB {
        volume
            .write(mib * MIB, vec![pattern(mib)], false)
            .await
            .unwrap();
    }
    volume.flush().await.unwrap();
}

/// How many MiB are not what was written.
async fn wrong(volume: &Volume) -> Vec<u64> {
    let mut wrong = Vec::new();
    for mib in 0..SIZE / MIB {
        let parts = volume.read(mib * MIB, MIB).await.unwrap();
        let bytes = flat(&parts);
        assert_eq!(bytes.len(), MIB_BYTES);
        if bytes != pattern(mib) {
            wrong.push(mib);
        }
    }
    wrong
}

fn flat(parts: &[Bytes]) -> Vec<u8> {
    parts.concat()
}

fn open(data: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(data)
        .unwrap()
}

/// Changes a bit of a file at that byte.
fn flip(data: &Path, at: u64) {
    let file = open(data);
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_byte_in_every_mib_of_a_copy_is_never_read() {
    // Fails if a read does not compare with the sums: a third of the regions is read from that copy.
    let cluster = Cluster::start(3, SIZE);
    let volume = started(&cluster).await;
    fill(&volume).await;
    for mib in 0..SIZE / MIB {
        flip(
            &cluster.replicas[0].data(),
            mib * MIB + (mib * 40_961) % MIB,
        );
    }
    for _ in 0..2 {
        assert_eq!(wrong(&volume).await, Vec::<u64>::new());
    }
    // Also a small read that does not touch what has rotted, and one that does.
    let block = volume.read(40_961 / 4096 * 4096 + MIB, 4096).await.unwrap();
    let expected = pattern(1).slice(40_960..45_056);
    assert_eq!(flat(&block), expected);
    until(&volume, "everything in sync again", is_whole).await;
}

/// Has everything compared, and waits for what was found.
async fn scrubbed(volume: &Volume) -> ScrubResult {
    let number = |status: &Status| status.scrub.last.map_or(0, |last| last.number);
    let before = number(&volume.status());
    volume.scrub().await;
    let status = until(volume, "a scrub", |status| number(status) > before).await;
    status.scrub.last.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scrub_finds_every_block_that_has_rotted_and_mends_it() {
    // Fails if a copy that nobody reads from is not looked at, or if a block is counted that is right.
    let cluster = Cluster::start(3, SIZE);
    let volume = started(&cluster).await;
    fill(&volume).await;
    let clean = scrubbed(&volume).await;
    assert_eq!((clean.bytes, clean.found, clean.skipped), (SIZE, 0, 0));
    for mib in 0..SIZE / MIB {
        let at = mib * MIB + (mib * 40_961) % MIB;
        flip(&cluster.replicas[1].data(), at);
    }
    let result = scrubbed(&volume).await;
    assert_eq!((result.found, result.mended), (SIZE / MIB, SIZE / MIB));
    let rotten = volume.status().scrub.rotten_blocks;
    assert_eq!(rotten, [(cluster.id(1), SIZE / MIB)].into());
    until(&volume, "everything in sync again", is_whole).await;
    cluster.assert_same(SIZE);
    assert_eq!(scrubbed(&volume).await.found, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_that_rot_in_different_blocks_mend_each_other() {
    // Fails if a repair passes a rotten block on, or gives a region up of which no copy is whole.
    let cluster = Cluster::start(2, SIZE);
    let volume = started(&cluster).await;
    fill(&volume).await;
    flip(&cluster.replicas[0].data(), 3 * MIB + 5 * 4096);
    flip(&cluster.replicas[1].data(), 3 * MIB + 9 * 4096 + 17);
    let result = scrubbed(&volume).await;
    assert_eq!((result.found, result.mended), (2, 2));
    assert_eq!(wrong(&volume).await, Vec::<u64>::new());
    cluster.assert_same(SIZE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_rots_in_all_copies_is_an_error_until_it_is_written_anew() {
    // Fails if wrong bytes are shown when no copy is right, or if the blocks beside it are lost too.
    let cluster = Cluster::start(2, SIZE);
    let volume = started(&cluster).await;
    fill(&volume).await;
    let at = 7 * MIB + 12 * 4096;
    for replica in &cluster.replicas {
        flip(&replica.data(), at + 100);
    }
    assert!(matches!(
        volume.read(at, 4096).await,
        Err(VolumeError::Medium)
    ));
    let beside = volume.read(at + 4096, 4096).await.unwrap();
    assert_eq!(flat(&beside), pattern(7).slice(13 * 4096..14 * 4096));
    let result = scrubbed(&volume).await;
    assert_eq!((result.found, result.mended), (2, 0));
    let block = pattern(7).slice(12 * 4096..13 * 4096);
    volume.write(at, vec![block], false).await.unwrap();
    assert_eq!(wrong(&volume).await, Vec::<u64>::new());
    assert_eq!(scrubbed(&volume).await.found, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_at_rest_are_compared_with_their_sums() {
    // Fails if rot of a copy that nobody serves is not found, or a copy that is served is called rotten.
    let mut cluster = Cluster::start(2, SIZE);
    let volume = started(&cluster).await;
    fill(&volume).await;
    let pool = cluster.replicas[0].pool.clone();
    let found = || {
        let mut report = Report::default();
        let mut looked = 0;
        check_data(&pool, &mut report, &mut |_, done, _| looked = done.get());
        (report.findings, looked)
    };
    assert!(matches!(found().0[..], [Finding::Served { .. }]));
    volume.stop().await;
    for replica in &mut cluster.replicas {
        replica.stop();
    }
    let (findings, looked) = found();
    assert!(findings.is_empty(), "{findings:?}");
    assert_eq!(looked, SIZE);
    flip(&cluster.replicas[0].data(), 5 * MIB + 77);
    flip(&cluster.replicas[0].data(), 9 * MIB + 4096);
    let (findings, _) = found();
    let [
        Finding::Rotten {
            blocks,
            first,
            last,
            ..
        },
    ] = &findings[..]
    else {
        panic!("{findings:?}");
    };
    assert_eq!(
        (*blocks, first.get(), last.get()),
        (2, 5 * MIB, 9 * MIB + 4096)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_was_zeroed_while_all_were_stopped_is_not_served() {
    // Fails if zeros are believed because the copy says that it holds the region, or if the sums of the
    // last writes are not believed after the death of a process.
    let mut cluster = Cluster::start(2, SIZE);
    let volume = started(&cluster).await;
    fill(&volume).await;
    drop(volume);
    for replica in &mut cluster.replicas {
        replica.kill();
    }
    let data = open(&cluster.replicas[0].data());
    data.write_all_at(&vec![0; usize::try_from(SIZE).unwrap()], 0)
        .unwrap();
    for replica in &mut cluster.replicas {
        replica.start();
    }
    let volume = Volume::start(cluster.settings());
    volume.ready().await.unwrap();
    assert_eq!(wrong(&volume).await, Vec::<u64>::new());
    until(&volume, "everything in sync again", is_whole).await;
    assert_eq!(wrong(&volume).await, Vec::<u64>::new());
}
