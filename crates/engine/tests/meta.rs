//! The meta data of a replica: whatever a power loss leaves of the last change, all earlier ones count.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::PathBuf;

use common::*;
use proptest::prelude::*;
use trellis_engine::proto::{
    Config, Epoch, Geometry, Key, Lineage, Meta, MetaChange, Promise, Region, Stale, View,
};
use trellis_engine::replica::{MetaStore, Pool, Provisioning::*, Replica};
use uuid::Uuid;

const GEOMETRY: Geometry = Geometry {
    block_bytes: 4096,
    region_bytes: 8192,
};

fn view() -> View {
    View::first(Config::majority([Uuid::from_u128(1)].into()))
}

struct Home {
    dir: tempfile::TempDir,
    _pool: Pool,
    replica: Replica,
}

impl Home {
    fn new() -> Home {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::open(dir.path()).unwrap();
        let replica = pool.create(NAME, identity(1), blocks(8), Thin).unwrap();
        Home {
            dir,
            _pool: pool,
            replica,
        }
    }

    fn open(&self) -> MetaStore {
        MetaStore::open(&self.replica, GEOMETRY, view()).unwrap()
    }

    /// As another process would find it.
    fn reopened(&self) -> MetaStore {
        let identity = identity(1);
        let replica = Replica::open_served(&replica_dir(self.dir.path()), None, identity).unwrap();
        MetaStore::open(&replica, GEOMETRY, view()).unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        replica_dir(self.dir.path()).join(name)
    }
}

fn keys() -> impl Strategy<Value = Key> {
    (any::<u64>(), any::<u64>()).prop_map(|(epoch, seq)| Key {
        epoch: Epoch::from_raw(epoch),
        seq,
    })
}

/// A promise is never taken back.
fn rising(store: &MetaStore, change: &MetaChange) -> MetaChange {
    let made = store.meta().promise;
    MetaChange {
        promise: change.promise.map(|promise| promise.max(made)),
        ..change.clone()
    }
}

