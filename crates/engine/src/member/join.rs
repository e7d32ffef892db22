//! How a replica begins with a coordinator: it makes its promise, reports what it has, and accepts the terms.

use super::lane::Work;
use super::{DiskOp, Effect, Member, SessionId, Waiting};
use crate::proto::{Answer, JoinTerms, Key, MetaChange, Past, Stale, Welcome};

impl Member {
    pub(super) fn start_promise(&mut self, hello: Waiting, out: &mut Vec<Effect>) {
        let change = MetaChange {
            promise: Some(hello.promise),
            ..MetaChange::default()
        };
        self.begin(DiskOp::Persist(Box::new(change)), Work::Promise(hello), out);
    }

    pub(super) fn welcome(&mut self, hello: Waiting, out: &mut Vec<Effect>) {
        // What the welcome says must outlive this process.
        self.speak(out);
        if self.hello.is_some() {
            // A later coordinator came while the promise was written.
            return;
        }
        self.bound = Some(super::Bound {
            session: hello.session,
            out_index: 0,
            in_index: 1,
            takes_part: false,
            queue: std::collections::VecDeque::new(),
            queue_bytes: 0,
            stale: Vec::new(),
            restamp: Vec::new(),
        });
        let welcome = Welcome {
            key: self.applied,
            exact: self.exact,
            size: self.meta.size,
            size_version: self.meta.size_version,
            view: self.meta.view.clone(),
            has_stale: !self.meta.stale.is_empty(),
        };
        self.answer(hello.session, Answer::Welcome(welcome), out);
        if self.is_low {
            let is_low = true;
            self.answer(hello.session, Answer::Space { is_low }, out);
        }
    }

    pub(super) fn start_join(
        &mut self,
        session: SessionId,
        terms: JoinTerms,
        out: &mut Vec<Effect>,
    ) {
        // A replica never shrinks. Where it is larger than the volume that it joins, its bytes are of a
        // history that does not count; the volume may grow to there, and must find zeros.
        let behind = self.meta.size.saturating_sub(terms.size);
        if terms.past != Past::Counts && behind > 0 {
            let zero = DiskOp::Zero {
                offset: terms.size,
                length: behind,
            };
            return self.begin(zero, Work::JoinZero { session, terms }, out);
        }
        let op = DiskOp::Sync { sums: false };
        self.begin(op, Work::JoinSync { session, terms }, out);
    }

    pub(super) fn join_size(
        &mut self,
        session: SessionId,
        terms: JoinTerms,
        out: &mut Vec<Effect>,
    ) {
        if terms.size <= self.meta.size {
            return self.join_record(session, terms, out);
        }
        let change = MetaChange {
            size: Some((terms.size, terms.size_version)),
            ..MetaChange::default()
        };
        let work = Work::JoinSize { session, terms };
        self.begin(DiskOp::Persist(Box::new(change)), work, out);
    }

    pub(super) fn join_record(
        &mut self,
        session: SessionId,
        terms: JoinTerms,
        out: &mut Vec<Effect>,
    ) {
        let Some(bound) = self.bound.as_mut().filter(|bound| bound.session == session) else {
            return;
        };
        let mut change = MetaChange {
            forget: terms.past != Past::Counts,
            durable: Some(terms.key),
            view: Some(terms.view),
            ..MetaChange::default()
        };
        for region in std::mem::take(&mut bound.restamp) {
            change.stale.push((region, None));
            change.stamps.push((region, terms.key.epoch));
        }
        // In a history that begins, it has not answered for anything yet, whatever it once forgot.
        let is_beginning = !self.meta.is_lost()
            && change
                .view
                .as_ref()
                .is_some_and(|view| view.lineage != self.meta.view.lineage);
        for region in std::mem::take(&mut bound.stale) {
            // Who has lost its memory may have answered for what it forgot, and stays without a word there until it is
            // repaired. Who comes from another history never took part in this one, like a new replica.
            let nothing = Stale {
                key: if self.meta.is_lost() && terms.past != Past::VoidBeforeBeginning {
                    Key::NOTHING
                } else {
                    Key::FRESH
                },
                mixed: true,
            };
            let as_far_as_we_are = Stale {
                key: self.applied,
                mixed: false,
            };
            // A region that was stale already is as far as it was then, not as far as we are now. A key of
            // another history says nothing in this one.
            let stale = match self.meta.region(region).stale {
                _ if terms.past != Past::Counts => nothing,
                Some(stale) if is_beginning => Stale {
                    key: stale.key.max(Key::FRESH),
                    ..stale
                },
                Some(stale) => stale,
                None => as_far_as_we_are,
            };
            change.stale.push((region, Some(stale)));
        }
        let work = Work::JoinRecord {
            session,
            key: terms.key,
        };
        self.begin(DiskOp::Persist(Box::new(change)), work, out);
    }
}
