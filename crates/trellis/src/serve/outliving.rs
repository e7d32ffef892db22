//! Ends the processes that outlive the service, when everything is to end: targets, copies, and the keeper last.
//!
//! It needs nobody else: the service is not running, and a dead or frozen keeper is no obstacle.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use trellis_keeper::Link;
use trellis_keeper::message::Request as KeeperRequest;
use trellis_keeper::paths::{ProcessPaths, RunDir};
use trellis_keeper::process::{Ending, end, living};

use super::message::{Answer, Request, ask};
use super::supervisor::{TARGET, iqn};

/// How long a target may take to report its status.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a process has to end by itself: a target still writes what it has.
const END_TIME_MAX: Duration = Duration::from_secs(10);
/// The file of the keeper that says what should run.
const WANTED: &str = "wanted.json";

/// The processes of a data directory.
pub struct Outliving {
    run: PathBuf,
    keeper: RunDir,
}

/// Why they do not end.
#[derive(Debug, thiserror::Error)]
pub enum Stays {
    /// A target does not serve, so what stands on it cannot be unmounted.
    #[error(
        "volume {volume} is in use and {how}, so that unmounting it would wait without end; {what_to_do}"
    )]
    Unserved {
        /// The volume.
        volume: String,
        /// What is wrong.
        how: String,
        /// The way out.
        what_to_do: &'static str,
    },
    /// Somebody uses the file of a volume.
    #[error("the file of volume {volume} is in use: {message}")]
    FileInUse {
        /// The volume.
        volume: String,
        /// Who uses it.
        message: String,
    },
    /// What a target has left cannot be removed.
    #[error("what the target of volume {volume} has left cannot be taken away")]
    Left {
        /// The volume.
        volume: String,
        /// Why.
        source: trellis_node::Error,
    },
    /// A process or file cannot be used.
    #[error("the process with the lock {} cannot be ended", lock.display())]
    Process {
        /// Its lock.
        lock: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The directory of the processes cannot be read.
    #[error("{} cannot be read", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Outliving {
    /// Those of that data directory.
    pub fn of(data: &Path) -> Outliving {
        Outliving {
            run: data.join("run"),
            keeper: RunDir::at(data.join("keeper")),
        }
    }

    /// The iSCSI names of the volumes that are served.
    pub fn target_names(&self) -> Result<Vec<String>, Stays> {
        Ok(self.volumes()?.iter().map(|volume| iqn(volume)).collect())
    }

    /// The process of the keeper, if it runs.
    pub fn keeper(&self) -> Option<u32> {
        let pid = living(&self.keeper.process("keeper").lock).ok().flatten()?;
        u32::try_from(pid.as_raw_nonzero().get()).ok()
    }

    /// Where the keeper listens, if it runs.
    pub fn keeper_socket(&self) -> Option<PathBuf> {
        self.keeper()?;
        Some(self.keeper.process("keeper").socket)
    }

    /// How many processes run.
    pub fn count(&self) -> Result<usize, Stays> {
        let mut count = usize::from(self.keeper().is_some());
        for volume in self.volumes()? {
            count += self.living_of(&volume)?.len();
        }
        Ok(count)
    }

    /// Refuses if the volume of that file is not served: whoever unmounts it would wait for ever.
    pub fn refuse_unserved(&self, backing: &Path) -> Result<(), Stays> {
        let Ok(inside) = backing.strip_prefix(&self.run) else {
            return Ok(());
        };
        let volume = inside.iter().next().unwrap_or_default().to_string_lossy();
        let paths = RunDir::of(&self.run, &volume).process(TARGET);
        let how = match ask(&paths.socket, &Request::Status, ANSWER_TIME_MAX) {
            Ok(Answer::Status(status)) if status.available => return Ok(()),
            Ok(_) => "too few of its copies are there",
            // A file that nobody will serve answers with an error, and can be unmounted.
            Err(_) if trellis_node::volume::is_unreachable(backing) => return Ok(()),
            Err(_) => "its target does not answer",
        };
        Err(Stays::Unserved {
            volume: volume.into_owned(),
            how: how.to_owned(),
            what_to_do: "bring its copies back and try again (`trellis volume show`, `trellis volume recover`)",
        })
    }

    /// Ends all of them, and says what it does.
    pub fn end(&self, say: &mut dyn FnMut(String)) -> Result<(), Stays> {
        let volumes = self.volumes()?;
        self.dismiss_all(&volumes, say)?;
        for volume in &volumes {
            self.end_target(volume, say)?;
        }
        for volume in &volumes {
            self.end_copies(volume, say)?;
        }
        let paths = self.keeper.process("keeper");
        if self.keeper().is_some() {
            say("ending the keeper".to_owned());
        }
        end_process(&paths, say)?;
        let _ = std::fs::remove_file(self.keeper.path().join(WANTED));
        Ok(())
    }

    /// Keeps the keeper from restarting anything. If it does not answer, it is killed, because it would restart them.
    fn dismiss_all(&self, volumes: &[String], say: &mut dyn FnMut(String)) -> Result<(), Stays> {
        let paths = self.keeper.process("keeper");
        if self.keeper().is_none() {
            return Ok(());
        }
        for volume in volumes {
            for name in self.names_of(volume)? {
                let volume = volume.clone();
                let forget = KeeperRequest::Forget { volume, name };
                let told = Link::open(&paths.socket).and_then(|link| link.ask(&forget));
                if let Err(error) = told {
                    say(format!(
                        "the keeper does not answer and is killed ({error})"
                    ));
                    let ended = end(&paths.lock, Duration::ZERO);
                    return ended.map(drop).map_err(|source| stays(&paths, source));
                }
            }
        }
        Ok(())
    }

    fn end_target(&self, volume: &str, say: &mut dyn FnMut(String)) -> Result<(), Stays> {
        let run = RunDir::of(&self.run, volume);
        let paths = run.process(TARGET);
        if !matches!(living(&paths.lock), Ok(None)) {
            say(format!("ending the target of volume {volume}"));
            // A target that does not answer is ended all the same; its file is removed below.
            if let Ok(Answer::Held { message, .. }) =
                ask(&paths.socket, &Request::Stop, END_TIME_MAX)
            {
                let volume = volume.to_owned();
                return Err(Stays::FileInUse { volume, message });
            }
        }
        end_process(&paths, say)?;
        if self.keeper().is_some() {
            let release = KeeperRequest::Release {
                volume: volume.to_owned(),
            };
            // The keeper ends as well, and releases it then.
            let socket = self.keeper.process("keeper").socket;
            let _ = Link::open(&socket).and_then(|link| link.ask(&release));
        }
        trellis_node::fuse::dismantle(&run.file()).map_err(|source| Stays::Left {
            volume: volume.to_owned(),
            source,
        })?;
        trellis_api::step::reached(trellis_api::step::Step::TargetRetired);
        Ok(())
    }

    fn end_copies(&self, volume: &str, say: &mut dyn FnMut(String)) -> Result<(), Stays> {
        let living = self.living_of(volume)?;
        if !living.is_empty() {
            say(format!("ending {} copies of volume {volume}", living.len()));
        }
        for name in self.names_of(volume)? {
            end_process(&RunDir::of(&self.run, volume).process(&name), say)?;
            trellis_api::step::reached(trellis_api::step::Step::CopyRetired);
        }
        Ok(())
    }

    /// The volumes that have a run directory.
    fn volumes(&self) -> Result<Vec<String>, Stays> {
        names(&self.run)
    }

    /// The names of a volume's processes, running or not.
    fn names_of(&self, volume: &str) -> Result<Vec<String>, Stays> {
        let files = names(RunDir::of(&self.run, volume).path())?;
        let locks = files.iter().filter_map(|name| name.strip_suffix(".lock"));
        Ok(locks.map(str::to_owned).collect())
    }

    fn living_of(&self, volume: &str) -> Result<Vec<String>, Stays> {
        let run = RunDir::of(&self.run, volume);
        let mut names = self.names_of(volume)?;
        names.retain(|name| !matches!(living(&run.process(name).lock), Ok(None)));
        Ok(names)
    }
}

/// Ends a process and removes its sockets. Its lock and its log stay.
fn end_process(paths: &ProcessPaths, say: &mut dyn FnMut(String)) -> Result<(), Stays> {
    let ended = end(&paths.lock, END_TIME_MAX).map_err(|source| stays(paths, source))?;
    if ended == Ending::Killed {
        let log = paths.log.display();
        say(format!(
            "a process did not end when it was asked to and was killed (its log is {log})"
        ));
    }
    let of_links = [&paths.control, &paths.deaf_control];
    for socket in [&paths.socket, &paths.deaf_socket]
        .into_iter()
        .chain(of_links)
    {
        let _ = std::fs::remove_file(socket);
    }
    Ok(())
}

fn stays(paths: &ProcessPaths, source: io::Error) -> Stays {
    let lock = paths.lock.clone();
    Stays::Process { lock, source }
}

/// The names in a directory, in order; none if it is not there.
fn names(path: &Path) -> Result<Vec<String>, Stays> {
    let failed = |source: io::Error| Stays::Directory {
        path: path.to_owned(),
        source,
    };
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        names.extend(name.into_string().ok());
    }
    names.sort_unstable();
    Ok(names)
}
