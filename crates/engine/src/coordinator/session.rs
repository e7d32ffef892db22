//! Connections to the replicas: the requests sent and the answers received.

use super::peer::Session;
use super::{Coordinator, Effect, SessionId};
use crate::proto::{Answer, Body, Envelope, ReplicaId, Request};

impl Coordinator {
    pub(super) fn opened(&mut self, replica: ReplicaId, session: SessionId, out: &mut Vec<Effect>) {
        self.drop_session(replica, out);
        let peer = self.peers.entry(replica).or_default();
        peer.session = Some(Session::new(session, self.now));
        self.send(replica, Request::Hello, out);
    }

    pub(super) fn closed(&mut self, replica: ReplicaId, session: SessionId) {
        let ours = self
            .peers
            .get(&replica)
            .and_then(|peer| peer.session.as_ref())
            .is_some_and(|ours| ours.id == session);
        if ours {
            // It hung up, or is gone: it is away now, and not silent.
            self.unreachable(replica);
            self.forget_session(replica);
        }
    }

    /// Closes a replica's session, if it has one.
    pub(super) fn drop_session(&mut self, replica: ReplicaId, out: &mut Vec<Effect>) {
        let session = self
            .peers
            .get(&replica)
            .and_then(|peer| peer.session.as_ref())
            .map(|session| session.id);
        if let Some(session) = session {
            out.push(Effect::Close { replica, session });
            self.forget_session(replica);
        }
    }

    /// What was asked of a replica that is gone is asked of another one.
    fn forget_session(&mut self, replica: ReplicaId) {
        if let Some(peer) = self.peers.get_mut(&replica) {
            peer.session = None;
            peer.repairs.clear();
        }
        self.reads_from_gone(replica);
        self.repair_reads_from_gone(replica);
        self.scrub_without(replica);
        self.questions_to_gone(replica);
    }

    pub(super) fn send(&mut self, replica: ReplicaId, request: Request, out: &mut Vec<Effect>) {
        let Some(session) = self
            .peers
            .get_mut(&replica)
            .and_then(|peer| peer.session.as_mut())
        else {
            return;
        };
        let index = session.out_index;
        session.out_index += 1;
        let envelope = Envelope {
            volume: self.settings.volume,
            replica,
            promise: self.settings.promise,
            size_version: self.size_version,
            index,
            body: Body::Request(request),
        };
        out.push(Effect::Send {
            replica,
            session: session.id,
            envelope,
        });
    }

    pub(super) fn received(
        &mut self,
        replica: ReplicaId,
        session: SessionId,
        envelope: Envelope,
        out: &mut Vec<Effect>,
    ) {
        let Some(ours) = self
            .peers
            .get_mut(&replica)
            .and_then(|peer| peer.session.as_mut())
            .filter(|ours| ours.id == session)
        else {
            return;
        };
        let Body::Answer(answer) = envelope.body else {
            return self.drop_session(replica, out);
        };
        if envelope.volume != self.settings.volume || envelope.replica != replica {
            return self.drop_session(replica, out);
        }
        if let Answer::Refused { promise } = answer {
            // A replica also refuses an earlier session of ours, with our own promise. One of another
            // coordinator of the same generation is as final as a later one: it will not be taken back.
            let ours = self.settings.promise;
            if promise != ours && promise.generation >= ours.generation {
                return self.end(Effect::Deposed { by: promise }, out);
            }
            return self.drop_session(replica, out);
        }
        if envelope.promise != self.settings.promise {
            return self.drop_session(replica, out);
        }
        if envelope.index < ours.in_index {
            return;
        }
        if envelope.index > ours.in_index {
            return self.drop_session(replica, out);
        }
        ours.in_index += 1;
        self.heard_of(replica);
        self.answered(replica, answer, out);
    }

    fn answered(&mut self, replica: ReplicaId, answer: Answer, out: &mut Vec<Effect>) {
        match answer {
            Answer::Welcome(welcome) => self.welcomed(replica, welcome, out),
            Answer::Refused { .. } => {}
            // Nobody asked for it here.
            Answer::Surveyed(_) => self.drop_session(replica, out),
            Answer::Regions { from, states } => self.reported(replica, from, states, out),
            Answer::Joined => self.joined(replica),
            Answer::JoinNoSpace | Answer::Full => {
                if let Some(peer) = self.peers.get_mut(&replica) {
                    peer.full_at = Some(self.now);
                }
                self.drop_session(replica, out);
            }
            Answer::Behind { region } => self.behind(replica, region),
            Answer::Allocated { tag, granted } => self.allocated(replica, tag, granted),
            Answer::Space { is_low } => {
                if let Some(session) = self.session_mut(replica) {
                    session.is_low = is_low;
                }
            }
            Answer::Done { seq } => self.done(replica, seq),
            Answer::Flushed { seq } => self.flushed(replica, seq),
            Answer::Reserved { size, granted } => self.reserved(replica, size, granted),
            Answer::Read { tag, result } => self.read_answered(replica, tag, result, out),
            Answer::Salvaged { tag, content, bad } => {
                self.salvaged(replica, tag, content, &bad, out);
            }
            Answer::Verified { tag, digest, bad } => self.verified(replica, tag, digest, &bad),
            Answer::RepairDone { region } => self.repaired(replica, region),
            Answer::Heard => self.call_answered(replica),
        }
    }

    /// A replica that does not belong to the volume any more is not waited for.
    pub(super) fn forget(&mut self, replica: ReplicaId, out: &mut Vec<Effect>) {
        self.drop_session(replica, out);
        if !self.view.contains(replica) {
            self.peers.remove(&replica);
        }
    }
}
