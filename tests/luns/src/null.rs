//! A volume with nothing behind it: writes are discarded, and one piece of memory answers every read. It shows what
//! the protocol alone can do.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use trellis_iscsi::limits::TRANSFER_BYTES_MAX;
use trellis_iscsi::lun::{Answer, Chunks, Compared, Extent, Identity, Lun, LunError};

use crate::identity_of;

/// A volume that keeps nothing.
#[derive(Debug)]
pub struct NullLun {
    identity: Identity,
    size: AtomicU64,
    answer: Bytes,
}

impl NullLun {
    /// One of `size` bytes.
    pub fn new(serial: &str, size: u64) -> Self {
        let len = usize::try_from(TRANSFER_BYTES_MAX).unwrap_or_default();
        NullLun {
            identity: identity_of(serial),
            size: AtomicU64::new(size),
            answer: Bytes::from(vec![0x5a; len]),
        }
    }

    /// Make it larger; a smaller size changes nothing.
    pub fn grow(&self, size: u64) {
        self.size.fetch_max(size, Ordering::SeqCst);
    }
}

impl Lun for NullLun {
    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn block_size(&self) -> u32 {
        512
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn read_only(&self) -> bool {
        false
    }

    fn volatile_cache(&self) -> bool {
        false
    }

    fn read(&self, _: u64, len: u32) -> Answer<Chunks> {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        Answer::Now(if len <= self.answer.len() {
            Ok(vec![self.answer.slice(..len)])
        } else {
            Err(LunError::OutOfRange)
        })
    }

    fn write(&self, _: u64, _: Chunks, _: bool) -> Answer<()> {
        Answer::Now(Ok(()))
    }

    fn zero(&self, _: u64, _: u64, _: bool) -> Answer<()> {
        Answer::Now(Ok(()))
    }

    fn flush(&self) -> Answer<()> {
        Answer::Now(Ok(()))
    }

    fn compare_and_write(&self, _: u64, _: Chunks, _: Chunks, _: bool) -> Answer<Compared> {
        Answer::Now(Ok(Compared::Written))
    }

    fn extents(&self, _: u64, len: u64, _: usize) -> Answer<Vec<Extent>> {
        Answer::Now(Ok(vec![Extent { len, mapped: true }]))
    }
}
