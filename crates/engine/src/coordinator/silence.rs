//! Replicas that say nothing.
//!
//! A replica that is asked nothing says nothing. Without more, a frozen one would look well until the next write. So the
//! coordinator calls a replica that has said nothing for a while. One that does not answer is reported as silent, and is
//! then given up like any other that owes an answer.

use super::peer::{Session, Stage};
use super::{Coordinator, Effect, SessionId};
use crate::proto::{ReplicaId, Request};

impl Coordinator {
    /// The replica knows calls, and answers them.
    pub(super) fn takes_calls(&mut self, replica: ReplicaId, session: SessionId) {
        let ours = self.session_mut(replica);
        if let Some(ours) = ours.filter(|ours| ours.id == session) {
            ours.takes_calls = true;
        }
    }

    /// It is away, and not silent.
    pub(super) fn unreachable(&mut self, replica: ReplicaId) {
        if let Some(peer) = self.peers.get_mut(&replica) {
            peer.is_silent = false;
        }
    }

    /// Something was heard of a replica, on its present connection.
    pub(super) fn heard_of(&mut self, replica: ReplicaId) {
        let now = self.now;
        if let Some(peer) = self.peers.get_mut(&replica) {
            peer.heard_at = Some(now);
            peer.is_silent = false;
            if let Some(session) = &mut peer.session {
                session.heard_at = now;
            }
        }
    }

    /// A call was answered.
    pub(super) fn call_answered(&mut self, replica: ReplicaId) {
        if let Some(session) = self.session_mut(replica) {
            session.called_at = None;
        }
    }

    /// Calls whoever has said nothing for a while, and notes who does not answer.
    pub(super) fn mind_silence(&mut self, out: &mut Vec<Effect>) {
        let (now, limits) = (self.now, self.settings.limits);
        let since = |at: u64| now.saturating_sub(at);
        let mut quiet = Vec::new();
        for (replica, peer) in &mut self.peers {
            let Some(session) = &mut peer.session else {
                continue;
            };
            let has_waited = owes_since(session).is_some_and(|at| since(at) >= limits.call_ms);
            if since(session.heard_at) >= limits.silent_ms && has_waited {
                peer.is_silent = true;
            }
            let is_asked_nothing = matches!(
                session.stage,
                Stage::Reported(_) | Stage::Outside | Stage::Active
            );
            let is_due = since(session.heard_at) >= limits.call_ms && session.called_at.is_none();
            if session.takes_calls && is_asked_nothing && is_due {
                session.called_at = Some(now);
                quiet.push(*replica);
            }
        }
        for replica in quiet {
            self.send(replica, Request::Call, out);
        }
    }
}

/// Since when a replica owes an answer, if it does.
fn owes_since(session: &Session) -> Option<u64> {
    let greeted = match session.stage {
        Stage::Greeting | Stage::Reporting(_) | Stage::Joining => Some(session.since),
        Stage::Reported(_) | Stage::Outside | Stage::Active => None,
    };
    let sent = session.sent.front().map(|sent| sent.at);
    greeted
        .into_iter()
        .chain(session.called_at)
        .chain(sent)
        .min()
}
