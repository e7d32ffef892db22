//! Login, access, discovery and digests.

use super::*;

#[test]
fn a_login_needs_names_that_fit() {
    // Fails if someone without a name, at an unknown target or not on the list is let in.
    let access = Access {
        initiators: Some([INITIATOR.to_owned()].into()),
        chap: None,
    };
    let (portal, _) = portal(ram(MIB), access);
    let unknown = "iqn.2026-11.dev.trellis:unknown";
    for (pairs, status) in [
        (keys(INITIATOR, Some(TARGET)), (0, 0)),
        (keys(&INITIATOR.to_uppercase(), Some(TARGET)), (0, 0)),
        (
            keys("iqn.2026-11.dev.trellis:stranger", Some(TARGET)),
            (2, 2),
        ),
        (keys(INITIATOR, Some(unknown)), (2, 3)),
        (vec![("TargetName".to_owned(), TARGET.to_owned())], (2, 7)),
        (
            vec![("InitiatorName".to_owned(), INITIATOR.to_owned())],
            (2, 7),
        ),
    ] {
        let mut initiator = Initiator::local(&portal);
        assert_eq!(
            initiator.login_with(pairs.clone(), &[]),
            status,
            "{pairs:?}"
        );
        let refused = Disconnect::LoginRefused {
            class: status.0,
            detail: status.1,
        };
        assert_eq!(initiator.wire.ended, (status.0 != 0).then_some(refused));
    }
}

#[test]
fn only_a_login_comes_first_and_only_once() {
    // Fails if a command is taken before the login, or a login after it.
    let portal = open_portal();
    let mut early = Initiator::local(&portal);
    early.command([0; 16], 0, 0, &[]);
    assert_eq!(
        early.wire.ended,
        Some(Disconnect::Protocol(Breach::NotALogin))
    );
    let mut twice = Initiator::logged_in(&portal, 1);
    twice.login_pdu(0x87, &keys(INITIATOR, Some(TARGET)));
    assert_eq!(
        twice.wire.ended,
        Some(Disconnect::Protocol(Breach::LoginTwice))
    );
}

#[test]
fn a_target_with_chap_lets_nobody_skip_the_proof() {
    // Fails if the security stage can be left out, or left, or a proof refused.
    use trellis_iscsi::login::Chap;
    let access = Access {
        initiators: None,
        chap: Some(Chap::one_way("user", "a secret of 12").unwrap()),
    };
    let (portal, _) = portal(ram(MIB), access);
    let mut skips = Initiator::local(&portal);
    assert_eq!(skips.login_with(keys(INITIATOR, Some(TARGET)), &[]), (2, 1));
    for method in ["None", "SRP"] {
        let mut refuses = Initiator::local(&portal);
        let mut pairs = keys(INITIATOR, Some(TARGET));
        pairs.push(("AuthMethod".to_owned(), method.to_owned()));
        refuses.login_pdu(0x81, &pairs);
        assert_eq!(refuses.login_answer().unwrap().1, (2, 1));
    }
    let mut silent = Initiator::local(&portal);
    silent.login_pdu(0x83, &keys(INITIATOR, Some(TARGET)));
    assert_eq!(silent.login_answer().unwrap().1, (2, 1));
    let mut wrong = Initiator::local(&portal);
    let mut pairs = keys(INITIATOR, Some(TARGET));
    pairs.push(("AuthMethod".to_owned(), "CHAP,None".to_owned()));
    wrong.login_pdu(0x81, &pairs);
    let (flags, status, answers) = wrong.login_answer().unwrap();
    assert_eq!(
        (flags & 0x80, status),
        (0, (0, 0)),
        "the stage must not be left"
    );
    assert!(answers.contains(&("AuthMethod".to_owned(), "CHAP".to_owned())));
    wrong.login_pdu(0x00, &[("CHAP_A".to_owned(), "5".to_owned())]);
    let (_, _, answers) = wrong.login_answer().unwrap();
    assert!(answers.iter().any(|(key, _)| key == "CHAP_C"));
    let guess = [
        ("CHAP_N".to_owned(), "user".to_owned()),
        ("CHAP_R".to_owned(), format!("0x{}", "00".repeat(16))),
    ];
    wrong.login_pdu(0x81, &guess);
    assert_eq!(wrong.login_answer().unwrap().1, (2, 1));
}

