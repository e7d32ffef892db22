//! The checksums of a replica's blocks, as its disk uses them: stored before every write, compared after every read,
//! settled from time to time. [`crate::sums`] has the rules.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::proto::{Content, Epoch, Geometry, Meta, MetaChange, Region};
use crate::replica::{BLOCK, Replica, SLOTS_MAX, SumFile};
use crate::sums::{Coverage, Doubt, Ended, Slot, Summer, newest_after};
use crate::{Error, Result};

/// How often sums are settled while there are writes. After a power loss, the bytes of regions that were written since
/// then are believed as they are.
const SETTLE_EVERY: Duration = Duration::from_secs(10);

/// When nothing was written for so long, they are settled at once.
const SETTLE_IDLE: Duration = Duration::from_secs(2);

/// Slots that are kept in memory, so that a write need not read what it overwrites: pages of the file, each for
/// 2 MiB of data.
const PAGES: usize = 1024;
const SLOTS_PER_PAGE: u64 = 512;

/// Takes sums of blocks of 4 KiB.
pub(super) fn summer() -> &'static Summer {
    static SUMMER: OnceLock<Summer> = OnceLock::new();
    SUMMER.get_or_init(|| Summer::new(block_bytes()))
}

fn block_bytes() -> usize {
    usize::try_from(BLOCK.get()).unwrap_or(usize::MAX)
}

fn block_of(offset: u64) -> u64 {
    offset / BLOCK.get()
}

/// How many blocks that many bytes are.
fn blocks_in(length: u64) -> usize {
    usize::try_from(length / BLOCK.get()).unwrap_or(usize::MAX)
}

/// The blocks of what was read that do not match their slots, counted from the first.
pub(super) fn rotten(content: &Content, slots: &[Slot], coverage: Coverage) -> Vec<u32> {
    let mut bad = Vec::new();
    let mut judge = |index: usize, sum: u32, slot: &Slot| {
        if !slot.admits(sum, coverage) {
            bad.push(u32::try_from(index).unwrap_or(u32::MAX));
        }
    };
    match content {
        Content::Zeros(_) => {
            for (index, slot) in slots.iter().enumerate() {
                judge(index, 0, slot);
            }
        }
        Content::Data(data) => {
            for (index, (sum, slot)) in summer().sums(data).zip(slots).enumerate() {
                judge(index, sum, slot);
            }
        }
    }
    bad
}

/// Slots of pages that were used lately.
struct Pages(Vec<Option<(u64, Box<[Slot]>)>>);

impl Pages {
    fn new() -> Pages {
        Pages(std::iter::repeat_with(|| None).take(PAGES).collect())
    }

    /// The page with that block, and the block's place in it.
    fn page(&mut self, file: &SumFile, block: u64) -> io::Result<(&mut [Slot], usize)> {
        let page = block / SLOTS_PER_PAGE;
        let home = usize::try_from(page).unwrap_or(0) % PAGES;
        let kept = &mut self.0[home];
        if kept.as_ref().is_none_or(|(of, _)| *of != page) {
            let count = usize::try_from(SLOTS_PER_PAGE).unwrap_or(0);
            let mut slots = vec![Slot::default(); count].into_boxed_slice();
            file.load(page * SLOTS_PER_PAGE, &mut slots)?;
            *kept = Some((page, slots));
        }
        let at = usize::try_from(block % SLOTS_PER_PAGE).unwrap_or(0);
        match kept {
            Some((_, slots)) => Ok((slots, at)),
            None => Err(io::Error::other("a page of sums went away")),
        }
    }

    fn forget(&mut self) {
        self.0.fill_with(|| None);
    }
}

/// The sums of one replica, in the hands of the thread that writes its bytes.
pub(super) struct SumKeeper {
    file: Arc<SumFile>,
    pages: Pages,
    /// No write that is still to come has an epoch before this one.
    newest: Epoch,
    settler: Settler,
}

/// Slots as they were before a write.
pub(super) struct Overwritten {
    first: u64,
    slots: Vec<Slot>,
}

impl SumKeeper {
    /// Sorts out what the last process left, and starts to keep the sums. Also returns the doubtful regions with
    /// rotten blocks. `applied` is the epoch of the last entry that was applied.
    pub(super) fn start(
        replica: &Replica,
        file: SumFile,
        meta: &Meta,
        applied: Epoch,
        ended: Ended,
    ) -> Result<(SumKeeper, Vec<Region>)> {
        let rotten = sort_out(replica, &file, meta, ended)?;
        let file = Arc::new(file);
        let keeper = SumKeeper {
            settler: Settler::start(replica.data_again()?, Arc::clone(&file))?,
            file,
            pages: Pages::new(),
            newest: applied,
        };
        Ok((keeper, rotten))
    }

    pub(super) fn file(&self) -> &Arc<SumFile> {
        &self.file
    }

