//! Task management.

use super::*;

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
