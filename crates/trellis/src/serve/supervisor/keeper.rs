//! The keeper from the agent's side: started when it is needed, asked, and listened to.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use trellis_api::Hold;
use trellis_keeper::message::{Answer, Event, Request};
use trellis_keeper::paths::{ProcessPaths, RunDir};
use trellis_keeper::process::{comes_up, command, last_words, living};
use trellis_keeper::{Link, process};

use super::super::renewal::renew;
use super::{START_TIME_MAX, down, lock};

/// The pause before a keeper that did not start is started again.
const PAUSE: Duration = Duration::from_millis(200);

/// The keeper of this data directory.
pub struct KeeperSide {
    directory: PathBuf,
    run: PathBuf,
    /// How long a target may be silent before it is replaced.
    silence_max: Duration,
    /// Held while one is started.
    child: Mutex<Option<Child>>,
    /// Whether anything should run.
    needed: Mutex<bool>,
    becomes_needed: Condvar,
}

impl KeeperSide {
    /// The keeper of the volumes whose run directories are below `run`.
    pub fn new(run: &Path, silence_max: Duration) -> KeeperSide {
        let directory = run.with_file_name("keeper");
        KeeperSide {
            run: run.to_owned(),
            directory,
            silence_max,
            child: Mutex::default(),
            needed: Mutex::default(),
            becomes_needed: Condvar::new(),
        }
    }

    fn paths(&self) -> ProcessPaths {
        RunDir::at(self.directory.clone()).process("keeper")
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.paths().socket
    }

    /// Whether it runs.
    pub fn is_living(&self) -> bool {
        matches!(living(&self.paths().lock), Ok(Some(_)))
    }

    /// Starts it if it does not run.
    pub fn ensure(&self) -> Result<(), Hold> {
        let mut child = lock(&self.child);
        // One that has ended is dropped.
        if child
            .as_mut()
            .is_some_and(|child| !matches!(child.try_wait(), Ok(None)))
        {
            *child = None;
        }
        let paths = self.paths();
        let is_up = || paths.socket.exists() && matches!(living(&paths.lock), Ok(Some(_)));
        if is_up() {
            return Ok(());
        }
        let failed = |why: &dyn std::fmt::Display| {
            let log = paths.log.display();
            down(format!(
                "The keeper of the volumes' processes does not run: {why} (its log is {log})."
            ))
        };
        RunDir::at(self.directory.clone())
            .make()
            .map_err(|error| failed(&error))?;
        let arguments = [
            "keeper".as_ref(),
            "--directory".as_ref(),
            self.directory.as_os_str(),
        ];
        let run = ["--run".as_ref(), self.run.as_os_str()];
        let start = || {
            let mut command = command(&paths, &[&arguments[..], &run[..]].concat())?;
            // These two arm the service alone; copies and the keeper have variables of their own.
            command.env_remove(crate::crash::VARIABLE);
            command.env_remove(crate::crash::STOP_VARIABLE).spawn()
        };
        let mut started = start().map_err(|error| failed(&error))?;
        let is_up = comes_up(&mut started, START_TIME_MAX, is_up);
        *child = Some(started);
        if is_up {
            Ok(())
        } else {
            Err(failed(&last_words(&paths.log)))
        }
    }

    /// Asks it, and starts it if it does not run.
    pub fn ask(&self, request: &Request) -> Result<Answer, Hold> {
        *lock(&self.needed) = true;
        self.becomes_needed.notify_all();
        let asked = || Link::open(&self.socket())?.ask(request);
        // At the second try it may just have been started; or it was about to end at the first.
        for _ in 0..2 {
            match asked() {
                Ok(answer) => return Ok(answer),
                Err(error) => tracing::debug!(%error, "the keeper is asked again"),
            }
            self.ensure()?;
        }
        asked().map_err(|error| {
            down(format!(
                "The keeper of the volumes' processes does not answer: {error}."
            ))
        })
    }

    /// Listens to it for ever. Whenever there is a new keeper, `met` is called first, to say what should run.
    pub fn follow(&self, met: impl Fn() -> Result<(), Hold>, tell: impl Fn(Event)) -> ! {
        loop {
            self.wait_until_needed();
            if let Err(hold) = self.ensure().and_then(|()| self.listen(&met, &tell)) {
                tracing::warn!("{}", hold.message);
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn wait_until_needed(&self) {
        let mut needed = lock(&self.needed);
        while !*needed && !self.is_living() {
            needed = self
                .becomes_needed
                .wait(needed)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        *needed = true;
    }

    fn listen(
        &self,
        met: &impl Fn() -> Result<(), Hold>,
        tell: &impl Fn(Event),
    ) -> Result<(), Hold> {
        let gone =
            |error: std::io::Error| down(format!("The keeper cannot be listened to: {error}."));
        let link = Link::open(&self.socket()).map_err(gone)?;
        let silence_ms_max = u64::try_from(self.silence_max.as_millis()).unwrap_or(u64::MAX);
        link.ask(&Request::Watch { silence_ms_max }).map_err(gone)?;
        met()?;
        renew(&self.socket());
        while let Some(event) = link.next().map_err(gone)? {
            tell(event);
        }
        Ok(())
    }
}

/// Waits until `ended` or `ready` says so. Returns whether it is ready.
pub fn becomes(ready: impl Fn() -> bool, ended: impl Fn() -> bool, limit: Duration) -> bool {
    let deadline = std::time::Instant::now() + limit;
    loop {
        if ready() {
            return true;
        }
        if ended() || std::time::Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(process::LOOK_EVERY);
    }
}
