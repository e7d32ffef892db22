//! A connection without I/O: login, numbers, data, task management, growth.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::{
    CAPACITY_CHANGED, INITIATOR, Initiator, Local, MIB, Reply, TARGET, Wire, cdb10, keys, portal,
    ram,
};
use tokio::sync::oneshot;
use trellis_iscsi::limits::{COMMAND_WINDOW, DATA_OUT_BYTES_MAX};
use trellis_iscsi::lun::{Answer, Chunks, Compared, Extent, Identity, LunError};
use trellis_iscsi::luns::RamLun;
use trellis_iscsi::pdu::header::{Reject, TaskManagementResponse, TextResponse};
use trellis_iscsi::pdu::{TAG_NONE, opcode};
use trellis_iscsi::session::Times;
use trellis_iscsi::{Access, Breach, Disconnect, Lun, Portal, Target};

/// A volume whose writes wait until they are let go.
#[derive(Default)]
struct Held {
    waiting: Mutex<Vec<oneshot::Sender<()>>>,
}

impl Held {
    fn release(&self) {
        for each in self.waiting.lock().unwrap().drain(..) {
            let _gone = each.send(());
        }
    }

    fn held(&self) -> usize {
        self.waiting.lock().unwrap().len()
    }
}

impl Lun for Held {
    fn identity(&self) -> Identity {
        Identity {
            serial: "held".to_owned(),
            naa: [1; 16],
        }
    }
    fn block_size(&self) -> u32 {
        512
    }
    fn size(&self) -> u64 {
        64 * MIB
    }
    fn read_only(&self) -> bool {
        false
    }
    fn volatile_cache(&self) -> bool {
        false
    }
    fn read(&self, _offset: u64, len: u32) -> Answer<Chunks> {
        Answer::Now(Ok(vec![Bytes::from(vec![
            0;
            usize::try_from(len).unwrap()
        ])]))
    }
    fn write(&self, _offset: u64, _data: Chunks, _fua: bool) -> Answer<()> {
        let (sender, receiver) = oneshot::channel();
        self.waiting.lock().unwrap().push(sender);
        Answer::later(async move { receiver.await.map_err(|_| LunError::Medium) })
    }
    fn zero(&self, _offset: u64, _len: u64, _deallocate: bool) -> Answer<()> {
        Answer::Now(Ok(()))
    }
    fn flush(&self) -> Answer<()> {
        Answer::Now(Ok(()))
    }
    fn compare_and_write(&self, _: u64, _: Chunks, _: Chunks, _: bool) -> Answer<Compared> {
        Answer::Now(Ok(Compared::Written))
    }
    fn extents(&self, _offset: u64, len: u64, _extents_max: usize) -> Answer<Vec<Extent>> {
        Answer::Now(Ok(vec![Extent { len, mapped: true }]))
    }
}

fn open_portal() -> Arc<Portal> {
    portal(ram(64 * MIB), Access::default()).0
}

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

#[test]
fn commands_run_in_the_order_of_their_numbers() {
    // Fails if a number outside the window is answered, or an early command does not wait for its turn.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    for outside in [
        initiator.max_cmd_sn.wrapping_add(1),
        initiator.cmd_sn.wrapping_sub(1),
    ] {
        let right = initiator.cmd_sn;
        initiator.cmd_sn = outside;
        let itt = initiator.command([0; 16], 0, 0, &[]);
        assert_eq!(initiator.reply(itt, &[]), None);
        initiator.cmd_sn = right;
    }
    initiator.cmd_sn += 1;
    let second = initiator.command([0; 16], 0, 0, &[]);
    assert_eq!(initiator.reply(second, &[]), None, "the first has not come");
    initiator.cmd_sn -= 2;
    let first = initiator.command([0; 16], 0, 0, &[]);
    initiator.cmd_sn += 1;
    assert!(initiator.reply(first, &[]).unwrap().good());
    assert!(initiator.reply(second, &[]).unwrap().good());
    assert!(initiator.test_unit_ready().good());
}

#[test]
fn the_window_closes_while_the_volume_is_busy() {
    // Fails if more commands are taken than the window offers, or if it does not open again.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut initiator = Initiator::logged_in(&portal, 1);
    let (cdb, len) = cdb10(0x2a, 0, 512);
    let window = usize::try_from(COMMAND_WINDOW).unwrap();
    for _ in 0..window + 10 {
        initiator.command(cdb, 0x20, len, &[1; 512]);
    }
    assert_eq!(held.held(), window);
    held.release();
    let mut answered = 0;
    while initiator.pull().is_some() {
        answered += 1;
    }
    assert_eq!(answered, window);
    initiator.cmd_sn -= 10;
    initiator.command(cdb, 0x20, len, &[1; 512]);
    assert_eq!(held.held(), 1);
}

