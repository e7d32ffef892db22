//! What the tests of the replica store share.
#![allow(dead_code, reason = "every test binary uses its own part of this")]

pub(crate) mod dying;
pub(crate) mod small;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use trellis_api::Bytes;
use trellis_engine::replica::{Identity, Pool, Provisioning::Thin, Replica};
use uuid::Uuid;

pub(crate) const NAME: &str = "pvc-1-r0";
pub(crate) const BLOCK: u64 = 4096;

pub(crate) fn identity(volume: u128) -> Identity {
    Identity {
        volume: Uuid::from_u128(volume),
        replica: Uuid::from_u128(volume + 1000),
    }
}

pub(crate) fn blocks(count: u64) -> Bytes {
    Bytes::new(count * BLOCK)
}

pub(crate) fn replica_dir(pool: &Path) -> PathBuf {
    pool.join("replicas").join(NAME)
}

pub(crate) fn reopen(pool: &Path) -> Replica {
    Pool::open(pool).unwrap().open_replica(NAME).unwrap()
}

/// The files of a directory with their bytes.
pub(crate) type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Every file of a replica with its bytes; none, if there is no replica.
pub(crate) fn snapshot(dir: &Path) -> Files {
    let Ok(entries) = fs::read_dir(dir) else {
        return Files::new();
    };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// Fills one block of a file with a value, durably.
pub(crate) fn fill_block(data: &Path, index: u64, value: u8) {
    let file = OpenOptions::new().write(true).open(data).unwrap();
    file.write_all_at(&[value; 4096], index * BLOCK).unwrap();
    file.sync_data().unwrap();
}

pub(crate) fn read_block(data: &Path, index: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    File::open(data)
        .unwrap()
        .read_exact_at(&mut bytes, index * BLOCK)
        .unwrap();
    bytes
}

/// A pool with one replica that was made with 2 blocks and raised to 5; closed again.
pub(crate) fn grown_pool() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    let replica = pool.create(NAME, identity(1), blocks(2), Thin).unwrap();
    fill_block(&replica.data_path(), 1, 7);
    replica.grow(blocks(5), Thin).unwrap();
    fill_block(&replica.data_path(), 4, 9);
    home
}

pub(crate) fn set_length(path: &Path, length: u64) {
    OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(length)
        .unwrap();
}
