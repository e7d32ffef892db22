//! One replica: its size, measured and raised.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use trellis_api::Bytes;
use trellis_api::step::{self, Step};

use super::dir::{Dir, FileFacts, allocate, extend, facts, failed, has_data, punch, sync_data};
use super::pair::Pair;
use super::superblock::Superblock;
use super::{BLOCK, Identity, Outcome, Provisioning, Purpose, meta, note, validate_size};
use crate::proto::Promise;
use crate::{Error, Result};

pub(super) const DATA: &str = "data";

/// A handle on one replica. Clones, and handles that were opened separately from the same pool,
/// share one state. The pool stays locked until the last of them is gone.
#[derive(Clone)]
pub struct Replica {
    pub(super) shared: Arc<Shared>,
}

/// What all handles on one replica share.
pub(super) struct Shared {
    name: String,
    identity: Identity,
    pub(super) dir: Dir,
    data: File,
    data_path: PathBuf,
    state: Mutex<State>,
    owner: Owner,
}

/// By which right a handle may change its replica.
#[derive(Debug)]
pub(super) enum Owner {
    /// It came from a pool, whose lock file it holds. Another process may serve the replica, so it
    /// takes the replica's own lock for every change.
    Pool(#[allow(dead_code, reason = "held and never read")] Arc<File>),
    /// It serves the replica, and holds the replica's own lock as long as it lives.
    Server,
}

struct State {
    pair: Pair,
    removed: bool,
    /// Up to where space was set aside behind the end of the data file.
    reserved: Bytes,
    /// The data file was found shorter than it was durable, and has not been extended.
    is_cut: bool,
}

/// What a replica measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// The size that the superblock on the disk says.
    pub superblock: Bytes,
    /// The length of the data file.
    pub data: Bytes,
}

impl Measure {
    /// The size of the rung: as much as is both promised and there.
    pub fn size(&self) -> Bytes {
        self.superblock.min(self.data)
    }
}

impl Replica {
    /// Builds a replica in an empty directory. The files are durable when this returns; the name of
    /// the directory is the caller's business.
    pub(super) fn build(
        dir: &Dir,
        name: &str,
        identity: Identity,
        size: Bytes,
        provisioning: Provisioning,
        purpose: Purpose,
    ) -> Result<()> {
        let data = dir.make_file(DATA)?;
        let data_path = dir.join(DATA);
        if provisioning == Provisioning::Thick {
            allocate_or_undo(dir, name, &data, Bytes::ZERO, size)?;
        }
        extend(&data, &data_path, size)?;
        sync_data(&data, &data_path)?;
        step::reached(Step::ReplicaDataMade);
        Pair::create(dir, Superblock::first(identity, size))?;
        if purpose == Purpose::Served {
            meta::make(dir, identity, size)?;
            note::make(dir)?;
        }
        dir.sync()?;
        step::reached(Step::ReplicaSuperblocksMade);
        Ok(())
    }

    /// Opens the replica in that directory and makes whole what a crash has left. Changes nothing
    /// unless it can be made whole.
    ///
    /// A replica that another process serves is only looked at.
    pub(super) fn recover(dir: Dir, name: &str, owner: Owner) -> Result<Replica> {
        let data_path = dir.join(DATA);
        let data = dir.file(DATA)?.ok_or_else(|| Error::DataAbsent {
            path: data_path.clone(),
        })?;
        let (pair, is_cut) = match &owner {
            Owner::Server => recover_pair(&dir, name, &data, &data_path, true)?,
            Owner::Pool(_) if dir.try_lock()? => {
                let pair = recover_pair(&dir, name, &data, &data_path, false);
                dir.unlock();
                pair?
            }
            Owner::Pool(_) => (Pair::look(&dir, name)?, false),
        };
        let identity = pair.superblock().identity;
        let state = Mutex::new(State {
            pair,
            removed: false,
            reserved: Bytes::ZERO,
            is_cut,
        });
        let shared = Shared {
            name: name.to_owned(),
            identity,
            dir,
            data,
            data_path,
            state,
            owner,
        };
        Ok(Replica {
            shared: Arc::new(shared),
        })
    }

