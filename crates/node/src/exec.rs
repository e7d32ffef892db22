//! The only place that runs other programs.
//!
//! A program gets no input, the C locale, a time limit, and a bound on how much of its output is
//! kept. It is killed by its process id when the time is over.

use std::io::{self, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};

/// How much of each output stream is kept. The rest is read and dropped, so the program never blocks on a full pipe.
const OUTPUT_BYTES_MAX: u64 = 16 * 1024;
/// How much of the output goes into an error sentence.
const OUTPUT_CHARS_IN_ERROR: usize = 400;
/// How long to wait for a killed program. One that is stuck in the kernel outlives that.
const KILL_TIME_MAX: Duration = Duration::from_secs(2);
/// The pause between two looks at a running program, from the first to the longest.
const POLL_FIRST: Duration = Duration::from_millis(1);
const POLL_LONGEST: Duration = Duration::from_millis(50);
/// Where system programs live. A service's PATH often lacks the sbin directories.
const DIRECTORIES: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// A program that Trellis may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its file name.
    pub name: &'static str,
    /// The package that has it.
    pub package: &'static str,
}

/// What a program printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The first part of standard output.
    pub stdout: String,
    /// The first part of standard error.
    pub stderr: String,
}

impl Program {
    /// Where the program is, if it is installed.
    pub fn find(self) -> Option<PathBuf> {
        DIRECTORIES
            .iter()
            .map(|dir| PathBuf::from(dir).join(self.name))
            .find(|path| path.is_file())
    }

    /// Runs the program to its end and returns its output, or the error that it ended with.
    pub fn run(self, arguments: &[String], limit: Duration) -> Result<Output> {
        let path = self.find().ok_or(Error::ProgramMissing {
            program: self.name,
            package: self.package,
        })?;
        tracing::debug!(program = self.name, ?arguments, "run");
        let mut child = Command::new(&path)
            .args(arguments)
            .env_clear()
            .env("LC_ALL", "C")
            .env("PATH", DIRECTORIES.join(":"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("run", &path)?;
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        let status = wait(&mut child, limit).context("wait for", &path)?;
        let Some(status) = status else {
            // Its output is not waited for: a program stuck in the kernel keeps its pipes open.
            return Err(Error::ProgramTimedOut {
                program: self.name,
                limit,
            });
        };
        let output = Output {
            stdout: joined(stdout),
            stderr: joined(stderr),
        };
        if status.success() {
            return Ok(output);
        }
        let told = if output.stderr.trim().is_empty() {
            &output.stdout
        } else {
            &output.stderr
        };
        Err(Error::ProgramFailed {
            program: self.name,
            status,
            output: brief(told),
        })
    }
}

/// Waits until the child ends, or kills it when the time is over and returns `None`.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = wait_for(child, limit)? {
        return Ok(Some(status));
    }
    child.kill()?;
    wait_for(child, KILL_TIME_MAX)?;
    Ok(None)
}

fn wait_for(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    let mut pause = POLL_FIRST;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(POLL_LONGEST);
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut kept = Vec::new();
        // A pipe that breaks ends the text; the exit status decides about success.
        let _ = pipe.by_ref().take(OUTPUT_BYTES_MAX).read_to_end(&mut kept);
        let _ = io::copy(&mut pipe, &mut io::sink());
        kept
    })
}

fn joined(reader: Option<JoinHandle<Vec<u8>>>) -> String {
    let bytes = reader
        .and_then(|reader| reader.join().ok())
        .unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// One line of bounded length, for an error sentence: the end of the text, where programs put the cause.
fn brief(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let skip = line.chars().count().saturating_sub(OUTPUT_CHARS_IN_ERROR);
    line.chars().skip(skip).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SH: Program = Program {
        name: "sh",
        package: "dash",
    };

    fn sh(script: &str, limit: Duration) -> Result<Output> {
        SH.run(&["-c".to_owned(), script.to_owned()], limit)
    }

    #[test]
    fn a_program_that_hangs_is_killed_and_named() {
        // Fails if the time limit is not kept: the test would then hang for an hour.
        let error = sh("exec sleep 3600", Duration::from_millis(50)).unwrap_err();
        assert!(
            matches!(error, Error::ProgramTimedOut { program: "sh", .. }),
            "{error}"
        );
    }

    #[test]
    fn endless_output_neither_blocks_nor_fills_memory() {
        // Fails if the pipe is left full (a hang) or if all of the output is kept.
        let output = sh("head -c 3000000 /dev/zero", Duration::from_secs(60)).unwrap();
        assert_eq!(
            u64::try_from(output.stdout.len()).unwrap(),
            OUTPUT_BYTES_MAX
        );
    }

    #[test]
    fn a_failure_carries_the_end_of_what_was_printed() {
        // Fails if standard error is lost, or if an error sentence has many lines.
        let error = sh(
            "echo one >&2; echo the cause >&2; exit 3",
            Duration::from_secs(60),
        )
        .unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("one the cause") && text.contains('3') && !text.contains('\n'),
            "{text}"
        );
    }

    #[test]
    fn a_missing_program_names_its_package() {
        // Fails if a missing program is reported as a plain "file not found".
        let program = Program {
            name: "no-such-program",
            package: "some-package",
        };
        let text = program
            .run(&[], Duration::from_secs(1))
            .unwrap_err()
            .to_string();
        assert!(text.contains("some-package"), "{text}");
    }
}
