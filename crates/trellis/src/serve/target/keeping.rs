//! A target's FUSE connection at the keeper. The target takes it over from a predecessor, deposits it before anybody
//! can use the file, and deposits it again with each new keeper.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trellis_keeper::Link;
use trellis_keeper::message::{Answer, Request};
use trellis_node::fuse::{self, Kept};

use super::Target;

/// The pause before a keeper that is not there is looked for again.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a keeper may be away before that is logged.
const USUAL_TIME: Duration = Duration::from_secs(10);

/// The keeper, for the target of one volume.
pub struct Keeping {
    socket: PathBuf,
    volume: String,
}

impl Keeping {
    /// The keeper that listens there.
    pub fn new(socket: PathBuf, volume: String) -> Keeping {
        Keeping { socket, volume }
    }

    /// Connects to the keeper and does something with it. This is tried again until it works: the service starts a
    /// keeper if there is none.
    fn with_keeper<T>(&self, act: impl Fn(&Link) -> io::Result<T>) -> (Link, T) {
        let mut say_at = Instant::now() + USUAL_TIME;
        loop {
            let done =
                Link::open(&self.socket).and_then(|link| act(&link).map(|done| (link, done)));
            match done {
                Ok(done) => return done,
                Err(error) if Instant::now() >= say_at => {
                    tracing::warn!(%error, "the keeper is still waited for");
                    say_at = Instant::now() + USUAL_TIME;
                }
                Err(_) => {}
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// What the keeper holds of a predecessor. It waits without a limit: users of the file would lose it if it were
    /// mounted again.
    pub fn take(&self) -> Option<Kept> {
        let volume = self.volume.clone();
        let request = Request::Take { volume };
        let (_, (answer, mut descriptors)) = self.with_keeper(|link| link.ask_with(&request, &[]));
        let Answer::Held { note } = answer else {
            return None;
        };
        let negotiated = serde_json::from_str(&note).ok()?;
        let (requests, fuse) = (descriptors.pop()?, descriptors.pop()?);
        Some(Kept {
            fuse,
            requests,
            negotiated,
        })
    }

    /// Makes the keeper hold nothing: what it holds cannot be used any more.
    pub fn release(&self) {
        let volume = self.volume.clone();
        let request = Request::Release { volume };
        self.with_keeper(|link| link.ask(&request));
    }

    /// Makes the keeper hold the connection of this file. Returns the link, whose end shows that the keeper has ended.
    pub fn deposit(&self, file: &fuse::Server) -> io::Result<Link> {
        self.deposit_kept(&Kept::of(file)?)
    }

    fn deposit_kept(&self, kept: &Kept) -> io::Result<Link> {
        let request = Request::Deposit {
            volume: self.volume.clone(),
            note: serde_json::to_string(&kept.negotiated)?,
        };
        let descriptors = [kept.fuse.as_fd(), kept.requests.as_fd()];
        let (link, _) = self.with_keeper(|link| link.ask_with(&request, &descriptors));
        Ok(link)
    }

    /// Deposits the target's file again with each new keeper, as long as there is a file. A target whose file was
    /// unmounted behind its back ends, and its successor mounts another.
    pub fn stay(target: &Arc<Target>, link: Link) -> io::Result<()> {
        let target = target.clone();
        let thread = std::thread::Builder::new().name("keeper".to_owned());
        let stay = move || {
            let mut link = link;
            loop {
                while let Ok(Some(_)) = link.next() {
                    if target.has_lost_file() {
                        tracing::error!("somebody has unmounted the file; it is mounted again");
                        return target.end();
                    }
                    // Said only after the runtime that serves the volume has done something.
                    let is_well = target.runtime.block_on(target.runtime.spawn(async {}));
                    if is_well.is_err() || link.say_here().is_err() {
                        break;
                    }
                }
                let Some(kept) = target.with_file(Kept::of) else {
                    return;
                };
                let again = kept.and_then(|kept| target.keeping.deposit_kept(&kept));
                match again {
                    Ok(next) => link = next,
                    Err(error) => {
                        return tracing::error!(%error, "the file cannot be deposited again");
                    }
                }
            }
        };
        thread.spawn(stay).map(drop)
    }
}
