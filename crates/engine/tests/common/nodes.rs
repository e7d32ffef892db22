//! A copy in this process that other nodes reach, and volumes that try to reach it.
#![allow(dead_code, reason = "every test binary uses its own part of this")]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use trellis_engine::drive::{
    Address, Credentials, Failure, Refusal, ReplicaServer, ReplicaSettings, Side, Volume,
    VolumeSettings,
};
use trellis_engine::proto::Config;
use trellis_engine::replica::{Identity, Pool, Provisioning};
use uuid::Uuid;

use crate::pki::name;

/// How long a test waits for what must come.
const LONG: Duration = Duration::from_secs(20);

/// How large a copy is.
pub(crate) const SIZE: u64 = 16 << 20;

pub(crate) struct Copy {
    pub(crate) server: ReplicaServer,
    identity: Identity,
    _pool: tempfile::TempDir,
}

impl Copy {
    /// A copy on the node that has these credentials. These nodes may serve its volume.
    pub(crate) fn serve(credentials: &Credentials, allowed: &[&str]) -> Copy {
        let pool = tempfile::tempdir().unwrap();
        let identity = Identity {
            volume: Uuid::new_v4(),
            replica: Uuid::new_v4(),
        };
        let size = trellis_api::Bytes::new(SIZE);
        let made = Pool::open(pool.path()).unwrap();
        made.create("r", identity, size, Provisioning::Thin)
            .unwrap();
        drop(made);
        let settings = ReplicaSettings {
            path: pool.path().join("replicas/r"),
            pool: None,
            identity,
            provisioning: Provisioning::Thin,
            checksums: true,
        };
        let listen = Address::Tls {
            node: credentials.node().clone(),
            at: "127.0.0.1:0".parse().unwrap(),
        };
        let allowed = allowed.iter().map(|node| name(node)).collect();
        let server = ReplicaServer::start_tls(settings, &listen, credentials, allowed).unwrap();
        Copy {
            server,
            identity,
            _pool: pool,
        }
    }

    /// The port.
    pub(crate) fn at(&self) -> SocketAddr {
        match self.server.address() {
            Address::Tls { at, .. } => *at,
            Address::Unix(_) => panic!("not on the network"),
        }
    }

    /// A volume that looks for the copy where it is.
    pub(crate) fn volume(&self, credentials: &Credentials) -> Volume {
        self.volume_at(self.server.address().clone(), credentials)
    }

    /// A volume that looks for the copy at that address.
    pub(crate) fn volume_at(&self, address: Address, credentials: &Credentials) -> Volume {
        let replica = self.identity.replica;
        let config = Config::majority([replica].into());
        let addresses = [(replica, address)].into();
        Volume::start(VolumeSettings {
            credentials: Some(credentials.clone()),
            ..VolumeSettings::new(self.identity.volume, config, addresses)
        })
    }

    /// Waits until the copy has noted that refusal.
    pub(crate) fn noted(&self, by: Side, why: &Refusal) {
        let began = Instant::now();
        loop {
            let list = self.server.refusals();
            if list.iter().any(|it| it.by == by && it.why == *why) {
                return;
            }
            assert!(began.elapsed() < LONG, "{by:?} {why:?} is not in {list:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Waits until the volume shows that failure.
pub(crate) async fn shown(volume: &Volume, failure: &Failure) {
    let began = Instant::now();
    loop {
        let troubles = volume.troubles();
        if troubles.values().any(|it| it.failure == *failure) {
            return;
        }
        assert!(
            began.elapsed() < LONG,
            "{failure:?} is not in {troubles:#?}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the volume serves.
pub(crate) async fn ready(volume: &Volume) {
    match tokio::time::timeout(LONG, volume.ready()).await {
        Ok(size) => assert!(size.is_ok_and(|size| size >= SIZE)),
        Err(_) => panic!("it does not serve: {:#?}", volume.troubles()),
    }
}

/// A block that is all one byte.
pub(crate) fn page(byte: u8) -> Vec<bytes::Bytes> {
    vec![bytes::Bytes::from(vec![byte; 4096])]
}
