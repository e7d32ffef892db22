//! The agent's hold on the processes of replicated volumes: they are found, started, started again and ended here.

mod target;

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use trellis_api::{Hold, HoldReason};
use trellis_control::agent::machine::ReplicaPlace;

use self::target::Kept;
use super::message::Settings;
use super::paths::{ProcessPaths, RunDir, copy_name};
use super::process::{self, comes_up, last_words, living};
use super::watch::Watch;

/// How long a process may take until it listens.
const START_TIME_MAX: Duration = Duration::from_secs(15);
/// How long a process has to end by itself, and again when it is killed.
const END_TIME_MAX: Duration = Duration::from_secs(5);
/// The time from one start of a process to the next, at least.
const YOUNG: Duration = Duration::from_secs(1);
/// The pause before a process that did not start is started again, which doubles each time.
const REVIVAL_PAUSE_MIN: Duration = Duration::from_millis(50);
const REVIVAL_PAUSE_MAX: Duration = Duration::from_secs(30);
const TARGET: &str = "target";
const CHANGES: &str = "changes";

/// What is told when something has happened to a volume.
pub type Wake = Box<dyn Fn(&str) + Send + Sync>;

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
                supervisor.revive(&volume, &name, &wake);
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
    /// pause first. It is tried until it is done: passes over the volume, which would try too, may all be waiting for
    /// this process. The first attempt that fails is told, so that the volume's status does not wait for the last.
    fn revive(&self, volume: &str, name: &str, wake: &Wake) {
        let key = (volume.to_owned(), name.to_owned());
        let started = || {
            let wanted = lock(&self.wanted);
            wanted.get(&key).map(|entry| entry.started)
        };
        let mut pause = REVIVAL_PAUSE_MIN;
        while let Some(started) = started() {
            if let Some(rest) = started.and_then(|at| YOUNG.checked_sub(at.elapsed())) {
                std::thread::sleep(rest);
            }
            let Err(hold) = self.ensure(volume, name) else {
                return;
            };
            tracing::warn!(volume, name, "{}", hold.message);
            if pause == REVIVAL_PAUSE_MIN {
                wake(volume);
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(REVIVAL_PAUSE_MAX);
        }
    }

    /// Has a wanted process run, and a target go on with the file of the one before.
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
            return self.ensure_file(volume, &wanted, &paths);
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
        match &wanted {
            Wanted::Copy(arguments) => {
                let arguments: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
                self.start(volume, name, &paths, &arguments)?;
            }
            Wanted::Target(settings) => self.start_target(&run, &paths, settings)?,
        }
        self.ensure_file(volume, &wanted, &paths)
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
        // It may have ended since, and then nobody watches it.
        if self.is_living(volume, name, paths)? {
            Ok(())
        } else {
            Err(failed(&last_words(&paths.log)))
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
