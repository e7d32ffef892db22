//! The keeper becomes another program: it tries it, hands everything over, and goes on as that one.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use trellis_api::step::{Step, reached};
use trellis_node::sys::descriptors;

use super::{Held, Keeper, Peer, Settings};
use crate::build::Build;
use crate::calls::Calls;
use crate::error::Error;
use crate::handover::{Handover, HeldHanded, Passed, PeerHanded, VERSION, forget_input, replace};
use crate::message::{Answer, send};
use crate::process::Life;
use crate::processes::Processes;
use crate::trial::{Candidate, Trial};
use crate::wanted::WantedFile;

/// Goes on with what the program before this one has handed over in this process, until there is nothing to keep.
///
/// If that fails, the process ends, and everything is as after the death of a keeper: targets still have their
/// connections, and deposit them with the next one. The trial has seen that it does not fail.
pub fn go_on(settings: Settings) -> Result<(), Error> {
    let handover = Handover::read(std::io::stdin())?;
    let asker = handover.asker;
    let take = |number: RawFd| Ok(descriptors::take(number)?);
    let mut keeper = Keeper::taken_over(settings, handover, take, Instant::now())?;
    forget_input().map_err(Error::TakeOver)?;
    super::keep_from_children();
    reached(Step::KeeperReplaced);
    if let Some(asker) = asker {
        keeper.tell_asker(asker, &Answer::Done);
    }
    keeper.keep()
}

/// Reads what would be handed over to this program, and answers what shows that it can take over.
pub fn can_read() -> Result<String, Error> {
    Handover::read(std::io::stdin()).map(|_| crate::handover::consent())
}

impl Keeper {
    /// The keeper that the program before this one has been. `take` finds a descriptor by its number.
    fn taken_over(
        settings: Settings,
        handover: Handover,
        mut take: impl FnMut(RawFd) -> std::io::Result<OwnedFd>,
        now: Instant,
    ) -> Result<Keeper, Error> {
        let keeper = || -> std::io::Result<Keeper> {
            let life = Life::go_on(take(handover.lock)?)?;
            let listener = take(handover.listener)?;
            let file = WantedFile::of(&settings.directory);
            let run = settings.run.clone();
            let processes = Processes::go_on(run, file, handover.processes, &mut take, now)?;
            let mut keeper = Keeper::new(settings, life, listener, processes);
            keeper.peers_ever = handover.peers_ever;
            keeper.silence_max = Duration::from_millis(handover.silence_ms_max);
            for each in handover.peers {
                let serves = each.serves.map(|handed| {
                    let calls = Calls::go_on(&handed, now);
                    (handed.volume, calls)
                });
                let peer = Peer {
                    socket: take(each.socket)?,
                    watches: each.watches,
                    serves,
                };
                keeper.peers.insert(each.number, peer);
            }
            for each in handover.held {
                let descriptors = each.descriptors.into_iter().map(&mut take);
                let held = Held {
                    descriptors: descriptors.collect::<std::io::Result<_>>()?,
                    note: each.note,
                };
                keeper.held.insert(each.volume, held);
            }
            Ok(keeper)
        };
        keeper().map_err(Error::TakeOver)
    }

    /// All that this keeper has and knows, for the program that `asker` wants in its place.
    fn hand_over(&self, asker: u64, now: Instant) -> (Handover, Passed<'_>) {
        let mut passed = Passed::default();
        let peers = self.peers.iter().map(|(number, peer)| PeerHanded {
            number: *number,
            socket: passed.add(peer.socket.as_fd()),
            watches: peer.watches,
            serves: peer
                .serves
                .as_ref()
                .map(|(volume, calls)| calls.hand_over(volume, now)),
        });
        let peers = peers.collect();
        let held = self.held.iter().map(|(volume, held)| HeldHanded {
            volume: volume.clone(),
            descriptors: held
                .descriptors
                .iter()
                .map(|each| passed.add(each.as_fd()))
                .collect(),
            note: held.note.clone(),
        });
        let held = held.collect();
        let handover = Handover {
            version: VERSION,
            lock: passed.add(self.life.as_fd()),
            listener: passed.add(self.listener.as_fd()),
            peers,
            peers_ever: self.peers_ever,
            held,
            processes: self.processes.hand_over(&mut passed, now),
            silence_ms_max: u64::try_from(self.silence_max.as_millis()).unwrap_or(u64::MAX),
            asker: Some(asker),
        };
        (handover, passed)
    }

