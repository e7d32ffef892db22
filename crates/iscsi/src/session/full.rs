//! The full-feature phase: commands, their data, and their status.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;

use super::manage::Drain;
use super::reply::{self, Asked, Numbers};
use super::task::{Stage, Task, Tasks};
use super::text::TextExchange;
use super::transfer::{Broken, Segment, Transfer};
use super::window::CommandTurn;
use super::{Completion, Line};
use crate::error::{Breach, Disconnect};
use crate::limits::{IMMEDIATE_MAX, TRANSFER_BYTES_MAX};
use crate::login::Params;
use crate::pdu::header::{
    Async, DataOut, Generic, LogoutRequest, LogoutResponse, NopIn, NopOut, R2t, Reject, ScsiCommand,
};
use crate::pdu::{FINAL, HEADER_BYTES, Pdu, TAG_NONE, opcode, reject};
use crate::portal::{Control, SessionSeat};
use crate::scsi::{self, Outcome, Request, Sense, Started, cdb};

const READ: u8 = 0x40;
const WRITE: u8 = 0x20;
const ATTRIBUTE: u8 = 0x07;
const ORDERED: u8 = 2;
const HEAD_OF_QUEUE: u8 = 3;

/// A session in the full-feature phase.
pub struct Full {
    pub(super) seat: SessionSeat,
    pub(super) params: Params,
    pub(super) cid: u16,
    pub(super) local: SocketAddr,
    pub(super) tasks: Tasks,
    pub(super) drains: Vec<Drain>,
    pub(super) text: TextExchange,
    /// Commands that came before their turn.
    early: BTreeMap<u32, Pdu>,
    last_ttt: u32,
}

/// The number of a logical unit, in any of the single-level forms.
pub(super) fn unit_number(lun: [u8; 8]) -> Option<u16> {
    let rest_is_zero = lun[2..].iter().all(|byte| *byte == 0);
    match lun[0] >> 6 {
        0 if lun[0] == 0 && rest_is_zero => Some(u16::from(lun[1])),
        1 if rest_is_zero => Some(u16::from_be_bytes([lun[0] & 0x3f, lun[1]])),
        _ => None,
    }
}

impl Full {
    pub(super) fn new(seat: SessionSeat, params: Params, cid: u16, local: SocketAddr) -> Self {
        Full {
            seat,
            params,
            cid,
            local,
            tasks: Tasks::default(),
            drains: Vec::new(),
            text: TextExchange::default(),
            early: BTreeMap::new(),
            last_ttt: 0,
        }
    }

    pub(super) fn receive(&mut self, line: &mut Line, pdu: Pdu) -> Result<(), Disconnect> {
        match pdu.opcode() {
            opcode::DATA_OUT => self.data_out(line, &pdu),
            opcode::SNACK => {
                self.reject(line, reject::SNACK, &pdu.header);
                Ok(())
            }
            opcode::LOGIN => {
                self.reject(line, reject::PROTOCOL, &pdu.header);
                Err(Disconnect::Protocol(Breach::LoginTwice))
            }
            opcode::NOP_OUT
            | opcode::SCSI_COMMAND
            | opcode::TASK_MANAGEMENT
            | opcode::TEXT
            | opcode::LOGOUT => self.numbered(line, pdu),
            _ => {
                self.reject(line, reject::NOT_SUPPORTED, &pdu.header);
                Ok(())
            }
        }
    }

    /// Commands that carry a CmdSN are taken in its order.
    fn numbered(&mut self, line: &mut Line, pdu: Pdu) -> Result<(), Disconnect> {
        // CmdSN is at the same place in all of them.
        let cmd_sn = ScsiCommand::from_wire(&pdu.header).cmd_sn.get();
        if pdu.immediate() {
            return self.handle(line, &pdu);
        }
        match line.window.turn(cmd_sn) {
            CommandTurn::Outside => Ok(()),
            CommandTurn::Early => {
                // As many as the window is wide, by their numbers.
                self.early.insert(cmd_sn, pdu);
                Ok(())
            }
            CommandTurn::Next => {
                line.window.advance();
                self.handle(line, &pdu)?;
                while let Some(pdu) = self.early.remove(&line.window.expected()) {
                    line.window.advance();
                    self.handle(line, &pdu)?;
                }
                Ok(())
            }
        }
    }

