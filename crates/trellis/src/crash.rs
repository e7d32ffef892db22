//! Dies on command: the crash tests name a step, and the process kills itself the way `kill -9` would
//! when the step has just been taken; or it stops there, until it is told to go on.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Signal, getpid, kill_process};
use trellis_api::step::{self, Step};

/// `STEP` or `STEP:N`: die when the step is reached for the first or the N-th time.
pub const VARIABLE: &str = "TRELLIS_CRASH_AT";

/// The same, to stop there.
pub const STOP_VARIABLE: &str = "TRELLIS_STOP_AT";

static FATAL: OnceLock<(Step, Signal)> = OnceLock::new();
static LEFT: AtomicU32 = AtomicU32::new(0);

/// Installs the hook if the environment asks for it. A step that does not exist is said on standard
/// error, so that a test with a misspelt name does not pass by doing nothing.
pub fn arm() {
    let asked = |variable| std::env::var(variable).ok().map(|text| (variable, text));
    let Some((variable, text)) = asked(VARIABLE).or_else(|| asked(STOP_VARIABLE)) else {
        return;
    };
    let (name, count) = text.split_once(':').unwrap_or((&text, "1"));
    let (Some(fatal), Ok(count)) = (Step::from_name(name), count.parse()) else {
        eprintln!("trellis: {variable}={text:?} names no step");
        std::process::exit(2);
    };
    LEFT.store(count, Ordering::SeqCst);
    let signal = if variable == VARIABLE {
        Signal::KILL
    } else {
        Signal::STOP
    };
    let _ = FATAL.set((fatal, signal));
    step::install_hook(die_at);
}

fn die_at(reached: Step) {
    if let Some((fatal, signal)) = FATAL.get()
        && *fatal == reached
        && LEFT.fetch_sub(1, Ordering::SeqCst) == 1
    {
        // Cannot fail for one's own process; if it did, the test would see the process live on.
        let _ = kill_process(getpid(), *signal);
    }
}
