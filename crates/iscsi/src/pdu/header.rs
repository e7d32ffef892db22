//! The basic header segments, 48 bytes each, big-endian as on the wire.
#![allow(
    missing_docs,
    reason = "the fields are those of RFC 7143, section 11, under their names there"
)]

use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::HEADER_BYTES;

/// A three-byte length.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Default, Debug)]
#[repr(C)]
pub struct U24([u8; 3]);

impl U24 {
    pub fn get(self) -> u32 {
        let [a, b, c] = self.0;
        u32::from_be_bytes([0, a, b, c])
    }

    /// The length, or the largest that fits: our own segments are far below it.
    pub fn new(len: usize) -> Self {
        let len = u32::try_from(len).unwrap_or(u32::MAX).min(0x00ff_ffff);
        let [_, a, b, c] = len.to_be_bytes();
        U24([a, b, c])
    }
}

/// Declares a header and checks at compile time that it has 48 bytes.
macro_rules! header {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        #[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Default, Debug)]
        #[repr(C)]
        pub struct $name {
            $(pub $field: $kind,)*
        }

        const _: () = assert!(size_of::<$name>() == HEADER_BYTES);

        impl $name {
            /// The header as its type.
            pub fn from_wire(bytes: &[u8; HEADER_BYTES]) -> &Self {
                zerocopy::transmute_ref!(bytes)
            }
        }
    };
}

header! {
    /// What all headers share.
    Generic {
        opcode: u8,
        flags: u8,
        specific: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        rest: [u8; 28],
    }
}

header! {
    ScsiCommand {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        expected_len: U32,
        cmd_sn: U32,
        exp_stat_sn: U32,
        cdb: [u8; 16],
    }
}

header! {
    ScsiResponse {
        opcode: u8,
        flags: u8,
        response: u8,
        status: u8,
        ahs_words: u8,
        data_len: U24,
        reserved: [u8; 8],
        itt: U32,
        snack_tag: U32,
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        exp_data_sn: U32,
        bidirectional_residual: U32,
        residual: U32,
    }
}

header! {
    TaskManagement {
        opcode: u8,
        function: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        referenced_tag: U32,
        cmd_sn: U32,
        exp_stat_sn: U32,
        ref_cmd_sn: U32,
        exp_data_sn: U32,
        reserved_end: [u8; 8],
    }
}

header! {
    TaskManagementResponse {
        opcode: u8,
        flags: u8,
        response: u8,
        reserved: u8,
        ahs_words: u8,
        data_len: U24,
        reserved_lun: [u8; 8],
        itt: U32,
        reserved_mid: [u8; 4],
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        reserved_end: [u8; 12],
    }
}

header! {
    DataOut {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        reserved_mid: [u8; 4],
        exp_stat_sn: U32,
        reserved_more: [u8; 4],
        data_sn: U32,
        offset: U32,
        reserved_end: [u8; 4],
    }
}

header! {
    DataIn {
        opcode: u8,
        flags: u8,
        reserved: u8,
        status: u8,
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        data_sn: U32,
        offset: U32,
        residual: U32,
    }
}

header! {
    R2t {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        r2t_sn: U32,
        offset: U32,
        desired_len: U32,
    }
}

header! {
    Async {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        tag: U32,
        reserved_mid: [u8; 4],
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        event: u8,
        vendor_code: u8,
        parameter1: U16,
        parameter2: U16,
        parameter3: U16,
        reserved_end: [u8; 4],
    }
}

header! {
    TextRequest {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        cmd_sn: U32,
        exp_stat_sn: U32,
        reserved_end: [u8; 16],
    }
}

header! {
    TextResponse {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        reserved_end: [u8; 12],
    }
}

header! {
    LoginRequest {
        opcode: u8,
        flags: u8,
        version_max: u8,
        version_min: u8,
        ahs_words: u8,
        data_len: U24,
        isid: [u8; 6],
        tsih: U16,
        itt: U32,
        cid: U16,
        reserved: [u8; 2],
        cmd_sn: U32,
        exp_stat_sn: U32,
        reserved_end: [u8; 16],
    }
}

header! {
    LoginResponse {
        opcode: u8,
        flags: u8,
        version_max: u8,
        version_active: u8,
        ahs_words: u8,
        data_len: U24,
        isid: [u8; 6],
        tsih: U16,
        itt: U32,
        reserved: [u8; 4],
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        status_class: u8,
        status_detail: u8,
        reserved_end: [u8; 10],
    }
}

header! {
    LogoutRequest {
        opcode: u8,
        reason: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        reserved_lun: [u8; 8],
        itt: U32,
        cid: U16,
        reserved_mid: [u8; 2],
        cmd_sn: U32,
        exp_stat_sn: U32,
        reserved_end: [u8; 16],
    }
}

header! {
    LogoutResponse {
        opcode: u8,
        flags: u8,
        response: u8,
        reserved: u8,
        ahs_words: u8,
        data_len: U24,
        reserved_lun: [u8; 8],
        itt: U32,
        reserved_mid: [u8; 4],
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        reserved_more: [u8; 4],
        time2wait: U16,
        time2retain: U16,
        reserved_end: [u8; 4],
    }
}

header! {
    NopOut {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        cmd_sn: U32,
        exp_stat_sn: U32,
        reserved_end: [u8; 16],
    }
}

header! {
    NopIn {
        opcode: u8,
        flags: u8,
        reserved: [u8; 2],
        ahs_words: u8,
        data_len: U24,
        lun: [u8; 8],
        itt: U32,
        ttt: U32,
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        reserved_end: [u8; 12],
    }
}

header! {
    Reject {
        opcode: u8,
        flags: u8,
        reason: u8,
        reserved: u8,
        ahs_words: u8,
        data_len: U24,
        reserved_lun: [u8; 8],
        tag: U32,
        reserved_mid: [u8; 4],
        stat_sn: U32,
        exp_cmd_sn: U32,
        max_cmd_sn: U32,
        data_sn: U32,
        reserved_end: [u8; 8],
    }
}
