//! Which directory is which pool, and what else lies in it.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use common::small::Small;
use common::*;
use trellis_engine::Error;
use trellis_engine::replica::{Pool, Provisioning::Thin};
use uuid::Uuid;

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn a_pool_keeps_its_id() {
    // Fails if the id is another one at the next opening, or is not the one in the file.
    let home = tempfile::tempdir().unwrap();
    let id = Pool::open(home.path()).unwrap().id();
    assert!(!id.is_nil());
    assert_eq!(Pool::open(home.path()).unwrap().id(), id);
    let known = Pool::open_known(home.path(), Some(id)).unwrap();
    assert_eq!(known.id(), id);
    let written = fs::read_to_string(home.path().join("pool-id")).unwrap();
    assert_eq!(written, format!("{id}\n"));
}

#[test]
fn a_pool_whose_disk_is_not_mounted_is_refused_and_its_mount_point_stays_empty() {
    // Fails if the empty mount point is taken for the pool, or if as much as a lock is made in it.
    let mount_point = tempfile::tempdir().unwrap();
    let expected = Uuid::from_u128(1);
    let error = Pool::open_known(mount_point.path(), Some(expected)).unwrap_err();
    assert!(
        matches!(&error, Error::PoolUnknown { path, expected: asked, found: None }
            if path == mount_point.path() && *asked == expected),
        "{error}"
    );
    assert!(error.to_string().contains("not mounted"), "{error}");
    assert!(is_empty(mount_point.path()));
}

#[test]
fn a_pool_with_another_id_is_refused() {
    // Fails if a disk that was swapped for another is taken for the one that is known.
    let home = tempfile::tempdir().unwrap();
    let id = Pool::open(home.path()).unwrap().id();
    let error = Pool::open_known(home.path(), Some(Uuid::from_u128(1))).unwrap_err();
    assert!(
        matches!(error, Error::PoolUnknown { found, .. } if found == Some(id)),
        "{error}"
    );
}

#[test]
fn a_pool_from_before_there_were_ids_gets_one_and_keeps_its_replicas() {
    // Fails if such a pool is refused when nothing is expected, or loses what it holds.
    let home = grown_pool();
    fs::remove_file(home.path().join("pool-id")).unwrap();
    // What a crash in the middle of writing the id has left.
    fs::write(home.path().join("pool-id.making"), "half").unwrap();
    let pool = Pool::open(home.path()).unwrap();
    let id = pool.id();
    assert_eq!(pool.names().unwrap(), [NAME]);
    assert!(!home.path().join("pool-id.making").exists());
    drop(pool);
    Pool::open_known(home.path(), Some(id)).unwrap();
}

#[test]
fn an_unreadable_id_is_refused_and_not_replaced() {
    // Fails if a damaged id is taken for none, so that the pool silently becomes another one.
    let home = grown_pool();
    let file = home.path().join("pool-id");
    for text in ["", "pool\n", &"0".repeat(5000)] {
        fs::write(&file, text).unwrap();
        for expected in [None, Some(Uuid::from_u128(1))] {
            let error = Pool::open_known(home.path(), expected).unwrap_err();
            assert!(matches!(error, Error::PoolIdBad { .. }), "{error}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
}

#[test]
fn an_open_pool_knows_when_its_path_leads_elsewhere() {
    // Fails if a directory that took the place of the pool is taken for the pool.
    let home = tempfile::tempdir().unwrap();
    let (path, moved) = (home.path().join("pool"), home.path().join("moved"));
    fs::create_dir(&path).unwrap();
    let pool = Pool::open(&path).unwrap();
    assert!(pool.is_current());
    fs::rename(&path, &moved).unwrap();
    assert!(!pool.is_current());
    fs::create_dir(&path).unwrap();
    assert!(!pool.is_current());
    fs::remove_dir(&path).unwrap();
    fs::rename(&moved, &path).unwrap();
    assert!(pool.is_current());
}

#[test]
fn an_open_pool_knows_when_its_disk_is_hidden() {
    // Fails if only the inode is compared: the roots of two filesystems often have the same.
    let small = Small::tmpfs();
    let pool = Pool::open(&small.path()).unwrap();
    assert!(pool.is_current());
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", small.path(), "tmpfs", flags, None).unwrap();
    let hidden = !pool.is_current();
    rustix::mount::unmount(small.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    assert!(hidden);
    assert!(pool.is_current());
}

#[test]
fn what_is_no_replica_does_not_keep_a_pool_from_saying_its_capacity() {
    // Fails if one stray entry makes the whole pool fail, or takes away from what the others use.
    let home = tempfile::tempdir().unwrap();
    let pool = Pool::open(home.path()).unwrap();
    let replica = pool.create(NAME, identity(1), blocks(2), Thin).unwrap();
    fill_block(&replica.data_path(), 0, 7);
    let replicas = home.path().join("replicas");
    fs::write(replicas.join("a-file"), "stray").unwrap();
    symlink(home.path(), replicas.join("a-link")).unwrap();
    fs::create_dir_all(replicas.join("data-is-a-directory/data")).unwrap();
    fs::create_dir(replicas.join("data-is-a-link")).unwrap();
    symlink("/dev/null", replicas.join("data-is-a-link/data")).unwrap();
    fs::create_dir(replicas.join("data-is-absent")).unwrap();
    let capacity = pool.capacity().unwrap();
    assert_eq!(capacity.used_by_replicas, replica.allocated().unwrap());
}
