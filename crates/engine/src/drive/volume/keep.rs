//! Puts the bytes of a write into memory that the volume may keep. Entries stay in the coordinator's log for replicas
//! that are behind, much longer than a client should have to do without its receive buffer.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use crate::drive::lent::{Arena, SLOT_BYTES_MAX, Slot};
use crate::replica::BLOCK;

/// Pieces that are shorter are copied together: an entry costs more than a copy of this.
const PIECE_BYTES_MIN: usize = 32 << 10;

fn is_whole(piece: &Bytes) -> bool {
    u64::try_from(piece.len()).is_ok_and(|length| length.is_multiple_of(BLOCK.get()))
}

/// The same bytes. Bytes that are already in the arena stay there; others are copied into it, or into separate memory
/// if there is no arena or no room in it.
pub(super) fn keep(arena: Option<&Arc<Arena>>, data: &[Bytes]) -> Vec<Bytes> {
    if !data.iter().all(is_whole) {
        return copied(arena, data);
    }
    let stays = |piece: &Bytes| {
        let is_lent = arena.is_some_and(|arena| arena.place_of(piece).is_some());
        is_lent && piece.len() >= PIECE_BYTES_MIN
    };
    let mut kept = Vec::new();
    for run in data.chunk_by(|a, b| stays(a) == stays(b)) {
        if run.first().is_some_and(stays) {
            kept.extend(run.iter().cloned());
        } else {
            kept.extend(copied(arena, run));
        }
    }
    kept
}

/// Takes so many bytes from the front of what is kept.
pub(super) fn take(kept: &mut VecDeque<Bytes>, length: u64) -> Vec<Bytes> {
    let mut left = usize::try_from(length).unwrap_or(usize::MAX);
    let mut taken = Vec::new();
    while left > 0
        && let Some(mut piece) = kept.pop_front()
    {
        if piece.len() > left {
            kept.push_front(piece.split_off(left));
        }
        left -= piece.len();
        taken.push(piece);
    }
    taken
}

/// Memory that is being filled.
enum Copy {
    Lent(Slot),
    Own(BytesMut),
}

impl Copy {
    fn new(arena: Option<&Arc<Arena>>, length: usize) -> Copy {
        match arena.and_then(|arena| arena.take(length)) {
            Some(slot) => Copy::Lent(slot),
            None => Copy::Own(BytesMut::with_capacity(length)),
        }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        match self {
            Copy::Lent(slot) => slot.room()[at..at + bytes.len()].copy_from_slice(bytes),
            Copy::Own(memory) => memory.extend_from_slice(bytes),
        }
    }

    fn freeze(self) -> Bytes {
        match self {
            Copy::Lent(slot) => slot.freeze(),
            Copy::Own(memory) => memory.freeze(),
        }
    }
}

/// A copy, in pieces of about the same length, whole blocks each if all of it is.
fn copied(arena: Option<&Arc<Arena>>, data: &[Bytes]) -> Vec<Bytes> {
    let block = usize::try_from(BLOCK.get()).unwrap_or(usize::MAX);
    let mut left: usize = data.iter().map(Bytes::len).sum();
    let count = left.div_ceil(SLOT_BYTES_MAX).max(1);
    let each = left.div_ceil(count).next_multiple_of(block);
    let mut pieces = Vec::with_capacity(count);
    let mut rest = data.iter().map(|piece| &piece[..]);
    let mut piece = rest.next().unwrap_or_default();
    while left > 0 {
        let length = each.min(left);
        let mut copy = Copy::new(arena, length);
        let mut at = 0;
        while at < length {
            let (now, later) = piece.split_at(piece.len().min(length - at));
            copy.put(at, now);
            at += now.len();
            piece = match later {
                [] => rest.next().unwrap_or_default(),
                later => later,
            };
        }
        pieces.push(copy.freeze());
        left -= length;
    }
    pieces
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn bytes(length: usize) -> Bytes {
        Bytes::from((0..=250u8).cycle().take(length).collect::<Vec<_>>())
    }

    #[test]
    fn a_copy_has_the_same_bytes_in_pieces_of_whole_blocks() {
        // Fails if a copy has other bytes, or pieces that would be copied once more.
        let arena = Arena::new().unwrap();
        for lengths in [
            &[4096][..],
            &[512; 16],
            &[0, 4096, 0],
            &[266_240],
            &[8192, 262_144, 1_310_720],
        ] {
            let data: Vec<Bytes> = lengths.iter().map(|length| bytes(*length)).collect();
            for arena in [None, Some(&arena)] {
                let copy = keep(arena, &data);
                assert_eq!(copy.concat(), data.concat());
                assert!(copy.iter().all(is_whole));
                let long =
                    |piece: &Bytes| (PIECE_BYTES_MIN..=SLOT_BYTES_MAX).contains(&piece.len());
                assert!(copy.len() == 1 || copy.iter().all(long));
                let is_lent = |piece: &Bytes| arena.unwrap().place_of(piece).is_some();
                assert!(arena.is_none() || copy.iter().all(is_lent));
            }
        }
        assert!(keep(None, &[]).is_empty());
    }

    #[test]
    fn what_is_in_the_arena_stays_where_it_is() {
        // Fails if long writes that were received where they can be lent are copied all the same.
        let arena = Arena::new().unwrap();
        let lent = |length: usize| {
            let mut slot = arena.take(length).unwrap();
            slot.room().copy_from_slice(&bytes(length));
            slot.freeze()
        };
        let data = [bytes(8192), lent(256 << 10), lent(64 << 10), lent(4096)];
        let kept = keep(Some(&arena), &data);
        assert_eq!(kept.concat(), data.concat());
        assert_eq!(kept.len(), 4);
        assert_eq!(kept[1].as_ptr(), data[1].as_ptr());
        assert_eq!(kept[2].as_ptr(), data[2].as_ptr());
        assert_ne!(kept[3].as_ptr(), data[3].as_ptr());
        // Where blocks are in two pieces, all of it is put together.
        let odd = [lent(64 << 10).slice(..40_000), bytes(5056)];
        let kept = keep(Some(&arena), &odd);
        assert_eq!(kept.concat(), odd.concat());
        assert!(kept.iter().all(is_whole));
    }

    #[test]
    fn a_long_write_is_taken_in_parts_without_another_copy() {
        // Fails if a part lacks bytes, or is copied again.
        let whole = bytes(300_000);
        let mut kept = VecDeque::from([whole.slice(..200_000), whole.slice(200_000..)]);
        let first = take(&mut kept, 250_000);
        let second = take(&mut kept, 60_000);
        assert_eq!(first.concat(), whole[..250_000]);
        assert_eq!(second.concat(), whole[250_000..]);
        assert_eq!(second[0].as_ptr(), whole[250_000..].as_ptr());
        assert!(take(&mut kept, 1).is_empty());
    }
}
