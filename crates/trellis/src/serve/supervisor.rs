//! The agent's hold on the processes of replicated volumes: they are found, started, asked and ended here.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::agent::machine::{ReplicaPlace, TargetFound, TargetPlace};
use trellis_node::fuse::Negotiated;

use super::message::{Answer, Request, Settings, TargetStatus, ask, send};
use super::paths::{ProcessPaths, RunDir, copy_name};
use super::process::{self, comes_up, last_words, living};
use super::watch::Watch;

/// How long a process may take until it listens.
const START_TIME_MAX: Duration = Duration::from_secs(15);
/// How long a new target may take until it serves, before others are served first.
const READY_TIME_MAX: Duration = Duration::from_secs(5);
const READY_LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long a question may take.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a growth may take: longer than the target gives its copies.
const GROWTH_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a process has to end by itself, and again when it is killed.
const END_TIME_MAX: Duration = Duration::from_secs(5);
/// The time from one start of a process to the next, at least.
const YOUNG: Duration = Duration::from_secs(1);
const TARGET: &str = "target";
const CHANGES: &str = "changes";
/// The start of every iSCSI name that we give.
const IQN_PREFIX: &str = "iqn.2026-11.dev.trellis:";

/// What is told when something has happened to a volume.
pub type Wake = Box<dyn Fn(&str) + Send + Sync>;

/// The FUSE connection of a target, kept for its successor.
struct Kept {
    fuse: OwnedFd,
    negotiated: Negotiated,
}

/// What shall run.
#[derive(Clone)]
enum Wanted {
    /// A copy, with the arguments of its process.
    Copy(Vec<OsString>),
    /// A target.
    Target(Settings),
}

/// A process that shall run, and when it was last started.
struct Entry {
    wanted: Wanted,
    started: Option<Instant>,
}

/// The processes of this node.
pub struct Supervisor {
    run: PathBuf,
    kept: Mutex<HashMap<String, Kept>>,
    /// What shall run, by volume and name. A process that ends and is not here any more was meant to.
    wanted: Mutex<HashMap<(String, String), Entry>>,
    /// Held while processes of a volume are looked at and started.
    turns: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    children: Mutex<Vec<Child>>,
    watch: OnceLock<Watch>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn down(message: String) -> Hold {
    Hold::new(HoldReason::TargetDown, message)
}

impl Supervisor {
    /// The processes whose files are below `run`.
    pub fn new(run: PathBuf) -> Supervisor {
        Supervisor {
            run,
            kept: Mutex::default(),
            wanted: Mutex::default(),
            turns: Mutex::default(),
            children: Mutex::default(),
            watch: OnceLock::new(),
        }
    }

    /// From now on starts again what ends, and tells which volume to look at when something happens to its
    /// processes.
    ///
    /// It is started here and not in a pass over the volume: a pass may wait in the kernel for I/O that only the
    /// target can answer.
    pub fn listen(self: &Arc<Self>, wake: Wake) -> std::io::Result<()> {
        let (supervisor, wake) = (Arc::downgrade(self), Arc::new(wake));
        let watch = Watch::start(Box::new(move |volume, name, ended| {
            let Some(supervisor) = supervisor.upgrade().filter(|_| ended && name != CHANGES) else {
                return wake(volume);
            };
            let (volume, name, wake) = (volume.to_owned(), name.to_owned(), wake.clone());
            let again = move || {
                supervisor.revive(&volume, &name);
                wake(&volume);
            };
            let thread = std::thread::Builder::new().name("revive".to_owned());
            if let Err(error) = thread.spawn(again) {
                tracing::warn!(%error, "no thread to start a process again; the next pass does it");
            }
        }))?;
        let _ = self.watch.set(watch);
        Ok(())
    }

    /// Starts a process again that has ended, unless it was meant to. One that has just been started is given a
    /// pause first.
    fn revive(&self, volume: &str, name: &str) {
        let key = (volume.to_owned(), name.to_owned());
        let found = {
            let wanted = lock(&self.wanted);
            wanted.get(&key).map(|entry| entry.started)
        };
        let Some(started) = found else { return };
        if let Some(rest) = started.and_then(|at| YOUNG.checked_sub(at.elapsed())) {
            std::thread::sleep(rest);
        }
        if let Err(hold) = self.ensure(volume, name) {
            tracing::warn!(volume, name, "{}", hold.message);
        }
    }

