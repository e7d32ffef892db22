//! SCSI: what a command means and how it ends.
//!
//! [`start`] decides everything that can be decided at once. Only the volume's work can take time; then the rest of
//! the command is a future that knows nothing of sessions or sockets.

pub mod cdb;
pub mod mode;
pub mod reserve;

mod block;
mod inquiry;
mod opcodes;
mod sense;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

use crate::lun::{Chunks, LunError, Span, chunks_len};
use crate::portal::{InitiatorPort, Nexus, Target};
use crate::unit::{Stopped, Unit};
use cdb::Command;
use inquiry::About;
use mode::ModeSense;
use reserve::Refused;
pub use sense::{Attention, Sense, key};

/// SCSI status codes.
pub mod status {
    #![allow(missing_docs, reason = "the names are those of SAM-5")]
    pub const GOOD: u8 = 0x00;
    pub const CHECK_CONDITION: u8 = 0x02;
    pub const BUSY: u8 = 0x08;
    pub const RESERVATION_CONFLICT: u8 = 0x18;
    pub const TASK_SET_FULL: u8 = 0x28;
}

/// Data for the initiator.
#[derive(Debug, Clone)]
pub enum Data {
    /// In pieces of memory.
    Memory(Chunks),
    /// In a file.
    File(Span),
}

