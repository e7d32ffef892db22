//! A sparse volume in memory. It answers everything at once.
//!
//! Pages are immutable once written, and writes replace them. So a read hands out the page without a copy.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Buf, Bytes, BytesMut};
use trellis_iscsi::lun::{
    Answer, Chunks, Compared, Extent, Identity, Lun, LunError, chunks_len, first_difference,
};

use crate::identity_of;

const PAGE: u64 = 4096;
const PAGE_BYTES: usize = 4096;
/// Pages in one table.
const TABLE: u64 = 512;

static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// A volume in memory.
#[derive(Debug)]
pub struct RamLun {
    identity: Identity,
    block_size: u32,
    physical_block_size: u32,
    size: AtomicU64,
    read_only: AtomicBool,
    tables: Mutex<Tables>,
}

/// A part of a page.
struct Part {
    page: u64,
    start: usize,
    end: usize,
}

/// The parts of a range, page by page.
fn parts(offset: u64, len: u64) -> impl Iterator<Item = Part> {
    let mut at = offset;
    let end = offset + len;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let page = at / PAGE;
        let stop = end.min((page + 1) * PAGE);
        let within = |position: u64| usize::try_from(position - page * PAGE).unwrap_or(PAGE_BYTES);
        let part = Part {
            page,
            start: within(at),
            end: within(stop),
        };
        at = stop;
        Some(part)
    })
}

impl RamLun {
    /// An empty volume of `size` bytes.
    pub fn new(serial: &str, size: u64, block_size: u32) -> Self {
        RamLun {
            identity: identity_of(serial),
            block_size,
            physical_block_size: 4096,
            size: AtomicU64::new(size),
            read_only: AtomicBool::new(false),
            tables: Mutex::default(),
        }
    }

    /// The same with another physical block.
    pub fn with_physical_block_size(mut self, physical_block_size: u32) -> Self {
        self.physical_block_size = physical_block_size;
        self
    }

    /// Make it larger; a smaller size changes nothing.
    pub fn grow(&self, size: u64) {
        self.size.fetch_max(size, Ordering::SeqCst);
    }

