//! Anything that a peer can send: no panic, an answer or an end, and bounded memory.
//!
//! `corpus/` holds inputs that were, or could have been, trouble. Each file is run by name; what a
//! property test finds is added there.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use common::{INITIATOR, Initiator, Local, MIB, TARGET, Wire, keys, portal, ram};
use proptest::prelude::*;
use trellis_iscsi::limits::{DATA_IN_BYTES_MAX, RECV_SEGMENT_BYTES_MAX, TEXT_BYTES_MAX};
use trellis_iscsi::pdu::header::LoginRequest;
use trellis_iscsi::pdu::{IMMEDIATE, opcode};
use trellis_iscsi::{Access, Portal};

/// What a connection may have in memory for its peer, beside the data of commands.
const SLACK_BYTES: usize = 64 * 1024;

fn open() -> Arc<Portal> {
    portal(ram(MIB), Access::default()).0
}

fn bounded(local: &mut Local) {
    let segment = usize::try_from(RECV_SEGMENT_BYTES_MAX).unwrap();
    assert!(
        local.input.len() <= segment + SLACK_BYTES,
        "{} bytes of input are kept",
        local.input.len()
    );
    assert!(local.conn.outbox().bytes() <= DATA_IN_BYTES_MAX * 2);
}

/// Feed a stream as it would come: in pieces.
fn feed(local: &mut Local, bytes: &[u8], piece: usize) {
    for chunk in bytes.chunks(piece.max(1)) {
        if local.ended.is_some() {
            return;
        }
        local.send(chunk);
        bounded(local);
    }
}

/// A stream before and after a login.
fn stream(bytes: &[u8], piece: usize) {
    let portal = open();
    feed(&mut Local::new(&portal), bytes, piece);
    let mut initiator = Initiator::logged_in(&portal, 1);
    feed(&mut initiator.wire, bytes, piece);
}

/// A command descriptor block, and data that is sent along as far as it is asked for.
fn command(cdb: [u8; 16], flags: u8, data: &[u8]) {
    let portal = open();
    let mut initiator = Initiator::logged_in(&portal, 1);
    let expected = u32::try_from(data.len()).unwrap();
    let itt = initiator.command(cdb, flags, expected, data);
    let reply = initiator.reply(itt, data);
    assert!(reply.is_some(), "no status for {cdb:02x?}");
    // The session has survived; a reservation of its own or a switch that it set is its own doing.
    let inquiry = [0x12, 0, 0, 0, 96, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert!(initiator.run(inquiry, 0x40, 96, &[]).good());
}

/// Text as a login's, whole and in the middle of a session.
fn text(bytes: &[u8]) {
    let portal = open();
    for flags in [0x87, 0x81, 0x83, 0x00, 0x04, 0x40] {
        let mut initiator = Initiator::local(&portal);
        let header = LoginRequest {
            opcode: opcode::LOGIN | IMMEDIATE,
            flags,
            itt: 1.into(),
            ..LoginRequest::default()
        };
        initiator.push(
            zerocopy::transmute!(header),
            &bytes[..bytes.len().min(8192)],
        );
        assert!(initiator.login_answer().is_some());
        bounded(&mut initiator.wire);
    }
    let mut initiator = Initiator::logged_in(&portal, 1);
    let mut header = [0; 48];
    header[0] = opcode::TEXT | IMMEDIATE;
    header[1] = 0x80;
    header[20..24].copy_from_slice(&[0xff; 4]);
    initiator.push(header, &bytes[..bytes.len().min(8192)]);
    assert!(initiator.pull().is_some());
    bounded(&mut initiator.wire);
}

fn corpus(kind: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/corpus")
        .join(kind);
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty());
    files
        .iter()
        .map(|path| (path.display().to_string(), std::fs::read(path).unwrap()))
        .collect()
}

#[test]
fn the_corpus_of_streams_does_no_harm() {
    // Fails if an input that was trouble once is trouble again.
    for (name, bytes) in corpus("stream") {
        println!("{name}");
        for piece in [1, 7, 48, 4096] {
            stream(&bytes, piece);
        }
    }
}

#[test]
fn the_corpus_of_commands_is_answered() {
    // Fails if a command descriptor block of the corpus panics or has no status. A file is a CDB and its data.
    for (name, bytes) in corpus("cdb") {
        println!("{name}");
        let (cdb, data) = bytes.split_first_chunk::<16>().unwrap();
        for flags in [0x00, 0x20, 0x40] {
            command(*cdb, flags, if flags == 0x20 { data } else { &[] });
        }
    }
}

#[test]
fn the_corpus_of_texts_is_answered() {
    // Fails if a text of the corpus panics or has no answer.
    for (name, bytes) in corpus("text") {
        println!("{name}");
        text(&bytes);
    }
}