#[test]
fn discovery_shows_what_one_may_use_and_runs_no_commands() {
    // Fails if a target is shown to who may not log in, a long list is cut, or a command runs in discovery.
    let portal = Portal::new(4, None);
    for n in 0..200 {
        let access = Access {
            initiators: (n % 2 == 1).then(|| ["iqn.other".to_owned()].into()),
            chap: None,
        };
        portal
            .add_target(Target::new(&format!("{TARGET}-{n:03}"), access).unwrap())
            .unwrap();
    }
    let mut initiator = Initiator::local(&portal);
    assert_eq!(
        initiator.login_with(
            keys(INITIATOR, None),
            &[("MaxRecvDataSegmentLength", "512")]
        ),
        (0, 0)
    );
    let mut listing = Vec::new();
    let mut parts = 0;
    initiator.text(TAG_NONE, &[("SendTargets".to_owned(), "All".to_owned())]);
    loop {
        let pdu = initiator.pull().unwrap();
        assert_eq!(pdu.opcode(), opcode::TEXT_RESPONSE);
        assert!(pdu.data.len() <= 512);
        let header = *TextResponse::from_wire(&pdu.header);
        listing.extend_from_slice(&pdu.data);
        parts += 1;
        if header.flags & 0x80 != 0 {
            break;
        }
        initiator.text(header.ttt.get(), &[]);
    }
    let pairs = trellis_iscsi::login::parse_text(&Bytes::from(listing.clone()));
    assert!(parts > 1);
    // More keys than an exchange may have come only from us; they are read by hand.
    assert!(pairs.is_err());
    let text = String::from_utf8(listing).unwrap();
    let names: Vec<_> = text
        .split('\0')
        .filter_map(|pair| pair.strip_prefix("TargetName="))
        .collect();
    assert_eq!(names.len(), 100);
    assert!(
        names
            .iter()
            .all(|name| name.as_bytes().last().unwrap() % 2 == 0)
    );
    assert_eq!(text.matches("TargetAddress=192.0.2.1:3260,1").count(), 100);
    initiator.command([0; 16], 0, 0, &[]);
    assert_eq!(
        initiator.wire.ended,
        Some(Disconnect::Protocol(Breach::DiscoveryCommand))
    );
}

#[test]
fn digests_protect_headers_and_data() {
    // Fails if a session with digests does not work, or one wrong bit goes unnoticed.
    let portal = open_portal();
    let digests = [
        ("HeaderDigest", "CRC32C,None"),
        ("DataDigest", "CRC32C,None"),
    ];
    let mut isid = 0;
    let mut login = || {
        let mut initiator = Initiator::local(&portal);
        isid += 1;
        initiator.isid[5] = isid;
        assert_eq!(
            initiator.login_with(keys(INITIATOR, Some(TARGET)), &digests),
            (0, 0)
        );
        initiator
    };
    let data: Vec<u8> = (0..=255).cycle().take(4096).collect();
    let mut sound = login();
    assert!(sound.write(8, &data).good());
    assert_eq!(sound.read(8, 4096).data, data);
    assert!(sound.write(0, &vec![5; 512 * 3]).good());
    for (at, reason) in [(20, Disconnect::HeaderDigest), (60, Disconnect::DataDigest)] {
        let mut broken = login();
        let (cdb, len) = cdb10(0x2a, 0, 512);
        let header = trellis_iscsi::pdu::header::ScsiCommand {
            opcode: opcode::SCSI_COMMAND,
            flags: 0xa0,
            itt: 9.into(),
            expected_len: len.into(),
            cmd_sn: 1.into(),
            cdb,
            ..Default::default()
        };
        broken
            .out
            .push(zerocopy::transmute!(header), &[Bytes::from(vec![1; 512])]);
        let mut bytes = broken.out.take().to_vec();
        bytes[at] ^= 1;
        broken.wire.send(&bytes);
        assert_eq!(broken.wire.ended, Some(reason));
    }
}
