//! The fields of every message. A tag never changes its meaning; a new message gets a new tag.

use bytes::{Bytes, BytesMut};

use super::cursor::{Cursor, Writer};
use super::{PAYLOAD_BYTES_MAX, reserved};
use crate::proto::{
    Answer, BLOCKS_PER_REGION_MAX, Body, Config, Content, Entry, EntryOp, Envelope, JoinTerms,
    Lineage, Past, Promise, REGIONS_PER_PAGE_MAX, REPLICAS_PER_VOLUME_MAX, ReadFault, RegionState,
    Request, Surveyed, View, Welcome,
};

/// Writes the fields behind `out` and returns the payload.
pub(super) fn encode(envelope: &Envelope, out: &mut BytesMut) -> Bytes {
    let mut to = Writer(out);
    to.uuid(envelope.volume);
    to.uuid(envelope.replica);
    to.u64(envelope.promise.generation);
    to.u64(envelope.promise.owner);
    to.u64(envelope.size_version);
    to.u64(envelope.index);
    match &envelope.body {
        Body::Request(request) => put_request(&mut to, request),
        Body::Answer(answer) => put_answer(&mut to, answer),
    }
}

/// Reads all fields, to the last byte.
pub(super) fn decode(fields: &[u8], payload: Bytes) -> Option<Envelope> {
    let mut from = Cursor(fields);
    let mut payload = Some(payload);
    let envelope = Envelope {
        volume: from.uuid()?,
        replica: from.uuid()?,
        promise: promise(&mut from)?,
        size_version: from.u64()?,
        index: from.u64()?,
        body: body(&mut from, &mut payload)?,
    };
    // A message without a payload leaves it, and then it must be empty.
    let used_up = payload.is_none_or(|rest| rest.is_empty());
    (from.0.is_empty() && used_up).then_some(envelope)
}

fn body(from: &mut Cursor<'_>, payload: &mut Option<Bytes>) -> Option<Body> {
    let tag = from.u8()?;
    if tag < 64 {
        request(tag, from, payload).map(Body::Request)
    } else {
        answer(tag, from, payload).map(Body::Answer)
    }
}

fn put_request(to: &mut Writer<'_>, request: &Request) -> Bytes {
    match request {
        Request::Hello => to.u8(0),
        Request::Regions { from } => {
            to.u8(1);
            to.u32(from.0);
        }
        Request::Stale { regions } => {
            to.u8(2);
            to.list(regions, |to, region| to.u32(region.0));
        }
        Request::Restamp { regions } => {
            to.u8(3);
            to.list(regions, |to, region| to.u32(region.0));
        }
        Request::Join(terms) => {
            to.u8(4);
            to.key(terms.key);
            to.u64(terms.size);
            to.u64(terms.size_version);
            put_view(to, &terms.view);
            reserved::put(to);
            // Said only where it is so: older replicas do not know it.
            match terms.past {
                Past::Counts => {}
                Past::Void => to.u8(1),
                Past::VoidBeforeBeginning => to.u8(2),
            }
        }
        Request::Resume => to.u8(5),
        Request::Entry(entry) => {
            to.u8(6);
            to.key(entry.key);
            return put_op(to, &entry.op);
        }
        Request::Read {
            tag,
            offset,
            length,
        } => {
            to.u8(7);
            to.u64(*tag);
            to.u64(*offset);
            to.u64(*length);
        }
        Request::RepairBegin { region } => {
            to.u8(8);
            to.u32(region.0);
        }
        Request::RepairData {
            region,
            stamp,
            content,
        } => {
            to.u8(9);
            to.u32(region.0);
            to.u64(stamp.get());
            return put_content(to, content);
        }
        Request::RepairDrop { region } => {
            to.u8(10);
            to.u32(region.0);
        }
        Request::Survey => to.u8(11),
        Request::RepairPart {
            region,
            stamp,
            content,
            except,
        } => {
            to.u8(12);
            to.u32(region.0);
            to.u64(stamp.get());
            to.list(except, |to, block| to.u32(*block));
            return put_content(to, content);
        }
        Request::Salvage {
            tag,
            offset,
            length,
        } => {
            to.u8(13);
            to.u64(*tag);
            to.u64(*offset);
            to.u64(*length);
        }
        Request::Verify {
            tag,
            offset,
            length,
        } => {
            to.u8(14);
            to.u64(*tag);
            to.u64(*offset);
            to.u64(*length);
        }
        Request::Allocate {
            tag,
            offset,
            length,
        } => {
            to.u8(15);
            to.u64(*tag);
            to.u64(*offset);
            to.u64(*length);
        }
        Request::Call => to.u8(16),
    }
    Bytes::new()
}