    /// A change of the meta data is about to be made.
    pub(super) fn changes(&mut self, change: &MetaChange) {
        self.newest = newest_after(self.newest, change);
    }

    /// The slots of blocks inside one region.
    fn slots(&mut self, first: u64, count: usize) -> io::Result<&mut [Slot]> {
        let (page, at) = self.pages.page(&self.file, first)?;
        page.get_mut(at..at + count)
            .ok_or_else(|| io::Error::other("blocks of two regions at once"))
    }

    /// Stores the sums of the bytes or zeros that are about to be written. The write must follow.
    pub(super) fn before_write(
        &mut self,
        data: &File,
        offset: u64,
        content: &Content,
    ) -> io::Result<Overwritten> {
        let (first, count) = (block_of(offset), blocks_in(content.length()));
        let coverage = self.file.coverage();
        let mut old = self.slots(first, count)?.to_vec();
        if coverage == Coverage::Partial {
            // What it holds must be known before it is overwritten: a process may die in between.
            for (block, slot) in (first..).zip(&mut old) {
                if slot.is_unknown(coverage) {
                    *slot = Slot::of(sum_on_disk(data, block)?);
                }
            }
        }
        self.file.written(self.newest).map_err(io::Error::other)?;
        let new: Vec<Slot> = match content {
            Content::Data(bytes) => {
                let sums = summer().sums(bytes).zip(&old);
                sums.map(|(sum, old)| old.overwritten(sum)).collect()
            }
            Content::Zeros(_) => old.iter().map(|old| old.overwritten(0)).collect(),
        };
        self.store(first, &new)?;
        Ok(Overwritten { first, slots: old })
    }

    /// Gives the slots of a range their space.
    pub(super) fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        let place = self
            .file
            .place_of_slots(block_of(offset), blocks_in(length));
        let (file, at, bytes) = place;
        super::room::allocate(file, at, bytes)
    }

    fn store(&mut self, first: u64, new: &[Slot]) -> io::Result<()> {
        let kept = self.slots(first, new.len())?;
        if kept == new {
            // Zeros over zeros: the file keeps its hole.
            return Ok(());
        }
        kept.copy_from_slice(new);
        let stored = self.file.store(first, new);
        if stored.is_err() {
            // Only the file knows now.
            self.pages.forget();
        }
        stored
    }

    /// The write has failed: some blocks may hold the new bytes, some the old ones. A block that holds neither stays
    /// as it is, and is not returned.
    pub(super) fn write_failed(&mut self, data: &File, before: &Overwritten) {
        for (block, old) in (before.first..).zip(&before.slots) {
            let sorted = sum_on_disk(data, block).and_then(|sum| {
                if sum == old.sum {
                    self.store(block, &[Slot::of(sum)])?;
                }
                Ok(())
            });
            if let Err(error) = sorted {
                tracing::warn!("{}: {error}", self.file.path().display());
            }
        }
    }

    /// The blocks of what was read at once that do not match their sums.
    pub(super) fn rotten(&mut self, offset: u64, content: &Content) -> io::Result<Vec<u32>> {
        let coverage = self.file.coverage();
        let slots = self.slots(block_of(offset), blocks_in(content.length()))?;
        Ok(rotten(content, slots, coverage))
    }

    /// Settles the sums if it is time to.
    pub(super) fn look(&mut self, now: Instant) {
        self.settler.look(now, self.newest, &self.file);
    }
}

impl Drop for SumKeeper {
    /// Nothing is written any more, so the next process that opens the replica has nothing to sort out.
    fn drop(&mut self) {
        self.settler.finish(self.newest, &self.file);
    }
}

/// The blocks of what a thread has read that do not match their sums.
pub(super) fn rotten_in_file(
    file: &SumFile,
    offset: u64,
    content: &Content,
) -> io::Result<Vec<u32>> {
    let mut slots = vec![Slot::default(); blocks_in(content.length())];
    file.load(block_of(offset), &mut slots)?;
    Ok(rotten(content, &slots, file.coverage()))
}

/// The blocks that a range of bytes has, as slots to be read into.
pub(super) fn slots_of(offset: u64, length: u64) -> (u64, Vec<Slot>) {
    (block_of(offset), vec![Slot::default(); blocks_in(length)])
}

fn sum_on_disk(data: &File, block: u64) -> io::Result<u32> {
    let mut bytes = vec![0; block_bytes()];
    read_to_end(data, block * BLOCK.get(), &mut bytes)?;
    Ok(summer().sum(&bytes))
}