fn changes() -> impl Strategy<Value = MetaChange> {
    let region = || (0..4u32).prop_map(Region);
    let stales = (keys(), any::<bool>()).prop_map(|(key, mixed)| Stale { key, mixed });
    (
        prop::option::of((0..1u64 << 44, any::<u64>())),
        prop::option::of(keys()),
        prop::option::of((9..20u64, any::<u64>())),
        prop::option::of(any::<u64>()),
        prop::collection::vec((region(), any::<u64>()), 0..4),
        (
            prop::collection::vec((region(), prop::option::of(stales)), 0..4),
            any::<bool>(),
        ),
    )
        .prop_map(
            |(promise, durable, size, version, stamps, (stale, forget))| MetaChange {
                forget,
                promise: promise.map(|(generation, owner)| Promise { generation, owner }),
                durable,
                size: size.map(|(count, version)| (count * 4096, version)),
                view: version.map(|version| View { version, ..view() }),
                stamps: stamps
                    .into_iter()
                    .map(|(region, stamp)| (region, Epoch::from_raw(stamp)))
                    .collect(),
                stale,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn what_was_made_durable_is_found_again(changes in prop::collection::vec(changes(), 0..12)) {
        // Fails if a change is forgotten, applied twice, or comes back as another.
        let home = Home::new();
        let mut store = home.open();
        for (count, change) in changes.iter().enumerate() {
            store.persist(&rising(&store, change)).unwrap();
            if count % 4 == 3 {
                let before = store.meta().clone();
                store = home.open();
                prop_assert_eq!(store.meta(), &before);
            }
        }
        let before = store.meta().clone();
        drop(store);
        let again = home.open();
        prop_assert_eq!(again.meta(), &before);
    }

    #[test]
    fn a_torn_change_is_there_as_a_whole_or_not_at_all(
        changes in prop::collection::vec(changes(), 1..6),
        cut in any::<prop::sample::Index>(),
        garble in any::<bool>(),
    ) {
        // Fails if a part of a change counts, or an earlier change is lost with it.
        let home = Home::new();
        let mut store = home.open();
        let (last, earlier) = changes.split_last().unwrap();
        for change in earlier {
            store.persist(&rising(&store, change)).unwrap();
        }
        // A size is committed in the superblock first, so that it stays in any case.
        let last = MetaChange { size: None, ..rising(&store, last) };
        let before = store.meta().clone();
        let old_log = fs::read(home.file("meta.log")).unwrap();
        let superblocks = ["superblock.a", "superblock.b"].map(|name| home.file(name));
        let kept = superblocks.each_ref().map(|path| fs::read(path).unwrap());
        store.persist(&last).unwrap();
        let after = store.meta().clone();
        drop(store);
        let mut log = fs::read(home.file("meta.log")).unwrap();
        let changed = |at: &usize| log[*at] != old_log[*at];
        let first = (0..log.len()).find(changed).unwrap();
        let last = (0..log.len()).rfind(changed).unwrap();
        let at = first + cut.index(last + 1 - first);
        if garble {
            log[at] ^= 0x55;
        } else {
            log.truncate(at);
        }
        fs::write(home.file("meta.log"), log).unwrap();
        // Of a change that is not whole, the superblock was not told.
        for (path, bytes) in superblocks.iter().zip(kept) {
            fs::write(path, bytes).unwrap();
        }
        let found = home.reopened().meta().clone();
        prop_assert!(found == before, "{found:?} is neither {before:?} nor {after:?}");
    }

    #[test]
    fn one_damaged_file_costs_nothing(
        changes in prop::collection::vec(changes(), 1..5),
        second in any::<bool>(),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        // Fails if the two files are not both enough to go on from.
        let home = Home::new();
        let mut store = home.open();
        for change in &changes {
            store.persist(&rising(&store, change)).unwrap();
        }
        let before = store.meta().clone();
        drop(store);
        let path = home.file(if second { "meta.b" } else { "meta.a" });
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        fs::write(&path, bytes).unwrap();
        let again = home.open();
        prop_assert_eq!(again.meta(), &before);
    }
}

/// What the meta data of a replica look like that can prove nothing.
fn is_lost(store: &MetaStore) -> bool {
    let meta = store.meta();
    let all = meta.stamps.len();
    meta.view.lineage == Lineage::Unknown
        && meta.stale.len() == all
        && meta
            .stale
            .values()
            .all(|stale| stale.key == Key::NOTHING && stale.mixed)
}

fn promised(generation: u64) -> MetaChange {
    let owner = 7;
    MetaChange {
        promise: Some(Promise { generation, owner }),
        ..MetaChange::default()
    }
}

fn damage(home: &Home, kind: usize) {
    match kind {
        0 => ["meta.a", "meta.b", "meta.log"]
            .map(|name| fs::remove_file(home.file(name)).unwrap())
            .into_iter()
            .collect(),
        1 => ["meta.a", "meta.b"]
            .map(|name| fs::write(home.file(name), [7; 100]).unwrap())
            .into_iter()
            .collect(),
        2 => ["meta.a", "meta.b", "meta.log"]
            .map(|name| fs::write(home.file(name), []).unwrap())
            .into_iter()
            .collect(),
        // Only what was changed since the files were written.
        _ => fs::write(home.file("meta.log"), []).unwrap(),
    }
}

#[test]
fn a_replica_without_its_memory_keeps_its_promise_and_counts_for_nothing() {
    // Fails if a replica that has lost its meta data starts as a new one, or forgets whom it obeys.
    for kind in 0..4 {
        let home = Home::new();
        let mut store = home.open();
        store.persist(&promised(3)).unwrap();
        drop(store);
        damage(&home, kind);
        let store = home.open();
        assert!(is_lost(&store), "damage {kind}: {:?}", store.meta());
        let promise = store.meta().promise;
        assert_eq!((promise.generation, promise.owner), (3, 7));
        drop(store);
        // It stays so until somebody has told it what counts.
        assert!(is_lost(&home.open()), "damage {kind}");
    }
}

#[test]
fn meta_data_that_were_put_back_from_a_backup_do_not_count() {
    // Fails if meta data that are whole, and older than what the replica has told others, are believed.
    let names = ["meta.a", "meta.b", "meta.log"];
    let home = Home::new();
    let mut store = home.open();
    store.persist(&promised(3)).unwrap();
    let backup = names.map(|name| fs::read(home.file(name)).unwrap());
    let durable = Key {
        epoch: Epoch::first(3),
        seq: 1,
    };
    let flushed = MetaChange {
        durable: Some(durable),
        ..MetaChange::default()
    };
    store.persist(&flushed).unwrap();
    drop(store);
    assert_eq!(home.open().meta().durable, durable);
    for (name, bytes) in names.iter().zip(&backup) {
        fs::write(home.file(name), bytes).unwrap();
    }
    assert!(is_lost(&home.open()));
    // Nor do they when the replica has started anew with others.
    for (name, bytes) in names.iter().zip(&backup) {
        fs::write(home.file(name), bytes).unwrap();
    }
    assert!(is_lost(&home.open()));
}

#[test]
fn what_was_half_made_and_never_promised_anything_is_made_again() {
    // Fails if a first start that was killed in the middle leaves a replica that is of no use.
    for kind in 0..3 {
        let home = Home::new();
        drop(home.open());
        damage(&home, kind);
        let store = home.open();
        assert_eq!(store.meta().durable, Key::FRESH, "damage {kind}");
        assert!(store.meta().stale.is_empty(), "damage {kind}");
    }
}

#[test]
fn remains_of_an_emptied_log_do_not_count() {
    // Fails if blocks that are older than the files, or do not follow them, are applied.
    let home = Home::new();
    let mut store = home.open();
    let promise = |generation| MetaChange {
        promise: Some(Promise {
            generation,
            owner: 1,
        }),
        ..MetaChange::default()
    };
    store.persist(&promise(1)).unwrap();
    store.persist(&promise(2)).unwrap();
    let old_log = fs::read(home.file("meta.log")).unwrap();
    drop(store);
    let mut store = home.open();
    store.persist(&promise(3)).unwrap();
    drop(store);
    // The emptying was lost in a power loss, and the new block lies over the first old one.
    let mut log = fs::read(home.file("meta.log")).unwrap();
    log.extend_from_slice(&old_log[log.len()..]);
    fs::write(home.file("meta.log"), log).unwrap();
    assert_eq!(home.open().meta().promise.generation, 3);
    fs::write(home.file("meta.log"), old_log).unwrap();
    assert_eq!(home.open().meta().promise.generation, 3);
}

#[test]
fn a_size_that_only_the_superblock_has_counts() {
    // Fails if a crash between the two leaves a replica smaller than it has said it is.
    let home = Home::new();
    drop(home.open());
    home.replica.grow(blocks(9), Thin).unwrap();
    let store = home.open();
    assert_eq!(store.meta().size, 9 * 4096);
    assert_eq!(store.meta().stamps.len(), 5);
}

/// A block as it lies on the disk.
fn block(sequence: u64, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    let mut bytes = b"TRLM".to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(sequence.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    let checksum = crc32c::crc32c(&bytes);
    bytes[16..20].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// The list that releases before had for records of 40 bytes.
fn records(count: u8) -> Vec<u8> {
    let mut bytes = u32::from(count).to_le_bytes().to_vec();
    bytes.extend(vec![0xA5; usize::from(count) * 40]);
    bytes
}

fn number(value: u64) -> [u8; 8] {
    value.to_le_bytes()
}

/// Meta data of four regions, laid out by hand as the releases before did it.
fn laid_out(list: &[u8]) -> Vec<u8> {
    let (promise, durable) = ([number(3), number(7)], [number(3 << 20), number(5)]);
    let mut bytes = [promise, durable].as_flattened().concat();
    bytes.extend([number(32768), number(2)].concat());
    bytes.extend(number(0));
    bytes.extend([1, 1, 0, 0, 0]);
    bytes.extend(Uuid::from_u128(1).as_bytes());
    bytes.push(0);
    bytes.extend(list);
    bytes.extend([4, 0, 0, 0]);
    bytes.extend([0, 1, 3 << 20, 0].map(number).concat());
    bytes.extend([1, 0, 0, 0, 2, 0, 0, 0, 1]);
    bytes.extend([number(1), number(9)].concat());
    bytes
}

/// A change of the durable key and of a stamp, laid out in the same way.
fn change_laid_out(list: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 1];
    bytes.extend([number(3 << 20), number(6)].concat());
    bytes.extend([0, 0]);
    bytes.extend(list);
    bytes.extend([1, 0, 0, 0, 3, 0, 0, 0]);
    bytes.extend(number(3 << 20));
    bytes.extend([0; 4]);
    bytes
}

/// What both of them say together.
fn meant() -> Meta {
    let key = |raw, seq| Key {
        epoch: Epoch::from_raw(raw),
        seq,
    };
    let stale = Stale {
        key: key(1, 9),
        mixed: false,
    };
    Meta {
        promise: Promise {
            generation: 3,
            owner: 7,
        },
        durable: key(3 << 20, 6),
        size: 32768,
        size_version: 2,
        view: View {
            version: 0,
            ..view()
        },
        stamps: [0, 1, 3 << 20, 3 << 20].map(Epoch::from_raw).to_vec(),
        stale: [(Region(2), stale)].into(),
    }
}

#[test]
fn what_releases_before_have_laid_out_is_read_and_laid_out_in_the_same_way() {
    // Fails if the place of the reserved list moves, or if what stood there is taken for something else.
    let none = records(0);
    for list in [records(0), records(2), records(64)] {
        let home = Home::new();
        for name in ["meta.a", "meta.b"] {
            fs::write(home.file(name), block(5, &laid_out(&list))).unwrap();
        }
        let changes = [change_laid_out(&list), change_laid_out(&none)];
        let [first, second] = [block(6, &changes[0]), block(7, &changes[1])];
        fs::write(home.file("meta.log"), [first, second].concat()).unwrap();
        let mut store = home.open();
        assert_eq!(store.meta(), &meant());
        store
            .persist(&MetaChange {
                durable: Some(meant().durable),
                stamps: vec![(Region(3), Epoch::first(3))],
                ..MetaChange::default()
            })
            .unwrap();
        let change = block(8, &change_laid_out(&none));
        assert!(
            fs::read(home.file("meta.log"))
                .unwrap()
                .starts_with(&change)
        );
        let mut whole = laid_out(&none);
        let durable_seq = 24;
        whole[durable_seq] = 6;
        let last_stamp = whole.len() - 25 - 8;
        whole[last_stamp..last_stamp + 8].copy_from_slice(&number(3 << 20));
        let written = fs::read(home.file("meta.a")).unwrap();
        assert!(written.starts_with(&block(7, &whole)));
    }
}

#[test]
fn a_reserved_list_that_no_release_can_have_written_makes_meta_data_worthless() {
    // Fails if a length on the disk is believed without a bound.
    for list in [records(65), vec![1, 0, 0, 0]] {
        let home = Home::new();
        let mut store = home.open();
        store.persist(&promised(3)).unwrap();
        drop(store);
        for name in ["meta.a", "meta.b"] {
            fs::write(home.file(name), block(5, &laid_out(&list))).unwrap();
        }
        assert!(is_lost(&home.open()));
    }
}
