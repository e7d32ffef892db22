//! Crashes of the replica store: of the process at every step, and of the power between a write and
//! its sync.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;

use common::*;
use proptest::prelude::*;
use trellis_api::step::{Step, install_hook};
use trellis_engine::Error;
use trellis_engine::replica::{Pool, Provisioning, check};

thread_local! {
    /// How many more steps this thread takes before it dies.
    static STEPS_LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The steps that this thread has taken.
    static TAKEN: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
}

fn at_step(step: Step) {
    TAKEN.with_borrow_mut(|taken| taken.push(step));
    match STEPS_LEFT.get() {
        Some(0) => resume_unwind(Box::new(step)),
        Some(left) => STEPS_LEFT.set(Some(left - 1)),
        None => {}
    }
}

/// Runs `work` and drops everything that it holds when the step after `steps` others is reached.
/// Says at which step it died, if it did.
fn dying_after(steps: Option<usize>, work: impl FnOnce()) -> Option<Step> {
    install_hook(at_step);
    STEPS_LEFT.set(steps);
    let ended = catch_unwind(AssertUnwindSafe(work));
    STEPS_LEFT.set(None);
    match ended {
        Ok(()) => None,
        Err(death) => match death.downcast::<Step>() {
            Ok(step) => Some(*step),
            Err(panic) => resume_unwind(panic),
        },
    }
}

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
        Work::Remove => pool.remove(NAME).unwrap(),
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
        TAKEN.with_borrow_mut(Vec::clear);
        assert_eq!(dying_after(None, || do_work(home.path(), work)), None);
        TAKEN.with_borrow(|taken| assert_eq!(*taken, steps, "{work:?}"));
        model = next;
    }
}

/// How a superblock can come back after the power was lost while it was being written: as before,
/// as written, or mixed in units of a sector.
fn torn(old: &[u8], new: &[u8]) -> Vec<Vec<u8>> {
    let mut states = vec![old.to_vec(), new.to_vec()];
    for sectors in [1, 3, 7] {
        let at = sectors * 512;
        states.push([&new[..at], &old[at..]].concat());
        states.push([&old[..at], &new[at..]].concat());
    }
    states.push([&new[..512], &[0xee; 3584]].concat());
    states.push(vec![0xee; 4096]);
    states
}

#[test]
fn a_power_loss_during_a_thin_growth_leaves_the_old_or_the_new_size() {
    // Fails if some mix of what the disk kept and lost does not open, or opens with a third size.
    let home = tempfile::tempdir().unwrap();
    let dir = replica_dir(home.path());
    let [a, b, data] = ["superblock.a", "superblock.b", "data"].map(|name| dir.join(name));
    do_work(home.path(), Work::Create(4, Provisioning::Thin));
    fill_block(&data, 3, 0x33);
    let mut before = snapshot(&dir);
    // Two growths, because they commit to different slots, and what the first left without a sync
    // may be lost during the second.
    for to in [9, 15] {
        let replica = reopen(home.path());
        let from = replica.size().get() / BLOCK;
        replica.grow(blocks(to), Provisioning::Thin).unwrap();
        drop(replica);
        let after = snapshot(&dir);
        // Before the commit was durable only the slot that commits and the length are in doubt;
        // afterwards only the other slot and the length are.
        for (committing, mirroring) in [(&a, &b), (&b, &a)] {
            for length in [4, from, to] {
                for bytes in torn(&before[committing], &after[committing]) {
                    restore(&before);
                    fs::write(committing, bytes).unwrap();
                    settles_at(home.path(), &data, length, &[from, to]);
                }
                for bytes in torn(&before[mirroring], &after[mirroring]) {
                    restore(&before);
                    fs::write(committing, &after[committing]).unwrap();
                    fs::write(mirroring, bytes).unwrap();
                    settles_at(home.path(), &data, length, &[to]);
                }
            }
        }
        restore(&after);
        before = after;
    }
}

/// Cuts the data to a length that was not synced; then the replica opens at one of these sizes, and
/// keeps that size and its bytes when it is opened once more.
fn settles_at(pool: &Path, data: &Path, length: u64, sizes: &[u64]) {
    OpenOptions::new()
        .write(true)
        .open(data)
        .unwrap()
        .set_len(length * BLOCK)
        .unwrap();
    let size = reopen(pool).measure().unwrap().size();
    assert!(
        sizes.contains(&(size.get() / BLOCK)),
        "{size} is none of {sizes:?} blocks"
    );
    assert_eq!(reopen(pool).measure().unwrap().size(), size);
    assert_eq!(read_block(data, 3), [0x33; 4096]);
    assert!(is_clean(pool));
    let replica = reopen(pool);
    replica.grow(blocks(20), Provisioning::Thin).unwrap();
    assert_eq!(replica.measure().unwrap().size(), blocks(20));
    assert_eq!(read_block(data, 19), [0; 4096]);
}
