//! Copies that are lost for good: a volume goes on with what is left, and what was given up stays harmless
//! when it comes back. Replicas are processes.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use cluster::{Cluster, is_whole, until};
use trellis_engine::coordinator::{NotServed, Standing, Takeover};
use trellis_engine::drive::{SurveyFault, Volume, VolumeSettings, survey};
use trellis_engine::proto::{Config, Lineage};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const PATIENCE: Duration = Duration::from_secs(20);

async fn write(volume: &Volume, at: u64, value: u8) {
    let data = vec![Bytes::from(vec![value; 4096])];
    volume.write(at, data, true).await.unwrap();
}

async fn value_at(volume: &Volume, at: u64) -> u8 {
    let read = volume.read(at, 4096).await.unwrap().concat();
    assert!(read.iter().all(|byte| *byte == read[0]), "a torn block");
    read[0]
}

/// The settings of a start that gives up all replicas but these.
fn recovery(cluster: &Cluster, survivors: &[usize], lineage: Lineage) -> VolumeSettings {
    let ids = survivors.iter().map(|index| cluster.id(*index)).collect();
    VolumeSettings {
        config: Config::majority(ids),
        lineage,
        takeover: Takeover::Survivors,
        ..cluster.settings()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_goes_on_with_what_is_left_and_the_others_have_no_vote_when_they_return() {
    // Fails if two of three copies that were given up can bring their history back, or if what is left is
    // not served.
    let mut cluster = Cluster::start(3, SIZE);
    let volume = Volume::start(cluster.settings());
    until(&volume, "the volume", is_whole).await;
    write(&volume, 0, 1).await;
    volume.stop().await;
    cluster.replicas[1].kill();
    cluster.replicas[2].kill();

    // One of three is not enough, and it is said why.
    let volume = Volume::start(cluster.settings());
    let (counted, needed) = (1, 2);
    let told = NotServed::TooFewReports { counted, needed };
    until(&volume, "a reason", |it| it.not_served == Some(told)).await;
    volume.stop().await;

    // A person looks at what there is.
    let found = survey(
        cluster.volume,
        cluster.addresses(),
        cluster.credentials(),
        PATIENCE,
    )
    .await;
    let survivor = found[&cluster.id(0)].as_ref().unwrap();
    assert!(survivor.is_proven() && survivor.stale == 0 && survivor.size == SIZE);
    assert!(survivor.written_at.is_some() && survivor.regions == 8);
    for index in [1, 2] {
        let fault = found[&cluster.id(index)].as_ref().unwrap_err();
        assert!(matches!(fault, SurveyFault::Unreachable { .. }), "{fault}");
    }
    let known = found.values().flatten().map(|it| it.view.lineage);
    let lineage = Lineage::after(known).unwrap();

    let volume = Volume::start(recovery(&cluster, &[0], lineage));
    until(&volume, "what is left", |it| it.available).await;
    assert_eq!(value_at(&volume, 0).await, 1);
    write(&volume, 0, 2).await;
    write(&volume, 5 * MIB, 3).await;
    assert_eq!(volume.status().view.lineage, lineage);
    volume.stop().await;

    // The others return, without the one that has the volume now. They are a majority of the old view.
    cluster.replicas[0].kill();
    cluster.replicas[1].start();
    cluster.replicas[2].start();
    let volume = Volume::start(VolumeSettings {
        lineage,
        ..cluster.settings()
    });
    until(&volume, "their reports", |it| {
        let standing = |index: usize| it.replicas[&cluster.id(index)].standing;
        standing(1) == Some(Standing::OtherLineage) && standing(2) == Some(Standing::OtherLineage)
    })
    .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let status = volume.status();
    let told = NotServed::TooFewReports { counted: 0, needed };
    assert_eq!(status.not_served, Some(told), "{status:#?}");

    // With it the volume is there, as it was left.
    cluster.replicas[0].start();
    until(&volume, "the volume", |it| it.available).await;
    assert_eq!(value_at(&volume, 0).await, 2);
    assert_eq!(value_at(&volume, 5 * MIB).await, 3);

    // They are taken in again with nothing of what they had.
    volume
        .reconfigure(cluster.config(), cluster.addresses())
        .await
        .unwrap();
    until(&volume, "three copies", |it| {
        is_whole(it) && it.view.current == cluster.config() && it.view.next.is_none()
    })
    .await;
    assert_eq!(value_at(&volume, 0).await, 2);
    volume.flush().await.unwrap();
    volume.stop().await;
    cluster.assert_same(SIZE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_was_not_told_of_a_recovery_learns_of_it_from_a_survivor() {
    // Fails if a control plane that was restored from before a recovery serves what was given up, although
    // a survivor is there and says so.
    let mut cluster = Cluster::start(3, SIZE);
    let volume = Volume::start(cluster.settings());
    until(&volume, "the volume", is_whole).await;
    write(&volume, 0, 1).await;
    volume.stop().await;
    cluster.replicas[1].kill();
    cluster.replicas[2].kill();
    let lineage = Lineage::after([Lineage::Original]).unwrap();
    let volume = Volume::start(recovery(&cluster, &[0], lineage));
    until(&volume, "what is left", |it| it.available).await;
    write(&volume, 0, 2).await;
    volume.stop().await;

    // Alone first, so that it is the one that is heard.
    let volume = Volume::start(cluster.settings());
    until(&volume, "the volume", |it| it.available).await;
    cluster.replicas[1].start();
    cluster.replicas[2].start();
    until(&volume, "the others", |it| {
        let standing = |index: usize| it.replicas[&cluster.id(index)].standing;
        standing(1) == Some(Standing::OtherLineage) && standing(2) == Some(Standing::OtherLineage)
    })
    .await;
    assert_eq!(value_at(&volume, 0).await, 2);
    assert_eq!(volume.status().view.lineage, lineage);
    volume.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_survivors_the_one_that_is_ahead_counts_and_a_recovery_can_be_repeated() {
    // Fails if a recovery prefers a copy that was away, or if one that is begun twice loses what it chose.
    let mut cluster = Cluster::start(3, SIZE);
    let volume = Volume::start(cluster.settings());
    until(&volume, "the volume", is_whole).await;
    write(&volume, 0, 1).await;
    cluster.replicas[1].kill();
    until(&volume, "its absence", |it| !it.redundancy_met).await;
    write(&volume, 0, 2).await;
    write(&volume, 3 * MIB, 2).await;
    volume.stop().await;
    cluster.replicas[2].kill();
    cluster.replicas[1].start();
    let lineage = Lineage::after([Lineage::Original]).unwrap();
    for _ in 0..2 {
        let volume = Volume::start(recovery(&cluster, &[0, 1], lineage));
        until(&volume, "what is left", |it| {
            it.available && it.redundancy_met
        })
        .await;
        assert_eq!(value_at(&volume, 0).await, 2);
        assert_eq!(value_at(&volume, 3 * MIB).await, 2);
        volume.stop().await;
    }
    let survivors: BTreeMap<_, _> = survey(
        cluster.volume,
        cluster.addresses(),
        cluster.credentials(),
        PATIENCE,
    )
    .await;
    for index in [0, 1] {
        let survivor = survivors[&cluster.id(index)].as_ref().unwrap();
        assert_eq!((survivor.view.lineage, survivor.stale), (lineage, 0));
    }
}
