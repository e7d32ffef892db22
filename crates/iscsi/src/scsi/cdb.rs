//! Command descriptor blocks, parsed into commands.
//!
//! Parsing checks only the CDB itself. Whether a range is inside the volume, whether the volume may be written and so
//! on is decided when the command runs.

use super::sense::Sense;

/// A run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// The first.
    pub lba: u64,
    /// How many.
    pub count: u64,
}

/// What a VERIFY compares with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Nothing: only whether the medium can be read.
    Medium,
    /// Data of the same length.
    Data,
    /// One block, with every block of the range.
    OneBlock,
}

/// What a command does to the medium; reservations ask for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Nothing that a reservation protects.
    Nothing,
    /// Reads the medium or a state that it may depend on.
    Reads,
    /// Changes the medium or a state.
    Writes,
    /// Persistent reservations look after themselves.
    Persistent,
    /// RESERVE(6) and RELEASE(6).
    Classic,
}

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of SPC-4 and SBC-3")]
pub enum Command {
    TestUnitReady,
    RequestSense {
        descriptor: bool,
        alloc: u32,
    },
    Inquiry {
        vpd: Option<u8>,
        alloc: u32,
    },
    ReportLuns {
        select: u8,
        alloc: u32,
    },
    ReportOpcodes {
        options: u8,
        timeouts: bool,
        opcode: u8,
        action: u16,
        alloc: u32,
    },
    ModeSense {
        ten: bool,
        long_lba: bool,
        descriptors: bool,
        control: u8,
        page: u8,
        subpage: u8,
        alloc: u32,
    },
    ModeSelect {
        ten: bool,
        len: u32,
    },
    StartStop,
    PreventAllow {
        prevent: bool,
    },
    ReadCapacity10,
    ReadCapacity16 {
        alloc: u32,
    },
    LbaStatus {
        lba: u64,
        alloc: u32,
    },
    Read {
        range: Blocks,
    },
    Write {
        range: Blocks,
        fua: bool,
    },
    WriteVerify {
        range: Blocks,
        compare: bool,
    },
    Verify {
        range: Blocks,
        check: Check,
    },
    WriteSame {
        range: Blocks,
        unmap: bool,
        no_data: bool,
    },
    Unmap {
        len: u32,
    },
    CompareAndWrite {
        range: Blocks,
        fua: bool,
    },
    OrWrite {
        range: Blocks,
        fua: bool,
    },
    SynchronizeCache {
        range: Blocks,
    },
    Prefetch {
        range: Blocks,
    },
    PersistentIn {
        action: u8,
        alloc: u32,
    },
    PersistentOut {
        action: u8,
        scope: u8,
        kind: u8,
        len: u32,
    },
    Reserve6,
    Release6,
}

impl Command {
    /// How much data the command wants from the initiator.
    pub fn data_out_bytes(&self, block_size: u32) -> u64 {
        let block = u64::from(block_size);
        match self {
            Command::Write { range, .. }
            | Command::WriteVerify { range, .. }
            | Command::OrWrite { range, .. } => range.count.saturating_mul(block),
            Command::Verify {
                range,
                check: Check::Data,
            } => range.count.saturating_mul(block),
            Command::Verify {
                range,
                check: Check::OneBlock,
            } if range.count > 0 => block,
            Command::WriteSame { no_data: false, .. } => block,
            Command::CompareAndWrite { range, .. } => range.count.saturating_mul(2 * block),
            Command::Unmap { len }
            | Command::ModeSelect { len, .. }
            | Command::PersistentOut { len, .. } => u64::from(*len),
            _ => 0,
        }
    }

    /// What a reservation has to say about.
    pub fn touches(&self) -> Touch {
        match self {
            Command::Write { .. }
            | Command::WriteVerify { .. }
            | Command::WriteSame { .. }
            | Command::Unmap { .. }
            | Command::CompareAndWrite { .. }
            | Command::OrWrite { .. }
            | Command::SynchronizeCache { .. }
            | Command::ModeSelect { .. }
            | Command::PreventAllow { prevent: true } => Touch::Writes,
            Command::Read { .. }
            | Command::Verify { .. }
            | Command::Prefetch { .. }
            | Command::LbaStatus { .. }
            | Command::ModeSense { .. } => Touch::Reads,
            Command::PersistentIn { .. } | Command::PersistentOut { .. } => Touch::Persistent,
            Command::Reserve6 | Command::Release6 => Touch::Classic,
            Command::TestUnitReady
            | Command::RequestSense { .. }
            | Command::Inquiry { .. }
            | Command::ReportLuns { .. }
            | Command::ReportOpcodes { .. }
            | Command::StartStop
            | Command::PreventAllow { prevent: false }
            | Command::ReadCapacity10
            | Command::ReadCapacity16 { .. } => Touch::Nothing,
        }
    }