    /// Has a wanted process run.
    fn ensure(&self, volume: &str, name: &str) -> Result<(), Hold> {
        let turn = lock(&self.turns)
            .entry(volume.to_owned())
            .or_default()
            .clone();
        let _turn = lock(&turn);
        let key = (volume.to_owned(), name.to_owned());
        let wanted = lock(&self.wanted)
            .get(&key)
            .map(|entry| entry.wanted.clone());
        let Some(wanted) = wanted else { return Ok(()) };
        let run = self.run_dir(volume)?;
        let paths = run.process(name);
        if self.is_living(volume, name, &paths)? {
            return Ok(());
        }
        let started = lock(&self.wanted).get(&key).and_then(|entry| entry.started);
        if started.is_some_and(|at| at.elapsed() < YOUNG) {
            let message = format!(
                "A process of volume {volume} ended just after its start and is started again in a moment: {} (its log \
                 is {}).",
                last_words(&paths.log),
                paths.log.display()
            );
            return Err(down(message));
        }
        if let Some(entry) = lock(&self.wanted).get_mut(&key) {
            entry.started = Some(Instant::now());
        }
        match wanted {
            Wanted::Copy(arguments) => {
                let arguments: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
                self.start(volume, name, &paths, &arguments)
            }
            Wanted::Target(settings) => self.start_target(&run, &paths, &settings),
        }
    }

    fn want(&self, volume: &str, name: &str, wanted: Wanted) {
        let key = (volume.to_owned(), name.to_owned());
        let mut all = lock(&self.wanted);
        let started = all.get(&key).and_then(|entry| entry.started);
        all.insert(key, Entry { wanted, started });
    }

    fn dismiss(&self, volume: &str, name: &str) {
        let key = (volume.to_owned(), name.to_owned());
        lock(&self.wanted).remove(&key);
    }

    /// The volume's file.
    pub fn backing(&self, volume: &str) -> PathBuf {
        RunDir::of(&self.run, volume).file().join("volume")
    }

    /// Starts the process of a copy unless it runs, and answers where it can be reached.
    pub fn serve_copy(&self, place: &ReplicaPlace, volume: &str) -> Result<String, Hold> {
        let run = self.run_dir(volume)?;
        let name = copy_name(volume, &place.name);
        let paths = run.process(name);
        let address = format!("unix:{}", paths.socket.display());
        let directory = place.pool.join("replicas").join(&place.name);
        let mut arguments: Vec<&OsStr> = vec![
            OsStr::new("serve-replica"),
            OsStr::new("--directory"),
            directory.as_os_str(),
            OsStr::new("--volume"),
            OsStr::new(&place.volume_id),
            OsStr::new("--replica"),
            OsStr::new(&place.replica_id),
            OsStr::new("--listen"),
            OsStr::new(&address),
            OsStr::new("--lock"),
            paths.lock.as_os_str(),
        ];
        if let Some(pool) = &place.pool_id {
            arguments.extend([OsStr::new("--pool"), OsStr::new(pool)]);
        }
        if place.thick {
            arguments.push(OsStr::new("--thick"));
        }
        let arguments = arguments.into_iter().map(OsStr::to_owned).collect();
        self.want(volume, name, Wanted::Copy(arguments));
        self.ensure(volume, name)
            .map_err(|hold| Hold::new(HoldReason::ReplicaUnavailable, hold.message))?;
        Ok(address)
    }

    /// Ends the process of a copy.
    pub fn retire_copy(&self, place: &ReplicaPlace, volume: &str) -> Result<(), Hold> {
        let run = RunDir::of(&self.run, volume);
        let name = copy_name(volume, &place.name);
        let paths = run.process(name);
        self.dismiss(volume, name);
        self.end(&paths)?;
        for file in [&paths.socket, &paths.lock, &paths.log] {
            let _ = std::fs::remove_file(file);
        }
        // The last one leaves an empty directory.
        let _ = std::fs::remove_dir(run.path());
        Ok(())
    }

    /// Has the target run with these copies, and asks it how it is.
    pub fn serve_target(&self, place: &TargetPlace) -> Result<TargetFound, Hold> {
        let run = self.run_dir(&place.volume)?;
        let paths = run.process(TARGET);
        let settings = Settings {
            volume: place.volume.clone(),
            volume_id: place.volume_id.clone(),
            members: place.members.clone(),
            addresses: place.addresses.clone(),
            iqn: format!("{IQN_PREFIX}{}", place.volume),
        };
        self.want(&place.volume, TARGET, Wanted::Target(settings.clone()));
        self.ensure(&place.volume, TARGET)?;
        let configure = Request::Configure(settings.clone());
        self.wish(&paths, &configure, ANSWER_TIME_MAX)?;
        let status = self.ready(&paths)?;
        self.follow(&place.volume, &paths);
        if status.file && !lock(&self.kept).contains_key(&place.volume) {
            self.keep(&place.volume, &paths)?;
        }
        self.found(&run, settings, status)
    }