#[test]
fn a_long_write_is_asked_for_in_bursts_and_arrives_whole() {
    // Fails if immediate data, unsolicited data or a burst goes missing or to the wrong place.
    let portal = open_portal();
    let data: Vec<u8> = (0..(3 * MIB))
        .map(|n| u8::try_from(n * 7 % 251).unwrap())
        .collect();
    for immediate in [true, false] {
        let mut initiator = Initiator::logged_in(&portal, 1);
        initiator.immediate = immediate;
        assert!(initiator.write(100, &data).good());
        assert!(initiator.read(100, data.len()).data == data);
        initiator.logout();
        assert_eq!(initiator.wire.ended, Some(Disconnect::LoggedOut));
    }
}

#[test]
fn write_data_that_a_connection_makes_us_hold_is_bounded() {
    // Fails if R2Ts are sent for more data than one connection may have on its way.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    initiator.immediate = false;
    let (cdb, len) = cdb10(0x2a, 0, 8 << 20);
    for _ in 0..64 {
        initiator.command(cdb, 0x20, len, &[]);
    }
    let mut tasks = std::collections::HashSet::new();
    while let Some(pdu) = initiator.pull() {
        assert_eq!(pdu.opcode(), opcode::R2T);
        tasks.insert(
            trellis_iscsi::pdu::header::R2t::from_wire(&pdu.header)
                .itt
                .get(),
        );
    }
    assert_eq!(
        u64::try_from(tasks.len()).unwrap() * u64::from(len),
        DATA_OUT_BYTES_MAX
    );
}

#[test]
fn data_out_of_sequence_fails_the_command_and_writes_nothing() {
    // Fails if a write with a wrong DataSN succeeds, changes the volume, or ends the session.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    initiator.immediate = false;
    let (cdb, len) = cdb10(0x2a, 0, 1024);
    let itt = initiator.command(cdb, 0x20, len, &[1; 1024]);
    let pdu = initiator.pull().unwrap();
    let r2t = *trellis_iscsi::pdu::header::R2t::from_wire(&pdu.header);
    let header = trellis_iscsi::pdu::header::DataOut {
        opcode: opcode::DATA_OUT,
        flags: 0x80,
        itt: itt.into(),
        ttt: r2t.ttt,
        data_sn: 27.into(),
        ..Default::default()
    };
    initiator.push(zerocopy::transmute!(header), &[1; 1024]);
    let reply = initiator.reply(itt, &[]).unwrap();
    assert_eq!(reply.sense, Some((0xb, 0x47, 0x05)));
    assert_eq!(initiator.read(0, 1024).data, vec![0; 1024]);
}

#[test]
fn growth_is_told_once_to_each_nexus_that_knew_the_old_size() {
    // Fails if a nexus is told twice or never, a new one is told, or the old size is still answered.
    let lun = ram(64 * MIB);
    let (portal, _) = portal(lun.clone(), Access::default());
    let mut a = Initiator::logged_in(&portal, 1);
    let mut b = Initiator::logged_in(&portal, 2);
    assert_eq!(a.capacity(), Ok(64 * MIB));
    assert_eq!(b.capacity(), Ok(64 * MIB));
    lun.grow(96 * MIB);
    lun.grow(128 * MIB);
    let mut late = Initiator::logged_in(&portal, 3);
    assert_eq!(late.capacity(), Ok(128 * MIB));
    assert!(late.test_unit_ready().good());
    assert_eq!(a.read(0, 512).sense, CAPACITY_CHANGED);
    assert_eq!(a.capacity(), Ok(128 * MIB));
    assert!(
        a.write(u32::try_from(100 * MIB / 512).unwrap(), &[3; 512])
            .good()
    );
    assert_eq!(b.capacity().unwrap_err().sense, CAPACITY_CHANGED);
    assert_eq!(b.capacity(), Ok(128 * MIB));
    for each in [&mut a, &mut b, &mut late] {
        for _ in 0..3 {
            assert!(each.test_unit_ready().good());
        }
    }
    lun.grow(160 * MIB);
    assert_eq!(late.test_unit_ready().sense, CAPACITY_CHANGED);
    assert!(late.test_unit_ready().good());
}

