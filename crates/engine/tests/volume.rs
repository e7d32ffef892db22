//! A volume with three replicas in processes of their own, under a load that knows what it wrote.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;
#[path = "common/load.rs"]
mod load;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cluster::{Cluster, is_whole, until};
use load::{BLOCK, Model, joined};
use trellis_engine::drive::{
    Address, Compared, ReplicaServer, ReplicaSettings, Volume, VolumeError, VolumeSettings,
};
use trellis_engine::proto::Config;
use trellis_engine::replica::{Identity, Pool, Provisioning};
use uuid::Uuid;

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_grows_under_load_with_all_replicas_there() {
    // Fails if an I/O fails, an acknowledged byte is lost, or a replica is left behind.
    let cluster = Cluster::start(3, 64 * MIB);
    let volume = Volume::start(cluster.settings());
    assert_eq!(volume.ready().await, Ok(64 * MIB));
    let model = Arc::new(Model::default());
    let mut load = load::start(&volume, &model, 32, None);
    tokio::time::sleep(Duration::from_millis(500)).await;
    model.longest();
    for to in [65 * MIB, 128 * MIB, 129 * MIB + 4096] {
        assert_eq!(volume.grow(to).await, Ok(to));
        assert_eq!(volume.size(), to);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!("longest write {:?} of {}", model.longest(), model.writes());
    load::finish(&model, &mut load).await;
    load::check_all(&volume, &model).await;
    until(&volume, "everything in sync", is_whole).await;
    volume.flush().await.unwrap();
    cluster.assert_same(129 * MIB + 4096);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_of_a_volume_is_done_or_refused_with_the_reason() {
    // Fails if a bad range passes, zeros are not zeros, or a comparison writes what it must not.
    let cluster = Cluster::start(1, 4 * MIB);
    let volume = Volume::start(cluster.settings());
    volume.ready().await.unwrap();
    let page = |byte: u8| Bytes::from(vec![byte; 4096]);
    assert_eq!(volume.read(1, 4096).await, Err(VolumeError::Unaligned));
    assert_eq!(volume.read(0, 100).await, Err(VolumeError::Unaligned));
    assert_eq!(
        volume.read(4 * MIB, 4096).await,
        Err(VolumeError::OutOfRange)
    );
    assert_eq!(volume.grow(5000).await, Err(VolumeError::SizeBad));
    // Across a border of regions, in odd pieces.
    let mut whole: Vec<u8> = (0..=255u8).cycle().take(3 * 4096).collect();
    whole[5000] = 7;
    let pieces = vec![
        Bytes::copy_from_slice(&whole[..100]),
        Bytes::copy_from_slice(&whole[100..]),
    ];
    volume.write(MIB - 4096, pieces, true).await.unwrap();
    let read = volume.read(MIB - 8192, 5 * 4096).await.unwrap();
    let read = joined(&read);
    assert!(read[4096..4 * 4096] == whole && read[..4096] == [0; 4096]);
    volume.zero(MIB, BLOCK).await.unwrap();
    let read = joined(&volume.read(MIB, BLOCK).await.unwrap());
    assert!(read == [0; 4096]);
    let compared = volume
        .compare_and_write(0, vec![page(0)], vec![page(1)], false)
        .await;
    assert_eq!(compared, Ok(Compared::Written));
    let compared = volume
        .compare_and_write(0, vec![page(0)], vec![page(2)], false)
        .await;
    assert_eq!(compared, Ok(Compared::Differs { at: 0 }));
    assert!(joined(&volume.read(0, BLOCK).await.unwrap()) == [1; 4096]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_copy_is_the_same_after_each_start_and_grows_under_load() {
    // Fails if a server that starts again loses what was written, or if its pool measures another size.
    let home = tempfile::tempdir().unwrap();
    let identity = Identity {
        volume: Uuid::new_v4(),
        replica: Uuid::new_v4(),
    };
    let pool = Pool::open(home.path()).unwrap();
    pool.create(
        "r",
        identity,
        trellis_api::Bytes::new(16 * MIB),
        Provisioning::Thin,
    )
    .unwrap();
    let settings = ReplicaSettings {
        path: home.path().join("replicas/r"),
        pool: Some(pool.id()),
        identity,
        provisioning: Provisioning::Thin,
        checksums: true,
    };
    let config = Config::majority([identity.replica].into());
    let address = Address::Unix(home.path().join("r.sock"));
    let addresses = [(identity.replica, address.clone())].into();
    let volume_settings = VolumeSettings::new(identity.volume, config, addresses);
    let model = Arc::new(Model::default());
    for size in [17 * MIB, 18 * MIB] {
        let _server = ReplicaServer::start(settings.clone(), &address).unwrap();
        let volume = Volume::start(volume_settings.clone());
        volume.ready().await.unwrap();
        load::check_all(&volume, &model).await;
        let mut load = load::start(&volume, &model, 8, None);
        assert_eq!(volume.grow(size).await, Ok(size));
        // The agent measures what is served beside it.
        let measured = pool.open_replica("r").unwrap().measure().unwrap();
        assert_eq!(measured.size().get(), size);
        tokio::time::sleep(Duration::from_millis(200)).await;
        load.abort_all();
        while load.join_next().await.is_some() {}
        load::check_all(&volume, &model).await;
        volume.stop().await;
        drop(volume);
    }
}
