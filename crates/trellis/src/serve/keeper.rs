//! The process of the keeper.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::Args;
use trellis_keeper::Settings;

use crate::output;

/// `trellis keeper`
#[derive(Args, Debug)]
pub struct Keeper {
    /// The keeper's own directory
    #[arg(long)]
    directory: PathBuf,
    /// Where the volumes have their run directories
    #[arg(long)]
    run: PathBuf,
    /// Go on with what the program before this one in the same process has handed over on standard input
    #[arg(long)]
    handed_over: bool,
    /// Only say whether that can be read
    #[arg(long, requires = "handed_over")]
    can_read: bool,
}

/// Keeps until there is nothing to keep. On this thread alone: it needs no runtime.
pub fn run(verb: &Keeper) -> anyhow::Result<()> {
    if verb.can_read {
        return output::print(&format!("{}\n", trellis_keeper::can_read()?));
    }
    crate::crash::arm_keeper();
    let settings = settings(verb);
    if verb.handed_over {
        return Ok(trellis_keeper::go_on(settings)?);
    }
    Ok(trellis_keeper::run(settings)?)
}

fn settings(verb: &Keeper) -> Settings {
    let with = |more: &[&str]| -> Vec<OsString> {
        let directory = ["--directory".as_ref(), verb.directory.as_os_str()];
        let run = ["--run".as_ref(), verb.run.as_os_str()];
        let known = ["keeper".as_ref()].into_iter().chain(directory).chain(run);
        let more = more.iter().map(OsStr::new);
        known.chain(more).map(OsStr::to_owned).collect()
    };
    Settings {
        directory: verb.directory.clone(),
        run: verb.run.clone(),
        to_go_on: with(&["--handed-over"]),
        to_try: with(&["--handed-over", "--can-read"]),
    }
}
