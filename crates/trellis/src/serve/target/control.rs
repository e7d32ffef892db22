//! The control socket of a target: the agent's questions and requests.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use trellis_keeper::message::{receive, send};
use trellis_keeper::paths::ProcessPaths;

use super::Target;
use crate::serve::control;
use crate::serve::message::{Answer, Request};

/// Listens.
pub fn listen(target: Arc<Target>, paths: &ProcessPaths) -> std::io::Result<()> {
    let converse = move |stream: &UnixStream| converse(&target, stream);
    control::listen(&paths.socket, &paths.deaf_socket, converse)
}

/// Answers until the other side goes.
fn converse(target: &Arc<Target>, stream: &UnixStream) -> std::io::Result<()> {
    while let Some((request, _)) = receive::<Request>(stream)? {
        let answer = match request {
            Request::Status => Answer::Status(Box::new(target.status())),
            Request::Configure(settings) => target.configure(*settings),
            Request::Grow { to } => target.grow(to),
            Request::Watch => return tell_changes(target, stream),
            Request::Stop => {
                let answer = target.stop();
                let stopped = matches!(answer, Answer::Done);
                send(stream, &answer, &[])?;
                if stopped {
                    target.end();
                }
                continue;
            }
        };
        send(stream.as_fd(), &answer, &[])?;
    }
    Ok(())
}

/// Sends a byte whenever the status has changed, until the other side goes.
fn tell_changes(target: &Target, mut stream: &UnixStream) -> std::io::Result<()> {
    let mut changes = target.changes();
    loop {
        stream.write_all(b"\n")?;
        if target.wait(&mut changes).is_err() {
            return Ok(());
        }
    }
}
