//! A replicated volume as a logical unit.

use std::fmt;

use trellis_engine::drive::{self, VolumeError};
use trellis_iscsi::lun::{Answer, Chunks, Compared, Extent, Identity, Lun, LunError};
use trellis_iscsi::{Memory, Room};
use uuid::Uuid;

use super::bytewise::Bytewise;

/// The block size that every initiator can use. Initiators are told that 4 KiB are written as a whole, and align to
/// that; what they do not align is widened. (QEMU 7.2 fails an assertion of its own on units with blocks of 4 KiB.)
const BLOCK_BYTES: u32 = 512;

/// A volume that initiators can use.
pub struct VolumeLun {
    volume: Bytewise,
    id: Uuid,
    read_only: bool,
}

impl VolumeLun {
    /// The volume with that identity. Initiators may only read it if `read_only` says so.
    pub fn new(volume: Bytewise, id: Uuid, read_only: bool) -> VolumeLun {
        VolumeLun {
            volume,
            id,
            read_only,
        }
    }
}

/// Where the volume's copies see the data of long writes.
pub struct VolumeMemory {
    volume: Bytewise,
}

impl VolumeMemory {
    /// That of a volume.
    pub fn new(volume: Bytewise) -> VolumeMemory {
        VolumeMemory { volume }
    }
}

impl fmt::Debug for VolumeMemory {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("VolumeMemory")
    }
}

impl Memory for VolumeMemory {
    fn take(&self, len: usize) -> Option<Box<dyn Room>> {
        let slot = self.volume.room(len)?;
        Some(Box::new(slot))
    }
}

fn told(error: VolumeError) -> LunError {
    match error {
        VolumeError::Medium => LunError::Medium,
        VolumeError::NoSpace => LunError::NoSpace,
        VolumeError::OutOfRange | VolumeError::Unaligned => LunError::OutOfRange,
        // The initiator tries again; whoever takes over will answer it.
        _ => LunError::NotReady,
    }
}

impl VolumeLun {
    fn later<T, F>(&self, ask: impl FnOnce(Bytewise) -> F) -> Answer<T>
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
        self.read_only
    }

    fn volatile_cache(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, len: u32) -> Answer<Chunks> {
        self.later(|volume| async move { volume.read(offset, u64::from(len)).await })
    }

    fn write(&self, offset: u64, data: Chunks, fua: bool) -> Answer<()> {
        self.later(|volume| async move { volume.write(offset, data, fua).await })
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
            let compared = volume.compare_and_write(offset, compare, data, fua).await?;
            Ok(match compared {
                drive::Compared::Written => Compared::Written,
                drive::Compared::Differs { at } => Compared::Differs { at },
            })
        })
    }

    fn extents(&self, offset: u64, len: u64, extents_max: usize) -> Answer<Vec<Extent>> {
        let of_unit = |found: drive::Extent| Extent {
            len: found.length,
            mapped: found.has_space,
        };
        self.later(|volume| async move {
            let found = volume.extents(offset, len, extents_max).await?;
            Ok(found.into_iter().map(of_unit).collect())
        })
    }
}