    /// Begins to try a program. Its verdict, or that of the new program, is the answer.
    pub(super) fn try_program(
        &mut self,
        asker: u64,
        path: PathBuf,
        mut descriptors: Vec<OwnedFd>,
        now: Instant,
    ) {
        let begun = match (descriptors.pop(), descriptors.is_empty(), &self.trial) {
            (_, _, Some(_)) => Err(Error::Busy),
            (Some(program), true, None) => {
                let candidate = Candidate {
                    program: File::from(program),
                    path,
                    asker,
                };
                let (handover, _) = self.hand_over(asker, now);
                let handed = handover.write().map_err(Error::TakeOver);
                let arguments = &self.settings.to_try;
                handed.and_then(|handed| Trial::begin(candidate, arguments, handed, now))
            }
            _ => Err(Error::NoProgram),
        };
        match begun {
            Ok(trial) => self.trial = Some(trial),
            Err(error) => self.is_not_replaced(asker, &error),
        }
    }

    /// Gives up a program that has said nothing in time.
    pub(super) fn limit_trial(&mut self, now: Instant) {
        let late = self.trial.as_mut().and_then(|trial| trial.give_up(now));
        if let Some((asker, error)) = late {
            self.is_not_replaced(asker, &error);
        }
    }

    /// The program that was tried has ended. If it can take over, this does not return.
    pub(super) fn tried(&mut self) {
        let Some((candidate, verdict)) = self.trial.take().and_then(Trial::ended) else {
            return;
        };
        let error = match verdict {
            Ok(()) => {
                let (handover, passed) = self.hand_over(candidate.asker, Instant::now());
                let arguments = &self.settings.to_go_on;
                Error::NotExecuted {
                    program: candidate.path.clone(),
                    source: replace(&candidate.program, arguments, &handover, &passed),
                }
            }
            Err(error) => error,
        };
        self.is_not_replaced(candidate.asker, &error);
    }

    /// Goes on as the program that it is, and tells why.
    fn is_not_replaced(&mut self, asker: u64, error: &Error) {
        let source = std::error::Error::source(error);
        let source = source.map(|source| format!(": {source}"));
        let message = format!("{error}{}", source.unwrap_or_default());
        tracing::warn!(message, "the keeper is not replaced");
        self.not_replaced = Some(message.clone());
        self.tell_asker(asker, &Answer::Refused { message });
    }

    fn tell_asker(&mut self, asker: u64, answer: &Answer) {
        let peer = self.peers.get(&asker);
        if peer.is_some_and(|peer| send(&peer.socket, answer, &[]).is_err()) {
            self.peers.remove(&asker);
        }
    }

    /// What this keeper runs.
    pub(super) fn runs(&self) -> Answer {
        match Build::own() {
            Ok(build) => Answer::Runs {
                build,
                not_replaced: self.not_replaced.clone(),
            },
            Err(error) => Answer::Refused {
                message: format!("The keeper does not know which program it runs: {error}."),
            },
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsRawFd;
    use std::panic::AssertUnwindSafe;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::Link;
    use crate::message::{Request, Wanted};
    use crate::paths::RunDir;

    fn settings(directory: &Path) -> Settings {
        Settings {
            directory: directory.to_owned(),
            run: directory.join("run"),
            to_go_on: Vec::new(),
            to_try: Vec::new(),
        }
    }

    fn socket(directory: &Path) -> PathBuf {
        RunDir::at(directory.to_owned()).process("keeper").socket
    }

    /// Lets the keeper work until the client is done.
    fn serve(keeper: &mut Keeper, directory: &Path, client: impl FnOnce() + Send) {
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let client = scope.spawn(|| {
                let done = std::panic::catch_unwind(AssertUnwindSafe(client));
                is_done.store(true, Ordering::SeqCst);
                // One more, so that the keeper sees it.
                drop(Link::open(&socket(directory)));
                done.unwrap();
            });
            while !is_done.load(Ordering::SeqCst) {
                keeper.turn().unwrap();
            }
            client.join().unwrap();
        });
    }