fn request(tag: u8, from: &mut Cursor<'_>, payload: &mut Option<Bytes>) -> Option<Request> {
    Some(match tag {
        0 => Request::Hello,
        1 => Request::Regions {
            from: from.region()?,
        },
        2 => Request::Stale {
            regions: from.list(REGIONS_PER_PAGE_MAX, Cursor::region)?,
        },
        3 => Request::Restamp {
            regions: from.list(REGIONS_PER_PAGE_MAX, Cursor::region)?,
        },
        4 => Request::Join(JoinTerms {
            key: from.key()?,
            size: from.u64()?,
            size_version: from.u64()?,
            view: view(from)?,
            past: {
                reserved::skip(from)?;
                match from.0.is_empty() {
                    true => Past::Counts,
                    false => match from.u8()? {
                        1 => Past::Void,
                        2 => Past::VoidBeforeBeginning,
                        _ => return None,
                    },
                }
            },
        }),
        5 => Request::Resume,
        6 => Request::Entry(Entry {
            key: from.key()?,
            op: op(from, payload)?,
        }),
        7 => Request::Read {
            tag: from.u64()?,
            offset: from.u64()?,
            length: from.u64()?,
        },
        8 => Request::RepairBegin {
            region: from.region()?,
        },
        9 => Request::RepairData {
            region: from.region()?,
            stamp: from.epoch()?,
            content: content(from, payload)?,
        },
        10 => Request::RepairDrop {
            region: from.region()?,
        },
        11 => Request::Survey,
        12 => Request::RepairPart {
            region: from.region()?,
            stamp: from.epoch()?,
            except: from.list(BLOCKS_PER_REGION_MAX, Cursor::u32)?,
            content: content(from, payload)?,
        },
        13 => Request::Salvage {
            tag: from.u64()?,
            offset: from.u64()?,
            length: from.u64()?,
        },
        14 => Request::Verify {
            tag: from.u64()?,
            offset: from.u64()?,
            length: from.u64()?,
        },
        15 => Request::Allocate {
            tag: from.u64()?,
            offset: from.u64()?,
            length: from.u64()?,
        },
        16 => Request::Call,
        _ => return None,
    })
}

fn put_op(to: &mut Writer<'_>, op: &EntryOp) -> Bytes {
    match op {
        EntryOp::Skip { region } => {
            to.u8(0);
            to.u32(region.0);
        }
        EntryOp::Write { offset, data } => {
            to.u8(1);
            to.u64(*offset);
            return data.clone();
        }
        EntryOp::Zero { offset, length } => {
            to.u8(2);
            to.u64(*offset);
            to.u64(*length);
        }
        EntryOp::Flush => to.u8(3),
        EntryOp::Reserve { size } => {
            to.u8(4);
            to.u64(*size);
        }
        EntryOp::Raise { size, version } => {
            to.u8(5);
            to.u64(*size);
            to.u64(*version);
        }
        EntryOp::View(view) => {
            to.u8(7);
            put_view(to, view);
        }
    }
    Bytes::new()
}

fn op(from: &mut Cursor<'_>, payload: &mut Option<Bytes>) -> Option<EntryOp> {
    Some(match from.u8()? {
        0 => EntryOp::Skip {
            region: from.region()?,
        },
        1 => EntryOp::Write {
            offset: from.u64()?,
            data: payload.take()?,
        },
        2 => EntryOp::Zero {
            offset: from.u64()?,
            length: from.u64()?,
        },
        3 => EntryOp::Flush,
        4 => EntryOp::Reserve { size: from.u64()? },
        5 => EntryOp::Raise {
            size: from.u64()?,
            version: from.u64()?,
        },
        // 6 belonged to the records of `reserved`, and stays without a meaning.
        7 => EntryOp::View(view(from)?),
        _ => return None,
    })
}

