//! The links of a copy to other nodes: told by the agent, kept in a file for the next start, changed while the copy is
//! served.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use trellis_api::{Hold, HoldReason, NodeName};
use trellis_engine::drive::{Address, Credentials, Refused, ReplicaLinks, Side};
use trellis_keeper::message::{receive, send};
use trellis_keeper::paths::ProcessPaths;

use crate::serve::control;
use crate::serve::message::{CopyAnswer, CopyRequest, CopySettings, CopyStatus};

/// How often to look whether somebody was refused, while there is a link.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A refusal that is older is no news.
const NEWS_TIME_MAX: Duration = Duration::from_secs(60);

/// The links of the copy that this process serves.
pub struct Links {
    links: ReplicaLinks,
    paths: ProcessPaths,
    now: Mutex<Now>,
}

/// What holds at present.
#[derive(Default)]
struct Now {
    settings: CopySettings,
    address: Option<Address>,
    /// Why nobody can be listened to.
    fault: Option<String>,
}

impl Links {
    /// Links as the agent last told them, and a socket where it can tell others.
    pub fn start(links: ReplicaLinks, paths: ProcessPaths) -> io::Result<()> {
        let told = std::fs::read(&paths.settings).ok();
        let told = told.and_then(|text| serde_json::from_slice(&text).ok());
        let links = Arc::new(Links {
            links,
            now: Mutex::default(),
            paths: paths.clone(),
        });
        links.configure(told.unwrap_or_default());
        let answering = links.clone();
        let converse = move |stream: &UnixStream| answering.converse(stream);
        control::listen(&paths.control, &paths.deaf_control, converse)
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers until the other side goes.
    fn converse(&self, stream: &UnixStream) -> io::Result<()> {
        while let Some((request, _)) = receive::<CopyRequest>(stream)? {
            match request {
                CopyRequest::Configure(settings) => self.configure(settings),
                CopyRequest::Watch => return self.tell_changes(stream),
            }
            send(stream, &CopyAnswer::Status(self.status()), &[])?;
        }
        Ok(())
    }

    /// Sends a byte whenever the status has changed, until the other side goes.
    fn tell_changes(&self, mut stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(LOOK_EVERY))?;
        let mut told = None;
        loop {
            let now = self.status();
            if told.as_ref() != Some(&now) {
                stream.write_all(b"\n")?;
                told = Some(now);
            }
            // Nothing more is said here. This waits a moment, and notices that the other side has gone.
            match stream.read(&mut [0]) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes new settings. Who may connect changes at once; the socket changes only if its address does.
    fn configure(&self, settings: CopySettings) {
        let mut now = self.now();
        let names = settings.allowed.iter().filter_map(|node| node.parse().ok());
        self.links.allow(names.collect::<BTreeSet<NodeName>>());
        let is_open = settings.link.is_none() || now.address.is_some();
        if now.settings.link != settings.link || !is_open {
            let opened = self.open(&settings);
            now.fault = opened.as_ref().err().cloned();
            now.address = opened.ok().flatten();
        }
        now.settings = settings;
    }

    /// Listens where it is said, at the port of the last time if that is free.
    fn open(&self, settings: &CopySettings) -> Result<Option<Address>, String> {
        let Some(link) = &settings.link else {
            self.links.close();
            let _ = std::fs::remove_file(&self.paths.link);
            return Ok(None);
        };
        let node: NodeName = link.node.parse().map_err(|error| format!("{error}"))?;
        let credentials = Credentials::expect(&link.credentials, node.clone());
        let known = trellis_files::read_whole(&self.paths.link, |_| true);
        let last = match known.ok().flatten().and_then(|text| text.parse().ok()) {
            Some(Address::Tls { at, .. }) if at.ip() == link.ip => Some(at),
            _ => None,
        };
        let listen = |at: SocketAddr| {
            let node = node.clone();
            self.links.open(&Address::Tls { node, at }, &credentials)
        };
        let any = SocketAddr::from((link.ip, 0));
        let opened = last.map(listen).and_then(Result::ok);
        let address = match opened {
            Some(address) => address,
            None => listen(any).map_err(|error| super::whole(&error))?,
        };
        if let Err(error) = trellis_files::ensure(&self.paths.link, address.to_string().as_bytes())
        {
            // Then the next start may take another port.
            tracing::warn!("{} cannot be written: {error}", self.paths.link.display());
        }
        Ok(Some(address))
    }

    fn status(&self) -> CopyStatus {
        let now = self.now();
        let missing = now
            .fault
            .as_ref()
            .map(|fault| Hold::new(HoldReason::LinkMissing, format!("{fault}.")));
        CopyStatus {
            link: now.address.as_ref().map(Address::to_string),
            hold: missing.or_else(|| refused(&self.links.refusals(), SystemTime::now())),
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    use io::ErrorKind::{TimedOut, WouldBlock};
    matches!(error.kind(), TimedOut | WouldBlock)
}

/// The latest refusal that is news.
fn refused(list: &[Refused], now: SystemTime) -> Option<Hold> {
    let is_news = |each: &&Refused| {
        let age = now.duration_since(each.at).unwrap_or_default();
        age < NEWS_TIME_MAX
    };
    let latest = list.iter().rev().find(is_news)?;
    let from = latest
        .from
        .map_or("this machine".to_owned(), |ip| ip.to_string());
    let why = &latest.why;
    let message = match latest.by {
        Side::Here => format!("A connection from {from} was refused: {why}."),
        Side::There => format!("{from} refused the connection: {why}."),
    };
    Some(Hold::new(HoldReason::LinkRefused, message))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use trellis_engine::drive::Refusal;

    // Fails if an old refusal hides that all is well now, or the latest is not the one that is shown.
    #[test]
    fn the_latest_refusal_is_told_for_a_while() {
        let now = SystemTime::now();
        let one = |by: Side, why: Refusal, ago: u64| Refused {
            from: Some([10, 0, 0, 7].into()),
            by,
            why,
            at: now - Duration::from_secs(ago),
            times: 3,
        };
        let list = [
            one(Side::Here, Refusal::Expired, 5),
            one(Side::There, Refusal::OtherHome, 1),
        ];
        let hold = refused(&list, now).unwrap();
        assert_eq!(hold.reason, HoldReason::LinkRefused);
        assert!(
            hold.message
                .starts_with("10.0.0.7 refused the connection: ")
        );
        let hold = refused(&list[..1], now).unwrap();
        assert!(
            hold.message
                .contains("was refused: the certificate has expired")
        );
        assert_eq!(refused(&list, now + NEWS_TIME_MAX * 2), None);
        assert_eq!(refused(&[], now), None);
    }
}
