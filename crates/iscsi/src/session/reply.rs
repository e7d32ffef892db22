//! Status and data for the initiator.

use std::sync::Arc;

use bytes::Bytes;

use crate::lun::{Chunks, Span};
use crate::pdu::header::{DataIn, ScsiResponse};
use crate::pdu::{FINAL, HEADER_BYTES, Outbox, TAG_NONE, opcode};
use crate::scsi::{Data, Outcome, status};

const OVERFLOW: u8 = 0x04;
const UNDERFLOW: u8 = 0x02;
const STATUS: u8 = 0x01;

/// The numbers that a response carries.
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// StatSN of the response.
    pub stat_sn: u32,
    /// ExpCmdSN.
    pub exp_cmd_sn: u32,
    /// MaxCmdSN.
    pub max_cmd_sn: u32,
}

/// What a response has to know about its command.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// The initiator's tag.
    pub itt: u32,
    /// The room that the initiator has for data.
    pub read_room: u32,
    /// The data that the initiator announced.
    pub write_announced: u32,
    /// The data that the command wanted.
    pub write_wanted: u64,
    /// R2Ts that were sent.
    pub r2ts: u32,
    /// The longest segment and the longest burst that were agreed.
    pub segment_bytes_max: u32,
    /// The longest burst that was agreed.
    pub burst_bytes_max: u32,
}

/// The residual and its flag.
fn residual(asked: &Asked, data_len: u64) -> (u8, u32) {
    let (wanted, room) = if asked.write_wanted > 0 || asked.write_announced > 0 && data_len == 0 {
        (asked.write_wanted, u64::from(asked.write_announced))
    } else {
        (data_len, u64::from(asked.read_room))
    };
    let count = u32::try_from(wanted.abs_diff(room)).unwrap_or(u32::MAX);
    match wanted.cmp(&room) {
        std::cmp::Ordering::Greater => (OVERFLOW, count),
        std::cmp::Ordering::Less => (UNDERFLOW, count),
        std::cmp::Ordering::Equal => (0, 0),
    }
}

/// Send what became of a command. A good status travels with the last data.
pub fn send(out: &mut Outbox, asked: &Asked, numbers: Numbers, outcome: &Outcome) {
    let data_len = outcome.data.len();
    let (flag, count) = residual(asked, data_len);
    let len = u32::try_from(data_len.min(u64::from(asked.read_room))).unwrap_or(0);
    if outcome.status == status::GOOD && len > 0 {
        return send_data(out, asked, numbers, &outcome.data, len, (flag, count));
    }
    let sense: Vec<Bytes> = outcome
        .sense
        .iter()
        .map(|sense| sense.segment(outcome.descriptor_sense))
        .collect();
    let header = ScsiResponse {
        opcode: opcode::SCSI_RESPONSE,
        flags: FINAL | flag,
        status: outcome.status,
        itt: asked.itt.into(),
        stat_sn: numbers.stat_sn.into(),
        exp_cmd_sn: numbers.exp_cmd_sn.into(),
        max_cmd_sn: numbers.max_cmd_sn.into(),
        exp_data_sn: asked.r2ts.into(),
        residual: count.into(),
        ..ScsiResponse::default()
    };
    out.push(zerocopy::transmute!(header), &sense);
}

fn send_data(
    out: &mut Outbox,
    asked: &Asked,
    numbers: Numbers,
    data: &Data,
    len: u32,
    residual: (u8, u32),
) {
    let mut cursor = Cursor {
        data,
        piece: 0,
        at: 0,
    };
    let mut offset = 0;
    let mut data_sn: u32 = 0;
    while offset < len {
        let to_burst_end = asked.burst_bytes_max - offset % asked.burst_bytes_max;
        let step = asked.segment_bytes_max.min(to_burst_end).min(len - offset);
        let last = offset + step == len;
        let mut header = DataIn {
            opcode: opcode::DATA_IN,
            flags: if last || step == to_burst_end {
                FINAL
            } else {
                0
            },
            itt: asked.itt.into(),
            ttt: TAG_NONE.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            data_sn: data_sn.into(),
            offset: offset.into(),
            ..DataIn::default()
        };
        if last {
            header.flags |= STATUS | residual.0;
            header.status = status::GOOD;
            header.stat_sn = numbers.stat_sn.into();
            header.residual = residual.1.into();
        }
        cursor.push(out, zerocopy::transmute!(header), step);
        offset += step;
        data_sn += 1;
    }
}

/// Walks over data without copying.
struct Cursor<'a> {
    data: &'a Data,
    /// The piece of memory that is next,
    piece: usize,
    /// and how much of it, or of the file, has been passed.
    at: usize,
}

impl Cursor<'_> {
    /// Send the next part.
    fn push(&mut self, out: &mut Outbox, header: [u8; HEADER_BYTES], len: u32) {
        match self.data {
            Data::Memory(chunks) => {
                let pieces = self.take(chunks, usize::try_from(len).unwrap_or(usize::MAX));
                out.push(header, &pieces);
            }
            Data::File(span) => {
                let part = Span {
                    file: Arc::clone(&span.file),
                    offset: span.offset + u64::try_from(self.at).unwrap_or(u64::MAX),
                    len,
                };
                self.at += usize::try_from(len).unwrap_or(usize::MAX);
                out.push_span(header, part);
            }
        }
    }

    fn take(&mut self, chunks: &Chunks, mut len: usize) -> Chunks {
        let mut pieces = Vec::with_capacity(1);
        while len > 0 {
            let Some(piece) = chunks.get(self.piece) else {
                break;
            };
            let step = len.min(piece.len() - self.at);
            if step > 0 {
                pieces.push(piece.slice(self.at..self.at + step));
            }
            self.at += step;
            len -= step;
            if self.at == piece.len() {
                self.piece += 1;
                self.at = 0;
            }
        }
        pieces
    }
}