/// What is behind the end of the file is zeros.
fn read_to_end(data: &File, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut have = 0;
    while have < bytes.len() {
        let at = offset + u64::try_from(have).unwrap_or(0);
        match data.read_at(&mut bytes[have..], at) {
            Ok(0) => {
                bytes[have..].fill(0);
                break;
            }
            Ok(read) => have += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Checks all doubtful regions, so that from now on a block that does not match its sum is rot.
fn sort_out(replica: &Replica, file: &SumFile, meta: &Meta, ended: Ended) -> Result<Vec<Region>> {
    let began = Instant::now();
    let mut bytes = vec![0; SLOTS_MAX * block_bytes()];
    let (mut regions, mut doubts) = (0_u64, 0_usize);
    let sorted = crate::sums::sort_out(meta, file.settled(), ended, |region| {
        let extent = Geometry::STANDARD.extent(region, meta.size);
        regions += 1;
        let found = look_at(replica, file, extent, &mut bytes);
        let found = found.unwrap_or_else(|error| {
            // Whoever reads there is told so, and mends it.
            tracing::warn!("{}: {error}", replica.data_path().display());
            Vec::new()
        });
        doubts += found.len();
        found
    });
    for (block, slot) in &sorted.slots {
        let stored = file.store(*block, &[*slot]);
        stored.map_err(|source| Error::Io {
            doing: "write",
            path: file.path().to_owned(),
            source,
        })?;
    }
    if regions > 0 {
        tracing::info!(
            replica = replica.name(),
            regions,
            doubts,
            believed = sorted.slots.len(),
            rotten = sorted.rotten.len(),
            took = ?began.elapsed(),
            "sorted out the sums of what was written last"
        );
    }
    Ok(sorted.rotten)
}

/// The blocks of a region that do not match their sums.
fn look_at(
    replica: &Replica,
    file: &SumFile,
    (offset, length): (u64, u64),
    bytes: &mut [u8],
) -> io::Result<Vec<Doubt>> {
    let (first, mut slots) = slots_of(offset, length);
    let bytes = &mut bytes[..slots.len() * block_bytes()];
    file.load(first, &mut slots)?;
    read_to_end(replica.data(), offset, bytes)?;
    let coverage = file.coverage();
    let blocks = (first..).zip(slots).zip(summer().sums(bytes));
    Ok(blocks
        .filter(|((_, slot), sum)| !slot.admits(*sum, coverage))
        .map(|((block, slot), sum)| Doubt { block, slot, sum })
        .collect())
}

/// Syncs bytes and sums together, on a thread of its own.
struct Settler {
    /// A file description of its own: the error of a sync is told once to each.
    data: Arc<File>,
    queue: Option<Sender<(Epoch, u64)>>,
    thread: Option<JoinHandle<()>>,
    is_busy: Arc<AtomicBool>,
    /// The writes that the last settling has seen.
    settled_writes: u64,
    settled_at: Instant,
    seen_writes: u64,
    seen_at: Instant,
}

impl Settler {
    fn start(data: File, file: Arc<SumFile>) -> Result<Settler> {
        let (queue, jobs) = channel::<(Epoch, u64)>();
        let is_busy = Arc::new(AtomicBool::new(false));
        let data = Arc::new(data);
        let (busy, bytes) = (Arc::clone(&is_busy), Arc::clone(&data));
        let run = move || {
            while let Ok((newest, writes)) = jobs.recv() {
                settle(&bytes, &file, newest, writes);
                busy.store(false, Ordering::Release);
            }
        };
        let thread = std::thread::Builder::new()
            .name("replica-sums".to_owned())
            .spawn(run)
            .map_err(|source| Error::Thread { source })?;
        let now = Instant::now();
        Ok(Settler {
            data,
            queue: Some(queue),
            thread: Some(thread),
            is_busy,
            settled_writes: 0,
            settled_at: now,
            seen_writes: 0,
            seen_at: now,
        })
    }

    fn look(&mut self, now: Instant, newest: Epoch, file: &SumFile) {
        let writes = file.writes();
        if writes != self.seen_writes {
            (self.seen_writes, self.seen_at) = (writes, now);
        }
        let is_due = now.duration_since(self.settled_at) >= SETTLE_EVERY
            || now.duration_since(self.seen_at) >= SETTLE_IDLE;
        if writes == self.settled_writes || !is_due || self.is_busy.load(Ordering::Acquire) {
            return;
        }
        (self.settled_writes, self.settled_at) = (writes, now);
        self.is_busy.store(true, Ordering::Release);
        if let Some(queue) = &self.queue {
            // A thread that is gone has panicked, and has said so.
            let _ = queue.send((newest, writes));
        }
    }

    fn finish(&mut self, newest: Epoch, file: &SumFile) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if file.writes() != self.settled_writes {
            settle(&self.data, file, newest, file.writes());
        }
    }
}

fn settle(data: &File, file: &SumFile, newest: Epoch, writes: u64) {
    // If it fails, less is settled than could be: after a power loss more is sorted out.
    if let Err(error) = data.sync_data() {
        tracing::warn!(
            "could not sync the data of {}: {error}",
            file.path().display()
        );
        return;
    }
    if let Err(error) = file.settle(newest, writes) {
        tracing::warn!("{}", super::in_full(&error));
    }
}
