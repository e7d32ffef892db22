//! A replicated volume as a file.

use bytes::{Bytes, BytesMut};
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use trellis_engine::drive::{Volume, VolumeError};
use trellis_node::fuse::{Backing, BackingError, Chunks, Reply};

/// Blocks of the engine.
const BLOCK: u64 = 4096;

/// A volume that can be read and written at any byte. A loop device on the file asks for whole blocks; programs that
/// look at the file itself need not.
pub struct VolumeFile {
    volume: Volume,
    runtime: Handle,
    /// Held while a part of a block is written: it is read, changed, and written as a whole.
    parts: Arc<Mutex<()>>,
}

impl VolumeFile {
    /// The volume, whose requests run on `runtime`.
    pub fn new(volume: Volume, runtime: Handle) -> VolumeFile {
        VolumeFile {
            volume,
            runtime,
            parts: Arc::default(),
        }
    }
}

fn told(error: VolumeError) -> BackingError {
    match error {
        VolumeError::Medium => BackingError::Medium,
        VolumeError::OutOfRange | VolumeError::Unaligned => BackingError::OutOfRange,
        // Whoever takes over will be asked again.
        _ => BackingError::NotReady,
    }
}

/// The blocks that a range touches, as a range of their own.
fn blocks_of(offset: u64, len: u64) -> (u64, u64) {
    let start = offset - offset % BLOCK;
    let end = (offset + len).next_multiple_of(BLOCK);
    (start, end - start)
}

fn is_whole(offset: u64, len: u64) -> bool {
    offset.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK)
}

async fn read(volume: &Volume, offset: u64, len: u64) -> Result<Chunks, VolumeError> {
    if is_whole(offset, len) {
        return volume.read(offset, len).await;
    }
    let (start, whole) = blocks_of(offset, len);
    let bytes = gathered(volume.read(start, whole).await?).freeze();
    let skip = usize::try_from(offset - start).unwrap_or(usize::MAX);
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    Ok(vec![bytes.slice(skip..skip + len)])
}

fn gathered(pieces: Vec<Bytes>) -> BytesMut {
    let mut all = BytesMut::new();
    pieces.iter().for_each(|piece| all.extend_from_slice(piece));
    all
}

/// Writes a range that begins or ends within a block.
async fn write_parts(
    volume: &Volume,
    parts: &Mutex<()>,
    offset: u64,
    data: &[u8],
    fua: bool,
) -> Result<(), VolumeError> {
    let _alone = parts.lock().await;
    let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
    let (start, whole) = blocks_of(offset, len);
    let mut bytes = gathered(volume.read(start, whole).await?);
    let skip = usize::try_from(offset - start).unwrap_or(usize::MAX);
    if let Some(room) = bytes.get_mut(skip..skip + data.len()) {
        room.copy_from_slice(data);
    }
    volume.write(start, vec![bytes.freeze()], fua).await
}

/// Zeros a range: whole blocks as such, the parts before and behind them as bytes.
async fn zero(
    volume: &Volume,
    parts: &Mutex<()>,
    offset: u64,
    len: u64,
) -> Result<(), VolumeError> {
    let (first, last) = (offset.next_multiple_of(BLOCK), offset + len);
    let last = last - last % BLOCK;
    if first >= last {
        let zeros = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        return write_parts(volume, parts, offset, &zeros, false).await;
    }
    for (from, to) in [(offset, first), (last, offset + len)] {
        if from < to {
            let zeros = vec![0; usize::try_from(to - from).unwrap_or(usize::MAX)];
            write_parts(volume, parts, from, &zeros, false).await?;
        }
    }
    volume.zero(first, last - first).await
}

impl Backing for VolumeFile {
    fn size(&self) -> u64 {
        self.volume.size()
    }

    fn read(&self, offset: u64, len: u32, reply: Reply<Chunks>) {
        let volume = self.volume.clone();
        self.runtime.spawn(async move {
            reply.send(read(&volume, offset, u64::from(len)).await.map_err(told));
        });
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool, reply: Reply<()>) {
        let (volume, parts) = (self.volume.clone(), self.parts.clone());
        self.runtime.spawn(async move {
            let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
            // The piece would keep the whole buffer that it was received into, in the log of the coordinator.
            let result = if is_whole(offset, len) {
                let data = Bytes::copy_from_slice(&data);
                volume.write(offset, vec![data], fua).await
            } else {
                write_parts(&volume, &parts, offset, &data, fua).await
            };
            reply.send(result.map_err(told));
        });
    }

    fn zero(&self, offset: u64, len: u64, _deallocate: bool, reply: Reply<()>) {
        let (volume, parts) = (self.volume.clone(), self.parts.clone());
        self.runtime.spawn(async move {
            reply.send(zero(&volume, &parts, offset, len).await.map_err(told));
        });
    }

    fn flush(&self, reply: Reply<()>) {
        let volume = self.volume.clone();
        self.runtime.spawn(async move {
            reply.send(volume.flush().await.map_err(told));
        });
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
}