    /// Let it be written to, or not.
    pub fn set_read_only(&self, read_only: bool) {
        self.read_only.store(read_only, Ordering::SeqCst);
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checked(&self, offset: u64, len: u64) -> Result<(), LunError> {
        let end = offset.checked_add(len).ok_or(LunError::OutOfRange)?;
        if end > self.size() {
            Err(LunError::OutOfRange)
        } else {
            Ok(())
        }
    }
}

type Tables = HashMap<u64, Vec<Option<Bytes>>>;

fn page_of(tables: &Tables, page: u64) -> Option<&Bytes> {
    let slot = usize::try_from(page % TABLE).ok()?;
    tables.get(&(page / TABLE))?.get(slot)?.as_ref()
}

fn slot_of(tables: &mut Tables, page: u64) -> &mut Option<Bytes> {
    let table = tables
        .entry(page / TABLE)
        .or_insert_with(|| vec![None; usize::try_from(TABLE).unwrap_or(0)]);
    let slot = usize::try_from(page % TABLE).unwrap_or(0);
    &mut table[slot]
}

fn read(tables: &Tables, offset: u64, len: u64) -> Chunks {
    let slice = |part: Part| match page_of(tables, part.page) {
        Some(bytes) => bytes.slice(part.start..part.end),
        None => Bytes::from_static(&ZEROS[part.start..part.end]),
    };
    parts(offset, len).map(slice).collect()
}

fn write(tables: &mut Tables, offset: u64, data: Chunks) {
    let len = u64::try_from(chunks_len(&data)).unwrap_or(0);
    let mut rest = data.into_iter();
    let mut piece = Bytes::new();
    for part in parts(offset, len) {
        let slot = slot_of(tables, part.page);
        let mut page = BytesMut::with_capacity(PAGE_BYTES);
        let before = slot.as_deref().unwrap_or(&ZEROS);
        page.extend_from_slice(&before[..part.start]);
        while page.len() < part.end {
            if piece.is_empty() {
                match rest.next() {
                    Some(next) => piece = next,
                    None => break,
                }
            }
            let step = piece.len().min(part.end - page.len());
            page.extend_from_slice(&piece[..step]);
            piece.advance(step);
        }
        page.extend_from_slice(&before[part.end..]);
        *slot = Some(page.freeze());
    }
}

fn zero_part(tables: &mut Tables, part: &Part) {
    let slot = slot_of(tables, part.page);
    if part.end - part.start == PAGE_BYTES {
        *slot = None;
    } else if let Some(before) = slot.take() {
        let mut page = BytesMut::from(&before[..]);
        page[part.start..part.end].fill(0);
        *slot = Some(page.freeze());
    }
}

impl Lun for RamLun {
    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn physical_block_size(&self) -> u32 {
        self.physical_block_size
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn read_only(&self) -> bool {
        self.read_only.load(Ordering::SeqCst)
    }

    fn volatile_cache(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, len: u32) -> Answer<Chunks> {
        let len = u64::from(len);
        Answer::Now(
            self.checked(offset, len)
                .map(|()| read(&self.tables(), offset, len)),
        )
    }

    fn write(&self, offset: u64, data: Chunks, _fua: bool) -> Answer<()> {
        let len = u64::try_from(chunks_len(&data)).unwrap_or(u64::MAX);
        Answer::Now(
            self.checked(offset, len)
                .map(|()| write(&mut self.tables(), offset, data)),
        )
    }

    fn zero(&self, offset: u64, len: u64, _deallocate: bool) -> Answer<()> {
        if let Err(error) = self.checked(offset, len) {
            return Answer::Now(Err(error));
        }
        let mut tables = self.tables();
        let first_table = offset / (TABLE * PAGE);
        let last_table = (offset + len) / (TABLE * PAGE);
        // Only what is there is visited: a range may be much larger than its data.
        let touched: Vec<u64> = tables
            .keys()
            .copied()
            .filter(|table| (first_table..=last_table).contains(table))
            .collect();
        for table in touched {
            let start = offset.max(table * TABLE * PAGE);
            let end = (offset + len).min((table + 1) * TABLE * PAGE);
            for part in parts(start, end.saturating_sub(start)) {
                zero_part(&mut tables, &part);
            }
        }
        Answer::Now(Ok(()))
    }

    fn flush(&self) -> Answer<()> {
        Answer::Now(Ok(()))
    }

    fn compare_and_write(
        &self,
        offset: u64,
        compare: Chunks,
        data: Chunks,
        _fua: bool,
    ) -> Answer<Compared> {
        let len = u64::try_from(chunks_len(&compare)).unwrap_or(u64::MAX);
        if let Err(error) = self.checked(offset, len) {
            return Answer::Now(Err(error));
        }
        let mut tables = self.tables();
        let found = read(&tables, offset, len);
        match first_difference(&found, &compare) {
            Some(at) => Answer::Now(Ok(Compared::Differs { at })),
            None => {
                write(&mut tables, offset, data);
                Answer::Now(Ok(Compared::Written))
            }
        }
    }

    fn extents(&self, offset: u64, len: u64, extents_max: usize) -> Answer<Vec<Extent>> {
        if let Err(error) = self.checked(offset, len) {
            return Answer::Now(Err(error));
        }
        let tables = self.tables();
        let mut extents: Vec<Extent> = Vec::new();
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let page = at / PAGE;
            let table = tables.get(&(page / TABLE));
            // A table that is not there is skipped as a whole: a volume may be much larger than its data.
            let stop = match table {
                Some(_) => (page + 1) * PAGE,
                None => (page / TABLE + 1) * TABLE * PAGE,
            };
            let step = stop.min(end) - at;
            let mapped = table.is_some() && page_of(&tables, page).is_some();
            let full = extents.len() == extents_max;
            match extents.last_mut() {
                Some(last) if last.mapped == mapped => last.len += step,
                _ if full => break,
                _ => extents.push(Extent { len: step, mapped }),
            }
            at += step;
        }
        Answer::Now(Ok(extents))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn now<T>(answer: Answer<T>) -> T {
        match answer {
            Answer::Now(result) => result.unwrap(),
            Answer::Later(_) => panic!("memory answers at once"),
        }
    }

    fn flat(chunks: &Chunks) -> Vec<u8> {
        chunks.iter().flatten().copied().collect()
    }

    #[test]
    fn what_is_written_is_read_and_the_rest_stays() {
        // Fails if a write that crosses pages loses its neighbours, or zeroing takes too much or too little.
        let lun = RamLun::new("t", 1 << 20, 512);
        now(lun.write(
            3584,
            vec![Bytes::from(vec![1; 512]), Bytes::from(vec![2; 1024])],
            false,
        ));
        let all = flat(&now(lun.read(0, 8192)));
        assert!(all[..3584].iter().all(|b| *b == 0) && all[5120..].iter().all(|b| *b == 0));
        assert!(all[3584..4096].iter().all(|b| *b == 1) && all[4096..5120].iter().all(|b| *b == 2));
        now(lun.zero(4096, 512, true));
        let all = flat(&now(lun.read(4096, 1024)));
        assert!(all[..512].iter().all(|b| *b == 0) && all[512..].iter().all(|b| *b == 2));
        now(lun.zero(4096, 4096, true));
        let extents = now(lun.extents(0, 1 << 20, 8));
        assert_eq!(
            extents,
            [
                Extent {
                    len: 4096,
                    mapped: true
                },
                Extent {
                    len: (1 << 20) - 4096,
                    mapped: false
                }
            ]
        );
    }
}
