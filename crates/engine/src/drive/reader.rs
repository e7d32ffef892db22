//! Reading a replica's data file: by the process that serves it, and by a volume on the same machine.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, ReadWriteFlags};

use super::buffers::Buffers;
use crate::proto::Content;

/// How many bytes at the start of a read decide whether it may be all zeros.
const PEEK: usize = 64;

/// What reads are compared with, in pieces of this length.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// What `statfs` says of a filesystem that is in memory.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Reads one file.
pub(super) struct Reader {
    buffers: Buffers,
    /// The file is in memory, where a read never waits.
    in_memory: bool,
    /// The filesystem cannot say whether a read would wait.
    tells_nothing: AtomicBool,
}

impl Reader {
    pub(super) fn new(file: &File, buffers: Buffers) -> Reader {
        let kind = rustix::fs::fstatfs(file).map(|stat| stat.f_type);
        Reader {
            buffers,
            in_memory: kind == Ok(TMPFS_MAGIC),
            tells_nothing: AtomicBool::new(false),
        }
    }

    /// Whether the file is in memory.
    pub(super) fn never_waits(&self) -> bool {
        self.in_memory
    }

    /// Reads a range if that needs no waiting for a disk.
    pub(super) fn at_once(
        &self,
        file: &File,
        offset: u64,
        length: u64,
    ) -> Option<io::Result<Content>> {
        if self.in_memory {
            return Some(self.read(file, offset, length));
        }
        if self.tells_nothing.load(Ordering::Relaxed) {
            return None;
        }
        match self.read_all(file, offset, length, ReadWriteFlags::NOWAIT) {
            Err(Errno::AGAIN) => None,
            Err(Errno::OPNOTSUPP) => {
                self.tells_nothing.store(true, Ordering::Relaxed);
                None
            }
            other => Some(other.map_err(io::Error::from)),
        }
    }

    /// Reads a range, however long that takes.
    pub(super) fn read(&self, file: &File, offset: u64, length: u64) -> io::Result<Content> {
        let content = self.read_all(file, offset, length, ReadWriteFlags::empty());
        content.map_err(io::Error::from)
    }

    /// The data file may end before the size after a crash; what is behind its end is zeros.
    fn read_all(
        &self,
        file: &File,
        offset: u64,
        length: u64,
        flags: ReadWriteFlags,
    ) -> Result<Content, Errno> {
        let wanted = usize::try_from(length).map_err(|_| Errno::INVAL)?;
        let mut buffer = self.buffers.get(wanted);
        let bytes = buffer.bytes_mut();
        let mut have = 0;
        while have < wanted {
            let at = offset + u64::try_from(have).unwrap_or(0);
            let mut slices = [IoSliceMut::new(&mut bytes[have..])];
            match rustix::io::preadv2(file, &mut slices, at, flags) {
                Ok(0) => {
                    bytes[have..].fill(0);
                    break;
                }
                Ok(read) => have += read,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        if is_blank(bytes) {
            return Ok(Content::Zeros(length));
        }
        Ok(Content::Data(buffer.freeze()))
    }
}

/// Whether it is all zeros. Zeros take no space on the wire, nor where a repair writes them.
fn is_blank(bytes: &[u8]) -> bool {
    let head = &bytes[..PEEK.min(bytes.len())];
    head.iter().all(|byte| *byte == 0)
        && bytes
            .chunks(ZEROS.len())
            .all(|part| part == &ZEROS[..part.len()])
}
