//! The two superblock files of a replica: which one counts, and how the next one is committed.
//!
//! Invariant: the slot that committed last is not written before the other slot has committed. So at every moment one
//! slot on the disk is whole and no older than the last commit.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::Advice;
use rustix::io::Errno;

use super::BLOCK;
use super::dir::{Dir, facts, failed, sync_data};
use super::superblock::{Fault, LENGTH, Slot, Superblock};
use crate::{Error, Result};

/// What the two slots hold.
pub(super) type Slots = [std::result::Result<Superblock, Fault>; 2];

/// The open superblock files, and the slot that holds the last commit.
#[derive(Debug)]
pub(super) struct Pair {
    files: [File; 2],
    paths: [PathBuf; 2],
    committed: Slot,
    superblock: Superblock,
}

impl Pair {
    /// Writes both files of a new replica and syncs them. The directory is the caller's to sync.
    pub(super) fn create(dir: &Dir, superblock: Superblock) -> Result<Pair> {
        let files = [
            dir.make_file(Slot::A.file_name())?,
            dir.make_file(Slot::B.file_name())?,
        ];
        let pair = Pair {
            files,
            paths: paths(dir),
            committed: Slot::A,
            superblock,
        };
        for slot in Slot::BOTH {
            pair.write(slot, &superblock)?;
            pair.sync(slot)?;
        }
        Ok(pair)
    }

    /// Opens the pair as a crash, a disk or a person may have left it, and makes it whole.
    ///
    /// `agree` sees the superblock that counts before anything is changed, and may refuse.
    pub(super) fn recover(
        dir: &Dir,
        replica: &str,
        agree: impl FnOnce(&Superblock) -> Result<()>,
    ) -> Result<Pair> {
        let mut found = Vec::with_capacity(2);
        for slot in Slot::BOTH {
            let file = dir.file(slot.file_name())?;
            if let Some(file) = &file {
                // A dead process may have written this without a sync. Nothing that is only in
                // memory may be believed, because a power loss would take it back.
                sync_data(file, &dir.join(slot.file_name()))?;
            }
            found.push(file);
        }
        let slots = [
            read_slot(dir, found[0].as_ref(), Slot::A)?,
            read_slot(dir, found[1].as_ref(), Slot::B)?,
        ];
        let (committed, superblock) = choose(dir, replica, &slots)?;
        agree(&superblock)?;
        let mut open = |slot: Slot| match found[slot.index()].take() {
            Some(file) => Ok(file),
            None => dir.make_file(slot.file_name()),
        };
        let files = [open(Slot::A)?, open(Slot::B)?];
        let pair = Pair {
            files,
            paths: paths(dir),
            committed,
            superblock,
        };
        // One good superblock is enough to serve the bytes. Where the other cannot be rewritten, for
        // lack of space or by a flaw of the disk, it is tried again by the next growth or opening.
        if let Err(error) = pair.settle(dir, replica, &slots[committed.other().index()]) {
            tracing::warn!(replica, "a superblock could not be repaired: {error}");
        }
        Ok(pair)
    }

    /// Opens the pair of a replica that another process serves, and changes nothing.
    pub(super) fn look(dir: &Dir, replica: &str) -> Result<Pair> {
        let open = |slot: Slot| {
            let name = slot.file_name();
            dir.file(name)?
                .ok_or(Errno::NOENT)
                .map_err(failed("open", &dir.join(name)))
        };
        let files = [open(Slot::A)?, open(Slot::B)?];
        let slots = [
            read_slot(dir, Some(&files[0]), Slot::A)?,
            read_slot(dir, Some(&files[1]), Slot::B)?,
        ];
        let (committed, superblock) = choose(dir, replica, &slots)?;
        Ok(Pair {
            files,
            paths: paths(dir),
            committed,
            superblock,
        })
    }