    /// Raises what the target serves.
    pub fn raise_target(&self, volume: &str, to: Bytes) -> Result<(), Hold> {
        let paths = RunDir::of(&self.run, volume).process(TARGET);
        self.wish(&paths, &Request::Grow { to }, GROWTH_TIME_MAX)
    }

    /// Takes the file away and ends the target.
    pub fn retire_target(&self, volume: &str) -> Result<(), Hold> {
        let run = RunDir::of(&self.run, volume);
        let paths = run.process(TARGET);
        self.dismiss(volume, TARGET);
        if self.is_living(volume, TARGET, &paths)? {
            self.wish(&paths, &Request::Stop, END_TIME_MAX)?;
            self.end(&paths)?;
        }
        lock(&self.kept).remove(volume);
        lock(&self.turns).remove(volume);
        let place = run.file();
        if place.exists() {
            trellis_node::fuse::dismantle(&place).map_err(|error| down(error.to_string()))?;
            let _ = std::fs::remove_dir(&place);
        }
        let others = [run.target_settings(), run.port(), run.secret()];
        for file in others
            .iter()
            .chain([&paths.socket, &paths.lock, &paths.log])
        {
            let _ = std::fs::remove_file(file);
        }
        let _ = std::fs::remove_dir(run.path());
        Ok(())
    }

    fn run_dir(&self, volume: &str) -> Result<RunDir, Hold> {
        let run = RunDir::of(&self.run, volume);
        run.make()
            .map_err(|error| down(format!("{} cannot be made: {error}.", run.path().display())))?;
        if !run.process(TARGET).fits() {
            let message = format!(
                "{} is too long a path for a socket; use a shorter data directory.",
                run.path().display()
            );
            return Err(down(message));
        }
        Ok(run)
    }

    /// Whether the process lives; one that does and is not watched yet is watched from now on.
    fn is_living(&self, volume: &str, name: &str, paths: &ProcessPaths) -> Result<bool, Hold> {
        self.reap();
        let found = living(&paths.lock)
            .map_err(|error| down(format!("{} cannot be read: {error}.", paths.lock.display())))?;
        let Some(pid) = found else { return Ok(false) };
        if let Some(watch) = self.watch.get()
            && !watch.has(volume, name)
            && let Err(error) = watch.process(volume, name, pid)
        {
            tracing::warn!(%error, volume, name, "a process cannot be watched; its end is seen at the resync");
        }
        Ok(true)
    }

