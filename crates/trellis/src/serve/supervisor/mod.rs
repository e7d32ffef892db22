//! The agent's control of the processes of replicated volumes: it tells the keeper which should run, and waits for
//! them.

mod copy;
mod keeper;
mod target;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use trellis_api::{Hold, HoldReason};
use trellis_keeper::message::{Event, Request, Wanted};
use trellis_keeper::paths::{ProcessPaths, RunDir};
use trellis_keeper::process::{last_words, living};

use self::keeper::{KeeperSide, becomes};
pub(super) use self::target::iqn;
use super::links::Links;
use super::message::Settings;
use super::unserved::{self, Unserved};
use super::watch::Watch;

/// How long a process may take until it listens.
const START_TIME_MAX: Duration = Duration::from_secs(15);
/// How long a process may take to end: twice what the keeper gives it before it is killed.
const END_TIME_MAX: Duration = Duration::from_secs(10);
/// The name of the process that serves a volume.
pub(super) const TARGET: &str = "target";
/// How often to look for connections that nobody serves.
const UNSERVED_LOOK_EVERY: Duration = Duration::from_secs(10);

/// Called when something has happened to a volume.
pub type Wake = Box<dyn Fn(&str) + Send + Sync>;

type Key = (String, String);

/// The processes of this node.
pub struct Supervisor {
    run: PathBuf,
    keeper: KeeperSide,
    /// What the keeper was told to run.
    told: Mutex<HashMap<Key, Wanted>>,
    /// This node among others.
    links: Links,
    /// The node on which the target of each copy's volume runs.
    target_nodes: Mutex<HashMap<Key, Option<String>>>,
    /// The settings that the next target of a volume starts with.
    settings: Mutex<HashMap<String, Settings>>,
    /// The volumes whose target does not answer.
    silent: Mutex<HashSet<String>>,
    silence_max: Duration,
    /// How often each process has ended.
    ends: Mutex<HashMap<Key, u64>>,
    /// Held while processes of a volume are looked at and started.
    turns: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    watch: OnceLock<Watch>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn down(message: String) -> Hold {
    Hold::new(HoldReason::TargetDown, message)
}

impl Supervisor {
    /// The processes whose files are below `run`, on a node with these links. A target that is silent for longer than
    /// `silence_max` is replaced.
    pub fn new(run: PathBuf, silence_max: Duration, links: Links) -> Supervisor {
        Supervisor {
            keeper: KeeperSide::new(&run, silence_max),
            silent: Mutex::default(),
            silence_max,
            run,
            links,
            target_nodes: Mutex::default(),
            told: Mutex::default(),
            settings: Mutex::default(),
            ends: Mutex::default(),
            turns: Mutex::default(),
            watch: OnceLock::new(),
        }
    }

    /// From now on reports which volume to look at when something happens to its processes, and keeps a keeper running
    /// as long as there is something to keep.
    ///
    /// The keeper restarts what ends, and not a pass over the volume: a pass may wait in the kernel for I/O that only
    /// the target can answer.
    pub fn listen(self: &Arc<Self>, wake: Wake) -> std::io::Result<()> {
        let wake = Arc::new(wake);
        let woken = wake.clone();
        let watch = Watch::start(Box::new(move |volume| woken(volume)))?;
        let _ = self.watch.set(watch);
        let supervisor = self.clone();
        let follow = move || {
            let met = || supervisor.tell_all();
            supervisor
                .keeper
                .follow(met, |event| supervisor.heard(event, &wake));
        };
        let thread = std::thread::Builder::new().name("trellis-keeper".to_owned());
        thread.spawn(follow)?;
        let supervisor = self.clone();
        let thread = std::thread::Builder::new().name("trellis-unserved".to_owned());
        let sweep = move || supervisor.end_unserved();
        thread.spawn(sweep).map(drop)
    }

    /// Ends, for ever, connections that nobody serves and that no successor will take over: no target of the volume
    /// lives, and none should run.
    fn end_unserved(&self) {
        let mut seen = Unserved::default();
        loop {
            std::thread::sleep(UNSERVED_LOOK_EVERY);
            let found = unserved::find(&self.run).unwrap_or_default();
            let key = |volume: &str| (volume.to_owned(), TARGET.to_owned());
            let comes = |volume: &str| lock(&self.told).contains_key(&key(volume));
            let hopeless = found.into_iter().filter(|(volume, _)| !comes(volume));
            let hopeless: Vec<_> = hopeless.map(|(_, each)| each).collect();
            for number in seen.overdue(&hopeless, Instant::now()) {
                tracing::warn!(
                    number,
                    "nobody serves a connection; whoever waits for it gets an error"
                );
                if let Err(error) = trellis_node::fuse::abort(number) {
                    tracing::warn!(%error, number, "a connection cannot be ended");
                }
            }
        }
    }

