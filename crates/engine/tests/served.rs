//! A replica that is served: who may open it, who may speak to it, and who may measure it.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use cluster::Cluster;
use trellis_engine::Error;
use trellis_engine::drive::{
    Address, Ended, Refusal, ReplicaServer, ReplicaSettings, Volume, VolumeError,
};
use trellis_engine::replica::{Identity, Outcome, Pool, Provisioning, Replica};
use uuid::Uuid;

const MIB: u64 = 1 << 20;

fn bytes(count: u64) -> trellis_api::Bytes {
    trellis_api::Bytes::new(count)
}

fn some_identity() -> Identity {
    Identity {
        volume: Uuid::new_v4(),
        replica: Uuid::new_v4(),
    }
}

#[test]
fn a_replica_is_served_once_and_by_who_knows_it() {
    // Fails if two processes can change one replica, or one can open what is not meant for it.
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    let identity = some_identity();
    pool.create("r", identity, bytes(MIB), Provisioning::Thin)
        .unwrap();
    let path = home.path().join("replicas/r");
    let open = |pool, identity| Replica::open_served(&path, pool, identity);
    assert!(matches!(
        open(Some(Uuid::new_v4()), identity),
        Err(Error::PoolUnknown { .. })
    ));
    assert!(matches!(
        open(None, some_identity()),
        Err(Error::ReplicaForeign { .. })
    ));
    assert!(matches!(
        Replica::open_served(home.path(), None, identity),
        Err(Error::ReplicaPathBad { .. } | Error::NameNotAllowed { .. })
    ));
    let served = open(Some(pool.id()), identity).unwrap();
    assert!(matches!(
        open(None, identity),
        Err(Error::ReplicaServed { .. })
    ));
    drop(served);
    drop(open(None, identity).unwrap());
}

#[test]
fn a_pool_measures_counts_and_removes_what_another_one_serves_and_does_not_change_it() {
    // Fails if the agent sees the size that it committed itself, or writes past the one who serves.
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    let identity = some_identity();
    let handle = pool
        .create("r", identity, bytes(MIB), Provisioning::Thin)
        .unwrap();
    let path = home.path().join("replicas/r");
    let served = Replica::open_served(&path, Some(pool.id()), identity).unwrap();
    served.grow(bytes(3 * MIB), Provisioning::Thin).unwrap();
    assert_eq!(handle.measure().unwrap().size(), bytes(3 * MIB));
    assert_eq!(handle.size(), bytes(3 * MIB));
    assert!(matches!(
        handle.grow(bytes(4 * MIB), Provisioning::Thin),
        Err(Error::ReplicaServed { .. })
    ));
    let again = pool
        .create("r", identity, bytes(MIB), Provisioning::Thin)
        .unwrap();
    assert_eq!(again.measure().unwrap().size(), bytes(3 * MIB));
    assert_eq!(pool.names().unwrap(), ["r"]);
    pool.capacity().unwrap();
    drop(served);
    // Who served it is gone, and what it committed counts.
    let raised = handle.grow(bytes(4 * MIB), Provisioning::Thin).unwrap();
    let (from, to) = (bytes(3 * MIB), bytes(4 * MIB));
    assert_eq!(raised, Outcome::Raised { from, to });
    let served = Replica::open_served(&path, None, identity).unwrap();
    assert_eq!(served.size(), to);
    pool.remove("r", identity).unwrap();
    assert!(pool.names().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_speaks_nonsense_is_disconnected_and_the_others_are_served() {
    // Fails if garbage, an oversized message or silence costs more than its own connection.
    let home = tempfile::tempdir().unwrap();
    let identity = some_identity();
    Pool::open(home.path())
        .unwrap()
        .create("r", identity, bytes(MIB), Provisioning::Thin)
        .unwrap();
    let settings = ReplicaSettings {
        path: home.path().join("replicas/r"),
        pool: None,
        identity,
        provisioning: Provisioning::Thin,
        checksums: true,
    };
    let path = home.path().join("r.sock");
    let server = ReplicaServer::start(settings, &Address::Unix(path.clone())).unwrap();
    let config = trellis_engine::proto::Config::majority([identity.replica].into());
    let addresses = [(identity.replica, server.address().clone())].into();
    let settings = trellis_engine::drive::VolumeSettings::new(identity.volume, config, addresses);
    let volume = Volume::start(settings);
    volume.ready().await.unwrap();
    let silent: Vec<UnixStream> = (0..8)
        .map(|_| UnixStream::connect(&path).unwrap())
        .collect();
    let mut huge = *b"TRLW\x01\0\0\0\xff\xff\xff\x7f\xff\xff\xff\x7f\0\0\0\0";
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n garbage garbage"[..], &huge] {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        stream.write_all(garbage).unwrap();
        // The end, or a reset.
        assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0);
    }
    huge[4] = 9;
    let mut later = UnixStream::connect(&path).unwrap();
    later.write_all(&huge).unwrap();
    // Who speaks another version is told so before the end.
    let mut told = Vec::new();
    later.read_to_end(&mut told).unwrap_or(0);
    assert_eq!(told[..8], *b"TRLW\x01\0\x07\0");
    let refused = server.refusals().into_iter().map(|it| it.why);
    let version = Refusal::Wire { theirs: 9, ours: 1 };
    assert!(refused.into_iter().any(|why| why == version));
    // Silence ends too, after some seconds.
    for mut stream in silent {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0);
    }
    let data = vec![bytes::Bytes::from(vec![3; 4096])];
    volume.write(0, data, true).await.unwrap();
    volume.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_successor_ends_its_predecessor() {
    // Fails if two handles can write to one volume, or the first one is not told why it ended.
    let cluster = Cluster::start(3, 4 * MIB);
    let first = Volume::start(cluster.settings());
    first.ready().await.unwrap();
    let page = |byte: u8| vec![bytes::Bytes::from(vec![byte; 4096])];
    first.write(0, page(1), false).await.unwrap();
    let second = Volume::start(cluster.settings());
    second.ready().await.unwrap();
    second.write(0, page(2), false).await.unwrap();
    let late = first.write(0, page(3), false).await;
    assert_eq!(late, Err(VolumeError::Deposed));
    assert!(matches!(first.ended().await, Ended::Deposed { .. }));
    assert!(second.status().generation > first.status().generation);
    let read = second.read(0, 4096).await.unwrap().concat();
    assert!(read == [2; 4096]);
}