    /// Lets go of children that have ended.
    fn reap(&self) {
        lock(&self.children).retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    fn start(
        &self,
        volume: &str,
        name: &str,
        paths: &ProcessPaths,
        arguments: &[&OsStr],
    ) -> Result<(), Hold> {
        let failed = |why: &dyn std::fmt::Display| {
            let log = paths.log.display();
            down(format!(
                "A process of volume {volume} does not run: {why} (its log is {log})."
            ))
        };
        let _ = std::fs::remove_file(&paths.socket);
        let mut child = process::start(paths, arguments).map_err(|error| failed(&error))?;
        let is_up = comes_up(&mut child, START_TIME_MAX, || {
            paths.socket.exists() && matches!(living(&paths.lock), Ok(Some(_)))
        });
        lock(&self.children).push(child);
        if !is_up {
            return Err(failed(&last_words(&paths.log)));
        }
        self.is_living(volume, name, paths).map(drop)
    }

    fn start_target(
        &self,
        run: &RunDir,
        paths: &ProcessPaths,
        settings: &Settings,
    ) -> Result<(), Hold> {
        let text = serde_json::to_vec(settings).map_err(|error| down(error.to_string()))?;
        std::fs::write(run.target_settings(), text).map_err(|error| {
            let path = run.target_settings();
            down(format!("{} cannot be written: {error}.", path.display()))
        })?;
        let mut arguments = vec![
            OsStr::new("serve-target"),
            OsStr::new("--run"),
            run.path().as_os_str(),
        ];
        let resumes = lock(&self.kept).contains_key(&settings.volume);
        if resumes {
            arguments.push(OsStr::new("--resume"));
        }
        self.start(&settings.volume, TARGET, paths, &arguments)?;
        if !resumes {
            return Ok(());
        }
        let kept = lock(&self.kept);
        let Some(kept) = kept.get(&settings.volume) else {
            return Ok(());
        };
        let request = Request::Resume(kept.negotiated);
        match ask(
            &paths.socket,
            &request,
            &[kept.fuse.as_fd()],
            ANSWER_TIME_MAX,
        ) {
            Ok((Answer::Held { message, .. }, _)) => {
                tracing::warn!(
                    volume = settings.volume,
                    message,
                    "a file could not be handed over"
                );
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) => Err(down(format!("The target does not answer: {error}."))),
        }
    }

    /// Keeps a duplicate of the target's FUSE connection.
    fn keep(&self, volume: &str, paths: &ProcessPaths) -> Result<(), Hold> {
        let answer = ask(&paths.socket, &Request::Keep, &[], ANSWER_TIME_MAX);
        let (answer, mut descriptors) =
            answer.map_err(|error| down(format!("The target does not answer: {error}.")))?;
        if let (Answer::Kept(negotiated), Some(fuse)) = (answer, descriptors.pop()) {
            let kept = Kept { fuse, negotiated };
            lock(&self.kept).insert(volume.to_owned(), kept);
        }
        Ok(())
    }

    /// Has the target tell of changes.
    fn follow(&self, volume: &str, paths: &ProcessPaths) {
        let Some(watch) = self.watch.get().filter(|watch| !watch.has(volume, CHANGES)) else {
            return;
        };
        let follow = || -> std::io::Result<()> {
            let stream = UnixStream::connect(&paths.socket)?;
            send(&stream, &Request::Watch, &[])?;
            watch.changes(volume, CHANGES, stream)
        };
        if let Err(error) = follow() {
            tracing::warn!(%error, volume, "a target cannot be followed; its changes are seen at the resync");
        }
    }

    /// The status of a target, for which it may take a moment after its start.
    fn ready(&self, paths: &ProcessPaths) -> Result<TargetStatus, Hold> {
        let deadline = Instant::now() + READY_TIME_MAX;
        loop {
            let status = status(&paths.socket)?;
            if (status.available && status.file) || Instant::now() >= deadline {
                return Ok(status);
            }
            std::thread::sleep(READY_LOOK_EVERY);
        }
    }

    fn found(
        &self,
        run: &RunDir,
        settings: Settings,
        status: TargetStatus,
    ) -> Result<TargetFound, Hold> {
        let there = || {
            let away = trellis_api::kinds::ReplicaState::Away;
            let there = status.replicas.iter().filter(|each| each.state != away);
            format!(
                "{} of {} copies of volume {} are there, and {} must have a write.",
                there.count(),
                settings.members.replicas.len(),
                settings.volume,
                settings.members.consistency_factor
            )
        };
        let too_few = || Hold::new(HoldReason::TooFewReplicas, there());
        let Some(served) = status.served else {
            return Err(too_few());
        };
        if status.available && !status.file {
            let message = format!(
                "The file of volume {} is not there (the log of its target is {}).",
                settings.volume,
                run.process(TARGET).log.display()
            );
            return Err(down(message));
        }
        let growth_hold = |reason: HoldReason| Hold::new(reason, there());
        Ok(TargetFound {
            copies: status.copies,
            served,
            backing: run.file().join("volume"),
            iqn: Some(settings.iqn.clone()),
            portal: status.portal.clone(),
            hold: if status.available {
                status.growth_held.map(growth_hold)
            } else {
                Some(too_few())
            },
            members: status.members.clone(),
            replicas: status.replicas.clone(),
            available: status.available,
            redundancy_met: status.redundancy_met,
            size_converged: status.size_converged,
        })
    }

    fn wish(&self, paths: &ProcessPaths, request: &Request, limit: Duration) -> Result<(), Hold> {
        match ask(&paths.socket, request, &[], limit) {
            Ok((Answer::Held { reason, message }, _)) => Err(Hold::new(reason, message)),
            Ok(_) => Ok(()),
            Err(error) => Err(down(format!("The target does not answer: {error}."))),
        }
    }

    fn end(&self, paths: &ProcessPaths) -> Result<(), Hold> {
        let ended = process::end(&paths.lock, END_TIME_MAX);
        self.reap();
        match ended {
            Ok(true) => Ok(()),
            Ok(false) => Err(down(format!(
                "The process with the log {} does not end.",
                paths.log.display()
            ))),
            Err(error) => Err(down(format!("{}: {error}.", paths.lock.display()))),
        }
    }
}

fn status(socket: &Path) -> Result<TargetStatus, Hold> {
    match ask(socket, &Request::Status, &[], ANSWER_TIME_MAX) {
        Ok((Answer::Status(status), _)) => Ok(*status),
        Ok((other, _)) => Err(down(format!("The target answers {other:?}."))),
        Err(error) => Err(down(format!("The target does not answer: {error}."))),
    }
}
