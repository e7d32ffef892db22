//! What host and guest say to each other: frames of a length and a JSON text.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The name of the virtio-serial port.
pub const PORT: &str = "trellis.guest";
/// The longest frame; a longer one is a bug of ours or a broken guest.
pub const FRAME_BYTES_MAX: u32 = 1 << 20;

/// From the host to the guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Run a program and say how it ended.
    Run(Order),
    /// Switch the machine off.
    PowerOff,
}

/// A program to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// The scenario's name.
    pub name: String,
    /// The program, by its path in the guest.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// What is added to its environment.
    pub environment: Vec<(String, String)>,
    /// Kernel modules that it needs beside those that are always there.
    pub modules: Vec<String>,
    /// When it is killed.
    pub limit: Duration,
}

/// From the guest to the host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The guest is up.
    Ready {
        /// Its kernel.
        kernel: String,
        /// How long it has been running, by its own clock.
        uptime: Duration,
    },
    /// The running scenario printed something.
    Said(String),
    /// The running scenario has ended, and the guest is clean again.
    Ended(Ended),
}

/// How a scenario ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ended {
    /// How its program ended.
    pub how: How,
    /// How long it ran.
    pub took: Duration,
    /// What it left behind: processes, mounts, loop devices. All of it has been cleaned away.
    pub left: Vec<String>,
    /// Whether the guest is fit for another scenario: all of it could be cleaned away.
    pub fit: bool,
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// By itself, with this code.
    Exited(i32),
    /// By a signal.
    Signalled(i32),
    /// By us, when its time was over.
    TimedOut,
    /// It was never started.
    NotStarted(String),
    /// With the guest: it died, or stopped answering.
    GuestDied,
}

impl std::fmt::Display for How {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            How::Exited(0) => write!(f, "ok"),
            How::Exited(code) => write!(f, "exit code {code}"),
            How::Signalled(signal) => write!(f, "killed by signal {signal}"),
            How::TimedOut => write!(f, "killed at its time limit"),
            How::NotStarted(why) => write!(f, "not started: {why}"),
            How::GuestDied => write!(f, "the guest died"),
        }
    }
}

/// Sends one message.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len())
        .ok()
        .filter(|length| *length <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::other("the message is too long"))?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(&text);
    to.write_all(&frame)?;
    to.flush()
}

/// Receives one message. The end of the stream between two messages is an error of the kind
/// `UnexpectedEof`, as one within a message is: neither side leaves without a word.
pub fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the message is too long",
        ));
    }
    let mut text = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    from.read_exact(&mut text)?;
    serde_json::from_slice(&text).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_message_arrives_as_it_was_sent() {
        // Fails if a frame's length or text is not what the other side reads.
        let mut wire = Vec::new();
        for text in ["", "täxt", "two\nlines"] {
            send(&mut wire, &Answer::Said(text.to_owned())).unwrap();
        }
        let mut from = wire.as_slice();
        for text in ["", "täxt", "two\nlines"] {
            let Answer::Said(found) = receive(&mut from).unwrap() else {
                panic!("another message")
            };
            assert_eq!(found, text);
        }
        assert!(from.is_empty());
    }

    #[test]
    fn a_broken_stream_is_an_error_and_allocates_nothing_large() {
        // Fails if a length that no sender of ours writes is believed, or a cut message is taken as whole.
        let huge = u32::MAX.to_le_bytes();
        let error = receive::<Answer>(&mut huge.as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let mut wire = Vec::new();
        send(&mut wire, &Request::PowerOff).unwrap();
        for cut in 0..wire.len() {
            let error = receive::<Request>(&mut &wire[..cut]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
