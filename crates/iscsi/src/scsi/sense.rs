//! Sense data: why a command failed, or what has changed.

use bytes::Bytes;

/// Sense keys.
pub mod key {
    #![allow(missing_docs, reason = "the names are those of SPC-4")]
    pub const NO_SENSE: u8 = 0x0;
    pub const NOT_READY: u8 = 0x2;
    pub const MEDIUM_ERROR: u8 = 0x3;
    pub const ILLEGAL_REQUEST: u8 = 0x5;
    pub const UNIT_ATTENTION: u8 = 0x6;
    pub const DATA_PROTECT: u8 = 0x7;
    pub const ABORTED_COMMAND: u8 = 0xb;
    pub const MISCOMPARE: u8 = 0xe;
}

/// A reason. It reveals nothing internal: no paths, no addresses, no error numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sense {
    /// The kind of failure.
    pub key: u8,
    /// Additional sense code and its qualifier.
    pub code: (u8, u8),
    /// The information field, where a command defines one.
    pub information: Option<u32>,
}

const fn sense(key: u8, asc: u8, ascq: u8) -> Sense {
    Sense {
        key,
        code: (asc, ascq),
        information: None,
    }
}

impl Sense {
    /// Nothing to report.
    pub const NONE: Sense = sense(key::NO_SENSE, 0, 0);
    /// The opcode is not supported.
    pub const INVALID_OPCODE: Sense = sense(key::ILLEGAL_REQUEST, 0x20, 0x00);
    /// The range goes beyond the end.
    pub const LBA_OUT_OF_RANGE: Sense = sense(key::ILLEGAL_REQUEST, 0x21, 0x00);
    /// A field of the CDB has a value that is not supported.
    pub const INVALID_FIELD_IN_CDB: Sense = sense(key::ILLEGAL_REQUEST, 0x24, 0x00);
    /// There is no logical unit of this number.
    pub const NO_UNIT: Sense = sense(key::ILLEGAL_REQUEST, 0x25, 0x00);
    /// A field of the parameter list has a value that is not supported.
    pub const INVALID_PARAMETER: Sense = sense(key::ILLEGAL_REQUEST, 0x26, 0x00);
    /// A reservation is released with another type than it was made with.
    pub const INVALID_RELEASE: Sense = sense(key::ILLEGAL_REQUEST, 0x26, 0x04);
    /// The parameter list is too short or too long.
    pub const PARAMETER_LENGTH: Sense = sense(key::ILLEGAL_REQUEST, 0x1a, 0x00);
    /// Saving of parameters is not supported.
    pub const SAVING_NOT_SUPPORTED: Sense = sense(key::ILLEGAL_REQUEST, 0x39, 0x00);
    /// No room for another registration.
    pub const NO_REGISTRATION_ROOM: Sense = sense(key::ILLEGAL_REQUEST, 0x55, 0x04);
    /// The transfer announced by the transport does not fit the command.
    pub const INVALID_FIELD_IN_UNIT: Sense = sense(key::ILLEGAL_REQUEST, 0x0e, 0x03);
    /// The volume may not be written to.
    pub const WRITE_PROTECTED: Sense = sense(key::DATA_PROTECT, 0x27, 0x00);
    /// An initiator has switched writing off.
    pub const SOFTWARE_WRITE_PROTECTED: Sense = sense(key::DATA_PROTECT, 0x27, 0x02);
    /// No space is left behind a thin volume.
    pub const NO_SPACE: Sense = sense(key::DATA_PROTECT, 0x27, 0x07);
    /// The volume cannot serve now.
    pub const BECOMING_READY: Sense = sense(key::NOT_READY, 0x04, 0x01);
    /// The medium cannot be read.
    pub const READ_ERROR: Sense = sense(key::MEDIUM_ERROR, 0x11, 0x00);
    /// The medium cannot be written.
    pub const WRITE_ERROR: Sense = sense(key::MEDIUM_ERROR, 0x0c, 0x00);
    /// Data was lost or came in the wrong order.
    pub const DATA_SEQUENCE: Sense = sense(key::ABORTED_COMMAND, 0x47, 0x05);
    /// Data compared is not equal.
    pub const MISCOMPARE: Sense = sense(key::MISCOMPARE, 0x1d, 0x00);

    /// The same with an information field.
    pub fn with_information(mut self, information: u64) -> Sense {
        self.information = u32::try_from(information).ok();
        self
    }

    /// The fixed format, 18 bytes.
    pub fn fixed(self) -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[0] = 0x70;
        if let Some(information) = self.information {
            bytes[0] |= 0x80;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        bytes[2] = self.key;
        bytes[7] = 10;
        bytes[12] = self.code.0;
        bytes[13] = self.code.1;
        bytes
    }

    /// The descriptor format.
    pub fn descriptor(self) -> Vec<u8> {
        let mut bytes = vec![0x72, self.key, self.code.0, self.code.1, 0, 0, 0, 0];
        if let Some(information) = self.information {
            bytes[7] = 12;
            bytes.extend_from_slice(&[0x00, 0x0a, 0x80, 0x00, 0, 0, 0, 0]);
            bytes.extend_from_slice(&information.to_be_bytes());
        }
        bytes
    }

    /// The data segment of a SCSI response: a length, then the sense data.
    pub fn segment(self, descriptor: bool) -> Bytes {
        let data = if descriptor {
            self.descriptor()
        } else {
            self.fixed().to_vec()
        };
        let len = u16::try_from(data.len()).unwrap_or(0);
        let mut segment = len.to_be_bytes().to_vec();
        segment.extend_from_slice(&data);
        Bytes::from(segment)
    }
}

/// Something that every nexus is told once, with the next command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// The volume has grown.
    CapacityChanged,
    /// Another initiator changed a mode page.
    ModeChanged,
    /// A reservation was preempted.
    ReservationsPreempted,
    /// A reservation was released.
    ReservationsReleased,
    /// The nexus' own registration was removed.
    RegistrationsPreempted,
    /// The list of logical units has changed.
    ReportedLunsChanged,
    /// The logical unit or the target was reset.
    Reset,
    /// Another initiator cleared the task set.
    CommandsCleared,
}

impl Attention {
    /// As sense data.
    pub fn sense(self) -> Sense {
        let (asc, ascq) = match self {
            Attention::CapacityChanged => (0x2a, 0x09),
            Attention::ModeChanged => (0x2a, 0x01),
            Attention::ReservationsPreempted => (0x2a, 0x03),
            Attention::ReservationsReleased => (0x2a, 0x04),
            Attention::RegistrationsPreempted => (0x2a, 0x05),
            Attention::ReportedLunsChanged => (0x3f, 0x0e),
            Attention::Reset => (0x29, 0x03),
            Attention::CommandsCleared => (0x2f, 0x00),
        };
        sense(key::UNIT_ATTENTION, asc, ascq)
    }
}
