//! PDUs: the 48-byte headers as types, framing with its checksums, and the send queue.
//!
//! Payloads are slices of the receive buffer, or of a volume's answer. They are not copied here.

pub mod header;

mod decode;
mod encode;

pub use decode::{Decoder, Pdu};
pub use encode::Outbox;

/// Bytes of a basic header segment.
pub const HEADER_BYTES: usize = 48;
/// The tag that means "none".
pub const TAG_NONE: u32 = 0xffff_ffff;

/// Opcodes, without the immediate bit.
pub mod opcode {
    #![allow(
        missing_docs,
        reason = "the names are those of RFC 7143, section 11.2.1.2"
    )]
    pub const NOP_OUT: u8 = 0x00;
    pub const SCSI_COMMAND: u8 = 0x01;
    pub const TASK_MANAGEMENT: u8 = 0x02;
    pub const LOGIN: u8 = 0x03;
    pub const TEXT: u8 = 0x04;
    pub const DATA_OUT: u8 = 0x05;
    pub const LOGOUT: u8 = 0x06;
    pub const SNACK: u8 = 0x10;
    pub const NOP_IN: u8 = 0x20;
    pub const SCSI_RESPONSE: u8 = 0x21;
    pub const TASK_MANAGEMENT_RESPONSE: u8 = 0x22;
    pub const LOGIN_RESPONSE: u8 = 0x23;
    pub const TEXT_RESPONSE: u8 = 0x24;
    pub const DATA_IN: u8 = 0x25;
    pub const LOGOUT_RESPONSE: u8 = 0x26;
    pub const R2T: u8 = 0x31;
    pub const ASYNC: u8 = 0x32;
    pub const REJECT: u8 = 0x3f;
}

/// The immediate bit of the first byte.
pub const IMMEDIATE: u8 = 0x40;
/// The final bit of the second byte.
pub const FINAL: u8 = 0x80;
/// The continue bit of text and login.
pub const CONTINUE: u8 = 0x40;

/// Why a PDU is rejected.
pub mod reject {
    #![allow(
        missing_docs,
        reason = "the names are those of RFC 7143, section 11.17.1"
    )]
    pub const DATA_DIGEST: u8 = 0x02;
    pub const SNACK: u8 = 0x03;
    pub const PROTOCOL: u8 = 0x04;
    pub const NOT_SUPPORTED: u8 = 0x05;
    pub const TOO_MANY_IMMEDIATE: u8 = 0x06;
    pub const TASK_IN_PROGRESS: u8 = 0x07;
}
