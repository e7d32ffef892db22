//! Which build the keeper runs, and how it gets the one of the service.
//!
//! The service asks once for each keeper that it meets, so after an upgrade the new service brings the keeper with it.
//! Whether the builds differ is all that counts: a service that was downgraded asks as well, and the keeper finds out
//! whether the older program can take over.

use std::fs::File;
use std::io;
use std::path::Path;

use trellis_keeper::message::{Answer, Request};
use trellis_keeper::{Build, Link, OWN_PROGRAM};

/// What the keeper runs.
#[derive(Debug)]
pub enum KeeperRuns {
    /// The same build as this process.
    Same(Build),
    /// Another build.
    Other {
        /// Which one.
        build: Build,
        /// Why it was not replaced when it was last asked to be.
        not_replaced: Option<String>,
    },
    /// A build from before keepers could tell.
    Old,
}

/// Asks the keeper that listens there.
pub fn keeper_runs(socket: &Path) -> io::Result<KeeperRuns> {
    let ours = Build::own()?;
    match Link::open(socket)?.ask(&Request::Build) {
        Ok(Answer::Runs { build, .. }) if build == ours => Ok(KeeperRuns::Same(build)),
        Ok(Answer::Runs {
            build,
            not_replaced,
        }) => Ok(KeeperRuns::Other {
            build,
            not_replaced,
        }),
        Ok(other) => Err(io::Error::other(format!("the keeper answers {other:?}"))),
        // It hangs up on a question that it does not know.
        Err(error) if hung_up(&error) => Ok(KeeperRuns::Old),
        Err(error) => Err(error),
    }
}

fn hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Makes the keeper run the program of this process, unless it does. If that fails, it goes on as it is.
pub fn renew(socket: &Path) {
    let ask = || -> io::Result<()> {
        match keeper_runs(socket)? {
            KeeperRuns::Same(_) => return Ok(()),
            KeeperRuns::Other { .. } => {}
            KeeperRuns::Old => return Err(io::Error::other("it cannot replace itself yet")),
        }
        let path = std::fs::read_link(OWN_PROGRAM)?;
        Link::open(socket)?.replace(&File::open(OWN_PROGRAM)?, &path)?;
        tracing::info!("the keeper runs the program of this service now");
        Ok(())
    };
    if let Err(error) = ask() {
        tracing::warn!(%error, "the keeper goes on with another program than this service");
    }
}