    /// Whether it changes data, which a read-only volume refuses.
    pub fn writes_medium(&self) -> bool {
        matches!(
            self,
            Command::Write { .. }
                | Command::WriteVerify { .. }
                | Command::WriteSame { .. }
                | Command::Unmap { .. }
                | Command::CompareAndWrite { .. }
                | Command::OrWrite { .. }
        )
    }

    /// Whether a pending unit attention does not stop it.
    pub fn ignores_attention(&self) -> bool {
        matches!(
            self,
            Command::Inquiry { .. } | Command::ReportLuns { .. } | Command::RequestSense { .. }
        )
    }
}

fn be16(cdb: &[u8; 16], at: usize) -> u16 {
    u16::from_be_bytes([cdb[at], cdb[at + 1]])
}

fn be32(cdb: &[u8; 16], at: usize) -> u32 {
    u32::from_be_bytes([cdb[at], cdb[at + 1], cdb[at + 2], cdb[at + 3]])
}

fn be64(cdb: &[u8; 16], at: usize) -> u64 {
    u64::from(be32(cdb, at)) << 32 | u64::from(be32(cdb, at + 4))
}

fn blocks10(cdb: &[u8; 16]) -> Blocks {
    Blocks {
        lba: u64::from(be32(cdb, 2)),
        count: u64::from(be16(cdb, 7)),
    }
}

fn blocks12(cdb: &[u8; 16]) -> Blocks {
    Blocks {
        lba: u64::from(be32(cdb, 2)),
        count: u64::from(be32(cdb, 6)),
    }
}

fn blocks16(cdb: &[u8; 16]) -> Blocks {
    Blocks {
        lba: be64(cdb, 2),
        count: u64::from(be32(cdb, 10)),
    }
}

/// The six-byte commands count 1 to 256 blocks, 256 as 0.
fn blocks6(cdb: &[u8; 16]) -> Blocks {
    let lba = u64::from(cdb[1] & 0x1f) << 16 | u64::from(cdb[2]) << 8 | u64::from(cdb[3]);
    Blocks {
        lba,
        count: if cdb[4] == 0 { 256 } else { u64::from(cdb[4]) },
    }
}

/// The blocks of the 10, 12 and 16-byte forms of one command.
fn blocks(cdb: &[u8; 16]) -> Blocks {
    match cdb[0] >> 5 {
        1 | 2 => blocks10(cdb),
        5 => blocks12(cdb),
        _ => blocks16(cdb),
    }
}

/// We have no protection information.
fn unprotected(cdb: &[u8; 16]) -> Result<(), Sense> {
    if cdb[1] & 0xe0 == 0 {
        Ok(())
    } else {
        Err(Sense::INVALID_FIELD_IN_CDB)
    }
}

const FUA: u8 = 0x08;

/// Read a CDB.
///
/// # Errors
/// The opcode, or a field that decides what the command means, is not supported.
pub fn parse(cdb: &[u8; 16]) -> Result<Command, Sense> {
    let command = match cdb[0] {
        0x00 => Command::TestUnitReady,
        0x03 => Command::RequestSense {
            descriptor: cdb[1] & 1 != 0,
            alloc: u32::from(cdb[4]),
        },
        0x12 => inquiry(cdb)?,
        0x15 => mode_select(cdb, false, u32::from(cdb[4]))?,
        0x55 => mode_select(cdb, true, u32::from(be16(cdb, 7)))?,
        0x16 => Command::Reserve6,
        0x17 => Command::Release6,
        0x1a => mode_sense(cdb, false, u32::from(cdb[4])),
        0x5a => mode_sense(cdb, true, u32::from(be16(cdb, 7))),
        0x1b => Command::StartStop,
        0x1e => Command::PreventAllow {
            prevent: cdb[4] & 3 != 0,
        },
        0x25 => Command::ReadCapacity10,
        0x5e => Command::PersistentIn {
            action: cdb[1] & 0x1f,
            alloc: u32::from(be16(cdb, 7)),
        },
        0x5f => Command::PersistentOut {
            action: cdb[1] & 0x1f,
            scope: cdb[2] >> 4,
            kind: cdb[2] & 15,
            len: be32(cdb, 5),
        },
        0xa0 => Command::ReportLuns {
            select: cdb[2],
            alloc: be32(cdb, 6),
        },
        0xa3 if cdb[1] & 0x1f == 0x0c => Command::ReportOpcodes {
            options: cdb[2] & 7,
            timeouts: cdb[2] & 0x80 != 0,
            opcode: cdb[3],
            action: be16(cdb, 4),
            alloc: be32(cdb, 6),
        },
        0x9e => match cdb[1] & 0x1f {
            0x10 => Command::ReadCapacity16 {
                alloc: be32(cdb, 10),
            },
            0x12 => Command::LbaStatus {
                lba: be64(cdb, 2),
                alloc: be32(cdb, 10),
            },
            _ => return Err(Sense::INVALID_FIELD_IN_CDB),
        },
        0xa3 => return Err(Sense::INVALID_FIELD_IN_CDB),
        _ => return parse_block(cdb),
    };
    Ok(command)
}

