//! A replicated volume at any byte. The engine takes whole blocks of 4 KiB; its users need not.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::sync::Mutex;
use trellis_engine::drive::{Compared, Extent, Slot, Volume, VolumeError};

/// Blocks of the engine.
const BLOCK: u64 = 4096;

/// Zeros that are written as bytes, at a time.
const ZEROS_AT_A_TIME: u64 = 4 << 20;

/// A volume whose ranges may begin and end anywhere.
#[derive(Clone)]
pub struct Bytewise {
    /// Every request clones this; one `Arc` is cheaper to clone than a volume's own handles.
    volume: Arc<Volume>,
    /// Held while a part of a block is written: it is read, changed, and written as a whole. All users of the volume
    /// share it.
    parts: Arc<Mutex<()>>,
}

type Answer<T> = Result<T, VolumeError>;

/// The blocks that a range touches, as a range of their own.
fn blocks_of(offset: u64, len: u64) -> (u64, u64) {
    let start = offset - offset % BLOCK;
    let end = (offset + len).next_multiple_of(BLOCK);
    (start, end - start)
}

fn is_whole(offset: u64, len: u64) -> bool {
    offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK)
}

fn length(pieces: &[Bytes]) -> u64 {
    let length: usize = pieces.iter().map(Bytes::len).sum();
    u64::try_from(length).unwrap_or(u64::MAX)
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn gathered(pieces: &[Bytes]) -> BytesMut {
    let mut all = BytesMut::with_capacity(index(length(pieces)));
    pieces.iter().for_each(|piece| all.extend_from_slice(piece));
    all
}

impl Bytewise {
    /// The volume.
    pub fn new(volume: Volume) -> Bytewise {
        Bytewise {
            volume: Arc::new(volume),
            parts: Arc::default(),
        }
    }

    /// How large it is now.
    pub fn size(&self) -> u64 {
        self.volume.size()
    }

    /// Memory for the bytes of a long write, if they should be put in a certain place.
    pub fn room(&self, len: usize) -> Option<Slot> {
        self.volume.room(len)
    }

    /// Reads a range.
    pub async fn read(&self, offset: u64, len: u64) -> Answer<Vec<Bytes>> {
        if is_whole(offset, len) {
            return self.volume.read(offset, len).await;
        }
        let (start, whole) = blocks_of(offset, len);
        let bytes = gathered(&self.volume.read(start, whole).await?).freeze();
        let skip = index(offset - start);
        Ok(vec![bytes.slice(skip..skip + index(len))])
    }

    /// Writes a range.
    pub async fn write(&self, offset: u64, data: Vec<Bytes>, fua: bool) -> Answer<()> {
        if is_whole(offset, length(&data)) {
            return self.volume.write(offset, data, fua).await;
        }
        self.write_parts(offset, &gathered(&data), fua).await
    }

    /// Writes a range that begins or ends within a block.
    async fn write_parts(&self, offset: u64, data: &[u8], fua: bool) -> Answer<()> {
        let _alone = self.parts.lock().await;
        let (start, mut bytes) = self.around(offset, data.len()).await?;
        put(&mut bytes, offset - start, data);
        self.volume.write(start, vec![bytes.freeze()], fua).await
    }

    /// The blocks that a range touches, with where they begin.
    async fn around(&self, offset: u64, len: usize) -> Answer<(u64, BytesMut)> {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        let (start, whole) = blocks_of(offset, len);
        Ok((start, gathered(&self.volume.read(start, whole).await?)))
    }

    /// Zeros a range: whole blocks as such, the parts before and after them as bytes.
    pub async fn zero(&self, offset: u64, len: u64) -> Answer<()> {
        let (first, end) = (offset.next_multiple_of(BLOCK), offset + len);
        let last = end - end % BLOCK;
        if first >= last {
            return self.write_parts(offset, &vec![0; index(len)], false).await;
        }
        for (from, to) in [(offset, first), (last, end)] {
            if from < to {
                let zeros = vec![0; index(to - from)];
                self.write_parts(from, &zeros, false).await?;
            }
        }
        self.volume.zero(first, last - first).await
    }

    /// Zeros a range whose space is kept: whoever asks for that relies on later writes there needing no new space. (The
    /// journal of a filesystem is made so.)
    pub async fn fill(&self, offset: u64, len: u64) -> Answer<()> {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let piece = (end - at).min(ZEROS_AT_A_TIME);
            let zeros = Bytes::from(vec![0; index(piece)]);
            self.write(at, vec![zeros], false).await?;
            at += piece;
        }
        Ok(())
    }

    /// Which parts of a range have space, at most so many of them from its start.
    pub async fn extents(&self, offset: u64, len: u64, most: usize) -> Answer<Vec<Extent>> {
        let (start, whole) = blocks_of(offset, len);
        let mut found = self.volume.extents(start, whole, most).await?;
        if let Some(first) = found.first_mut() {
            // Space is given to whole blocks, so the first extent is longer than what lies before the range.
            first.length -= offset - start;
        }
        Ok(found)
    }

    /// Makes everything durable.
    pub async fn flush(&self) -> Answer<()> {
        self.volume.flush().await
    }

    /// Writes a range if it is as expected, in one step as others see it.
    pub async fn compare_and_write(
        &self,
        offset: u64,
        expected: Vec<Bytes>,
        data: Vec<Bytes>,
        fua: bool,
    ) -> Answer<Compared> {
        if is_whole(offset, length(&data)) && length(&expected) == length(&data) {
            return self
                .volume
                .compare_and_write(offset, expected, data, fua)
                .await;
        }
        let (expected, data) = (gathered(&expected), gathered(&data));
        let _alone = self.parts.lock().await;
        loop {
            let (start, old) = self.around(offset, data.len()).await?;
            let skip = index(offset - start);
            let found = old.get(skip..skip + expected.len()).unwrap_or_default();
            let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
            if let Some(at) = differs {
                let at = u64::try_from(at).unwrap_or(u64::MAX);
                return Ok(Compared::Differs { at });
            }
            let mut new = old.clone();
            put(&mut new, offset - start, &data);
            let (old, new) = (vec![old.freeze()], vec![new.freeze()]);
            let compared = self.volume.compare_and_write(start, old, new, fua).await?;
            if compared == Compared::Written {
                return Ok(compared);
            }
            // Somebody has written next to it, in the same block. Look again.
        }
    }
}

fn put(bytes: &mut BytesMut, at: u64, data: &[u8]) {
    let at = index(at);
    if let Some(room) = bytes.get_mut(at..at + data.len()) {
        room.copy_from_slice(data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a range is widened too little, or a whole one is widened.
    #[test]
    fn a_range_is_widened_to_the_blocks_that_it_touches() {
        assert_eq!(blocks_of(0, 4096), (0, 4096));
        assert_eq!(blocks_of(1, 4096), (0, 8192));
        assert_eq!(blocks_of(4095, 1), (0, 4096));
        assert_eq!(blocks_of(8192, 512), (8192, 4096));
        assert!(is_whole(8192, 4096) && !is_whole(512, 4096));
    }

    // Fails if bytes beside those that were written change.
    #[test]
    fn a_part_is_put_in_its_place() {
        let mut block = BytesMut::from(&[1u8; 8][..]);
        put(&mut block, 2, &[7, 7]);
        assert_eq!(&block[..], [1, 1, 7, 7, 1, 1, 1, 1]);
    }
}