    fn heard(&self, event: Event, wake: &Wake) {
        match event {
            Event::Started { volume, .. } => wake(&volume),
            Event::Call => {}
            Event::Silent { volume } => {
                lock(&self.silent).insert(volume.clone());
                wake(&volume);
            }
            Event::Heard { volume } => {
                lock(&self.silent).remove(&volume);
                wake(&volume);
            }
            Event::Ended { volume, name } => {
                if name == TARGET {
                    lock(&self.silent).remove(&volume);
                }
                let key = (volume.clone(), name);
                *lock(&self.ends).entry(key).or_default() += 1;
                wake(&volume);
            }
        }
    }

    /// Tells a new keeper what should run.
    fn tell_all(&self) -> Result<(), Hold> {
        // The new keeper reports again which targets are silent.
        lock(&self.silent).clear();
        let all: Vec<Wanted> = lock(&self.told).values().cloned().collect();
        for wanted in all {
            self.keeper.ask(&Request::Run(wanted))?;
        }
        Ok(())
    }

    /// Makes a process run, and waits until it listens. The keeper is told if it does not know, or if the process does
    /// not run.
    fn ensure(&self, wanted: Wanted) -> Result<(), Hold> {
        let (volume, name) = (wanted.volume.clone(), wanted.name.clone());
        let turn = lock(&self.turns).entry(volume.clone()).or_default().clone();
        let _turn = lock(&turn);
        let paths = RunDir::of(&self.run, &volume).process(&name);
        let key = (volume.clone(), name);
        let ends = || lock(&self.ends).get(&key).copied().unwrap_or_default();
        let ended_before = ends();
        let is_up = || paths.socket.exists() && matches!(living(&paths.lock), Ok(Some(_)));
        let is_told = lock(&self.told).get(&key) == Some(&wanted);
        if is_told && is_up() {
            return Ok(());
        }
        self.keeper.ask(&Request::Run(wanted.clone()))?;
        lock(&self.told).insert(key.clone(), wanted);
        if becomes(is_up, || ends() != ended_before, START_TIME_MAX) {
            return Ok(());
        }
        let unserved = unserved::tell(RunDir::of(&self.run, &volume).path()).unwrap_or_default();
        Err(down(format!(
            "A process of volume {volume} does not run and is started again in a moment: {} (its log is {}).{}",
            last_words(&paths.log),
            paths.log.display(),
            unserved
                .iter()
                .map(|each| format!(" {each}"))
                .collect::<String>()
        )))
    }

    /// Keeps a process from being restarted.
    fn dismiss(&self, volume: &str, name: &str) -> Result<(), Hold> {
        let key = (volume.to_owned(), name.to_owned());
        lock(&self.told).remove(&key);
        if self.keeper.is_living() {
            let (volume, name) = key;
            self.keeper.ask(&Request::Forget { volume, name })?;
        }
        Ok(())
    }

    /// Starts what should run for a volume and does not, without waiting for the next try.
    pub fn serve_again(&self, volume: &str) {
        let told: Vec<Wanted> = lock(&self.told)
            .values()
            .filter(|wanted| wanted.volume == volume)
            .cloned()
            .collect();
        for wanted in told {
            if let Err(hold) = self.ensure(wanted) {
                tracing::debug!(volume, "{}", hold.message);
            }
        }
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

    /// Ends a process, and waits until it is gone.
    fn end(&self, volume: &str, name: &str, paths: &ProcessPaths) -> Result<(), Hold> {
        let is_gone = || matches!(living(&paths.lock), Ok(None));
        if is_gone() {
            return Ok(());
        }
        self.keeper.ask(&Request::End {
            volume: volume.to_owned(),
            name: name.to_owned(),
        })?;
        if becomes(is_gone, || false, END_TIME_MAX) {
            return Ok(());
        }
        Err(down(format!(
            "The process with the log {} does not end.",
            paths.log.display()
        )))
    }
}