impl Data {
    /// How much it is.
    pub fn len(&self) -> u64 {
        match self {
            Data::Memory(chunks) => u64::try_from(chunks_len(chunks)).unwrap_or(u64::MAX),
            Data::File(span) => u64::from(span.len),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for Data {
    fn default() -> Self {
        Data::Memory(Vec::new())
    }
}

/// What became of a command.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// The status.
    pub status: u8,
    /// Why it failed.
    pub sense: Option<Sense>,
    /// The format in which the initiator wants to be told.
    pub descriptor_sense: bool,
    /// Data for the initiator.
    pub data: Data,
    /// Initiator ports whose tasks have to be aborted before this is answered.
    pub aborts: Vec<Arc<InitiatorPort>>,
}

impl Outcome {
    /// Done, with nothing to say.
    pub fn good() -> Outcome {
        Outcome::default()
    }

    /// Failed for this reason.
    pub fn check(sense: Sense) -> Outcome {
        Outcome {
            status: status::CHECK_CONDITION,
            sense: Some(sense),
            ..Outcome::default()
        }
    }

    fn status(status: u8) -> Outcome {
        Outcome {
            status,
            ..Outcome::default()
        }
    }

    fn data(data: Chunks) -> Outcome {
        Outcome {
            data: Data::Memory(data),
            ..Outcome::default()
        }
    }

    /// Data cut to what the initiator has room for.
    fn allocated(mut data: Vec<u8>, alloc: u32) -> Outcome {
        data.truncate(usize::try_from(alloc).unwrap_or(usize::MAX));
        Outcome::data(vec![Bytes::from(data)])
    }

    /// The volume failed.
    fn failed(error: LunError, writing: bool) -> Outcome {
        match error {
            LunError::Medium if writing => Outcome::check(Sense::WRITE_ERROR),
            LunError::Medium => Outcome::check(Sense::READ_ERROR),
            LunError::NoSpace => Outcome::check(Sense::NO_SPACE),
            // Initiators repeat a command that finds the unit busy, without telling anyone above.
            LunError::NotReady => Outcome::status(status::BUSY),
            LunError::ReadOnly => Outcome::check(Sense::WRITE_PROTECTED),
            LunError::OutOfRange => Outcome::check(Sense::LBA_OUT_OF_RANGE),
        }
    }
}

impl From<Result<Outcome, Sense>> for Outcome {
    fn from(result: Result<Outcome, Sense>) -> Outcome {
        result.unwrap_or_else(Outcome::check)
    }
}

/// The rest of a command.
pub type Running = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// A command that has begun.
pub enum Started {
    /// It is over already.
    Done(Outcome),
    /// The volume is at work.
    Running(Running),
}

impl From<Outcome> for Started {
    fn from(outcome: Outcome) -> Started {
        Started::Done(outcome)
    }
}

/// A command with all that it needs.
pub struct Request {
    /// What it asks for, or why it cannot be understood.
    pub command: Result<Command, Sense>,
    /// What the initiator sent along, as far as the command wants it.
    pub data: Chunks,
    /// How much the initiator announced that it would send.
    pub announced: u32,
    /// Whether data may be sent from where it lies, because no checksum of it is needed.
    pub spans: bool,
}

/// Run a command of a nexus. `unit` is `None` when there is no logical unit of the number.
pub fn start(
    target: &Target,
    unit: Option<&Arc<Unit>>,
    nexus: &Nexus,
    request: Request,
) -> Started {
    let Some(unit) = unit else {
        return without_unit(target, request.command).into();
    };
    let admitted = match unit.admit(nexus, request.command.as_ref().ok()) {
        Ok(admitted) => admitted,
        Err(Stopped::Attention(attention)) => return Outcome::check(attention.sense()).into(),
        Err(Stopped::Conflict) => return Outcome::status(status::RESERVATION_CONFLICT).into(),
    };
    let command = match request.command {
        Ok(command) => command,
        Err(sense) => return with_format(Outcome::check(sense), admitted.descriptor_sense).into(),
    };
    let started = if command.writes_medium() && unit.lun().read_only() {
        Outcome::check(Sense::WRITE_PROTECTED).into()
    } else if command.writes_medium() && admitted.software_write_protect {
        Outcome::check(Sense::SOFTWARE_WRITE_PROTECTED).into()
    } else if let Some(started) = block::start(unit, admitted.size, &command, &request) {
        started
    } else {
        Outcome::from(at_once(target, unit, nexus, &command, &request.data)).into()
    };
    match started {
        Started::Done(outcome) => with_format(outcome, admitted.descriptor_sense).into(),
        Started::Running(rest) if admitted.descriptor_sense => {
            Started::Running(Box::pin(async { with_format(rest.await, true) }))
        }
        running => running,
    }
}

fn with_format(mut outcome: Outcome, descriptor_sense: bool) -> Outcome {
    outcome.descriptor_sense = descriptor_sense;
    outcome
}

/// The few commands that a number without a logical unit answers.
fn without_unit(target: &Target, command: Result<Command, Sense>) -> Outcome {
    match command {
        Ok(Command::Inquiry { vpd: None, alloc }) => {
            Outcome::allocated(inquiry::standard(false), alloc)
        }
        Ok(Command::ReportLuns { select, alloc }) => report_luns(target, select, alloc).into(),
        Ok(Command::RequestSense { descriptor, alloc }) => {
            request_sense(Sense::NO_UNIT, descriptor, alloc)
        }
        _ => Outcome::check(Sense::NO_UNIT),
    }
}

fn report_luns(target: &Target, select: u8, alloc: u32) -> Result<Outcome, Sense> {
    let numbers: Vec<u16> = target.units().iter().map(|(number, _)| *number).collect();
    Ok(Outcome::allocated(inquiry::luns(select, &numbers)?, alloc))
}

fn request_sense(sense: Sense, descriptor: bool, alloc: u32) -> Outcome {
    let data = if descriptor {
        sense.descriptor()
    } else {
        sense.fixed().to_vec()
    };
    Outcome::allocated(data, alloc)
}

/// A parameter list in one piece. Lists are short; longer ones have been refused before.
fn gather(data: &[Bytes]) -> Bytes {
    match data {
        [one] => one.clone(),
        _ => {
            let mut all = Vec::with_capacity(chunks_len(data));
            data.iter().for_each(|piece| all.extend_from_slice(piece));
            Bytes::from(all)
        }
    }
}

/// The commands that the volume has no part in.
fn at_once(
    target: &Target,
    unit: &Unit,
    nexus: &Nexus,
    command: &Command,
    data: &[Bytes],
) -> Result<Outcome, Sense> {
    let (size, block_size) = (unit.lun().size(), unit.block_size());
    let outcome = match *command {
        Command::Inquiry { vpd: None, alloc } => Outcome::allocated(inquiry::standard(true), alloc),
        Command::Inquiry {
            vpd: Some(page),
            alloc,
        } => {
            let about = About {
                identity: unit.identity(),
                block_size,
                physical_block_size: unit.lun().physical_block_size(),
                target: target.name(),
            };
            Outcome::allocated(inquiry::page(page, &about)?, alloc)
        }
        Command::ReportLuns { select, alloc } => report_luns(target, select, alloc)?,
        Command::RequestSense { descriptor, alloc } => {
            let sense = unit
                .take_attention(nexus)
                .map_or(Sense::NONE, Attention::sense);
            request_sense(sense, descriptor, alloc)
        }
        Command::ReportOpcodes {
            options,
            timeouts,
            opcode,
            action,
            alloc,
        } => Outcome::allocated(opcodes::report(options, timeouts, opcode, action)?, alloc),
        Command::ReadCapacity10 => {
            Outcome::allocated(inquiry::capacity10(size, block_size), u32::MAX)
        }
        Command::ReadCapacity16 { alloc } => Outcome::allocated(
            inquiry::capacity16(size, block_size, unit.lun().physical_block_size()),
            alloc,
        ),
        Command::ModeSense {
            ten,
            long_lba,
            descriptors,
            control,
            page,
            subpage,
            alloc,
        } => {
            let request = ModeSense {
                ten,
                long_lba,
                descriptors,
                control,
                page,
                subpage,
            };
            Outcome::allocated(mode::sense(&request, &unit.mode())?, alloc)
        }
        Command::ModeSelect { ten, .. } => {
            unit.set_mode(nexus, mode::select(ten, &gather(data), &unit.mode())?);
            Outcome::good()
        }
        Command::PersistentIn { action, alloc } => {
            Outcome::allocated(unit.persistent_in(action)?, alloc)
        }
        Command::PersistentOut {
            action,
            scope,
            kind,
            ..
        } => match unit.persistent_out(nexus, (action, scope, kind), &gather(data)) {
            Ok(aborts) => Outcome {
                aborts,
                ..Outcome::good()
            },
            Err(Refused::Conflict) => Outcome::status(status::RESERVATION_CONFLICT),
            Err(Refused::Sense(sense)) => return Err(sense),
        },
        Command::Reserve6 => {
            unit.reserve(nexus);
            Outcome::good()
        }
        Command::Release6 => {
            unit.release(nexus);
            Outcome::good()
        }
        // Nothing spins and nothing can be taken out.
        Command::TestUnitReady | Command::StartStop | Command::PreventAllow { .. } => {
            Outcome::good()
        }
        _ => return Err(Sense::INVALID_OPCODE),
    };
    Ok(outcome)
}