fn put_answer(to: &mut Writer<'_>, answer: &Answer) -> Bytes {
    match answer {
        Answer::Welcome(welcome) => {
            to.u8(64);
            to.key(welcome.key);
            to.flag(welcome.exact);
            to.u64(welcome.size);
            to.u64(welcome.size_version);
            put_view(to, &welcome.view);
            reserved::put(to);
            // Said only where it is so: older coordinators do not know it.
            if welcome.has_stale {
                to.flag(true);
            }
        }
        Answer::Refused { promise } => {
            to.u8(65);
            to.u64(promise.generation);
            to.u64(promise.owner);
        }
        Answer::Regions { from, states } => {
            to.u8(66);
            to.u32(from.0);
            to.list(states, put_state);
        }
        Answer::Joined => to.u8(67),
        Answer::JoinNoSpace => to.u8(68),
        Answer::Done { seq } => {
            to.u8(69);
            to.u64(*seq);
        }
        Answer::Flushed { seq } => {
            to.u8(70);
            to.u64(*seq);
        }
        Answer::Reserved { size, granted } => {
            to.u8(71);
            to.u64(*size);
            to.flag(*granted);
        }
        Answer::Read { tag, result } => {
            to.u8(72);
            to.u64(*tag);
            match result {
                Ok(content) => {
                    to.u8(0);
                    return put_content(to, content);
                }
                Err(ReadFault::Medium) => to.u8(1),
                Err(ReadFault::Stale) => to.u8(2),
            }
        }
        Answer::RepairDone { region } => {
            to.u8(73);
            to.u32(region.0);
        }
        Answer::Full => to.u8(74),
        Answer::Salvaged { tag, content, bad } => {
            to.u8(77);
            to.u64(*tag);
            to.list(bad, |to, block| to.u32(*block));
            return put_content(to, content);
        }
        Answer::Verified { tag, digest, bad } => {
            to.u8(78);
            to.u64(*tag);
            to.u32(*digest);
            to.list(bad, |to, block| to.u32(*block));
        }
        Answer::Space { is_low } => {
            to.u8(75);
            to.flag(*is_low);
        }
        Answer::Surveyed(surveyed) => {
            to.u8(76);
            put_surveyed(to, surveyed);
        }
        Answer::Behind { region } => {
            to.u8(79);
            to.u32(region.0);
        }
        Answer::Allocated { tag, granted } => {
            to.u8(80);
            to.u64(*tag);
            to.flag(*granted);
        }
        Answer::Heard => to.u8(81),
    }
    Bytes::new()
}

fn answer(tag: u8, from: &mut Cursor<'_>, payload: &mut Option<Bytes>) -> Option<Answer> {
    Some(match tag {
        64 => Answer::Welcome(Welcome {
            key: from.key()?,
            exact: from.flag()?,
            size: from.u64()?,
            size_version: from.u64()?,
            view: view(from)?,
            has_stale: {
                reserved::skip(from)?;
                !from.0.is_empty() && from.flag()?
            },
        }),
        65 => Answer::Refused {
            promise: promise(from)?,
        },
        66 => Answer::Regions {
            from: from.region()?,
            states: from.list(REGIONS_PER_PAGE_MAX, state)?,
        },
        67 => Answer::Joined,
        68 => Answer::JoinNoSpace,
        69 => Answer::Done { seq: from.u64()? },
        70 => Answer::Flushed { seq: from.u64()? },
        71 => Answer::Reserved {
            size: from.u64()?,
            granted: from.flag()?,
        },
        72 => Answer::Read {
            tag: from.u64()?,
            result: match from.u8()? {
                0 => Ok(content(from, payload)?),
                1 => Err(ReadFault::Medium),
                2 => Err(ReadFault::Stale),
                _ => return None,
            },
        },
        73 => Answer::RepairDone {
            region: from.region()?,
        },
        74 => Answer::Full,
        75 => Answer::Space {
            is_low: from.flag()?,
        },
        76 => Answer::Surveyed(Box::new(surveyed(from)?)),
        77 => Answer::Salvaged {
            tag: from.u64()?,
            bad: from.list(BLOCKS_PER_REGION_MAX, Cursor::u32)?,
            content: content(from, payload)?,
        },
        78 => Answer::Verified {
            tag: from.u64()?,
            digest: from.u32()?,
            bad: from.list(BLOCKS_PER_REGION_MAX, Cursor::u32)?,
        },
        79 => Answer::Behind {
            region: from.region()?,
        },
        80 => Answer::Allocated {
            tag: from.u64()?,
            granted: from.flag()?,
        },
        81 => Answer::Heard,
        _ => return None,
    })
}

fn put_surveyed(to: &mut Writer<'_>, surveyed: &Surveyed) {
    to.u64(surveyed.promise.generation);
    to.u64(surveyed.promise.owner);
    to.key(surveyed.key);
    to.flag(surveyed.exact);
    to.u64(surveyed.size);
    to.u64(surveyed.size_version);
    put_view(to, &surveyed.view);
    to.u64(surveyed.regions);
    to.u64(surveyed.stale);
    to.u64(surveyed.mixed);
    to.flag(surveyed.written_at.is_some());
    to.u64(surveyed.written_at.unwrap_or(0));
}

