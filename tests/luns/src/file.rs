//! A volume in a sparse file, with ordinary system calls.

use std::fs::File;
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use bytes::{Buf, Bytes};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::{Errno, pread, pwritev};
use trellis_iscsi::limits::SPAN_BYTES_MIN;
use trellis_iscsi::lun::{
    Answer, Chunks, Compared, Extent, Identity, Lun, LunError, LunResult, Span, chunks_len,
    first_difference,
};

use crate::identity_of;
use crate::spare::{PIECE_BYTES, Spare};

/// A read up to this size has a buffer of its own.
const SMALL_BYTES_MAX: usize = 16 << 10;
/// Slices in one call.
const SLICES_MAX: usize = 256;

/// A volume in a file.
#[derive(Debug)]
pub struct FileLun {
    identity: Identity,
    block_size: u32,
    size: AtomicU64,
    inline: bool,
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: Arc<File>,
    spare: Arc<Spare>,
    /// Writers share it; a compare-and-write has it alone.
    alone: RwLock<()>,
}

fn error_of(error: Errno) -> LunError {
    match error {
        Errno::NOSPC | Errno::DQUOT => LunError::NoSpace,
        Errno::ROFS | Errno::PERM => LunError::ReadOnly,
        _ => LunError::Medium,
    }
}

impl FileLun {
    /// Open or make a file of at least `size` bytes. With `inline`, system calls are made on the calling thread: right
    /// for a file in memory, wrong for a disk.
    ///
    /// # Errors
    /// The file cannot be opened or extended.
    pub fn open(path: &Path, size: u64, block_size: u32, inline: bool) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let size = size.max(file.metadata()?.len() / u64::from(block_size) * u64::from(block_size));
        file.set_len(size)?;
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        Ok(FileLun {
            identity: identity_of(&name),
            block_size,
            size: AtomicU64::new(size),
            inline,
            inner: Arc::new(Inner {
                file: Arc::new(file),
                spare: Arc::default(),
                alone: RwLock::new(()),
            }),
        })
    }

    /// Make it larger; a smaller size changes nothing.
    ///
    /// # Errors
    /// The file cannot be extended.
    pub fn grow(&self, size: u64) -> io::Result<()> {
        if size > self.size() {
            self.inner.file.set_len(size)?;
            self.size.fetch_max(size, Ordering::SeqCst);
        }
        Ok(())
    }

    fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Inner) -> LunResult<T> + Send + 'static,
    ) -> Answer<T> {
        if self.inline {
            return Answer::Now(call(&self.inner));
        }
        let inner = Arc::clone(&self.inner);
        let handle = tokio::task::spawn_blocking(move || call(&inner));
        Answer::later(async move { handle.await.unwrap_or(Err(LunError::NotReady)) })
    }
}

impl Inner {
    fn read(&self, mut offset: u64, len: u32) -> LunResult<Chunks> {
        let mut left = usize::try_from(len).map_err(|_| LunError::OutOfRange)?;
        if left <= SMALL_BYTES_MAX {
            let mut data = vec![0; left];
            self.fill(&mut data, offset)?;
            return Ok(vec![Bytes::from(data)]);
        }
        let mut chunks = Vec::with_capacity(left.div_ceil(PIECE_BYTES));
        while left > 0 {
            let len = left.min(PIECE_BYTES);
            let mut piece = self.spare.take(len);
            self.fill(piece.room(), offset)?;
            left -= len;
            offset += u64::try_from(len).map_err(|_| LunError::OutOfRange)?;
            chunks.push(Bytes::from_owner(piece));
        }
        Ok(chunks)
    }

    fn fill(&self, room: &mut [u8], offset: u64) -> LunResult<()> {
        let mut done = 0;
        while done < room.len() {
            let at = offset + u64::try_from(done).map_err(|_| LunError::OutOfRange)?;
            match pread(&self.file, &mut room[done..], at) {
                Ok(0) => return Err(LunError::Medium),
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error_of(error)),
            }
        }
        Ok(())
    }

    fn write(&self, mut offset: u64, mut data: Chunks, fua: bool) -> LunResult<()> {
        let mut first = 0;
        while first < data.len() {
            let slices: Vec<IoSlice<'_>> = data[first..]
                .iter()
                .take(SLICES_MAX)
                .map(|piece| IoSlice::new(piece))
                .collect();
            let mut written = match pwritev(&self.file, &slices, offset) {
                Ok(written) => written,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error_of(error)),
            };
            offset += u64::try_from(written).map_err(|_| LunError::OutOfRange)?;
            while first < data.len() && written >= data[first].len() {
                written -= data[first].len();
                first += 1;
            }
            if written > 0 {
                data[first].advance(written);
            }
        }
        if fua { self.flush() } else { Ok(()) }
    }

    fn flush(&self) -> LunResult<()> {
        rustix::fs::fdatasync(&self.file).map_err(error_of)
    }

    fn extents(&self, offset: u64, len: u64, extents_max: usize) -> LunResult<Vec<Extent>> {
        let end = offset + len;
        let mut extents = Vec::new();
        let mut at = offset;
        while at < end && extents.len() < extents_max {
            let data = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                Err(error) => return Err(error_of(error)),
            };
            let (next, mapped) = if data > at {
                (data, false)
            } else {
                (
                    seek(&self.file, SeekFrom::Hole(at))
                        .map_err(error_of)?
                        .min(end),
                    true,
                )
            };
            extents.push(Extent {
                len: next - at,
                mapped,
            });
            at = next;
        }
        Ok(extents)
    }
}

impl Lun for FileLun {
    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn block_size(&self) -> u32 {
        self.block_size
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn read_only(&self) -> bool {
        false
    }

    fn volatile_cache(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, len: u32) -> Answer<Chunks> {
        self.run(move |inner| inner.read(offset, len))
    }

    fn span(&self, offset: u64, len: u32) -> Option<Span> {
        // A file on a disk may make the caller wait, and can fail when it is too late to say so.
        (self.inline && len >= SPAN_BYTES_MIN).then(|| Span {
            file: Arc::clone(&self.inner.file),
            offset,
            len,
        })
    }

    fn write(&self, offset: u64, data: Chunks, fua: bool) -> Answer<()> {
        self.run(move |inner| {
            let _shared = inner.alone.read().unwrap_or_else(PoisonError::into_inner);
            inner.write(offset, data, fua)
        })
    }

    fn zero(&self, offset: u64, len: u64, _deallocate: bool) -> Answer<()> {
        self.run(move |inner| {
            let _shared = inner.alone.read().unwrap_or_else(PoisonError::into_inner);
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&inner.file, how, offset, len).map_err(error_of)
        })
    }

    fn flush(&self) -> Answer<()> {
        self.run(Inner::flush)
    }

    fn compare_and_write(
        &self,
        offset: u64,
        compare: Chunks,
        data: Chunks,
        fua: bool,
    ) -> Answer<Compared> {
        self.run(move |inner| {
            let _alone = inner.alone.write().unwrap_or_else(PoisonError::into_inner);
            let len = u32::try_from(chunks_len(&compare)).map_err(|_| LunError::OutOfRange)?;
            let found = inner.read(offset, len)?;
            match first_difference(&found, &compare) {
                Some(at) => Ok(Compared::Differs { at }),
                None => inner.write(offset, data, fua).map(|()| Compared::Written),
            }
        })
    }

    fn extents(&self, offset: u64, len: u64, extents_max: usize) -> Answer<Vec<Extent>> {
        self.run(move |inner| inner.extents(offset, len, extents_max))
    }
}
