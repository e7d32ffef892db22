//! A view of a file in which every write stays in memory.
//!
//! The database library repairs while it opens, and a repair of a damaged file changes it. So a file is first opened
//! through this view: whatever the library does, the file stays as it was found.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Granularity at which changed ranges are kept.
const BLOCK_BYTES: u64 = 4096;

/// The view; give it to `redb::Builder::create_with_backend`.
#[derive(Debug)]
pub(super) struct Overlay {
    file: File,
    changed: Mutex<Changed>,
}

#[derive(Debug)]
struct Changed {
    len: u64,
    /// Bytes of the file at and beyond this offset are no longer visible.
    file_visible: u64,
    blocks: BTreeMap<u64, Vec<u8>>,
}

impl Overlay {
    /// A view of `file` as it is now.
    pub(super) fn new(file: File) -> io::Result<Overlay> {
        let len = file.metadata()?.len();
        Ok(Overlay {
            file,
            changed: Mutex::new(Changed {
                len,
                file_visible: len,
                blocks: BTreeMap::new(),
            }),
        })
    }

    fn changed(&self) -> MutexGuard<'_, Changed> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn block(&self, changed: &Changed, index: u64) -> io::Result<Vec<u8>> {
        if let Some(block) = changed.blocks.get(&index) {
            return Ok(block.clone());
        }
        let start = index * BLOCK_BYTES;
        let mut block = vec![0; size(BLOCK_BYTES)?];
        let visible = size(changed.file_visible.saturating_sub(start).min(BLOCK_BYTES))?;
        self.file.read_exact_at(&mut block[..visible], start)?;
        Ok(block)
    }
}

impl redb::StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.changed().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let changed = self.changed();
        let end = end_of(offset, out.len())?;
        if end > changed.len {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        let mut at = offset;
        while at < end {
            let block = self.block(&changed, at / BLOCK_BYTES)?;
            let within = size(at % BLOCK_BYTES)?;
            let count = (block.len() - within).min(size(end - at)?);
            let to = size(at - offset)?;
            out[to..to + count].copy_from_slice(&block[within..within + count]);
            at = end_of(at, count)?;
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut changed = self.changed();
        changed.len = len;
        changed.file_visible = changed.file_visible.min(len);
        let first_gone = len.div_ceil(BLOCK_BYTES);
        changed.blocks.split_off(&first_gone);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut changed = self.changed();
        let end = end_of(offset, data.len())?;
        let mut at = offset;
        while at < end {
            let index = at / BLOCK_BYTES;
            let mut block = self.block(&changed, index)?;
            let within = size(at % BLOCK_BYTES)?;
            let count = (block.len() - within).min(size(end - at)?);
            let from = size(at - offset)?;
            block[within..within + count].copy_from_slice(&data[from..from + count]);
            changed.blocks.insert(index, block);
            at = end_of(at, count)?;
        }
        changed.len = changed.len.max(end);
        Ok(())
    }
}

fn size(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn end_of(offset: u64, count: usize) -> io::Result<u64> {
    u64::try_from(count)
        .ok()
        .and_then(|count| offset.checked_add(count))
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use redb::StorageBackend;

    #[test]
    fn writes_are_read_back_and_the_file_stays() {
        // Fails if a write reaches the file, or if a read misses a write that crosses blocks.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![7; 10_000]).unwrap();
        let overlay = Overlay::new(File::open(&path).unwrap()).unwrap();
        overlay.write(4090, &[1; 20]).unwrap();
        let mut out = [0; 30];
        overlay.read(4085, &mut out).unwrap();
        assert_eq!(out[..5], [7; 5]);
        assert_eq!(out[5..25], [1; 20]);
        assert_eq!(out[25..], [7; 5]);
        overlay.set_len(4092).unwrap();
        overlay.set_len(20_000).unwrap();
        let mut tail = [9; 8];
        overlay.read(8000, &mut tail).unwrap();
        assert_eq!(tail, [0; 8]);
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; 10_000]);
    }
}
