//! The bytes of messages: what goes out comes back, and what a stranger sends does no harm.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;
use trellis_engine::proto::{
    Answer, Body, Config, Content, Entry, EntryOp, Envelope, Epoch, JoinTerms, Key, Lineage, Past,
    Promise, ReadFault, Region, RegionState, Request, Stale, Surveyed, View, Welcome,
};
use trellis_engine::wire::{
    Arrival, DataFile, FIELDS_BYTES_MAX, HEADER_BYTES, Lend, Objection, PAYLOAD_BYTES_MAX, Payload,
    Sum, VERSION, WireError, body_length, decode, decode_any, encode, encode_borrows,
    encode_data_file, encode_into, encode_lend, encode_objects, is_unsummed,
};
use uuid::Uuid;

const PASTS: &[Past] = &[Past::Counts, Past::Void, Past::VoidBeforeBeginning];

/// Reads a message as a driver does: the header first, then as much as it says.
fn read(bytes: &[u8]) -> Result<Envelope, WireError> {
    let header: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(WireError::Length)?;
    let length = body_length(header)?;
    assert!(length <= FIELDS_BYTES_MAX + PAYLOAD_BYTES_MAX);
    decode(header, &Bytes::copy_from_slice(&bytes[HEADER_BYTES..]))
}

fn bytes_of(envelope: &Envelope) -> Vec<u8> {
    let frame = encode(envelope).unwrap();
    [frame.head, frame.payload].concat()
}

fn keys() -> impl Strategy<Value = Key> {
    (any::<u64>(), any::<u64>()).prop_map(|(epoch, seq)| Key {
        epoch: Epoch::from_raw(epoch),
        seq,
    })
}

fn regions() -> impl Strategy<Value = Region> {
    any::<u32>().prop_map(Region)
}

fn uuids() -> impl Strategy<Value = Uuid> {
    any::<u128>().prop_map(Uuid::from_u128)
}

fn configs() -> impl Strategy<Value = Config> {
    (prop::collection::btree_set(uuids(), 1..=5), any::<usize>()).prop_map(|(members, any)| {
        let consistency = 1 + any % members.len();
        Config {
            members,
            consistency,
        }
    })
}

fn lineages() -> impl Strategy<Value = Lineage> {
    prop_oneof![
        Just(Lineage::Original),
        Just(Lineage::Unknown),
        (1..=Lineage::NUMBER_MAX, any::<u64>())
            .prop_map(|(number, id)| Lineage::Recovered { number, id }),
    ]
}

fn views() -> impl Strategy<Value = View> {
    let view = (
        any::<u64>(),
        configs(),
        prop::option::of(configs()),
        lineages(),
    );
    view.prop_map(|(version, current, next, lineage)| View {
        lineage,
        version,
        current,
        next,
    })
}

fn payloads() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..2000).prop_map(Bytes::from)
}

fn contents() -> impl Strategy<Value = Content> {
    prop_oneof![
        payloads().prop_map(Content::Data),
        (0..=1u64 << 20).prop_map(Content::Zeros),
    ]
}

fn blocks() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 0..50)
}

fn ops() -> impl Strategy<Value = EntryOp> {
    prop_oneof![
        regions().prop_map(|region| EntryOp::Skip { region }),
        (any::<u64>(), payloads()).prop_map(|(offset, data)| EntryOp::Write { offset, data }),
        any::<(u64, u64)>().prop_map(|(offset, length)| EntryOp::Zero { offset, length }),
        Just(EntryOp::Flush),
        any::<u64>().prop_map(|size| EntryOp::Reserve { size }),
        any::<(u64, u64)>().prop_map(|(size, version)| EntryOp::Raise { size, version }),
        views().prop_map(EntryOp::View),
    ]
}

