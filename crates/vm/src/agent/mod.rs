//! A client of the agent in the guest (qemu-guest-agent).
//!
//! Everything behind this channel belongs to the guest, who may say anything or nothing. One command is under way at a
//! time and each has a deadline. Before the first command, and after any that failed, the two sides synchronize: we
//! send a number, and everything up to the answer with that number is thrown away as it comes. So a guest that floods
//! its channel costs a fixed buffer and, at a bound, an error.
//!
//! The agent's own commands are few. What they lack is done by two small scripts that it runs ([`script`]).

pub mod exec;
pub mod script;

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;
use trellis_api::Bytes;

use crate::error::{Context, Error, Result};
use crate::line::Lines;

/// How long a command may take. The agent answers within milliseconds when the guest has time for it.
pub const COMMAND_TIME_MAX: Duration = Duration::from_secs(15);
/// How long freezing may take: it writes back all that is dirty.
const FREEZE_TIME_MAX: Duration = Duration::from_secs(60);
/// The longest answer. The agent itself keeps at most 16 MiB of a program's output; ours print little.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// How much is thrown away while looking for the answer to one synchronization.
const DISCARDED_BYTES_MAX: usize = 64 << 20;
const READ_BYTES: usize = 16 << 10;
/// What begins the answer to a synchronization. It occurs in no JSON.
const DELIMITER: u8 = 0xff;

/// A connection to the agent.
#[derive(Debug)]
pub struct GuestAgent {
    stream: UnixStream,
    lines: Lines,
    last_id: u64,
    synchronized: bool,
}

/// A filesystem of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestFilesystem {
    /// Where it is mounted.
    pub mountpoint: String,
    /// Its kind, as the guest calls it.
    pub kind: String,
    /// Its size, if the guest says it.
    pub total: Option<Bytes>,
    /// How much of it is used, if the guest says it.
    pub used: Option<Bytes>,
}

/// A disk or partition of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestDisk {
    /// Its device node.
    pub name: String,
    /// Whether it is a partition.
    pub partition: bool,
}

impl GuestAgent {
    /// Connects to the agent's channel. Whether an agent listens shows with the first command.
    pub async fn connect(path: &Path) -> Result<GuestAgent> {
        let stream = UnixStream::connect(path)
            .await
            .context("connect to", path)?;
        Ok(GuestAgent {
            stream,
            lines: Lines::new(ANSWER_BYTES_MAX),
            last_id: 0,
            synchronized: false,
        })
    }

    /// Asks whether the agent is there.
    pub async fn ping(&mut self, limit: Duration) -> Result<()> {
        self.execute("guest-ping", Value::Null, limit)
            .await
            .map(drop)
    }

    /// The guest's filesystems.
    pub async fn filesystems(&mut self) -> Result<Vec<GuestFilesystem>> {
        const COMMAND: &str = "guest-get-fsinfo";
        #[derive(Deserialize)]
        struct Entry {
            mountpoint: String,
            #[serde(rename = "type")]
            kind: String,
            #[serde(rename = "total-bytes")]
            total: Option<u64>,
            #[serde(rename = "used-bytes")]
            used: Option<u64>,
        }
        let answer = self.execute(COMMAND, Value::Null, COMMAND_TIME_MAX).await?;
        let entries: Vec<Entry> = read(COMMAND, answer, "list of filesystems")?;
        Ok(entries
            .into_iter()
            .map(|entry| GuestFilesystem {
                mountpoint: entry.mountpoint,
                kind: entry.kind,
                total: entry.total.map(Bytes::new),
                used: entry.used.map(Bytes::new),
            })
            .collect())
    }

    /// The guest's disks and partitions.
    pub async fn disks(&mut self) -> Result<Vec<GuestDisk>> {
        const COMMAND: &str = "guest-get-disks";
        #[derive(Deserialize)]
        struct Entry {
            name: String,
            partition: bool,
        }
        let answer = self.execute(COMMAND, Value::Null, COMMAND_TIME_MAX).await?;
        let entries: Vec<Entry> = read(COMMAND, answer, "list of disks")?;
        Ok(entries
            .into_iter()
            .map(|entry| GuestDisk {
                name: entry.name,
                partition: entry.partition,
            })
            .collect())
    }

    /// Writes everything back and stops all writing to the guest's filesystems. Answers how many. [`Agent::thaw`] must
    /// follow, also after an error: it may have frozen some.
    pub async fn freeze(&mut self) -> Result<u64> {
        const COMMAND: &str = "guest-fsfreeze-freeze";
        let answer = self.execute(COMMAND, Value::Null, FREEZE_TIME_MAX).await?;
        answer.as_u64().ok_or(Error::AgentAnswer {
            command: COMMAND,
            what: "count",
        })
    }