    /// The replica's name on its pool.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Whose bytes it holds.
    pub fn identity(&self) -> Identity {
        self.shared.identity
    }

    /// The size, as last committed to the disk: by this handle, or by who serves the replica.
    pub fn size(&self) -> Bytes {
        let shared = &*self.shared;
        let pair = &shared.state().pair;
        let committed = pair.superblock().size;
        if matches!(shared.owner, Owner::Pool(_)) && pair.is_behind() {
            let read = pair.read_again(&shared.dir, &shared.name);
            return read.map_or(committed, |superblock| superblock.size);
        }
        committed
    }

    /// How many sizes the replica has had.
    pub fn size_version(&self) -> u64 {
        self.shared.state().pair.superblock().size_version
    }

    /// The fence: the generation of the volume's owner that this replica obeys, zero before the first.
    pub fn generation(&self) -> u64 {
        self.shared.state().pair.superblock().generation
    }

    /// The plain file that holds the volume's bytes. It may be longer than the size; what is behind
    /// the size is not part of the volume.
    pub fn data_path(&self) -> PathBuf {
        self.shared.data_path.clone()
    }

    /// Reads the size again from where it is kept. A data file that something has cut below the length
    /// that was made durable is [`Error::DataCut`], as it is at opening.
    pub fn measure(&self) -> Result<Measure> {
        let mut state = self.shared.live()?;
        let data = self.shared.facts()?.length;
        let Some(_turn) = self.shared.turn(&mut state)? else {
            // Who serves it may have raised it since we looked, and does not tell us.
            let shared = &*self.shared;
            let read = state.pair.read_shared(&shared.dir, &shared.name)?;
            refuse_cut(&shared.data_path, data, read.data_synced)?;
            let superblock = read.size;
            return Ok(Measure { superblock, data });
        };
        let read = state.pair.read_again(&self.shared.dir, &self.shared.name)?;
        // After a commit that failed, the disk may show a superblock of which nobody knows whether
        // it would survive a power loss. What was committed is the most that can be promised.
        let committed = state.pair.superblock();
        if committed.has_served() != Some(true) {
            refuse_cut(&self.shared.data_path, data, committed.data_synced)?;
        }
        let superblock = read.size.min(committed.size);
        Ok(Measure { superblock, data })
    }

    /// How much of the pool the replica's data takes.
    pub fn allocated(&self) -> Result<Bytes> {
        let _state = self.shared.live()?;
        Ok(self.shared.facts()?.allocated)
    }

    /// Raises the replica to `to`. Durable when this returns. Waits for a growth by another handle.
    ///
    /// An error leaves the replica at its size. Only an I/O error in the last step leaves open which
    /// of the two sizes a later opening finds; repeating the call settles it.
    pub fn grow(&self, to: Bytes, provisioning: Provisioning) -> Result<Outcome> {
        validate_size(to)?;
        let shared = &*self.shared;
        let mut state = shared.live()?;
        let Some(_turn) = shared.turn(&mut state)? else {
            return Err(Error::ReplicaServed {
                path: shared.dir.path().to_owned(),
            });
        };
        let current = *state.pair.superblock();
        let from = current.size;
        if to < from {
            return Err(Error::SizeShrinks {
                replica: shared.name.clone(),
                from,
                to,
            });
        }
        if to == from {
            return Ok(Outcome::Unchanged);
        }
        let length = shared.facts()?.length;
        refuse_cut(&shared.data_path, length, from)?;
        if provisioning == Provisioning::Thick && state.reserved < to {
            allocate_or_undo(&shared.dir, &shared.name, &shared.data, from, to)?;
        }
        // A data file that a crash has left longer still stays as it is: nothing is ever cut off.
        if length < to {
            extend(&shared.data, &shared.data_path, to)?;
        }
        let mut data_synced = current.data_synced;
        if provisioning == Provisioning::Thick {
            sync_data(&shared.data, &shared.data_path)?;
            data_synced = to;
        }
        step::reached(Step::ReplicaDataExtended);
        state.pair.commit(current.raised(to, data_synced))?;
        step::reached(Step::ReplicaRaised);
        state.pair.mirror();
        Ok(Outcome::Raised { from, to })
    }
}

