//! The replica store: where one copy of a volume lives on a pool directory.
//!
//! ```text
//! POOL/lock                          flock: one owner a pool
//! POOL/pool-id                       a UUID: which pool this is, whatever its path
//! POOL/replicas/NAME/superblock.a    4 KiB: identity, size, what its memory must be, sequence, CRC32C
//! POOL/replicas/NAME/superblock.b    4 KiB: the same, or one size older
//! POOL/replicas/NAME/data            the bytes: a plain sparse file
//! POOL/replicas/NAME/about.json      whose volume and claim it is, readable without a store (module `survey`)
//! POOL/replicas/NAME/meta.*          of a replicated volume: promise, keys, stamps (module `meta`)
//! POOL/replicas/NAME/sums            of a replicated volume: a sum of every block (module `sums`)
//! POOL/replicas/NAME/note            of a replicated volume: how far the bytes are (module `note`)
//! POOL/replicas/.making-NAME/        a creation that has not been published
//! POOL/replicas/.removing-NAME/      a removal that has not been finished
//! ```
//!
//! # Why it looks like this
//!
//! **The size is what the superblock says.** It is one number in one block that is written with one sync. The length
//! of `data` is not the size: a length becomes durable whenever the filesystem pleases, a superblock when we say so.
//!
//! **Two superblocks in two files.** A write that is cut by a power loss can ruin the block that it was writing, so
//! there must be another one. They are two files, not two halves of one file, because things also go wrong with whole
//! files: an inode is lost, or a file is truncated, overwritten or deleted by hand. Both files are written in full at
//! creation. So a later superblock overwrites a block that the filesystem has already allocated, and a growth succeeds
//! on a pool that is full to the last block. (A filesystem that copies on write may still want a block.)
//!
//! **The data is a file that ordinary tools read**: `cp --sparse`, `losetup`, `qemu-img`, `xxd`.
//! Somebody who has lost everything but the disk can still mount it.
//!
//! # How it grows
//!
//! ```text
//!   data:  ftruncate to the new length            superblocks:  one valid pair (a5 b5)
//!        │
//!        ├─ crash here: `data` is longer than the size. It is kept and not counted.
//!        ▼
//!   slot b: write the new superblock, fdatasync   (a5 b6): THE commit, and the only sync
//!        │
//!        ├─ crash here: the larger sequence wins, b6.
//!        ▼
//!   slot a: write the same superblock, no sync    (a6 b6): a flaw in one no longer costs a size
//! ```
//!
//! One sync is enough. After a crash `data` may be shorter than the durable superblock says, because its length was
//! not synced. It is then extended when the replica is opened. That loses no byte: a byte in the new range is
//! acknowledged as durable only after a sync of `data`, and that sync makes the length durable too. A superblock
//! records the length to which this module has synced `data`; a served replica raises it before it answers the first
//! flush after a growth. A file shorter than *that* was cut by something else. It is refused rather than padded with
//! zeros that nobody wrote. A served replica, which can be repaired from others, first forgets what it held (module
//! `meta`).
//!
//! The second, unsynced write never endangers the first: it goes to the slot that did not commit,
//! and the next growth commits by overwriting that same slot. The slot that committed last is not
//! touched before the other has committed.
//!
//! A thick growth allocates the range first and syncs `data` before the commit, because there the allocation itself is
//! the promise. If there is no space, `data` is cut back to its former length, which is never below the size.
//!
//! # How it recovers
//!
//! A process can die between a write and its sync. Its successor then sees the write in the page cache although it is
//! not on the disk. If it acted on that, the size could go back after a power loss. So opening syncs first, drops the
//! clean pages, and believes only what it reads then. An unusable superblock is rewritten from the good one, with a
//! warning. If both are unusable, nothing is touched.
//!
//! Creation happens under a temporary name and is published by a rename; removal renames before it unlinks anything.
//! So whatever has a plain name is whole. Leftovers of both kinds are removed when the pool is opened.
//!
//! # Which pool it is
//!
//! A path is not a pool. If a disk is not mounted, its mount point is an empty directory, in which every replica would
//! seem to be absent and could be made again. So a pool has an id of its own. [`Pool::open_known`] refuses a directory
//! without the id that the caller remembers before it makes anything there. An open pool keeps the directory that it
//! has opened, whatever is mounted over the path later; [`Pool::is_current`] tells.
//!
//! # Who owns what
//!
//! A [`Pool`] holds the lock, and so does every [`Replica`] that came from it. All handles on one replica share one
//! state. So two of them cannot overwrite each other's superblocks, and a handle on a removed replica says so instead
//! of growing an unlinked file. A served replica belongs to the process that serves it (module `serve`); a pool can
//! still make, remove, count and measure replicas next to it.
//!
//! Deliberately absent: shrinking.

mod check;
mod check_data;
mod dir;
mod id;
mod meta;
mod name;
mod note;
mod pair;
mod pool;
mod serve;
mod store;
mod sums;
mod superblock;
mod survey;

use std::fmt;

use trellis_api::Bytes;
use uuid::Uuid;

use crate::{Error, Result};

pub use check::{Finding, Report, Severity, check};
pub use check_data::check_data;
pub(crate) use dir::{punch, zero};
pub use meta::MetaStore;
pub use name::NAME_LENGTH_MAX;
pub(crate) use note::NoteFile;
pub use pool::{Pool, PoolCapacity};
pub use store::{Measure, Replica};
pub(crate) use sums::{NearSums, SLOTS_MAX, SumFile};
pub use superblock::Fault;
pub use survey::{Survey, Surveyed, survey};

/// The unit of sizes and of superblocks.
pub const BLOCK: Bytes = Bytes::new(4096);

/// The largest size of a replica: 1 PiB, well inside what xfs can hold in a file.
pub const SIZE_MAX: Bytes = Bytes::new(1 << 50);

/// The most replicas that one pool holds. It bounds every walk over a pool.
pub const REPLICAS_MAX: usize = 16_384;

/// Whose bytes a replica holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The volume of which this is a copy.
    pub volume: Uuid,
    /// Which copy it is.
    pub replica: Uuid,
}

impl fmt::Display for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "replica {} of volume {}", self.replica, self.volume)
    }
}

/// Whether space is taken from the pool when it is promised or when it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Provisioning {
    /// When it is written: the data file is sparse.
    Thin,
    /// When it is promised: every block is allocated before the size is raised.
    Thick,
}

/// How the bytes of a replica are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Where they lie, as the only copy of a volume.
    InPlace,
    /// By a process that serves it, as a copy of several. Its memory is made with it.
    Served,
}

/// What a growth has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The replica had that size already.
    Unchanged,
    /// The replica has a larger size, durably.
    Raised {
        /// The size before.
        from: Bytes,
        /// The size now.
        to: Bytes,
    },
}

/// A size that a replica may have.
fn validate_size(size: Bytes) -> Result<()> {
    if size > SIZE_MAX {
        return Err(Error::SizeTooLarge { size });
    }
    if size == Bytes::ZERO || !size.get().is_multiple_of(BLOCK.get()) {
        return Err(Error::SizeNotBlocks { size });
    }
    Ok(())
}