    fn handle(&mut self, line: &mut Line, pdu: &Pdu) -> Result<(), Disconnect> {
        match pdu.opcode() {
            opcode::SCSI_COMMAND => self.command(line, pdu),
            opcode::TASK_MANAGEMENT => {
                self.manage(line, pdu);
                Ok(())
            }
            opcode::TEXT => self.text(line, pdu),
            opcode::LOGOUT => self.logout(line, pdu),
            _ => {
                self.nop(line, pdu);
                Ok(())
            }
        }
    }

    fn command(&mut self, line: &mut Line, pdu: &Pdu) -> Result<(), Disconnect> {
        let header = *ScsiCommand::from_wire(&pdu.header);
        let itt = header.itt.get();
        let Some(target) = &self.seat.target else {
            return self.breach(line, pdu, reject::PROTOCOL, Breach::DiscoveryCommand);
        };
        if self.tasks.contains(itt) || itt == TAG_NONE {
            return self.breach(line, pdu, reject::TASK_IN_PROGRESS, Breach::TagInUse);
        }
        if pdu.immediate() && self.tasks.immediate() >= IMMEDIATE_MAX {
            return self.breach(
                line,
                pdu,
                reject::TOO_MANY_IMMEDIATE,
                Breach::TooManyImmediate,
            );
        }
        // A number in a form that we do not use names nobody.
        let number = unit_number(header.lun).unwrap_or(u16::MAX);
        let unit = target.unit(number);
        let command = cdb::parse(&header.cdb);
        let block_size = unit.as_ref().map_or(512, |unit| unit.block_size());
        let write_wanted = command
            .as_ref()
            .map_or(0, |command| command.data_out_bytes(block_size));
        let expected = header.expected_len.get();
        let writes = header.flags & WRITE != 0;
        let write_announced = if writes { expected } else { 0 };
        // Data of a command that is too long is not asked for: it will be refused.
        let wanted = u32::try_from(write_wanted)
            .ok()
            .filter(|len| *len <= TRANSFER_BYTES_MAX)
            .unwrap_or(0);
        let more = header.flags & FINAL == 0;
        let mut transfer = Transfer::new(write_announced, wanted, more, &self.params);
        let unasked = !self.params.immediate_data || !writes;
        let broken = (!pdu.data.is_empty() && unasked) || transfer.immediate(&pdu.data).is_err();
        let task = Task {
            order: self.tasks.next_order(),
            number,
            unit,
            command,
            numbered: !pdu.immediate(),
            ordered: header.flags & ATTRIBUTE == ORDERED,
            read_room: if header.flags & READ != 0 && !writes {
                expected
            } else {
                0
            },
            write_announced,
            write_wanted,
            r2ts: 0,
            held_out: 0,
            held_in: 0,
            stage: Stage::Collecting(Box::new(transfer)),
            aborted: false,
        };
        if task.numbered {
            line.window.open();
        }
        self.tasks.insert(itt, task);
        if broken {
            self.finish(line, itt, Outcome::check(Sense::DATA_SEQUENCE));
            return Ok(());
        }
        self.advance(line, itt, header.flags & ATTRIBUTE == HEAD_OF_QUEUE);
        Ok(())
    }

    /// See whether a command's data is whole, or has to be asked for.
    fn advance(&mut self, line: &mut Line, itt: u32, head_of_queue: bool) {
        let Some(task) = self.tasks.get_mut(itt) else {
            return;
        };
        let Stage::Collecting(transfer) = &mut task.stage else {
            return;
        };
        if transfer.is_whole() {
            self.tasks.make_ready(itt, head_of_queue);
        } else if transfer.unasked() > 0 && task.held_out == 0 {
            self.tasks.wait_for_room(itt);
            self.solicit(line);
        } else {
            self.ask(line, itt);
        }
    }

    /// Give room to writes that wait for it, and ask for their data.
    fn solicit(&mut self, line: &mut Line) {
        while let Some(itt) = self.tasks.give_room() {
            self.ask(line, itt);
        }
    }

    /// Ask for as many bursts of one write as may be out.
    fn ask(&mut self, line: &mut Line, itt: u32) {
        let Some(task) = self.tasks.get_mut(itt) else {
            return;
        };
        let Stage::Collecting(transfer) = &mut task.stage else {
            return;
        };
        let last_ttt = &mut self.last_ttt;
        let mut tag = || {
            *last_ttt = last_ttt.wrapping_add(1) % TAG_NONE;
            *last_ttt
        };
        let [high, low] = task.number.to_be_bytes();
        while let Some(burst) = transfer.ask(&self.params, &mut tag) {
            let header = R2t {
                opcode: opcode::R2T,
                flags: FINAL,
                lun: [high, low, 0, 0, 0, 0, 0, 0],
                itt: itt.into(),
                ttt: burst.ttt.into(),
                stat_sn: line.stat_sn.into(),
                exp_cmd_sn: line.window.expected().into(),
                max_cmd_sn: line.window.last().into(),
                r2t_sn: burst.number.into(),
                offset: burst.offset.into(),
                desired_len: burst.len.into(),
                ..R2t::default()
            };
            line.out.push(zerocopy::transmute!(header), &[]);
        }
    }