fn requests() -> impl Strategy<Value = Request> {
    let lists = || prop::collection::vec(regions(), 0..50);
    let joins = (
        keys(),
        (any::<u64>(), any::<u64>(), prop::sample::select(PASTS)),
        views(),
    );
    prop_oneof![
        Just(Request::Hello),
        Just(Request::Survey),
        Just(Request::Call),
        any::<(u64, u64, u64)>().prop_map(|(tag, offset, length)| Request::Allocate {
            tag,
            offset,
            length,
        }),
        Just(Request::Resume),
        regions().prop_map(|from| Request::Regions { from }),
        lists().prop_map(|regions| Request::Stale { regions }),
        lists().prop_map(|regions| Request::Restamp { regions }),
        joins.prop_map(
            |(key, (size, size_version, past), view)| Request::Join(JoinTerms {
                past,
                key,
                size,
                size_version,
                view,
            })
        ),
        (keys(), ops()).prop_map(|(key, op)| Request::Entry(Entry { key, op })),
        any::<(u64, u64, u64)>().prop_map(|(tag, offset, length)| Request::Read {
            tag,
            offset,
            length
        }),
        regions().prop_map(|region| Request::RepairBegin { region }),
        regions().prop_map(|region| Request::RepairDrop { region }),
        any::<(u64, u64, u64)>().prop_map(|(tag, offset, length)| Request::Salvage {
            tag,
            offset,
            length
        }),
        any::<(u64, u64, u64)>().prop_map(|(tag, offset, length)| Request::Verify {
            tag,
            offset,
            length
        }),
        (regions(), any::<u64>(), contents(), blocks()).prop_map(
            |(region, stamp, content, except)| Request::RepairPart {
                region,
                stamp: Epoch::from_raw(stamp),
                content,
                except,
            }
        ),
        (regions(), any::<u64>(), contents()).prop_map(|(region, stamp, content)| {
            Request::RepairData {
                region,
                stamp: Epoch::from_raw(stamp),
                content,
            }
        }),
    ]
}

fn states() -> impl Strategy<Value = RegionState> {
    let stales = (keys(), any::<bool>()).prop_map(|(key, mixed)| Stale { key, mixed });
    (any::<u64>(), prop::option::of(stales)).prop_map(|(stamp, stale)| RegionState {
        stamp: Epoch::from_raw(stamp),
        stale,
    })
}

fn surveys() -> impl Strategy<Value = Surveyed> {
    let numbers = any::<(u64, u64, bool, u64, u64)>();
    let counts = any::<(u64, u64, u64, Option<u64>)>();
    (keys(), numbers, views(), counts).prop_map(
        |(
            key,
            (generation, owner, exact, size, size_version),
            view,
            (regions, stale, mixed, written_at),
        )| Surveyed {
            promise: Promise { generation, owner },
            key,
            exact,
            size,
            size_version,
            view,
            regions,
            stale,
            mixed,
            written_at,
        },
    )
}

fn answers() -> impl Strategy<Value = Answer> {
    let welcomes = (keys(), any::<(bool, u64, u64, bool)>(), views());
    let results = prop_oneof![
        contents().prop_map(Ok),
        Just(Err(ReadFault::Medium)),
        Just(Err(ReadFault::Stale)),
    ];
    prop_oneof![
        welcomes.prop_map(|(key, (exact, size, size_version, has_stale), view)| {
            Answer::Welcome(Welcome {
                key,
                exact,
                size,
                size_version,
                view,
                has_stale,
            })
        }),
        any::<(u64, u64)>().prop_map(|(generation, owner)| Answer::Refused {
            promise: Promise { generation, owner }
        }),
        (regions(), prop::collection::vec(states(), 0..50))
            .prop_map(|(from, states)| Answer::Regions { from, states }),
        Just(Answer::Joined),
        Just(Answer::JoinNoSpace),
        any::<bool>().prop_map(|is_low| Answer::Space { is_low }),
        Just(Answer::Full),
        any::<u64>().prop_map(|seq| Answer::Done { seq }),
        any::<u64>().prop_map(|seq| Answer::Flushed { seq }),
        any::<(u64, bool)>().prop_map(|(size, granted)| Answer::Reserved { size, granted }),
        (any::<u64>(), results).prop_map(|(tag, result)| Answer::Read { tag, result }),
        regions().prop_map(|region| Answer::RepairDone { region }),
        regions().prop_map(|region| Answer::Behind { region }),
        any::<(u64, bool)>().prop_map(|(tag, granted)| Answer::Allocated { tag, granted }),
        Just(Answer::Heard),
        surveys().prop_map(|it| Answer::Surveyed(Box::new(it))),
        (any::<u64>(), contents(), blocks()).prop_map(|(tag, content, bad)| Answer::Salvaged {
            tag,
            content,
            bad
        }),
        (any::<u64>(), any::<u32>(), blocks()).prop_map(|(tag, digest, bad)| Answer::Verified {
            tag,
            digest,
            bad
        }),
    ]
}