    /// Brings the slot that does not count to the state of the one that does, durably.
    fn settle(
        &self,
        dir: &Dir,
        replica: &str,
        other: &std::result::Result<Superblock, Fault>,
    ) -> Result<()> {
        let slot = self.committed.other();
        if *other == Ok(self.superblock) {
            return Ok(());
        }
        self.write(slot, &self.superblock)?;
        self.sync(slot)?;
        // The file may be new.
        dir.sync()?;
        if let Err(fault) = other {
            tracing::warn!(
                replica,
                size = %self.superblock.size,
                "{} {fault}; it was rewritten from {}",
                self.path(slot).display(),
                self.path(self.committed).display(),
            );
        }
        Ok(())
    }

    /// Makes `next` the superblock that counts. Durable when this returns, by one sync.
    ///
    /// An error leaves open whether it counts: the slot holds the old, the new or a torn superblock,
    /// and the same slot is written again by the next commit.
    pub(super) fn commit(&mut self, next: Superblock) -> Result<()> {
        assert!(
            next.sequence > self.superblock.sequence,
            "superblocks must follow each other"
        );
        let slot = self.committed.other();
        self.write(slot, &next)?;
        self.sync(slot)?;
        self.committed = slot;
        self.superblock = next;
        Ok(())
    }

    /// Writes `next` without waiting for the disk. It survives this process; after a power loss the last commit may
    /// count again. It goes to the slot that the next commit overwrites.
    pub(super) fn note(&mut self, next: Superblock) -> Result<()> {
        assert!(
            next.sequence > self.superblock.sequence,
            "superblocks must follow each other"
        );
        self.write(self.committed.other(), &next)?;
        self.superblock = next;
        Ok(())
    }

    /// Writes the superblock that counts into the other slot as well, without waiting for the disk.
    /// From then on a flaw in either slot costs nothing.
    pub(super) fn mirror(&self) {
        let slot = self.committed.other();
        if let Err(error) = self.write(slot, &self.superblock) {
            let path = self.path(slot).display();
            tracing::warn!(
                "the second copy of a superblock, {path}, could not be written: {error}"
            );
        }
    }

    /// The superblock that counts, as last committed, noted or recovered.
    pub(super) fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// What another process may have committed meanwhile, made durable before it is believed.
    pub(super) fn read_shared(&self, dir: &Dir, replica: &str) -> Result<Superblock> {
        for slot in Slot::BOTH {
            self.sync(slot)?;
        }
        self.read_again(dir, replica)
    }

    /// Whether another process has committed a superblock since this pair was opened.
    pub(super) fn is_behind(&self) -> bool {
        Slot::BOTH.into_iter().any(|slot| {
            let mut bytes = [0; LENGTH];
            let read = self.files[slot.index()].read_exact_at(&mut bytes, 0);
            read.is_ok()
                && Superblock::decode(bytes, slot)
                    .is_ok_and(|found| found.sequence > self.superblock.sequence)
        })
    }

    /// Reads both slots again, from the disk as far as the kernel lets us, and says what counts.
    pub(super) fn read_again(&self, dir: &Dir, replica: &str) -> Result<Superblock> {
        let slots = [
            read_slot(dir, Some(&self.files[0]), Slot::A)?,
            read_slot(dir, Some(&self.files[1]), Slot::B)?,
        ];
        choose(dir, replica, &slots).map(|(_, superblock)| superblock)
    }

    fn write(&self, slot: Slot, superblock: &Superblock) -> Result<()> {
        let file = &self.files[slot.index()];
        let fail = |source| Error::Io {
            doing: "write",
            path: self.path(slot).clone(),
            source,
        };
        file.write_all_at(&superblock.encode(slot), 0)
            .map_err(fail)?;
        // Something may have made the file longer than a superblock; that was one of its faults.
        if facts(file, self.path(slot))?.length > BLOCK {
            file.set_len(BLOCK.get()).map_err(fail)?;
        }
        Ok(())
    }

    fn sync(&self, slot: Slot) -> Result<()> {
        sync_data(&self.files[slot.index()], self.path(slot))
    }

