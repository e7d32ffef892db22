//! The task that owns a connection: it writes commands whole, and sorts what comes back.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot};
use trellis_node::sys::fdpass;

use super::message::{self, Event, Message, Refusal};
use super::{LINE_BYTES_MAX, Version};
use crate::error::ConnectionEnd;
use crate::line::Lines;

const READ_BYTES: usize = 64 << 10;
/// How many commands may be without an answer. Whoever gave up on one is not counted.
const WAITING_MAX: usize = 64;

pub(super) type Reply = oneshot::Sender<Result<Result<Value, Refusal>, ConnectionEnd>>;

/// A command that is to be sent.
#[derive(Debug)]
pub(super) struct Order {
    pub command: &'static str,
    pub arguments: Value,
    /// Goes with the command, for `add-fd`.
    pub file: Option<OwnedFd>,
    pub reply: Reply,
}

/// A message that is being written.
struct Outgoing {
    bytes: Vec<u8>,
    written: usize,
    file: Option<OwnedFd>,
}

pub(super) struct Connection {
    stream: UnixStream,
    lines: Lines,
    buffer: Vec<u8>,
    waiting: HashMap<u64, Reply>,
    outgoing: Option<Outgoing>,
    last_id: u64,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Connection {
        Connection {
            stream,
            lines: Lines::new(LINE_BYTES_MAX),
            buffer: vec![0; READ_BYTES],
            waiting: HashMap::new(),
            outgoing: None,
            last_id: 0,
        }
    }

    /// Waits for the greeting. `None` if something else came.
    pub(super) async fn greeting(&mut self) -> Result<Option<Version>, ConnectionEnd> {
        loop {
            if let Some(line) = self.lines.next().map_err(|_| ConnectionEnd::LineTooLong)? {
                return match message::read(&line) {
                    Some(Message::Greeting(version)) => Ok(Some(version)),
                    Some(_) => Ok(None),
                    None => Err(ConnectionEnd::Garbage),
                };
            }
            self.stream.readable().await.map_err(socket)?;
            self.read()?;
        }
    }

    /// Serves orders until nobody can give any, or the connection ends. Then every command that waits is told how.
    pub(super) async fn run(
        mut self,
        mut orders: mpsc::Receiver<Order>,
        events: broadcast::Sender<Event>,
    ) {
        let Err(fault) = self.serve(&mut orders, &events).await else {
            return;
        };
        tracing::debug!(%fault, "a connection to QEMU has ended");
        orders.close();
        let mut unsent = VecDeque::new();
        while let Ok(order) = orders.try_recv() {
            unsent.push_back(order.reply);
        }
        for reply in self.waiting.into_values().chain(unsent) {
            // Whoever gave up does not want to know.
            let _ = reply.send(Err(fault));
        }
    }

    async fn serve(
        &mut self,
        orders: &mut mpsc::Receiver<Order>,
        events: &broadcast::Sender<Event>,
    ) -> Result<(), ConnectionEnd> {
        loop {
            // QEMU may have sent something right behind its greeting.
            self.deliver(events)?;
            let mut interest = Interest::READABLE;
            if self.outgoing.is_some() {
                interest |= Interest::WRITABLE;
            }
            let may_take = self.outgoing.is_none() && self.waiting.len() < WAITING_MAX;
            tokio::select! {
                order = orders.recv(), if may_take => match order {
                    Some(order) => self.begin(order),
                    None => return Ok(()),
                },
                ready = self.stream.ready(interest) => {
                    let ready = ready.map_err(socket)?;
                    if ready.is_writable() {
                        self.write()?;
                    }
                    if ready.is_readable() || ready.is_read_closed() {
                        self.read()?;
                    }
                }
            }
            // Whoever gave up makes room for others.
            self.waiting.retain(|_, reply| !reply.is_closed());
        }
    }

    fn begin(&mut self, order: Order) {
        self.last_id += 1;
        let mut message = json!({ "execute": order.command, "id": self.last_id });
        if !order.arguments.is_null() {
            message["arguments"] = order.arguments;
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(b'\n');
        self.waiting.insert(self.last_id, order.reply);
        self.outgoing = Some(Outgoing {
            bytes,
            written: 0,
            file: order.file,
        });
    }

    /// Writes as much as the socket takes.
    fn write(&mut self) -> Result<(), ConnectionEnd> {
        let Some(outgoing) = &mut self.outgoing else {
            return Ok(());
        };
        let written = match &outgoing.file {
            // A descriptor travels with the whole of its message, or the rest would come without it.
            Some(file) => self.stream.try_io(Interest::WRITABLE, || {
                fdpass::send(&self.stream, &outgoing.bytes, &[file.as_fd()])?;
                Ok(outgoing.bytes.len())
            }),
            None => self.stream.try_write(&outgoing.bytes[outgoing.written..]),
        };
        match written {
            Ok(count) => outgoing.written += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(socket(error)),
        }
        if outgoing.written == outgoing.bytes.len() {
            self.outgoing = None;
        }
        Ok(())
    }

    /// Reads what is there.
    fn read(&mut self) -> Result<(), ConnectionEnd> {
        match self.stream.try_read(&mut self.buffer) {
            Ok(0) => Err(ConnectionEnd::Closed),
            Ok(count) => {
                self.lines.push(&self.buffer[..count]);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(socket(error)),
        }
    }

    /// Hands on every line that is whole.
    fn deliver(&mut self, events: &broadcast::Sender<Event>) -> Result<(), ConnectionEnd> {
        while let Some(line) = self.lines.next().map_err(|_| ConnectionEnd::LineTooLong)? {
            match message::read(&line).ok_or(ConnectionEnd::Garbage)? {
                Message::Answer { id, answer } => match self.waiting.remove(&id) {
                    Some(reply) => {
                        let _ = reply.send(Ok(answer));
                    }
                    None => tracing::debug!(id, "QEMU answered what nobody waits for"),
                },
                Message::Event(event) => {
                    // Without subscribers there is nobody to tell.
                    let _ = events.send(event);
                }
                Message::Greeting(_) | Message::Unknown => {
                    tracing::warn!("QEMU sent a message of unknown shape");
                }
            }
        }
        Ok(())
    }
}

fn socket(error: io::Error) -> ConnectionEnd {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ConnectionEnd::Closed,
        kind => ConnectionEnd::Socket(kind),
    }
}
