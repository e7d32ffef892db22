//! Dies on command: the crash tests name a step, and the process kills itself the way `kill -9` would
//! when the step has just been taken; or it stops there, until it is told to go on.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Signal, getpid, kill_process};
use trellis_api::step::{self, Step};

/// `STEP` or `STEP:N`: die when the step is reached for the first or the N-th time.
pub const VARIABLE: &str = "TRELLIS_CRASH_AT";

/// The same, to stop there.
pub const STOP_VARIABLE: &str = "TRELLIS_STOP_AT";

/// `STEP:DIRECTORY`: every copy's process dies at this step once, and leaves a mark in the directory. The service hands it
/// down to the copies, through the keeper.
pub const COPY_VARIABLE: &str = "TRELLIS_COPY_CRASH_AT";

/// The same for the keeper.
pub const KEEPER_VARIABLE: &str = "TRELLIS_KEEPER_CRASH_AT";

static FATAL: OnceLock<(Step, Signal)> = OnceLock::new();
static LEFT: AtomicU32 = AtomicU32::new(0);
/// Made before the process of a copy or the keeper dies, so that its successor lives.
static MARK: OnceLock<PathBuf> = OnceLock::new();

/// Installs the hook if the environment asks for it. A step that does not exist is said on standard
/// error, so that a test with a misspelt name does not pass by doing nothing.
pub fn arm() {
    let asked = |variable| std::env::var(variable).ok().map(|text| (variable, text));
    let Some((variable, text)) = asked(VARIABLE).or_else(|| asked(STOP_VARIABLE)) else {
        return;
    };
    let (name, count) = text.split_once(':').unwrap_or((&text, "1"));
    let (Some(fatal), Ok(count)) = (Step::from_name(name), count.parse()) else {
        crate::output::say(&format!("trellis: {variable}={text:?} names no step"));
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

/// Installs the hook in the process of a copy if the environment asks for it and the copy has not died of it yet.
pub fn arm_copy(copy: &Path) {
    arm_once(COPY_VARIABLE, copy);
}

/// Installs the hook in the keeper if the environment asks for it and no keeper has died of it yet.
pub fn arm_keeper() {
    arm_once(KEEPER_VARIABLE, Path::new("keeper"));
}

/// Installs the hook if this variable asks for it and there is no mark of the process with the name at the end of
/// `named`.
fn arm_once(variable: &str, named: &Path) {
    let Ok(text) = std::env::var(variable) else {
        return;
    };
    let asked = text.split_once(':');
    let asked = asked.and_then(|(step, marks)| Some((Step::from_name(step)?, Path::new(marks))));
    let (Some((fatal, marks)), Some(name)) = (asked, named.file_name()) else {
        crate::output::say(&format!("trellis: {variable}={text:?} names no step"));
        std::process::exit(2);
    };
    let mark = marks.join(name);
    if mark.exists() {
        return;
    }
    LEFT.store(1, Ordering::SeqCst);
    let _ = MARK.set(mark);
    let _ = FATAL.set((fatal, Signal::KILL));
    step::install_hook(die_at);
}

fn die_at(reached: Step) {
    if let Some((fatal, signal)) = FATAL.get()
        && *fatal == reached
        && LEFT.fetch_sub(1, Ordering::SeqCst) == 1
    {
        if let Some(mark) = MARK.get()
            && let Err(error) = std::fs::write(mark, reached.name())
        {
            crate::output::say(&format!("trellis: {}: {error}", mark.display()));
            return;
        }
        // Cannot fail for one's own process; if it did, the test would see the process live on.
        let _ = kill_process(getpid(), *signal);
    }
}