#[test]
fn growth_does_not_disturb_commands_that_are_asked_to_see_it() {
    // Fails if INQUIRY or REPORT LUNS take the attention away, or REQUEST SENSE does not show it.
    let lun = ram(64 * MIB);
    let (portal, _) = portal(lun.clone(), Access::default());
    let mut initiator = Initiator::logged_in(&portal, 1);
    lun.grow(65 * MIB);
    let mut inquiry = [0; 16];
    inquiry[0] = 0x12;
    inquiry[4] = 96;
    assert!(initiator.run(inquiry, 0x40, 96, &[]).good());
    let mut sense = [0; 16];
    sense[0] = 0x03;
    sense[4] = 18;
    let reply = initiator.run(sense, 0x40, 18, &[]);
    assert_eq!(
        (reply.data[2] & 15, reply.data[12], reply.data[13]),
        (6, 0x2a, 0x09)
    );
    assert!(initiator.test_unit_ready().good());
}

#[test]
fn a_read_only_volume_refuses_every_write_and_says_so_beforehand() {
    // Fails if a write goes through, fails for another reason, or the WP bit is missing.
    let lun = Arc::new(RamLun::new("ro", 64 * MIB, 512));
    lun.set_read_only(true);
    let (portal, _) = portal(lun, Access::default());
    let mut initiator = Initiator::logged_in(&portal, 1);
    assert_eq!(initiator.write(0, &[1; 512]).sense, Some((7, 0x27, 0)));
    let (mut unmap, _) = cdb10(0x42, 0, 0);
    unmap[8] = 24;
    assert_eq!(
        initiator.run(unmap, 0x20, 24, &[0; 24]).sense,
        Some((7, 0x27, 0))
    );
    let (mut same, _) = cdb10(0x41, 0, 512);
    same[1] = 8;
    assert_eq!(
        initiator.run(same, 0x20, 512, &[0; 512]).sense,
        Some((7, 0x27, 0))
    );
    assert!(initiator.read(0, 512).good());
    let mut mode = [0; 16];
    mode[0] = 0x1a;
    mode[2] = 0x3f;
    mode[4] = 255;
    assert_eq!(initiator.run(mode, 0x40, 255, &[]).data[2] & 0x80, 0x80);
}

fn managed(initiator: &mut Initiator<Local>) -> Option<u8> {
    let pdu = initiator.pull()?;
    assert_eq!(pdu.opcode(), opcode::TASK_MANAGEMENT_RESPONSE);
    Some(TaskManagementResponse::from_wire(&pdu.header).response)
}

#[test]
fn an_abort_is_answered_only_when_nothing_of_the_task_can_happen_any_more() {
    // Fails if the abort is answered while the volume still writes, or the task is answered after it.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut initiator = Initiator::logged_in(&portal, 1);
    let (cdb, len) = cdb10(0x2a, 0, 512);
    let itt = initiator.command(cdb, 0x20, len, &[1; 512]);
    assert_eq!(held.held(), 1);
    initiator.task_management(1, itt);
    assert!(initiator.pull().is_none());
    held.release();
    assert_eq!(managed(&mut initiator), Some(0));
    assert!(initiator.pull().is_none(), "an aborted task has no status");
    initiator.task_management(1, 0x7777);
    assert_eq!(managed(&mut initiator), Some(1));
    initiator.task_management(8, itt);
    assert_eq!(managed(&mut initiator), Some(4));
    initiator.task_management(3, itt);
    assert_eq!(managed(&mut initiator), Some(5));
}

#[test]
fn a_reset_waits_for_the_tasks_of_all_sessions() {
    // Fails if a reset by one is answered while another's task runs, or the others are not told.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut a = Initiator::logged_in(&portal, 1);
    let mut b = Initiator::logged_in(&portal, 2);
    let (cdb, len) = cdb10(0x2a, 0, 512);
    let _aborted = b.command(cdb, 0x20, len, &[1; 512]);
    a.task_management(5, TAG_NONE);
    b.wire.settle();
    assert!(a.pull().is_none());
    held.release();
    assert!(b.pull().is_none(), "an aborted task has no status");
    assert_eq!(managed(&mut a), Some(0));
    for each in [&mut a, &mut b] {
        assert_eq!(each.test_unit_ready().sense, Some((6, 0x29, 0x03)));
        assert!(each.test_unit_ready().good());
    }
}

