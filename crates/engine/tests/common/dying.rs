//! Dying at a step, and recording what the disk is like at each: for every thread of a test alone.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use trellis_api::step::{Step, install_hook};

use super::{Files, snapshot};

/// The steps that were taken, with the files at each.
pub(crate) type Record = Vec<(Step, Files)>;

thread_local! {
    /// How many more steps this thread takes before it dies.
    static STEPS_LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The directory to record, and what was recorded.
    static RECORD: RefCell<Option<(PathBuf, Record)>> = const { RefCell::new(None) };
}

fn at_step(step: Step) {
    RECORD.with_borrow_mut(|record| {
        if let Some((dir, moments)) = record {
            moments.push((step, snapshot(dir)));
        }
    });
    match STEPS_LEFT.get() {
        Some(0) => resume_unwind(Box::new(step)),
        Some(left) => STEPS_LEFT.set(Some(left - 1)),
        None => {}
    }
}

/// Runs `work` and drops everything that it holds when the step after `steps` others is reached.
/// Says at which step it died, if it did.
pub(crate) fn dying_after(steps: Option<usize>, work: impl FnOnce()) -> Option<Step> {
    install_hook(at_step);
    STEPS_LEFT.set(steps);
    let ended = catch_unwind(AssertUnwindSafe(work));
    STEPS_LEFT.set(None);
    match ended {
        Ok(()) => None,
        Err(death) => match death.downcast::<Step>() {
            Ok(step) => Some(*step),
            Err(panic) => resume_unwind(panic),
        },
    }
}

/// Runs `work` and says which steps it took, with the files in `dir` at each.
pub(crate) fn recording(dir: &Path, work: impl FnOnce()) -> Record {
    install_hook(at_step);
    RECORD.set(Some((dir.to_owned(), Vec::new())));
    work();
    RECORD.take().unwrap().1
}
