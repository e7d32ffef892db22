//! A coordinator whose replicas are played by the test.
#![allow(dead_code, reason = "every test binary uses its own part of this")]

use std::collections::BTreeMap;

use trellis_engine::coordinator::{
    Coordinator, Effect, Event, IoId, IoOp, IoResult, Limits, Settings, Takeover,
};
use trellis_engine::proto::{
    Answer, Body, Config, Entry, EntryOp, Envelope, Epoch, Geometry, Key, Promise, RegionState,
    ReplicaId, Request, View, Welcome,
};
use uuid::Uuid;

pub(crate) const VOLUME: Uuid = Uuid::from_u128(1);

pub(crate) const PROMISE: Promise = Promise {
    generation: 5,
    owner: 7,
};

pub(crate) fn replica(number: u128) -> ReplicaId {
    Uuid::from_u128(100 + number)
}

pub(crate) struct Stage {
    pub(crate) coordinator: Coordinator,
    pub(crate) now: u64,
    view: View,
    answered: BTreeMap<ReplicaId, u64>,
    /// What was asked of each replica and not taken yet.
    pub(crate) asked: BTreeMap<ReplicaId, Vec<Request>>,
    pub(crate) replies: BTreeMap<IoId, IoResult>,
    pub(crate) others: Vec<Effect>,
}

impl Stage {
    pub(crate) fn new(count: u128) -> Stage {
        let view = View::first(Config::majority((0..count).map(replica).collect()));
        let settings = Settings {
            volume: VOLUME,
            geometry: Geometry::STANDARD,
            promise: PROMISE,
            view: view.clone(),
            takeover: Takeover::Quorum,
            limits: Limits::default(),
            #[cfg(feature = "flaws")]
            flaws: trellis_engine::coordinator::Flaws::default(),
        };
        Stage {
            coordinator: Coordinator::new(settings),
            now: 0,
            view,
            answered: BTreeMap::new(),
            asked: BTreeMap::new(),
            replies: BTreeMap::new(),
            others: Vec::new(),
        }
    }

    /// A volume of that size whose replicas all take part and are equal.
    pub(crate) fn serving(count: u128, size: u64) -> Stage {
        let mut stage = Stage::new(count);
        for number in 0..count {
            stage.greet(number, size);
        }
        for number in 0..count {
            stage.report(number, size);
        }
        for number in 0..count {
            let asked = stage.take(number);
            assert!(matches!(asked.last(), Some(Request::Join(_))), "{asked:?}");
            stage.answer(number, Answer::Joined);
        }
        assert!(stage.coordinator.is_serving());
        stage
    }

    pub(crate) fn greet(&mut self, number: u128, size: u64) {
        let session = u64::try_from(number).unwrap() + 1;
        let replica = replica(number);
        self.answered.insert(replica, 0);
        self.tell(Event::Opened { replica, session });
        assert_eq!(self.take(number), [Request::Hello]);
        self.answer(
            number,
            Answer::Welcome(Welcome {
                key: Key::FRESH,
                exact: false,
                size,
                size_version: 1,
                view: self.view.clone(),
                has_stale: false,
            }),
        );
    }

    /// Tells of all regions, none of which was ever written.
    pub(crate) fn report(&mut self, number: u128, size: u64) {
        let regions = Geometry::STANDARD.regions(size);
        let mut told = 0;
        while told < regions {
            let [Request::Regions { from }] = self.take(number)[..] else {
                panic!("regions were not asked for");
            };
            assert_eq!(from.index(), told);
            let state = RegionState {
                stamp: Epoch::NEVER,
                stale: None,
            };
            let states = vec![state; (regions - told).min(4096)];
            told += states.len();
            self.answer(number, Answer::Regions { from, states });
        }
    }

    pub(crate) fn tell(&mut self, event: Event) {
        let mut out = Vec::new();
        self.coordinator.apply(self.now, event, &mut out);
        self.keep(out);
    }

    fn keep(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send {
                    replica, envelope, ..
                } => {
                    let Body::Request(request) = envelope.body else {
                        panic!("a coordinator has answered")
                    };
                    self.asked.entry(replica).or_default().push(request);
                }
                Effect::Reply { id, result } => {
                    self.replies.insert(id, result);
                }
                other => self.others.push(other),
            }
        }
    }

    pub(crate) fn take(&mut self, number: u128) -> Vec<Request> {
        self.asked.remove(&replica(number)).unwrap_or_default()
    }

    /// The entries that were sent to a replica since they were last taken.
    pub(crate) fn entries(&mut self, number: u128) -> Vec<Entry> {
        let requests = self.take(number).into_iter();
        requests
            .filter_map(|request| match request {
                Request::Entry(entry) => Some(entry),
                _ => None,
            })
            .collect()
    }

    pub(crate) fn answer(&mut self, number: u128, answer: Answer) {
        self.answer_as(number, PROMISE, answer);
    }

    pub(crate) fn answer_as(&mut self, number: u128, promise: Promise, answer: Answer) {
        let replica = replica(number);
        let session = u64::try_from(number).unwrap() + 1;
        let index = self.answered.entry(replica).or_default();
        let envelope = Envelope {
            volume: VOLUME,
            replica,
            promise,
            size_version: 1,
            index: *index,
            body: Body::Answer(answer),
        };
        *index += 1;
        self.tell(Event::Received {
            replica,
            session,
            envelope,
        });
    }

    /// A replica has applied everything that was sent to it.
    pub(crate) fn apply_all(&mut self, number: u128) {
        if let Some(entry) = self.entries(number).last() {
            let seq = entry.key.seq;
            self.answer(number, Answer::Done { seq });
        }
    }

    pub(crate) fn io(&mut self, id: IoId, op: IoOp) {
        self.tell(Event::Io { id, op });
    }

    pub(crate) fn write(&mut self, id: IoId, block: u64) {
        let data = vec![bytes::Bytes::from(vec![1; 4096])];
        self.io(
            id,
            IoOp::Write {
                offset: block * 4096,
                data,
                fua: false,
            },
        );
    }

    pub(crate) fn wait(&mut self, ms: u64) {
        self.now += ms;
        self.tell(Event::Tick);
    }
}

pub(crate) fn is_flush(entry: &Entry) -> bool {
    matches!(entry.op, EntryOp::Flush)
}