impl Replica {
    /// The file that holds the volume's bytes.
    pub(crate) fn data(&self) -> &File {
        &self.shared.data
    }

    /// Makes everything that was written durable, and with the first sync of a part that was grown also that it was.
    pub(crate) fn sync(&self) -> Result<()> {
        let shared = &*self.shared;
        // The data file has had this length since before the superblock said so.
        let size = shared.state().pair.superblock().size;
        sync_data(&shared.data, &shared.data_path)?;
        let mut state = shared.state();
        let current = *state.pair.superblock();
        if current.data_synced < size {
            let next = current.followed(|next| next.data_synced = size);
            state.pair.commit(next)?;
            step::reached(Step::CopyLengthKept);
            state.pair.mirror();
        }
        Ok(())
    }

    /// What the superblock says of the replica's memory.
    pub(super) fn kept(&self) -> Kept {
        let state = self.shared.state();
        let superblock = state.pair.superblock();
        let memory = superblock.memory.unwrap_or_default();
        Kept {
            has_served: superblock.has_served(),
            promise: Promise {
                generation: superblock.generation,
                owner: memory.owner,
            },
            meta_sequence: memory.meta_sequence,
            is_cut: state.is_cut,
        }
    }

    /// Keeps what must be remembered where the identity is, durably.
    pub(super) fn keep(&self, promise: Promise, meta_sequence: u64) -> Result<()> {
        let mut state = self.shared.state();
        let next = remembering(state.pair.superblock(), Some(promise), meta_sequence);
        state.pair.commit(next)?;
        state.pair.mirror();
        Ok(())
    }

    /// Says durably that sums are kept of the blocks, before the first of them is.
    pub(super) fn promise_sums(&self) -> Result<()> {
        let mut state = self.shared.state();
        let current = *state.pair.superblock();
        if current.has_sums {
            return Ok(());
        }
        let next = current.followed(|next| {
            next.memory.get_or_insert_default();
            next.has_sums = true;
        });
        state.pair.commit(next)?;
        state.pair.mirror();
        Ok(())
    }

    /// Keeps the number of the last change of the meta data, without waiting for the disk: after a power loss an
    /// earlier number may be found, which only makes the check weaker.
    pub(super) fn keep_sequence(&self, meta_sequence: u64) {
        let mut state = self.shared.state();
        let next = remembering(state.pair.superblock(), None, meta_sequence);
        if let Err(error) = state.pair.note(next) {
            tracing::debug!("{error}");
        }
    }

    /// Whether something was ever written to the data file.
    pub(super) fn has_data(&self) -> Result<bool> {
        has_data(&self.shared.data, &self.shared.data_path)
    }

    /// Extends a data file that was cut. What it held has been forgotten, durably.
    pub(super) fn mend_cut(&self) -> Result<()> {
        let shared = &*self.shared;
        let mut state = shared.state();
        if std::mem::take(&mut state.is_cut) {
            extend(
                &shared.data,
                &shared.data_path,
                state.pair.superblock().size,
            )?;
            sync_data(&shared.data, &shared.data_path)?;
        }
        Ok(())
    }

    /// The same file, opened again. A sync of it that fails is told here, and again to whoever syncs
    /// [`Replica::data`].
    pub(crate) fn data_again(&self) -> Result<File> {
        let path = &self.shared.data_path;
        let absent = || Error::DataAbsent { path: path.clone() };
        self.shared.dir.file(DATA)?.ok_or_else(absent)
    }

