//! A replicated volume as a file.

use bytes::Bytes;
use tokio::runtime::Handle;
use trellis_engine::drive::VolumeError;
use trellis_node::fuse::{Backing, BackingError, Chunks, Reply};

use super::bytewise::Bytewise;

/// A volume as what a FUSE file shows.
pub struct VolumeFile {
    volume: Bytewise,
    runtime: Handle,
}

impl VolumeFile {
    /// The volume, whose requests run on `runtime`.
    pub fn new(volume: Bytewise, runtime: Handle) -> VolumeFile {
        VolumeFile { volume, runtime }
    }
}

fn told(error: VolumeError) -> BackingError {
    match error {
        VolumeError::Medium => BackingError::Medium,
        VolumeError::NoSpace => BackingError::NoSpace,
        VolumeError::NoSpaceYet => BackingError::NoSpaceYet,
        VolumeError::OutOfRange | VolumeError::Unaligned => BackingError::OutOfRange,
        // Whoever takes over will be asked again.
        _ => BackingError::NotReady,
    }
}

impl Backing for VolumeFile {
    fn size(&self) -> u64 {
        self.volume.size()
    }

    fn read(&self, offset: u64, len: u32, reply: Reply<Chunks>) {
        let volume = self.volume.clone();
        self.runtime.spawn(async move {
            reply.send(volume.read(offset, u64::from(len)).await.map_err(told));
        });
    }

    fn write(&self, offset: u64, data: Bytes, fua: bool, reply: Reply<()>) {
        let volume = self.volume.clone();
        self.runtime.spawn(async move {
            reply.send(volume.write(offset, vec![data], fua).await.map_err(told));
        });
    }

    fn zero(&self, offset: u64, len: u64, deallocate: bool, reply: Reply<()>) {
        let volume = self.volume.clone();
        self.runtime.spawn(async move {
            let zeroed = if deallocate {
                volume.zero(offset, len).await
            } else {
                volume.fill(offset, len).await
            };
            reply.send(zeroed.map_err(told));
        });
    }

    fn flush(&self, reply: Reply<()>) {
        let volume = self.volume.clone();
        self.runtime.spawn(async move {
            reply.send(volume.flush().await.map_err(told));
        });
    }
}
