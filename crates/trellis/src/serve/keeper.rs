//! The process of the keeper.

use std::path::PathBuf;

use clap::Args;
use trellis_keeper::Settings;

/// `trellis keeper`
#[derive(Args, Debug)]
pub struct Keeper {
    /// The keeper's own directory
    #[arg(long)]
    directory: PathBuf,
    /// Where the volumes have their run directories
    #[arg(long)]
    run: PathBuf,
}

/// Keeps until there is nothing to keep. On this thread alone: it needs no runtime.
pub fn run(verb: &Keeper) -> anyhow::Result<()> {
    let settings = Settings {
        directory: verb.directory.clone(),
        run: verb.run.clone(),
    };
    Ok(trellis_keeper::run(&settings)?)
}
