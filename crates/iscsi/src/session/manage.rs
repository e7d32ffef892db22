//! Task management: aborting commands here and in other sessions, and resets.
//!
//! A command that the volume is working on cannot be taken back. It is marked, and its status is not sent. The answer
//! to the task management function waits until the command has ended; after the answer it can have no further effect.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::full::{Full, unit_number};
use super::task::{Stage, Task};
use super::{Completion, Line};
use crate::error::Disconnect;
use crate::pdu::header::{TaskManagement, TaskManagementResponse};
use crate::pdu::{FINAL, Pdu, opcode};
use crate::portal::{Control, Hold, InitiatorPort};
use crate::scsi::{Attention, Outcome};

const ABORT_TASK: u8 = 1;
const ABORT_TASK_SET: u8 = 2;
const CLEAR_TASK_SET: u8 = 4;
const LUN_RESET: u8 = 5;
const TARGET_WARM_RESET: u8 = 6;
const TARGET_COLD_RESET: u8 = 7;
const TASK_REASSIGN: u8 = 8;

const COMPLETE: u8 = 0;
const NO_TASK: u8 = 1;
const NO_UNIT: u8 = 2;
const REASSIGN_NOT_SUPPORTED: u8 = 4;
const NOT_SUPPORTED: u8 = 5;

/// Aborted commands that somebody waits for.
pub struct Drain {
    left: HashSet<u32>,
    /// Let go of when none is left.
    _hold: Hold,
}

impl Drain {
    /// A command is over; answers whether it was the last.
    pub fn done(&mut self, itt: u32) -> bool {
        self.left.remove(&itt);
        self.left.is_empty()
    }
}

impl Full {
    pub(super) fn manage(&mut self, line: &mut Line, pdu: &Pdu) {
        let request = *TaskManagement::from_wire(&pdu.header);
        let itt = request.itt.get();
        let function = request.function & 0x7f;
        let number = unit_number(request.lun);
        let unit = self
            .seat
            .target
            .as_ref()
            .and_then(|target| target.unit(number?));
        let of_unit = matches!(function, ABORT_TASK_SET | CLEAR_TASK_SET | LUN_RESET);
        if of_unit && unit.is_none() {
            return self.respond(line, itt, NO_UNIT);
        }
        let (hold, released) = mpsc::channel(1);
        match function {
            ABORT_TASK => {
                let tag = request.referenced_tag.get();
                if !self.tasks.contains(tag) {
                    return self.respond(line, itt, NO_TASK);
                }
                self.abort(line, vec![tag], hold);
            }
            ABORT_TASK_SET => self.abort_own(line, number, hold),
            CLEAR_TASK_SET => {
                self.ask_others(number, None, Some(Attention::CommandsCleared), &hold);
                self.abort_own(line, number, hold);
            }
            LUN_RESET => {
                self.ask_others(number, None, None, &hold);
                self.abort_own(line, number, hold);
                unit.iter().for_each(|unit| unit.reset());
            }
            TARGET_WARM_RESET | TARGET_COLD_RESET => {
                self.ask_others(None, None, None, &hold);
                self.abort_own(line, None, hold);
                let units = self.seat.target.iter().flat_map(|target| target.units());
                units.for_each(|(_, unit)| unit.reset());
            }
            TASK_REASSIGN => return self.respond(line, itt, REASSIGN_NOT_SUPPORTED),
            _ => return self.respond(line, itt, NOT_SUPPORTED),
        }
        self.when_released(
            line,
            released,
            Completion::Managed {
                itt,
                cold: function == TARGET_COLD_RESET,
            },
        );
    }

    /// Hand out a future that brings `completion` when nobody holds any more.
    fn when_released(
        &mut self,
        line: &mut Line,
        mut released: mpsc::Receiver<std::convert::Infallible>,
        completion: Completion,
    ) {
        line.running.push_back(Box::pin(async move {
            while released.recv().await.is_some() {}
            completion
        }));
    }

    fn ask_others(
        &self,
        unit: Option<u16>,
        ports: Option<Vec<Arc<InitiatorPort>>>,
        attention: Option<Attention>,
        hold: &Hold,
    ) {
        self.seat.ask_others(&Control::Abort {
            unit,
            ports,
            attention,
            hold: hold.clone(),
        });
    }

    fn abort_own(&mut self, line: &mut Line, unit: Option<u16>, hold: Hold) {
        let tags = self
            .tasks
            .tags(|task| unit.is_none_or(|unit| unit == task.number));
        self.abort(line, tags, hold);
    }

    /// Abort commands; `hold` is let go of when the last is over.
    pub(super) fn abort(&mut self, line: &mut Line, tags: Vec<u32>, hold: Hold) {
        let mut left = HashSet::new();
        for itt in tags {
            match self.tasks.get_mut(itt) {
                Some(
                    task @ Task {
                        stage: Stage::Running,
                        ..
                    },
                ) => {
                    task.aborted = true;
                    left.insert(itt);
                }
                Some(_) => {
                    self.close_task(line, itt);
                }
                None => {}
            }
        }
        if !left.is_empty() {
            self.drains.push(Drain { left, _hold: hold });
        }
    }

    /// PREEMPT AND ABORT: the command is answered when the tasks of the preempted ports have ended.
    pub(super) fn abort_ports_first(
        &mut self,
        line: &mut Line,
        itt: u32,
        ports: Vec<Arc<InitiatorPort>>,
        outcome: Outcome,
    ) {
        let unit = self.tasks.get_mut(itt).map(|task| task.number);
        let (hold, released) = mpsc::channel(1);
        self.ask_others(unit, Some(ports), None, &hold);
        drop(hold);
        self.when_released(line, released, Completion::Command { itt, outcome });
    }

    /// This session's own commands were aborted by another.
    pub(super) fn attend_own(&self, number: Option<u16>, attention: Attention) {
        let units = self.seat.target.iter().flat_map(|target| target.units());
        for (_, unit) in units.filter(|(each, _)| number.is_none_or(|number| number == *each)) {
            unit.attend(&self.seat.nexus, attention);
        }
    }

    pub(super) fn managed(
        &mut self,
        line: &mut Line,
        itt: u32,
        cold: bool,
    ) -> Result<(), Disconnect> {
        self.respond(line, itt, COMPLETE);
        if cold {
            self.seat.close_all(Disconnect::ColdReset);
            return Err(Disconnect::ColdReset);
        }
        Ok(())
    }

    fn respond(&mut self, line: &mut Line, itt: u32, response: u8) {
        let numbers = self.numbers(line);
        let header = TaskManagementResponse {
            opcode: opcode::TASK_MANAGEMENT_RESPONSE,
            flags: FINAL,
            response,
            itt: itt.into(),
            stat_sn: numbers.stat_sn.into(),
            exp_cmd_sn: numbers.exp_cmd_sn.into(),
            max_cmd_sn: numbers.max_cmd_sn.into(),
            ..TaskManagementResponse::default()
        };
        line.out.push(zerocopy::transmute!(header), &[]);
    }
}
