//! Runs scenarios one after the other, in several guests at a time and in as many as it takes.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// Runs the orders and answers how each went, in their order. So many guests take them from the front at the
/// same time; one that dies or is not fit for another scenario is replaced by a new one.
pub fn run(
    image: &Image,
    orders: &[Order],
    guests: usize,
    tell: &mut (dyn FnMut(Progress<'_>) + Send),
) -> Result<Vec<Outcome>> {
    let queue = Queue {
        orders,
        next: AtomicUsize::new(0),
        outcomes: Mutex::new(Vec::new()),
        tell: Mutex::new(tell),
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..guests.min(orders.len()))
            .map(|_| scope.spawn(|| queue.work(image)))
            .collect();
        workers.into_iter().try_for_each(|worker| {
            let died = |_| Err(Error::WorkerPanicked);
            worker.join().unwrap_or_else(died)
        })
    })?;
    let mut outcomes = queue.outcomes.into_inner().unwrap_or_default();
    outcomes.sort_by_key(|(index, _)| *index);
    Ok(outcomes.into_iter().map(|(_, outcome)| outcome).collect())
}

/// Orders that several guests share.
struct Queue<'a> {
    orders: &'a [Order],
    next: AtomicUsize,
    outcomes: Mutex<Vec<(usize, Outcome)>>,
    tell: Mutex<&'a mut (dyn FnMut(Progress<'_>) + Send)>,
}

impl Queue<'_> {
    fn take(&self) -> Option<(usize, &Order)> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        self.orders.get(index).map(|order| (index, order))
    }

    fn tell(&self, progress: Progress<'_>) {
        if let Ok(mut tell) = self.tell.lock() {
            tell(progress);
        }
    }

    /// Runs orders in one guest after the other until none is left.
    fn work(&self, image: &Image) -> Result<()> {
        let mut taken = self.take();
        while taken.is_some() {
            let mut guest = Guest::boot(image, &|progress| self.tell(progress))?;
            let mut fit = true;
            while let (true, Some((index, order))) = (fit, taken) {
                let outcome;
                (outcome, fit) = guest.order(order, &|progress| self.tell(progress));
                self.tell(Progress::Ended(&outcome));
                if let Ok(mut outcomes) = self.outcomes.lock() {
                    outcomes.push((index, outcome));
                }
                taken = self.take();
            }
            if fit {
                guest.switch_off();
            }
        }
        Ok(())
    }
}

/// A guest that is up.
struct Guest {
    machine: Machine,
    port: UnixStream,
}

impl Guest {
    fn boot(image: &Image, tell: &dyn Fn(Progress<'_>)) -> Result<Guest> {
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
    fn order(&mut self, order: &Order, tell: &dyn Fn(Progress<'_>)) -> (Outcome, bool) {
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
        tell: &dyn Fn(Progress<'_>),
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
