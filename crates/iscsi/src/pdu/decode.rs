//! Framing: from a stream of bytes to PDUs.

use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};

use super::header::Generic;
use super::{HEADER_BYTES, IMMEDIATE};
use crate::error::Disconnect;
use crate::limits::{
    LOGIN_SEGMENT_BYTES_MAX, LONG_BYTES_MIN, LONG_BYTES_MIN_WANTED, READ_CHUNK_BYTES,
    RECV_SEGMENT_BYTES_MAX,
};
use crate::pool::{PIECE_BYTES, Piece, Pool};

const DIGEST_BYTES: usize = 4;
const _: () = assert!(
    PIECE_BYTES == 256 << 10 && RECV_SEGMENT_BYTES_MAX == 256 << 10,
    "a piece holds the largest segment"
);

/// A PDU as it was received. Additional header segments have been read and dropped: we support no
/// command that needs one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pdu {
    /// The basic header segment.
    pub header: [u8; HEADER_BYTES],
    /// The data segment without padding.
    pub data: Bytes,
}

impl Pdu {
    /// The opcode without the immediate bit.
    pub fn opcode(&self) -> u8 {
        self.header[0] & 0x3f
    }

    /// Whether it is to be handled at once, outside of the command window.
    pub fn immediate(&self) -> bool {
        self.header[0] & IMMEDIATE != 0
    }
}

/// Cuts the stream into PDUs and checks their digests.
#[derive(Debug)]
pub struct Decoder {
    /// Whether headers carry a checksum.
    pub header_digest: bool,
    /// Whether data segments carry a checksum.
    pub data_digest: bool,
    /// The largest data segment that was agreed.
    pub segment_bytes_max: u32,
    pool: Arc<Pool>,
    long: Option<Long>,
    /// The last PDU was a long one: the next one may be, too.
    was_long: bool,
    /// The header of data that does not have its checksum.
    spoilt: Option<[u8; HEADER_BYTES]>,
}

/// A long data segment on its way, in a buffer of its own.
#[derive(Debug)]
struct Long {
    header: [u8; HEADER_BYTES],
    layout: Layout,
    /// The data, its padding and its checksum.
    piece: Piece,
    filled: usize,
}

/// Where the parts of a PDU are.
#[derive(Debug, Clone, Copy)]
struct Layout {
    header_end: usize,
    data_start: usize,
    data_len: usize,
    data_end: usize,
    end: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Decoder::new(Arc::default())
    }
}

impl Decoder {
    /// One that takes memory for long segments from `pool`.
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Decoder {
            header_digest: false,
            data_digest: false,
            segment_bytes_max: LOGIN_SEGMENT_BYTES_MAX,
            pool,
            long: None,
            was_long: false,
            spoilt: None,
        }
    }

    /// The next PDU, or `None` when more has to be read first. Makes room in `input` for the rest of a PDU that has
    /// begun, so that its segment is received into one piece of memory. The room is bounded by what was negotiated,
    /// not by what the header says. The rest of a long segment may go into [`Decoder::room`] instead.
    ///
    /// # Errors
    /// The stream cannot be trusted any more, or asks for more than was agreed.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Pdu>, Disconnect> {
        if self.long.is_some() {
            return self.go_on(input);
        }
        let Some(header) = input.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = *header;
        let layout = self.layout(&header)?;
        let data_start = layout.data_start;
        if self.header_digest && input.len() >= data_start {
            // Checked as soon as it is there: a broken length must not make us wait for data.
            verify(
                &input[..layout.header_end],
                &input[layout.header_end..data_start],
                Disconnect::HeaderDigest,
            )?;
        }
        if input.len() < layout.end {
            let rest = layout.end - data_start;
            let long = (self.long_bytes_min()..=PIECE_BYTES + DIGEST_BYTES).contains(&rest);
            if !long || input.len() < data_start {
                input.reserve(layout.end - input.len());
                return Ok(None);
            }
            input.advance(data_start);
            self.long = Some(Long {
                header,
                layout,
                piece: self.pool.take(rest),
                filled: 0,
            });
            return self.go_on(input);
        }
        self.was_long = false;
        self.check_data(&header, layout, &input[data_start..layout.end])?;
        if layout.data_len == 0 {
            // Nothing may keep the buffer: it is used again.
            input.advance(layout.end);
            return Ok(Some(Pdu {
                header,
                data: Bytes::new(),
            }));
        }
        let mut whole = input.split_to(layout.end);
        whole.advance(data_start);
        whole.truncate(layout.data_len);
        Ok(Some(Pdu {
            header,
            data: whole.freeze(),
        }))
    }

    /// From this size on a data segment has a buffer of its own.
    fn long_bytes_min(&self) -> usize {
        if self.pool.has_wishes() {
            LONG_BYTES_MIN_WANTED
        } else {
            LONG_BYTES_MIN
        }
    }

    fn layout(&self, header: &[u8; HEADER_BYTES]) -> Result<Layout, Disconnect> {
        let generic = Generic::from_wire(header);
        let len = generic.data_len.get();
        if len > self.segment_bytes_max {
            return Err(Disconnect::SegmentTooLong {
                len,
                max: self.segment_bytes_max,
            });
        }
        let digest = |there: bool| if there { DIGEST_BYTES } else { 0 };
        let data_len = usize::try_from(len).unwrap_or(usize::MAX);
        let header_end = HEADER_BYTES + usize::from(generic.ahs_words) * 4;
        let data_start = header_end + digest(self.header_digest);
        let data_end = data_start + data_len.next_multiple_of(4);
        Ok(Layout {
            header_end,
            data_start,
            data_len,
            data_end,
            end: data_end + digest(self.data_digest && data_len > 0),
        })
    }

    /// `rest` is the data with its padding and its checksum.
    fn check_data(
        &mut self,
        header: &[u8; HEADER_BYTES],
        layout: Layout,
        rest: &[u8],
    ) -> Result<(), Disconnect> {
        if !self.data_digest || layout.data_len == 0 {
            return Ok(());
        }
        let (data, digest) = rest.split_at(layout.data_end - layout.data_start);
        verify(data, digest, Disconnect::DataDigest).inspect_err(|_| self.spoilt = Some(*header))
    }

    /// Goes on with a long segment, which takes what it lacks from `input`.
    fn go_on(&mut self, input: &mut BytesMut) -> Result<Option<Pdu>, Disconnect> {
        let room = self.room().map_or(0, |room| room.len());
        let now = room.min(input.len());
        if let Some(room) = self.room() {
            room[..now].copy_from_slice(&input[..now]);
        }
        input.advance(now);
        self.filled(now);
        if now < room {
            return Ok(None);
        }
        let Some(long) = self.long.take() else {
            return Ok(None);
        };
        self.was_long = true;
        self.check_data(&long.header, long.layout, long.piece.as_ref())?;
        Ok(Some(Pdu {
            header: long.header,
            data: long.piece.freeze(long.layout.data_len),
        }))
    }

    /// Where the rest of a long segment belongs, if one is on its way.
    pub fn room(&mut self) -> Option<&mut [u8]> {
        let long = self.long.as_mut()?;
        Some(&mut long.piece.room()[long.filled..])
    }

    /// So much was put into [`Decoder::room`].
    pub fn filled(&mut self, len: usize) {
        if let Some(long) = &mut self.long {
            long.filled += len;
        }
    }

    /// How much to read at a time while there is no [`Decoder::room`]. After a long segment that is only a header, so
    /// that the next long one can be received where it stays.
    pub fn read_bytes(&self) -> usize {
        if self.was_long {
            HEADER_BYTES + if self.header_digest { DIGEST_BYTES } else { 0 }
        } else {
            READ_CHUNK_BYTES
        }
    }

    /// The header of the data whose checksum was wrong, after [`Disconnect::DataDigest`].
    pub fn spoilt(&self) -> Option<&[u8; HEADER_BYTES]> {
        self.spoilt.as_ref()
    }
}

