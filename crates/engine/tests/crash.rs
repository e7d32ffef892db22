//! Crashes of the replica store: of the process at every step, and of the power between a write and
//! its sync.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::dying::{dying_after, recording};
use common::*;
use proptest::prelude::*;
use trellis_api::step::Step;
use trellis_engine::Error;
use trellis_engine::replica::{Pool, Provisioning, check};

#[derive(Clone, Copy, Debug)]
enum Work {
    Create(u64, Provisioning),
    Grow(u64, Provisioning),
    Remove,
    Reopen,
}

fn do_work(pool: &Path, work: Work) {
    let pool = Pool::open(pool).unwrap();
    match work {
        Work::Create(size, provisioning) => {
            pool.create(NAME, identity(1), blocks(size), provisioning)
                .unwrap();
        }
        Work::Grow(size, provisioning) => match pool.open_replica(NAME) {
            Ok(replica) => match replica.grow(blocks(size), provisioning) {
                Ok(_) | Err(Error::SizeShrinks { .. }) => {}
                Err(other) => panic!("{other}"),
            },
            Err(Error::ReplicaAbsent { .. }) => {}
            Err(other) => panic!("{other}"),
        },
        Work::Remove => pool.remove(NAME, identity(1)).unwrap(),
        Work::Reopen => match pool.open_replica(NAME) {
            Ok(_) | Err(Error::ReplicaAbsent { .. }) => {}
            Err(other) => panic!("{other}"),
        },
    }
}

/// What the replica must look like: its size in blocks, if it exists, and what was written.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    size: Option<u64>,
    written: BTreeMap<u64, u8>,
}

impl Model {
    fn after(&self, work: Work) -> Model {
        let mut next = self.clone();
        match work {
            Work::Create(size, _) => next.size = Some(self.size.map_or(size, |old| old.max(size))),
            Work::Grow(size, _) => next.size = self.size.map(|old| old.max(size)),
            Work::Remove => next = Model::default(),
            Work::Reopen => {}
        }
        next
    }

    /// The state of the pool, if it is this one.
    fn describes(&self, pool: &Path) -> bool {
        let pool = Pool::open(pool).unwrap();
        let replica = match pool.open_replica(NAME) {
            Ok(replica) => replica,
            Err(Error::ReplicaAbsent { .. }) => return self.size.is_none(),
            Err(other) => panic!("a crash left a replica that does not open: {other}"),
        };
        if self.size.map(blocks) != Some(replica.measure().unwrap().size()) {
            return false;
        }
        (0..replica.size().get() / BLOCK).all(|index| {
            let value = self.written.get(&index).copied().unwrap_or(0);
            read_block(&replica.data_path(), index)
                .iter()
                .all(|byte| *byte == value)
        })
    }
}

/// Nothing but the replica itself may be left once the pool has been opened again.
fn is_clean(pool: &Path) -> bool {
    drop(Pool::open(pool).unwrap());
    let report = check(pool);
    report
        .findings
        .iter()
        .all(|finding| matches!(finding, trellis_engine::replica::Finding::DataLong { .. }))
}

fn provisioning() -> impl Strategy<Value = Provisioning> {
    prop_oneof![3 => Just(Provisioning::Thin), 1 => Just(Provisioning::Thick)]
}

