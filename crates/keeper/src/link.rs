//! A client's connection to the keeper.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::message::{Answer, Event, Request, receive, send};
use crate::trial;

/// How long the keeper may take for an answer. It does nothing that takes time.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a replacement may take: the trial of the program, and its start.
const REPLACEMENT_TIME_MAX: Duration = trial::TIME_MAX.saturating_mul(2);

/// A connection. Each side learns from its end that the other has gone.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
}

impl Link {
    /// Connects to the keeper that listens there.
    pub fn open(path: &Path) -> io::Result<Link> {
        let kind = SocketType::SEQPACKET;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIME_MAX))?;
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIME_MAX))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Link { socket })
    }

    /// Asks for something that needs and brings no descriptors.
    pub fn ask(&self, request: &Request) -> io::Result<Answer> {
        self.ask_with(request, &[]).map(|(answer, _)| answer)
    }

    /// Asks, with descriptors in both directions.
    pub fn ask_with(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<(Answer, Vec<OwnedFd>)> {
        send(&self.socket, request, descriptors)?;
        match receive(&self.socket)? {
            Some((Answer::Refused { message }, _)) => Err(io::Error::other(message)),
            Some(answer) => Ok(answer),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Makes the keeper become the program in this open file, which was found at `path`. Returns when it has.
    pub fn replace(&self, program: &File, path: &Path) -> io::Result<()> {
        let limit = Some(REPLACEMENT_TIME_MAX);
        sockopt::set_socket_timeout(&self.socket, Timeout::Recv, limit)?;
        let request = Request::Replace {
            program: path.to_owned(),
        };
        self.ask_with(&request, &[program.as_fd()]).map(drop)
    }

    /// Answers a call.
    pub fn say_here(&self) -> io::Result<()> {
        send(&self.socket, &Request::Here, &[])
    }

    /// Waits for the next event, without a limit; none when the keeper has gone.
    pub fn next(&self) -> io::Result<Option<Event>> {
        sockopt::set_socket_timeout(&self.socket, Timeout::Recv, None)?;
        match receive(&self.socket) {
            Ok(event) => Ok(event.map(|(event, _)| event)),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(error),
        }
    }
}
