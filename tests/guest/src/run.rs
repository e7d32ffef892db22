//! Scenarios one after the other, in as many guests as it takes.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::image::Image;
use crate::protocol::{Answer, Ended, How, Order, Request, receive, send};
use crate::qemu::Machine;

/// How long a guest may take to come up. It takes seconds; the machine may be busy.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// How long a guest may take, beyond a scenario's limit, to kill it and to clean up after it.
const CLEANING_LIMIT: Duration = Duration::from_secs(60);
/// How long a guest may take to switch itself off; it is killed then.
const OFF_LIMIT: Duration = Duration::from_secs(20);
/// How much of a scenario's output is kept: the last part.
const LOG_BYTES_MAX: usize = 1 << 20;

/// How a scenario went.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its name.
    pub name: String,
    /// How its program ended.
    pub how: How,
    /// How long it ran.
    pub took: Duration,
    /// What it printed.
    pub log: String,
    /// What it left behind.
    pub left: Vec<String>,
    /// The last lines of the guest's console, if the scenario did not pass.
    pub console: String,
}

impl Outcome {
    /// Whether it did what it should and left nothing behind.
    pub fn passed(&self) -> bool {
        self.how == How::Exited(0) && self.left.is_empty()
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = if self.passed() { "pass" } else { "FAIL" };
        let seconds = self.took.as_secs_f64();
        write!(f, "{state} {:<24} {seconds:>6.1} s", self.name)?;
        if self.how != How::Exited(0) {
            write!(f, "  {}", self.how)?;
        }
        if !self.left.is_empty() {
            write!(f, "  left behind: {}", self.left.join(", "))?;
        }
        Ok(())
    }
}

/// What is told while scenarios run.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A guest is up.
    Booted {
        /// Its kernel.
        kernel: &'a str,
        /// How long it took, from the start of QEMU.
        took: Duration,
    },
    /// A scenario printed something.
    Said(&'a str),
    /// A scenario has ended.
    Ended(&'a Outcome),
}

/// Runs the orders in their order, and answers how each went. A guest that dies or is not fit for another
/// scenario is replaced by a new one.
pub fn run(
    image: &Image,
    orders: &[Order],
    tell: &mut dyn FnMut(Progress<'_>),
) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    while outcomes.len() < orders.len() {
        let mut guest = Guest::boot(image, tell)?;
        let mut fit = true;
        while fit && outcomes.len() < orders.len() {
            let outcome;
            (outcome, fit) = guest.order(&orders[outcomes.len()], tell);
            tell(Progress::Ended(&outcome));
            outcomes.push(outcome);
        }
        if fit {
            guest.switch_off();
        }
    }
    Ok(outcomes)
}

/// A guest that is up.
struct Guest {
    machine: Machine,
    port: UnixStream,
}

impl Guest {
    fn boot(image: &Image, tell: &mut dyn FnMut(Progress<'_>)) -> Result<Guest> {
        let started = Instant::now();
        let (mut machine, mut port) = Machine::start(image)?;
        match next(&mut port, started + BOOT_LIMIT) {
            Ok(Answer::Ready { kernel, .. }) => tell(Progress::Booted {
                kernel: &kernel,
                took: started.elapsed(),
            }),
            _ => {
                let console = machine.console_tail();
                return Err(Error::Silent {
                    limit: BOOT_LIMIT,
                    console,
                });
            }
        }
        machine.forget_files();
        Ok(Guest { machine, port })
    }

    /// Runs one scenario, and answers how it went and whether the guest is fit for another.
    fn order(&mut self, order: &Order, tell: &mut dyn FnMut(Progress<'_>)) -> (Outcome, bool) {
        let started = Instant::now();
        let deadline = started + order.limit + CLEANING_LIMIT;
        let mut log = String::new();
        let answered = send(&mut self.port, &Request::Run(order.clone()))
            .and_then(|()| self.follow(deadline, &mut log, tell));
        let ended = answered.unwrap_or_else(|_| Ended {
            how: How::GuestDied,
            took: started.elapsed(),
            left: Vec::new(),
            fit: false,
        });
        let fit = ended.fit;
        let mut outcome = Outcome {
            name: order.name.clone(),
            how: ended.how,
            took: ended.took,
            log,
            left: ended.left,
            console: String::new(),
        };
        if !outcome.passed() {
            outcome.console = self.machine.console_tail();
        }
        (outcome, fit)
    }

    /// Takes what a scenario prints until it has ended.
    fn follow(
        &mut self,
        deadline: Instant,
        log: &mut String,
        tell: &mut dyn FnMut(Progress<'_>),
    ) -> io::Result<Ended> {
        loop {
            match next(&mut self.port, deadline)? {
                Answer::Said(text) => {
                    tell(Progress::Said(&text));
                    log.push_str(&text);
                    let surplus = log.len().saturating_sub(LOG_BYTES_MAX);
                    log.drain(..log.ceil_char_boundary(surplus));
                }
                Answer::Ended(ended) => return Ok(ended),
                Answer::Ready { .. } => return Err(io::Error::other("the guest has started anew")),
            }
        }
    }

    fn switch_off(mut self) {
        if send(&mut self.port, &Request::PowerOff).is_ok() {
            self.machine.finish(OFF_LIMIT);
        }
    }
}

/// The next answer, or an error when the deadline has passed.
fn next(port: &mut UnixStream, deadline: Instant) -> io::Result<Answer> {
    let left = deadline.saturating_duration_since(Instant::now());
    // Zero would mean to wait for ever.
    port.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
    receive(port)
}