fn work() -> impl Strategy<Value = Work> {
    prop_oneof![
        4 => (1u64..20, provisioning()).prop_map(|(size, how)| Work::Create(size, how)),
        8 => (1u64..40, provisioning()).prop_map(|(size, how)| Work::Grow(size, how)),
        1 => Just(Work::Remove),
        1 => Just(Work::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_history_of_crashes_ends_with_the_old_or_the_new_size_and_all_bytes(
        history in prop::collection::vec((work(), prop::option::of(0usize..5), any::<u8>()), 1..16),
    ) {
        // Fails if some order of creation, growth, removal and death leaves a third state.
        let home = tempfile::tempdir().unwrap();
        let mut model = Model::default();
        for (work, death, value) in history {
            let died = dying_after(death, || do_work(home.path(), work));
            let next = model.after(work);
            let is_next = next.describes(home.path());
            prop_assert!(
                is_next || (died.is_some() && model.describes(home.path())),
                "{work:?} died at {died:?}; neither {model:?} nor {next:?}"
            );
            prop_assert!(is_clean(home.path()));
            if is_next {
                model = next;
            }
            if let Some(size) = model.size {
                let index = u64::from(value) % size;
                fill_block(&replica_dir(home.path()).join("data"), index, value);
                model.written.insert(index, value);
            }
        }
    }
}

#[test]
fn a_death_at_each_step_is_repaired_by_doing_the_work_again() {
    // Fails if a step is not reached in its order, or the work cannot be repeated after a death there.
    let whole = [
        (
            Work::Create(4, Provisioning::Thin),
            vec![
                Step::ReplicaDirectoryMade,
                Step::ReplicaDataMade,
                Step::ReplicaSuperblocksMade,
                Step::ReplicaPublished,
            ],
        ),
        (
            Work::Grow(9, Provisioning::Thin),
            vec![Step::ReplicaDataExtended, Step::ReplicaRaised],
        ),
        (
            Work::Grow(12, Provisioning::Thick),
            vec![Step::ReplicaDataExtended, Step::ReplicaRaised],
        ),
        (
            Work::Remove,
            vec![Step::ReplicaUnpublished, Step::ReplicaRemoved],
        ),
    ];
    let home = tempfile::tempdir().unwrap();
    let mut model = Model::default();
    for (work, steps) in whole {
        let next = model.after(work);
        for (index, step) in steps.iter().enumerate() {
            // From the state before the work, die at this step; then do it again.
            let trial = tempfile::tempdir().unwrap();
            if let Some(size) = model.size {
                do_work(trial.path(), Work::Create(size, Provisioning::Thin));
            }
            let died = dying_after(Some(index), || do_work(trial.path(), work));
            assert_eq!(died, Some(*step), "{work:?}");
            do_work(trial.path(), work);
            assert!(
                next.describes(trial.path()),
                "{work:?} after a death at {step:?}"
            );
            assert!(is_clean(trial.path()), "{work:?} after a death at {step:?}");
        }
        let record = recording(&replica_dir(home.path()), || do_work(home.path(), work));
        let taken: Vec<Step> = record.into_iter().map(|(step, _)| step).collect();
        assert_eq!(taken, steps, "{work:?}");
        model = next;
    }
}

/// A superblock file as a disk sees it: what was synced, and what was written since.
struct SlotOnDisk {
    path: PathBuf,
    synced: Vec<u8>,
    unsynced: Vec<Vec<u8>>,
}

impl SlotOnDisk {
    fn new(path: PathBuf) -> SlotOnDisk {
        let synced = fs::read(&path).unwrap();
        SlotOnDisk {
            path,
            synced,
            unsynced: Vec::new(),
        }
    }

    /// Takes note of a write, if there was one before this moment.
    fn look(&mut self, files: &Files) -> bool {
        let now = &files[&self.path];
        let wrote = now != self.unsynced.last().unwrap_or(&self.synced);
        if wrote {
            self.unsynced.push(now.clone());
        }
        wrote
    }

    fn sync(&mut self) {
        if let Some(last) = self.unsynced.pop() {
            self.synced = last;
            self.unsynced.clear();
        }
    }

    /// What can be there after a power loss: what was synced, what was written, a mix in units of a
    /// sector, or garbage where a write was under way.
    fn after_power_loss(&self) -> Vec<Vec<u8>> {
        let mut states = vec![self.synced.clone()];
        for written in &self.unsynced {
            states.push(written.clone());
            states.push([&written[..512], &self.synced[512..]].concat());
            states.push([&self.synced[..512], &written[512..]].concat());
            states.push([&written[..512], &[0xee; 3584]].concat());
        }
        states
    }
}

#[test]
fn a_power_loss_during_thin_growths_leaves_the_old_or_the_new_size() {
    // Fails if some mix of what the disk kept and lost does not open, or opens with a third size;
    // so also if a growth writes to the slot on which the last one rests.
    let home = tempfile::tempdir().unwrap();
    do_work(home.path(), Work::Create(4, Provisioning::Thin));
    let dir = replica_dir(home.path());
    fill_block(&dir.join("data"), 3, 0x33);
    let mut slots = ["superblock.a", "superblock.b"].map(|name| SlotOnDisk::new(dir.join(name)));
    // Several growths by one handle, so that each begins with what the last left without a sync.
    // States are noted first and tried afterwards.
    let mut trials = Vec::new();
    let replica = reopen(home.path());
    let mut from = 4;
    for to in [9, 15, 18] {
        let record = recording(&dir, || {
            replica.grow(blocks(to), Provisioning::Thin).unwrap();
        });
        let [(_, extended), (_, raised)] = record.as_slice() else {
            panic!("a growth has two steps");
        };
        let wrote = slots.each_mut().map(|slot| slot.look(extended));
        assert_eq!(
            wrote, [false; 2],
            "a superblock was written before the data"
        );
        // Just before the sync that commits, just after it, and when the growth has returned.
        let wrote = slots.each_mut().map(|slot| slot.look(raised));
        trials.push((power_losses(&slots), vec![from, to]));
        for (slot, _) in slots.iter_mut().zip(wrote).filter(|(_, wrote)| *wrote) {
            slot.sync();
        }
        trials.push((power_losses(&slots), vec![to]));
        let returned = snapshot(&dir);
        let wrote = slots.each_mut().map(|slot| slot.look(&returned));
        assert!(wrote.contains(&true), "the second copy was not written");
        trials.push((power_losses(&slots), vec![to]));
        from = to;
    }
    drop(replica);
    for ([states_a, states_b], sizes) in trials {
        for (a, b) in states_a
            .iter()
            .flat_map(|a| states_b.iter().map(move |b| (a, b)))
        {
            // No growth has synced the data, so that all of its lengths may be lost.
            for length in [4, sizes[0]] {
                fs::write(dir.join("superblock.a"), a).unwrap();
                fs::write(dir.join("superblock.b"), b).unwrap();
                set_length(&dir.join("data"), length * BLOCK);
                settles_at(home.path(), &sizes);
            }
        }
    }
}

fn power_losses(slots: &[SlotOnDisk; 2]) -> [Vec<Vec<u8>>; 2] {
    slots.each_ref().map(SlotOnDisk::after_power_loss)
}

/// The replica opens at one of these sizes, keeps it and its bytes, and can still grow.
fn settles_at(pool: &Path, sizes: &[u64]) {
    let data = replica_dir(pool).join("data");
    let size = reopen(pool).measure().unwrap().size();
    assert!(
        sizes.contains(&(size.get() / BLOCK)),
        "{size} is none of {sizes:?} blocks"
    );
    assert!(check(pool).findings.is_empty());
    let replica = reopen(pool);
    assert_eq!(replica.measure().unwrap().size(), size);
    assert_eq!(read_block(&data, 3), [0x33; 4096]);
    replica.grow(blocks(20), Provisioning::Thin).unwrap();
    assert_eq!(replica.measure().unwrap().size(), blocks(20));
    assert_eq!(read_block(&data, 19), [0; 4096]);
}