#[test]
fn a_cleared_task_set_is_told_to_those_who_lost_tasks() {
    // Fails if CLEAR TASK SET leaves another session's task alive, or tells a session that lost nothing.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut a = Initiator::logged_in(&portal, 1);
    let mut b = Initiator::logged_in(&portal, 2);
    let mut c = Initiator::logged_in(&portal, 3);
    let (cdb, len) = cdb10(0x2a, 0, 512);
    let _cleared = b.command(cdb, 0x20, len, &[1; 512]);
    a.task_management(4, TAG_NONE);
    b.wire.settle();
    c.wire.settle();
    held.release();
    assert!(b.pull().is_none());
    assert_eq!(managed(&mut a), Some(0));
    assert_eq!(b.test_unit_ready().sense, Some((6, 0x2f, 0x00)));
    assert!(c.test_unit_ready().good());
    assert!(a.test_unit_ready().good());
}

#[test]
fn a_cold_reset_ends_all_sessions() {
    // Fails if a session lives on, or the one that asked gets no answer.
    let portal = open_portal();
    let mut a = Initiator::logged_in(&portal, 1);
    let mut b = Initiator::logged_in(&portal, 2);
    a.task_management(7, TAG_NONE);
    b.wire.settle();
    assert_eq!(managed(&mut a), Some(0));
    assert_eq!(a.wire.ended, Some(Disconnect::ColdReset));
    b.wire.settle();
    assert_eq!(b.wire.ended, Some(Disconnect::ColdReset));
}

#[test]
fn a_session_is_replaced_by_a_new_login_of_the_same_port_after_its_tasks() {
    // Fails if the old session stays, or the new one is let in while a write of the old can still land.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut old = Initiator::logged_in(&portal, 1);
    let (cdb, len) = cdb10(0x2a, 0, 512);
    old.command(cdb, 0x20, len, &[1; 512]);
    let mut new = Initiator::local(&portal);
    new.isid = old.isid;
    new.login_pdu(0x87, &keys(INITIATOR, Some(TARGET)));
    old.wire.settle();
    assert_eq!(old.wire.ended, Some(Disconnect::Reinstated));
    assert!(new.login_answer().is_none());
    assert_eq!(portal.session_count(), 2);
    held.release();
    drop(old);
    assert_eq!(new.login_answer().unwrap().1, (0, 0));
    assert_eq!(portal.session_count(), 1);
    let mut other = Initiator::logged_in(&portal, 9);
    assert!(new.test_unit_ready().good());
    assert!(other.test_unit_ready().good());
    assert_eq!(portal.session_count(), 2);
}

#[test]
fn there_are_never_more_sessions_than_allowed() {
    // Fails if a session more is let in, or a place is not given back.
    let portal = open_portal();
    let mut sessions: Vec<_> = (0..16).map(|n| Initiator::logged_in(&portal, n)).collect();
    let mut more = Initiator::local(&portal);
    more.isid[5] = 99;
    assert_eq!(more.login_with(keys(INITIATOR, Some(TARGET)), &[]), (3, 2));
    sessions.pop();
    let mut again = Initiator::logged_in(&portal, 99);
    assert!(again.test_unit_ready().good());
}

#[test]
fn a_silent_peer_is_pinged_and_then_dropped() {
    // Fails if nobody is pinged, an answer does not count, or a dead peer keeps its session.
    let portal = open_portal();
    let times = Times {
        login: Duration::from_secs(5),
        ping_after: Duration::from_secs(10),
        ping_answer: Duration::from_secs(20),
    };
    let mut initiator = Initiator::over(Local::with_times(&portal, times));
    let start = initiator.wire.start;
    assert_eq!(initiator.wire.conn.deadline(), start + times.login);
    initiator.login_plain();
    let at = start + Duration::from_secs(11);
    assert_eq!(initiator.wire.conn.tick(at), Ok(()));
    let ping = initiator.pull().unwrap();
    assert_eq!(ping.opcode(), opcode::NOP_IN);
    assert_ne!(
        trellis_iscsi::pdu::header::NopIn::from_wire(&ping.header)
            .ttt
            .get(),
        TAG_NONE
    );
    initiator.wire.conn.heard(at);
    assert_eq!(
        initiator.wire.conn.tick(at + Duration::from_secs(9)),
        Ok(())
    );
    assert!(initiator.pull().is_none(), "it has been heard");
    assert_eq!(
        initiator.wire.conn.tick(at + Duration::from_secs(10)),
        Ok(())
    );
    assert!(initiator.pull().is_some());
    assert_eq!(
        initiator.wire.conn.tick(at + Duration::from_secs(31)),
        Err(Disconnect::Silent)
    );
    let mut slow = Local::with_times(&portal, times);
    assert_eq!(
        slow.conn.tick(slow.start + times.login),
        Err(Disconnect::LoginTimeout)
    );
}

