//! Bytes at offsets: a file, a block device, or what a test puts in their place.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Whether all of the bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Comparing is many times faster than looking at each byte.
    let mut pieces = bytes.chunks(ZEROS.len());
    pieces.all(|piece| piece == &ZEROS[..piece.len()])
}

/// Something that has a size and can be read at any place.
pub trait BytesAt {
    /// How many bytes there are.
    fn size(&self) -> io::Result<u64>;

    /// Fills the buffer from `offset` on as far as there are bytes, and says how far.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Fills the whole buffer, or fails.
    fn read_whole(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if self.read(buffer, offset)? == buffer.len() {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}

/// Something that can be written as well.
pub trait Medium: BytesAt {
    /// Writes all of the bytes at `offset`.
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when everything that was written is durable.
    fn sync(&self) -> io::Result<()>;
}

impl BytesAt for File {
    fn size(&self) -> io::Result<u64> {
        // The metadata of a block device says zero; its end is where seeking ends. Nobody uses the file's own position.
        let mut file = self;
        file.seek(SeekFrom::End(0))
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let at = u64::try_from(done).map_err(io::Error::other)?;
            match self.read_at(&mut buffer[done..], offset.saturating_add(at)) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }
}

impl Medium for File {
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Bytes in memory.
impl BytesAt for Vec<u8> {
    fn size(&self) -> io::Result<u64> {
        u64::try_from(self.len()).map_err(io::Error::other)
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let start = usize::try_from(offset)
            .unwrap_or(usize::MAX)
            .min(self.len());
        let found = &self[start..];
        let count = found.len().min(buffer.len());
        buffer[..count].copy_from_slice(&found[..count]);
        Ok(count)
    }
}