    /// Lets the guest write again. Answers how many filesystems were frozen.
    pub async fn thaw(&mut self) -> Result<u64> {
        const COMMAND: &str = "guest-fsfreeze-thaw";
        let answer = self.execute(COMMAND, Value::Null, FREEZE_TIME_MAX).await?;
        answer.as_u64().ok_or(Error::AgentAnswer {
            command: COMMAND,
            what: "count",
        })
    }

    /// Executes a command of the agent and answers what it returned.
    pub async fn execute(
        &mut self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value> {
        let deadline = Instant::now() + limit;
        let silent = |_| Error::AgentSilent { command, limit };
        if !self.synchronized {
            tokio::time::timeout_at(deadline, self.synchronize(command))
                .await
                .map_err(silent)??;
        }
        // Until its answer is here, the next command cannot know whose answer comes first.
        self.synchronized = false;
        let mut message = json!({ "execute": command });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let exchange = async {
            self.write(command, format!("{message}\n").as_bytes())
                .await?;
            self.line(command).await
        };
        let line = tokio::time::timeout_at(deadline, exchange)
            .await
            .map_err(silent)??;
        let mut answer: Value = serde_json::from_slice(&line).map_err(|_| Error::AgentAnswer {
            command,
            what: "JSON in it",
        })?;
        self.synchronized = true;
        if let Some(returned) = answer.get_mut("return") {
            return Ok(returned.take());
        }
        let description = answer["error"]["desc"].as_str().unwrap_or("no reason");
        Err(Error::AgentRefused {
            command,
            description: description.to_owned(),
        })
    }

    /// Sends a number and throws everything away until it comes back.
    async fn synchronize(&mut self, command: &'static str) -> Result<()> {
        self.last_id += 1;
        self.lines.clear();
        let id = self.last_id;
        let request =
            json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } }).to_string();
        // The delimiter ends whatever the agent has half read of an earlier command.
        let mut bytes = vec![DELIMITER];
        bytes.extend_from_slice(request.as_bytes());
        bytes.push(b'\n');
        self.write(command, &bytes).await?;
        let mut discarded = 0;
        let mut buffer = [0; READ_BYTES];
        let mut within = false;
        loop {
            let count = self.read_some(command, &mut buffer).await?;
            discarded += count;
            if discarded > DISCARDED_BYTES_MAX {
                return Err(Error::AgentFlood {
                    command,
                    limit: DISCARDED_BYTES_MAX,
                });
            }
            let mut rest = &buffer[..count];
            // Only what follows the last delimiter can be the answer.
            if let Some(at) = rest.iter().rposition(|byte| *byte == DELIMITER) {
                rest = &rest[at + 1..];
                self.lines.clear();
                within = true;
            }
            if !within {
                continue;
            }
            self.lines.push(rest);
            let answered = loop {
                match self.lines.next() {
                    Ok(Some(line)) => {
                        let answer: Value = serde_json::from_slice(&line).unwrap_or_default();
                        if answer["return"].as_u64() == Some(id) {
                            break true;
                        }
                    }
                    Ok(None) => break false,
                    // Not the answer. What follows may be.
                    Err(_) => {
                        self.lines.clear();
                        within = false;
                        break false;
                    }
                }
            };
            if answered {
                self.lines.clear();
                self.synchronized = true;
                return Ok(());
            }
        }
    }

    async fn line(&mut self, command: &'static str) -> Result<Vec<u8>> {
        let mut buffer = [0; READ_BYTES];
        loop {
            match self.lines.next() {
                Ok(Some(line)) => return Ok(line),
                Ok(None) => {}
                Err(_) => {
                    return Err(Error::AgentFlood {
                        command,
                        limit: ANSWER_BYTES_MAX,
                    });
                }
            }
            let count = self.read_some(command, &mut buffer).await?;
            self.lines.push(&buffer[..count]);
        }
    }

    async fn read_some(&mut self, command: &'static str, buffer: &mut [u8]) -> Result<usize> {
        match self.stream.read(buffer).await {
            Ok(0) | Err(_) => Err(Error::AgentClosed { command }),
            Ok(count) => Ok(count),
        }
    }

    async fn write(&mut self, command: &'static str, bytes: &[u8]) -> Result<()> {
        let written = self.stream.write_all(bytes).await;
        written.map_err(|_| Error::AgentClosed { command })
    }
}

fn read<T: for<'a> Deserialize<'a>>(
    command: &'static str,
    answer: Value,
    what: &'static str,
) -> Result<T> {
    serde_json::from_value(answer).map_err(|_| Error::AgentAnswer { command, what })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