    /// Whether no byte was ever written to the data file, as far as its space tells.
    pub(crate) fn takes_no_space(&self) -> Result<bool> {
        Ok(self.shared.facts()?.allocated == Bytes::ZERO)
    }

    /// Sets space aside for a growth to `to`. A thin replica promises no space; it only has to be able
    /// to have that length.
    pub(crate) fn reserve(&self, to: Bytes, provisioning: Provisioning) -> Result<()> {
        validate_size(to)?;
        let shared = &*self.shared;
        let mut state = shared.live()?;
        let from = state.pair.superblock().size;
        if to <= from {
            return Ok(());
        }
        if provisioning == Provisioning::Thin {
            return may_have_length(&shared.data, &shared.data_path, to);
        }
        if state.reserved != to {
            // What was set aside for another size, or by a process that died, is given back first.
            extend(&shared.data, &shared.data_path, shared.facts()?.length)?;
            state.reserved = Bytes::ZERO;
            allocate_or_undo(&shared.dir, &shared.name, &shared.data, from, to)?;
            state.reserved = to;
        }
        Ok(())
    }
}

/// What the superblock says of a replica's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    /// Whether a coordinator was promised something; nothing is known of a replica of an earlier format.
    pub(super) has_served: Option<bool>,
    /// The last promise.
    pub(super) promise: Promise,
    /// The number of the last change of the meta data, at least.
    pub(super) meta_sequence: u64,
    /// The data file was cut, and has not been mended.
    pub(super) is_cut: bool,
}

fn remembering(current: &Superblock, promise: Option<Promise>, meta_sequence: u64) -> Superblock {
    current.followed(|next| {
        let memory = next.memory.get_or_insert_default();
        memory.meta_sequence = memory.meta_sequence.max(meta_sequence);
        if let Some(promise) = promise.filter(|promise| promise.generation >= current.generation) {
            next.generation = promise.generation;
            memory.owner = promise.owner;
        }
    })
}

/// Asks whether a file may have that length, by a hole behind its end, which changes nothing.
fn may_have_length(data: &File, path: &Path, length: Bytes) -> Result<()> {
    match punch(data, length.saturating_sub(BLOCK).get(), BLOCK.get()) {
        Err(Errno::FBIG) => Err(Error::FileTooLong {
            path: path.to_owned(),
            size: length,
        }),
        // A filesystem that has no holes says nothing about lengths; its own answer comes later.
        _ => Ok(()),
    }
}

impl fmt::Debug for Replica {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Replica")
            .field("path", &self.shared.dir.path())
            .field("identity", &self.shared.identity)
            .field("size", &self.size())
            .finish()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Shared")
            .field("path", &self.dir.path())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// The state, also after a panic elsewhere: it changes only once the disk has changed, and then
    /// all at once.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of a replica that has not been removed.
    fn live(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.state();
        if state.removed {
            return Err(Error::ReplicaRemoved {
                replica: self.name.clone(),
            });
        }
        Ok(state)
    }

    pub(super) fn is_removed(&self) -> bool {
        self.state().removed
    }

    /// What the data file is like. A file without a name was removed behind our back, and what has
    /// no name cannot be opened again after a restart.
    fn facts(&self) -> Result<FileFacts> {
        let facts = facts(&self.data, &self.data_path)?;
        if !facts.linked {
            return Err(Error::DataAbsent {
                path: self.data_path.clone(),
            });
        }
        Ok(facts)
    }

    /// The right to change the replica, or nothing if another process serves it. What that process has
    /// committed before it ended is taken over first.
    fn turn(&self, state: &mut State) -> Result<Option<Turn<'_>>> {
        let locked = match self.owner {
            Owner::Server => None,
            Owner::Pool(_) if self.dir.try_lock()? => Some(&self.dir),
            Owner::Pool(_) => return Ok(None),
        };
        let turn = Turn(locked);
        if locked.is_some() && state.pair.is_behind() {
            (state.pair, _) =
                recover_pair(&self.dir, &self.name, &self.data, &self.data_path, false)?;
        }
        Ok(Some(turn))
    }

    /// Runs `unpublish`, which takes the replica's name away, while no handle is at work; afterwards
    /// every handle answers that the replica was removed.
    pub(super) fn retire(&self, unpublish: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.state();
        unpublish()?;
        state.removed = true;
        Ok(())
    }
}

