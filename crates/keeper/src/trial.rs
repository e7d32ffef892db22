//! The trial of a program before the keeper becomes it.
//!
//! After `exec` there is no way back: a program that then could not read what it was handed would take every connection
//! with it. So it is started as a child first, with the arguments that it would get and with the very text, and has to
//! say that it can read it. The keeper goes on meanwhile, and waits for the child in `poll` like for everything else.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::Error;
use crate::handover::{consent, open_program};
use crate::process::{reap, told};

/// How long a program may take to say whether it can take over.
pub const TIME_MAX: Duration = Duration::from_secs(10);
/// How much of what it says is read.
const SAID_BYTES_MAX: u64 = 2048;

/// A program that is being tried.
pub struct Trial {
    candidate: Candidate,
    /// Readable when it has ended.
    pidfd: OwnedFd,
    said: PipeReader,
    /// When it is given up; none if it was.
    deadline: Option<Instant>,
}

/// A program that a keeper may become.
pub struct Candidate {
    /// The program, open.
    pub program: File,
    /// Where it was found. This is only told, never opened.
    pub path: PathBuf,
    /// The peer that asked for it.
    pub asker: u64,
}

impl Trial {
    /// Starts the program with what it would be handed.
    pub fn begin(
        candidate: Candidate,
        arguments: &[OsString],
        handed: OwnedFd,
        now: Instant,
    ) -> Result<Trial, Error> {
        let start = || -> io::Result<(OwnedFd, PipeReader)> {
            let (said, says) = io::pipe()?;
            // A child of its own may still have the other end when it has ended.
            fcntl_setfl(&said, OFlags::NONBLOCK)?;
            let mut command = open_program(&candidate.program);
            command.arg0("trellis").args(arguments);
            command.stdin(handed).stdout(says.try_clone()?).stderr(says);
            let child = command.spawn()?;
            // It is a child: until it is reaped, its number is its own.
            let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
            Ok((pidfd, said))
        };
        let (pidfd, said) = start().map_err(|source| Error::NotExecuted {
            program: candidate.path.clone(),
            source,
        })?;
        Ok(Trial {
            candidate,
            pidfd,
            said,
            deadline: Some(now + TIME_MAX),
        })
    }

    /// When it is given up.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Kills the program if its time is over. Answers who asked for it, and what is to be told.
    pub fn give_up(&mut self, now: Instant) -> Option<(u64, Error)> {
        self.deadline.take_if(|deadline| *deadline <= now)?;
        // It may just have ended; that is too late all the same.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let late = Error::Late {
            program: self.candidate.path.clone(),
            limit: TIME_MAX,
        };
        Some((self.candidate.asker, late))
    }

    /// The program has ended. Answers whether the keeper may become it; nothing if it was given up before.
    pub fn ended(self) -> Option<(Candidate, Result<(), Error>)> {
        let status = reap(&self.pidfd);
        self.deadline?;
        let mut said = Vec::new();
        // What cannot be read was not said.
        let _ = (&self.said).take(SAID_BYTES_MAX).read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said);
        let has_succeeded = matches!(&status, Ok(Some(status)) if status.exit_status() == Some(0));
        if has_succeeded && said.trim() == consent() {
            return Some((self.candidate, Ok(())));
        }
        let how = match status {
            Ok(Some(status)) => told(&status),
            Ok(None) => "it still runs".to_owned(),
            Err(error) => error.to_string(),
        };
        let unfit = Error::Unfit {
            program: self.candidate.path.clone(),
            how,
            said: said.lines().next_back().unwrap_or("nothing").to_owned(),
        };
        Some((self.candidate, Err(unfit)))
    }
}

impl AsFd for Trial {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::process::has_ended;

    fn tried(program: &str, arguments: &[&str]) -> Result<Trial, Error> {
        let path = PathBuf::from(program);
        let candidate = Candidate {
            program: File::open(&path).unwrap(),
            path,
            asker: 7,
        };
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        let handed = File::open("/dev/null").unwrap().into();
        Trial::begin(candidate, &arguments, handed, Instant::now())
    }

    fn verdict(program: &str, arguments: &[&str]) -> Result<(), Error> {
        let trial = tried(program, arguments)?;
        assert!(has_ended(&trial, TIME_MAX).unwrap());
        let (candidate, verdict) = trial.ended().unwrap();
        assert_eq!(candidate.asker, 7);
        verdict
    }

    // Fails if the keeper would become a program that has not said that it can take over, or is not told what it said.
    #[test]
    fn only_a_program_that_says_so_may_take_over() {
        let script = format!("echo {}", consent());
        verdict("/bin/sh", &["-c", &script]).unwrap();
        let said = verdict("/bin/sh", &["-c", "echo no >&2; exit 3"]).unwrap_err();
        let said = said.to_string();
        assert_eq!(said, "/bin/sh cannot take over (exit code 3): no");
        assert!(verdict("/bin/true", &[]).is_err());
        assert!(verdict("/bin/sh", &["-c", &format!("{script}; exit 1")]).is_err());
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trellis");
        std::fs::write(&path, "not a program").unwrap();
        let refused = verdict(path.to_str().unwrap(), &[]).unwrap_err();
        assert!(matches!(refused, Error::NotExecuted { .. }), "{refused}");
    }

    // Fails if a program that says nothing is waited for without a limit, is left running, or is believed later.
    #[test]
    fn a_program_that_says_nothing_is_given_up() {
        let mut trial = tried("/bin/sleep", &["60"]).unwrap();
        assert!(trial.give_up(Instant::now()).is_none());
        let deadline = trial.deadline().unwrap();
        let (asker, late) = trial.give_up(deadline).unwrap();
        assert!(asker == 7 && matches!(late, Error::Late { .. }), "{late}");
        assert!(trial.give_up(deadline).is_none() && trial.deadline().is_none());
        assert!(has_ended(&trial, TIME_MAX).unwrap());
        assert!(trial.ended().is_none());
    }
}