#[test]
fn a_nop_is_echoed_whether_or_not_it_is_immediate() {
    // Fails if a NOP-Out that takes a command number is lost, unanswered, or does not move the window.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    for immediate in [true, false, true, false] {
        initiator.nop(immediate, b"are you there?");
        let pdu = initiator.pull().unwrap();
        assert_eq!(pdu.opcode(), opcode::NOP_IN);
        assert_eq!(&pdu.data[..], b"are you there?");
    }
    assert!(initiator.test_unit_ready().good());
}

#[test]
fn what_is_not_supported_is_rejected_and_the_session_goes_on() {
    // Fails if a SNACK or an unknown opcode ends the session or goes unanswered.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    for (code, reason) in [(opcode::SNACK, 3), (0x1c, 5)] {
        let mut header = [0; 48];
        header[0] = code;
        header[1] = 0x80;
        initiator.push(header, &[]);
        let pdu = initiator.pull().unwrap();
        assert_eq!(pdu.opcode(), opcode::REJECT);
        assert_eq!(Reject::from_wire(&pdu.header).reason, reason);
        assert_eq!(pdu.data.len(), 48);
    }
    assert!(initiator.test_unit_ready().good());
}

#[test]
fn an_ordered_command_waits_for_those_before_and_holds_those_after() {
    // Fails if an ordered command overtakes a write that still runs, or is overtaken.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut initiator = Initiator::logged_in(&portal, 1);
    let (write, len) = cdb10(0x2a, 0, 512);
    let (read, _) = cdb10(0x28, 0, 512);
    let first = initiator.command(write, 0x20, len, &[1; 512]);
    let ordered = initiator.command(read, 0x40 | 2, len, &[]);
    let after = initiator.command(read, 0x40, len, &[]);
    assert!(initiator.pull().is_none());
    held.release();
    for itt in [first, ordered, after] {
        assert!(initiator.reply(itt, &[]).unwrap().good());
    }
}

#[test]
fn a_number_without_a_unit_says_so() {
    // Fails if a command for a unit that is not there runs on another, or INQUIRY fails there.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    let mut send = |cdb: [u8; 16]| -> Reply {
        let itt = initiator.tag();
        let header = trellis_iscsi::pdu::header::ScsiCommand {
            opcode: opcode::SCSI_COMMAND,
            flags: 0xc0,
            lun: [0, 7, 0, 0, 0, 0, 0, 0],
            itt: itt.into(),
            expected_len: 96.into(),
            cmd_sn: initiator.cmd_sn.into(),
            cdb,
            ..Default::default()
        };
        initiator.cmd_sn += 1;
        initiator.push(zerocopy::transmute!(header), &[]);
        initiator.reply(itt, &[]).unwrap()
    };
    assert_eq!(send([0; 16]).sense, Some((5, 0x25, 0)));
    let mut inquiry = [0; 16];
    inquiry[0] = 0x12;
    inquiry[4] = 96;
    assert_eq!(send(inquiry).data[0], 0x7f);
    let mut luns = [0; 16];
    luns[0] = 0xa0;
    luns[9] = 96;
    assert_eq!(send(luns).data.len(), 16);
}

#[test]
fn a_reservation_keeps_others_out_until_it_is_released() {
    // Fails if another nexus can write in spite of RESERVE(6), or the reservation outlives its nexus.
    let portal = open_portal();
    let mut a = Initiator::logged_in(&portal, 1);
    let mut b = Initiator::logged_in(&portal, 2);
    let mut reserve = [0; 16];
    reserve[0] = 0x16;
    assert!(a.run(reserve, 0, 0, &[]).good());
    assert_eq!(b.write(0, &[1; 512]).status, 0x18);
    assert_eq!(b.test_unit_ready().status, 0x18);
    assert!(a.write(0, &[1; 512]).good());
    drop(a);
    assert!(b.write(0, &[1; 512]).good());
}