fn verify(covered: &[u8], digest: &[u8], error: Disconnect) -> Result<(), Disconnect> {
    // The digest's bytes go over the wire in the order of a little-endian word (RFC 7143, 13.1).
    if crc32c::crc32c(covered).to_le_bytes() == digest {
        Ok(())
    } else {
        Err(error)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::pdu::Outbox;

    /// Some short and long PDUs as they go over the wire, and their data.
    fn stream(digests: bool) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut out = Outbox::default();
        out.set_digests(digests, digests);
        let lengths = [
            0,
            5,
            4096,
            40_000,
            PIECE_BYTES,
            PIECE_BYTES - 3,
            7,
            LONG_BYTES_MIN,
            200_001,
        ];
        let datas: Vec<Vec<u8>> = lengths
            .iter()
            .map(|len| {
                (0..*len)
                    .map(|at| u8::try_from(at % 251).unwrap())
                    .collect()
            })
            .collect();
        for data in &datas {
            out.push([1; HEADER_BYTES], &[Bytes::from(data.clone())]);
        }
        (out.take().to_vec(), datas)
    }

    fn decoder(digests: bool) -> Decoder {
        Decoder {
            header_digest: digests,
            data_digest: digests,
            segment_bytes_max: RECV_SEGMENT_BYTES_MAX,
            ..Decoder::default()
        }
    }

    #[test]
    fn pdus_are_the_same_however_the_stream_is_cut() {
        // Fails if a byte is lost, doubled or misplaced where a long segment goes into a buffer of its own.
        for digests in [false, true] {
            let (bytes, datas) = stream(digests);
            for step in [1, 47, 4096, 50_000, bytes.len()] {
                let (mut decoder, mut input) = (decoder(digests), BytesMut::new());
                let (mut rest, mut found) = (&bytes[..], Vec::new());
                while !rest.is_empty() {
                    // As the driver does: into the room if there is one, else as much as is asked for.
                    let most = step.min(rest.len());
                    let now = if let Some(room) = decoder.room() {
                        let now = most.min(room.len());
                        room[..now].copy_from_slice(&rest[..now]);
                        decoder.filled(now);
                        now
                    } else {
                        let now = most.min(decoder.read_bytes());
                        input.extend_from_slice(&rest[..now]);
                        now
                    };
                    rest = &rest[now..];
                    while let Some(pdu) = decoder.decode(&mut input).unwrap() {
                        found.push(pdu.data.to_vec());
                    }
                }
                assert_eq!(found, datas, "digests {digests}, step {step}");
            }
        }
    }

    #[test]
    fn a_long_segment_is_not_taken_without_its_checksum() {
        // Fails if a changed byte of a long segment is not noticed, or it cannot be told whose it was.
        let (mut bytes, _) = stream(true);
        let at = bytes.len() - 50_000;
        bytes[at] ^= 1;
        let (mut decoder, mut input) = (decoder(true), BytesMut::new());
        let error = bytes.chunks(10_000).find_map(|part| {
            input.extend_from_slice(part);
            loop {
                match decoder.decode(&mut input) {
                    Ok(Some(_)) => {}
                    Ok(None) => return None,
                    Err(error) => return Some(error),
                }
            }
        });
        assert_eq!(error, Some(Disconnect::DataDigest));
        assert!(decoder.spoilt().is_some());
    }
}