    fn path(&self, slot: Slot) -> &PathBuf {
        &self.paths[slot.index()]
    }
}

fn paths(dir: &Dir) -> [PathBuf; 2] {
    Slot::BOTH.map(|slot| dir.join(slot.file_name()))
}

/// The superblock that counts, read without changing anything.
pub(super) fn committed(dir: &Dir, replica: &str) -> Result<Superblock> {
    let read = |slot: Slot| read_slot(dir, dir.file_read_only(slot.file_name())?.as_ref(), slot);
    let slots = [read(Slot::A)?, read(Slot::B)?];
    choose(dir, replica, &slots).map(|(_, superblock)| superblock)
}

/// Which slot counts: the whole one with the larger sequence.
pub(super) fn choose(dir: &Dir, replica: &str, slots: &Slots) -> Result<(Slot, Superblock)> {
    let [path_a, path_b] = paths(dir);
    // A later Trellis was here. What it wrote beside its superblocks is unknown to us, so that an
    // older superblock in the other slot must not be believed either.
    for (slot, path) in slots.iter().zip([&path_a, &path_b]) {
        match slot {
            Err(Fault::Version { version }) => {
                return Err(Error::FormatUnknown {
                    path: path.clone(),
                    version: *version,
                });
            }
            Err(Fault::Features { unknown }) => {
                return Err(Error::FeaturesUnknown {
                    path: path.clone(),
                    unknown: *unknown,
                });
            }
            _ => {}
        }
    }
    match slots {
        [Ok(a), Ok(b)] if contradict(a, b) => Err(Error::SuperblocksContradict { path_a, path_b }),
        [Ok(a), Ok(b)] if b.sequence > a.sequence => Ok((Slot::B, *b)),
        [Ok(a), _] => Ok((Slot::A, *a)),
        [Err(_), Ok(b)] => Ok((Slot::B, *b)),
        [Err(fault_a), Err(fault_b)] => Err(Error::SuperblocksBad {
            replica: replica.to_owned(),
            path_a,
            fault_a: *fault_a,
            path_b,
            fault_b: *fault_b,
        }),
    }
}

/// Whether two whole superblocks cannot come from one history: another identity, the same number
/// with other contents, or a size that went down.
fn contradict(a: &Superblock, b: &Superblock) -> bool {
    let (older, newer) = if a.sequence <= b.sequence {
        (a, b)
    } else {
        (b, a)
    };
    older.identity != newer.identity
        || (older.sequence == newer.sequence && older != newer)
        || older.size > newer.size
        || older.generation > newer.generation
}

/// Reads one slot. A flaw of the disk or of the bytes is a fault, which the other slot can make up
/// for; any other error of the operating system is an error, and must not lead to a rewrite.
pub(super) fn read_slot(
    dir: &Dir,
    file: Option<&File>,
    slot: Slot,
) -> Result<std::result::Result<Superblock, Fault>> {
    let Some(file) = file else {
        return Ok(Err(Fault::Absent));
    };
    let path = dir.join(slot.file_name());
    let length = facts(file, &path)?.length;
    if length != BLOCK {
        return Ok(Err(Fault::Length { length }));
    }
    // After a sync that failed, the kernel shows what was written as if it had worked. Dropping the
    // clean pages makes it ask the disk. It is a request; where it is refused, there is no disk.
    let _ = rustix::fs::fadvise(file, 0, NonZeroU64::new(BLOCK.get()), Advice::DontNeed);
    let mut bytes = [0; LENGTH];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => Ok(Superblock::decode(bytes, slot)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Err(Fault::Length {
            length: facts(file, &path)?.length,
        })),
        Err(source) => match Errno::from_io_error(&source) {
            Some(errno @ (Errno::IO | Errno::BADMSG | Errno::UCLEAN | Errno::ILSEQ)) => {
                Ok(Err(Fault::Unreadable { errno }))
            }
            _ => Err(Error::Io {
                doing: "read",
                path,
                source,
            }),
        },
    }
}
