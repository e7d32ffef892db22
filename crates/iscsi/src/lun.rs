//! What the target serves: the trait that a volume implements to become a logical unit.
//!
//! Offsets and lengths are in bytes. The target asks only for whole blocks inside the size that
//! [`Lun::size`] has answered before; sizes only grow, so a request that was in range stays in range.

use std::fs::File;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use thiserror::Error;

/// Data as a list of pieces, so that nobody has to copy it into one.
pub type Chunks = Vec<Bytes>;

/// Data that lies in a file, and is sent from there without being copied.
#[derive(Debug, Clone)]
pub struct Span {
    /// The file.
    pub file: Arc<File>,
    /// Where in it the data begins.
    pub offset: u64,
    /// How much it is.
    pub len: u32,
}

/// How much data a list holds.
pub fn chunks_len(chunks: &[Bytes]) -> usize {
    chunks.iter().map(Bytes::len).sum()
}

/// Where two lists differ first, as far as the shorter one goes.
pub fn first_difference(a: &[Bytes], b: &[Bytes]) -> Option<u64> {
    let (mut a, mut b) = (a.iter(), b.iter());
    let (mut left, mut right): (&[u8], &[u8]) = (&[], &[]);
    let mut at = 0;
    loop {
        while left.is_empty() {
            left = a.next()?;
        }
        while right.is_empty() {
            right = b.next()?;
        }
        let len = left.len().min(right.len());
        let ((one, left_rest), (other, right_rest)) = (left.split_at(len), right.split_at(len));
        if one != other {
            let within = one.iter().zip(other).position(|(x, y)| x != y)?;
            return Some(at + u64::try_from(within).ok()?);
        }
        at += u64::try_from(len).ok()?;
        (left, right) = (left_rest, right_rest);
    }
}

/// Why a volume could not do what was asked.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum LunError {
    /// The medium failed for this range: a medium error for the initiator.
    #[error("the medium could not be read or written")]
    Medium,
    /// There is no room left behind a thin volume.
    #[error("no space is left behind the volume")]
    NoSpace,
    /// The volume cannot serve now and may later: the initiator should try again.
    #[error("the volume cannot serve now")]
    NotReady,
    /// The volume may not be written to.
    #[error("the volume is read-only")]
    ReadOnly,
    /// The range is outside the volume: the caller had seen a larger size before.
    #[error("the range is outside of the volume")]
    OutOfRange,
}

/// A volume's answer.
pub type LunResult<T> = Result<T, LunError>;

/// An answer that is ready, or will be. A volume that answers at once costs no allocation and no scheduling.
pub enum Answer<T> {
    /// The answer is there.
    Now(LunResult<T>),
    /// The answer will come. Dropping the future gives up the answer, not the operation.
    Later(Pin<Box<dyn Future<Output = LunResult<T>> + Send>>),
}

impl<T> Answer<T> {
    /// An answer that a future will give.
    pub fn later(future: impl Future<Output = LunResult<T>> + Send + 'static) -> Self {
        Answer::Later(Box::pin(future))
    }
}

impl<T: Unpin> Future for Answer<T> {
    type Output = LunResult<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LunResult<T>> {
        match self.get_mut() {
            Answer::Now(result) => {
                // A future is not polled again once it was ready; should it be, it never wakes.
                Poll::Ready(std::mem::replace(result, Err(LunError::NotReady)))
            }
            Answer::Later(future) => future.as_mut().poll(cx),
        }
    }
}

/// Who a logical unit is, for ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The unit serial number (VPD page 80h): printable ASCII.
    pub serial: String,
    /// A name of the NAA format, locally assigned (VPD page 83h). The first four bits are set by the
    /// target, the rest must not be shared by two volumes.
    pub naa: [u8; 16],
}

/// What is known of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// How many bytes.
    pub len: u64,
    /// Whether they have been given space.
    pub mapped: bool,
}

/// The outcome of a compare-and-write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    /// Equal, and written.
    Written,
    /// The first byte that differs; nothing was written.
    Differs {
        /// How far into the range.
        at: u64,
    },
}

/// A volume that the target can serve.
pub trait Lun: Send + Sync + 'static {
    /// Who it is.
    fn identity(&self) -> Identity;

    /// Bytes of a block: 512 or 4096.
    fn block_size(&self) -> u32;

    /// The unit in bytes in which the volume reads and writes, at least a block. Initiators align to it.
    fn physical_block_size(&self) -> u32 {
        4096
    }

    /// Its current size in bytes, read with every command. To announce a growth, return more: the target gives every
    /// session its unit attention. It never returns less than before.
    fn size(&self) -> u64;

    /// Whether it may only be read, now.
    fn read_only(&self) -> bool;

    /// Whether an acknowledged write can be lost in a power failure until [`Lun::flush`] is answered.
    fn volatile_cache(&self) -> bool;

    /// Read a range.
    fn read(&self, offset: u64, len: u32) -> Answer<Chunks>;

    /// Where a range lies, if it is best sent from there: a file in memory, which never blocks and does not fail. (If
    /// it fails anyway, the connection ends: the initiator has been promised the data by then.) A write to the range
    /// before the initiator has received it may be visible or not, as with any two commands that run at the same time.
    fn span(&self, _offset: u64, _len: u32) -> Option<Span> {
        None
    }

    /// Write the pieces one after the other from `offset` on. With `fua` they are durable when it answers. A piece is
    /// a part of the receive buffer: copy it to keep it for long.
    fn write(&self, offset: u64, data: Chunks, fua: bool) -> Answer<()>;

    /// Make a range read as zeros. With `deallocate` its space should be given back.
    fn zero(&self, offset: u64, len: u64, deallocate: bool) -> Answer<()>;

    /// Make all writes that were answered durable.
    fn flush(&self) -> Answer<()>;

    /// Compare, and write if equal, as one step to all others.
    fn compare_and_write(
        &self,
        offset: u64,
        compare: Chunks,
        data: Chunks,
        fua: bool,
    ) -> Answer<Compared>;

    /// Which parts of a range have space, at most `extents_max` of them from its start.
    fn extents(&self, offset: u64, len: u64, extents_max: usize) -> Answer<Vec<Extent>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_compared_across_their_pieces() {
        // Fails if pieces of different lengths make equal data differ, or a difference is misplaced.
        let list = |pieces: &[&'static str]| -> Chunks {
            pieces
                .iter()
                .map(|piece| Bytes::from_static(piece.as_bytes()))
                .collect()
        };
        assert_eq!(
            first_difference(&list(&["abc", "", "def"]), &list(&["ab", "cdef"])),
            None
        );
        assert_eq!(
            first_difference(&list(&["abc", "dxf"]), &list(&["ab", "cdef"])),
            Some(4)
        );
        assert_eq!(first_difference(&list(&["abc"]), &list(&["ab"])), None);
    }
}