    /// A successor in the same process: it gets duplicates.
    fn succeeded(keeper: &Keeper, directory: &Path) -> (Keeper, Handover) {
        let now = Instant::now();
        let (handover, passed) = keeper.hand_over(1, now);
        let mut open: BTreeMap<RawFd, OwnedFd> = BTreeMap::new();
        for each in &passed.all {
            open.insert(each.as_raw_fd(), each.try_clone_to_owned().unwrap());
        }
        let read = Handover::read(File::from(handover.write().unwrap())).unwrap();
        assert_eq!(read, handover);
        // Each is taken once.
        let take = |number: RawFd| {
            open.remove(&number)
                .ok_or(std::io::ErrorKind::NotFound.into())
        };
        let next = Keeper::taken_over(settings(directory), read, take, now).unwrap();
        assert!(open.is_empty(), "{open:?}");
        (next, handover)
    }

    // Fails if something that a keeper has does not reach its successor: a connection and what it is for, what is held
    // of a volume, a process and when it is started or killed, or the lock.
    #[test]
    fn a_successor_has_all_that_the_keeper_had() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mut keeper = Keeper::begin(settings(path)).unwrap();
        let mut held = tempfile::tempfile().unwrap();
        held.write_all(b"held").unwrap();
        let [target, watcher, other] = [(); 3].map(|()| Link::open(&socket(path)).unwrap());
        let wanted = Wanted {
            volume: "v".to_owned(),
            name: "0".to_owned(),
            arguments: vec!["no such test".into()],
        };
        std::fs::create_dir_all(path.join("run/v")).unwrap();
        serve(&mut keeper, path, || {
            let deposit = Request::Deposit {
                volume: "v".to_owned(),
                note: "a note".to_owned(),
            };
            target.ask_with(&deposit, &[held.as_fd()]).unwrap();
            other.ask(&Request::Run(wanted.clone())).unwrap();
            let silence_ms_max = 7000;
            watcher.ask(&Request::Watch { silence_ms_max }).unwrap();
        });
        let (mut next, handed) = succeeded(&keeper, path);
        // The distances to now differ between the two, and so do the numbers; all else is the same.
        let (again, _) = next.hand_over(1, Instant::now());
        let known = |handover: &Handover| {
            let peers = handover.peers.iter();
            let peers = peers.map(|each| (each.number, each.watches, each.serves.is_some()));
            let processes = handover.processes.iter();
            let processes = processes.map(|each| (each.wanted.clone(), each.is_child));
            let counts = (handover.peers_ever, handover.silence_ms_max);
            (
                peers.collect::<Vec<_>>(),
                processes.collect::<Vec<_>>(),
                counts,
            )
        };
        assert_eq!(known(&again), known(&handed));
        assert_eq!(again.processes[0].wanted, Some(wanted));
        assert_eq!(again.silence_ms_max, 7000);
        drop(keeper);
        let lock = path.join("keeper.lock");
        assert!(matches!(crate::process::living(&lock), Ok(Some(_))));
        serve(&mut next, path, || {
            // On a link of before, and on a new one.
            for link in [&other, &Link::open(&socket(path)).unwrap()] {
                let volume = "v".to_owned();
                let request = Request::Take { volume };
                let (answer, mut descriptors) = link.ask_with(&request, &[]).unwrap();
                let note = "a note".to_owned();
                assert_eq!(answer, Answer::Held { note });
                let mut file = File::from(descriptors.pop().unwrap());
                file.rewind().unwrap();
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                assert_eq!(text, "held");
            }
            assert!(
                watcher.next().unwrap().is_some(),
                "the watcher is forgotten"
            );
        });
    }

    // Fails if a keeper that cannot become another program does not say so, or does not go on as before.
    #[test]
    fn a_keeper_that_cannot_be_replaced_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let mut keeper = Keeper::begin(settings(directory.path())).unwrap();
        let link = Link::open(&socket(directory.path())).unwrap();
        let plain = directory.path().join("plain");
        std::fs::write(&plain, "no program").unwrap();
        serve(&mut keeper, directory.path(), || {
            let refused = |path: &Path| {
                let refused = link.replace(&File::open(path).unwrap(), path);
                refused.unwrap_err().to_string()
            };
            assert!(refused(&plain).contains("cannot be executed"));
            let unfit = refused(Path::new("/bin/true"));
            assert!(unfit.contains("cannot take over"), "{unfit}");
            let program = PathBuf::from("/bin/true");
            let without = link.ask(&Request::Replace { program });
            let without = without.unwrap_err().to_string();
            assert!(without.contains("one open file"), "{without}");
            let Ok(Answer::Runs {
                build,
                not_replaced,
            }) = link.ask(&Request::Build)
            else {
                panic!("the keeper does not go on");
            };
            assert_eq!(build, Build::own().unwrap());
            assert_eq!(not_replaced, Some(without));
        });
    }
}