/// The right to change a replica, until it is dropped.
struct Turn<'a>(Option<&'a Dir>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(dir) = self.0 {
            dir.unlock();
        }
    }
}

/// The superblocks as a crash, a disk or a person may have left them, made whole, and the data file
/// as long as they say. Says whether the data file was cut: then it is left as it is.
///
/// A copy of several that was cut has others to be repaired from. Whoever `serves` it forgets first what it held,
/// and only then extends the file ([`Replica::mend_cut`]).
fn recover_pair(
    dir: &Dir,
    name: &str,
    data: &File,
    data_path: &Path,
    serves: bool,
) -> Result<(Pair, bool)> {
    let length = facts(data, data_path)?.length;
    let mut is_cut = false;
    let pair = Pair::recover(dir, name, |superblock| {
        let has_others = match superblock.has_served() {
            Some(has_served) => has_served,
            None => serves,
        };
        is_cut = length < superblock.data_synced && has_others;
        if is_cut {
            let expected = superblock.data_synced;
            tracing::warn!(replica = name, %length, %expected, "the data file was cut");
            return Ok(());
        }
        refuse_cut(data_path, length, superblock.data_synced)
    })?;
    let size = pair.superblock().size;
    if length < size && !is_cut {
        // The length of a thin growth had not reached the disk. Neither had any byte there, as
        // a sync of such a byte would have taken the length along, and the superblock with it.
        tracing::info!(replica = name, %length, %size, "extended the data file to its size again");
        extend(data, data_path, size)?;
    }
    Ok((pair, is_cut))
}

/// A data file that is shorter than this store has left it has lost bytes of the volume. To extend
/// it would pass zeros off as what was there.
fn refuse_cut(path: &Path, length: Bytes, expected: Bytes) -> Result<()> {
    if length < expected {
        return Err(Error::DataCut {
            path: path.to_owned(),
            length,
            expected,
        });
    }
    Ok(())
}

/// Allocates `from..to`, or leaves the file as it was and says how much was missing.
fn allocate_or_undo(dir: &Dir, name: &str, data: &File, from: Bytes, to: Bytes) -> Result<()> {
    let path = dir.join(DATA);
    let before = facts(data, &path)?;
    let wanted = to.saturating_sub(from);
    let no_space = |free| Error::NoSpace {
        replica: name.to_owned(),
        wanted,
        free,
    };
    // Some filesystems hand out all they have before they find that it is not enough, and until it
    // is given back every other replica of the pool is out of space. So a wish that certainly cannot
    // be met is not tried: what lies behind the end of the file has not been allocated yet, and of
    // what lies before it no more than all that the file has.
    let behind_end = to.saturating_sub(before.length.max(from));
    let needed_min = behind_end.max(wanted.saturating_sub(before.allocated));
    let free = dir.space()?.free;
    if needed_min > free {
        return Err(no_space(free));
    }
    let errno = match allocate(data, from, to) {
        Ok(()) => return Ok(()),
        Err(errno) => errno,
    };
    // Part of the range may have been allocated. It is behind the end of the file, and setting the
    // length that the file has gives it back. Only where a crash had left the file longer than its
    // size is some of it before the end; that is kept, because nothing is ever cut off.
    extend(data, &path, before.length)?;
    match errno {
        Errno::NOSPC | Errno::DQUOT => Err(no_space(dir.space()?.free)),
        Errno::OPNOTSUPP | Errno::NOSYS => Err(Error::ThickUnsupported { path }),
        Errno::FBIG => Err(Error::FileTooLong { path, size: to }),
        errno => Err(failed("allocate", &path)(errno)),
    }
}
