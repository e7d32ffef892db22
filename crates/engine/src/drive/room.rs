//! Space for a data file on its filesystem: which of its bytes have space, and how to get space for the others.
//!
//! A thin data file has holes. A write to a hole needs blocks, which a full filesystem refuses. A write to allocated
//! bytes needs none, except on a filesystem that copies on write; there a full pool fails it like any other write.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// A replica reports low space when less than this share of its filesystem is free, or less than so many bytes if that
/// is smaller. What a coordinator has already numbered, and what it keeps for a replica that is behind, must still
/// fit.
const KEPT_SHARE: u64 = 32;
const KEPT_BYTES_MAX: u64 = 96 << 20;

/// Zeros that are written where they cannot be made otherwise, in pieces of this length.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A part of a range: all of it has space, or all of it is a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its length, from where the one before it ends.
    pub length: u64,
    /// Whether it has a place.
    pub has_space: bool,
}

/// How much of a filesystem of that size is kept.
pub(super) fn kept(all: u64) -> u64 {
    (all / KEPT_SHARE).min(KEPT_BYTES_MAX)
}

/// Free bytes, and how many there are in all.
pub(super) fn space(file: &File) -> Option<(u64, u64)> {
    let found = rustix::fs::fstatvfs(file).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Some((bytes(found.f_bavail), bytes(found.f_blocks)))
}

/// Allocates every hole in a range by writing zeros, which is what reads return there anyway. Space allocated in
/// another way (`fallocate`) still looks like a hole, and some filesystems then ask for the same space twice. Half of
/// the reserve stays free for writes in flight.
pub(super) fn allocate(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let holes = pieces(file, offset, length, Piece::Hole)?;
    let missing: u64 = holes.iter().map(|(_, length)| length).sum();
    if missing == 0 {
        return Ok(());
    }
    let (free, all) = space(file).unwrap_or((u64::MAX, u64::MAX));
    if free < missing.saturating_add(kept(all) / 2) {
        return Err(Errno::NOSPC.into());
    }
    for (offset, length) in holes {
        write_zeros(file, offset, length)?;
    }
    Ok(())
}

/// The parts of a range that have a place.
pub(super) fn allocated(file: &File, offset: u64, length: u64) -> io::Result<Vec<(u64, u64)>> {
    pieces(file, offset, length, Piece::Data)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Piece {
    Hole,
    Data,
}

/// The holes of a range, or what is between them.
fn pieces(file: &File, offset: u64, length: u64, wanted: Piece) -> io::Result<Vec<(u64, u64)>> {
    let mut at = offset;
    let mut found = Vec::new();
    for extent in extents(file, offset, length, usize::MAX)? {
        if extent.has_space == (wanted == Piece::Data) {
            found.push((at, extent.length));
        }
        at += extent.length;
    }
    Ok(found)
}

/// Which parts of a range have space and which are holes, from its start, in at most so many parts.
pub(super) fn extents(
    file: &File,
    offset: u64,
    length: u64,
    most: usize,
) -> io::Result<Vec<Extent>> {
    let end = offset + length;
    let mut found = Vec::new();
    let mut at = offset;
    while at < end && found.len() < most {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            // There is nothing but a hole up to the end of the file.
            Err(Errno::NXIO) => end,
            Err(error) => return Err(error.into()),
        };
        let next = if data > at {
            data
        } else {
            rustix::fs::seek(file, SeekFrom::Hole(at))?.min(end)
        };
        // A hole may have been filled since it was found.
        if next > at {
            found.push(Extent {
                length: next - at,
                has_space: data == at,
            });
        }
        at = next;
    }
    Ok(found)
}

pub(super) fn write_zeros(file: &File, mut offset: u64, mut length: u64) -> io::Result<()> {
    while length > 0 {
        let piece = usize::try_from(length)
            .unwrap_or(usize::MAX)
            .min(ZEROS.len());
        file.write_all_at(&ZEROS[..piece], offset)?;
        let piece = u64::try_from(piece).unwrap_or(length);
        offset += piece;
        length -= piece;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn holes_get_their_place_and_nothing_else_changes() {
        // Fails if a hole of the range stays one, a hole outside of it is filled, or bytes change.
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 8192], 65_536).unwrap();
        let holes = || pieces(&file, 0, 1 << 20, Piece::Hole).unwrap();
        assert_eq!(
            holes(),
            [(0, 65_536), (73_728, (1 << 20) - 73_728)],
            "this filesystem does not tell holes"
        );
        allocate(&file, 61_440, 16_384).unwrap();
        assert_eq!(holes(), [(0, 61_440), (77_824, (1 << 20) - 77_824)]);
        assert_eq!(allocated(&file, 0, 1 << 20).unwrap(), [(61_440, 16_384)]);
        let mut read = vec![1; 16_384];
        file.read_exact_at(&mut read, 61_440).unwrap();
        assert!(read[..4096] == [0; 4096] && read[4096..12_288] == [7; 8192]);
        assert!(read[12_288..] == [0; 4096]);
    }
}