#[test]
fn endless_text_is_cut_off() {
    // Fails if a login can make us collect more text than an exchange may have, or go on for ever.
    let portal = open();
    let mut initiator = Initiator::local(&portal);
    let mut sent = 0;
    while initiator.wire.ended.is_none() {
        let header = LoginRequest {
            opcode: opcode::LOGIN | IMMEDIATE,
            flags: 0x40,
            itt: 1.into(),
            ..LoginRequest::default()
        };
        initiator.push(zerocopy::transmute!(header), &[b'a'; 4096]);
        sent += 4096;
        assert!(sent <= TEXT_BYTES_MAX + 8192);
    }
    let mut slow = Initiator::local(&portal);
    let mut count = 0;
    while slow.wire.ended.is_none() {
        slow.login_pdu(
            0x00,
            if count == 0 {
                keys(INITIATOR, Some(TARGET))
            } else {
                Vec::new()
            }
            .as_slice(),
        );
        count += 1;
        assert!(count <= 100);
    }
}

fn opcodes() -> impl Strategy<Value = u8> {
    prop_oneof![
        4 => prop::sample::select(vec![
            0x03, 0x08, 0x0a, 0x12, 0x15, 0x1a, 0x25, 0x28, 0x2a, 0x2e, 0x2f, 0x35, 0x41, 0x42, 0x55, 0x5a, 0x5e, 0x5f,
            0x88, 0x89, 0x8a, 0x8b, 0x8e, 0x8f, 0x90, 0x91, 0x93, 0x9e, 0xa0, 0xa3, 0xa8, 0xaa,
        ]),
        1 => any::<u8>(),
    ]
}

/// Bytes that are often at an edge.
fn byte() -> impl Strategy<Value = u8> {
    prop_oneof![3 => Just(0u8), 1 => Just(0xff), 1 => Just(1), 2 => any::<u8>()]
}

fn cdbs() -> impl Strategy<Value = [u8; 16]> {
    (opcodes(), prop::array::uniform15(byte())).prop_map(|(opcode, rest)| {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        cdb[1..].copy_from_slice(&rest);
        cdb
    })
}

/// A PDU whose lengths are true, and whose command number fits.
fn pdus() -> impl Strategy<Value = Vec<u8>> {
    let kinds = prop_oneof![
        4 => prop::sample::select(vec![0x00u8, 0x01, 0x02, 0x04, 0x05, 0x06, 0x10, 0x40, 0x41, 0x42, 0x44]),
        1 => any::<u8>(),
    ];
    (
        kinds,
        prop::collection::vec(byte(), 47),
        cdbs(),
        prop::collection::vec(any::<u8>(), 0..600),
        1..40u32,
    )
        .prop_map(|(kind, rest, cdb, data, cmd_sn)| {
            let mut pdu = vec![kind];
            pdu.extend_from_slice(&rest);
            if kind & 0x3f == opcode::SCSI_COMMAND {
                pdu[8..16].fill(0);
                pdu[32..48].copy_from_slice(&cdb);
            }
            pdu[4] = 0;
            let len = u32::try_from(data.len()).unwrap().to_be_bytes();
            pdu[5..8].copy_from_slice(&len[1..]);
            pdu[24..28].copy_from_slice(&cmd_sn.to_be_bytes());
            pdu.extend_from_slice(&data);
            pdu.resize(pdu.len().next_multiple_of(4), 0);
            pdu
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..2048), piece in 1..600usize) {
        // Fails if a stream of bytes panics or makes us hold more than was agreed.
        stream(&bytes, piece);
    }

    #[test]
    fn any_pdus_do_no_harm(pdus in prop::collection::vec(pdus(), 1..40)) {
        // Fails if a sequence of well-framed PDUs panics or makes us hold more than was agreed.
        let bytes: Vec<u8> = pdus.concat();
        stream(&bytes, 4096);
    }

    #[test]
    fn any_command_has_a_status(cdb in cdbs(), flags in prop::sample::select(vec![0u8, 0x20, 0x40]),
                                data in prop::collection::vec(byte(), 0..3000)) {
        // Fails if a command panics, has no status, or takes the session with it.
        command(cdb, flags, if flags == 0x20 { &data } else { &[] });
    }

    #[test]
    fn any_text_has_an_answer(bytes in prop_oneof![
        prop::collection::vec(any::<u8>(), 0..600),
        prop::collection::vec(
            (prop::sample::select(vec![
                "InitiatorName", "TargetName", "SessionType", "AuthMethod", "CHAP_A", "CHAP_R", "CHAP_C", "CHAP_I", "CHAP_N",
                "HeaderDigest", "MaxBurstLength", "FirstBurstLength", "InitialR2T", "SendTargets", "X-key",
                "MaxRecvDataSegmentLength", "MaxConnections", "ErrorRecoveryLevel",
            ]), "[ -~]{0,20}"), 0..20)
            .prop_map(|pairs| pairs.iter().flat_map(|(key, value)| format!("{key}={value}\0").into_bytes()).collect()),
    ]) {
        // Fails if a text panics or has no answer.
        text(&Bytes::from(bytes));
    }
}
