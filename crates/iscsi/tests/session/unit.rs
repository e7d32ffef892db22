//! What a unit says to each nexus: growth, write protection, reservations.

use super::*;

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