fn envelopes() -> impl Strategy<Value = Envelope> {
    let bodies = prop_oneof![
        requests().prop_map(Body::Request),
        answers().prop_map(Body::Answer)
    ];
    (uuids(), uuids(), any::<(u64, u64, u64, u64)>(), bodies).prop_map(
        |(volume, replica, (generation, owner, size_version, index), body)| Envelope {
            volume,
            replica,
            promise: Promise { generation, owner },
            size_version,
            index,
            body,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn what_goes_out_comes_back(envelope in envelopes()) {
        // Fails if a field of any message is forgotten, cut or put in another place.
        prop_assert_eq!(read(&bytes_of(&envelope)).unwrap(), envelope);
    }

    #[test]
    fn a_changed_byte_is_noticed(envelope in envelopes(), at in any::<usize>(), flip in 1u8..) {
        // Fails if some byte of a frame is outside the checksum.
        let mut bytes = bytes_of(&envelope);
        let at = at % bytes.len();
        bytes[at] ^= flip;
        prop_assert!(read(&bytes).is_err());
    }

    #[test]
    fn a_cut_or_padded_frame_is_noticed(envelope in envelopes(), cut in 1usize..200) {
        // Fails if a message is taken from bytes that are not all of it.
        let mut bytes = bytes_of(&envelope);
        let short = bytes.len().saturating_sub(cut);
        prop_assert!(read(&bytes[..short]).is_err());
        bytes.push(0);
        prop_assert_eq!(read(&bytes), Err(WireError::Length));
    }

    #[test]
    fn whole_nonsense_is_refused_or_is_a_message(fields in prop::collection::vec(any::<u8>(), 0..400)) {
        // Fails if fields that a stranger chose, with a right checksum, panic or mean two things.
        let mut bytes = bytes_of(&hello());
        bytes.truncate(HEADER_BYTES + 64);
        bytes.extend(&fields);
        seal(&mut bytes);
        if let Ok(envelope) = read(&bytes) {
            prop_assert_eq!(bytes_of(&envelope), bytes);
        }
    }

    #[test]
    fn frames_between_processes_of_one_machine_do_no_harm(
        kind in 0u16..9,
        mut fields in prop::collection::vec(any::<u8>(), 0..200),
        stands_for in prop::collection::vec(any::<u8>(), 0..16),
        is_message in any::<bool>(),
    ) {
        // Fails if a peer on this machine can make us panic, or look at memory that nobody lent.
        let memory = Bytes::from_static(&[9; 4096]);
        let borrowed = |at: u64, length: usize| {
            let end = usize::try_from(at).ok()?.checked_add(length)?;
            (end <= memory.len()).then(|| memory.slice(end - length..end))
        };
        if is_message {
            fields = bytes_of(&hello()).split_off(HEADER_BYTES);
        }
        let mut bytes = bytes_of(&hello());
        bytes.truncate(HEADER_BYTES);
        bytes[6..8].copy_from_slice(&kind.to_le_bytes());
        bytes.extend(&fields);
        bytes.extend(&stands_for);
        seal_with_payload(&mut bytes, stands_for.len());
        let header = *bytes.first_chunk().unwrap();
        let body = Bytes::copy_from_slice(&bytes[HEADER_BYTES..]);
        let found = decode_any(&header, &body, Sum::Whole, &borrowed);
        if kind > 7 {
            prop_assert!(found.is_err());
        }
    }

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        // Fails if noise is taken for a message.
        prop_assert!(read(&bytes).is_err());
    }
}

fn hello() -> Envelope {
    Envelope {
        volume: Uuid::from_u128(1),
        replica: Uuid::from_u128(2),
        promise: Promise::default(),
        size_version: 1,
        index: 0,
        body: Body::Request(Request::Hello),
    }
}

/// Gives a frame without payload the right length and checksum.
fn seal(bytes: &mut [u8]) {
    seal_with_payload(bytes, 0);
}

/// Gives a frame with so many bytes of payload the right lengths and checksum.
fn seal_with_payload(bytes: &mut [u8], payload: usize) {
    let fields = u32::try_from(bytes.len() - HEADER_BYTES - payload).unwrap();
    bytes[8..12].copy_from_slice(&fields.to_le_bytes());
    bytes[12..16].copy_from_slice(&u32::try_from(payload).unwrap().to_le_bytes());
    bytes[16..20].fill(0);
    let checksum = crc32c::crc32c(bytes);
    bytes[16..20].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn the_corpus_is_understood_or_refused_as_it_always_was() {
    // Fails if the format changes, which would part old peers from new ones. What begins with `old-` has records in the
    // list that is always empty now, and means what the `good-` file of the same name means.
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/wire");
    let mut seen = 0;
    for file in fs::read_dir(corpus).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let bytes = fs::read(&path).unwrap();
        match read(&bytes) {
            Ok(envelope) => {
                let expected = match name.strip_prefix("old-") {
                    Some(of) => fs::read(path.with_file_name(format!("good-{of}"))).unwrap(),
                    None => bytes,
                };
                assert!(!name.starts_with("bad-"), "{name} was taken for a message");
                assert!(
                    bytes_of(&envelope) == expected,
                    "{name} came back as other bytes"
                );
            }
            Err(error) => assert!(name.starts_with("bad-"), "{name}: {error}"),
        }
        seen += 1;
    }
    assert!(seen >= 31, "the corpus has only {seen} files");
}

#[test]
fn a_payload_is_not_copied() {
    // Fails if the bytes of a write are copied on their way to the wire or from it.
    let data = Bytes::from(vec![7; 4096]);
    let envelope = Envelope {
        body: Body::Request(Request::Entry(Entry {
            key: Key::FRESH,
            op: EntryOp::Write {
                offset: 0,
                data: data.clone(),
            },
        })),
        ..hello()
    };
    let frame = encode(&envelope).unwrap();
    assert_eq!(frame.payload.as_ptr(), data.as_ptr());
    let header = *frame.head.first_chunk().unwrap();
    let body = Bytes::from([&frame.head[HEADER_BYTES..], &frame.payload].concat());
    let Body::Request(Request::Entry(entry)) = decode(&header, &body).unwrap().body else {
        panic!("another message came back");
    };
    let EntryOp::Write { data, .. } = entry.op else {
        panic!("another entry came back");
    };
    assert!(body.as_ptr_range().contains(&data.as_ptr()));
}

#[test]
fn a_message_that_is_too_long_is_not_sent() {
    // Fails if a frame goes out that the other side must refuse.
    let data = Bytes::from(vec![0; PAYLOAD_BYTES_MAX + 1]);
    let envelope = Envelope {
        body: Body::Answer(Answer::Read {
            tag: 1,
            result: Ok(Content::Data(data)),
        }),
        ..hello()
    };
    assert_eq!(encode(&envelope), Err(WireError::TooLong));
}

/// Of a connection on which nothing is lent.
fn nothing(_: u64, _: usize) -> Option<Bytes> {
    None
}

#[test]
fn a_payload_that_is_lent_is_found_where_it_is_and_nowhere_else() {
    // Fails if a replica takes other bytes than those that were lent, or believes in bytes that nobody lent.
    let memory = Bytes::from((0..=255).collect::<Vec<u8>>());
    let (memory, start) = (&memory, memory.as_ptr().addr());
    let place_of = |bytes: &Bytes| u64::try_from(bytes.as_ptr().addr() - start).ok();
    let borrowed = |at: u64, length: usize| {
        let at = usize::try_from(at).ok()?;
        (at + length <= memory.len()).then(|| memory.slice(at..at + length))
    };
    let write = |data: Bytes| Envelope {
        body: Body::Request(Request::Entry(Entry {
            key: Key::FRESH,
            op: EntryOp::Write { offset: 4096, data },
        })),
        ..hello()
    };
    let envelope = write(memory.slice(100..164));
    let mut heads = BytesMut::new();
    let payload = encode_into(&envelope, Sum::Head, &place_of, &mut heads).unwrap();
    assert_eq!(payload, Payload::Lent(memory.slice(100..164)));
    let header = *heads.first_chunk().unwrap();
    let body = Bytes::copy_from_slice(&heads[HEADER_BYTES..]);
    assert_eq!(body_length(&header), Ok(body.len()));
    assert_eq!(
        decode_any(&header, &body, Sum::Head, &borrowed),
        Ok(Arrival::Message(envelope))
    );
    let without = decode_any(&header, &body, Sum::Head, &nothing);
    assert_eq!(without, Err(WireError::Nonsense));
    assert_eq!(decode(&header, &body), Err(WireError::Nonsense));
    let mut changed = body.to_vec();
    let place = changed.len() - 12;
    changed[place] ^= 1;
    assert_eq!(
        decode_any(&header, &changed.into(), Sum::Head, &borrowed),
        Err(WireError::Checksum)
    );
    // A message without bytes has nothing to lend.
    let mut heads = BytesMut::new();
    let payload = encode_into(&hello(), Sum::Head, &|_| Some(0), &mut heads);
    assert_eq!(payload, Ok(Payload::Follows(Bytes::new())));

    let lend = Lend {
        descriptor: 9,
        length: 128 << 20,
        device: 1,
        inode: 2,
    };
    let mut heads = BytesMut::new();
    encode_lend(&lend, &mut heads).unwrap();
    encode_borrows(&mut heads).unwrap();
    for wanted in [Arrival::Lend(lend), Arrival::Borrows] {
        let header: [u8; HEADER_BYTES] = *heads.first_chunk().unwrap();
        let frame = heads.split_to(HEADER_BYTES + body_length(&header).unwrap());
        let body = Bytes::copy_from_slice(&frame[HEADER_BYTES..]);
        let found = decode_any(&header, &body, Sum::Whole, &nothing);
        assert_eq!(found, Ok(wanted));
    }
}

#[test]
fn a_payload_that_is_not_summed_up_is_taken_only_where_that_is_allowed() {
    // Fails if a payload from another machine can change on its way unnoticed, or it cannot be told where a data file is.
    let envelope = Envelope {
        body: Body::Answer(Answer::Read {
            tag: 1,
            result: Ok(Content::Data(Bytes::from_static(&[7; 64]))),
        }),
        ..hello()
    };
    let mut heads = BytesMut::new();
    let payload = encode_into(&envelope, Sum::Head, &|_| None, &mut heads).unwrap();
    let Payload::Follows(payload) = payload else {
        panic!("nothing is lent");
    };
    let header = *heads.first_chunk().unwrap();
    let body = Bytes::from([&heads[HEADER_BYTES..], &payload].concat());
    assert!(is_unsummed(&header));
    assert_eq!(
        decode_any(&header, &body, Sum::Head, &nothing),
        Ok(Arrival::Message(envelope))
    );
    assert_eq!(
        decode_any(&header, &body, Sum::Whole, &nothing),
        Err(WireError::Nonsense)
    );
    // The fields are covered all the same.
    let mut changed = body.to_vec();
    changed[3] ^= 1;
    let changed = decode_any(&header, &changed.into(), Sum::Head, &nothing);
    assert_eq!(changed, Err(WireError::Checksum));
    let file = DataFile {
        path: "/pool/replicas/r/data".into(),
        device: 3,
        inode: 4,
    };
    let mut heads = BytesMut::new();
    encode_data_file(&file, &mut heads).unwrap();
    let header = *heads.first_chunk().unwrap();
    let body = Bytes::copy_from_slice(&heads[HEADER_BYTES..]);
    assert_eq!(decode(&header, &body), Err(WireError::Nonsense));
    assert_eq!(
        decode_any(&header, &body, Sum::Whole, &nothing),
        Ok(Arrival::DataFile(file))
    );
}

#[test]
fn a_last_word_arrives_and_one_of_another_version_names_both_versions() {
    // Fails if a peer does not learn why a connection ends, or which version the other side speaks.
    for objection in [
        Objection::Version { shown: 9 },
        Objection::Features { missing: 5 },
        Objection::Crowded,
        Objection::Unknown,
    ] {
        let mut frame = BytesMut::new();
        encode_objects(objection, &mut frame).unwrap();
        let mut header = *frame.first_chunk().unwrap();
        let body = Bytes::copy_from_slice(&frame[HEADER_BYTES..]);
        assert_eq!(
            decode_any(&header, &body, Sum::Whole, &nothing),
            Ok(Arrival::Objects(objection))
        );
        let ours = VERSION;
        for theirs in [0, VERSION + 1, u16::MAX] {
            header[4..6].copy_from_slice(&theirs.to_le_bytes());
            let error = WireError::Version { theirs, ours };
            assert_eq!(body_length(&header), Err(error));
            assert_eq!(
                error.to_string(),
                format!(
                    "the peer speaks version {theirs} of the protocol, and version {ours} is spoken here"
                )
            );
        }
    }
}
