//! A replicated volume as a logical unit.

use bytes::Bytes;
use trellis_engine::drive::{self, Volume, VolumeError};
use trellis_iscsi::lun::{Answer, Chunks, Compared, Extent, Identity, Lun, LunError, LunResult};
use uuid::Uuid;

/// Blocks of the engine. Initiators see the same, so that no write has to be widened.
const BLOCK_BYTES: u32 = 4096;

/// A volume that initiators can use.
pub struct VolumeLun {
    volume: Volume,
    id: Uuid,
}

impl VolumeLun {
    /// The volume with that identity.
    pub fn new(volume: Volume, id: Uuid) -> VolumeLun {
        VolumeLun { volume, id }
    }
}

fn told(error: VolumeError) -> LunError {
    match error {
        VolumeError::Medium => LunError::Medium,
        VolumeError::OutOfRange | VolumeError::Unaligned => LunError::OutOfRange,
        // The initiator tries again; whoever takes over will answer it.
        _ => LunError::NotReady,
    }
}

impl VolumeLun {
    fn later<T, F>(&self, ask: impl FnOnce(Volume) -> F) -> Answer<T>
    where
        F: Future<Output = Result<T, VolumeError>> + Send + 'static,
    {
        let future = ask(self.volume.clone());
        Answer::later(async move { future.await.map_err(told) })
    }
}

impl Lun for VolumeLun {
    fn identity(&self) -> Identity {
        Identity {
            serial: self.id.simple().to_string(),
            naa: self.id.into_bytes(),
        }
    }

    fn block_size(&self) -> u32 {
        BLOCK_BYTES
    }

    fn size(&self) -> u64 {
        self.volume.size()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn volatile_cache(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, len: u32) -> Answer<Chunks> {
        self.later(|volume| async move { volume.read(offset, u64::from(len)).await })
    }

    fn write(&self, offset: u64, data: Chunks, fua: bool) -> Answer<()> {
        self.later(|volume| async move { volume.write(offset, owned(data), fua).await })
    }

    fn zero(&self, offset: u64, len: u64, _deallocate: bool) -> Answer<()> {
        self.later(|volume| async move { volume.zero(offset, len).await })
    }

    fn flush(&self) -> Answer<()> {
        self.later(|volume| async move { volume.flush().await })
    }

    fn compare_and_write(
        &self,
        offset: u64,
        compare: Chunks,
        data: Chunks,
        fua: bool,
    ) -> Answer<Compared> {
        self.later(|volume| async move {
            let data = owned(data);
            let compared = volume.compare_and_write(offset, compare, data, fua).await?;
            Ok(match compared {
                drive::Compared::Written => Compared::Written,
                drive::Compared::Differs { at } => Compared::Differs { at },
            })
        })
    }

    /// Which parts have space is known to the copies, each for itself; all of it may have.
    fn extents(&self, _offset: u64, len: u64, _extents_max: usize) -> Answer<Vec<Extent>> {
        let whole: LunResult<Vec<Extent>> = Ok(vec![Extent { len, mapped: true }]);
        Answer::Now(whole)
    }
}

/// A write is kept in the log of the coordinator for copies that are behind. A small piece must not keep the large
/// buffer that it was received into for as long.
fn owned(data: Chunks) -> Vec<Bytes> {
    data.iter()
        .map(|piece| Bytes::copy_from_slice(piece))
        .collect()
}
