//! A client of QEMU's monitor protocol (QMP).
//!
//! One task owns the socket ([`connection`]). Commands reach it through a bounded queue, so a caller that gives up in
//! the middle of a command leaves no half message on the wire. Answers find their command by its id. Events go, in
//! their order, to every subscriber's bounded queue. A subscriber that is too slow is told how many it has missed, and
//! then asks QEMU how things are.
//!
//! QEMU is not trusted to answer: each command has a deadline, each line a greatest length. It is not trusted to be of
//! our version either: events and members that we do not know are passed on or over.

mod connection;
mod message;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot};

pub use message::Event;

use crate::error::{ConnectionEnd, Context, Error, Result};
use connection::{Connection, Order};

/// How long QEMU may take to greet. It does so as soon as it accepts.
const GREETING_TIME_MAX: Duration = Duration::from_secs(20);
/// How long a command may take unless the caller says otherwise. QEMU answers within milliseconds; the machine may be
/// busy.
pub const COMMAND_TIME_MAX: Duration = Duration::from_secs(30);
/// The longest line. A machine with 1000 disks describes them in about 4 MiB.
pub(crate) const LINE_BYTES_MAX: usize = 16 << 20;
/// How many commands may wait to be sent.
const ORDERS_MAX: usize = 64;
/// How many events are kept for a subscriber.
const EVENTS_MAX: usize = 1024;

/// A connection to QEMU's monitor. It ends when this and its clones are gone.
#[derive(Clone, Debug)]
pub struct Client {
    orders: mpsc::Sender<Order>,
    /// Only to make more subscribers from; it is never read.
    events: std::sync::Arc<broadcast::Receiver<Event>>,
    version: Version,
}

/// QEMU's version, for people. Features are found out by trying them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The first number.
    pub major: u64,
    /// The second number.
    pub minor: u64,
    /// The third number.
    pub micro: u64,
}

/// What comes next in a subscriber's queue.
#[derive(Clone, Debug, PartialEq)]
pub enum Notice {
    /// The next event.
    Event(Event),
    /// So many events were dropped because they were not taken in time.
    Missed(u64),
    /// The connection has ended. Nothing follows.
    Closed,
}

/// A subscriber's queue of events.
#[derive(Debug)]
pub struct Events(broadcast::Receiver<Event>);

impl Events {
    /// Waits for what comes next. A caller that gives up waiting loses nothing.
    pub async fn next(&mut self) -> Notice {
        match self.0.recv().await {
            Ok(event) => Notice::Event(event),
            Err(broadcast::error::RecvError::Lagged(count)) => Notice::Missed(count),
            Err(broadcast::error::RecvError::Closed) => Notice::Closed,
        }
    }
}

impl Client {
    /// Connects to a monitor and brings it into command mode. The subscriber gets every event from the first on.
    pub async fn connect(path: &Path) -> Result<(Client, Events)> {
        let stream = UnixStream::connect(path)
            .await
            .context("connect to", path)?;
        let mut connection = Connection::new(stream);
        let greeting = tokio::time::timeout(GREETING_TIME_MAX, connection.greeting()).await;
        let version = match greeting {
            Err(_) => {
                return Err(Error::NoGreeting {
                    path: path.to_owned(),
                    limit: GREETING_TIME_MAX,
                });
            }
            Ok(Ok(Some(version))) => version,
            Ok(Ok(None) | Err(ConnectionEnd::Garbage | ConnectionEnd::LineTooLong)) => {
                return Err(Error::NotQmp {
                    path: path.to_owned(),
                });
            }
            Ok(Err(fault)) => {
                return Err(Error::Connection {
                    command: "the greeting",
                    fault,
                });
            }
        };
        let (orders, taken) = mpsc::channel(ORDERS_MAX);
        let (sender, first) = broadcast::channel(EVENTS_MAX);
        let client = Client {
            orders,
            events: std::sync::Arc::new(sender.subscribe()),
            version,
        };
        tokio::spawn(connection.run(taken, sender));
        client.execute("qmp_capabilities", Value::Null).await?;
        Ok((client, Events(first)))
    }

    /// QEMU's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// A further subscriber, to the events from now on.
    pub fn subscribe(&self) -> Events {
        Events(self.events.resubscribe())
    }

    /// Executes a command and answers what it returned.
    pub async fn execute(&self, command: &'static str, arguments: Value) -> Result<Value> {
        self.send(command, arguments, None, COMMAND_TIME_MAX).await
    }

    /// As [`Client::execute`], with another deadline.
    pub async fn execute_within(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value> {
        self.send(command, arguments, None, limit).await
    }

    /// Hands QEMU an open file in a new set of descriptors, and answers the set's number. `opaque` is what QEMU will
    /// say about it when it is asked. QEMU closes a set that nobody uses when this connection ends.
    pub async fn add_fd(&self, file: OwnedFd, opaque: &str) -> Result<u64> {
        const COMMAND: &str = "add-fd";
        let arguments = json!({ "opaque": opaque });
        let answer = self
            .send(COMMAND, arguments, Some(file), COMMAND_TIME_MAX)
            .await?;
        answer["fdset-id"].as_u64().ok_or(Error::Answer {
            command: COMMAND,
            what: "fdset-id",
        })
    }

    async fn send(
        &self,
        command: &'static str,
        arguments: Value,
        file: Option<OwnedFd>,
        limit: Duration,
    ) -> Result<Value> {
        let (reply, answer) = oneshot::channel();
        let order = Order {
            command,
            arguments,
            file,
            reply,
        };
        let answered = async {
            // Both ends of the task are its end: then nobody takes orders, and every reply is dropped.
            if self.orders.send(order).await.is_err() {
                return Err(ConnectionEnd::Closed);
            }
            answer.await.unwrap_or(Err(ConnectionEnd::Closed))
        };
        let answer = tokio::time::timeout(limit, answered)
            .await
            .map_err(|_| Error::Deadline { command, limit })?
            .map_err(|fault| Error::Connection { command, fault })?;
        answer.map_err(|error| Error::Refused {
            command,
            class: error.class,
            description: error.description,
        })
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