    fn data_out(&mut self, line: &mut Line, pdu: &Pdu) -> Result<(), Disconnect> {
        let header = DataOut::from_wire(&pdu.header);
        let itt = header.itt.get();
        // Data of a command that was aborted or has failed may still be on its way: it is dropped.
        let Some(Task {
            stage: Stage::Collecting(transfer),
            ..
        }) = self.tasks.get_mut(itt)
        else {
            return Ok(());
        };
        let segment = Segment {
            ttt: header.ttt.get(),
            data_sn: header.data_sn.get(),
            offset: header.offset.get(),
            last: header.flags & FINAL != 0,
            data: &pdu.data,
        };
        match transfer.segment(&segment) {
            Ok(()) => self.advance(line, itt, false),
            Err(Broken) => self.finish(line, itt, Outcome::check(Sense::DATA_SEQUENCE)),
        }
        Ok(())
    }

    /// Start the commands whose turn it is.
    pub(super) fn pump(&mut self, line: &mut Line) {
        while let Some((itt, data)) = self.tasks.next_to_run(line.out.bytes()) {
            let (Some(target), Some(task)) = (&self.seat.target, self.tasks.get_mut(itt)) else {
                return;
            };
            let request = Request {
                command: task.command,
                data,
                announced: task.write_announced,
                spans: !self.params.data_digest,
            };
            let started = scsi::start(target, task.unit.as_ref(), &self.seat.nexus, request);
            match started {
                Started::Done(outcome) => self.finish(line, itt, outcome),
                Started::Running(mut rest) => {
                    // Most volumes answer soon: the first look costs less than a place in the queue.
                    match rest.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                        Poll::Ready(outcome) => self.finish(line, itt, outcome),
                        Poll::Pending => line.running.push_back(Box::pin(async move {
                            Completion::Command {
                                itt,
                                outcome: rest.await,
                            }
                        })),
                    }
                }
            }
        }
    }

    /// A command is over: tell the initiator, unless it was aborted.
    pub(super) fn finish(&mut self, line: &mut Line, itt: u32, mut outcome: Outcome) {
        if !outcome.aborts.is_empty() {
            let ports = std::mem::take(&mut outcome.aborts);
            return self.abort_ports_first(line, itt, ports, outcome);
        }
        let Some(task) = self.close_task(line, itt) else {
            return;
        };
        if task.aborted {
            return;
        }
        let r2ts = match &task.stage {
            Stage::Collecting(transfer) => transfer.bursts_made(),
            Stage::Ready(_) | Stage::Running => task.r2ts,
        };
        let asked = Asked {
            itt,
            read_room: task.read_room,
            write_announced: task.write_announced,
            write_wanted: task.write_wanted,
            r2ts,
            segment_bytes_max: self.params.send_segment_bytes_max,
            burst_bytes_max: self.params.max_burst_bytes,
        };
        let numbers = self.numbers(line);
        reply::send(&mut line.out, &asked, numbers, &outcome);
    }

    /// Take a command off the books.
    pub(super) fn close_task(&mut self, line: &mut Line, itt: u32) -> Option<Task> {
        let task = self.tasks.remove(itt)?;
        if task.numbered {
            line.window.close();
        }
        if task.held_out > 0 {
            self.solicit(line);
        }
        if task.aborted {
            self.drains.retain_mut(|drain| !drain.done(itt));
        }
        Some(task)
    }

    pub(super) fn numbers(&self, line: &mut Line) -> Numbers {
        Numbers {
            stat_sn: line.next_stat_sn(),
            exp_cmd_sn: line.window.expected(),
            max_cmd_sn: line.window.last(),
        }
    }

    fn breach(
        &mut self,
        line: &mut Line,
        pdu: &Pdu,
        reason: u8,
        breach: Breach,
    ) -> Result<(), Disconnect> {
        self.reject(line, reason, &pdu.header);
        Err(Disconnect::Protocol(breach))
    }

    /// Tell the initiator which header we do not accept.
    pub(super) fn reject(&mut self, line: &mut Line, reason: u8, bad: &[u8; HEADER_BYTES]) {
        let numbers = self.numbers(line);
        let header = Reject {
            opcode: opcode::REJECT,
            flags: FINAL,
            reason,
            tag: TAG_NONE.into(),
            stat_sn: numbers.stat_sn.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..Reject::default()
        };
        line.out
            .push(zerocopy::transmute!(header), &[Bytes::copy_from_slice(bad)]);
    }

    fn nop(&mut self, line: &mut Line, pdu: &Pdu) {
        let request = NopOut::from_wire(&pdu.header);
        // Without a tag it wants no answer; it may be the answer to our own ping, and then it has been heard.
        if request.itt.get() == TAG_NONE {
            return;
        }
        let room = usize::try_from(self.params.send_segment_bytes_max).unwrap_or(usize::MAX);
        let data = pdu.data.slice(..pdu.data.len().min(room));
        let numbers = self.numbers(line);
        let header = NopIn {
            opcode: opcode::NOP_IN,
            flags: FINAL,
            lun: request.lun,
            itt: request.itt,
            ttt: TAG_NONE.into(),
            stat_sn: numbers.stat_sn.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..NopIn::default()
        };
        line.out.push(zerocopy::transmute!(header), &[data]);
    }

    /// Ask whether the initiator is there.
    pub(super) fn ping(&mut self, line: &mut Line) {
        self.last_ttt = self.last_ttt.wrapping_add(1) % TAG_NONE;
        let header = NopIn {
            opcode: opcode::NOP_IN,
            flags: FINAL,
            itt: TAG_NONE.into(),
            ttt: self.last_ttt.into(),
            stat_sn: line.stat_sn.into(),
            exp_cmd_sn: line.window.expected().into(),
            max_cmd_sn: line.window.last().into(),
            ..NopIn::default()
        };
        line.out.push(zerocopy::transmute!(header), &[]);
    }

    pub(super) fn request_logout(&mut self, line: &mut Line, grace: Duration) {
        const LOGOUT_REQUESTED: u8 = 1;
        let numbers = self.numbers(line);
        let header = Async {
            opcode: opcode::ASYNC,
            flags: FINAL,
            tag: TAG_NONE.into(),
            stat_sn: numbers.stat_sn.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            event: LOGOUT_REQUESTED,
            parameter3: u16::try_from(grace.as_secs()).unwrap_or(u16::MAX).into(),
            ..Async::default()
        };
        line.out.push(zerocopy::transmute!(header), &[]);
    }

    fn logout(&mut self, line: &mut Line, pdu: &Pdu) -> Result<(), Disconnect> {
        const CLOSE_SESSION: u8 = 0;
        const CLOSE_CONNECTION: u8 = 1;
        const NOT_FOUND: u8 = 1;
        const RECOVERY_NOT_SUPPORTED: u8 = 2;
        let request = LogoutRequest::from_wire(&pdu.header);
        let response = match request.reason & 0x7f {
            CLOSE_SESSION => 0,
            CLOSE_CONNECTION if request.cid.get() == self.cid => 0,
            CLOSE_CONNECTION => NOT_FOUND,
            _ => RECOVERY_NOT_SUPPORTED,
        };
        let numbers = self.numbers(line);
        let header = LogoutResponse {
            opcode: opcode::LOGOUT_RESPONSE,
            flags: FINAL,
            response,
            itt: Generic::from_wire(&pdu.header).itt,
            stat_sn: numbers.stat_sn.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..LogoutResponse::default()
        };
        line.out.push(zerocopy::transmute!(header), &[]);
        if response == 0 {
            Err(Disconnect::LoggedOut)
        } else {
            Ok(())
        }
    }

    pub(super) fn control(&mut self, line: &mut Line, control: &Control) {
        match control {
            Control::Abort {
                unit,
                ports,
                attention,
                hold,
            } => {
                if ports
                    .as_ref()
                    .is_some_and(|ports| !ports.contains(&self.seat.nexus.port))
                {
                    return;
                }
                let tags = self
                    .tasks
                    .tags(|task| unit.is_none_or(|unit| unit == task.number));
                if let (Some(attention), false) = (attention, tags.is_empty()) {
                    self.attend_own(*unit, *attention);
                }
                self.abort(line, tags, hold.clone());
            }
        }
    }
}
