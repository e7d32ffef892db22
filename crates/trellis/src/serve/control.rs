//! The control sockets of targets and copies: the agent's questions and requests, each on a thread of its own.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How many connections are served at the same time: the agent has one that watches and one that asks.
const CONNECTIONS_MAX: usize = 16;
/// How long a connection may be silent. One that watches says nothing, and has no limit.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Listens, for this user alone: the directory admits nobody else. The socket has the name `deaf` until it listens.
pub fn listen(
    socket: &Path,
    deaf: &Path,
    converse: impl Fn(&UnixStream) -> io::Result<()> + Send + Sync + 'static,
) -> io::Result<()> {
    match std::fs::remove_file(deaf) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(deaf)?;
    std::fs::rename(deaf, socket)?;
    let converse = Arc::new(converse);
    let accept = move || {
        let served = Arc::new(());
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            if Arc::strong_count(&served) > CONNECTIONS_MAX {
                continue;
            }
            let (converse, one) = (converse.clone(), served.clone());
            let serve = move || {
                let _one = one;
                let conversed = stream
                    .set_read_timeout(Some(SILENCE_MAX))
                    .and_then(|()| converse(&stream));
                if let Err(error) = conversed {
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
