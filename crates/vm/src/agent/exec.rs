//! Runs a program in the guest.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{COMMAND_TIME_MAX, GuestAgent, read};
use crate::error::{Error, Result};

/// The pause between two questions whether the program has ended, from the first to the longest.
const POLL_FIRST: Duration = Duration::from_millis(5);
const POLL_LONGEST: Duration = Duration::from_millis(250);

/// How a program in the guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestOutput {
    /// Its exit status, or the number of the signal that ended it, below zero.
    pub status: i64,
    /// What it printed.
    pub stdout: String,
    /// What it complained of.
    pub stderr: String,
    /// Whether the agent has thrown away a part of either.
    pub truncated: bool,
}

#[derive(Deserialize)]
struct Status {
    exited: bool,
    #[serde(rename = "exitcode")]
    code: Option<i64>,
    signal: Option<i64>,
    #[serde(rename = "out-data", default)]
    stdout: String,
    #[serde(rename = "err-data", default)]
    stderr: String,
    #[serde(rename = "out-truncated", default)]
    stdout_truncated: bool,
    #[serde(rename = "err-truncated", default)]
    stderr_truncated: bool,
}

impl GuestAgent {
    /// Runs a program to its end. One that does not end in time is left alone: the agent cannot end it.
    pub async fn run(
        &mut self,
        program: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<GuestOutput> {
        const START: &str = "guest-exec";
        const STATUS: &str = "guest-exec-status";
        let deadline = Instant::now() + limit;
        let order = json!({ "path": program, "arg": arguments, "capture-output": true });
        let started = self.execute(START, order, COMMAND_TIME_MAX).await?;
        let process = started["pid"].as_i64().ok_or(Error::AgentAnswer {
            command: START,
            what: "pid",
        })?;
        let mut pause = POLL_FIRST;
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(POLL_LONGEST);
            let question = json!({ "pid": process });
            let answer: Value = self.execute(STATUS, question, COMMAND_TIME_MAX).await?;
            let status: Status = read(STATUS, answer, "state")?;
            if status.exited {
                return Ok(GuestOutput {
                    status: status
                        .code
                        .or(status.signal.map(|signal| -signal))
                        .unwrap_or(-1),
                    stdout: decoded(&status.stdout),
                    stderr: decoded(&status.stderr),
                    truncated: status.stdout_truncated || status.stderr_truncated,
                });
            }
            if Instant::now() >= deadline {
                return Err(Error::GuestProgramTimedOut {
                    program: program.to_owned(),
                    limit,
                });
            }
        }
    }
}

/// A guest's text. What is not text in it is shown as such.
fn decoded(data: &str) -> String {
    let bytes = STANDARD.decode(data).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