fn surveyed(from: &mut Cursor<'_>) -> Option<Surveyed> {
    Some(Surveyed {
        promise: promise(from)?,
        key: from.key()?,
        exact: from.flag()?,
        size: from.u64()?,
        size_version: from.u64()?,
        view: view(from)?,
        regions: from.u64()?,
        stale: from.u64()?,
        mixed: from.u64()?,
        written_at: {
            let known = from.flag()?;
            let at = from.u64()?;
            known.then_some(at)
        },
    })
}

pub(super) fn promise(from: &mut Cursor<'_>) -> Option<Promise> {
    Some(Promise {
        generation: from.u64()?,
        owner: from.u64()?,
    })
}

fn put_state(to: &mut Writer<'_>, state: &RegionState) {
    to.u64(state.stamp.get());
    to.stale(state.stale);
}

fn state(from: &mut Cursor<'_>) -> Option<RegionState> {
    Some(RegionState {
        stamp: from.epoch()?,
        stale: from.stale()?,
    })
}

fn put_config(to: &mut Writer<'_>, config: &Config) {
    // A sound consistency factor is at most 5. What is not sound is refused by whoever reads it.
    to.u8(u8::try_from(config.consistency).unwrap_or(u8::MAX));
    let members: Vec<_> = config.members.iter().copied().collect();
    to.list(&members, |to, id| to.uuid(*id));
}

fn config(from: &mut Cursor<'_>) -> Option<Config> {
    let consistency = usize::from(from.u8()?);
    let members = from.list(REPLICAS_PER_VOLUME_MAX, Cursor::uuid)?;
    let config = Config {
        members: members.into_iter().collect(),
        consistency,
    };
    config.is_sound().then_some(config)
}

/// What stands behind the configuration of a view. The first two are all that older versions know, so that
/// they understand every view but those of a volume that was recovered.
mod tail {
    pub(super) const NEXT: u8 = 1;
    pub(super) const RECOVERED: u8 = 2;
    pub(super) const UNKNOWN: u8 = 4;
    pub(super) const ALL: u8 = NEXT | RECOVERED | UNKNOWN;
}

pub(super) fn put_view(to: &mut Writer<'_>, view: &View) {
    to.u64(view.version);
    put_config(to, &view.current);
    let next = if view.next.is_some() { tail::NEXT } else { 0 };
    to.u8(next
        | match view.lineage {
            Lineage::Original => 0,
            Lineage::Recovered { .. } => tail::RECOVERED,
            Lineage::Unknown => tail::UNKNOWN,
        });
    if let Some(next) = &view.next {
        put_config(to, next);
    }
    if let Lineage::Recovered { number, id } = view.lineage {
        to.u32(number);
        to.u64(id);
    }
}

pub(super) fn view(from: &mut Cursor<'_>) -> Option<View> {
    let version = from.u64()?;
    let current = config(from)?;
    let follows = from.u8()?;
    let has = |bit: u8| follows & bit != 0;
    if follows & !tail::ALL != 0 || has(tail::RECOVERED) && has(tail::UNKNOWN) {
        return None;
    }
    let next = if has(tail::NEXT) {
        Some(config(from)?)
    } else {
        None
    };
    let lineage = if has(tail::RECOVERED) {
        Lineage::Recovered {
            number: from.u32()?,
            id: from.u64()?,
        }
    } else if has(tail::UNKNOWN) {
        Lineage::Unknown
    } else {
        Lineage::Original
    };
    let view = View {
        lineage,
        version,
        current,
        next,
    };
    view.is_sound().then_some(view)
}

fn put_content(to: &mut Writer<'_>, content: &Content) -> Bytes {
    match content {
        Content::Data(data) => {
            to.u8(0);
            data.clone()
        }
        Content::Zeros(length) => {
            to.u8(1);
            to.u64(*length);
            Bytes::new()
        }
    }
}

fn content(from: &mut Cursor<'_>, payload: &mut Option<Bytes>) -> Option<Content> {
    match from.u8()? {
        0 => payload.take().map(Content::Data),
        1 => {
            // Whoever asked may make them real, so they are as bounded as bytes are.
            let length = from.u64()?;
            let bounded = usize::try_from(length).is_ok_and(|length| length <= PAYLOAD_BYTES_MAX);
            bounded.then_some(Content::Zeros(length))
        }
        _ => None,
    }
}
