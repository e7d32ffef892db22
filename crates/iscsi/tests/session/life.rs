//! The life of a session: replaced, counted, pinged, refused.

use super::*;

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