/// The commands that name blocks.
fn parse_block(cdb: &[u8; 16]) -> Result<Command, Sense> {
    let fua = cdb[1] & FUA != 0;
    let range = blocks(cdb);
    let command = match cdb[0] {
        0x08 => Command::Read {
            range: blocks6(cdb),
        },
        0x0a => Command::Write {
            range: blocks6(cdb),
            fua: false,
        },
        0x28 | 0xa8 | 0x88 => {
            unprotected(cdb)?;
            Command::Read { range }
        }
        0x2a | 0xaa | 0x8a => {
            unprotected(cdb)?;
            Command::Write { range, fua }
        }
        0x8b => {
            unprotected(cdb)?;
            Command::OrWrite { range, fua }
        }
        0x2e | 0xae | 0x8e => {
            unprotected(cdb)?;
            let check = check(cdb)?;
            Command::WriteVerify {
                range,
                compare: check == Check::Data,
            }
        }
        0x2f | 0xaf | 0x8f => {
            unprotected(cdb)?;
            Command::Verify {
                range,
                check: check(cdb)?,
            }
        }
        0x34 | 0x90 => Command::Prefetch { range },
        0x35 | 0x91 => Command::SynchronizeCache { range },
        0x41 | 0x93 => write_same(cdb, range)?,
        0x42 if cdb[1] & 1 == 0 => Command::Unmap {
            len: u32::from(be16(cdb, 7)),
        },
        0x42 => return Err(Sense::INVALID_FIELD_IN_CDB),
        0x89 => {
            unprotected(cdb)?;
            Command::CompareAndWrite {
                range: Blocks {
                    lba: be64(cdb, 2),
                    count: u64::from(cdb[13]),
                },
                fua,
            }
        }
        _ => return Err(Sense::INVALID_OPCODE),
    };
    Ok(command)
}

fn inquiry(cdb: &[u8; 16]) -> Result<Command, Sense> {
    let vpd = match (cdb[1] & 1 != 0, cdb[2]) {
        (true, page) => Some(page),
        (false, 0) => None,
        (false, _) => return Err(Sense::INVALID_FIELD_IN_CDB),
    };
    Ok(Command::Inquiry {
        vpd,
        alloc: u32::from(be16(cdb, 3)),
    })
}

fn mode_sense(cdb: &[u8; 16], ten: bool, alloc: u32) -> Command {
    Command::ModeSense {
        ten,
        long_lba: ten && cdb[1] & 0x10 != 0,
        descriptors: cdb[1] & 0x08 == 0,
        control: cdb[2] >> 6,
        page: cdb[2] & 0x3f,
        subpage: cdb[3],
        alloc,
    }
}

fn mode_select(cdb: &[u8; 16], ten: bool, len: u32) -> Result<Command, Sense> {
    let (page_format, save) = (cdb[1] & 0x10 != 0, cdb[1] & 1 != 0);
    if !page_format || save {
        return Err(Sense::INVALID_FIELD_IN_CDB);
    }
    Ok(Command::ModeSelect { ten, len })
}

fn check(cdb: &[u8; 16]) -> Result<Check, Sense> {
    match cdb[1] >> 1 & 3 {
        0 => Ok(Check::Medium),
        1 => Ok(Check::Data),
        3 => Ok(Check::OneBlock),
        _ => Err(Sense::INVALID_FIELD_IN_CDB),
    }
}

fn write_same(cdb: &[u8; 16], range: Blocks) -> Result<Command, Sense> {
    unprotected(cdb)?;
    let anchor = cdb[1] & 0x10 != 0;
    let obsolete = cdb[1] & 0x06 != 0;
    let no_data = cdb[1] & 1 != 0;
    if anchor || obsolete || (no_data && cdb[0] == 0x41) {
        return Err(Sense::INVALID_FIELD_IN_CDB);
    }
    Ok(Command::WriteSame {
        range,
        unmap: cdb[1] & 0x08 != 0,
        no_data,
    })
}
