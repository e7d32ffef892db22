//! Framing: from a stream of bytes to PDUs.

use bytes::{Buf, Bytes, BytesMut};

use super::header::Generic;
use super::{HEADER_BYTES, IMMEDIATE};
use crate::error::Disconnect;
use crate::limits::LOGIN_SEGMENT_BYTES_MAX;

const DIGEST_BYTES: usize = 4;

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
}

impl Default for Decoder {
    fn default() -> Self {
        Decoder {
            header_digest: false,
            data_digest: false,
            segment_bytes_max: LOGIN_SEGMENT_BYTES_MAX,
        }
    }
}

impl Decoder {
    /// The next PDU, or `None` when more has to be read first. Makes room in `input` for the rest of a
    /// PDU that has begun, so that a long segment is received into one piece of memory; the room is
    /// bounded by what was agreed, not by what the header says.
    ///
    /// # Errors
    /// The stream cannot be trusted any more, or asks for more than was agreed.
    pub fn decode(&self, input: &mut BytesMut) -> Result<Option<Pdu>, Disconnect> {
        let Some(header) = input.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let generic = Generic::from_wire(header);
        let ahs_len = usize::from(generic.ahs_words) * 4;
        let len = generic.data_len.get();
        if len > self.segment_bytes_max {
            return Err(Disconnect::SegmentTooLong {
                len,
                max: self.segment_bytes_max,
            });
        }
        let data_len = usize::try_from(len).unwrap_or(usize::MAX);
        let padded = data_len.next_multiple_of(4);
        let header_end = HEADER_BYTES + ahs_len;
        let data_start = header_end + if self.header_digest { DIGEST_BYTES } else { 0 };
        let data_end = data_start + padded;
        let end = data_end
            + if self.data_digest && data_len > 0 {
                DIGEST_BYTES
            } else {
                0
            };

        if self.header_digest && input.len() >= data_start {
            // Checked as soon as it is there: a broken length must not make us wait for data.
            verify(
                &input[..header_end],
                &input[header_end..data_start],
                Disconnect::HeaderDigest,
            )?;
        }
        if input.len() < end {
            input.reserve(end - input.len());
            return Ok(None);
        }
        let header = *header_of(input);
        if self.data_digest && data_len > 0 {
            verify(
                &input[data_start..data_end],
                &input[data_end..end],
                Disconnect::DataDigest,
            )?;
        }
        if data_len == 0 {
            // Nothing may keep the buffer: it is used again.
            input.advance(end);
            return Ok(Some(Pdu {
                header,
                data: Bytes::new(),
            }));
        }
        let mut whole = input.split_to(end);
        whole.advance(data_start);
        whole.truncate(data_len);
        Ok(Some(Pdu {
            header,
            data: whole.freeze(),
        }))
    }
}

fn header_of(input: &[u8]) -> &[u8; HEADER_BYTES] {
    input.first_chunk().unwrap_or(&[0; HEADER_BYTES])
}

fn verify(covered: &[u8], digest: &[u8], error: Disconnect) -> Result<(), Disconnect> {
    // The digest's bytes go over the wire in the order of a little-endian word (RFC 7143, 13.1).
    if crc32c::crc32c(covered).to_le_bytes() == digest {
        Ok(())
    } else {
        Err(error)
    }
}
