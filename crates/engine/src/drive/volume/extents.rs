//! Which parts of a volume have space, according to the data files of its replicas on this machine.
//!
//! The volume asks the file of a replica that holds these bytes and has applied everything acknowledged of them. The
//! file has a hole where nothing was written, or where zeros gave the space back. Where no replica on this machine
//! qualifies, the answer is that there is space, which promises nothing.

use std::fs::File;
use std::sync::Arc;

use super::requests::Command;
use super::{Answer, BLOCK, Volume, VolumeError};
use crate::drive::room::{self, Extent};
use crate::proto::Geometry;

/// The most that one question covers. The caller continues where the answer ends.
const RANGE_BYTES_MAX: u64 = 64 << 30;

/// If no replica shows all of it, this many regions are tried one by one.
const REGIONS_MAX: usize = 256;

/// A piece of a range: how long it is, and the file that shows it, if there is one.
pub(super) type Piece = (u64, Option<Arc<File>>);

/// The files that show a range, in pieces from its start. `file_of` finds a file that shows all of a range.
pub(super) fn pieces(
    range: (u64, u64),
    size: u64,
    file_of: impl Fn((u64, u64)) -> Option<Arc<File>>,
) -> Vec<Piece> {
    let (offset, length) = range;
    let length = length.min(RANGE_BYTES_MAX);
    if let Some(file) = file_of((offset, length)) {
        return vec![(length, Some(file))];
    }
    let geometry = Geometry::STANDARD;
    let mut pieces = Vec::new();
    let (mut at, end) = (offset, offset + length);
    while at < end && pieces.len() < REGIONS_MAX {
        let (start, whole) = geometry.extent(geometry.region_of(at), size);
        let next = (start + whole).min(end).max(at + 1);
        pieces.push((next - at, file_of((at, next - at))));
        at = next;
    }
    pieces
}

impl Volume {
    /// Which parts of a range of whole blocks have space: at most `most` parts, from its start.
    pub async fn extents(&self, offset: u64, length: u64, most: usize) -> Answer<Vec<Extent>> {
        let is_whole = offset.is_multiple_of(BLOCK.get()) && length.is_multiple_of(BLOCK.get());
        if !is_whole {
            return Err(VolumeError::Unaligned);
        }
        if offset
            .checked_add(length)
            .is_none_or(|end| end > self.size())
        {
            return Err(VolumeError::OutOfRange);
        }
        let range = (offset, length);
        let pieces = self.ask(|reply| Command::Pieces { range, reply }).await?;
        let found = tokio::task::spawn_blocking(move || look(offset, &pieces, most));
        found.await.map_err(|_| VolumeError::Stopped)
    }
}

fn look(offset: u64, pieces: &[Piece], most: usize) -> Vec<Extent> {
    let mut found: Vec<Extent> = Vec::new();
    let mut at = offset;
    for (length, file) in pieces {
        let whole = Extent {
            length: *length,
            has_space: true,
        };
        // The first may only lengthen the last one before it.
        let rest = most.saturating_sub(found.len()) + 1;
        let here = file
            .as_ref()
            .and_then(|file| room::extents(file, at, *length, rest).ok());
        for extent in here.unwrap_or_else(|| vec![whole]) {
            let is_full = found.len() == most;
            match found.last_mut() {
                Some(last) if last.has_space == extent.has_space => last.length += extent.length,
                _ if is_full => return found,
                _ => found.push(extent),
            }
            at += extent.length;
        }
    }
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn shown(length: u64, has_space: bool) -> Extent {
        Extent { length, has_space }
    }

    // Fails if holes that no replica shows are told as holes, neighbours stay apart, or an answer is longer than asked.
    #[test]
    fn what_nobody_shows_has_space_and_neighbours_are_one() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * MIB).unwrap();
        file.write_all_at(&vec![1; 1 << 20], MIB).unwrap();
        let file = Arc::new(file);
        let region_of = |byte: u64| byte / MIB;
        let shows = |(at, length): (u64, u64)| {
            let is_shown = region_of(at) != 2 && length <= MIB;
            is_shown.then(|| Arc::clone(&file))
        };
        let pieces = pieces((0, 4 * MIB), 4 * MIB, shows);
        assert_eq!(pieces.len(), 4, "one by one, as nobody shows all of it");
        let all = [shown(MIB, false), shown(2 * MIB, true), shown(MIB, false)];
        assert_eq!(look(0, &pieces, 9), all);
        assert_eq!(look(0, &pieces, 2), all[..2]);
        assert_eq!(look(0, &pieces, 1), all[..1]);
    }

    // Fails if a large hole needs more than one question of the owner, or an answer covers more than was asked for.
    #[test]
    fn who_shows_all_of_a_range_is_asked_once() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let shows = |_| Some(Arc::clone(&file));
        let all = pieces((MIB, 1 << 50), 1 << 51, shows);
        assert_eq!(all.len(), 1);
        assert_eq!(look(MIB, &all, 4), [shown(RANGE_BYTES_MAX, false)]);
    }
}
