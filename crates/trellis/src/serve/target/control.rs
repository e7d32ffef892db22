//! The control socket of a target: the agent's questions and requests.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use trellis_keeper::message::{receive, send};
use trellis_keeper::paths::ProcessPaths;

use super::Target;
use crate::serve::message::{Answer, Request};

/// How many connections are served at the same time: the agent has one that watches and one that asks.
const CONNECTIONS_MAX: usize = 16;
/// How long a connection may be silent. One that watches says nothing, and has no limit.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Listens, for this user alone: the directory admits nobody else.
pub fn listen(target: Arc<Target>, paths: &ProcessPaths) -> std::io::Result<()> {
    match std::fs::remove_file(&paths.deaf_socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&paths.deaf_socket)?;
    std::fs::rename(&paths.deaf_socket, &paths.socket)?;
    let accept = move || {
        let served = Arc::new(());
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            if Arc::strong_count(&served) > CONNECTIONS_MAX {
                continue;
            }
            let (target, one) = (target.clone(), served.clone());
            let serve = move || {
                let _one = one;
                if let Err(error) = converse(&target, &stream) {
                    tracing::debug!(%error, "a conversation with the agent ended");
                }
            };
            let thread = std::thread::Builder::new().name("control".to_owned());
            if let Err(error) = thread.spawn(serve) {
                tracing::warn!(%error, "no thread for a conversation with the agent");
            }
        }
    };
    std::thread::Builder::new()
        .name("control-accept".to_owned())
        .spawn(accept)?;
    Ok(())
}

/// Answers until the other side goes.
fn converse(target: &Arc<Target>, stream: &UnixStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(SILENCE_MAX))?;
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
